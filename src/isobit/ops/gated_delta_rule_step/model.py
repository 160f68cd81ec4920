"""The arithmetic of decoding in `gdr/1` in numpy, row by row. Kernels are compared with it, and it is the
backend for CPU tensors.

What one operation of the device does is a parameter, as in the model of the whole chunk. This one computes a
row from the rows before it and shares no code with that: a proof compares the two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.host.temperature import LOG2E
from isobit.ops.attention.model import fused
from isobit.ops.gated_delta_rule_step.state import CHUNK, CHUNKS, OLDEST, ROWS, SEEDED

Array = np.ndarray
F32 = np.float32
GROUP = 16


class Arithmetic(NamedTuple):
    """The operations of a device, on fp32 arrays; all but the last dimensions of a product may be batched."""

    #: (left [..., m, k], right [..., k, n], acc [..., m, n], dtype of factors) -> acc after steps over k.
    product: Callable[[Array, Array, Array, torch.dtype], Array]
    fma: Callable[[Array, Any, Array], Array]
    exp2: Callable[[Array], Array]


def _product(left: Array, right: Array, acc: Array, dtype: torch.dtype) -> Array:
    """Each step sums 16 products in ascending order, then adds the sum to the accumulator. No result is
    -0."""
    acc = acc.copy()
    for first in range(0, left.shape[-1], GROUP):
        step = left[..., first, None] * right[..., first, None, :]
        for i in range(first + 1, min(first + GROUP, left.shape[-1])):
            step = step + left[..., i, None] * right[..., i, None, :]
        acc += step + F32(0.0)
    return acc


CPU = Arithmetic(_product, fused, np.exp2)


class Chunk:
    """The present chunk of one slot, all heads at once, in fp32 arrays that hold numbers of the dtype."""

    def __init__(self, args: dict[str, Any], slot: int) -> None:
        self.args, self.slot = args, slot
        self.load()

    def load(self) -> None:
        place = self.args["place"][self.slot]
        self.rows = min(max(int(place[ROWS]), 0), CHUNK)
        self.chunks = int(place[CHUNKS])
        half = self.chunks & (self.args["start"].shape[1] - 1)
        self.of = {
            name: self.args[name][self.slot, half]
            for name in (
                "start", "start16", "k_rows", "bv_rows", "vn_rows", "inverse", "beta_rows", "gate_rows",
            )
        }  # fmt: skip
        self.empty = self.chunks == 0 and int(place[SEEDED]) == 0

    def array(self, name: str, rows: int | None = None) -> Array:
        """Its first rows, or the state."""
        t = self.of[name]
        if rows is None:
            return _array(torch.zeros_like(t) if self.empty else t)
        return _array(t[:, :rows])


def _array(t: Tensor) -> Array:
    return t.detach().float().cpu().numpy().copy()


def _rounded(x: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy()


def close(chunk: Chunk, do: Arithmetic) -> None:
    """The state of the next chunk's start, from all 64 rows of this one."""
    args, dtype = chunk.args, chunk.of["start16"].dtype
    group = args["start"].shape[2] // args["k_rows"].shape[2]
    g2 = chunk.array("gate_rows", CHUNK) * F32(LOG2E)
    last = g2[:, -1:]
    decayed = _rounded(chunk.array("vn_rows", CHUNK) * do.exp2(last - g2)[..., None], dtype)
    k = np.repeat(chunk.array("k_rows", CHUNK), group, 0)
    begun = chunk.array("start") * do.exp2(last)[..., None]
    S = torch.from_numpy(do.product(k.swapaxes(-1, -2), decayed, begun, dtype))
    place = args["place"][chunk.slot]
    place[ROWS] = 0
    place[CHUNKS] = chunk.chunks + 1
    place[OLDEST] = chunk.chunks if args["start"].shape[1] == 2 else chunk.chunks + 1
    chunk.load()
    chunk.of["start"].copy_(S)
    chunk.of["start16"].copy_(S.to(dtype))


def one_row(chunk: Chunk, new: dict[str, Array], scale: float, do: Arithmetic) -> Array:
    """The output of one new row [HV, V]; what later rows need of it is stored."""
    args, dtype, t = chunk.args, chunk.of["start16"].dtype, chunk.rows
    HV, K, V = chunk.of["start"].shape
    group = HV // args["k_rows"].shape[2]
    beta = new["beta"]
    gate = new["g"] if t == 0 else chunk.array("gate_rows", t)[:, -1] + new["g"]
    chunk.of["k_rows"][:, t] = torch.from_numpy(new["k"]).to(dtype)
    chunk.of["beta_rows"][:, t] = torch.from_numpy(beta)
    chunk.of["gate_rows"][:, t] = torch.from_numpy(gate)
    bv = _rounded(beta[:, None] * new["v"], dtype)
    chunk.of["bv_rows"][:, t] = torch.from_numpy(bv).to(dtype)
    k = np.repeat(chunk.array("k_rows", t + 1), group, 0)  # [HV, t + 1, K]
    g2 = chunk.array("gate_rows", t + 1) * F32(LOG2E)
    decay = do.exp2(g2[:, -1:] - g2)
    q, k_t = (np.repeat(x, group, 0)[:, None] for x in (new["q"], new["k"]))
    zeros = np.zeros((HV, 1, t + 1), F32)
    kk = do.product(k_t, k.swapaxes(-1, -2), zeros, dtype)[:, 0]
    A = kk * (beta[:, None] * decay)
    T = np.zeros((HV, CHUNK), F32)
    T[:, t] = 1.0
    inverse = chunk.array("inverse", t)
    for j in range(t):
        T = do.fma(-A[:, j, None], inverse[:, j], T)
    chunk.of["inverse"][:, t] = torch.from_numpy(T)
    Tb = _rounded(T[:, None, : t + 1], dtype)
    bk = _rounded(k * (chunk.array("beta_rows", t + 1) * do.exp2(g2))[..., None], dtype)
    u = _rounded(do.product(Tb, chunk.array("bv_rows", t + 1), np.zeros((HV, 1, V), F32), dtype), dtype)
    w = _rounded(do.product(Tb, bk, np.zeros((HV, 1, K), F32), dtype), dtype)
    S = chunk.array("start16")
    vn = _rounded(u - do.product(w, S, np.zeros((HV, 1, V), F32), dtype), dtype)
    chunk.of["vn_rows"][:, t] = torch.from_numpy(vn[:, 0]).to(dtype)
    P = _rounded(do.product(q, k.swapaxes(-1, -2), zeros, dtype) * decay[:, None], dtype)
    out = do.product(q, S, np.zeros((HV, 1, V), F32), dtype) * do.exp2(g2[:, -1])[:, None, None]
    out = do.product(P, chunk.array("vn_rows", t + 1), out, dtype)
    chunk.rows = args["place"][chunk.slot, ROWS] = t + 1
    return _rounded(out[:, 0] * F32(scale), dtype)


def rows(do: Arithmetic = CPU, **given: Any) -> Tensor:
    """Backend: all new rows of all sequences, one after another."""
    names = ("q", "k", "v", "g", "beta")
    here = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in given.items()}
    B, T, _, _ = here["q"].shape
    HV, V = here["v"].shape[2:]
    out = torch.zeros(B, T, HV, V, dtype=here["q"].dtype)
    slots = range(B) if here["slots"] is None else here["slots"].tolist()
    lengths = [T] * B if here["lengths"] is None else here["lengths"].tolist()
    ones, zeros = np.ones(HV, F32), np.zeros(HV, F32)
    with np.errstate(invalid="ignore", over="ignore"):
        for b, slot in enumerate(slots):
            if not 0 <= slot < len(here["place"]):
                continue
            chunk = Chunk(here, slot)
            for t in range(min(max(lengths[b], 0), T)):
                if chunk.rows == CHUNK:
                    close(chunk, do)
                new = {n: None if here[n] is None else _array(here[n][b, t]) for n in names}
                new |= {"g": zeros if new["g"] is None else new["g"]}
                new |= {"beta": ones if new["beta"] is None else new["beta"]}
                out[b, t] = torch.from_numpy(one_row(chunk, new, here["scale"], do))  # type: ignore[arg-type]
    for name, t in given.items():
        if isinstance(t, Tensor) and t.device.type != "cpu" and name not in (*names, "slots", "lengths"):
            t.copy_(here[name])
    return out.to(given["q"].device)
