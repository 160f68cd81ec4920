"""On a Hopper GPU: one launch for a token of each sequence against two, in bits and in time.

    PYTHONPATH=src python tests/step_on_a_gpu.py [bits] [times]

Without an argument both: a minute. Exits with 1 if a bit differs, in an output or in anything that is stored,
or if an arrival is left. Times are of calls in a CUDA graph, one after another on one state. It stays at one
row of its chunk: each call is followed by a copy of the counts, whose own time is taken away. At row 64 a
call closes the chunk.
"""

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isobit import DeltaState
from isobit.frame.launch import run
from isobit.ops.gated_delta_rule_step.kernels_hopper import token
from isobit.ops.gated_delta_rule_step.state import ARRIVED

H, HV, K, V = 16, 32, 128, 128

#: Calls in a graph.
CALLS = 50


def drawn(B: int, T: int) -> list[dict[str, Any]]:
    """The arguments of T calls, but for the state. The kernel normalizes q and k."""
    gen = torch.Generator("cuda").manual_seed(B)

    def some(*shape: int) -> Tensor:
        return torch.randn(T, B, 1, *shape, generator=gen, device="cuda")

    q, k, v = (some(*shape).bfloat16() for shape in ((H, K), (H, K), (HV, V)))
    g, beta = logsigmoid(some(HV)) / 4, some(HV).sigmoid()
    return [
        {"q": q[t], "k": k[t], "v": v[t], "g": g[t], "beta": beta[t], "slots": None, "lengths": None,
         "scale": K**-0.5, "use_qk_l2norm_in_kernel": True}
        for t in range(T)
    ]  # fmt: skip


def step(state: DeltaState, args: dict[str, Any], one: bool) -> Tensor:
    args = args | state.tensors()
    return token(args, torch.empty_like(args["v"]), run, one=one)


def same(a: Tensor, b: Tensor) -> bool:
    """Any NaN equals any other."""
    here = [x.isnan() for x in (a, b)]
    a, b = (x.masked_fill(nan, 0).view(torch.uint8) for x, nan in zip((a, b), here, strict=True))
    return torch.equal(*here) and torch.equal(a, b)


def wrong(B: int, drafts: bool, seeded: bool) -> list[str]:
    """What differs after any of 140 tokens, in slots that change from call to call; one of them is none."""
    states = [DeltaState(B + 2, H, HV, K=K, V=V, device="cuda", drafts=drafts) for _ in range(2)]
    initial = torch.randn(B + 2, HV, K, V, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    for state in states:
        for own in state.tensors().values():
            own.fill_(float("nan") if own.is_floating_point() else 0)
        state.reset(None, initial if seeded else None)
    found = set()
    for t, args in enumerate(drawn(B + 1, 140)):
        slots = torch.tensor([*range(B), -1], device="cuda").roll(t)
        lengths = torch.ones(B + 1, dtype=torch.int32, device="cuda")
        lengths[t % (B + 1)] = t % 3
        if t % 50 == 49:
            args["v"][0, 0, 0, 5] = float("inf")
        args |= {"slots": slots, "lengths": lengths}
        outs = [step(state, args, bool(one)) for one, state in enumerate(states)]
        if not same(*outs):
            found.add("out")
        for name, own in states[1].tensors().items():
            if not same(own, states[0].tensors()[name]):
                found.add(name)
        if bool(states[1].place[:, ARRIVED].any()):
            found.add("arrivals")
    return sorted(found)


def in_graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """CALLS of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds a call: the median of 21 replays."""
    taken = []
    for _ in range(21):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last) / CALLS * 1e3)
    return sorted(taken)[10]


def at_row(B: int, row: int, one: bool) -> float:
    """Microseconds of a call at a row, without the copy of counts that follows it."""
    state, calls = DeltaState(B, H, HV, K=K, V=V, device="cuda"), drawn(B, 65)
    for args in calls[:row]:
        step(state, args, one)
    begun = state.place.clone()

    def again() -> None:
        step(state, calls[row], one)
        state.place.copy_(begun)

    return us(in_graph(again)) - us(in_graph(lambda: state.place.copy_(begun)))


def bits() -> bool:
    bad = False
    for B, drafts, seeded in product((1, 2, 4), (False, True), (False, True)):
        differ = wrong(B, drafts, seeded)
        bad |= bool(differ)
        what = f"{', '.join(differ)} DIFFER" if differ else "equal"
        print(f"{what:20} B={B} drafts={drafts} seeded={seeded}", flush=True)
    return bad


def chunk(B: int, one: bool) -> float:
    """Microseconds a token of a whole chunk and its closing, without any copy."""
    state, calls = DeltaState(B, H, HV, K=K, V=V, device="cuda"), drawn(B, 64)
    for args in calls:
        step(state, args, one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in calls:
            step(state, args, one)
    return us(graph) * CALLS / len(calls)


def times() -> bool:
    print("us of a call, in one launch / in two; a chunk: of each of its 64 tokens, in a row")
    print(f"{'B':>3} {'row 0':>15} {'row 31':>15} {'row 63':>15} {'row 64':>15} {'a chunk':>15}")
    for B in (1, 2, 4, 8, 16, 64):
        cells = [[at_row(B, row, one) for one in (True, False)] for row in (0, 31, 63, 64)]
        cells.append([chunk(B, one) for one in (True, False)])
        print(f"{B:3} " + " ".join(f"{a:7.2f} /{b:6.2f}" for a, b in cells), flush=True)
    return False


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["bits", "times"]
    sys.exit(sum({"times": times, "bits": bits}[name]() for name in wanted))
