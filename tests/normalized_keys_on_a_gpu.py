"""On a Hopper GPU: keys that are normalized where their system is solved, next to a kernel of their own, in
bits and in time.

    PYTHONPATH=src python tests/normalized_keys_on_a_gpu.py

Half a minute. Exits with 1 if a bit differs.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isobit.frame.launch import run
from isobit.ops.gated_delta_rule import kernels_triton
from isobit.ops.gated_delta_rule.kernels_hopper import prepare


def us(call: Callable[[], object], calls: int = 20) -> float:
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
    for B, T, H, HV, K, bounds in (
        (4, 8192, 32, 32, 128, None),
        (1, 8192, 16, 16, 128, None),
        (1, 4096, 16, 32, 128, None),
        (2, 1000, 4, 8, 64, None),
        (1, 3000, 8, 16, 128, [0, 3, 3, 70, 134, 1000, 1063, 2999, 2999]),
    ):
        gen = torch.Generator("cuda").manual_seed(T)

        def drawn(*shape: int, gen: torch.Generator = gen) -> Tensor:
            return torch.randn(*shape, generator=gen, device="cuda")

        k, v, beta = drawn(B, T, H, K).bfloat16(), drawn(B, T, HV, 128).bfloat16(), drawn(B, T, HV).sigmoid()
        cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
        g2, end = kernels_triton.gates(logsigmoid(drawn(B, T, HV)) / 4, cu, run), (bounds or [T])[-1]

        def apart(k: Tensor = k, rest: tuple = (v, beta, g2, cu, True)) -> tuple:  # type: ignore[type-arg]
            return prepare(kernels_triton.l2norm(k), *rest)

        def together(k: Tensor = k, rest: tuple = (v, beta, g2, cu, True)) -> tuple:  # type: ignore[type-arg]
            return prepare(k, *rest, run, True)

        right, differ = apart(), set()
        for _ in range(30):
            for name, own, other in zip(("k", "u", "w", "T"), together(), right, strict=True):
                if not torch.equal(own[:, :end].view(torch.int16), other[:, :end].view(torch.int16)):
                    differ.add(name)
        bad |= bool(differ)
        what = f"{', '.join(sorted(differ))} DIFFER" if differ else "equal"
        print(
            f"{what:10} B={B} T={T} H={H} HV={HV} K={K}: "
            f"apart {us(apart):.1f} us, together {us(together):.1f}"
        )
    return bad


if __name__ == "__main__":
    sys.exit(main())
