"""The gradients of the recurrence in plain PyTorch, token by token from the last to the first, in the
precision of `reference`. With P = exp(g_t) S_(t-1), n = beta_t (v_t - P^T k_t) and S_t = P + k_t n^T, and
with D the gradient of S_t, which begins as that of the last state:

    dq   = scale S_t do_t,   D = D + scale q_t do_t^T
    dn   = D^T k_t,   dbeta = dn (v_t - P^T k_t),   dv = beta_t dn
    dk   = D n - P dv
    D    = D - k_t dv^T,   dg = <D, P>,   D = exp(g_t) D          the gradient of S_(t-1)

States are recomputed from those at the start of every 64th token.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule.model import CHUNK, EPS, places


def gated_delta_rule_bwd(**args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dg, dbeta, dinitial_state), those that are wanted."""
    q, k, v, g, beta, initial = (args[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    wide = torch.promote_types(q.dtype, torch.float32)
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    v_first, dht = args["state_v_first"], args["dfinal_state"]
    own_q, own_k = (t.to(wide) for t in (q, k))
    if args["use_qk_l2norm_in_kernel"]:
        own_q, own_k = own_q * _inverse_norms(own_q), own_k * _inverse_norms(own_k)
    by_head = [t.repeat_interleave(HV // H, 2) for t in (own_q, own_k)]
    decay = torch.ones_like(beta, dtype=wide) if g is None else g.to(wide).exp()
    inputs = (*by_head, v.to(wide), decay, beta.to(wide), args["do"].to(wide) * args["scale"])
    shapes = {"q": (K,), "k": (K,), "v": (V,), "g": (), "beta": ()}
    result = {n: torch.zeros(B, T, HV, *size, dtype=wide, device=q.device) for n, size in shapes.items()}
    sequences = B if args["cu_seqlens"] is None else len(args["cu_seqlens"]) - 1
    ends = torch.zeros(sequences, HV, K, V, dtype=wide, device=q.device)
    for n, b, tokens in places(B, T, args["cu_seqlens"]):
        own = [t[b, tokens] for t in inputs]
        S, D = (_state(state, n, v_first, ends[n]) for state in (initial, dht))
        D = _of_sequence(own, S, D, {name: t[b, tokens] for name, t in result.items()})
        ends[n] = D
    for name, own_x, x in (("q", own_q, q), ("k", own_k, k)):
        dx = result[name].unflatten(2, (H, HV // H)).sum(3)
        if args["use_qk_l2norm_in_kernel"]:
            dx = (dx - own_x * (own_x * dx).sum(-1, keepdim=True)) * _inverse_norms(x.to(wide))
        result[name] = dx
    result["initial_state"] = ends.mT.contiguous() if v_first else ends
    return tuple(t.to(args[name].dtype) if args[f"want_{name}"] else None for name, t in result.items())


def _inverse_norms(x: Tensor) -> Tensor:
    return ((x * x).sum(-1, keepdim=True) + float(EPS)).rsqrt()


def _state(state: Tensor | None, n: int, v_first: bool, like: Tensor) -> Tensor:
    if state is None:
        return torch.zeros_like(like)
    return (state[n].mT if v_first else state[n]).to(like.dtype)


def _step(S: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(P, v - P^T k, S) of one token."""
    P = S * decay[:, None, None]
    error = v - torch.einsum("hk,hkv->hv", k, P)
    return P, error, P + k[:, :, None] * (beta[:, None] * error)[:, None, :]


def _of_sequence(own: list[Tensor], S: Tensor, D: Tensor, to: dict[str, Tensor]) -> Tensor:
    """Fills the gradients of one sequence, [tokens, HV, ...], and returns that of its first state."""
    q, k, v, decay, beta, do = own
    starts = []
    for t in range(len(v)):
        if t % CHUNK == 0:
            starts.append(S)
        _, _, S = _step(S, k[t], v[t], decay[t], beta[t])
    for chunk in reversed(range(len(starts))):
        tokens, S, steps = range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(v))), starts[chunk], []
        for t in tokens:
            steps.append(_step(S, k[t], v[t], decay[t], beta[t]))
            S = steps[-1][2]
        for t in reversed(tokens):
            P, error, S = steps.pop()
            to["q"][t] = torch.einsum("hkv,hv->hk", S, do[t])
            D = D + q[t][:, :, None] * do[t][:, None, :]
            dn = torch.einsum("hkv,hk->hv", D, k[t])
            to["beta"][t] = (dn * error).sum(-1)
            dv = to["v"][t] = beta[t][:, None] * dn
            to["k"][t] = torch.einsum("hkv,hv->hk", D, beta[t][:, None] * error)
            to["k"][t] -= torch.einsum("hkv,hv->hk", P, dv)
            D = D - k[t][:, :, None] * dv[:, None, :]
            to["g"][t] = (D * P).sum((-2, -1))
            D = D * decay[t][:, None, None]
    return D
