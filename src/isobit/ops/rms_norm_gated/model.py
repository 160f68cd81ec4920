"""Class rms-gated/1 in numpy, operation by operation: the backend for CPU tensors. Its class is
rms-gated/1/cpu, because silu's exp is numpy's."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.host.row_stream import over_rows
from isobit.kernels.host.silu import silu, silu_slope

Array = np.ndarray[Any, Any]

_ONE = np.float32(1)


def _rows(t: Tensor) -> Array:
    return np.ascontiguousarray(t.detach().float().cpu().numpy().reshape(-1, t.shape[-1]))


def _narrow(x: Array, like: Tensor) -> Tensor:
    made = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(like.dtype)
    return made.to(like.device).view(like.shape)


def _rounded(x: Array, dtype: torch.dtype) -> Array:
    narrow: Array = torch.from_numpy(x).to(dtype).float().numpy()
    return narrow


def _means(terms: Array) -> Array:
    """[N, D] -> [N, 1]: columns by a tree of neighbours, padded with +0, divided by D."""
    N, D = terms.shape
    total = np.concatenate([terms, np.zeros((N, (1 << (D - 1).bit_length()) - D), np.float32)], 1)
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total / np.float32(D)


def _gated(args: dict[str, Any], y: Array) -> Array:
    """m: y rounded, times the weight."""
    x, weight = args["x"], args["weight"]
    m = _rounded(y, x.dtype) * _rows(weight[None])
    return _rounded(m, x.dtype) if weight.dtype == x.dtype else m


@np.errstate(all="ignore")
def rms_norm_gated(**args: Any) -> tuple[Tensor, Tensor | None]:
    """(out, rstd)."""
    x = _rows(args["x"])
    rstd = _ONE / np.sqrt(_means(x * x) + np.float32(args["eps"]))
    out = _narrow(_gated(args, x * rstd) * silu(_rows(args["gate"])), args["x"])
    lead = args["x"].shape[:-1]
    kept = torch.from_numpy(rstd[:, 0].copy()).to(args["x"].device).view(lead)
    return out, kept if args["return_rstd"] else None


@np.errstate(all="ignore")
def rms_norm_gated_bwd(**args: Any) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dgate); None for what is not wanted."""
    x, dout, gate = _rows(args["x"]), _rows(args["dout"]), _rows(args["gate"])
    rstd = args["rstd"].detach().cpu().numpy().reshape(-1, 1)
    y = x * rstd
    dm = dout * silu(gate)
    g = dm * _rows(args["weight"][None])
    dx = rstd * (g - y * _means(g * y))
    dgate = dout * _gated(args, y) * silu_slope(gate)
    return (
        _narrow(dx, args["x"]) if args["want_x"] else None,
        _narrow(over_rows(dm * y), args["weight"]) if args["want_weight"] else None,
        _narrow(dgate, args["x"]) if args["want_gate"] else None,
    )
