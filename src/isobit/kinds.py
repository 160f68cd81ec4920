"""Kinds of calls: what two calls have in common that differ only in what their tensors hold.

Contracts, rules and backends look at nothing else, so what they have said of one call holds for all of its
kind. Asking them takes longer than many a kernel runs.
"""

from typing import Any

import torch
from torch import Tensor

Kind = tuple[Any, ...]

#: Kinds that are remembered: batches have many sizes.
KINDS = 4096

_SCALARS = frozenset((bool, int, float, str, torch.dtype))


def kind_of(values: tuple[Any, ...]) -> Kind | None:
    """All about a call but what its tensors hold; of addresses, what decides how they can be read. None for
    a call whose arguments are of no usual type."""
    kind: list[Any] = []
    for v in values:
        if v is None:
            kind.append(None)
        elif type(v) in _SCALARS:  # subclasses, and symbolic numbers, may have no hash, or hold anything
            kind += (type(v), v)  # 1 and True are equal
        elif isinstance(v, Tensor) and v.layout is torch.strided:
            kind += (v.shape, v.stride(), v.dtype, v.device, v.data_ptr() % 16)
        else:
            return None
    return tuple(kind)


def remember(answers: dict[Kind, Any], kind: Kind | None, answer: Any) -> None:
    """Keep an answer for calls of this kind. When there are too many, all are forgotten."""
    if kind is None:
        return
    if len(answers) >= KINDS:
        answers.clear()
    answers[kind] = answer
