"""Stored rows of logits, in plain PyTorch, for the references of ops on logits.

`formula` defines the results of a row: differentiable, in fp64 for fp64 logits and in fp32 for all others,
with a few [N, V] temporaries. `results` and `gradient` are the same numbers for a backend, for a limited
number of rows at a time.
"""

import torch
from torch import Tensor

from isobit.kernels.host import logprob
from isobit.kernels.host.tokens import live_rows

#: Elements of [rows, V] per chunk: 64 MB in fp32 for each temporary.
CHUNK_ELEMENTS = 1 << 24


def wide(*tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: fp64 if one of them is fp64, else fp32."""
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def formula(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    ignore_index: int,
    temperature: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) by definition. Masked rows are 0, whatever their values."""
    live = live_rows(token_ids, mask, ignore_index)
    # Zeroed before the exponential, so that NaN in a masked row reaches neither results nor gradients.
    z = torch.where(live[..., None], logits.to(wide(logits)), 0.0)
    if isinstance(temperature, Tensor):
        temperature = torch.where(live, temperature, 1.0)[..., None]
    return logprob.formula(z / temperature, token_ids, live)


def results(z: Tensor, rows: logprob.Rows, want_entropy: bool, dtype: torch.dtype) -> Tensor:
    """[5, N] of logits [N, V], computed in `dtype`: see `logprob.row_results`."""
    out = torch.empty((5, len(z)), dtype=dtype, device=z.device)
    for part in chunks(z):
        here = rows.chunk(part)
        known = torch.where(here.good[:, None], z[part].to(dtype), 0.0)
        out[:, part] = logprob.row_results(known, here, want_entropy)
    return out


def gradient(
    z: Tensor, rows: logprob.Rows, stats: Tensor, entropy: Tensor | None,
    dlogp: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient of logits [N, V], in their dtype, from stats [2, N] and the rows' other numbers."""
    out, none = torch.empty(z.shape, dtype=z.dtype, device=z.device), torch.zeros_like(stats[0])
    entropy, on_logp, on_entropy, on_lse = (
        none if x is None else x.reshape(-1) for x in (entropy, dlogp, dentropy, dlse)
    )
    for part in chunks(z):
        here = rows.chunk(part)
        known = torch.where(here.good[:, None], z[part].to(stats.dtype), 0.0)
        dz = logprob.dlogits(
            known, here, stats[:, part], entropy[part],
            on_logp[part], None if dentropy is None else on_entropy[part], on_lse[part],
        )  # fmt: skip
        fill = here.fill(dz.dtype)[:, None]
        out[part] = torch.where(here.good[:, None], dz / here.divisor, fill).to(out.dtype)
    return out


def chunks(z: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, z.shape[-1]))
    return [slice(i, i + rows) for i in range(0, z.shape[0], rows)]
