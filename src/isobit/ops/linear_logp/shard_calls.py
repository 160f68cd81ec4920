"""What backends of class lse/8x4 take from a call: its vocabulary, and the factor on each row's logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.kernels.host.temperature import LOG2E


def vocabulary_of(args: dict[str, Any]) -> int:
    """Number of tokens in all shards, without padding."""
    given: int | None = args["vocab_size"]
    return len(args["weight"]) if given is None else given


class Scaled(NamedTuple):
    """log2(e) logit_scale / temperature of some rows, and logit_scale."""

    scales: Tensor
    factor: float


def scaled(temperature: float | Tensor, logit_scale: float | None, rows: Tensor) -> Scaled:
    """Of the rows that a mask selects: a number that is rounded once to fp32, or that number divided by each
    row's temperature in fp32."""
    factor = 1.0 if logit_scale is None else logit_scale
    if isinstance(temperature, Tensor):
        each = temperature.reshape(-1)[rows].float()
        return Scaled(torch.tensor(LOG2E * factor, dtype=torch.float32) / each, factor)
    one = torch.full((int(rows.sum()),), LOG2E * factor / temperature, dtype=torch.float32)
    return Scaled(one, factor)
