"""What both ways of adding rows share: where a sequence is in its chunk, and the closing of a full chunk."""

import triton
import triton.language as tl

from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.triton.chain import product
from isobit.kernels.triton.interpreter import narrow
from isobit.ops.gated_delta_rule_step import state

CHUNK = tl.constexpr(state.CHUNK)

#: Rows of a tile of new rows: the least that a matrix instruction takes.
TILE = tl.constexpr(16)

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def counts_of(place, slots, lengths, b, first, SLOTS, T):
    """(whether the sequence takes part, its slot, rows, chunks, whether the first state was given, new rows)
    from unchecked integers. `first` rows of the call are done."""
    slot = b
    if slots is not None:
        slot = tl.load(slots + b).to(tl.int64)
    there = (slot >= 0) & (slot < SLOTS)
    slot = tl.where(there, slot, 0)
    at = place + slot * 4
    rows = tl.minimum(tl.maximum(tl.load(at, mask=there, other=0), 0), CHUNK)
    chunks = tl.load(at + 1, mask=there, other=0)
    oldest = tl.load(at + 2, mask=there, other=0)
    seeded = tl.load(at + 3, mask=there, other=0)
    count = tl.zeros([], tl.int32) + T
    if lengths is not None:
        count = tl.minimum(tl.maximum(tl.load(lengths + b), 0), T).to(tl.int32)
    count = tl.where(there, count - first, 0)
    return there, slot, rows, chunks, oldest, seeded, count


@triton.jit
def close_tile(
    start, start16, k_rows, vn_rows, gate_rows, old, new, hv, tile, held, H, HV, K: tl.constexpr, V,
    BV: tl.constexpr,
):  # fmt: skip
    """The state at the start of the next chunk, for BV columns. `old` and `new` are the halves of slots that
    hold the two chunks."""
    j, d, e = tl.arange(0, CHUNK), tl.arange(0, K), tile * BV + tl.arange(0, BV)
    h = hv // (HV // H)
    at_rows = (old * HV + hv) * CHUNK
    g2 = tl.load(gate_rows + at_rows + j) * _LOG2E
    last = tl.load(gate_rows + at_rows + CHUNK - 1) * _LOG2E
    vn = tl.load(vn_rows + (at_rows + j)[:, None] * V + e[None, :]).to(tl.float32)
    decayed = narrow(vn * tl.exp2(last - g2)[:, None], start16)
    k = tl.load(k_rows + ((old * H + h) * CHUNK + j)[None, :] * K + d[:, None])
    inside = d.to(tl.int64)[:, None] * V + e[None, :]
    S = tl.load(start + (old * HV + hv) * K * V + inside, mask=(inside >= 0) & held, other=0.0)
    S = product(k, decayed, S * tl.exp2(last))
    to = (new * HV + hv) * K * V + inside
    tl.store(start + to, S)
    tl.store(start16 + to, narrow(S, start16))
