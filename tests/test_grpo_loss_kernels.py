"""Guards the kernels of `grpo_loss` that `ratio_kl` does not have: bit for bit against the documented order,
in the interpreter; and their compiled code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_loss_calls
import ptx
import to_ptx
from interpreted import in_interpreter
from isobit.frame.launch import Recorder
from isobit.frame.op import OPS
from isobit.kernels.triton import dependent_launch
from isobit.ops.grpo_loss import kernels_triton as kernels
from isobit.ops.grpo_loss import reference
from isobit.ops.grpo_loss.proof import model
from isobit.spec.proofs import proofs

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the kernels return, in a process that was started for the interpreter."""
    path: Path = tmp_path_factory.mktemp("interpreted") / "results"
    in_interpreter(Path(grpo_loss_calls.__file__), path)
    results: dict[str, Any] = torch.load(path)
    return results


GROUPS, LOSSES = grpo_loss_calls.group_calls(), grpo_loss_calls.loss_calls()


@pytest.mark.parametrize("name", GROUPS)
def test_advantages_have_the_bits_of_the_model(found: dict[str, Any], name: str) -> None:
    ours, args = found["groups"][name], GROUPS[name]
    assert torch.equal(ours, model.advantages(args))
    torch.testing.assert_close(ours, reference.group_advantages(**args), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", grpo_loss_calls.WRONG_BOUNDS)
def test_wrong_boundaries_make_everything_nan(found: dict[str, Any], name: str) -> None:
    assert found["wrong"][name].shape == (300,) and found["wrong"][name].isnan().all()


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith(("no ", "all masked"))])
def test_losses_have_the_bits_of_the_model(found: dict[str, Any], name: str) -> None:
    (ratio, kl, _, _), args = LOSSES[name]
    ours = found["losses"][name]
    assert ratio is not None
    expected = model.losses(args, ratio, kl, args["advantages"])
    assert [ours[i].item() for i in (0, 1, 2, 5)] == torch.tensor(expected).tolist()


@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith("infinite")])
def test_an_infinite_ratio_with_an_advantage_of_0_has_no_term_and_no_slope(
    found: dict[str, Any], name: str
) -> None:
    """0 * inf was NaN where clip_high=inf leaves the ratio as it is."""
    (ratio, _, _, _), args = LOSSES[name]
    assert ratio is not None and ratio.isinf().any() and (ratio.isinf() <= (args["advantages"] == 0)).all()
    for results in (found["losses"][name], reference.token_loss(*LOSSES[name][0], **args)):
        loss, slope = results[0], results[-2]
        assert loss.isfinite() and loss != 0 and slope.isfinite().all() and not slope[ratio.isinf()].any()


def test_another_order_changes_the_bits_of_these_losses() -> None:
    """Tokens the other way round are another order of the same sum, and it rounds differently."""
    (ratio, kl, _, _), args = LOSSES["two chunks, huge terms"]
    assert ratio is not None and kl is not None
    reversed_args = args | {n: args[n].flip(1) for n in ("token_ids", "mask")}
    there = model.losses(reversed_args, ratio.flip(1), kl.flip(1), args["advantages"].flip(1))
    here = model.losses(args, ratio, kl, args["advantages"])
    assert torch.tensor(there).tolist() != torch.tensor(here).tolist()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_slopes_are_those_of_the_reference(found: dict[str, Any], name: str) -> None:
    of_tokens, args = LOSSES[name]
    ours, theirs = found["losses"][name], reference.token_loss(*of_tokens, **args)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if i < 2 and "huge" in name:  # of which nothing is left in another order
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["all masked", "no sequences", "no tokens"])
def test_empty_inputs_give_empty_outputs(found: dict[str, Any], name: str) -> None:
    *results, slope, _ = found["losses"][name]
    assert not any(x.any() for x in results) and not slope.any()


@pytest.mark.parametrize("name", [name for name, args in GROUPS.items() if args["scale"]])
def test_a_sequence_finds_the_advantage_that_its_group_gives_it(found: dict[str, Any], name: str) -> None:
    ours, sequences = found["folded"][name], grpo_loss_calls.some_sequences(GROUPS[name])
    assert len(ours) and torch.equal(ours, found["groups"][name][sequences].float())


@pytest.mark.parametrize("name", grpo_loss_calls.WRONG_BOUNDS)
def test_wrong_boundaries_give_no_sequence_an_advantage(found: dict[str, Any], name: str) -> None:
    ours = found["folded"][name]
    assert len(ours) == len(grpo_loss_calls.WRONG_SEQUENCES[name]) and ours.isnan().all()


@pytest.mark.parametrize("name", grpo_loss_calls.gradient_calls())
def test_a_gradient_has_the_bits_of_that_of_ratio_kl(found: dict[str, Any], name: str) -> None:
    ours, theirs = found["gradients"][name], found["of_rows"][name]
    assert ours.dtype == theirs.dtype and torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert bool(ours.any()) == (name != "none")


# Compiled code


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "several tiles of sequences"])
def test_compiled_code_has_the_bits_of_the_interpreter(
    found: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if both kernels start early, and what is written before them is there only when they wait."""
    of_tokens, args = LOSSES[name]
    late: list[Tensor] = []

    def arrived(block: ptx.Block) -> None:
        if late:
            words = block.memory.view(np.uint32)
            (where,) = np.nonzero(words == NOTHING)
            given = [t.view(torch.int32).numpy().view(np.uint32).reshape(-1) for t in late]
            assert len(where) == sum(map(len, given))
            words[where] = np.concatenate(given)
            late.clear()

    def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        assert options["EARLY"] and options["launch_pdl"]
        written = ("ratio", "kl", "entropy", "slopes") if kernel is kernels.sum_chunks else ("sums",)
        of_kernel = dict(zip(kernel.arg_names, given, strict=False))
        for t in (of_kernel[name] for name in written):
            if t is not None and t.numel():
                late.append(t.clone())
                t.view(torch.int32).fill_(NOTHING)
        ptx.execute(kernel, grid, *given, **options)

    monkeypatch.setattr(ptx.Block, "waited", arrived)
    monkeypatch.setattr(dependent_launch, "launches_early", lambda device: True)
    ours = kernels.token_loss(*(t if t is None else t.clone() for t in of_tokens), launch, **args)
    for one, other in zip(ours, found["losses"][name], strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


#: The bits of a NaN that no kernel makes.
NOTHING = 0x7FC12345


def test_no_product_and_sum_are_contracted_and_quotients_are_rounded_once() -> None:

    recorder, seen = Recorder(), set()
    proofs()["grpo_loss"].kernels["triton"].record(recorder, torch.bfloat16)
    for name, source, options in recorder.sources():
        if name in seen:
            continue
        seen.add(name)
        text = to_ptx.compiled(source, options).asm["ptx"]
        assert "fma.rn.f64" not in text and "fma.rn.f32" not in text, name
        if name != "logits_gradient":  # whose weights are those of `ratio_kl`
            assert "div.full" not in text and "approx" not in text, name
    assert seen == {"normalize_groups", "sum_chunks", "reduce_batch", "logits_gradient"}


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_step_is_few_launches() -> None:
    """One pass over the logits each way, with little before and behind it."""
    B, T, V = 32, 256, 1000
    given = {"policy_logits": empty(B, T, V), "ref_logits": empty(B, T, V), "beta": 0.1, "return_kept": True}
    given |= {"token_ids": empty(B, T, dtype=torch.int64), "old_logp": empty(B, T), "rewards": empty(B)}
    forward, backward = OPS["grpo_loss"], OPS["grpo_loss_bwd"]
    args = dict(zip(forward.contract.names, forward.bind(given | {"samples_per_prompt": 4}), strict=True))
    there = Recorder()
    *_, stats, slope, scale = forward.backend_named("triton").run(launch=there, **args)
    saved = {"stats": stats, "slope": slope, "scale": scale, "dloss": empty()}
    names = (p.name for p in backward.contract.params)
    back = Recorder()
    backward.backend_named("triton").run(launch=back, **{n: (args | saved)[n] for n in names})
    assert [kernel.__name__ for kernel, _, _ in there.launches] == [
        "sum_parts", "finish_rows", "sum_chunks", "reduce_batch",
    ]  # fmt: skip
    assert [kernel.__name__ for kernel, _, _ in back.launches] == ["logits_gradient"]


def keys(B: int, T: int, step: float) -> set[str]:
    """What the kernels of a call are compiled for."""
    recorder = Recorder()
    args = {"token_ids": empty(B, T, dtype=torch.int64), "mask": empty(B, T, dtype=torch.bool)}
    args |= {"advantages": None, "rewards": empty(B), "samples_per_prompt": None, "reduction": "token_mean"}
    args |= {
        "ignore_index": 0,
        "group_boundaries": empty(B // 2 + 1, dtype=torch.int64),
        "eps": 1e-6,
        "normalizer": step,
    }
    args |= {"clip_low": 0.2, "clip_high": 0.2 * step, "beta": 0.1 * step, "rollout_weights": empty(B, T)}
    kernels.token_loss(empty(B, T), empty(B, T), None, empty(2, B, T), recorder, **args, return_kept=True)
    return {f"{name} {source.hash()} {sorted(rest.items())}" for name, source, rest in recorder.sources()}


def test_neither_a_batch_nor_a_schedule_of_numbers_compiles_anything() -> None:
    found = [keys(*call) for call in ((2, 1, 1.0), (32, 256, 0.5), (33, 1, 0.1), (64, 4097, 1e-3))]
    assert all(other == found[0] for other in found) and len(found[0]) == 2
