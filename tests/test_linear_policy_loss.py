"""`linear_policy_loss` on CPU tensors: what a loss gets, what is returned, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit import ContractError
from isobit.frame.op import OPS
from isobit.ops.linear_policy_loss import reference
from isobit.ops.linear_policy_loss.batch import Batch
from isobit.ops.linear_policy_loss.op import linear_policy_loss
from policy_loss_calls import BF16, F16, F32, F64, NAN, D, Loss, V, bytes_for, make, on_all_rows, weighed


@pytest.fixture(autouse=True)
def the_same_numbers_every_time() -> None:
    torch.manual_seed(0)


# What comes back


@pytest.mark.parametrize("rows", [1, 7, 16, 1000])
@pytest.mark.parametrize("lead", [(40,), (8, 5)])
def test_loss_and_gradients_are_those_of_all_rows(lead: tuple[int, ...], rows: int) -> None:
    tensors = make(*lead)
    inputs = {"weights": torch.randn(lead, generator=torch.Generator().manual_seed(1))}
    loss, stats = linear_policy_loss(
        *tensors, loss_fn=weighed, inputs=inputs, workspace_bytes=bytes_for(rows)
    )
    expected, gradients = on_all_rows(weighed, tensors, inputs)
    torch.testing.assert_close(loss, expected)
    assert stats == {}
    for ours, theirs in zip(torch.autograd.grad(loss, tensors[:2]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [BF16, F16, F64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    tensors = make(30, dtype=dtype)
    inputs = {"weights": torch.randn(30, dtype=F64 if dtype == F64 else F32)}
    loss, _ = linear_policy_loss(
        *tensors, loss_fn=weighed, inputs=inputs, workspace_bytes=bytes_for(7, dtype)
    )
    expected, gradients = on_all_rows(weighed, tensors, inputs)
    assert loss.dtype == expected.dtype
    for ours, theirs in zip(torch.autograd.grad(loss, tensors[:2]), gradients, strict=True):
        near = {"rtol": 1e-12, "atol": 1e-12} if dtype == F64 else {"rtol": 1e-2, "atol": 1e-5}
        torch.testing.assert_close(ours, theirs, **near)


def test_a_loss_of_everything_is_right() -> None:
    """A ratio, a clip, an entropy bonus, a bias, temperatures, a mask: against the formula in fp64."""
    gen = torch.Generator().manual_seed(3)
    hidden, weight, ids = make(6, 9)
    bias = torch.randn(V, generator=gen).requires_grad_()
    old, advantages = torch.randn(6, 9, generator=gen) - 4, torch.randn(6, generator=gen)
    mask = torch.rand(6, 9, generator=gen) < 0.7
    temperature = 0.5 + torch.rand(6, 9, generator=gen)

    def loss_fn(logp: Tensor, entropy: Tensor | None, old_logp: Tensor, advantages: Tensor, mask: Tensor,
                tokens: Tensor) -> Tensor:  # fmt: skip
        assert entropy is not None
        ratio, gain = (logp - old_logp).exp(), advantages[:, None].to(logp.dtype)
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.5, 2.0) * gain)
        return -((surrogate + 0.1 * entropy) * mask).sum() / tokens

    inputs = {"old_logp": old, "advantages": advantages, "mask": mask, "tokens": mask.sum()}
    options = {"mask": mask, "temperature": temperature}
    leaves = [hidden, weight, bias]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = reference.formula(
        wide[0], wide[1], ids, loss_fn, inputs, bias=wide[2], mask=mask, temperature=temperature.double(),
        entropy=True,
    )  # fmt: skip
    for rows in (1, 13, 1000):
        loss, _ = linear_policy_loss(
            hidden, weight, ids, loss_fn=loss_fn, inputs=inputs, bias=bias, entropy=True,
            workspace_bytes=bytes_for(rows), **options,
        )  # fmt: skip
        torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)
        result = torch.autograd.grad(loss, leaves)
        for ours, theirs in zip(result, torch.autograd.grad(exact, wide, retain_graph=True), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


def test_sums_of_all_chunks_come_back_detached() -> None:
    hidden, weight, ids = make(10, 4)

    def loss_fn(logp: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        return logp.sum(), {"tokens": logp.numel(), "by_step": logp.sum(0), "logp": logp.sum()}

    loss, stats = linear_policy_loss(hidden, weight, ids, loss_fn=loss_fn, workspace_bytes=bytes_for(12))
    assert stats["tokens"] == 40 and stats["by_step"].shape == (4,)
    assert not stats["logp"].requires_grad and stats["logp"] == loss.detach()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_shares_and_sums_are_added_in_fp32_at_least(dtype: torch.dtype, gradients: bool) -> None:
    """2049 needs more bits than bf16 and fp16 have: 2048 + 1 would be 2048 again."""
    tensors = make(17)

    def loss_fn(logp: Tensor, entropy: Tensor | None, which: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        share = (0 * logp).sum().to(dtype) + (2048 if which[0] == 0 else 1)
        return share, {"half": share, "whole": torch.ones((), dtype=torch.int16)}

    inputs = {"which": torch.arange(17)}
    options = {"inputs": inputs, "workspace_bytes": bytes_for(1), "validate": False}
    with torch.set_grad_enabled(gradients):
        loss, stats = linear_policy_loss(*tensors, loss_fn=loss_fn, **options)
    wide = F64 if dtype == F64 else F32
    assert loss.dtype == stats["half"].dtype == wide and loss == stats["half"] == 2048 + 16
    assert stats["whole"].dtype == torch.int16 and stats["whole"] == 17
    if gradients:
        loss.backward()
        assert tensors[1].grad is not None and not tensors[1].grad.any()


def test_log_probabilities_are_those_of_linear_logp() -> None:
    hidden, weight, ids = make(30)
    seen: list[Tensor] = []

    def loss_fn(logp: Tensor, entropy: Tensor | None) -> Tensor:
        assert entropy is not None
        seen.append(torch.stack((logp.detach(), entropy.detach())))
        return logp.sum()

    options = {"workspace_bytes": bytes_for(8), "validate": False}
    linear_policy_loss(hidden, weight, ids, loss_fn=loss_fn, entropy=True, **options)
    assert [s.shape[1] for s in seen] == [8, 8, 8, 6]
    expected = isobit.linear_logp(hidden, weight, ids, return_entropy=True)
    torch.testing.assert_close(torch.cat(seen, 1), torch.stack(expected).detach(), rtol=1e-6, atol=1e-6)


# What a loss is given


def test_inputs_are_cut_as_rows_as_sequences_or_not_at_all() -> None:
    tensors, seen = make(5, 4), list[dict[str, Any]]()
    by_rows, by_sequences = torch.arange(20.0).view(5, 4), torch.arange(5)
    something = object()

    def loss_fn(logp: Tensor, entropy: Tensor | None, **inputs: Any) -> Tensor:
        assert entropy is None
        seen.append(inputs)
        return logp.sum()

    inputs = {"rows": by_rows, "sequences": by_sequences, "number": 3, "scalar": torch.tensor(2.0),
              "none": None, "word": "x", "thing": something, "list": [1, 2]}  # fmt: skip
    options = {"workspace_bytes": bytes_for(9), "validate": False}
    linear_policy_loss(*tensors, loss_fn=loss_fn, inputs=inputs, **options)
    assert torch.equal(torch.cat([s["rows"] for s in seen]), by_rows)
    assert [s["sequences"].tolist() for s in seen] == [[0, 1], [2, 3], [4]]
    for name in ("number", "scalar", "none", "word", "thing", "list"):
        assert all(s[name] is inputs[name] for s in seen)


@pytest.mark.parametrize(
    "form",
    [
        list, tuple, torch.tensor, lambda bounds: torch.tensor(bounds).int(), numpy.array,
        lambda bounds: [*numpy.array(bounds)],
    ],
)  # fmt: skip
def test_packed_sequences_stay_whole(form: Callable[[list[int]], Any]) -> None:
    tensors, seen, bounds = make(30), list[tuple[int, list[int]]](), form([0, 3, 3, 11, 20, 30])

    def loss_fn(logp: Tensor, entropy: Tensor | None, ids: Tensor) -> Tensor:
        seen.append((len(logp), ids.tolist()))
        return logp.sum()

    options = {"workspace_bytes": bytes_for(12), "validate": False, "cu_seqlens": bounds}
    loss, _ = linear_policy_loss(*tensors, loss_fn=loss_fn, inputs={"ids": torch.arange(5)}, **options)
    assert seen == [(11, [0, 2]), (9, [3]), (10, [4])]  # the second has no rows
    loss.backward()


@pytest.mark.parametrize("rows", [1, 12, 1000])
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "dual_clip_ppo", "gspo", "cispo"])
def test_losses_of_isobit_take_one_advantage_per_packed_sequence(name: str, rows: int) -> None:
    """Some sequences have no rows, and a chunk may have as many sequences as rows."""
    lengths = torch.tensor([0, 1, 2, 0, 0, 8, 9, 0, 10, 0])
    tensors, gen = make(30), torch.Generator().manual_seed(4)
    each = {"advantages": torch.randn(10, generator=gen), "rollout_weights": torch.rand(10, generator=gen)}
    inputs = {"old_logp": torch.randn(30, generator=gen) - 3, "normalizer": 6}
    inputs["sequence_ids"] = torch.arange(10).repeat_interleave(lengths)
    loss_fn, bounds = getattr(isobit.losses, name), [0, *lengths.cumsum(0).tolist()]
    loss, _ = linear_policy_loss(
        *tensors, loss_fn=loss_fn, inputs=inputs | each, cu_seqlens=bounds, workspace_bytes=bytes_for(rows)
    )
    repeated = {name: values.repeat_interleave(lengths) for name, values in each.items()}
    expected, gradients = on_all_rows(loss_fn, tensors, inputs | repeated)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, tensors[:2]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_sequence_that_has_no_room_is_computed_all_the_same() -> None:
    tensors = make(40)
    inputs = {"weights": torch.randn(40)}
    options = {"cu_seqlens": [0, 5, 33, 40], "workspace_bytes": bytes_for(8)}
    loss, _ = linear_policy_loss(*tensors, loss_fn=weighed, inputs=inputs, **options)
    expected, gradients = on_all_rows(weighed, tensors, inputs)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(torch.autograd.grad(loss, tensors[:2]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_as_many_sequences_as_rows_are_told_apart_or_refused() -> None:
    hidden, weight, ids = make(3)
    each = {"weights": torch.ones(3)}
    linear_policy_loss(hidden, weight, ids, loss_fn=weighed, inputs=each, cu_seqlens=[0, 1, 2, 3])
    with pytest.raises(
        ContractError, match=r"inputs: \[3\] fp32\): 'weights' could be per row or per sequence"
    ):
        linear_policy_loss(hidden, weight, ids, loss_fn=weighed, inputs=each, cu_seqlens=[0, 0, 1, 3])


# Chunks


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_chunks_hold_whole_sequences(lengths: list[int], capacity: int) -> None:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    batch = Batch.packed(bounds)
    bounds, lengths = list(batch.bounds or ()), [length for length in lengths if length]
    assert [b - a for a, b in pairwise(bounds)] == lengths
    chunks = batch.chunks(capacity)
    assert [c.first for c in chunks] == [0, *(c.end for c in chunks[:-1])][: len(chunks)]
    assert (chunks[-1].end if chunks else 0) == bounds[-1]
    for chunk in chunks:
        assert (chunk.first, chunk.end) == (bounds[chunk.begin], bounds[chunk.stop]) and chunk.rows > 0
        longest = max(lengths[chunk.begin : chunk.stop])
        assert chunk.fits == (chunk.rows <= capacity)
        assert chunk.fits or chunk.rows == longest > capacity  # alone
        halves = batch.halves(chunk)
        assert not halves or (halves[0].end, halves[0].stop) == (halves[1].first, halves[1].begin)
        assert not halves or all(h.rows > 0 for h in halves)
    everything = batch.chunks(None)
    assert [(c.first, c.end, c.fits) for c in everything] == [(0, bounds[-1], False)][: len(everything)]


@pytest.mark.parametrize("N", [1, 2, 7])
def test_halves_of_flat_rows(N: int) -> None:
    batch = Batch((N,), None)
    (chunk,) = batch.chunks(10)
    assert [half.rows for half in batch.halves(chunk)] == ([N // 2, N - N // 2] if N > 1 else [])


@pytest.mark.parametrize(("N", "capacity", "ends"), [
    (10, 4, [4, 8, 10]), (2000, 1100, [1024, 2000]), (1100, 1100, [1100]), (5, 600, [5]), (0, 4, []),
    (5500, 5300, [3072, 5500]), (28672, 5376, [5120, 10240, 15360, 20480, 25600, 28672]),
])  # fmt: skip
def test_flat_rows_are_cut_into_about_equal_parts_of_whole_segments(
    N: int, capacity: int, ends: list[int]
) -> None:
    assert [chunk.end for chunk in Batch((N,), None).chunks(capacity)] == ends


# Gradients


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("factor", [0.0, 1.0, 2.0, -0.3, 1e-4, NAN])
def test_gradients_are_multiplied_in_fp32_and_rounded_once(factor: float, dtype: torch.dtype) -> None:
    hidden, weight, ids = make(20, dtype=dtype)
    inputs = {"weights": torch.randn(20)}
    options = {"loss_fn": weighed, "inputs": inputs, "workspace_bytes": bytes_for(6)}
    loss, _ = linear_policy_loss(hidden, weight, ids, **options)
    result = torch.autograd.grad(loss, (hidden, weight), torch.tensor(factor))
    wide = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    exact, _ = linear_policy_loss(*wide, ids, **options)
    for ours, theirs in zip(result, torch.autograd.grad(exact, wide), strict=True):
        assert torch.equal((theirs * factor).to(dtype).nan_to_num(7.0), ours.nan_to_num(7.0))


def test_a_graph_that_is_retained_can_be_walked_again() -> None:
    hidden, weight, ids = make(20)
    loss, _ = linear_policy_loss(hidden, weight, ids, loss_fn=lambda logp, entropy: logp.sum())
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (hidden, weight))


def test_gradients_accumulate_over_calls() -> None:
    hidden, weight, ids = make(20)
    whole, _ = linear_policy_loss(hidden, weight, ids, loss_fn=lambda logp, entropy: logp.sum())
    expected = torch.autograd.grad(whole, (hidden, weight))
    for part in (slice(0, 9), slice(9, 20)):
        loss, _ = linear_policy_loss(
            hidden[part], weight, ids[part], loss_fn=lambda logp, entropy: logp.sum()
        )
        loss.backward()
    torch.testing.assert_close(hidden.grad, expected[0])
    torch.testing.assert_close(weight.grad, expected[1])


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_only_gradients_that_are_wanted_are_computed(
    wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, ids = make(20)
    tensors = {"hidden": hidden.detach(), "weight": weight.detach(), "bias": torch.zeros(V)}
    for name in wanted:
        tensors[name].requires_grad_()
    op, seen = OPS["linear_logp_chunk_bwd"], list[set[str]]()
    plain = op.backend_named("reference")

    def spy(**args: Any) -> Any:
        seen.append({name for name in tensors if args[f"d{name}"] is not None})
        return plain.run(**args)

    monkeypatch.setattr(op, "backends", [replace(plain, run=spy)])
    loss, _ = linear_policy_loss(**tensors, token_ids=ids, loss_fn=lambda logp, entropy: logp.sum())
    loss.backward()
    assert seen == [set(wanted)]
    assert {name for name, t in tensors.items() if t.grad is not None} == set(wanted)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_a_forward_alone(
    context: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make(30)
    loss_fn: Loss = lambda logp, entropy: (logp.square().sum(), {"n": len(logp)})  # noqa: E731
    with_gradients, _ = linear_policy_loss(*tensors, loss_fn=loss_fn, workspace_bytes=bytes_for(8))
    for name in ("linear_logp_chunk", "linear_logp_chunk_bwd", "linear_logp_bwd"):
        monkeypatch.setattr(OPS[name], "backends", [])
    with context():
        loss, stats = linear_policy_loss(*tensors, loss_fn=loss_fn, workspace_bytes=bytes_for(8))
    assert not loss.requires_grad and torch.equal(loss, with_gradients.detach()) and stats == {"n": 30}
    detached = (tensors[0].detach(), tensors[1].detach(), tensors[2])
    assert not linear_policy_loss(*detached, loss_fn=loss_fn)[0].requires_grad


# Few rows, odd rows


@pytest.mark.parametrize("lead", [(0,), (0, 4), (3, 0)])
def test_without_rows_the_loss_is_zero(lead: tuple[int, ...]) -> None:
    hidden, weight, ids = make(*lead)
    inputs = {"rows": torch.zeros(lead), "sequences": torch.zeros(lead[0])}
    loss_fn: Loss = lambda logp, entropy, rows, sequences: logp.sum()  # noqa: E731
    loss, stats = linear_policy_loss(hidden, weight, ids, loss_fn=loss_fn, inputs=inputs)
    loss.backward()
    assert loss == 0 and stats == {} and weight.grad is not None and not weight.grad.any()
    assert hidden.grad is not None and hidden.grad.shape == (*lead, D)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "dual_clip_ppo", "gspo", "cispo"])
@pytest.mark.parametrize(("lead", "bounds"), [((0,), [0]), ((0, 4), None), ((3, 0), None)])
def test_without_rows_losses_of_isobit_have_their_sums(
    name: str, lead: tuple[int, ...], bounds: list[int] | None
) -> None:
    tensors = make(*lead)
    inputs = {"advantages": torch.zeros(lead[0]), "old_logp": torch.zeros(lead), "normalizer": 0}
    if bounds is not None and name in ("grpo", "gspo"):
        inputs["sequence_ids"] = torch.zeros(lead, dtype=torch.int64)
    options = {"loss_fn": getattr(isobit.losses, name), "inputs": inputs, "cu_seqlens": bounds}
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            loss, stats = linear_policy_loss(*tensors, **options, entropy=True)
        assert loss == 0 and loss.requires_grad == (context is torch.enable_grad)
        assert {"tokens", "ratio", "entropy", "policy_loss"} < stats.keys() and not any(stats.values())


def test_a_loss_is_refused_without_rows_too() -> None:
    with pytest.raises(ContractError, match="must return a scalar tensor"):
        linear_policy_loss(*make(0), loss_fn=lambda logp, entropy: None)
    with pytest.raises(ContractError, match="raised IndexError on rows 0 to 0 of 0"):
        linear_policy_loss(*make(0), loss_fn=lambda logp, entropy: logp[0])


def test_one_row() -> None:
    tensors = make(1)
    loss, _ = linear_policy_loss(*tensors, loss_fn=lambda logp, entropy: logp.mean())  # has no halves
    loss.backward()
    assert tensors[0].grad is not None and bool(tensors[0].grad.any())


def test_rows_that_do_not_count_reach_nothing() -> None:
    hidden, weight, ids = make(20)
    mask = torch.arange(20) % 3 != 0
    inputs = {"weights": torch.randn(20)}
    options = {"loss_fn": weighed, "inputs": inputs, "workspace_bytes": bytes_for(6), "mask": mask}
    loss, _ = linear_policy_loss(hidden, weight, ids, **options)
    expected = torch.autograd.grad(loss, (hidden, weight))
    bad = hidden.detach().clone()
    bad[~mask] = NAN
    bad.requires_grad_()
    again, _ = linear_policy_loss(bad, weight, torch.where(mask, ids, 10**9), **options)
    result = torch.autograd.grad(again, (bad, weight))
    assert torch.equal(again, loss) and all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert not result[0][~mask].any()


@pytest.mark.parametrize("options", [{"mask": torch.zeros(20, dtype=torch.bool)}, {"ignore_index": 7}])
def test_all_rows_may_not_count(options: dict[str, Any]) -> None:
    hidden, weight, ids = make(20)
    ids = torch.full_like(ids, 7)
    loss, _ = linear_policy_loss(
        hidden, weight, ids, loss_fn=lambda logp, entropy: logp.sum(), workspace_bytes=bytes_for(6), **options
    )
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()  # type: ignore[union-attr]


def test_views_with_holes() -> None:
    hidden, weight, ids = make(6, 9)
    wide = torch.full((6, 10, D), NAN)
    wide[:, :-1] = hidden.detach()
    view = wide[:, :-1].requires_grad_()
    strided = torch.stack((ids, ids), -1)[..., 0]
    inputs = {"weights": torch.randn(9, 6).t()}
    result = [
        torch.autograd.grad(linear_policy_loss(
            h, weight, i, loss_fn=weighed, inputs=inputs, workspace_bytes=bytes_for(20))[0], (h, weight))
        for h, i in ((hidden, ids), (view, strided))
    ]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*result, strict=True))


def test_autocast_is_for_the_loss_alone() -> None:
    hidden, weight, ids = make(12)
    plain, _ = linear_policy_loss(hidden, weight, ids, loss_fn=lambda logp, entropy: logp.sum())
    seen = []

    def loss_fn(logp: Tensor, entropy: Tensor | None) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return logp.sum()

    with torch.autocast("cpu", dtype=BF16):
        inside, _ = linear_policy_loss(hidden, weight, ids, loss_fn=loss_fn)
        gradients = torch.autograd.grad(inside, (hidden, weight))
    assert torch.equal(inside, plain) and all(seen)
    for ours, theirs in zip(gradients, torch.autograd.grad(plain, (hidden, weight)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "dual_clip_ppo", "gspo", "cispo"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_losses_of_isobit(name: str, entropy_coef: float) -> None:
    tensors, gen = make(6, 9), torch.Generator().manual_seed(4)
    mask = torch.rand(6, 9, generator=gen) < 0.8
    old_logp = isobit.linear_logp(*tensors, mask=mask).detach() + 0.3 * torch.randn(6, 9, generator=gen)
    inputs = {"old_logp": old_logp, "advantages": torch.randn(6, generator=gen), "mask": mask}
    inputs |= {"normalizer": mask.sum(), "entropy_coef": entropy_coef}
    loss_fn, entropy = getattr(isobit.losses, name), entropy_coef > 0
    loss, stats = linear_policy_loss(
        *tensors, loss_fn=loss_fn, inputs=inputs, mask=mask, entropy=entropy, workspace_bytes=bytes_for(20)
    )
    expected, gradients = on_all_rows(loss_fn, tensors, inputs, entropy, mask=mask)
    torch.testing.assert_close(loss, expected)
    assert stats["tokens"] == mask.sum()
    for ours, theirs in zip(torch.autograd.grad(loss, tensors[:2]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


# In Triton's interpreter

CHILD = """
import torch, isobit
from policy_loss_calls import make, weighed
hidden, weight, ids = make(6, 4, dtype=torch.bfloat16)
bias, mask = torch.randn(50).requires_grad_(), torch.rand(6, 4) < 0.7
inputs, leaves = {"weights": torch.randn(6, 4)}, (hidden, weight, bias)
for entropy in (False, True):
    loss_fn = weighed if not entropy else lambda logp, entropy, weights: (weights * (logp + entropy)).sum()
    options = {"bias": bias, "mask": mask, "temperature": 0.7, "backend": "triton"}
    ours, _ = isobit.linear_policy_loss(
        hidden, weight, ids, loss_fn=loss_fn, inputs=inputs, entropy=entropy, **options)
    logp, found = isobit.linear_logp(hidden, weight, ids, return_entropy=True, **options)
    theirs = loss_fn(logp, found if entropy else None, **inputs)
    assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad(loss, leaves, torch.tensor(1.0)) for loss in (ours, theirs)]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*gradients)), entropy
"""


@pytest.mark.compat
def test_triton_has_the_bits_of_linear_logp() -> None:
    in_interpreter(CHILD)
