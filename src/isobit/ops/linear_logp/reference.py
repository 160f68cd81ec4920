"""`linear_logp` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` is what the op means. It is differentiable, works in fp64 for fp64 inputs and in fp32 for all
others, and holds several [N, V] temporaries. `linear_logp` and `linear_logp_bwd` are the backend: the same
numbers, a bounded number of rows and of vocabulary at a time, with the gradient written out. They keep the
gradient of the logits in fp32, where the kernels round it to the inputs' dtype.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.ops.logp.reference import formula as logp_formula
from isobit.ops.logp.reference import live_rows

#: Bytes of one [rows, V] temporary, unless `workspace_bytes` says otherwise; a few are alive at a time.
CHUNK_BYTES = 1 << 26

#: Bytes for gradients of logits in a kernel's backward, and for sums of splits in triton's forward, unless
#: the caller says otherwise.
WORKSPACE_BYTES = 1 << 26

#: Elements of the weight that are widened to fp32 at a time.
SLAB_ELEMENTS = 1 << 24


def formula(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    row_temperature: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    logits_dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) by definition. Rows that do not count are 0, whatever they hold."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    vocab = weight.shape[0] if vocab_size is None else vocab_size
    live = live_rows(token_ids, mask, ignore_index)
    # Replaced before the product, so that what a dead row holds reaches neither results nor gradients.
    h = torch.where(live[..., None], hidden.to(dtype), 0.0)
    z = h @ weight[:vocab].to(dtype).t()
    if bias is not None:
        z = z + bias[:vocab].to(dtype)
    if logits_dtype is not None:
        z = z + (z.to(logits_dtype).to(dtype) - z).detach()  # the gradient passes the rounding
    if logit_scale is not None:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if row_temperature is not None:
        z = z / torch.where(live, row_temperature, 1.0)[..., None]
    return logp_formula(z, token_ids, mask, ignore_index, temperature)


# The backend


class Head(NamedTuple):
    """From hidden states to logits, and back."""

    weight: Tensor
    bias: Tensor | None
    vocab: int
    softcap: float | None
    logit_scale: float | None
    logits_dtype: torch.dtype | None
    dtype: torch.dtype

    def slabs(self) -> Iterator[slice]:
        """Parts of the vocabulary whose weights are widened at a time."""
        step = max(1, SLAB_ELEMENTS // max(1, self.weight.shape[1]))
        return (slice(v, min(v + step, self.vocab)) for v in range(0, self.vocab, step))

    def wide(self, v: slice) -> Tensor:
        return self.weight[v].to(self.dtype)

    def logits(self, h: Tensor) -> Tensor:
        z = torch.empty(h.shape[0], self.vocab, dtype=self.dtype, device=h.device)
        for v in self.slabs():
            z[:, v] = product(h, self.wide(v).t())
        if self.bias is not None:
            z += self.bias[: self.vocab]
        if self.logits_dtype is not None:
            z = z.to(self.logits_dtype).to(self.dtype)
        if self.logit_scale is not None:
            z *= self.logit_scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z

    def slope(self, z: Tensor) -> Tensor | float:
        """The derivative of a logit by the sum of products that it was made of."""
        slope = 1.0 if self.logit_scale is None else self.logit_scale
        return slope if self.softcap is None else slope * (1.0 - (z / self.softcap) ** 2)


class Rows(NamedTuple):
    """Everything that has rows, by rows."""

    hidden: Tensor
    ids: Tensor
    live: Tensor
    good: Tensor
    temperature: Tensor | float

    def chunk(self, rows: slice) -> "Rows":
        temperature = self.temperature if isinstance(self.temperature, float) else self.temperature[rows]
        return Rows(self.hidden[rows], self.ids[rows], self.live[rows], self.good[rows], temperature)

    def states(self, dtype: torch.dtype) -> Tensor:
        """Hidden states, with zeros in rows that do not count or have no valid token."""
        return torch.where(self.good[:, None], self.hidden.to(dtype), 0.0)

    def tokens(self) -> Tensor:
        return torch.where(self.good, self.ids, 0).long()[:, None]

    def fill(self) -> Tensor:
        """What rows without a valid token get: 0 if they do not count, else NaN."""
        return torch.where(self.live & ~self.good, float("nan"), 0.0)


def linear_logp(**args: Any) -> tuple[Tensor | None, ...]:
    """Forward. Returns (logp, entropy, lse, stats [2, *] = (m, s)); None for what was not asked."""
    head, rows = head_and_rows(args)
    results = torch.empty((5, len(rows.ids)), dtype=head.dtype, device=rows.hidden.device)
    for part in chunks(rows, head, args["workspace_bytes"]):
        results[:, part] = _forward_rows(rows.chunk(part), head, args["return_entropy"])
    logp, entropy, lse, m, s = (r.reshape(args["token_ids"].shape).clone() for r in results)
    optional = {"entropy": entropy, "lse": lse, "stats": torch.stack((m, s))}
    return (logp, *(x if args[f"return_{name}"] else None for name, x in optional.items()))


def _forward_rows(rows: Rows, head: Head, want_entropy: bool) -> Tensor:
    z = head.logits(rows.states(head.dtype))
    m = z.amax(-1)
    at_token = z.gather(-1, rows.tokens())[:, 0]
    u = (z - torch.where(m == float("-inf"), 0.0, m)[:, None]) / _column(rows.temperature)
    e = u.exp()
    s = e.sum(-1)
    log_s = s.log()
    entropy = torch.zeros_like(s)
    if want_entropy:
        entropy = log_s - torch.where(e == 0, 0.0, e * u).sum(-1) / s
    logp = (at_token - m) / rows.temperature - log_s
    lse = m / rows.temperature + log_s
    filled = (torch.where(rows.good, x, rows.fill()) for x in (logp, entropy, lse, m))
    return torch.stack((*filled, torch.where(rows.good, s, 1.0)))


def linear_logp_bwd(**args: Any) -> tuple[Tensor | None, ...]:
    """Backward. Returns (dhidden, dweight, dbias) in the dtypes of what they are gradients of."""
    head, rows = head_and_rows(args)
    hidden, weight, stats = args["hidden"], args["weight"], args["stats"]
    want_hidden, want_weight, want_bias = (args[f"want_{x}"] for x in ("hidden", "weight", "bias"))
    m, s = stats.reshape(2, -1)
    none = torch.zeros((), dtype=stats.dtype, device=hidden.device)
    g_logp, g_entropy, g_lse, h_entropy = (
        none.expand(m.shape) if args[name] is None else args[name].reshape(-1)
        for name in ("dlogp", "dentropy", "dlse", "entropy")
    )
    dhidden = None
    if want_hidden:
        dhidden = torch.empty(rows.hidden.shape, dtype=hidden.dtype, device=hidden.device)
    sums = torch.zeros(weight.shape, dtype=head.dtype, device=hidden.device) if want_weight else None
    dbias = torch.zeros(weight.shape[0], dtype=head.dtype, device=hidden.device)
    for part in chunks(rows, head, args["workspace_bytes"]):
        here = rows.chunk(part)
        h = here.states(head.dtype)
        z = head.logits(h)
        u = (z - m[part, None]) / _column(here.temperature)
        p = u.exp() / s[part, None]
        dz = p * (g_lse - g_logp)[part, None]
        if args["dentropy"] is not None:
            log_p = torch.where(p == 0, 0.0, u - s[part, None].log())
            dz -= p * (log_p + h_entropy[part, None]) * g_entropy[part, None]
        dz.scatter_add_(-1, here.tokens(), g_logp[part, None].to(dz.dtype))
        dz *= head.slope(z) / _column(here.temperature)
        dz = torch.where(here.good[:, None], dz, 0.0)
        if dhidden is not None:
            dh = torch.zeros_like(h)
            for v in head.slabs():
                dh += product(dz[:, v], head.wide(v))
            dhidden[part] = torch.where(here.good[:, None], dh, here.fill()[:, None]).to(hidden.dtype)
        if sums is not None:
            for v in head.slabs():
                sums[v] += product(dz[:, v].t(), h)
        if want_bias:
            dbias[: head.vocab] += dz.sum(0)
    return (
        None if dhidden is None else dhidden.view(hidden.shape),
        None if sums is None else sums.to(weight.dtype),
        dbias.to(args["bias"].dtype) if want_bias else None,
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b in IEEE arithmetic, whatever PyTorch was told to do with fp32 products."""
    settings: Any = torch.backends
    ours = (settings.mkldnn if a.device.type == "cpu" else settings.cuda).matmul
    exact = {settings.fp32_precision, ours.fp32_precision} <= {"none", "ieee"}
    return a @ b if exact or a.dtype == torch.float64 else (a.double() @ b.double()).to(a.dtype)


def head_and_rows(args: dict[str, Any]) -> tuple[Head, Rows]:
    """What forward and backward compute on (hidden states as a view wherever one exists)."""
    hidden, weight, token_ids = args["hidden"], args["weight"], args["token_ids"]
    N, vocab = token_ids.numel(), args["vocab_size"] or len(weight)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    softcap, logit_scale, logits_dtype = args["softcap"], args["logit_scale"], args["logits_dtype"]
    head = Head(weight, args["bias"], vocab, softcap, logit_scale, logits_dtype, dtype)
    ids = token_ids.reshape(N)
    live = live_rows(token_ids, args["mask"], args["ignore_index"]).reshape(N)
    good = live & (ids >= 0) & (ids < vocab)
    each: Tensor | float = float(args["temperature"])
    if args["row_temperature"] is not None:
        each = torch.where(good, args["row_temperature"].reshape(N), 1.0) * args["temperature"]
    return head, Rows(hidden.reshape(N, hidden.shape[-1]), ids, live, good, each)


def chunks(rows: Rows, head: Head, workspace_bytes: int | None) -> list[slice]:
    bytes_a_row = head.vocab * head.dtype.itemsize
    step = max(1, (CHUNK_BYTES if workspace_bytes is None else workspace_bytes) // bytes_a_row)
    return [slice(i, i + step) for i in range(0, rows.hidden.shape[0], step)]


def _column(x: Tensor | float) -> Tensor | float:
    return x if isinstance(x, float) else x[:, None]
