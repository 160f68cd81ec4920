"""Kinds of calls: what two calls have in common that differ only in what their tensors hold.

Contracts, rules and backends look at nothing else, so what they have said of one call holds for all of its
kind. Asking them takes longer than many a kernel runs.

A *family* is wider: calls of any number of rows. Batches have another one every step, and neither contracts
nor rules nor backends ask for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Kind = tuple[Any, ...]

#: Kinds that are remembered: batches have many sizes.
KINDS = 4096

_SCALARS = frozenset((bool, int, float, str, torch.dtype))


def kind_of(values: Sequence[Any], grad: bool) -> Kind | None:
    """All about a call but what its tensors hold; of addresses, what decides how they can be read; and
    whether autograd is on. None for a call whose arguments are of no usual type, or without memory."""
    kind: list[Any] = [grad]
    for v in values:
        what = type(v)
        if v is None:
            kind.append(None)
        elif what is Tensor or what is Parameter:
            try:
                at, strides = v.data_ptr(), v.stride()
            except RuntimeError:  # sparse, or wrapped by a transform
                return None
            if at == 0 or v.is_neg():
                return None
            kind += (v.shape, strides, v.dtype, v.get_device(), at & 15, v.requires_grad)
        elif what in _SCALARS:  # subclasses, and symbolic numbers, may have no hash, or hold anything
            kind += (what, v)  # 1 and True are equal
        else:
            return None
    return tuple(kind)


def family_of(values: Sequence[Any], rows_at: Sequence[tuple[int, int] | None]) -> Kind | None:
    """The same of all calls with two rows or more: what there is of each tensor beside its rows. Those are
    its dimensions but for so many before and after them, as `rows_at` says of tensors that have rows.

    None where rows do not follow one another without a gap, because then their number may decide strides;
    and where tensors disagree about it."""
    family: list[Any] = []
    lead = None
    for v, at in zip(values, rows_at, strict=True):
        if not isinstance(v, Tensor):
            if v is not None and type(v) not in _SCALARS:
                return None
            family += (type(v), v)
            continue
        if v.layout is not torch.strided:
            return None
        shape = v.shape
        family += (len(shape), v.dtype, v.device, v.data_ptr() & 15)
        if at is None:
            family += (shape, v.stride())
            continue
        end = len(shape) - at[1]
        if not v.is_contiguous() or lead not in (None, shape[at[0] : end]):
            return None
        lead = shape[at[0] : end]
        family += (shape[: at[0]], shape[end:])
    return None if lead is None or lead.numel() < 2 else tuple(family)


def remember(answers: dict[Kind, Any], kind: Kind | None, answer: Any) -> None:
    """Keep an answer for calls of this kind. When there are too many, all are forgotten."""
    if kind is None:
        return
    if len(answers) >= KINDS:
        answers.clear()
    answers[kind] = answer
