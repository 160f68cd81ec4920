"""Inputs of grouped products: rows in uneven groups, and the same calls in other layouts."""

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from isobit.ops.det_gemm.proof import inputs
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions

INT64 = torch.int64


def bounds_of(M: int, E: int, kind: str, gen: torch.Generator) -> list[int]:
    """[E + 1] offsets into M rows. By default some rows are of no expert, and one expert in three has no
    rows."""
    if E == 0:
        return [0]
    if kind == "one":  # has all rows
        sizes = [M if e == E // 2 else 0 for e in range(E)]
    elif kind == "routed":  # at random, and all rows have an expert
        sizes = torch.bincount(torch.randint(E, (M,), generator=gen), minlength=E).tolist()
    else:
        shares = torch.rand(E, generator=gen) ** 2 + 0.05
        shares[1::3] = 0.0
        sizes = (shares / shares.sum() * (M - min(M // 8, 40))).int().tolist()
    return [0, *torch.tensor(sizes).cumsum(0).tolist()]


def offsets_of(case: Case, M: int, E: int, device: torch.device, options: InputOptions) -> Tensor:
    gen = torch.Generator().manual_seed(options.seed + 5)
    bounds = bounds_of(M, E, case.options.get("groups", "uneven"), gen)
    return torch.tensor(bounds, dtype=case.options.get("offsets", torch.int32), device=device)


def groups(args: Args) -> Iterator[tuple[int, int, int]]:
    """(expert, first row, end)."""
    for e, (first, end) in enumerate(pairwise(args["offsets"].tolist())):
        yield e, first, end


def make_linear(case: Case, device: torch.device, options: InputOptions) -> Args:
    *lead, E, K, N = case.dims.values()
    x = inputs.matrix(tuple(lead), K, case, device, options, side=0)
    weight = inputs.matrix((E, N), K, case, device, options, side=1)
    offsets = offsets_of(case, math.prod(lead), E, device, options)
    args: Args = {"x": x, "weight": weight, "offsets": offsets, "bias": None}
    if case.options.get("bias"):
        gen = torch.Generator().manual_seed(options.seed + 2)
        bias = inputs.addends((E, N), case.data, case.dtype, gen)
        args["bias"] = bias.to(device, case.dtype if case.options["bias"] == "own" else case.options["bias"])
    return lay_out_linear(args, case.layout)


def lay_out_linear(args: Args, layout: str) -> Args:
    args = alter.laid_out_some(args, ("x", "weight"), layout)
    if args["bias"] is not None and layout in ("padded", "offset"):
        args["bias"] = alter.laid_out(args["bias"], layout)
    return args


def make_dw(case: Case, device: torch.device, options: InputOptions) -> Args:
    *lead, E, K, N = case.dims.values()
    M = math.prod(lead)
    x = inputs.matrix((K,), M, case, device, options, side=0).mT.contiguous()  # here k is the rows
    dy = inputs.matrix((N,), M, case, device, options, side=1).mT.contiguous()
    offsets = offsets_of(case, M, E, device, options)
    args: Args = {"x": x.view(*lead, K), "dy": dy.view(*lead, N), "offsets": offsets}
    args |= {"cu_seqlens": None, "init": None}
    gen = torch.Generator().manual_seed(options.seed + 2)
    if case.options.get("sequences"):
        # Random boundaries; those of a short expert repeat, so some sequences are empty.
        inner = torch.rand(E, case.options["sequences"] - 1, generator=gen).sort(-1).values
        starts = offsets.cpu()
        sizes = starts.diff()
        at = (starts[:-1, None] + (inner * (sizes[:, None] + 1)).int()).minimum(starts[1:, None])
        bounds = torch.cat([starts[:-1, None], at, starts[1:, None]], 1)
        args["cu_seqlens"] = bounds.to(device, offsets.dtype)
    if case.options.get("init"):
        args["init"] = inputs.addends((E, N, K), case.data, case.dtype, gen).to(device)
    return lay_out_dw(args, case.layout)


def lay_out_dw(args: Args, layout: str) -> Args:
    return alter.laid_out_some(args, ("x", "dy"), layout)


def sequences(args: Args, e: int, first: int, end: int) -> list[int]:
    """How many rows of an expert each sequence has."""
    if args["cu_seqlens"] is None:
        return [end - first]
    return [b - a for a, b in pairwise(args["cu_seqlens"][e].tolist())]


def descending(args: Args) -> tuple[Args, int | None]:
    offsets = args["offsets"].clone()
    offsets[-1] = 0
    offsets[-2] = 1
    return args | {"offsets": offsets}, None
