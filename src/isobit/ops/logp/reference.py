"""`logp` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` is what the op means. It is differentiable, works in fp64 for fp64 logits and in fp32 for all
others, and holds a few [N, V] temporaries. `logp` and `logp_bwd` are the backend: the same numbers, a
bounded number of rows at a time, with the gradient written out.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.blocks import logprob
from isobit.blocks.tokens import live_rows

#: Elements of [rows, V] that one chunk may hold in fp32: 64 MB for each temporary.
CHUNK_ELEMENTS = 1 << 24


def formula(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) by definition. Rows that do not count are 0, whatever they hold."""
    live = live_rows(token_ids, mask, ignore_index)
    # Replaced before the exponential, so that what a dead row holds reaches neither results nor gradients.
    z = torch.where(live[..., None], logits.to(_wide(logits)), 0.0)
    if isinstance(temperature, Tensor):
        temperature = torch.where(live, temperature, 1.0)[..., None]
    return logprob.formula(z / temperature, token_ids, live)


def logp(**args: Any) -> tuple[Tensor | None, ...]:
    """Forward. Returns (logp, entropy, lse, stats [2, *] = (m, s)); None for what was not asked."""
    lead, (z, rows) = args["token_ids"].shape, _by_rows(args)
    results = torch.empty((5, len(z)), dtype=_wide(z), device=z.device)
    for part in chunks(z):
        here = rows.chunk(part)
        known = torch.where(here.good[:, None], z[part].to(results.dtype), 0.0)
        results[:, part] = logprob.row_results(known, here, args["return_entropy"])
    logp, entropy, lse, m, s = (r.reshape(lead).clone() for r in results)
    optional = {"entropy": entropy, "lse": lse, "stats": torch.stack((m, s))}
    return (logp, *(x if args[f"return_{name}"] else None for name, x in optional.items()))


def logp_bwd(**args: Any) -> Tensor:
    """Backward. Returns dlogits, contiguous, in the dtype of the logits."""
    logits, stats, dentropy = args["logits"], args["stats"].reshape(2, -1), args["dentropy"]
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    z, rows = _by_rows(args)
    out, none = dlogits.view(z.shape), torch.zeros_like(stats[0])
    by_rows = (args[name] for name in ("entropy", "dlogp", "dentropy", "dlse"))
    entropy, g_logp, g_entropy, g_lse = (none if x is None else x.reshape(-1) for x in by_rows)
    for part in chunks(z):
        here = rows.chunk(part)
        known = torch.where(here.good[:, None], z[part].to(stats.dtype), 0.0)
        dz = logprob.dlogits(
            known, here, stats[:, part], entropy[part],
            g_logp[part], None if dentropy is None else g_entropy[part], g_lse[part],
        )  # fmt: skip
        fill = here.fill(dz.dtype)[:, None]
        out[part] = torch.where(here.good[:, None], dz / here.divisor, fill).to(out.dtype)
    return dlogits


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _by_rows(args: dict[str, Any]) -> tuple[Tensor, logprob.Rows]:
    """Logits [N, V], as a view wherever one exists, and what is known of their rows."""
    logits, token_ids, temperature = args["logits"], args["token_ids"], args["temperature"]
    V, dtype = logits.shape[-1], _wide(logits)
    rows = logprob.Rows.of(token_ids, args["mask"], args["ignore_index"], temperature, V, dtype)
    return logits.reshape(token_ids.numel(), V), rows


def chunks(z: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, z.shape[-1]))
    return [slice(i, i + rows) for i in range(0, z.shape[0], rows)]
