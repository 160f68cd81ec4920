"""The recurrence in plain PyTorch, all sequences and heads at once, chunk after chunk.

It computes in fp32, or in fp64 for fp64 inputs, and rounds where the op says. Packed sequences are padded
with zero tokens to equal lengths: a zero token changes no state.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.temperature import LOG2E


def dhu(**args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    return recurrence(**args, rounded=True)


def recurrence(
    q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, g: Tensor | None, gk: Tensor | None,
    h0: Tensor | None, dht: Tensor | None, scale: float, state_v_first: bool, cu_seqlens: Tensor | None,
    chunk_size: int, chunk_indices: Tensor | None, use_exp2: bool, rounded: bool, **unread: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(dh, dh0, dv2); without `rounded` in the precision of the computation."""
    B, T, _, K = q.shape
    HV, V = dv.shape[2:]
    C, narrow = chunk_size, q.dtype
    wide = torch.promote_types(narrow, torch.float32)
    rows, real = _rows(B, T, cu_seqlens, C, q.device)  # [S, NT * C]: tokens of each sequence
    S, NT = rows.shape[0], rows.shape[1] // C

    def by_chunks(t: Tensor) -> Tensor:
        """[B, T, heads, ...] as [NT, S, HV, C, ...], zeros where there is no token."""
        flat = torch.cat((t.to(wide).flatten(0, 1), t.new_zeros(1, *t.shape[2:], dtype=wide)))
        chunks = flat[rows].unflatten(1, (NT, C)).movedim(1, 0).movedim(3, 2)
        return chunks.repeat_interleave(HV // chunks.shape[2], 2)

    def narrowed(t: Tensor) -> Tensor:
        return t.to(narrow).to(wide) if rounded else t

    unit = 1.0 if use_exp2 else LOG2E
    Q, Kc, W, dO, dV = (by_chunks(t) for t in (q, k, w, do, dv))
    G = None if g is None else by_chunks(g[..., None])[..., 0] * unit
    GK = None if gk is None else by_chunks(gk) * unit
    length, each = real.sum(1), torch.arange(S, device=q.device)
    D = torch.zeros(S, HV, K, V, dtype=wide, device=q.device)
    if dht is not None:
        # A copy: without steps it is returned, and a result must not be an argument.
        D = (dht.mT if state_v_first else dht).to(wide, copy=True)
    dh = torch.empty(NT, S, HV, K, V, dtype=wide, device=q.device)
    dv2 = torch.empty(NT, S, HV, C, V, dtype=wide, device=q.device)
    for c in reversed(range(NT)):
        here = (length > c * C)[:, None, None, None]  # sequences that have this chunk
        last = (length - c * C).clamp(1, C) - 1
        dh[c] = narrowed(D)
        X = Kc[c] @ narrowed(D)
        q_c, decay = Q[c], torch.zeros(S, HV, 1, dtype=wide, device=q.device)
        if G is not None:
            g_last = G[c][each, :, last][..., None]  # [S, HV, 1]
            inside = real.unflatten(1, (NT, C))[:, c, None]
            X = X * torch.where(inside, (g_last - G[c]).exp2(), 0.0)[..., None]
            q_c = q_c * G[c].exp2()[..., None]
            decay = decay + g_last
        if GK is not None:
            decay = decay + GK[c][each, :, last]
        X = dv2[c] = narrowed(X + dV[c])
        after = decay.exp2()[..., None] * D + scale * (q_c.mT @ dO[c]) - W[c].mT @ X
        D = torch.where(here, after, D)
    # Back to where the tokens and the chunks of each sequence are.
    by_token = dv2.movedim(2, 3).movedim(0, 1).flatten(1, 2)  # [S, NT * C, HV, V]
    if cu_seqlens is None:
        out = by_token[:, :T]
    else:
        out = torch.zeros(B * T, HV, V, dtype=wide, device=q.device)
        out[rows[real]] = by_token[real]
        out = out.view(B, T, HV, V)
    states = dh.movedim(0, 1)  # [S, NT, HV, K, V]
    if chunk_indices is not None:
        chunks = len(chunk_indices)
        count = (length + C - 1) // C
        states = states[torch.arange(NT, device=q.device) < count[:, None]][None]
        missing = chunks - states.shape[1]  # for invalid bounds
        states = torch.cat((states[:, :chunks], states.new_zeros(1, max(missing, 0), HV, K, V)), 1)
    if state_v_first:
        states, D = states.mT, D.mT
    dtype = narrow if rounded else wide
    dh0 = D.contiguous() if h0 is not None else None
    return states.contiguous().to(dtype), dh0, out.contiguous().to(dtype)


def _rows(B: int, T: int, bounds: Tensor | None, C: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, whether there is one) of each sequence, [S, a multiple of C]; index B * T means no token."""
    if bounds is None:
        first, length = torch.arange(B, device=device) * T, torch.full((B,), T, device=device)
        longest = T
    else:
        ends = bounds.long().clamp(0, T).cummax(0).values
        first, length = ends[:-1], ends.diff()
        longest = int(length.max()) if len(length) else 0
    at = torch.arange(-(-longest // C) * C, device=device)
    real = at < length[:, None]
    return torch.where(real, first[:, None] + at, B * T), real
