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
    whether autograd is on. One item for each value, after the last. None for a call whose arguments are of no
    usual type, or without memory."""
    kind: list[Any] = []
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
            kind.append((v.shape, strides, v.dtype, v.get_device(), at & 15, v.requires_grad))
        elif what in _SCALARS:  # subclasses, and symbolic numbers, may have no hash, or hold anything
            # 1 and True are equal, and so are 0.0 and -0.0.
            kind.append((what, str(v) if what is float and v == 0.0 else v))
        else:
            return None
    kind.append(grad)
    return tuple(kind)


def family_of(kind: Kind, rows_at: Sequence[tuple[int, int] | None]) -> Kind | None:
    """The same of all calls with two rows or more: what there is of each tensor beside its rows. Those are
    its dimensions but for so many before and after them, as `rows_at` says of tensors that have rows.

    None where rows do not follow one another without a gap, because then their number may decide strides;
    and where tensors disagree about it."""
    family: list[Any] = [kind[-1]]
    lead = None
    for item, at in zip(kind, rows_at, strict=False):
        if at is None or item is None or len(item) == 2:
            family.append(item)
            continue
        shape, strides = item[0], item[1]
        end = len(shape) - at[1]
        rows = shape[at[0] : end]
        if lead is None:
            lead = rows
        elif rows != lead:
            return None
        size = 1
        for n, stride in zip(reversed(shape), reversed(strides), strict=True):
            if stride != size and n != 1:
                return None
            size *= n
        family += (shape[: at[0]], shape[end:], item[2:])
    return None if lead is None or lead.numel() < 2 else (*family, len(lead))


def remember(answers: dict[Kind, Any], kind: Kind | None, answer: Any) -> None:
    """Keep an answer for calls of this kind. When there are too many, all are forgotten."""
    if kind is None:
        return
    if len(answers) >= KINDS:
        answers.clear()
    answers[kind] = answer
