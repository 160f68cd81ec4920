"""Candidates for every op as others would write them: plain PyTorch, few options, right on what they take."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit import DeltaState


def logp(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, token_ids.long()[..., None])[..., 0]


def linear_logp(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    return logp(hidden.float() @ weight.float().T, token_ids)


def linear_policy_loss(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, loss_fn: Callable[..., Any], inputs: Any = None
) -> Tensor:
    """All rows at once: it needs to know neither chunks nor where sequences begin."""
    found = loss_fn(linear_logp(hidden, weight, token_ids), None, **inputs or {})
    return found[0] if isinstance(found, tuple) else found


def ratio_kl(
    policy_logits: Tensor, ref_logits: Tensor, token_ids: Tensor, old_logp: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    ours, theirs = logp(policy_logits, token_ids), logp(ref_logits, token_ids)
    d = theirs - ours
    return (ours - (ours.detach() if old_logp is None else old_logp)).exp(), torch.expm1(d) - d


def grpo_loss(
    policy_logits: Tensor,
    ref_logits: Tensor | None,
    token_ids: Tensor,
    old_logp: Tensor | None = None,
    rewards: Tensor | None = None,
    samples_per_prompt: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """From rewards alone, without a KL penalty, the mean over all tokens. Tokens without an advantage have no
    loss, even if their ratio overflows."""
    assert rewards is not None and samples_per_prompt is not None
    a = group_advantages(rewards, samples_per_prompt)[:, None]
    ours = torch.where(a == 0, 0.0, logp(policy_logits, token_ids))
    old = ours.detach() if old_logp is None else torch.where(a == 0, 0.0, old_logp)
    ratio = (ours - old).exp()
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a).mean()


def naive_grpo_loss(
    policy_logits: Tensor,
    ref_logits: Tensor | None,
    token_ids: Tensor,
    old_logp: Tensor | None = None,
    rewards: Tensor | None = None,
    samples_per_prompt: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """The same as it is usually written: wrong for an infinite ratio of such a token, as 0 * inf."""
    assert rewards is not None and samples_per_prompt is not None
    ours = logp(policy_logits, token_ids)
    ratio = (ours - (ours.detach() if old_logp is None else old_logp)).exp()
    a = group_advantages(rewards, samples_per_prompt)[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a).mean()


def group_advantages(rewards: Tensor, samples_per_prompt: int) -> Tensor:
    r = rewards.double().view(-1, samples_per_prompt)
    r = r - r.mean(-1, keepdim=True)
    found = r / r.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
    return found.flatten().to(torch.promote_types(rewards.dtype, torch.float32))


def det_gemm(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim > 2:
        raise NotImplementedError("two dimensions alone")
    return (a.float() @ b.float()).to(a.dtype)


def det_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def det_gemm_dw(x: Tensor, dy: Tensor) -> Tensor:
    return dy.float().flatten(0, -2).T @ x.float().flatten(0, -2)


def det_grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    rows, bounds = x.flatten(0, -2), offsets.tolist()
    parts = [det_linear(rows[first:end], weight[e]) for e, (first, end) in enumerate(pairwise(bounds))]
    parts.append(x.new_zeros(len(rows) - bounds[-1], weight.shape[1]))
    return torch.cat(parts).view(*x.shape[:-1], weight.shape[1])


def det_grouped_dw(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    return torch.stack([det_gemm_dw(x[a:b], dy[a:b]) for a, b in pairwise(offsets.tolist())])


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * weight.to(wide.dtype)).to(x.dtype)


def rms_norm_gated(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    wide = x.float()
    y = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
    return (weight * y * F.silu(gate.float())).to(x.dtype)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    R = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]

    def rotated(x: Tensor) -> Tensor:
        first, second = x[..., :R].chunk(2, -1)
        turned = x[..., :R] * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned, x[..., R:]), -1)

    return rotated(q), rotated(k)


def attention_sink(x: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    seen = lse != -torch.inf
    score = torch.where(seen, lse, 0.0) - sinks.to(lse.dtype)
    return (x * torch.where(seen, F.logsigmoid(score).exp(), 0.0)[..., None]).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    qh, kh, vh = (t.transpose(1, 2).float() for t in (q, k, v))
    kh, vh = (t.repeat_interleave(qh.shape[1] // kh.shape[1], 1) for t in (kh, vh))
    z = qh @ kh.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    T, S = z.shape[-2:]
    if causal:
        z = z.masked_fill(~torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T), -torch.inf)
    return (z.softmax(-1) @ vh).transpose(1, 2).to(q.dtype)


def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, scale: float | None = None, chunk_size: int = 64
) -> tuple[Tensor, None, Tensor]:
    """Without gates and states at the ends: D_c = D_{c+1} + scale q^T do - w^T (k D_{c+1} + dv)."""
    B, T, K, (HV, V) = *q.shape[:2], q.shape[3], dv.shape[2:]
    scale = K**-0.5 if scale is None else scale
    heads = [t.float().repeat_interleave(HV // t.shape[2], 2).transpose(1, 2) for t in (q, k, w, do, dv)]
    d, states, parts = q.new_zeros(B, HV, K, V, dtype=torch.float32), [], []
    for first in reversed(range(0, T, chunk_size)):
        Q, Kc, W, dO, dV = (t[:, :, first : first + chunk_size] for t in heads)
        states.append(d)
        x = (Kc @ d.to(q.dtype).float() + dV).to(q.dtype).float()
        parts.append(x)
        d = d + scale * (Q.mT @ dO) - W.mT @ x
    dv2 = torch.cat(parts[::-1], 2).transpose(1, 2)
    return torch.stack(states[::-1], 1).to(q.dtype), None, dv2.to(q.dtype).contiguous()


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token, as it is defined."""
    (B, T, HV, V), K = v.shape, q.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = (t.to(wide).repeat_interleave(HV // t.shape[2], 2) for t in (q, k))
    S, none = v.new_zeros(B, HV, K, V, dtype=wide), (q * k)[:, :0].sum(-1, keepdim=True) * v[:, :0]
    rows = [none * (beta if g is None else beta * g)[:, :0, :, None]]  # gradients of no token are 0
    if initial_state is not None:
        S = S + initial_state
    for t in range(T):
        if g is not None:
            S = S * g[:, t, :, None, None].to(wide).exp()
        new = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ S)[:, :, 0])
        S = S + k[:, t, :, :, None] * new[:, :, None].to(wide)
        rows.append((q[:, t, :, None] @ S).transpose(1, 2))
    o = torch.cat(rows, 1) * (K**-0.5 if scale is None else scale)
    return o.to(v.dtype), S if output_final_state else None


def gated_delta_rule_step(
    state: DeltaState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    slots: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The recurrence from the present state of each sequence. It keeps the new one as a state to begin with,
    instead of rows."""
    own = list(range(len(q))) if slots is None else slots.tolist()
    S = q.new_zeros(len(q), *state.start.shape[2:], dtype=torch.float32)
    for b, slot in enumerate(own):
        rows, chunks, _, seeded, _ = state.place[slot].tolist()
        here = (slot, chunks % state.start.shape[1])
        if chunks or seeded:
            S[b] = state.start[here]
        if rows:
            gates = state.gate_rows[here][:, :rows, None]
            keys = state.k_rows[here][:, :rows].float().repeat_interleave(v.shape[2] // k.shape[2], 0)
            new = state.vn_rows[here][:, :rows] * (gates[:, -1:] - gates).exp()
            S[b] = S[b] * gates[:, -1:].exp() + keys.mT @ new
    out, S_new = gated_delta_rule(q, k, v, g, beta, scale, S, output_final_state=True)
    state.reset(own, S_new)
    return out


def delta_gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g, b.float().sigmoid().to(b.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Of sequences of one length, from their first token on."""
    D, W = weight.shape
    padded = F.pad(x.float().mT, (W - 1, 0))
    z = F.conv1d(padded, weight.float()[:, None], None if bias is None else bias.float(), groups=D)
    return (z if activation is None else F.silu(z)).mT.to(x.dtype)


def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Without gates of features."""
    (B, T, HV, V), K, wide = u.shape, k.shape[-1], torch.promote_types(k.dtype, torch.float32)
    Kc, W, U = (t.to(wide).repeat_interleave(HV // t.shape[2], 2).transpose(1, 2) for t in (k, w, u))
    S, states, parts = u.new_zeros(B, HV, K, V, dtype=wide), [], [U[:, :, :0]]
    if initial_state is not None:
        S = S + initial_state
    for first in range(0, T, 64):
        c = slice(first, first + 64)
        states.append(S.to(k.dtype))
        x = (U[:, :, c] - W[:, :, c] @ states[-1].to(wide)).to(k.dtype).to(wide)
        parts.append(x)
        if g is not None:
            G = g[:, c].transpose(1, 2)[..., None]
            x, S = (x * (G[:, :, -1:] - G).exp2()).to(k.dtype).to(wide), S * G[:, :, -1:].exp2()
        S = S + Kc[:, :, c].mT @ x
    h = torch.stack(states, 1) if states else u.new_zeros(B, 0, HV, K, V)
    v_new = torch.cat(parts, 2).transpose(1, 2).to(k.dtype).contiguous()
    return h, v_new, S if output_final_state else None


def swiglu_packed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def combine(y: Tensor, weights: Tensor, place: Tensor) -> Tensor:
    return (y[place.long()] * weights[..., None]).to(y.dtype).sum(-2).to(y.dtype)


def spread(x: Tensor, place: Tensor, rows: int | None) -> Tensor:
    copies = x[:, None].expand(*place.shape, x.shape[1]).flatten(0, 1)
    count = place.numel() if rows is None else rows
    return x.new_zeros(count, x.shape[1]).index_copy(0, place.flatten().long(), copies)


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    p = logits.softmax(-1, dtype=torch.float32)
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return p.gather(-1, experts).to(logits.dtype), experts.int()
