"""A chunk of rows of `linear_logp` in plain PyTorch. Logits are stored in fp32. Rows are added to dweight at
once, without a queue: this backend promises no bits."""

from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host import logprob
from isobit.ops.linear_logp.reference import Head, prepared, product, states

_PLAIN: dict[str, Any] = dict.fromkeys(("softcap", "logit_scale", "logits_dtype", "vocab_size"))


def linear_logp_chunk(**args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, stats [2, *] = (m, s)); memory holds the logits."""
    head, hidden, rows = prepared(args | _PLAIN)
    z = _stored_logits(args, head)
    z.copy_(head.logits(states(hidden, rows, head.dtype)))
    results = logprob.row_results(z, rows, args["return_entropy"])
    logp, entropy, _, m, s = (r.reshape(args["token_ids"].shape).clone() for r in results)
    return logp, entropy if args["return_entropy"] else None, torch.stack((m, s))


def linear_logp_chunk_bwd(**args: Any) -> Tensor:
    """Returns 0: no row is queued."""
    head, hidden, rows = prepared(args | _PLAIN)
    dhidden, dweight, dbias, dentropy = (args[x] for x in ("dhidden", "dweight", "dbias", "dentropy"))
    stats = args["stats"].reshape(2, -1)
    none = torch.zeros_like(stats[0])
    by_rows = (args[name] for name in ("entropy", "dlogp", "dentropy"))
    entropy, g_logp, g_entropy = (none if x is None else x.reshape(-1) for x in by_rows)
    # Logits that were not stored are recomputed, for as many rows as fit in memory.
    step = len(hidden) if args["kept"] else args["memory"].numel() // head.vocab
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        here = rows.chunk(part)
        h = states(hidden[part], here, head.dtype)
        z = _stored_logits(args, head) if args["kept"] else head.logits(h)
        dz = logprob.dlogits(
            z, here, stats[:, part], entropy[part],
            g_logp[part], None if dentropy is None else g_entropy[part], none[part],
        )  # fmt: skip
        dz = torch.where(here.good[:, None], dz / here.divisor, 0.0)
        if dhidden is not None:
            dh = torch.zeros_like(h)
            for v in head.slabs():
                dh += product(dz[:, v], head.wide(v))
            fill = here.fill(dh.dtype)[:, None]
            dhidden[args["first_row"] + start :][: len(h)] = torch.where(here.good[:, None], dh, fill)
        first = args["first"] and start == 0
        if dweight is not None:
            for v in head.slabs():
                _add(dweight[v], product(dz[:, v].t(), h), first)
        if dbias is not None:
            _add(dbias, dz.sum(0), first)
    return torch.zeros(1, dtype=torch.int32, device=hidden.device)


def linear_logp_chunk_rounded(**args: Any) -> Tensor:
    """sums * factor."""
    out = torch.empty_like(args["sums"], dtype=args["dtype"])
    return torch.mul(args["sums"], args["factor"], out=out)


def _stored_logits(args: dict[str, Any], head: Head) -> Tensor:
    """The logits of this chunk in memory, [rows, V]."""
    rows: Tensor = args["memory"][: args["token_ids"].numel() * head.vocab]
    return rows.view(-1, head.vocab)


def _add(total: Tensor, terms: Tensor, first: bool) -> None:
    if first:
        total.copy_(terms)
    else:
        total += terms
