"""Ops whose calls are made again from recorded launches: other numbers of rows, training, hooks, streams and
threads. Above a libcuda that only records, as `test_replay`."""

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from torch.autograd import Variable

import isobit
from isobit.frame import launch as launching
from replay_calls import CALLS, Noted, by_entries_alone, differs, on_hopper
from replay_shapes import F32, INT64, Call, as_launch, shape
from stub_cuda import STREAM, Launch, clear, differences_but_for_places, launches, run, set_stream, why_not

pytestmark = [pytest.mark.compat, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

#: Until a call is made from its plan: the first runs the launcher, the second is recorded.
WARM = 3


def made(call: Call, named: dict[str, Any]) -> Any:
    return call.declared(**named, backend=call.backend, validate=False)


def warm(call: Call, named: dict[str, Any]) -> None:
    for _ in range(WARM):
        made(call, named)


# Calls of one kind, and of another number of rows


def again(name: str) -> list[dict[str, Any]]:
    """Differences of an op's first calls to ordinary ones; the last is made by its plan, with new inputs."""
    call = CALLS[name]
    with on_hopper():
        found = [differs(call, call.named(shift)) for shift in (0, 16, 32, 0, 16)]
        with by_entries_alone():
            made(call, call.named(48))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_an_op_makes_the_launches_that_triton_would_make(name: str) -> None:
    assert run(again, name) == [{}] * 5


def views(names: list[str]) -> list[str]:
    """Calls with a result that is a view, by launcher or by plan."""
    found = []
    with on_hopper():
        for name in names:
            named = CALLS[name].named()
            outputs = [made(CALLS[name], named) for _ in range(WARM + 1)]
            flat = (t for each in outputs for t in (each if isinstance(each, tuple) else (each,)))
            found += [name] * any(t._is_view() for t in flat if t is not None)
    return found


def test_results_that_have_gradients_are_no_views() -> None:
    """Autograd forbids to write to a view that was made where it does not look."""
    assert run(views, [name for name in CALLS if "backward" not in name]) == []


def rows(count: int, call: Call) -> Call:
    """The same call with this many rows, if tensors have them as the first dimension."""
    given = call.given
    names = {"x": 1, "dy": 1, "hidden": 1, "logits": 1, "policy_logits": 1, "ref_logits": 1}
    names |= dict.fromkeys(("token_ids", "mask", "dlogp", "old_logp"), 0)
    changes: dict[str, Any] = {
        name: shape(count, *given[name].sizes[-trailing or len(given[name].sizes) :], dtype=given[name].dtype)
        for name, trailing in names.items()
        if given.get(name) is not None
    }
    if "stats" in given:
        changes["stats"] = shape(2, count, dtype=F32)
    return call.but(**changes)


def other_rows(name: str, counts: tuple[int, ...]) -> tuple[list[dict[str, Any]], list[set[int]]]:
    """(differences of calls with these numbers of rows to ordinary ones, the code that each number of rows
    ran)."""
    different, codes = [], []
    with on_hopper():
        warm(CALLS[name], CALLS[name].named())
        for count in counts:
            call = rows(count, CALLS[name])
            different += [differs(call, call.named(shift)) for shift in (0, 16, 0, 32)]
            codes.append({made.code for made in launches() if made.code})
            with by_entries_alone():
                made(call, call.named())
    return different, codes


@pytest.mark.parametrize(
    ("name", "counts"),
    [("linear, few tokens", (33, 34, 48, 40)), ("linear, many tokens", (1601, 1602, 1608)),
     ("linear backward", (33, 40, 36)), ("head", (5, 2, 6, 64)), ("head, mask", (5, 16, 100)),
     ("head backward, of a sum", (5, 7, 128)), ("logp, few rows", (5, 2, 17, 64)),
     ("logp, many rows", (2112, 2113, 4000)), ("ratio_kl, few rows", (5, 17, 64)),
     ("gemm_dw", (700, 512, 3)), ("rms_norm", (33, 2, 64, 3000)), ("rms_norm backward", (33, 40, 600))],
)  # fmt: skip
def test_another_number_of_rows_makes_its_own_launches_of_the_same_code(
    name: str, counts: tuple[int, ...]
) -> None:
    different, codes = run(other_rows, name, counts)
    assert different == [{}] * (4 * len(counts))
    assert codes[0] and all(found == codes[0] for found in codes)


# Training


def linear_step(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (isobit.det_linear(x, weight, bias, backend="hopper"),)


def head_step(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    rows = x.shape[0]
    ids, mask = torch.ones(rows, dtype=INT64), torch.ones(rows, dtype=torch.bool)
    options = {"return_entropy": True, "backend": "hopper", "validate": False}
    return isobit.linear_logp(x, weight, ids, bias=bias, mask=mask, **options)


def training(step: Callable[..., tuple[Tensor, ...]]) -> tuple[int, list[dict[str, Any]]]:
    """(launches of a step, differences of later steps to the first, which is that of launchers)."""
    given = {"x": shape(33, 256), "weight": shape(512, 256), "bias": shape(512)}
    tensors = {name: each.make(0).requires_grad_() for name, each in given.items()}
    grads: dict[str, Tensor] = {}
    for name, t in tensors.items():
        t.register_hook(lambda grad, name=name: grads.update({name: grad}))

    def logged() -> tuple[list[Launch], Noted]:
        grads.clear()
        clear()
        with Noted(tensors) as noted:
            outputs = step(**tensors)
            ones = tuple(torch.ones(t.shape, dtype=t.dtype) for t in outputs)
            # What torch.autograd.backward calls, which would leave the mode.
            Variable._execution_engine.run_backward(
                outputs, ones, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        found = (*outputs, *(grads[name] for name in tensors))
        return [*launches(), as_launch(found)], noted

    with on_hopper():
        one, first = logged()
        different = []
        for i in range(4):
            with by_entries_alone() if i >= WARM - 1 else nullcontext():
                other, noted = logged()
            different.append(differences_but_for_places(one, first.memory, other, noted.memory))
    return len(one) - 1, different


@pytest.mark.parametrize(("step", "least"), [(linear_step, 5), (head_step, 12)])
def test_a_step_of_training_is_made_from_plans(step: Callable[..., Any], least: int) -> None:
    count, different = run(training, step)
    assert count >= least and different == [{}] * 4


# Hooks


def hooked(which: str, added: bool) -> tuple[list[str], list[str], list[str], int]:
    """(what a hook saw of a call that has a plan, what was launched; what it saw after that, launches)."""
    runtime, seen = triton.knobs.runtime, []
    call = CALLS["head, mask"]
    named = call.named()

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    with on_hopper():
        warm(call, named)
        clear()
        if added:
            getattr(runtime, which).add(hook)
            try:
                made(call, named)
            finally:
                getattr(runtime, which).remove(hook)
        else:
            with mock.patch.object(runtime, which, hook):
                made(call, named)
        names, during = [made.name for made in launches()], list(seen)
        clear()
        with by_entries_alone():
            made(call, named)
    return during, names, seen[len(during) :], len(launches())


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_sees_every_launch_and_plans_come_back_after_it(which: str, added: bool) -> None:
    during, names, after, count = run(hooked, which, added)
    assert during == names and len(names) == 4
    assert after == [] and count == 4


def hooked_from_the_beginning() -> tuple[int, int]:
    """(what a hook saw of four new calls, whether there is a plan after one more)."""
    call, seen = CALLS["logp, few rows"], []
    named = call.named()
    with on_hopper():
        with mock.patch.object(triton.knobs.runtime, "launch_enter_hook", seen.append):
            for _ in range(4):
                made(call, named)
        warm(call, named)
        clear()
        with by_entries_alone():
            made(call, named)
    return len(seen), len(launches())


def test_calls_that_a_hook_watches_are_not_recorded_and_later_ones_are() -> None:
    assert run(hooked_from_the_beginning) == (8, 2)


def hooked_on_the_short_way() -> tuple[int, list[str], int]:
    call, seen = CALLS["head, mask"], []
    args = call.args()

    def short(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launching.launched(kernel, grid, args, options)

    call.run(launch=short, **args)
    with mock.patch.object(triton.knobs.runtime, "launch_enter_hook", lambda m: seen.append(m.get()["name"])):
        clear()
        call.run(launch=short, **args)
        names = [made.name for made in launches()]
    with by_entries_alone():
        call.run(launch=short, **args)
    return len(names), seen, len(launches()) - len(names)


def test_a_hook_sees_launches_that_are_no_plans() -> None:
    count, seen, after = run(hooked_on_the_short_way)
    assert len(seen) == count == after == 4


# Streams and threads


def on_streams(streams: tuple[int, ...]) -> list[set[int]]:
    call, found = CALLS["head backward"], []
    named = call.named()
    with on_hopper():
        warm(call, named)
        for stream in streams:
            clear()
            set_stream(stream)
            with by_entries_alone():
                made(call, named)
            found.append({made.stream for made in launches()})
    return found


def test_a_plan_launches_on_the_stream_that_is_current_then() -> None:
    assert run(on_streams, (9, 11, STREAM, 9)) == [{9}, {11}, {STREAM}, {9}]


def addresses(log: Launch) -> set[int]:
    return {int.from_bytes(p[:8], "little") for p in log.params if len(p) in (8, 128)}


def in_threads(name: str, own: str, count: int) -> list[str]:
    """What is wrong with calls that threads make at once, each with its own input, without any cache."""
    call = CALLS[name]
    common = call.named()
    inputs = [call.named(16)[own] for _ in range(8)]
    results: list[list[Tensor]] = [[] for _ in inputs]
    begin = threading.Barrier(len(inputs))

    def work(i: int) -> None:
        begin.wait()
        for _ in range(count):
            found = made(call, {**common, own: inputs[i]})
            results[i] += [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]

    with on_hopper():
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(usual)
    owner = {t.data_ptr(): i for i, t in enumerate(inputs)}
    theirs = {t.data_ptr(): i for i, of in enumerate(results) for t in of}
    logs = [addresses(log) for log in launches()]
    wrong = [f"{len(of)} results of thread {i}" for i, of in enumerate(results) if len(of) % count or not of]
    if len(theirs) != sum(map(len, results)):
        wrong.append("two results at one address")
    # A launch may name a workspace that was given back and has become another thread's result since. So a
    # result needs some launch with it and its thread's input, and no launch has inputs of two threads.
    written = set[int]()
    for i, log in enumerate(logs):
        whose = {owner[at] for at in log & owner.keys()}
        if len(whose) != 1:
            wrong.append(f"launch {i} is of threads {sorted(whose)}")
        written |= {at for at in log & theirs.keys() if {theirs[at]} == whose}
    wrong += [f"no launch wrote a result of thread {theirs[at]}" for at in theirs.keys() - written]
    return wrong


@pytest.mark.parametrize(
    ("name", "own"), [("linear, few tokens", "x"), ("logp, few rows", "logits"), ("linear, bias", "x")]
)
def test_threads_get_results_of_their_own(name: str, own: str) -> None:
    assert run(in_threads, name, own, 100) == []
