"""The forward of `linear_logp` on Hopper, run on a CPU: which rows it works on, and that all are written.

As in `test_hopper_backward`, `launch` is a device that does in plain PyTorch what each kernel does, and
memory that nobody has written holds NaN.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from hopper_device import Device
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp import reference
from test_hopper_backward import DEFAULTS, new_memory_is_nan, one_thread  # noqa: F401

NAN, IGNORE = math.nan, -100


@dataclass(frozen=True)
class Case:
    """Rows of which these are ignored, and the parts of 64 that are left."""

    N: int = 600
    ignored: tuple[slice, ...] = ()
    parts: tuple[int, ...] = tuple(range(10))
    masked: bool = False
    bad: tuple[int, ...] = ()
    V: int = 700
    options: dict[str, Any] = field(default_factory=dict)


ROUNDED = {"logits_dtype": torch.bfloat16}
CASES = {
    "all count": Case(),
    "some in every part": Case(ignored=(slice(0, 600, 3),)),
    "prompts": Case(ignored=(slice(0, 300), slice(400, 500)), parts=(4, 5, 6, 7, 8, 9)),
    "one row is left": Case(ignored=(slice(0, 255), slice(256, 600)), parts=(3,)),
    "the last is left": Case(ignored=(slice(0, 599),), parts=(9,)),
    "the first is left": Case(ignored=(slice(1, 600),), parts=(0,)),
    "an odd number of parts is left": Case(ignored=(slice(64, 128), slice(256, 600)), parts=(0, 2, 3)),
    "none is left": Case(ignored=(slice(0, 600),), parts=()),
    "two parts": Case(N=70, ignored=(slice(3, 50),), parts=(0, 1)),
    "one part": Case(N=64, ignored=(slice(3, 50),), parts=(0,)),
    "one row": Case(N=1, parts=(0,)),
    "one ignored row": Case(N=1, ignored=(slice(0, 1),), parts=()),
    "bad ids count": Case(ignored=(slice(0, 600),), bad=(130, 131), parts=(2,)),
    "bias and rounding": Case(ignored=(slice(128, 384),), parts=(0, 1, 6, 7, 8, 9), options=ROUNDED),
    "many tiles": Case(N=300, V=35 * 256 + 7, ignored=(slice(100, 290),), parts=(0, 1, 4)),
    "a mask packs": Case(ignored=(slice(0, 300),), masked=True),
    "a mask packs few": Case(N=100, ignored=(slice(0, 50),), masked=True),
}


def arguments(case: Case) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    D = 64
    ids = torch.randint(0, case.V, (case.N,), generator=gen)
    for rows in case.ignored:
        ids[rows] = IGNORE
    ids[list(case.bad)] = case.V
    hidden = torch.randn(case.N, D, generator=gen).bfloat16()
    hidden[ids == IGNORE] = NAN
    weight = (torch.randn(case.V, D, generator=gen) / 8).bfloat16()
    mask = torch.rand(case.N, generator=gen) < 0.5 if case.masked else None
    bias = torch.randn(case.V, generator=gen) if case.options else None
    flags = dict.fromkeys(("return_entropy", "return_lse", "return_stats"), True)
    given = {"hidden": hidden, "weight": weight, "token_ids": ids, "bias": bias, "mask": mask}
    return DEFAULTS | case.options | given | flags | {"row_temperature": None, "ignore_index": IGNORE}


@pytest.mark.parametrize("sms", [1, 1000])  # tiles of two consumers and of one
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference(name: str, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr(forward, "sm_count", lambda device: sms)
    args = arguments(case)
    device = Device()
    *result, kept, base = forward.linear_logp(launch=device, **args, keep=False)
    assert kept is None and base is None
    dead = args["token_ids"] == IGNORE
    args["hidden"] = torch.where(dead[:, None], 0.0, args["hidden"])
    truth = reference.linear_logp(**args)
    for ours, exact in zip(result[:3], truth[:3], strict=True):
        torch.testing.assert_close(ours, exact, equal_nan=True, rtol=1e-4, atol=1e-4)
    launched = device.arguments["forward_kernel"]
    assert forward.schedule_for(case.N, 64, case.V, sms).tile.consumers == launched.CONSUMERS
    assert launched.LISTED is not case.masked
    if not case.masked:
        beyond = 2 * -(-case.N // 128)
        assert launched.listed.tolist()[: len(case.parts) + 2] == [len(case.parts), *case.parts, beyond]
        m, s = result[3]
        assert (m[dead] == 0).all() and (s[dead] == 1).all()


def test_a_copy_of_hidden_states_is_made_for_a_mask_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "sm_count", lambda device: 132)
    for name, packs in (("prompts", False), ("a mask packs", True)):
        args, device = arguments(CASES[name]), Device()
        forward.linear_logp(launch=device, **args, keep=False)
        assert ("pack_kernel" in device.launched) is packs
        in_place = device.arguments["forward_kernel"].a_desc.base.data_ptr() == args["hidden"].data_ptr()
        assert in_place is not packs


class Pointer:
    """Into a list of numbers."""

    def __init__(self, numbers: list[int], at: int = 0) -> None:
        self.numbers, self.at = numbers, at

    def __add__(self, more: int) -> "Pointer":
        return Pointer(self.numbers, self.at + more)


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("listed", [None, [3, 8], [1, 2, 7, 8, 20, 21]])
def test_the_producer_takes_the_rows_that_are_listed(listed: list[int] | None, consumers: int) -> None:
    """Its own code, with Python numbers and a TMA that records loads."""
    loads: list[tuple[str, list[int]]] = []
    nothing = SimpleNamespace(wait=lambda *a: None, expect=lambda *a: None)
    language = SimpleNamespace(
        to_tensor=int, program_id=lambda axis: 0, num_programs=lambda axis: 1, static_range=range,
        load=lambda p: p.numbers[p.at], constexpr=None,
    )  # fmt: skip
    numbers: dict[str, Any] = {
        "gl": language, "mbarrier": nothing, "ROWS": 64, "after": lambda stage, phase, _: (stage, phase),
        "tma_load": lambda desc, where, *_: loads.append((desc.name, where)),
        "gdc_launch_dependents": lambda: None,
    }  # fmt: skip
    ring = SimpleNamespace(index=lambda i: None)
    box = SimpleNamespace(nbytes=0)
    parts = [0, 1, 2, 3] if listed is None else listed
    spans, tiles = 3, len(parts) // consumers
    pipe = SimpleNamespace(
        items=lambda: tiles * spans,
        item=lambda t: (t // spans, 2 * (t % spans), 2 * (t % spans) + 2, t % spans),
        steps=2, COLUMNS=256, STEP=64, STAGES=4, CONSUMERS=consumers, A_BY_K=True, B_BY_K=True,
        ready=ring, empty=ring, a_ring=ring, b_ring=ring,
        a_desc=SimpleNamespace(name="a", block_type=box), b_desc=SimpleNamespace(name="b", block_type=box),
        rest_desc=SimpleNamespace(name="rest", block_type=box), REST=0, OVERLAP=False, BY_LEAF=False,
        SHARDED=False,
    )  # fmt: skip
    numbers["load_operand"] = FunctionType(hopper_pipe.load_operand.fn.__code__, numbers)
    for name in ("row", "column", "rows", "load"):
        fn = getattr(hopper_pipe.Pipe, name).fn
        setattr(pipe, name, partial(FunctionType(fn.__code__, numbers, name, fn.__defaults__), pipe))
    producer = FunctionType(hopper_pipe.load_tiles.fn.__code__, numbers)
    producer(pipe, Pointer(listed or []), listed is not None)
    assert [where for name, where in loads if name == "a"] == [
        [64 * part, 64 * step]
        for tile in range(tiles) for _ in range(2 * spans) for step in range(2)
        for part in parts[tile * consumers : (tile + 1) * consumers]
    ]  # fmt: skip
    assert [where[0] for name, where in loads if name == "b"] == [
        256 * n for _ in range(tiles) for n in range(2 * spans) for _ in range(2)
    ]
