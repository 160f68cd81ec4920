"""Log-probabilities from logits, as trainers and engines compute them.

An engine may return "processed" log-probabilities: those of the distribution that it samples from, after
temperature, top-k and top-p. "Raw" ones are of the logits as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.ops.logp import logp

#: (logits in fp32 [N, V], token ids [N], number of the sequence) -> log-probabilities [N].
Read = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Sampling:
    """What is done to logits before a token is sampled. The default leaves them as they are."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0

    def __str__(self) -> str:
        changed = {"temperature": self.temperature != 1, "top_k": self.top_k, "top_p": self.top_p < 1}
        return ", ".join(f"{name} {getattr(self, name):g}" for name, is_so in changed.items() if is_so)


RAW = Sampling()


def read_as(sampling: Sampling) -> Read:
    """Log-probabilities that are processed in this way, for all sequences."""
    return lambda logits, targets, sequence: processed(logits, targets, sampling)


def processed(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """[N]. The kernels of a GPU give a row the same bits in any number of rows. On a CPU nothing promises
    that, so each row is computed alone."""
    filtered = sampling.top_k > 0 or sampling.top_p < 1
    if logits.is_cuda and not filtered:
        return logp(logits, targets, temperature=sampling.temperature)
    rows = []
    for row, token in zip(logits / sampling.temperature, targets, strict=True):
        z = _filtered(row, sampling) if filtered else row
        rows.append(z[token] - z.logsumexp(0))
    return torch.stack(rows)


def _filtered(z: Tensor, sampling: Sampling) -> Tensor:
    """[V] with -inf for tokens that cannot be sampled. Equal logits at the border of top-k all stay."""
    if 0 < sampling.top_k < len(z):
        z = z.masked_fill(z < z.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = z.sort(descending=True)
        probs = ordered.softmax(0)
        beyond = probs.cumsum(0) - probs >= sampling.top_p  # by all that are likelier
        z = z.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), -torch.inf)
    return z
