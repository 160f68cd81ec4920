"""The recurrence in plain PyTorch, token by token: what the op means. It computes in fp32, or in fp64 for
fp64 inputs, and is differentiable.

    S   = exp(g_t) S
    S   = S + k_t (beta_t (v_t - S^T k_t))^T
    o_t = scale S^T q_t
"""

from typing import Any

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule.model import CHUNK, EPS, places


def formula(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, scale: float,
    initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **unread: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, the last states), in the precision of the computation."""
    wide = torch.promote_types(q.dtype, torch.float32)
    B, T, HV, V = v.shape
    K = q.shape[-1]
    q, k = (t.to(wide).repeat_interleave(HV // t.shape[2], 2) for t in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = (t * ((t * t).sum(-1, keepdim=True) + float(EPS)).rsqrt() for t in (q, k))
    v, beta = v.to(wide), beta.to(wide)
    decay = torch.ones_like(beta) if g is None else g.to(wide).exp()
    if cu_seqlens is None:
        o, states = recurrence(_first(initial_state, (B, HV, K, V), v, state_v_first), q, k, v, decay, beta)
    else:
        parts = []
        for place in places(B, T, cu_seqlens):
            n, here = place.number, place.tokens
            state = None if initial_state is None else initial_state[n : n + 1]
            own = [t[:, here] for t in (q, k, v, decay, beta)]
            parts.append(recurrence(_first(state, (1, HV, K, V), v, state_v_first), *own))
        o = torch.cat([v.new_zeros(1, 0, HV, V), *(p[0] for p in parts)], 1)
        states = torch.cat([v.new_zeros(0, HV, K, V), *(p[1] for p in parts)])
        o = torch.nn.functional.pad(o, (0, 0, 0, 0, 0, T - o.shape[1]))  # invalid bounds leave tokens out
    return o * scale, states.mT if state_v_first else states


def _first(state: Tensor | None, shape: tuple[int, ...], like: Tensor, v_first: bool) -> Tensor:
    if state is None:
        return like.new_zeros(shape)
    return (state.mT if v_first else state).to(like.dtype)


def recurrence(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """(o, the last state) of sequences of one length, [B, T, HV, ...], without the scale."""
    rows = []
    for t in range(v.shape[1]):
        S = S * decay[:, t, :, None, None]
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * new[:, :, None, :]
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    if not rows:  # empty, but a function of all inputs, as its gradient is
        return v * (q.sum() + k.sum() + decay.sum() + beta.sum()), S
    return torch.stack(rows, 1), S


def gated_delta_rule(**args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final_state, inverse)."""
    o, states = formula(**args)
    final = states.contiguous() if args["output_final_state"] else None
    if final is not None and final is args["initial_state"]:
        final = final.clone()  # no token: a result must not be an argument
    return o.to(args["q"].dtype), final, inverses(**args) if args["return_inverse"] else None


def inverses(
    k: Tensor, g: Tensor | None, beta: Tensor, use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor | None,
    **unread: Any,
) -> Tensor:  # fmt: skip
    """T = (I + A)^-1 of every chunk, [B, T, HV, 64]. Only backwards that compute in chunks read it."""
    wide = torch.promote_types(k.dtype, torch.float32)
    B, T, HV = beta.shape
    result = torch.zeros(B, T, HV, CHUNK, dtype=k.dtype, device=k.device)
    own_k = k.to(wide).repeat_interleave(HV // k.shape[2], 2)
    if use_qk_l2norm_in_kernel:
        own_k = own_k * ((own_k * own_k).sum(-1, keepdim=True) + float(EPS)).rsqrt()
    for _, b, tokens in places(B, T, cu_seqlens):
        for first in range(tokens.start, tokens.stop, CHUNK):
            here = slice(first, min(first + CHUNK, tokens.stop))
            keys, rows = own_k[b, here].transpose(0, 1), here.stop - here.start
            decay = torch.zeros(HV, rows, dtype=wide, device=k.device)
            if g is not None:
                decay = g[b, here].to(wide).T.cumsum(1)
            decay = (decay[:, :, None] - decay[:, None, :]).tril().exp()
            A = (beta[b, here].to(wide).T[..., None] * (keys @ keys.mT) * decay).tril(-1)
            eye = torch.eye(rows, dtype=wide, device=k.device)
            own = torch.linalg.solve_triangular(A + eye, eye.expand_as(A), upper=False, unitriangular=True)
            result[b, here, :, :rows] = own.transpose(0, 1).to(k.dtype)
    return result


# The states of chunks


def states(
    k: Tensor, w: Tensor, u: Tensor, g: Tensor | None, gk: Tensor | None, initial_state: Tensor | None,
    state_v_first: bool, cu_seqlens: Tensor | None, chunk_indices: Tensor | None, chunk_size: int,
    rounds: bool = False, **unread: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(h, v_new, last states); `rounds` where the op does, otherwise in the precision of the computation."""
    wide = torch.promote_types(k.dtype, torch.float32)
    B, T, HV, V = u.shape
    K, narrow = k.shape[-1], k.dtype

    def narrowed(t: Tensor) -> Tensor:
        return t.to(narrow).to(wide) if rounds else t

    own_k = k.to(wide).repeat_interleave(HV // k.shape[2], 2).transpose(1, 2)
    own_w, own_u = (t.to(wide).transpose(1, 2) for t in (w, u))
    NT = -(-T // chunk_size) if chunk_indices is None else len(chunk_indices)
    h, v_new, last = [], torch.zeros_like(own_u), []
    for n, b, tokens in places(B, T, cu_seqlens):
        state = None if initial_state is None else initial_state[n : n + 1]
        S = _first(state, (1, HV, K, V), own_u, state_v_first)[0]
        for first in range(tokens.start, tokens.stop, chunk_size):
            here = slice(first, min(first + chunk_size, tokens.stop))
            h.append(narrowed(S))
            values = narrowed(own_u[b, :, here] - own_w[b, :, here] @ narrowed(S))
            v_new[b, :, here] = values
            decay = torch.zeros(HV, 1, dtype=wide, device=k.device)
            if g is not None:
                gates = g[b, here].to(wide).T
                values = narrowed(values * (gates[:, -1:] - gates).exp2()[..., None])
                decay = decay + gates[:, -1:]
            if gk is not None:
                decay = decay + gk[b, here.stop - 1].to(wide)
            S = S * decay.exp2()[..., None] + own_k[b, :, here].mT @ values
        last.append(S)
    empty = own_u.new_zeros(0, HV, K, V)
    all_h = torch.stack(h) if h else empty
    all_h = torch.cat((all_h[: B * NT], empty.new_zeros(max(B * NT - len(all_h), 0), HV, K, V)))
    all_h, final = all_h.unflatten(0, (B, NT)) if B else all_h[None][:0], torch.stack(last) if last else empty
    if state_v_first:
        all_h, final = all_h.mT, final.mT
    return all_h, v_new.transpose(1, 2), final


def fwd_h(**args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(h, v_new, final_state)."""
    h, v_new, final = states(**args, rounds=True)
    dtype = args["k"].dtype
    return (
        h.contiguous().to(dtype),
        v_new.contiguous().to(dtype) if args["save_new_value"] else None,
        final.contiguous() if args["output_final_state"] else None,
    )
