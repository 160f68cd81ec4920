"""The kernel for Hopper that computes u and w, run on a CPU: every bit that it stores, and that no partition
overtakes another in the buffers that they share."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_on_a_cpu import slowed
from isobit.frame.launch import Recorder
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.ops.delta_rule import kernels_hopper as backwards
from isobit.ops.delta_rule import kernels_hopper_io as backwards_io
from isobit.ops.gated_delta_rule import (
    kernels_hopper,
    kernels_hopper_fold,
    kernels_hopper_solve,
    model,
)
from isobit.ops.gated_delta_rule.kernels_hopper_fold import folded, serves
from isobit.ops.gated_delta_rule.model import CHUNK, CPU
from test_delta_rule_hopper import Room, Walked
from test_gated_delta_gradients_hopper import places, same_bits
from test_gated_delta_hopper import Steps

BF16, FP16 = torch.bfloat16, torch.float16
K = V = 128

#: What is not stored is not 0 by chance.
UNTOUCHED = 7.0


def on_a_cpu(args: dict[str, Any], programs: int = 2, **other: Any) -> dict[str, Tensor]:
    """`other` functions take the places of some of the kernel's."""

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        device = Walked(grid[0], Steps)
        scope = device.scope(
            hopper_pipe, kernels_hopper_fold, kernels_hopper_solve, backwards_io, backwards,
            tma_store=device.store_box, tma=SimpleNamespace(store_wait=device.store_wait),
            reinterpreted=Room.reinterpret, float=float, **other,
        )  # fmt: skip
        for written in values[:2]:
            written.fill_(UNTOUCHED)
        constants = (options[name] for name in kernel.arg_names[len(values) :])
        device.run(scope, kernel, (*values, *constants))

    return dict(zip("uw", folded(**args, launch=launch, sms=programs), strict=True))


def made(
    B: int, T: int, H: int, group: int, gated: bool = True, bounds: list[int] | None = None,
    dtype: torch.dtype = BF16,
) -> dict[str, Any]:  # fmt: skip
    gen, HV = torch.Generator().manual_seed(T), H * group

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    args: dict[str, Any] = {
        "k": drawn(B, T, H, K).to(dtype), "v": drawn(B, T, HV, V).to(dtype),
        "beta": drawn(B, T, HV).sigmoid(), "g2": -drawn(B, T, HV).abs() if gated else None,
        "cu_seqlens": None if bounds is None else torch.tensor(bounds, dtype=torch.int32),
        "inverses": torch.full((B, T, HV, CHUNK), float("nan"), dtype=dtype),
    }  # fmt: skip
    for at in places(args):  # what is not a row of a chunk is never read
        left = at.rows.stop - at.rows.start
        args["inverses"][at.batch, at.rows] = drawn(left, HV, CHUNK).to(dtype)
        args["inverses"][at.batch, at.rows] *= torch.ones(left, CHUNK).tril()[:, None].to(dtype)
    return args


def of_the_class(args: dict[str, Any]) -> dict[str, Tensor]:
    v, dtype = args["v"], args["v"].dtype
    HV = v.shape[2]
    found = {n: torch.full_like(v, UNTOUCHED) for n in "uw"}
    for at in places(args):

        def rows_of(x: Tensor, at: Any = at) -> Any:
            return x[at.batch, at.rows].float().movedim(1, 0).repeat_interleave(HV // x.shape[2], 0).numpy()

        T, k, own_v, beta = (rows_of(args[n]) for n in ("inverses", "k", "v", "beta"))
        g2 = np.zeros_like(beta) if args["g2"] is None else rows_of(args["g2"])
        with np.errstate(all="ignore"):
            results = model.folded(T[..., : T.shape[1]], k, own_v, beta, g2, CPU, dtype)
        for n, x in zip("uw", results, strict=True):
            found[n][at.batch, at.rows] = torch.from_numpy(np.ascontiguousarray(x)).movedim(0, 1).to(dtype)
    return found


PACKED = [0, 3, 3, 70, 134, 140]


@pytest.mark.parametrize(
    ("B", "T", "H", "group", "gated", "bounds", "dtype"),
    [
        (1, 128, 1, 2, True, None, BF16),
        (2, 70, 2, 1, False, None, BF16),
        (1, 144, 1, 2, True, PACKED, FP16),
        (1, 144, 2, 1, False, PACKED, BF16),
        (2, 64, 3, 2, True, None, FP16),
    ],
)
def test_has_the_bits_of_the_class(
    B: int, T: int, H: int, group: int, gated: bool, bounds: list[int] | None, dtype: torch.dtype
) -> None:
    args = made(B, T, H, group, gated, bounds, dtype)
    same_bits(on_a_cpu(args), of_the_class(args))


@pytest.mark.parametrize("who", range(3))
def test_whoever_is_slow_the_bits_are_the_same(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program and more items than stages, so that all of them share its buffers; chunks of 64 rows, which
    leave by TMA, and shorter ones between them, which do not."""
    args = made(1, 400, 1, 2, bounds=[0, 64, 70, 198, 262, 265, 400])
    right = of_the_class(args)
    slowed(monkeypatch, who, (Walked, "store_wait"))
    same_bits(on_a_cpu(args, 1), right)


@pytest.mark.parametrize("length", [64, 40])
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_not_finite_reaches_no_row_before_it(name: str, length: int) -> None:
    args = made(1, 2 * length, 1, 2, bounds=[0, length, 2 * length])
    right = of_the_class(args)
    args[name][0, 30, 0, 5], args[name][0, length + 7, 0, 100] = float("inf"), float("nan")
    found = on_a_cpu(args)
    same_bits(found, of_the_class(args))
    for n in "uw":
        for first, bad in ((0, 30), (length, length + 7)):
            same_bits({n: found[n][:, first:bad]}, {n: right[n][:, first:bad]})
    assert not found["u" if name == "v" else "w"][:, 30:length, 0].isfinite().all()


def test_rows_of_other_sequences_are_not_read_into_a_chunk() -> None:
    """Not even where they would only make it slow: a chunk whose own rows are finite is never computed row by
    row."""

    def one_by_one(*given: Any) -> None:
        raise AssertionError("a chunk of finite rows is computed row by row")

    args = made(1, 140, 1, 1, bounds=[0, 10, 75])
    right = on_a_cpu(args)
    for n in ("k", "v"):
        args[n][:, 75:] = float("nan")
    same_bits(on_a_cpu(args, _one_by_one=one_by_one), right)


def test_a_call_without_tokens_launches_nothing() -> None:
    assert [x.numel() for x in on_a_cpu(made(0, 64, 1, 1)).values()] == [0, 0]


@pytest.mark.parametrize(("k", "v", "called"), [(128, 128, True), (64, 128, False), (128, 256, False)])
def test_is_taken_where_it_serves(k: int, v: int, called: bool) -> None:
    def on_meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    keys, values = on_meta(1, 128, 1, k), on_meta(1, 128, 2, v)
    assert serves(keys, values) == called
    recorder = Recorder()
    beta, inverses = on_meta(1, 128, 2, dtype=torch.float32), on_meta(1, 128, 2, CHUNK)
    kernels_hopper.fold(keys, values, beta, None, None, inverses, recorder, 132)
    assert [kernel.__name__ for kernel, _, _ in recorder.launches] == [
        "folding_kernel" if called else "fold_kernel"
    ]
