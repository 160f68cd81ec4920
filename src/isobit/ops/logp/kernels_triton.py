"""`logp` in portable Triton: NVIDIA, AMD, and the CPU interpreter.

Forward, one read of the logits. With many rows one program walks a row; with few, one program walks a
split of a row and a second kernel adds the splits. Both do the sums of `isobit.blocks.triton_rows` in
the same order, so N and the number of SMs choose the schedule and never the bits.

Backward, one read and one write, elementwise:

    dz = (dlogp * [col == id] + p * (dlse - dlogp - dentropy * (log p + entropy))) / temperature

with p = 2^u / s from the (m, s) that the forward kept, so a common shift of all logits costs no digits.

Token ids: a row whose id is `ignore_index` or whose mask is 0 is not read; its results and gradients are
0. A live row with an id outside [0, V) reads nothing at that id; its results and gradients are NaN.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.arch import sm_count
from isobit.blocks.interpreter import INTERPRETED, narrow
from isobit.blocks.launch import Launch, run
from isobit.blocks.rows import row_strides
from isobit.blocks.temperature import scaling
from isobit.blocks.triton_rows import fold, own_or, row_offset, row_results, row_weights, split_sums


class Order(NamedTuple):
    """The order of the sums: 2**log_block lanes, `unroll` tiles a step, `steps` steps a split. `warps` and
    `registers` are schedule only."""

    log_block: int
    unroll: int
    steps: int
    warps: int
    registers: int | None

    @property
    def split(self) -> int:
        return (self.unroll << self.log_block) * self.steps


def order_of(V: int) -> Order:
    """A function of V alone: this is what makes law V true.

    Measured on an H200 in 2026-11, part of the copy bandwidth at V = 32768, 50257, 50304, 151936 (16 bits):
    0.99, 0.96, 1.00, 1.04. Without the register cap 0.99, 0.94, 0.99, 1.03; one warp 0.93, 0.86, 0.93, 0.99;
    16 tiles a step 0.99, 0.86, 0.98, 1.02. Twice the steps gain 2 % at odd V and cost 50 % at N = 8.
    """
    if V <= 1024:
        return Order(log_block=8, unroll=4, steps=1, warps=1, registers=None)
    return Order(log_block=8, unroll=8, steps=8, warps=2, registers=64)


#: From this many rows per SM on, a program walks a row; below it, a split. Measured equal at 16 on an H200.
ROWS_PER_SM = 16

#: Words of 16 bytes a tile, tiles a step, steps a program. The backward is elementwise, so this is schedule
#: only, and the interpreter, which pays by the operation, takes wider tiles.
BWD_WORDS, BWD_UNROLL, BWD_STEPS, BWD_WARPS = (512 if INTERPRETED.value else 32), 8, 8, 1


#: Sizes and strides that follow the batch. They carry no alignment that a vector of logits is read by, and a
#: kernel that were compiled for a multiple of 16 in them would be compiled again in the middle of a run.
BATCH = ("N", "inner", "ids_so", "mask_so")


@triton.jit
def row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V):
    """(id, live, good) of a row: live rows count, and good ones have an id inside [0, V)."""
    token = tl.load(ids + row_offset(row, inner, ids_so, ids_si))
    live = token != ignore_index
    if mask is not None:
        live = live & (tl.load(mask + row_offset(row, inner, mask_so, mask_si)) != 0)
    return token, live, live & (token >= 0) & (token < V)


@triton.jit
def store_row(
    z_ptr, token, good, row, N, m, s, t, inverse, logp, entropy, lse, stats,
):  # fmt: skip
    """Turn the sums of a live row into its results."""
    z = tl.load(z_ptr + token, mask=good, other=0.0).to(tl.float32)
    nan = tl.where(good, 0.0, float("nan"))
    own_logp, own_entropy, own_lse, s = row_results(z, m, s, t, inverse)
    tl.store(logp + row, own_logp + nan)
    if stats is not None:
        tl.store(stats + row, m + nan)
        tl.store(stats + N + row, s)
    if lse is not None:
        tl.store(lse + row, own_lse + nan)
    if entropy is not None:
        tl.store(entropy + row, own_entropy + nan)


@triton.jit
def store_dead_row(row, N, logp, entropy, lse, stats):
    tl.store(logp + row, 0.0)
    if stats is not None:
        tl.store(stats + row, 0.0)
        tl.store(stats + N + row, 1.0)
    if lse is not None:
        tl.store(lse + row, 0.0)
    if entropy is not None:
        tl.store(entropy + row, 0.0)


@triton.jit(do_not_specialize=BATCH)
def logp_rows(
    logits, ids, mask, logp, entropy, lse, stats, scales, inverses, scale, inverse, ignore_index, N, V, inner,
    logits_so, logits_si, ids_so, ids_si, mask_so, mask_si, WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr, LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """Forward, one program a row."""
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        store_dead_row(row, N, logp, entropy, lse, stats)
        return
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    start = row_offset(row, inner, logits_so, logits_si)
    index = tl.arange(0, 1 << LOG_SPLITS)
    m = tl.full([1 << LOG_SPLITS], float("-inf"), tl.float32)
    s = tl.zeros([1 << LOG_SPLITS], tl.float32)
    t = tl.zeros([1 << LOG_SPLITS], tl.float32)
    for split in range(tl.cdiv(V, (UNROLL << LOG_BLOCK) * STEPS)):
        m1, s1, t1 = split_sums(
            logits, start, split, V, scale, entropy is not None, WORD, LOG_BLOCK, UNROLL, STEPS
        )
        m = tl.where(index == split, m1, m)
        s = tl.where(index == split, s1, s)
        t = tl.where(index == split, t1, t)
    m, s, t = fold(m, s, t, scale, LOG_SPLITS)
    z_ptr = logits + start
    store_row(z_ptr, token, good, row, N, m, s, t, inverse, logp, entropy, lse, stats)


@triton.jit(do_not_specialize=BATCH)
def logp_splits(
    logits, ids, mask, partials, scales, scale, ignore_index, N, V, inner,
    logits_so, logits_si, ids_so, ids_si, mask_so, mask_si, ENTROPY: tl.constexpr, WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Forward with few rows, one program a split: (m, s, t) of each into partials [3, N, splits]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, live, _ = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        return
    scale = own_or(scale, scales, row, None)
    start = row_offset(row, inner, logits_so, logits_si)
    m, s, t = split_sums(logits, start, split, V, scale, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS)
    n_splits = tl.num_programs(1)
    at = partials + row * n_splits + split
    tl.store(at, m)
    tl.store(at + N * n_splits, s)
    if ENTROPY:
        tl.store(at + 2 * N * n_splits, t)


@triton.jit(do_not_specialize=BATCH)
def logp_merge(
    logits, ids, mask, partials, logp, entropy, lse, stats, scales, inverses, scale, inverse, ignore_index,
    N, V, inner, n_splits, logits_so, logits_si, ids_so, ids_si, mask_so, mask_si,
    LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """Forward with few rows, second kernel: add the splits of each row."""
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        store_dead_row(row, N, logp, entropy, lse, stats)
        return
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    index = tl.arange(0, 1 << LOG_SPLITS)
    at = partials + row * n_splits + index
    m = tl.load(at, mask=index < n_splits, other=float("-inf"))
    s = tl.load(at + N * n_splits, mask=index < n_splits, other=0.0)
    t = tl.zeros([1 << LOG_SPLITS], tl.float32)
    if entropy is not None:
        t = tl.load(at + 2 * N * n_splits, mask=index < n_splits, other=0.0)
    m, s, t = fold(m, s, t, scale, LOG_SPLITS)
    z_ptr = logits + row_offset(row, inner, logits_so, logits_si)
    store_row(z_ptr, token, good, row, N, m, s, t, inverse, logp, entropy, lse, stats)


@triton.jit(do_not_specialize=BATCH)
def logp_gradient(
    logits, ids, mask, stats, entropy, dlogp, dentropy, dlse, dlogits, scales, inverses, scale, inverse,
    ignore_index, N, V, inner, logits_so, logits_si, ids_so, ids_si, mask_so, mask_si,
    CONGRUENT: tl.constexpr, LINE: tl.constexpr, WORDS: tl.constexpr, UNROLL: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Backward, one program STEPS x UNROLL x WORDS words of 16 bytes of a row; dlogits is contiguous [N, V].

    Programs start on the 128-byte lines of dlogits and write whole words whatever V is; where the rows of
    logits are CONGRUENT (as far from a word's start as those of dlogits) they read whole words too. The
    first and the last word of a row may be shared with its neighbours and are written by element.
    """
    WORD: tl.constexpr = LINE // 8
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    m, s = tl.load(stats + row), tl.load(stats + N + row)
    on_target, on_p, on_plogp = row_weights(entropy, dlogp, dentropy, dlse, row, None, inverse)
    weights = (m, 1.0 / s, tl.log2(s), on_target, on_p, on_plogp)
    fill = tl.where(live, float("nan"), 0.0)  # of a row that is not good

    start, z_start = row * V, row_offset(row, inner, logits_so, logits_si)
    shift = (start % LINE).to(tl.int32)
    dz_words = dlogits + start // LINE * LINE
    z_words = logits + z_start - shift
    if CONGRUENT:
        z_words = logits + (z_start - shift) // WORD * WORD
    whole_from, whole_to = (shift + WORD - 1) // WORD, (shift + V) // WORD
    word = tl.arange(0, WORDS)[:, None]
    inside = tl.arange(0, WORD)[None, :]
    lo = tl.program_id(1) * (STEPS * UNROLL * WORDS)
    hi = tl.minimum(lo + STEPS * UNROLL * WORDS, whole_to)
    read_to = tl.where(good, hi, 0)  # nothing of a row that is not good
    for first in range(lo, hi, UNROLL * WORDS):
        z = ()
        for i in tl.static_range(UNROLL):
            w = first + i * WORDS + word
            z = z + (tl.load(z_words + w * WORD + inside, mask=(w >= whole_from) & (w < read_to), other=0.0),)
        for i in tl.static_range(UNROLL):
            w = first + i * WORDS + word
            dz = gradient(z[i], w * WORD + inside - shift, token, weights, scale, dentropy is not None)
            dz = narrow(tl.where(good, dz, fill), dlogits)
            tl.store(dz_words + w * WORD + inside, dz, mask=(w >= whole_from) & (w < hi))

    if tl.program_id(1) == 0:
        ends = tl.where(tl.arange(0, 2)[:, None] == 0, whole_from - 1, whole_to) * WORD + inside - shift
        x = tl.load(logits + z_start + ends, mask=(ends >= 0) & (ends < tl.where(good, V, 0)), other=0.0)
        dz = gradient(x, ends, token, weights, scale, dentropy is not None)
        dz = narrow(tl.where(good, dz, fill), dlogits)
        tl.store(dlogits + start + ends, dz, mask=(ends >= 0) & (ends < V))


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


@cache
def forward_plan(V: int) -> tuple[int, dict[str, int], dict[str, Any]]:
    """(splits of a row, the constants that order its sums, compile options): functions of V alone."""
    own = order_of(V)
    order = {"LOG_BLOCK": own.log_block, "UNROLL": own.unroll, "STEPS": own.steps}
    options = {"num_warps": own.warps, "enable_fp_fusion": False}
    if own.registers and torch.version.hip is None:  # an option of NVIDIA's compiler alone
        options["maxnreg"] = own.registers
    return -(-V // own.split), order, options


def word_of(z: Tensor, strides: Sequence[int]) -> int:
    """Elements in a 16-byte word if rows of z may start or end inside one, 1 if none does (or if the tensor
    itself starts inside one, so that no row has aligned words)."""
    word = 16 // z.element_size()
    on_words = all(n % word == 0 for n in (*strides, z.shape[-1]))
    return 1 if on_words or z.data_ptr() % 16 else word


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def logp(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats [2, *] = (m, s)); None for what was not asked."""
    logits, ids, mask = args["logits"], args["token_ids"], as_bytes(args["mask"])
    lead, V = logits.shape[:-1], logits.shape[-1]
    empty = partial(torch.empty, device=logits.device, dtype=torch.float32)
    out = empty(lead)
    entropy = empty(lead) if args["return_entropy"] else None
    lse = empty(lead) if args["return_lse"] else None
    stats = empty((2, *lead)) if args["return_stats"] else None
    results = (out, entropy, lse, stats)
    N = out.numel()
    if N == 0:
        return results
    inner, (z, ids, mask), strides = row_strides(lead, (logits, ids, mask))
    scaled = scaling(args["temperature"], N)
    splits, order, options = forward_plan(V)
    sizes = (args["ignore_index"], N, V, inner)
    log_splits, word = (splits - 1).bit_length(), word_of(z, strides[:2])
    if splits == 1 or ROWS_PER_SM * sm_count(logits.device) <= N:
        launch(
            logp_rows, (N,), z, ids, mask, *results, *scaled, *sizes, *strides,
            WORD=word, LOG_SPLITS=log_splits, **order, **options,
        )  # fmt: skip
    else:
        partials = empty((2 if entropy is None else 3, N, splits))
        launch(
            logp_splits, (N, splits), z, ids, mask, partials, scaled.scales, scaled.scale, *sizes, *strides,
            ENTROPY=entropy is not None, WORD=word, **order, **options,
        )  # fmt: skip
        launch(
            logp_merge, (N,), z, ids, mask, partials, *results, *scaled, *sizes, splits, *strides,
            LOG_SPLITS=log_splits, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return results


def logp_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """dlogits, contiguous, in the dtype of the logits."""
    logits, ids, mask = args["logits"], args["token_ids"], as_bytes(args["mask"])
    lead, V = logits.shape[:-1], logits.shape[-1]
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if dlogits.numel() == 0:
        return dlogits
    inner, (z, ids, mask), strides = row_strides(lead, (logits, ids, mask))
    N = dlogits.numel() // V
    line, word = 128 // logits.element_size(), 16 // logits.element_size()
    # Rows of logits start where those of dlogits do, modulo a word, if their strides agree modulo one.
    outer = strides[0] - inner * V if inner < N else 0
    congruent = z.data_ptr() % 16 == 0 and not (outer % word or (strides[1] - V) % word)
    programs = -(-((V + line) // word) // (BWD_WORDS * BWD_UNROLL * BWD_STEPS))
    # A gradient of a sum arrives as one number with stride 0; hooks restore what was saved with any stride.
    given = (args[name] for name in ("stats", "entropy", "dlogp", "dentropy", "dlse"))
    rows = [x if x is None else x.contiguous() for x in given]
    launch(
        logp_gradient, (N, programs), z, ids, mask, *rows, dlogits,
        *scaling(args["temperature"], N), args["ignore_index"], N, V, inner, *strides,
        CONGRUENT=congruent, LINE=line, WORDS=BWD_WORDS, UNROLL=BWD_UNROLL, STEPS=BWD_STEPS,
        num_warps=BWD_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return dlogits
