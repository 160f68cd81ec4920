"""Stored rows of logits in portable Triton, for the ops that read them.

The forward sums a row (`isobit.kernels.triton.rows`) by one of two schedules. With many rows one program
takes a whole row. With few rows one program takes a split of a row, and a second kernel adds the splits. Both
add in the same order, so N and the number of SMs affect the schedule and never the bits.

Backward, one read and one write, elementwise:

    dz = (dlogp * [col == id] + p * (dlse - dlogp - dentropy * (log p + entropy))) / temperature

with p = 2^u / s from the (m, s) that the forward saved, so a common shift of all logits adds no error. If an
op's results are functions of logp, their gradients times their derivatives are added to dlogp.

Token ids: a row whose id is `ignore_index` or whose mask is 0 is not read; its gradient is 0. A live row with
an id outside [0, V) reads nothing at that id; its gradient is NaN.

The logits of a backward may be those columns of a vocabulary that one of several ranks has: an id of another
rank is valid then, and columns behind the last token get 0.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch
from isobit.kernels.host.row_order import order_of
from isobit.kernels.host.rows import row_strides, walkable
from isobit.kernels.triton.interpreter import INTERPRETED, narrow
from isobit.kernels.triton.rows import fold, given_at, own_or, row_offset, row_weights, split_sums
from isobit.kernels.triton.temperature import scaling_of_rows

#: From this many rows per SM on, a program takes a whole row; below it, a split. Equally fast at 16 on an
#: H200.
ROWS_PER_SM = 16

#: Words of 16 bytes per tile, tiles per step, steps per program. The backward is elementwise, so this affects
#: the schedule only. The interpreter has a cost per operation, so it takes wider tiles, and no more of them
#: than it needs.
#:
#: Measured on an H200 in 2026-11 with 8192 rows of 131072 fp16 logits, all of them unmasked and a tenth: one
#: step 1.04 and 0.61 ms, eight 1.09 and 0.67, two of four warps and half as many tiles 1.03 and 0.62. With
#: 50257 logits 0.41 and 0.24 ms, 0.43 and 0.27, 0.41 and 0.25.
BWD_WORDS, BWD_UNROLL, BWD_STEPS, BWD_WARPS = (1024, 1, 64, 1) if INTERPRETED.value else (32, 8, 1, 1)


#: Sizes and strides that depend on the batch. No vector load of logits needs their alignment, and
#: specialising on it would recompile in the middle of a run.
BATCH = ("N", "inner", "ids_so", "mask_so")

#: The same for gradients of rows, which may be one number for all.
_GRADIENTS = tuple(
    f"{name}_{s}" for name in ("dlogp", "dentropy", "dlse", "dratio", "dkl", "shares") for s in ("so", "si")
)

#: Where a rank's columns are in the vocabulary.
_COLUMNS = ("first_column", "tokens")


# Forward


@triton.jit
def row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V):
    """(id, live, good) of a row: a live row is not masked, a good one also has an id inside [0, V)."""
    token = tl.load(ids + row_offset(row, inner, ids_so, ids_si))
    live = token != ignore_index
    if mask is not None:
        live = live & (tl.load(mask + row_offset(row, inner, mask_so, mask_si)) != 0)
    return token, live, live & (token >= 0) & (token < V)


@triton.jit
def row_sums(
    logits, start, V, scale, ENTROPY: tl.constexpr, WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr, LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of the row that starts at element `start`, split after split."""
    index = tl.arange(0, 1 << LOG_SPLITS)
    m = tl.full([1 << LOG_SPLITS], float("-inf"), tl.float32)
    s = tl.zeros([1 << LOG_SPLITS], tl.float32)
    t = tl.zeros([1 << LOG_SPLITS], tl.float32)
    for split in range(tl.cdiv(V, (UNROLL << LOG_BLOCK) * STEPS)):
        m1, s1, t1 = split_sums(logits, start, split, V, scale, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS)
        m = tl.where(index == split, m1, m)
        s = tl.where(index == split, s1, s)
        t = tl.where(index == split, t1, t)
    return fold(m, s, t, scale, LOG_SPLITS)


@triton.jit
def store_split(partials, row, split, N, n_splits, m, s, t, ENTROPY: tl.constexpr):
    """Store (m, s, t) of a split in partials [3, N, splits]."""
    at = partials + row * n_splits + split
    tl.store(at, m)
    tl.store(at + N * n_splits, s)
    if ENTROPY:
        tl.store(at + 2 * N * n_splits, t)


@triton.jit
def merged_sums(partials, row, N, n_splits, scale, ENTROPY: tl.constexpr, LOG_SPLITS: tl.constexpr):
    """(m, s, t) of a row from those of its splits."""
    index = tl.arange(0, 1 << LOG_SPLITS)
    at = partials + row * n_splits + index
    m = tl.load(at, mask=index < n_splits, other=float("-inf"))
    s = tl.load(at + N * n_splits, mask=index < n_splits, other=0.0)
    t = tl.zeros([1 << LOG_SPLITS], tl.float32)
    if ENTROPY:
        t = tl.load(at + 2 * N * n_splits, mask=index < n_splits, other=0.0)
    return fold(m, s, t, scale, LOG_SPLITS)


class Schedule(NamedTuple):
    """How rows of V logits are summed. Depends on V alone."""

    splits: int
    #: The most parts of a row for programs to share: its splits, but the last one joins the one before if it
    #: is less than a quarter of a split. A program for a few columns takes longer to start than to sum them.
    parts: int
    order: dict[str, int]  # the constants that determine the order of sums
    options: dict[str, Any]  # of the compiler

    @property
    def log_splits(self) -> int:
        return (self.splits - 1).bit_length()

    def takes_whole_rows(self, N: int, device: torch.device) -> bool:
        """Whether one program takes a whole row. Affects the schedule only.

        Where few of many rows are live, programs that share their splits equally, of which the last one at a
        row adds them, are faster: on an H200 `logp` took 29, 42 and 82 us instead of 32, 48 and 101 for a
        tenth of 8192 fp16 rows of 32768, 50257 and 131072. But only the device knows which rows are live, and
        for all of them it took 130, 215 and 495 us instead of 127, 199 and 485, for 8 rows of 131072 14
        instead of 9.8. To fetch the next words into the L2 cache took 3 to 11 % longer (2026-11)."""
        return self.splits == 1 or ROWS_PER_SM * sm_count(device) <= N


@cache
def schedule_of(V: int) -> Schedule:
    own = order_of(V)
    order = {"LOG_BLOCK": own.log_block, "UNROLL": own.unroll, "STEPS": own.steps}
    options = {"num_warps": own.warps, "enable_fp_fusion": False}
    if own.registers and torch.version.hip is None:  # only NVIDIA's compiler has this option
        options["maxnreg"] = own.registers
    return Schedule(-(-V // own.split), max(1, (V + 3 * own.split // 4) // own.split), order, options)


def word_of(z: Tensor, strides: Sequence[int]) -> int:
    """Elements in a 16-byte word if rows of z may start or end inside one, 1 if none does (or if the tensor
    itself starts inside one, so that no row has aligned words).

    A kernel is compiled for sizes that are multiples of 16 or not. Multiples of a smaller word are unknown to
    the compiler, which would read such rows by element: they are treated as rows that may start anywhere.
    """
    on_words = all(n % 16 == 0 for n in (*strides, z.shape[-1]))
    return 1 if on_words or z.data_ptr() % 16 else 16 // z.element_size()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


# Backward


@triton.jit(do_not_specialize=(*BATCH, *_GRADIENTS, *_COLUMNS))
def logits_gradient(
    logits, ids, mask, stats, slopes, entropy, dlogp, dentropy, dlse, dratio, dkl, shares, dloss, dlogits,
    scales, inverses, scale, inverse, ignore_index, N, V, inner, parts, logits_so, logits_si, ids_so, ids_si,
    mask_so, mask_si, dlogp_so, dlogp_si, dentropy_so, dentropy_si, dlse_so, dlse_si, dratio_so, dratio_si,
    dkl_so, dkl_si, shares_so, shares_si, first_column, tokens, CONGRUENT: tl.constexpr, LINE: tl.constexpr,
    WORDS: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program takes STEPS x UNROLL x WORDS words of 16 bytes of a row, one of its `parts`. dlogits is
    contiguous [N, V], and consecutive programs write consecutive memory.

    Programs start on the 128-byte lines of dlogits and write whole words whatever V is. If the rows of logits
    are CONGRUENT (the same offset within a word as those of dlogits) they read whole words too. The first and
    the last word of a row may be shared with its neighbours and are written by element.

    The V columns are all that there are, or with `tokens` those from `first_column` on of as many tokens.
    """
    WORD: tl.constexpr = LINE // 8
    row, nth = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    ids_below = V
    if tokens is not None:
        ids_below = tokens
    token, live, good = row_state(
        ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, ids_below
    )
    if tokens is not None:
        token = token - first_column  # outside [0, V) if another rank has it
    start = row * V
    shift = (start % LINE).to(tl.int32)
    dz_words = dlogits + start // LINE * LINE
    whole_from, whole_to = (shift + WORD - 1) // WORD, (shift + V) // WORD
    word = tl.arange(0, WORDS)[:, None]
    inside = tl.arange(0, WORD)[None, :]
    lo = nth * (STEPS * UNROLL * WORDS)
    hi = tl.minimum(lo + STEPS * UNROLL * WORDS, whole_to)
    ends = tl.where(tl.arange(0, 2)[:, None] == 0, whole_from - 1, whole_to) * WORD + inside - shift
    of_row = (ends >= 0) & (ends < V)
    # If few rows are live, masked rows take most of the time: nothing is read or computed for them.
    if good == 0:
        fill = narrow(tl.where(live, float("nan"), 0.0), dlogits)
        for first in range(lo, hi, UNROLL * WORDS):
            for i in tl.static_range(UNROLL):
                w = first + i * WORDS + word
                tl.store(dz_words + w * WORD + inside, fill, mask=(w >= whole_from) & (w < hi))
        if nth == 0:
            tl.store(dlogits + start + ends, fill, mask=of_row)
        return

    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    m, s = tl.load(stats + row), tl.load(stats + N + row)
    on_logp = given_at(dlogp, row_offset(row, inner, dlogp_so, dlogp_si), None)
    if dloss is not None:
        on_logp = of_loss(on_logp, tl.load(shares + row_offset(row, inner, shares_so, shares_si)), dloss)
    if dratio is not None:
        part = through(tl.load(dratio + row_offset(row, inner, dratio_so, dratio_si)), slopes + row)
        on_logp = part if on_logp is None else on_logp + part
    if dkl is not None:
        part = through(tl.load(dkl + row_offset(row, inner, dkl_so, dkl_si)), slopes + N + row)
        on_logp = part if on_logp is None else on_logp + part
    on_target, on_p, on_plogp = row_weights(
        given_at(entropy, row, None), on_logp,
        given_at(dentropy, row_offset(row, inner, dentropy_so, dentropy_si), None),
        given_at(dlse, row_offset(row, inner, dlse_so, dlse_si), None), inverse,
    )  # fmt: skip
    weights = (m, 1.0 / s, tl.log2(s), on_target, on_p, on_plogp)
    z_start = row_offset(row, inner, logits_so, logits_si)
    z_words = logits + z_start - shift
    if CONGRUENT:
        z_words = logits + (z_start - shift) // WORD * WORD
    for first in range(lo, hi, UNROLL * WORDS):
        z = ()
        for i in tl.static_range(UNROLL):
            w = first + i * WORDS + word
            z = z + (tl.load(z_words + w * WORD + inside, mask=(w >= whole_from) & (w < hi), other=0.0),)
        for i in tl.static_range(UNROLL):
            w = first + i * WORDS + word
            col = w * WORD + inside - shift
            dz = gradient(z[i], col, token, weights, scale, dentropy is not None)
            if tokens is not None:
                dz = tl.where(col < tokens - first_column, dz, 0.0)
            tl.store(dz_words + w * WORD + inside, narrow(dz, dlogits), mask=(w >= whole_from) & (w < hi))
    if nth == 0:
        x = tl.load(logits + z_start + ends, mask=of_row, other=0.0)
        dz = gradient(x, ends, token, weights, scale, dentropy is not None)
        if tokens is not None:
            dz = tl.where(ends < tokens - first_column, dz, 0.0)
        tl.store(dlogits + start + ends, narrow(dz, dlogits), mask=of_row)


@triton.jit
def through(gradient, slope):
    """A gradient times a derivative. If the gradient is 0, as for a clipped ratio, the result is 0 even for
    an infinite derivative: 0 * inf would be NaN."""
    return tl.where(gradient == 0.0, 0.0, gradient * tl.load(slope))


@triton.jit
def of_loss(slope, share, dloss):
    """The gradient of logp: `slope`, the derivative of the loss before its division, times the row's share in
    the loss times the gradient of the loss. In fp64, where the second product is exact. A slope of 0 stays 0
    even if the loss is not finite."""
    factor = tl.load(dloss).to(tl.float64) * share.to(tl.float64)
    return tl.where(slope == 0.0, 0.0, (slope.to(tl.float64) * factor).to(tl.float32))


@triton.jit
def gradient(z, col, token, weights, scale, ENTROPY: tl.constexpr):
    """dz of some columns of a row, from the row's `weights`."""
    m, inv_s, log2_s, on_target, on_p, on_plogp = weights
    u = (z.to(tl.float32) - m) * scale
    p = tl.exp2(u) * inv_s
    weight = on_p
    if ENTROPY:
        ln2: tl.constexpr = 0.6931471805599453
        # 2^-1000 is 0 in fp32, and 0 * -inf would be NaN.
        weight = on_p + on_plogp * ((tl.maximum(u, -1000.0) - log2_s) * ln2)
    return p * weight + tl.where(col == token, on_target, 0.0)


def gradient_of(logits: Tensor, launch: Launch, args: dict[str, Any]) -> Tensor:
    """dlogits, contiguous, in the dtype of the logits. `args` are those of a backward; `dratio` and `dkl`
    need `slopes`, the derivatives of ratio and kl by logp. With `dloss`, a number, `dlogp` is the derivative
    of a loss, to be multiplied by that number and by the row's number in `shares`. With `tokens` the logits
    are the columns from `first_column` on of a vocabulary of as many."""
    ids, mask = args["token_ids"], as_bytes(args["mask"])
    lead, V = logits.shape[:-1], logits.shape[-1]
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if dlogits.numel() == 0:
        return dlogits
    # The gradient of a sum arrives as one number with stride 0, and is read without a copy.
    names = ("dlogp", "dentropy", "dlse", "dratio", "dkl", "shares")
    grads = [walkable(lead, args.get(name)) for name in names]
    inner, (z, ids, mask, *grads), strides = row_strides(lead, (logits, ids, mask, *grads))
    N = dlogits.numel() // V
    line, word = 128 // logits.element_size(), 16 // logits.element_size()
    # Rows of logits and of dlogits have the same offset within a word if their strides agree modulo a word.
    outer = strides[0] - inner * V if inner < N else 0
    congruent = z.data_ptr() % 16 == 0 and not (outer % word or (strides[1] - V) % word)
    # The largest number of words of dlogits that a row touches, from the start of a line on.
    words = (V + line - math.gcd(V, line)) // word
    parts = max(1, -(-words // (BWD_WORDS * BWD_UNROLL * BWD_STEPS)))
    # Saved-tensor hooks may restore tensors with any strides.
    given = (args.get(name) for name in ("stats", "slopes", "entropy"))
    saved = [x if x is None else x.contiguous() for x in given]
    scaled = scaling_of_rows(args["temperature"], N, launch)
    launch(
        logits_gradient, (N * parts,),
        z, ids, mask, *saved, *grads, args.get("dloss"), dlogits, *scaled,
        args["ignore_index"], N, V, inner, parts, *strides, args.get("first_column"), args.get("tokens"),
        CONGRUENT=congruent, LINE=line, WORDS=BWD_WORDS, UNROLL=BWD_UNROLL, STEPS=BWD_STEPS,
        num_warps=BWD_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return dlogits
