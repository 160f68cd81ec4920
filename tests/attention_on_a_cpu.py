"""What tests of the attention kernels of Hopper share: the device that runs them on a CPU, and calls that
forward and backward are both held to. Sizes are just beyond a tile, a block or a segment."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attention_calls import BF16, F16, ints, made
from gluon_on_a_cpu import Device
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


def of_attention(device: Device) -> Device:
    """With products in the steps of the model, which are the same for both 16-bit dtypes."""
    device.do = model.CPU._replace(product=lambda a, b, acc, _: model.CPU.product(a, b, acc, BF16))
    return device


def nan_behind_the_keys(args: dict[str, Any]) -> None:
    """What lies outside of a sequence's bounds may be anything."""
    for b, end in enumerate([] if args["key_end"] is None else args["key_end"].tolist()):
        args["k"][b, end:], args["v"][b, end:] = torch.nan, torch.nan
