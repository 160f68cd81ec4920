"""What tests of the attention kernels of Hopper share: the device that runs them on a CPU, and calls that
forward and backward are both held to. Sizes are just beyond a tile, a block or a segment."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from attention_calls import BF16, F16, ints, made
from gluon_on_a_cpu import Barrier, Device
from isobit.ops.attention import model

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": partial(made, 2, 150, 150, 2, 1, 64),
    "queries behind other keys": partial(made, 1, 70, 333, 2, 2, 64, F16),
    "window": partial(made, 1, 300, 320, 1, 1, 128, window=40),
    "bounds and a cap": partial(
        made, 3, 80, 200, 2, 1, 80, softcap=3.0, key_start=ints(5, 150, 90), key_end=ints(200, 190, 90)
    ),
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
