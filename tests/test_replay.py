"""A call that is made again from its recorded launches gives the driver what Triton's own way would give it,
launch by launch and byte by byte, above a libcuda that only records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame import entry, launch, replay
from isobit.frame.launch import launched
from isobit.spec.proofs import proofs
from replay_calls import CALLS, REFUSED, by_entries_alone, differs, on_hopper, without_a_call
from replay_shapes import as_launch, shape, tensors_of
from stub_cuda import (
    Launch,
    Memory,
    clear,
    counts,
    differences,
    differences_but_for_places,
    launches,
    ordinary,
    run,
    same_memory,
    why_not,
)

pytestmark = [pytest.mark.compat, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


# What the child does


@dataclass
class Replayed:
    """A plan's call beside the ordinary one of the same inputs."""

    launches: int
    differences: dict[str, Any]
    apart: list[int]  # bytes that tensors were moved by, beyond multiples of what CUDA's allocator aligns to
    forms: list[Any]  # of the outputs
    wanted: list[Any]


def forms_of(outputs: Any) -> list[Any]:
    """All about outputs but their addresses."""

    def form(t: Tensor) -> tuple[Any, ...]:
        return t.shape, t.stride(), t.storage_offset(), t.dtype, t.untyped_storage().nbytes()

    several = outputs if isinstance(outputs, tuple) else (outputs,)
    return [isinstance(outputs, tuple), *(None if t is None else form(t) for t in several)]


def moved_by(one: list[Launch], memory: Memory, other: list[Launch]) -> list[int]:
    params = [
        (x, y) for a, b in zip(one, other, strict=True) for x, y in zip(a.params, b.params, strict=True)
    ]
    addresses = (
        [int.from_bytes(p[:8], "little") for p in pair] for pair in params if len(pair[0]) in (8, 128)
    )
    return [(x - y) % 512 for x, y in addresses if memory.at(x) is not None]


def replayed(name: str, recorded_at: int, made_at: int) -> Replayed:
    """Recorded with inputs so far into their memory, made again with others so far into theirs."""
    call = CALLS[name]
    recorded, given = call.args(recorded_at), call.args(made_at)
    with same_memory() as memory:
        wanted = call.run(launch=ordinary, **given)
    one = [*launches(), as_launch(wanted)]
    with same_memory(2):
        _, plan = replay.record(call.run, recorded, tensors_of(recorded))
    assert plan is not None
    clear()
    with same_memory(1) as room, by_entries_alone():
        found = plan(tensors_of(given))
    other = [*launches(), as_launch(found)]
    return Replayed(
        len(one) - 1,
        differences_but_for_places(one, memory, other, room),
        moved_by(one, memory, other),
        forms_of(found),
        forms_of(wanted),
    )


def refused(name: str) -> tuple[str | None, bool, list[bool]]:
    """(why a call cannot be recorded, whether it was, whether an op's calls are the ordinary ones)."""
    call = REFUSED[name][0]
    args = call.args()
    with replay.Tape() as tape:
        call.run(launch=tape, **args)
    _, plan = replay.record(call.run, args, tensors_of(args))
    with on_hopper():
        same = [not differs(call, call.named()) for _ in range(4)]
    return tape.reason, plan is not None, same


def closed_ways() -> list[str]:
    """The errors when Triton's two paths are used although they are blocked."""
    call, compiled, said = CALLS["linear, few tokens"], [], []
    args = call.args()

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        compiled.append(kernel[grid](*args, **options))

    call.run(launch=launch, **args)
    tries: list[Callable[[], Any]] = [lambda: call.run(launch=launch, **args), lambda: compiled[0][(1, 1, 1)]]
    for attempt in tries:
        with by_entries_alone(), pytest.raises(AssertionError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def kernels_of(*names: str) -> list[list[tuple[str, int]]]:
    """(kernel, its code) of every launch of these calls."""
    found = []
    for name in names:
        clear()
        CALLS[name].run(launch=ordinary, **CALLS[name].args())
        found.append([(made.name, made.code) for made in launches()])
    return found


def outputs_of_calls(name: str) -> tuple[list[int], list[int]]:
    """Addresses of outputs' memory, and of inputs', of a recorded call and of two that were made from it."""
    call = CALLS[name]
    args = [call.args() for _ in range(3)]
    outputs, plan = replay.record(call.run, args[0], tensors_of(args[0]))
    assert plan is not None
    found = [outputs, plan(tensors_of(args[1])), plan(tensors_of(args[2])), plan(tensors_of(args[2]))]
    made = [t for each in found for t in (each if isinstance(each, tuple) else (each,)) if t is not None]
    given = [t for each in args for t in tensors_of(each)]
    return [t.untyped_storage().data_ptr() for t in made], [t.untyped_storage().data_ptr() for t in given]


# A launcher that does what it should not


@triton.jit(do_not_specialize=["n"])
def toy(out, x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def unusual(out, x, BLOCK: tl.constexpr, n):  # type: ignore[no-untyped-def]
    """A constant is not the last of its parameters, so only Triton knows for what it is compiled."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


CONSTANT = torch.ones(64)


def copied(launch: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    launch(toy, (1,), out, x, x.numel(), 64)
    return out


def views(launch: Any, x: Tensor) -> Any:
    """Allocations and views of every kind that there is, and nothing else."""
    a, b = x.new_empty(4, 64).unbind()[1:3]
    out = torch.empty_strided((8, 8), (8, 1), dtype=x.dtype, device=x.device)
    copied(launch, x.view(8, 8).t()[:0].new_empty(64), a)
    copied(launch, torch.split(x.expand(1, 64).squeeze(0), 64)[0], b)
    return copied(launch, x, out.view(64)).unflatten(0, (8, 8)), None


def item(launch: Any, x: Tensor) -> Tensor:
    return copied(launch, x) if x[0].item() == 1.0 else x


def without_entry(launch: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch(unusual, (1,), out, x, 64, x.numel())
    return out


def halves(launch: Any, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(copied(launch, x, x.new_empty(128)).split(64))


LAUNCHERS: dict[str, Callable[..., Any]] = {
    "views": views,
    "a hole in its strides": lambda launch, x: copied(launch, x, torch.empty_strided((2, 32), (48, 1))),
    "a part of its memory": lambda launch, x: copied(launch, x, x.new_empty(80)[16:])[3:].view(1, 61),
    "a tuple of one": lambda launch, x: (copied(launch, x),),
    "no programs": lambda launch, x: (launch(toy, (0,), x, x, 0, 64), copied(launch, x))[1],
    "clone": lambda launch, x: copied(launch, x.clone()),
    "zero_": lambda launch, x: copied(launch, x, torch.empty_like(x).zero_()),
    "to": lambda launch, x: copied(launch, x.to(torch.float16)),
    "copy_": lambda launch, x: copied(launch, x, torch.empty_like(x).copy_(x)),
    "sum": lambda launch, x: copied(launch, x, torch.empty_like(x)[x.sum(dtype=torch.int64) * 0 :]),
    "item": item,
    "after": lambda launch, x: copied(launch, x).add_(1),
    "in place": lambda launch, x: copied(launch, x.resize_(64)),
    "its input": lambda launch, x: (copied(launch, x), x)[1],
    "a view of its input": lambda launch, x: (copied(launch, x), x[16:])[1],
    "two in one memory": halves,
    "one twice": lambda launch, x: (copied(launch, x),) * 2,
    "from before": lambda launch, x: copied(launch, x, CONSTANT),
    "of a constant": lambda launch, x: copied(launch, CONSTANT, torch.empty_like(x)),
    "without an entry": without_entry,
}
RECORDED = {"views", "a hole in its strides", "a part of its memory", "a tuple of one", "no programs"}


def recorded(name: str) -> tuple[bool, int, dict[str, Any], bool]:
    """(whether there is a plan; launches; differences of a call by it, or of the launcher's once more)."""
    x, other = torch.ones(64), torch.ones(64)
    toys = LAUNCHERS[name]
    with same_memory() as memory:
        wanted = toys(ordinary, other)
    one = [*launches(), as_launch(wanted)]
    _, plan = replay.record(lambda launch, x: toys(launch, x), {"x": x}, [x])
    clear()
    with same_memory(1) as room:
        found = toys(ordinary, other) if plan is None else plan([other])
    two = [*launches(), as_launch(found)]
    different = differences_but_for_places(one, memory, two, room)
    return plan is not None, len(one) - 1, different, forms_of(found) == forms_of(wanted)


def sharing() -> list[bool]:
    """Whether calls can be recorded: with one input twice, with two in one memory, with a hook, without."""
    both, apart = torch.ones(2, 64), torch.ones(64)
    found = []
    with on_hopper():
        found += [replay.recordable([both[0], both[:1]]), replay.recordable(list(both))]
        with mock.patch.object(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None):
            found.append(replay.recordable([apart]))
        found.append(replay.recordable([apart]))
    return [*found, replay.recordable([apart])]


def shared_then_apart() -> list[tuple[dict[str, Any], bool]]:
    """Calls of an op whose operands are one tensor, then of the same kind with two parts of one, then with
    separate memory: the differences to ordinary ones, and whether the last of each avoids Triton's path."""
    call = CALLS["linear, few tokens"].but(x=shape(512, 256))
    memory = torch.empty(2, 512, 256, dtype=torch.bfloat16)
    one, in_one = {"x": memory[0], "weight": memory[0]}, {"x": memory[0], "weight": memory[1]}
    found = []
    with on_hopper():
        for named in (one, in_one, call.named()):
            different = [differs(call, named) for _ in range(4)][-1]
            try:
                with by_entries_alone():
                    call.declared(**named, backend="hopper", validate=False)
                found.append((different, True))
            except AssertionError:
                found.append((different, False))
    return found


# Properties of kernels


def unknown_kernels() -> tuple[list[str], list[str]]:
    """(all kernels that proofs launch, those to which only Triton knows the way)."""
    found: dict[str, Any] = {}
    for proof in proofs().values():
        for name, kernels in proof.kernels.items():
            recorder = launch.Recorder()
            kernels.record(recorder, torch.bfloat16)
            found |= {f"{name}.{kernel.__name__}": kernel for kernel, _, _ in recorder.launches}
    return sorted(found), sorted(name for name, kernel in found.items() if not launch._learn(kernel).known)


@triton.jit
def special(out, x, n, s, flag, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """All of which is specialised that can be: words are as wide as addresses and numbers let them be."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if x is not None:
        tl.store(out + at, tl.load(x + n + at) * s + flag)


def special_ways() -> tuple[int, list[dict[str, Any]]]:
    """(how many codes a kernel's calls have, differences of the short way to the ordinary one)."""
    memory, half = torch.ones(4096), torch.ones(4096, dtype=torch.float16)
    usual: dict[str, Any] = {"out": memory, "x": memory[64:], "n": 2, "s": 0.5, "flag": True, "BLOCK": 1024}
    numbers = (1, 16, 17, 32, 0, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31))
    changes: list[dict[str, Any]] = [{}, *({"n": n} for n in numbers), *({"s": s} for s in (1.0, 2, 1, 16))]
    changes += [{"flag": False}, {"x": None}, {"x": memory[1:]}, {"out": memory[1:]}, {"out": memory[4:]}]
    changes += [{"x": half}, {"x": half[1:]}, {"BLOCK": 512}, {"num_warps": 2}, {"x": memory[1:], "n": 16}]
    codes, found = set(), []
    for change in [*changes, *reversed(changes)]:
        given = usual | change
        args, options = tuple(given.pop(name) for name in usual), given
        logs = []
        for way in (
            lambda: special[(3,)](*args, **options),
            *[lambda: launched(special, (3,), args, options)] * 2,
        ):
            clear()
            way()
            logs.append(launches())
        codes.add(logs[0][0].code)
        found += [differences(logs[0], other) for other in logs[1:]]
    return len(codes), found


def few_maps() -> tuple[list[dict[str, Any]], list[int]]:
    """Calls with nine weights, twice each, where four tensor maps are kept: differences to ordinary ones, and
    maps that were encoded. Then with one weight."""
    call = CALLS["linear, few tokens"]
    x, weights = torch.empty(33, 256, dtype=torch.bfloat16), torch.empty(9, 512, 256, dtype=torch.bfloat16)
    args = {**call.args(), "x": x, "weight": weights[0].clone()}
    _, plan = replay.record(call.run, args, tensors_of(args))
    assert plan is not None
    found, encoded = [], []
    with mock.patch.object(entry, "MAPS", 4):
        for weight in [*weights, *weights, *[weights[3]] * 3]:
            clear()
            with same_memory() as memory:
                call.run(launch=ordinary, **args | {"weight": weight})
            one = launches()
            clear()
            with same_memory(1) as room:
                plan([x, weight])
            encoded.append(counts().maps)
            found.append(differences_but_for_places(one, memory, launches(), room))
    return found, encoded


# Plans


def test_every_backend_that_launches_has_a_call() -> None:
    assert not without_a_call(), "add a call to CALLS of tests/replay_calls.py, or to REFUSED"


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_makes_the_launches_that_triton_would_make(name: str) -> None:
    found = run(replayed, name, 0, 16)
    assert found.launches and not found.differences
    assert found.forms == found.wanted
    assert set(found.apart) <= {0}


@pytest.mark.parametrize("name", ["linear backward", "head, everything", "head backward", "logp, few rows"])
def test_inputs_may_lie_anywhere_in_their_memory(name: str) -> None:
    found = run(replayed, name, 48, 0)
    assert not found.differences and found.forms == found.wanted


def test_tritons_own_path_is_blocked_in_these_tests() -> None:
    assert run(closed_ways) == ["this is Triton's way"] * 2


def test_calls_reach_the_kernels_they_are_named_for() -> None:
    """Both tiles of a product, rows of logits that are split and not, a launch for each of many products."""
    names = ("linear, few tokens", "linear, many tokens", "logp, few rows", "logp, many rows", "gemm")
    few, many, split, whole, gemm = run(kernels_of, *names)
    assert few[0][0] == many[0][0] and few[0][1] != many[0][1]
    assert [name for name, _ in split] == ["logp_splits", "logp_merge"]
    assert [name for name, _ in whole] == ["logp_rows"] and len(gemm) == 3


@pytest.mark.parametrize("name", ["head backward", "head, everything", "linear backward", "logp backward"])
def test_every_call_has_outputs_of_its_own(name: str) -> None:
    made, given = run(outputs_of_calls, name)
    assert len(set(made)) == len(made) and not set(made) & set(given)


# Recording


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_between_launches_is_not_recorded(name: str) -> None:
    reason, made, same = run(refused, name)
    assert reason is not None and f"aten.{REFUSED[name][1]}." in reason
    assert not made and same == [True] * 4


@pytest.mark.parametrize("name", LAUNCHERS)
def test_only_calls_that_just_launch_are_recorded(name: str) -> None:
    made, count, different, same = run(recorded, name)
    assert made is (name in RECORDED)
    assert count and not different and same


def test_inputs_at_one_address_are_not_recorded() -> None:
    assert run(sharing) == [False, True, False, True, False]  # the last on a CPU


def test_calls_are_recorded_as_soon_as_inputs_have_addresses_of_their_own() -> None:
    assert run(shared_then_apart) == [({}, False), ({}, True), ({}, True)]


# Entries


def test_all_kernels_have_a_short_way() -> None:
    """Their constants come last, and their specialisation is known for NVIDIA."""
    every, unknown = run(unknown_kernels)
    kernels = {name.partition(".")[2] for name in every}
    assert {"product_kernel", "sum_kernel", "forward_kernel", "slab_kernel", "logp_rows"} <= kernels
    assert len(every) > 20 and not unknown


def test_a_short_way_leads_to_the_code_that_triton_compiled_for_these_arguments() -> None:
    codes, found = run(special_ways)
    assert codes >= 10 and found == [{}] * len(found)


def test_tensor_maps_are_right_after_others_were_forgotten() -> None:
    found, encoded = run(few_maps)
    assert found == [{}] * len(found)
    assert all(1 <= n <= 3 for n in encoded[1:18])  # the weight's; x's and out's too where all were forgotten
    assert encoded[-2:] == [0, 0]
