"""On a Hopper GPU: a backward whose two recurrences run side by side, next to one where they follow one
another, in bits and in time.

    PYTHONPATH=src python tests/recurrences_side_by_side_on_a_gpu.py

A minute, most of which Triton compiles. Exits with 1 if a bit differs.
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isobit.ops.delta_rule.kernels_hopper import dhu
from isobit.ops.gated_delta_rule import kernels_hopper

NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def one_after_the_other(forwards: Any, backwards: Any, launch: Any) -> tuple[Any, Any]:
    return kernels_hopper.carried(*forwards, launch), dhu(launch=launch, **backwards)


def arguments(B: int, T: int, H: int, HV: int, bounds: list[int] | None) -> dict[str, Any]:
    gen = torch.Generator("cuda").manual_seed(T)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
    S = B if bounds is None else len(bounds) - 1
    args: dict[str, Any] = {
        "q": drawn(B, T, H, 128).bfloat16(), "k": drawn(B, T, H, 128).bfloat16(),
        "v": drawn(B, T, HV, 128).bfloat16(), "g": logsigmoid(drawn(B, T, HV)) / 4,
        "beta": drawn(B, T, HV).sigmoid(), "initial_state": drawn(S, HV, 128, 128), "cu_seqlens": cu,
        "scale": 128**-0.5, "state_v_first": False, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    *_, inverse = kernels_hopper.gated_delta_rule(**args, output_final_state=True, return_inverse=True)
    wanted = {f"want_{n}": True for n in ("q", "k", "v", "g", "beta", "initial_state")}
    others = {
        "inverse": inverse,
        "do": drawn(B, T, HV, 128).bfloat16(),
        "dfinal_state": drawn(S, HV, 128, 128),
    }
    return args | others | wanted


def us(call: Any, calls: int = 10) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / calls * 1e3


def main() -> int:
    bad = 0
    plain = partial(kernels_hopper.gated_delta_rule_bwd, recur=one_after_the_other)
    for B, T, H, HV, bounds in (
        (1, 8192, 16, 16, None),
        (1, 8192, 32, 32, None),
        (1, 4096, 16, 32, None),
        (4, 8192, 16, 16, None),
        (4, 8192, 32, 32, None),
        (1, 8192, 16, 16, [0, 1000, 3000, 3003, 8100]),
        (1, 200, 2, 2, None),
    ):
        args = arguments(B, T, H, HV, bounds)
        right, differ = plain(**args), set()
        for _ in range(30):
            for name, own, other in zip(
                NAMES, kernels_hopper.gated_delta_rule_bwd(**args), right, strict=True
            ):
                if bounds is not None and name != "dinitial_state":  # what belongs to no sequence
                    own, other = own[:, : bounds[-1]], other[:, : bounds[-1]]
                if not torch.equal(own.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
                    differ.add(name)
        bad |= bool(differ)
        before, after = us(lambda: plain(**args)), us(lambda: kernels_hopper.gated_delta_rule_bwd(**args))
        again = us(lambda: plain(**args))
        what = f"{', '.join(sorted(differ))} DIFFER" if differ else "equal"
        times = f"one after the other {before:.0f} us, side by side {after:.0f}, again {again:.0f}"
        print(f"{what:10} B={B} T={T} H={H} HV={HV} {bounds or ''}: {times}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
