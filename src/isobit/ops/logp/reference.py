"""`logp` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` is what the op means. It is differentiable, works in fp64 for fp64 logits and in fp32 for all
others, and holds a few [N, V] temporaries. `logp` and `logp_bwd` are the backend: the same numbers, a
bounded number of rows at a time, with the gradient written out.
"""

import torch
from torch import Tensor

#: Elements of [rows, V] that one chunk may hold in fp32: 64 MB for each temporary.
CHUNK_ELEMENTS = 1 << 24


def formula(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) by definition. Rows that do not count are 0, whatever they hold."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    V = logits.shape[-1]
    live = live_rows(token_ids, mask, ignore_index)
    good = (token_ids >= 0) & (token_ids < V)
    # Replaced before the exponential, so that what a dead row holds reaches neither results nor gradients.
    z = torch.where(live[..., None], logits.to(dtype), 0.0) / temperature
    log_p = z.log_softmax(-1)
    token = torch.where(good, token_ids, 0).long()
    logp = log_p.gather(-1, token[..., None])[..., 0]
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)  # a banned token: 0 * -inf is 0 here
    lse = z.logsumexp(-1)
    nan = torch.where(good, 0.0, float("nan"))
    return tuple(torch.where(live, x + nan, 0.0) for x in (logp, entropy, lse))  # type: ignore[return-value]


def live_rows(token_ids: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    live = token_ids != ignore_index
    return live if mask is None else live & (mask != 0)


def logp(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    ignore_index: int,
    temperature: float,
    return_entropy: bool,
    return_lse: bool,
    return_stats: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Forward. Returns (logp, entropy, lse, stats [2, *] = (m, s)); None for what was not asked."""
    lead = logits.shape[:-1]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    results = torch.empty((5, lead.numel()), dtype=dtype, device=logits.device)
    z, ids, live = flat_rows(logits, token_ids, mask, ignore_index)
    for rows in chunks(z):
        results[:, rows] = _rows(z[rows], ids[rows], live[rows], temperature, return_entropy, dtype)
    logp, entropy, lse, m, s = (r.reshape(lead).clone() for r in results)
    wanted = ((entropy, return_entropy), (lse, return_lse), (torch.stack((m, s)), return_stats))
    return (logp, *(x if asked else None for x, asked in wanted))


def _rows(
    z: Tensor, ids: Tensor, live: Tensor, temperature: float, want_entropy: bool, dtype: torch.dtype
) -> Tensor:
    good = (ids >= 0) & (ids < z.shape[-1])
    z = torch.where(live[:, None], z.to(dtype), 0.0)
    m = z.amax(-1)
    at_token = z.gather(-1, torch.where(good, ids, 0).long()[:, None])[:, 0]
    u = (z - torch.where(m == float("-inf"), 0.0, m)[:, None]) / temperature
    e = u.exp()
    s = e.sum(-1)
    log_s = s.log()
    entropy = torch.zeros_like(s)
    if want_entropy:
        entropy = log_s - torch.where(e == 0, 0.0, e * u).sum(-1) / s
    logp = (at_token - m) / temperature - log_s
    nan = torch.where(good, 0.0, float("nan"))
    lse = m / temperature + log_s
    zeroed = (torch.where(live, x + nan, 0.0) for x in (logp, entropy, lse, m))
    return torch.stack((*zeroed, torch.where(live, s, 1.0)))


def logp_bwd(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    stats: Tensor,
    entropy: Tensor | None,
    dlogp: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    ignore_index: int,
    temperature: float,
) -> Tensor:
    """Backward. Returns dlogits, contiguous, in the dtype of the logits."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    z, ids, live = flat_rows(logits, token_ids, mask, ignore_index)
    out = dlogits.view(z.shape)
    m, s = stats.reshape(2, -1)
    none = torch.zeros((), dtype=stats.dtype, device=z.device)
    g_logp, g_entropy, g_lse, h = (
        none.expand(m.shape) if g is None else g.reshape(-1) for g in (dlogp, dentropy, dlse, entropy)
    )
    for rows in chunks(z):
        good = (ids[rows] >= 0) & (ids[rows] < z.shape[-1])
        u = torch.where(live[rows, None], z[rows].to(stats.dtype), 0.0) - m[rows, None]
        u = u / temperature
        p = u.exp() / s[rows, None]
        dz = p * (g_lse - g_logp)[rows, None]
        if dentropy is not None:
            log_p = torch.where(p == 0, 0.0, u - s[rows, None].log())
            dz -= p * (log_p + h[rows, None]) * g_entropy[rows, None]
        token = torch.where(good, ids[rows], 0).long()[:, None]
        dz.scatter_add_(-1, token, g_logp[rows, None].to(dz.dtype))
        dz = torch.where(good[:, None], dz / temperature, float("nan"))
        out[rows] = torch.where(live[rows, None], dz, 0.0).to(out.dtype)
    return dlogits


def flat_rows(
    logits: Tensor, token_ids: Tensor, mask: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[N, V], [N], [N]: everything by rows (logits as a view wherever one exists)."""
    N = token_ids.numel()
    live = live_rows(token_ids, mask, ignore_index).reshape(N)
    return logits.reshape(N, logits.shape[-1]), token_ids.reshape(N), live


def chunks(z: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, z.shape[-1]))
    return [slice(i, i + rows) for i in range(0, z.shape[0], rows)]
