"""What tests of the attention kernels of Hopper share: the device that runs them on a CPU, and calls that
forward and backward are both held to. Sizes are just beyond a tile, a block or a segment."""

import threading
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import BF16, F16, ints, made
from gluon_on_a_cpu import Barrier, Device, in_order
from isobit.kernels.hopper import division, heads, pipeline, softmax
from isobit.ops.attention import (
    kernels_hopper,
    kernels_hopper_bwd,
    kernels_hopper_items,
    kernels_hopper_softcap,
    model,
)
from isobit.ops.attention.proof.bits import cancelling

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": partial(made, 2, 150, 150, 2, 1, 64),
    "queries behind other keys": partial(made, 1, 70, 333, 2, 2, 64, F16),
    "window": partial(made, 1, 300, 320, 1, 1, 128, window=40),
    "bounds and a cap": partial(
        made, 3, 80, 200, 2, 1, 80, softcap=3.0, key_start=ints(5, 150, 90), key_end=ints(200, 190, 90)
    ),
    "a cap of class attn/2": partial(made, 1, 80, 170, 2, 1, 64, softcap=3.0, tangent=2),
    "every query sees all": partial(made, 1, 65, 170, 1, 1, 96, causal=False),
    "fewer keys than queries": partial(made, 1, 140, 60, 1, 1, 64, key_end=ints(50)),
    "fewer keys than queries that see all": partial(made, 1, 140, 60, 1, 1, 64, causal=False),
    "packed": partial(made, 1, 300, 300, 2, 1, 64, cu_seqlens_q=ints(0, 3, 3, 140, 300)),
}


#: What a program may find to do: (programs, call).
SHARES: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "one item, without rows for the second part": (1, partial(made, 1, 40, 40, 1, 1, 64)),
    "two items": (1, partial(made, 1, 140, 140, 1, 1, 64)),
    "many items": (1, partial(made, 2, 150, 170, 2, 1, 64)),
    "items without keys": (1, partial(made, 4, 70, 140, 1, 1, 64, key_end=ints(0, 140, 0, 0))),
    "ragged": (2, partial(made, 1, 300, 300, 1, 1, 64, cu_seqlens_q=ints(0, 0, 3, 200, 200, 265, 300))),
    "nothing for some": (99, partial(made, 1, 20, 20, 2, 1, 64, cu_seqlens_q=ints(0, 3, 3, 3, 3, 20))),
}


def slowed(monkeypatch: pytest.MonkeyPatch, who: int, *waits: tuple[type, str]) -> None:
    """One partition of a kernel falls behind the others wherever it waits for something, also in these
    methods: 0 and 1 are consumers, 2 is the producer."""
    mine = threading.local()
    specialize = Device.specialize

    def marked(self: Device, work: Any, warps: Any, registers: Any) -> None:
        def started(i: int, fn: Any, *args: Any) -> None:
            mine.slow = i == who
            fn(*args)

        specialize(
            self, [(partial(started, i, fn), args) for i, (fn, args) in enumerate(work)], warps, registers
        )

    def later(fn: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if mine.slow:
                time.sleep(0.002)
            return fn(*args, **more)

        return call

    monkeypatch.setattr(Device, "specialize", marked)
    for owner, name in ((Barrier, "wait"), (Device, "multiply_wait"), *waits):
        monkeypatch.setattr(owner, name, later(getattr(owner, name)))


def of_attention(device: Device) -> Device:
    """With products in the steps of the model, which are the same for both 16-bit dtypes."""
    device.do = model.CPU._replace(product=lambda a, b, acc, _: model.CPU.product(a, b, acc, BF16))
    return device


def nan_behind_the_keys(args: dict[str, Any]) -> None:
    """What lies outside a sequence's bounds may be anything."""
    for b, end in enumerate([] if args["key_end"] is None else args["key_end"].tolist()):
        args["k"][b, end:], args["v"][b, end:] = torch.nan, torch.nan


# The backward


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, counters: Tensor) -> None:
    """What the kernel of that name leaves: its order is the model's."""
    wide = 1 << (out.shape[-1] - 1).bit_length()
    products = model._filled((out.float() * dout.float()).numpy(), 3, wide)
    sums = model._halves(products.reshape(-1, wide), 1).reshape(out.shape[:-1]).swapaxes(1, 2)
    delta.copy_(torch.from_numpy(sums.copy()))
    counters.zero_()
    if dlse is not None:
        delta -= dlse


def gradients_on_a_cpu(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], programs: int = 3
) -> tuple[Tensor | None, ...]:
    """What the kernels of this module compute."""
    device = of_attention(Device(model.CPU, programs))
    own = (kernels_hopper_softcap, kernels_hopper_items, kernels_hopper, kernels_hopper_bwd)
    modules = (pipeline, heads, division, softmax, *own)
    scope = device.scope(*modules, kernels, gdc_launch_dependents=lambda: None, gdc_wait=lambda: None)
    monkeypatch.setattr(kernels, "sm_count", lambda device: programs)

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        if kernel.__name__ == "delta_kernel":
            return delta_of(*values[:5])
        device.programs = grid[0]
        device.run(scope, kernel, in_order(kernel, values, options))
        given = dict(zip(kernel.arg_names, values, strict=False))
        taken.append(given["tiles"] * next(given[n] for n in ("H", "KV", "heads") if n in given))
        counts.append(given["counters"])

    taken: list[int] = []
    counts: list[Tensor] = []
    result = kernels.attention_bwd(launch, **args)
    counted = counts[0].tolist()[: len(taken)]
    assert counted == taken[-1:] + taken[:-1], "each item once, and once per program none"  # dq is last
    return result


def backward(args: dict[str, Any]) -> dict[str, Any]:
    """The call of the backward that belongs to one of the forward, with sums that all but cancel, so that
    another order shows."""
    args["k"][..., 0] = 4.0
    out, lse = model.attention(**args)
    assert lse is not None
    gen = torch.Generator().manual_seed(1)
    args, (dout, dlse) = cancelling(
        args, [torch.randn(t.shape, generator=gen).to(t.dtype) for t in (out, lse)]
    )
    out, lse = model.attention(**args)
    given = {n: v for n, v in args.items() if n != "return_lse"}
    wanted = dict.fromkeys(("want_q", "want_k", "want_v"), True)
    return given | {"out": out, "lse": lse, "dout": dout, "dlse": dlse} | wanted


def same_gradients(what: str, ours: Any, other: Any) -> None:
    for name, a, b in zip("qkv", ours, other, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), (what, name, int((a != b).sum()))
