"""What is written after all programs of a sequence have read it, in Triton: the second launch of a token
where programs are many."""

import triton
import triton.language as tl

from isobit.ops.gated_delta_rule_step.kernels_triton import CHUNK, PLACE, TILE, counts_of


@triton.jit(do_not_specialize=["SLOTS"])
def keep_kernel(
    new_k, new_gates, place, slots, lengths, k_rows, gate_rows, SLOTS, H, HV, K: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """The counts of a sequence, and the keys and gates of its new row: every program of the sequence may have
    closed a chunk by what was in their place."""
    b = tl.program_id(0).to(tl.int64)
    _, slot, rows, chunks, _, _, left = counts_of(place, slots, lengths, b, 0, SLOTS, 1)
    if left <= 0:
        return
    full = rows == CHUNK
    chunks = tl.where(full, chunks + 1, chunks)
    row = tl.where(full, 0, rows)
    half = slot * HALVES + (chunks & (HALVES - 1))
    d = tl.arange(0, K)
    for first in range(0, H, TILE):
        h = first + tl.arange(0, TILE)
        own = tl.load(new_k + (b * H + h)[:, None] * K + d[None, :], mask=(h < H)[:, None], other=0.0)
        to = k_rows + ((half * H + h) * CHUNK + row)[:, None] * K + d[None, :]
        tl.store(to, own, mask=(h < H)[:, None])
    for first in range(0, HV, CHUNK):
        hv = first + tl.arange(0, CHUNK)
        own = tl.load(new_gates + b * HV + hv, mask=hv < HV, other=0.0)
        tl.store(gate_rows + (half * HV + hv) * CHUNK + row, own, mask=hv < HV)
    tl.debug_barrier()  # all threads have read the counts
    at = place + slot * PLACE
    tl.store(at, row + 1)
    if full:
        tl.store(at + 1, chunks)
        tl.store(at + 2, chunks + (1 - HALVES))
