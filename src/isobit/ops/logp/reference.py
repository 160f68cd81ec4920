"""`logp` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` defines the op. It is differentiable, computes in fp64 for fp64 logits and in fp32 for all others,
and needs a few [N, V] temporaries. `logp` and `logp_bwd` are the backend: the same numbers, for a limited
number of rows at a time, with an explicit gradient.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host import logits as stored
from isobit.kernels.host import logprob


def formula(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) by definition. Masked rows are 0, whatever their values."""
    return stored.formula(logits, token_ids, mask, ignore_index, temperature)


def logp(**args: Any) -> tuple[Tensor | None, ...]:
    """Forward. Returns (logp, entropy, lse, stats [2, *] = (m, s)); None for outputs that were not
    requested."""
    lead, (z, rows) = args["token_ids"].shape, _by_rows(args)
    results = stored.results(z, rows, args["return_entropy"], stored.wide(z))
    logp, entropy, lse, m, s = (r.reshape(lead).clone() for r in results)
    optional = {"entropy": entropy, "lse": lse, "stats": torch.stack((m, s))}
    return (logp, *(x if args[f"return_{name}"] else None for name, x in optional.items()))


def logp_bwd(**args: Any) -> Tensor:
    """Backward. Returns dlogits, contiguous, in the dtype of the logits."""
    z, rows = _by_rows(args)
    given = (args[name] for name in ("entropy", "dlogp", "dentropy", "dlse"))
    return stored.gradient(z, rows, args["stats"].reshape(2, -1), *given).view(args["logits"].shape)


def _by_rows(args: dict[str, Any]) -> tuple[Tensor, logprob.Rows]:
    """Logits [N, V], as a view if possible, and properties of their rows."""
    logits, token_ids, temperature = args["logits"], args["token_ids"], args["temperature"]
    V, dtype = logits.shape[-1], stored.wide(logits)
    rows = logprob.Rows.of(token_ids, args["mask"], args["ignore_index"], temperature, V, dtype)
    return logits.reshape(token_ids.numel(), V), rows
