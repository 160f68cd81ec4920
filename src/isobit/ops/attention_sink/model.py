"""Class sink/1 in numpy, operation by operation: the backend for CPU tensors, with the bits of the Triton
kernels in the interpreter. numpy's exp of an element does not depend on its place in an array."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.ops.attention_sink.order import LANES

F32, ONE = np.float32, np.float32(1)


def _array(t: Tensor) -> np.ndarray:
    return t.detach().float().cpu().contiguous().numpy()


def _share(exponent: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(exponent)), 0 for queries that see no key."""
    return np.where(seen, ONE / (ONE + np.exp(exponent)), F32(0.0))


def halves(x: np.ndarray) -> np.ndarray:
    """Sums of the last dimension: filled up with zeros to a power of two, then the second half is added to
    the first until one is left."""
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = np.concatenate([x, np.zeros((*x.shape[:-1], width - x.shape[-1]), F32)], -1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


@np.errstate(all="ignore")
def attention_sink(**args: Any) -> Tensor:
    x, lse, sinks = args["x"], _array(args["lse"]), _array(args["sinks"])
    f = _share(sinks - lse, lse != -np.inf)
    return torch.from_numpy(_array(x) * f[..., None]).to(x.device, x.dtype)


@np.errstate(all="ignore")
def attention_sink_bwd(**args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dlse, dsinks), those that are wanted."""
    given, lse, sinks = args["x"], _array(args["lse"]), _array(args["sinks"])
    seen = lse != -np.inf
    f, h = _share(sinks - lse, seen), _share(lse - sinks, seen)
    x, g = (np.where(seen[..., None], _array(args[n]), F32(0.0)) for n in ("x", "dout"))
    dlse = halves(g * x) * (f * h)
    made = torch.from_numpy(g * f[..., None]), torch.from_numpy(dlse), torch.from_numpy(_summed(dlse))
    wanted = (args["want_x"], args["want_lse"], args["want_sinks"])
    like = (given, args["lse"], args["sinks"])
    return tuple(
        m.to(t.device, t.dtype) if want else None for m, t, want in zip(made, like, wanted, strict=True)
    )  # type: ignore[return-value]


def _summed(dlse: np.ndarray) -> np.ndarray:
    """[H]: minus the sum over tokens."""
    rows = dlse.reshape(-1, dlse.shape[-1]) * F32(-1.0)
    lanes = np.zeros((LANES, rows.shape[1]), F32)
    for first in range(0, len(rows), LANES):
        some = rows[first : first + LANES]
        lanes[: len(some)] += some
    return halves(lanes.T)
