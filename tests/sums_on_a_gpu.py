"""On a Hopper GPU: tiles of sums over tokens next to each other and to `torch.mm`, in bits and in time.

    PYTHONPATH=src:tools python tests/sums_on_a_gpu.py

Half a minute. Operands from memory, in a CUDA graph, as `tile_model.measure` times products. Exits with 1 if a bit
differs.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from isobit.kernels.hopper import product
from isobit.kernels.hopper.tiles import Tile, fitted
from isobit.spec.rotation import copies_for
from tile_model.measure import microseconds

MAKE = partial(fitted, swapped=False, itemsize=4, step=64, accumulators=2)
TILES = {
    "128x128": MAKE(2, 128, group=8),
    "128x128 in halves": MAKE(2, 128, group=8, halved=True),
    "192x128 in halves": MAKE(3, 128, group=6, halved=True),
    "192x128 in halves, group 9": MAKE(3, 128, group=9, halved=True),
    "64x128": MAKE(1, 128, group=8),
    "64x128 in halves": MAKE(1, 128, group=8, halved=True),
}
LAYERS = (
    (2560, 9728), (9728, 2560), (6144, 1024), (1280, 5120), (4096, 4096), (14336, 4096), (4096, 32768),
    (896, 4864), (2560, 1024),
)  # fmt: skip


def calls_of(name: str, out: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    def call() -> None:
        product.sum_tile = lambda *_: TILES[name]
        for x, dy in pairs:
            product.sum_into(out, x, dy)

    return call


def main() -> int:
    bad, device = False, torch.device("cuda")
    for K, N in LAYERS:
        for T in (300, 1300, 4500):
            copies = max(1, min(copies_for(2 * T * (K + N), device), 65536 // T))
            pairs = [
                (torch.randn(T, K, device="cuda").bfloat16(), torch.randn(T, N, device="cuda").bfloat16())
                for _ in range(copies)
            ]
            outs = {name: torch.empty(N, K, device="cuda") for name in TILES}
            calls = {name: calls_of(name, outs[name], pairs) for name in TILES}
            other = torch.empty(N, K, device="cuda")

            def mm(pairs: list[tuple[Tensor, Tensor]] = pairs, other: Tensor = other) -> None:
                for x, dy in pairs:
                    torch.mm(dy.t(), x, out_dtype=torch.float32, out=other)

            us = {name: each / copies for name, each in microseconds({"mm": mm, **calls}).items()}
            first, *rest = outs.values()
            differ = [name for name, out in outs.items() if not torch.equal(out, first)]
            bad |= bool(differ)
            shown = ", ".join(f"{name} {each:.1f} ({us['mm'] / each:.2f})" for name, each in us.items())
            print(f"{'differ: ' + str(differ) if differ else 'equal'} {T} x {K} x {N}: {shown}", flush=True)
            del pairs, rest
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
