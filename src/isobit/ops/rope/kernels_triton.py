"""`rope` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class rope/1, see docs/rope.md.

One launch for queries and keys: a program takes some heads of one token, of q or of k, both halves of them.
Products and sums are those of fp32, without contraction, so the bits are those of IEEE arithmetic, and tiles
and warps are free.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.words import rows_in_words
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.kernels.triton.rows import row_offset

#: Pairs of columns that a program of four warps takes: with eight per thread it loads 16 bytes of each half.
PAIRS = 1024

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = (
    "inner", "q_so", "q_si", "k_so", "k_si", "cos_so", "cos_si", "sin_so", "sin_si", "q_head", "k_head",
)  # fmt: skip


# Kernels


@triton.jit
def load_half(ptr, start, col, END: tl.constexpr, HALF: tl.constexpr):
    """Columns of a row of cos or sin, in fp32."""
    if HALF == END:
        x = tl.load(ptr + start + col)
    else:
        x = tl.load(ptr + start + col, mask=col < END, other=0.0)
    return x.to(tl.float32)[None, :]


@triton.jit
def mask_of(
    head, col, HEADS: tl.constexpr, TILE: tl.constexpr, END: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Which elements of a tile exist; None if all do."""
    mask = None
    if HEADS % TILE != 0 or COLUMNS != END:
        mask = (head < HEADS)[:, None] & (col < END)[None, :]
    return mask


@triton.jit
def load_tile(at, mask):
    if mask is None:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=mask, other=0.0)
    return x


@triton.jit
def store_tile(at, x, mask):
    if mask is None:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=mask)


@triton.jit
def product(x, y, DTYPE: tl.constexpr, ONCE: tl.constexpr):
    """x y in fp32, rounded to DTYPE unless only the sum is."""
    z = x * y
    if not ONCE:
        z = rounded(z, DTYPE).to(tl.float32)
    return z


@triton.jit
def turn_heads(
    x, out, start, head_stride, row, first, c1, c2, s1, s2,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, ONCE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """TILE heads of a token from head `first` on."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    head = first + tl.arange(0, TILE)
    col = tl.arange(0, HALF)
    mask = mask_of(head, col, HEADS, TILE, R // 2, HALF)
    read = x + start + head[:, None] * head_stride
    write = out + row * (HEADS * D) + head[:, None] * D
    x1 = load_tile(read + col[None, :], mask).to(tl.float32)
    x2 = load_tile(read + R // 2 + col[None, :], mask).to(tl.float32)
    out1 = product(x1, c1, DTYPE, ONCE) - product(x2, s1, DTYPE, ONCE)
    out2 = product(x2, c2, DTYPE, ONCE) + product(x1, s2, DTYPE, ONCE)
    if BACK:  # -0 becomes +0, as in autograd
        out1 = out1 + 0.0
        out2 = out2 + 0.0
    store_tile(write + col[None, :], narrow(out1, out), mask)
    store_tile(write + R // 2 + col[None, :], narrow(out2, out), mask)
    if R < D:
        col = tl.arange(0, REST)
        mask = mask_of(head, col, HEADS, TILE, D - R, REST)
        rest = load_tile(read + R + col[None, :], mask)
        if BACK:
            rest = rounded(rest.to(tl.float32) + 0.0, DTYPE)
        store_tile(write + R + col[None, :], rest, mask)


@triton.jit(do_not_specialize=BATCH)
def turn(
    q, k, cos, sin, q_out, k_out, inner, q_so, q_si, k_so, k_si, cos_so, cos_si, sin_so, sin_si,
    q_head, k_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, WORD: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ONCE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Programs of a token follow one another: those of q, then those of k. Strides are in words of WORD
    elements."""
    OF_Q: tl.constexpr = (H + TILE - 1) // TILE
    ALL: tl.constexpr = OF_Q + (G + TILE - 1) // TILE
    row = (tl.program_id(0) // ALL).to(tl.int64)
    part = tl.program_id(0) % ALL
    col = tl.arange(0, HALF)
    at = row_offset(row, inner, cos_so, cos_si) * WORD
    c1 = load_half(cos, at, col, R // 2, HALF)
    c2 = load_half(cos, at + R // 2, col, R // 2, HALF)
    at = row_offset(row, inner, sin_so, sin_si) * WORD
    s1 = load_half(sin, at, col, R // 2, HALF)
    s2 = load_half(sin, at + R // 2, col, R // 2, HALF)
    if BACK:  # the transposed rotation
        t = s1
        s1 = -s2
        s2 = -t
    if part < OF_Q:
        start = row_offset(row, inner, q_so, q_si) * WORD
        turn_heads(
            q, q_out, start, q_head.to(tl.int64) * WORD, row, part * TILE, c1, c2, s1, s2,
            H, D, R, TILE, HALF, REST, ONCE, BACK,
        )  # fmt: skip
    else:
        start = row_offset(row, inner, k_so, k_si) * WORD
        turn_heads(
            k, k_out, start, k_head.to(tl.int64) * WORD, row, (part - OF_Q) * TILE, c1, c2, s1, s2,
            G, D, R, TILE, HALF, REST, ONCE, BACK,
        )  # fmt: skip


# Launchers


def rope(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor]:
    return _launch(launch, args["q"], args["k"], args, back=False)


def rope_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor]:
    return _launch(launch, args["dq_out"], args["dk_out"], args, back=True)


def _launch(launch: Launch, q: Tensor, k: Tensor, args: dict[str, Any], back: bool) -> tuple[Tensor, Tensor]:
    lead, (H, D), G, R = q.shape[:-2], q.shape[-2:], k.shape[-2], args["cos"].shape[-1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    # The stride of a dimension that is never stepped along may be anything, and would spoil the alignment.
    steps = [t.stride(-2) if t.shape[-2] > 1 else 0 for t in (q, k)]
    rows = rows_in_words(lead, (q, k, args["cos"], args["sin"]), D, R // 2, *steps)
    if any(new is not old for new, old in zip(rows.tensors, (q, k), strict=False)):
        # They had to be copied, and their heads are elsewhere now.
        q, k, cos, sin = rows.tensors
        return _launch(launch, q, k, args | {"cos": cos, "sin": sin}, back)
    half = triton.next_power_of_2(max(R // 2, 1))
    tile = max(1, min(PAIRS // half, triton.next_power_of_2(max(H, G, 1))))
    programs = triton.cdiv(H, tile) + triton.cdiv(G, tile)
    launch(
        turn, (lead.numel() * programs,),
        *rows.tensors, q_out, k_out, rows.inner, *rows.strides, *(step // rows.word for step in steps),
        H=H, G=G, D=D, R=R, WORD=rows.word, TILE=tile, HALF=half,
        REST=triton.next_power_of_2(max(D - R, 1)), ONCE=args["rounding"] == "vllm", BACK=back,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q_out, k_out
