"""The attention kernel of Hopper without one: run on a CPU it has the bits of the numpy model, its stages
are released in time, and it compiles to what it was meant to be."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import BF16, ints, made, same
from attention_on_a_cpu import CASES, SHARES, nan_behind_the_keys, of_attention, slowed
from gluon_on_a_cpu import Device, in_order
from isobit.frame.launch import Recorder
from isobit.kernels.hopper import division, heads, pipeline, softmax
from isobit.ops.attention import kernels_hopper, kernels_hopper_items, kernels_hopper_softcap, model


def on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], segment: int = 64, block: int = 32,
    programs: int = 3, **changes: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Segments and blocks so small that few keys cross their borders."""
    device = of_attention(Device(model.CPU, programs))
    own = (kernels_hopper_softcap, kernels_hopper_items, kernels_hopper)
    scope = device.scope(pipeline, heads, division, softmax, *own, **changes)
    monkeypatch.setattr(kernels_hopper, "block_keys", lambda D: block)
    monkeypatch.setattr(kernels_hopper, "sm_count", lambda device: programs)

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        device.programs = grid[0]
        device.run(scope, kernel, in_order(kernel, values, options))

    return kernels_hopper.attention(launch, segment=segment, **args)


# For D = 256 totals lie in memory; the backward does not know it.
TOTALS_IN_MEMORY = partial(made, 1, 70, 150, 2, 1, 256)
FORWARD = CASES | {"totals in memory": TOTALS_IN_MEMORY}


@pytest.mark.parametrize("name", FORWARD)
def test_bits_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = FORWARD[name]()
    nan_behind_the_keys(args)
    ours = on_a_cpu(monkeypatch, args)
    same(name, ours, model.attention(segment=64, block=32, **args))


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 40},
    "packed": {"cu_seqlens_q": ints(0, 3, 3, 80, 150)},
}


@pytest.mark.parametrize(("segment", "pairs"), [(64, 3), (256, 1)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_no_plan_decides_a_bit(
    D: int, mask: str, segment: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four pairs of a sequence and a KV head a section has one, or three, and the last the fourth. And if
    all keys are one segment, the kernel has no code that folds."""
    args = made(1 if mask == "packed" else 2, 150, 150, 4, 2, D, **MASKS[mask])
    wanted = model.attention(segment=segment, block=32, **args)
    monkeypatch.setattr(kernels_hopper, "SECTION", pairs * 4 * 150 * D)
    same(mask, on_a_cpu(monkeypatch, args, segment=segment), wanted)


def test_plans_follow_from_sizes() -> None:
    def plan(*sizes: int, segment: int = 1024, **options: Any) -> tuple[int, bool, bool]:
        """(pairs in a section, turns, folds)."""
        recorder = Recorder()
        kernels_hopper.attention(recorder, segment=segment, **made(*sizes, **options))
        ((kernel, values, constants),) = recorder.launches
        pairs = dict(zip(kernel.arg_names, values, strict=False))["pairs"]
        return pairs, constants["TURNS"], constants["FOLDS"]

    assert plan(2, 70, 1024, 4, 2, 128) == (4, True, False)
    assert plan(2, 70, 1025, 4, 2, 64) == (4, True, True)
    assert plan(3, 64, 8192, 4, 1, 256) == (2, False, True)
    assert plan(1, 64, 16385, 2, 2, 256) == (1, False, True)
    assert plan(1, 64, 1025, 1, 1, 64, segment=1 << 30)[2], "the kernel of the call, to compare with"
    short = {"cu_seqlens_q": ints(0, 500, 1025)}
    assert plan(1, 1025, 1025, 1, 1, 64, **short)[2], "how long packed sequences are is not known"
    assert not plan(1, 1024, 1024, 1, 1, 64, cu_seqlens_q=ints(0, 500, 1024))[2]


def test_quotients_of_any_size_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values so small and so large that a quotient is rounded in other ways, and infinite ones."""
    args = made(1, 70, 150, 2, 2, 64)
    args["v"][..., 1, :16] *= 2.0**-128  # of bf16 some bits are left
    args["v"][..., 1, 16:32] *= 2.0**126
    args["v"][:, 7, 0, 5] = torch.inf
    same("any size", on_a_cpu(monkeypatch, args), model.attention(segment=64, block=32, **args))


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("name", [*SHARES, "two items, totals in memory"])
def test_whatever_a_program_has_to_do_it_ends(name: str, who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with the same bits, whoever is slow."""
    programs, make = SHARES.get(name, (1, TOTALS_IN_MEMORY))
    args = make()
    nan_behind_the_keys(args)
    wanted = model.attention(segment=64, block=32, **args)
    slowed(monkeypatch, who)
    same(name, on_a_cpu(monkeypatch, args, programs=programs), wanted)


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = CASES["dense"]()
    wanted = model.attention(segment=64, block=32, **args)[1]
    for change in ({"segment": 128}, {"block": 64}):
        other = on_a_cpu(monkeypatch, args, **change)[1]
        assert other is not None and wanted is not None and not torch.equal(other, wanted), change


def test_a_stage_that_is_released_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are free when they have been multiplied with, not when that has begun."""
    args = made(1, 70, 200, 1, 1, 64)
    wanted = model.attention(segment=64, block=32, **args)
    same("in time", on_a_cpu(monkeypatch, args), wanted)
    original = Device.multiply

    def early(self: Device, a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        product = original(self, a, b, *rest, **more)
        if hasattr(a, "read"):  # q times k: somebody else writes there from now on
            b.read()[...] = 0.0
        return product

    monkeypatch.setattr(Device, "multiply", early)
    with pytest.raises(AssertionError):
        same("too early", on_a_cpu(monkeypatch, args), wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.empty(1, 70, 2, 64, dtype=torch.float32)}, "bf16 and fp16"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "pages"),
        ({"k": torch.empty(1, 0, 1, 64, dtype=BF16)}, "no keys"),
        ({"k": torch.empty(1, 70, 1, 66, dtype=BF16)[..., :64].expand(1, 70, 1, 64)}, "strides of k"),
        ({"v": torch.empty(1 * 70 * 64 + 1, dtype=BF16)[1:].view(1, 70, 1, 64)}, "v begins at"),
        ({"q": torch.empty(1, 1, 2, 64, dtype=BF16).expand(1, 70, 2, 64)}, "strides of q"),
    ],
)  # fmt: skip
def test_what_it_cannot_read_is_left_to_others(change: dict[str, Any], reason: str) -> None:
    args = made(1, 70, 70, 2, 1, 64)
    assert kernels_hopper.why_not(args) is None
    assert reason in (kernels_hopper.why_not(args | change) or "")


def test_few_queries_are_left_to_others() -> None:
    assert kernels_hopper.slower_because(made(1, 64, 64, 2, 1, 64)) is None
    assert "63 a sequence" in (kernels_hopper.slower_because(made(9, 63, 63, 2, 1, 64)) or "")
    packed = made(1, 300, 300, 2, 1, 64, cu_seqlens_q=ints(0, 100, 200, 290, 295, 300))
    assert "60 a sequence" in (kernels_hopper.slower_because(packed) or "")
