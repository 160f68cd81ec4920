"""On a Hopper GPU: tiles whose output leaves in halves, and so have a stage more, next to those in use.

    PYTHONPATH=src:tools python tests/halved_tiles_on_a_gpu.py        (about a minute and a half)

Weights from memory, in a CUDA graph, as `tile_model.measure` times them; it also compares their bits.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from tile_model.measure import MM, calls_of, drawn, microseconds
from tile_model.problem import chain16

BIG = (
    "128x256",
    "128x128",
    "128x128 swapped",
    "64x256",
    "192x128",
    "192x128 swapped",
    "64x192",
    "128x160",
    "128x192",
)
HALVED = (
    "128x256 halved", "128x256 swapped halved", "64x256 halved", "64x256 swapped halved", "192x128 halved",
    "192x128 swapped halved", "128x256 swapped", "64x256 swapped",
)  # fmt: skip
SMALL = ("64x8 swapped", "64x16 swapped", "128x16 swapped", "192x32 swapped", "128x32 swapped")
CELLS = (
    *(("forward", M, K, N) for K, N in ((5120, 27648), (4096, 14336), (8192, 8192)) for M in (144, 200, 272)),
    *(
        ("forward", M, K, N)
        for K, N in ((4096, 4096), (9728, 2560), (2560, 9728), (8192, 8192))
        for M in (1300, 2100)
    ),
    *(("dx", M, N, K) for K, N in ((2560, 9728), (4096, 4096), (9728, 2560)) for M in (1300, 2100)),
    *(("forward", M, 2560, 9728) for M in (1, 8, 24, 144)),
)


def first_call(name: str) -> str | None:
    problem = chain16()
    x, w, out = (torch.zeros(512, 512, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    try:
        for each in (w, w.t()):
            problem.call({**problem.chosen, **problem.others}[name], out, x, each)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name}: {error}", file=sys.stderr)
        return name
    return None


def main() -> None:
    names = (*BIG, *HALVED, *SMALL)
    with ProcessPoolExecutor(16, get_context("spawn")) as pool:
        failed = set(pool.map(first_call, names))
    problem, device = chain16(), torch.device("cuda")
    for kind, M, K, N in CELLS:
        few = M <= 24
        some = [n for n in (SMALL if few else (*BIG, *HALVED)) if n not in failed]
        copies = list(drawn(kind, K, N, device))
        x = torch.randn(M, K, dtype=torch.bfloat16, device=device)
        us = {n: each / len(copies) for n, each in microseconds(calls_of(problem, some, x, copies)).items()}
        mm = us.pop(MM)
        best = sorted(us.items(), key=lambda item: item[1])
        now = min((n for n in us if n in problem.chosen), key=lambda n: us[n])
        print(f"{kind} {M} x {K} x {N}: mm {mm:.1f}, {now} {us[now]:.1f} ({mm / us[now]:.2f}); best:",
              ", ".join(f"{n} {t:.1f} ({mm / t:.2f})" for n, t in best[:5]), flush=True)  # fmt: skip
        del copies


if __name__ == "__main__":
    main()
