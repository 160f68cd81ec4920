"""Class gates/1 in numpy, operation by operation: the backend for CPU tensors. Its class is gates/1/cpu,
because exp and log are numpy's."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.host.row_stream import over_rows
from isobit.kernels.host.silu import sigmoid
from isobit.kernels.host.softplus import softplus

Array = np.ndarray[Any, Any]

_ONE = np.float32(1)


def _rows(t: Tensor) -> Array:
    return np.ascontiguousarray(t.detach().float().cpu().numpy().reshape(-1, t.shape[-1]))


def _narrow(x: Array, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    made = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(like.dtype if dtype is None else dtype)
    return made.to(like.device).view(like.shape)


def _decays(args: dict[str, Any]) -> tuple[Array, Array]:
    """(a + dt_bias, -exp(A_log))."""
    with np.errstate(all="ignore"):
        return _rows(args["a"]) + _rows(args["dt_bias"][None]), -np.exp(_rows(args["A_log"][None]))


@np.errstate(all="ignore")
def delta_gates(**args: Any) -> tuple[Tensor, Tensor]:
    """(g, beta)."""
    t, rate = _decays(args)
    g = _narrow(rate * softplus(t), args["a"], torch.float32)
    return g, _narrow(sigmoid(_rows(args["b"])), args["b"])


@np.errstate(all="ignore")
def delta_gates_bwd(**args: Any) -> tuple[Tensor | None, ...]:
    """(da, db, dA_log, ddt_bias); None for what is not wanted."""
    t, rate = _decays(args)
    dg = np.zeros_like(t) if args["dg"] is None else _rows(args["dg"])
    dbeta = np.zeros_like(t) if args["dbeta"] is None else _rows(args["dbeta"])
    da = rate * np.where(t > np.float32(20), _ONE, sigmoid(t)) * dg
    s = sigmoid(_rows(args["b"]))
    return (
        _narrow(da, args["a"]) if args["want_a"] else None,
        _narrow(s * (_ONE - s) * dbeta, args["b"]) if args["want_b"] else None,
        _narrow(over_rows(rate * softplus(t) * dg), args["A_log"]) if args["want_A_log"] else None,
        _narrow(over_rows(da), args["dt_bias"]) if args["want_dt_bias"] else None,
    )
