"""Inputs of `rms_norm` that would expose a wrong kernel, and variations of them."""

import math

import torch
from torch import Tensor

from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions

BY_ROWS = ("x", "residual")


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Options: residual, eps, offset, cast, and `weight` if its dtype differs."""
    dims = dict(case.dims)
    D = dims.pop("D")
    lead, given = tuple(dims.values()), dict(case.options)
    has_residual, weight_dtype = given.pop("residual", False), given.pop("weight", case.dtype)
    # Large inputs are drawn on the device: on a CPU that would take longer than all the rest.
    where = device if case.heavy or case.data == "random" else torch.device("cpu")
    gen = torch.Generator(where).manual_seed(options.seed)

    def rows() -> Tensor:
        drawn = torch.float64 if case.dtype == torch.float64 else torch.float32
        return torch.empty(math.prod(lead), D, dtype=drawn, device=where).normal_(generator=gen)

    x, residual = rows(), rows() if has_residual else None
    weight = 1.0 + 0.5 * torch.empty(D, dtype=x.dtype, device=where).normal_(generator=gen)
    if case.data == "edge":
        edge_rows(x)
    elif case.data == "constant":
        x.fill_(options.constant)
    args: Args = {"eps": 1e-6, "offset": 0.0, "cast": "before", **given}
    args |= {"x": x.reshape(*lead, D).to(device, case.dtype), "weight": weight.to(device, weight_dtype)}
    args["residual"] = None if residual is None else residual.reshape(*lead, D).to(device, case.dtype)
    return lay_out(args, case.layout)


def edge_rows(x: Tensor) -> None:
    """Kinds of rows that plain randn never produces, alternating, in place."""
    x[1::6, -1] += 100.0  # exposes a dropped tail
    x[2::6] *= 1e-3  # eps is as large as the mean of squares
    x[3::6] *= 300.0
    x[4::6] = 0.0
    x[4::6, -1:] = 1.0  # one number in a row of zeros
    x[5::6] = x[5::6].abs() + 1.0  # all of one sign


def lay_out(args: Args, layout: str) -> Args:
    return alter.laid_out_some(args, BY_ROWS, layout)


def padding(args: Args, rows: int) -> Args:
    """Rows of NaN and infinities; they must not change others."""
    return {n: None if args[n] is None else alter.rows_of_nan(args[n], rows) for n in BY_ROWS}


def half_rolled(t: Tensor, by: int = 1) -> Tensor:
    """The first half of the columns rolled; the others stay, so that they can be compared."""
    half = t.shape[-1] // 2
    return torch.cat([t[..., :half].roll(by, -1), t[..., half:]], -1)


def reordered(args: Args) -> Args:
    """The same mathematics, another order of the sum."""
    changed = {n: half_rolled(args[n]) for n in (*BY_ROWS, "weight") if args[n] is not None}
    return args | changed
