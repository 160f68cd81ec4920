"""Decoding in `gdr/1` in numpy, row by row: the backend for CPU tensors, which kernels are compared with.

Operations, roundings and rows of the inverse are those of the model of `gated_delta_rule`. That one computes
whole chunks. A row here uses the stored rows before it, as the kernels do; a law compares the two.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.host.temperature import LOG2E
from isobit.ops.gated_delta_rule.model import CPU, Arithmetic, Array, closed, inverse_row, l2norm, rounded
from isobit.ops.gated_delta_rule_step.state import CHUNK, CHUNKS, OLDEST, ROWS, SEEDED, TENSORS

F32 = np.float32


class Slot:
    """One slot: its present chunk as fp32 arrays, all heads at once. Rows are kept as they come, and written
    into the state by `store`."""

    def __init__(self, state: dict[str, Tensor], slot: int) -> None:
        self.state, self.slot, self.dtype = state, slot, state["start16"].dtype
        self.halves, self.HV, self.K, self.V = state["start"].shape[1:]
        self.group = self.HV // state["k_rows"].shape[2]
        self.place = state["place"][slot].tolist()
        self.rows = self.saved = min(max(self.place[ROWS], 0), CHUNK)
        self._load()

    def _of(self, name: str) -> Tensor:
        return self.state[name][self.slot, self.place[CHUNKS] & (self.halves - 1)]

    def _load(self) -> None:
        t = self.rows

        def some(name: str, *columns: int) -> Array:
            own = self._of(name)
            result = np.zeros((own.shape[0], CHUNK, *columns), F32)
            result[:, :t] = own[:, :t].float().numpy()
            return result

        self.k, self.bv, self.vn = some("k_rows", self.K), some("bv_rows", self.V), some("vn_rows", self.V)
        self.beta, self.gate, self.T = some("beta_rows"), some("gate_rows"), some("inverse", CHUNK)
        held = self.place[CHUNKS] != 0 or self.place[SEEDED] != 0
        shape = (self.HV, self.K, self.V)
        self.S = self._of("start").float().numpy() if held else np.zeros(shape, F32)
        self.S16 = self._of("start16").float().numpy() if held else np.zeros(shape, F32)

    def store(self) -> None:
        """Write the new rows."""
        new = slice(self.saved, self.rows)
        mine = {"k_rows": self.k, "bv_rows": self.bv, "vn_rows": self.vn, "inverse": self.T}
        for name, rows in (mine | {"beta_rows": self.beta, "gate_rows": self.gate}).items():
            own = self._of(name)
            own[:, new] = torch.from_numpy(np.ascontiguousarray(rows[:, new])).to(own.dtype)
        self.place[ROWS] = self.saved = self.rows
        self.state["place"][self.slot] = torch.tensor(self.place, dtype=torch.int32, device="cpu")

    def close(self, do: Arithmetic) -> None:
        """Begin the next chunk: the state at its start, from all rows of this one."""
        self.store()
        k = np.repeat(self.k, self.group, 0)
        S = torch.from_numpy(closed(k, self.vn, self.gate * F32(LOG2E), self.S, do, self.dtype))
        chunks = self.place[CHUNKS]
        self.place[CHUNKS], self.place[OLDEST] = chunks + 1, chunks + 2 - self.halves
        self._of("start").copy_(S)
        self._of("start16").copy_(S.to(self.dtype))
        self.rows = self.saved = 0
        self._load()

    def add(self, q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float, do: Arithmetic) -> Array:
        """The output of one more row, [HV, V]: q and k are [H, K], v [HV, V], g and beta [HV]."""
        t, dtype = self.rows, self.dtype
        upto = slice(t + 1)
        self.k[:, t], self.beta[:, t] = k, beta
        self.bv[:, t] = rounded(beta[:, None] * v, dtype)
        self.gate[:, t] = g if t == 0 else self.gate[:, t - 1] + g
        keys, g2 = np.repeat(self.k[:, upto], self.group, 0), self.gate[:, upto] * F32(LOG2E)
        q, k = (np.repeat(x, self.group, 0)[:, None] for x in (q, k))
        by_keys, decay = keys.swapaxes(-1, -2), do.exp2(g2[:, -1:] - g2)

        def times(left: Array, right: Array, acc: Array | None = None) -> Array:
            """[HV, 1, columns]."""
            begin = np.zeros((self.HV, 1, right.shape[-1]), F32) if acc is None else acc
            return do.product(left, right, begin, dtype)

        A = times(k, by_keys)[:, 0, :t] * (beta[:, None] * decay[:, :t])
        self.T[:, t] = inverse_row(A, self.T[:, :t], t, do)
        Tb = rounded(self.T[:, t, None, upto], dtype)
        bk = rounded(keys * (self.beta[:, upto] * do.exp2(g2))[..., None], dtype)
        u, w = (rounded(times(Tb, x), dtype) for x in (self.bv[:, upto], bk))
        self.vn[:, t] = rounded(u - times(w, self.S16), dtype)[:, 0]
        p = rounded(times(q, by_keys) * decay[:, None], dtype)
        acc = times(q, self.S16) * do.exp2(g2[:, -1])[:, None, None]
        self.rows = t + 1
        return rounded(times(p, self.vn[:, upto], acc)[:, 0] * F32(scale), dtype)


def _array(t: Tensor) -> Array:
    return t.detach().float().numpy()


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def rows(do: Arithmetic = CPU, **given: Any) -> Tensor:
    """Backend: all new rows of all sequences, one after another."""
    args: dict[str, Any] = {
        name: t.detach().cpu() if isinstance(t, Tensor) else t for name, t in given.items()
    }
    state = {name: args[name] for name in TENSORS}
    B, T = args["q"].shape[:2]
    out = torch.zeros(args["v"].shape, dtype=args["v"].dtype, device="cpu")
    slots = range(B) if args["slots"] is None else args["slots"].tolist()
    lengths = [T] * B if args["lengths"] is None else args["lengths"].tolist()
    for b, number in enumerate(slots):
        count = min(max(lengths[b], 0), T)
        if not 0 <= number < len(state["place"]) or count == 0:
            continue
        slot = Slot(state, number)
        q, k, v, beta = (_array(args[name][b]) for name in ("q", "k", "v", "beta"))
        if args["use_qk_l2norm_in_kernel"]:
            q, k = l2norm(q, out.dtype), l2norm(k, out.dtype)
        g = np.zeros_like(beta) if args["g"] is None else _array(args["g"][b])
        for t in range(count):
            if slot.rows == CHUNK:
                slot.close(do)
            o = slot.add(q[t], k[t], v[t], g[t], beta[t], args["scale"], do)
            out[b, t] = torch.from_numpy(o).to(out.dtype)
        slot.store()
    for name, written in state.items():
        if given[name].device.type != "cpu":
            given[name].copy_(written)
    return out.to(given["q"].device)
