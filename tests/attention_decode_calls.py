"""Decoding on Hopper without one: its kernel on a CPU, the fold in Triton's interpreter, with segments so
short that few keys cross their borders, held against the numpy model.

Run as a program under TRITON_INTERPRET=1, with the name of a function here.
"""

import sys
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_calls import F16, ints, made, same
from attention_on_a_cpu import of_attention
from gluon_on_a_cpu import Device, in_order
from isobit.frame.launch import run
from isobit.kernels.hopper import division, heads, pipeline, softmax
from isobit.ops.attention import (
    kernels_hopper,
    kernels_hopper_decode,
    kernels_hopper_softcap,
    kernels_triton,
    model,
)

NAN = float("nan")


def on_a_cpu(
    args: dict[str, Any], segment: int = 128, block: int = 64, device: Device | None = None, **changes: Any
) -> Any:
    device = of_attention(device or Device(model.CPU, 1))
    modules = (
        pipeline,
        heads,
        division,
        softmax,
        kernels_hopper_softcap,
        kernels_hopper,
        kernels_hopper_decode,
    )
    scope = device.scope(*modules, wait_for_previous_kernel=lambda: None, **changes)

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        assert options.pop("launch_pdl"), "the next kernel must be allowed to start, and waits"
        if kernel is kernels_hopper_decode.decode_kernel:
            for workspace in values[1:3]:
                workspace.fill_(NAN)  # it is not initialised
            device.programs = grid[0]
            device.run(scope, kernel, in_order(kernel, values, options), grid[1])
        else:
            assert options["EARLY"] is True  # the fold waits
            run(kernel, grid, *values, **options | {"EARLY": False})

    return kernels_hopper_decode.attention(launch, segment=segment, block=block, **args)


def paged(page: int, D: int) -> dict[str, Any]:
    """Two sequences in shuffled pages, the first of them short: after the last key of the other there is no
    page, and no table. NaN in an unused page, and after the keys."""
    args, count = made(2, 2, 240, 2, 1, D), 240 // page
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))
    args |= {"block_table": order.view(2, count).int(), "key_end": ints(77, count * page)}
    for name in ("k", "v"):
        t = args[name][:, : count * page]
        t[0, 77:] = NAN
        args[name] = torch.full((2 * count + 1, page, 1, D), NAN, dtype=t.dtype)
        args[name][order] = t.reshape(2 * count, page, 1, D)
    return args


def captured() -> dict[str, Any]:
    """As a CUDA graph replays it: room for many more keys than there are, and two rows that are padding.
    These have no keys, and anything in their tables and queries."""
    args, page, room = made(4, 1, 64, 4, 2, 64), 64, 640
    table = torch.full((4, room // page), -(1 << 30), dtype=torch.int32)
    table[0, :2], table[2, :3], table[3] = ints(4, 1), ints(0, 3, 2), 1 << 30
    args["q"][1], args["q"][3] = NAN, NAN
    args |= {"block_table": table, "key_end": ints(77, 0, 192, 0)}
    for name in ("k", "v"):
        args[name] = torch.cat([args[name], args[name][:1].flip(1)])  # five pages
        args[name][1, 77 - page :] = NAN
    return args


def bounded(args: dict[str, Any]) -> dict[str, Any]:
    """Values outside the bounds may be anything."""
    for b, (first, end) in enumerate(zip(args["key_start"].tolist(), args["key_end"].tolist(), strict=True)):
        for name in ("k", "v"):
            args[name][b, :first], args[name][b, end:] = NAN, NAN
    return args


def infinite(args: dict[str, Any]) -> dict[str, Any]:
    """A value of the first segment, which must not reach the states of others."""
    args["v"][:, 7, 0, 5] = float("inf")
    return args


CASES: dict[str, dict[str, Any]] = {
    "several queries": made(1, 3, 300, 4, 2, 64),
    "a group of three": made(1, 1, 330, 3, 1, 128),
    "window": made(1, 3, 500, 2, 1, 64, window=150),
    "bounds and a cap": bounded(
        made(3, 2, 290, 2, 1, 80, F16, softcap=3.0, key_start=ints(5, 200, 9), key_end=ints(280, 201, 9))
    ),
    "a cap of class attn/2": made(1, 2, 290, 2, 1, 64, softcap=3.0, tangent=2),
    "every query sees all": made(1, 3, 150, 2, 1, 96, causal=False),
    "fewer keys than queries": bounded(made(1, 7, 150, 1, 1, 64, key_start=ints(0), key_end=ints(3))),
    "blocks of 64 and a tile of 32": made(1, 9, 200, 2, 1, 256),
    "an infinite value": infinite(made(1, 1, 300, 2, 1, 64)),
    "a graph": captured(),
    "pages of 16": paged(16, 80),
    "pages of 48": paged(48, 64),
    "pages of a block": paged(64, 64),
    "pages of two blocks": paged(128, 128),
}


def bits() -> None:
    """Those of the model: a program for every segment, and one for all."""
    for what, args in CASES.items():
        wanted = model.attention(segment=128, block=64, **args)
        for many in (1024, 1) if what in ("several queries", "window", "a graph") else (1,):
            kernels_hopper_decode.MANY_PROGRAMS = many
            same(f"{what}, {many}", on_a_cpu(args), wanted)
    args = made(1, 9, 400, 4, 1, 128)
    same("blocks of 128", on_a_cpu(args, 256, 128), model.attention(segment=256, block=128, **args))


def splits() -> None:
    """The grid is that of the room for keys; the segments that a sequence has are split over its programs.
    Others load nothing."""

    class Counting(Device):
        def load_box(self, *given: Any, **more: Any) -> Any:
            loads[self.mine.places] += 1
            return super().load_box(*given, **more)

    def loads_of(args: dict[str, Any]) -> dict[tuple[int, int], int]:
        loads.clear()
        on_a_cpu(args, device=Counting(model.CPU, 1))
        return loads

    loads = Counter[tuple[int, int]]()

    args, page = made(2, 1, 64, 1, 1, 64), 64  # room for ten segments of two pages
    table = torch.zeros(2, 20, dtype=torch.int32)
    kernels_hopper_decode.MANY_PROGRAMS = 10  # five for each sequence
    for keys, wanted in (
        (3 * 2 * page, {0: 4, 1: 4, 2: 4}),  # keys and values of two blocks each
        (9 * 2 * page, {0: 8, 1: 8, 2: 8, 3: 8, 4: 4}),
        (1, {0: 2}),
    ):
        args |= {"block_table": table, "key_end": ints(keys, 0)}
        assert loads_of(args) == {(0, y): count for y, count in wanted.items()}, (keys, loads)
    args |= {
        "window": 130,
        "key_end": ints(20 * page, 0),
    }  # one block, and a segment
    assert loads_of(args) == {(0, 0): 2, (0, 1): 4}


def controls() -> None:
    """These faults must be detected: other boundaries, keys whose slot is released before they are
    multiplied, values after the last that are not cleared."""
    args = CASES["several queries"]
    wanted = model.attention(segment=128, block=64, **args)
    for segment, block in ((192, 64), (128, 32)):
        other = model.attention(segment=segment, block=block, **args)
        assert not all(torch.equal(a, b) for a, b in zip(other, wanted, strict=True)), (segment, block)

    class Early(Device):
        def multiply(self, a: Any, b: Any, *rest: Any, **more: Any) -> Any:
            product = super().multiply(a, b, *rest, **more)
            a.read()[...] = 0.0  # another write goes there from now on
            return product

    dirty = CASES["pages of 16"]
    broken = {
        "too early": (wanted, lambda: on_a_cpu(args, device=Early(model.CPU, 1))),
        "not cleared": (
            model.attention(segment=128, block=64, **dirty),
            lambda: on_a_cpu(dirty, clear_after=lambda *rest: None),
        ),
    }
    for what, (right, call) in broken.items():
        assert not torch.equal(call()[0], right[0]), what


def folds() -> None:
    """States are folded in ascending order, some at once. Unseen segments change nothing, whatever they
    hold."""
    do, c, gen = model.CPU, np.float32(0.3), np.random.default_rng(0)
    rows, D = 4, 80
    for segments in (1, 16, 17, 40):
        m, s = gen.normal(0, 8, (rows, segments)), gen.uniform(1, 900, (rows, segments))
        m, s, acc = (x.astype(np.float32) for x in (m, s, gen.normal(0, 30, (rows, segments, D))))
        unseen = gen.random((rows, segments)) < 0.2
        unseen[0], unseen[1] = True, False
        m[unseen], s[unseen], acc[unseen] = -np.inf, 0.0, np.nan

        def folded(order: Any, m: Any = m, s: Any = s, acc: Any = acc) -> tuple[Tensor, Tensor]:
            """In fp32, which hides nothing."""
            out, lse = torch.full((rows, D), NAN), torch.full((rows,), NAN)
            sums, states = (torch.from_numpy(x[:, order].copy()) for x in (np.stack((m, s), -1), acc))
            constants = {"H": rows, "D": D, "DP": 128, "AT_ONCE": kernels_triton.STATES_AT_ONCE}
            constants |= {"SEGMENT": 128, "WINDOWED": False, "EARLY": False, "ALL": True}
            given = (sums, states, out, lse, None, None, 1, 128 * segments, 0, sums.shape[1], float(c))
            run(kernels_triton.fold_kernel, (rows,), *given, **constants, num_warps=1)
            return out, lse

        M, L, total = (np.full(n, x, np.float32) for n, x in ((rows, -np.inf), (rows, 0), ((rows, D), 0)))
        for j in range(segments):
            top, seen = np.maximum(M, m[:, j]), s[:, j] != 0
            base = np.where(np.isinf(top), np.float32(0), top)
            old, new = do.exp2((M - base) * c), do.exp2((m[:, j] - base) * c)
            total = np.where(seen[:, None], do.fma(acc[:, j], new[:, None], total * old[:, None]), total)
            L, M = np.where(seen, do.fma(s[:, j], new, L * old), L), np.where(seen, top, M)
        there, safe = L != 0, np.where(L != 0, L, np.float32(1))
        assert there[:2].tolist() == [False, True]
        wanted = np.where(there[:, None], total / safe[:, None], np.float32(0))
        ends = np.where(there, (M * c + do.log2(safe)) * model.LN2, np.float32(-np.inf))
        same(f"{segments}", folded(slice(None)), (torch.from_numpy(wanted), torch.from_numpy(ends)))
        if segments > 1:  # the control: as they happen to arrive
            assert not torch.equal(folded(gen.permutation(segments))[0], torch.from_numpy(wanted)), segments


if __name__ == "__main__":
    globals()[sys.argv[1]]()
