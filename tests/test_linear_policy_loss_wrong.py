"""Losses that `linear_policy_loss` refuses, and calls that violate its contract: the errors, and when they
are raised."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from isobit import ContractError
from isobit.ops.linear_policy_loss.op import linear_policy_loss
from policy_loss_calls import D, Loss, V, bytes_for, make


def test_a_loss_that_raises_says_where_and_leaves_nothing() -> None:
    hidden, weight, ids = make(24)

    def loss_fn(logp: Tensor, entropy: Tensor | None, which: Tensor) -> Tensor:
        if which[0] == 8:
            raise KeyError("reward")
        return logp.sum()

    options = {"loss_fn": loss_fn, "inputs": {"which": torch.arange(24)}, "workspace_bytes": bytes_for(8)}
    before = [t.detach().clone() for t in (hidden, weight)]
    with pytest.raises(ContractError, match="raised KeyError on rows 8 to 16 of 24: 'reward'") as caught:
        linear_policy_loss(hidden, weight, ids, **options)
    assert isinstance(caught.value.__cause__, KeyError)
    assert hidden.grad is None and weight.grad is None
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight), strict=True))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_errors_that_are_not_about_the_loss_pass(error: BaseException) -> None:
    def loss_fn(logp: Tensor, entropy: Tensor | None) -> Tensor:
        raise error

    with pytest.raises(type(error)):
        linear_policy_loss(*make(4), loss_fn=loss_fn)


def test_a_mean_is_detected() -> None:
    tensors = make(20)
    means: dict[str, Loss] = {
        "mean": lambda logp, entropy: logp.mean(),
        "divided": lambda logp, entropy: logp.sum() / len(logp),
        "normalised": lambda logp, entropy: ((logp - logp.mean()) ** 2).sum(),
        "with an offset": lambda logp, entropy: logp.sum() + 1e3,
    }
    for loss_fn in means.values():
        with pytest.raises(ContractError, match=r"loss_fn: .*not the sum of the shares of two parts"):
            linear_policy_loss(*tensors, loss_fn=loss_fn)
    linear_policy_loss(*tensors, loss_fn=means["mean"], validate=False)


@pytest.mark.parametrize(("lead", "rows", "bounds"), [
    ((4, 6), 6, None),  # one line per chunk
    ((24,), 1, None),  # one row per chunk
    ((24,), 6, [0, 2, 2, 20, 24]),  # one sequence per chunk, one of them too long to fit
])  # fmt: skip
@pytest.mark.parametrize("entropy", [False, True])
def test_a_mean_is_detected_where_every_chunk_is_a_single_unit(
    lead: tuple[int, ...], rows: int, bounds: list[int] | None, entropy: bool
) -> None:
    tensors = make(*lead)
    options = {"workspace_bytes": bytes_for(rows), "cu_seqlens": bounds, "entropy": entropy}

    def values(logp: Tensor, entropy: Tensor | None) -> Tensor:
        return logp if entropy is None else logp + entropy

    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(ContractError, match="not the sum of the shares of two parts"):
            linear_policy_loss(*tensors, loss_fn=lambda *of: values(*of).mean(), **options)
        with context():
            linear_policy_loss(*tensors, loss_fn=lambda *of: values(*of).sum(), **options)
    assert all(t.grad is None for t in tensors[:2])


def test_two_chunks_that_are_single_units_are_run_joined() -> None:
    calls = []

    def loss_fn(logp: Tensor, entropy: Tensor | None) -> Tensor:
        calls.append(tuple(logp.shape))
        return logp.sum()

    tensors = make(4, 6)
    linear_policy_loss(*tensors, loss_fn=loss_fn, workspace_bytes=bytes_for(6))
    assert calls == [(1, 6), (1, 6), (2, 6), (1, 6), (1, 6)]
    calls.clear()
    with torch.no_grad():  # gradients are needed to judge, so both are run again
        linear_policy_loss(*tensors, loss_fn=loss_fn, workspace_bytes=bytes_for(6))
    assert calls == [(1, 6), (1, 6), (2, 6), (1, 6), (1, 6), (1, 6), (1, 6)]


def test_terms_that_cancel_are_no_mean() -> None:
    """As the advantages of a group do, at ratios of 1."""
    hidden, weight, ids = make(8, 50)
    gains = torch.tensor([1.0, -1.0] * 4)

    def loss_fn(logp: Tensor, entropy: Tensor | None, gains: Tensor) -> Tensor:
        return -((logp - logp.detach()).exp() * gains[:, None]).sum() / 7.0

    loss, _ = linear_policy_loss(hidden, weight, ids, loss_fn=loss_fn, inputs={"gains": gains})
    assert loss.abs() < 1e-5
    with torch.no_grad():
        linear_policy_loss(hidden, weight, ids, loss_fn=loss_fn, inputs={"gains": gains})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_that_is_rounded_to_16_bits_is_no_mean(dtype: torch.dtype) -> None:
    for seed in range(8):
        tensors = make(20, seed=seed)
        linear_policy_loss(*tensors, loss_fn=lambda logp, entropy: logp.sum().to(dtype))
        with pytest.raises(ContractError, match="not the sum of the shares of two parts"):
            linear_policy_loss(*tensors, loss_fn=lambda logp, entropy: logp.mean().to(dtype))


def test_the_first_chunk_is_also_run_as_two_halves() -> None:
    calls = []

    def loss_fn(logp: Tensor, entropy: Tensor | None) -> Tensor:
        calls.append(logp.numel())
        return logp.sum()

    for validate, expected in ((None, [12, 6, 6]), (False, [12]), (True, [12, 6, 6])):
        calls.clear()
        linear_policy_loss(*make(12), loss_fn=loss_fn, validate=validate)
        assert calls == expected


def test_a_loss_that_depends_on_other_parameters_is_refused() -> None:
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(ContractError, match="depends on another tensor that requires a gradient"):
        linear_policy_loss(*make(4), loss_fn=lambda logp, entropy: (logp * scale).sum())
    linear_policy_loss(*make(4), loss_fn=lambda logp, entropy: (logp * scale.detach()).sum())


def test_sums_must_be_the_same_for_all_chunks() -> None:
    def loss_fn(logp: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        return logp.sum(), {"last" if len(logp) < 8 else "first": 1}

    with pytest.raises(
        ContractError, match=r"the same sums for all chunks; got \['first'\], then \['last'\]"
    ):
        linear_policy_loss(*make(15), loss_fn=loss_fn, workspace_bytes=bytes_for(8), validate=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.tensor(1)}, r"token_ids: \[\] int64\): leading shape"),
        ({"cu_seqlens": [0, 20], "hidden": torch.zeros(4, 5, D), "token_ids": torch.zeros(4, 5).long()},
         "cu_seqlens: .*is for packed rows"),
        ({"token_ids": torch.full((20,), V)}, rf"token_ids: \[20\] int64\): id {V} at \[0\] is outside"),
        ({"temperature": torch.zeros(20)}, "temperature: .*is not a positive number"),
        (
            {"backend": "bogus"},
            "unknown backend; known: hopper, triton, hopper-8x4, triton-8x4, model-8x4, reference",
        ),
        ({"numerics": "chain16"}, "unknown numerics class"),
        ({"temperature": torch.ones(20, requires_grad=True)}, "temperature: .*no gradient goes to it"),
        ({"loss_fn": None}, r"loss_fn: None\): is required"),
        ({"inputs": {3: 4}}, "inputs: .*must be a dict"),
        ({"cu_seqlens": [0, 2**70]}, "cu_seqlens: .*numbers that 64 bits can hold"),
        ({"cu_seqlens": [0, 20.0]}, "cu_seqlens: .*must be whole numbers"),
        ({"cu_seqlens": [False, 20]}, "cu_seqlens: .*must be whole numbers"),
        ({"cu_seqlens": numpy.array([0.0, 20.0])}, "cu_seqlens: .*must be whole numbers"),
        ({"cu_seqlens": []}, "cu_seqlens: .*must be whole numbers, a list or a tensor"),
        ({"cu_seqlens": 20}, "cu_seqlens: .*must be whole numbers, a list or a tensor"),
        ({"cu_seqlens": torch.tensor(20)}, "cu_seqlens: .*must be whole numbers, a list or a tensor"),
        ({"inputs": {"gains": numpy.ones(4)}}, "inputs: .*'gains' is an array; pass a tensor"),
    ],
)  # fmt: skip
def test_wrong_calls_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    hidden, weight, ids = make(20)
    call = {"hidden": hidden, "weight": weight, "token_ids": ids, "loss_fn": lambda logp, entropy: logp.sum()}
    with pytest.raises(ContractError, match=rf"linear_policy_loss\(.*{message}"):
        linear_policy_loss(**call | change)
