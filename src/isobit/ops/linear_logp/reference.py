"""`linear_logp` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` defines the op. It is differentiable, computes in fp64 for fp64 inputs and in fp32 for all others,
and needs several [N, V] temporaries. `linear_logp` and `linear_logp_bwd` are the backend: the same numbers,
for a limited number of rows and of vocabulary at a time, with explicit gradients. They keep the gradient of
the logits in fp32, where the kernels round it to the inputs' dtype.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.kernels.host import logprob
from isobit.kernels.host.tokens import live_rows

#: Bytes of one [rows, V] temporary, unless `workspace_bytes` is given; a few exist at a time.
TEMPORARY_BYTES = 1 << 26

#: Elements of the weight that are converted to fp32 at a time.
SLAB_ELEMENTS = 1 << 24


def formula(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    logits_dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) by definition. Results of masked rows are 0, whatever the rows hold."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    vocab = weight.shape[0] if vocab_size is None else vocab_size
    live = live_rows(token_ids, mask, ignore_index)
    # Zeroed before the product, so that NaN in a masked row reaches neither results nor gradients.
    h = torch.where(live[..., None], hidden.to(dtype), 0.0)
    z = h @ weight[:vocab].to(dtype).t()
    if bias is not None:
        z = z + bias[:vocab].to(dtype)
    if logits_dtype is not None:
        z = z + (z.to(logits_dtype).to(dtype) - z).detach()  # straight-through gradient
    if logit_scale is not None:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        temperature = torch.where(live, temperature, 1.0)[..., None]
    return logprob.formula(z / temperature, token_ids, live)


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
        """Parts of the vocabulary whose weights are converted at a time."""
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
        """The derivative of a logit by its sum of products."""
        slope = 1.0 if self.logit_scale is None else self.logit_scale
        return slope if self.softcap is None else slope * (1.0 - (z / self.softcap) ** 2)


def linear_logp(**args: Any) -> tuple[Tensor | None, ...]:
    """Forward. Returns (logp, entropy, lse, stats [2, *] = (m, s)); None for outputs that were not
    requested."""
    head, hidden, rows = prepared(args)
    results = torch.empty((5, len(hidden)), dtype=head.dtype, device=hidden.device)
    for part in chunks(hidden, head, args["workspace_bytes"]):
        here = rows.chunk(part)
        z = head.logits(states(hidden[part], here, head.dtype))
        results[:, part] = logprob.row_results(z, here, args["return_entropy"])
    logp, entropy, lse, m, s = (r.reshape(args["token_ids"].shape).clone() for r in results)
    optional = {"entropy": entropy, "lse": lse, "stats": torch.stack((m, s))}
    return (logp, *(x if args[f"return_{name}"] else None for name, x in optional.items()))


def linear_logp_bwd(grad_dtype: torch.dtype | None = None, **args: Any) -> tuple[Tensor | None, ...]:
    """Backward. Returns (dhidden, dweight, dbias) in grad_dtype, or in the dtypes of their parameters."""
    head, hidden, rows = prepared(args)
    weight, stats, dentropy = args["weight"], args["stats"].reshape(2, -1), args["dentropy"]
    want_hidden, want_weight, want_bias = (args[f"want_{x}"] for x in ("hidden", "weight", "bias"))
    none = torch.zeros_like(stats[0])
    by_rows = (args[name] for name in ("entropy", "dlogp", "dentropy", "dlse"))
    entropy, g_logp, g_entropy, g_lse = (none if x is None else x.reshape(-1) for x in by_rows)
    dhidden = None
    if want_hidden:
        dhidden = torch.empty(hidden.shape, dtype=grad_dtype or hidden.dtype, device=hidden.device)
    sums = torch.zeros(weight.shape, dtype=head.dtype, device=hidden.device) if want_weight else None
    dbias = torch.zeros(weight.shape[0], dtype=head.dtype, device=hidden.device)
    for part in chunks(hidden, head, args["workspace_bytes"]):
        here = rows.chunk(part)
        h = states(hidden[part], here, head.dtype)
        z = head.logits(h)
        dz = logprob.dlogits(
            z, here, stats[:, part], entropy[part],
            g_logp[part], None if dentropy is None else g_entropy[part], g_lse[part],
        )  # fmt: skip
        dz = torch.where(here.good[:, None], dz * head.slope(z) / here.divisor, 0.0)
        if dhidden is not None:
            dh = torch.zeros_like(h)
            for v in head.slabs():
                dh += product(dz[:, v], head.wide(v))
            fill = here.fill(dh.dtype)[:, None]
            dhidden[part] = torch.where(here.good[:, None], dh, fill).to(dhidden.dtype)
        if sums is not None:
            for v in head.slabs():
                sums[v] += product(dz[:, v].t(), h)
        if want_bias:
            dbias[: head.vocab] += dz.sum(0)
    return (
        None if dhidden is None else dhidden.view(args["hidden"].shape),
        None if sums is None else sums.to(grad_dtype or weight.dtype),
        dbias.to(grad_dtype or args["bias"].dtype) if want_bias else None,
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b in IEEE arithmetic, whatever PyTorch's precision settings for fp32 products are."""
    settings: Any = torch.backends
    ours = (settings.mkldnn if a.device.type == "cpu" else settings.cuda).matmul
    exact = {settings.fp32_precision, ours.fp32_precision} <= {"none", "ieee"}
    return a @ b if exact or a.dtype == torch.float64 else (a.double() @ b.double()).to(a.dtype)


def prepared(args: dict[str, Any]) -> tuple[Head, Tensor, logprob.Rows]:
    """Inputs of forward and backward: the head, hidden states [N, D] (a view if possible), and properties of
    their rows."""
    hidden, weight, token_ids = args["hidden"], args["weight"], args["token_ids"]
    vocab = args["vocab_size"] or len(weight)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    softcap, logit_scale, logits_dtype = args["softcap"], args["logit_scale"], args["logits_dtype"]
    head = Head(weight, args["bias"], vocab, softcap, logit_scale, logits_dtype, dtype)
    temperature, ignore_index = args["temperature"], args["ignore_index"]
    rows = logprob.Rows.of(token_ids, args["mask"], ignore_index, temperature, vocab, dtype)
    return head, hidden.reshape(token_ids.numel(), hidden.shape[-1]), rows


def states(hidden: Tensor, rows: logprob.Rows, dtype: torch.dtype) -> Tensor:
    """Hidden states, with zeros in rows that are masked or have an invalid token."""
    return torch.where(rows.good[:, None], hidden.to(dtype), 0.0)


def chunks(hidden: Tensor, head: Head, workspace_bytes: int | None) -> list[slice]:
    """Rows whose logits are computed at a time."""
    bytes_per_row = head.vocab * head.dtype.itemsize
    step = max(1, (TEMPORARY_BYTES if workspace_bytes is None else workspace_bytes) // bytes_per_row)
    return [slice(i, i + step) for i in range(0, hidden.shape[0], step)]
