"""The cache key of a call. Two calls with the same key differ only in tensor values.

Contracts, rules and backends look at nothing else, so their result for one call holds for all calls with its
key. Evaluating them takes longer than many kernels run.

The key of a *family* is wider: it covers calls with any number of rows. Batches have a different one every
step, and neither contracts nor rules nor backends depend on it.
"""

from collections.abc import Hashable, Sequence
from math import prod
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

CacheKey = tuple[Any, ...]
Sizes = tuple[int, ...]

#: Maximum number of cached keys: batches have many sizes.
MOST_KEYS = 4096

_SCALARS = frozenset((bool, int, float, str, torch.dtype, NoneType))
_TENSORS = frozenset((Tensor, Parameter))


def cache_key_of(values: Sequence[Any], grad: bool) -> CacheKey | None:
    """Everything about a call but tensor values: whether autograd is on, the types of its values, its
    scalars, and of each tensor what contracts look at; of its address only the alignment. None for a call
    with arguments of unusual types, or without memory."""
    types = tuple(map(type, values))  # 1, 1.0 and True are equal
    form = _forms.get(types) or _form(types)
    if form.unusual:
        return None
    scalars = [values[i] for i in form.scalars]
    for k in form.floats:
        if scalars[k] == 0.0:
            scalars[k] = str(scalars[k])  # 0.0 and -0.0 are equal
    key: list[Any] = [grad, types, tuple(scalars)]
    for i in form.tensors:
        t = values[i]
        try:
            at, strides = t.data_ptr(), t.stride()
        except RuntimeError:  # sparse, or wrapped by a transform
            return None
        if at == 0 or t.is_neg():
            return None
        key.append((t.shape, strides, t.dtype, t.get_device(), at & 15, t.requires_grad))
    return tuple(key)


class _Form(NamedTuple):
    """Positions of tensors and other values, for values of these types."""

    tensors: tuple[int, ...]
    scalars: tuple[int, ...]
    floats: tuple[int, ...]  # among the scalars
    unusual: bool  # subclasses and symbolic numbers may have no hash, or hold anything


_forms: dict[tuple[type, ...], _Form] = {}


def form_of(types: tuple[type, ...]) -> _Form:
    return _forms.get(types) or _form(types)


def _form(types: tuple[type, ...]) -> _Form:
    tensors = tuple(i for i, t in enumerate(types) if t in _TENSORS)
    scalars = tuple(i for i, t in enumerate(types) if t in _SCALARS)
    floats = tuple(k for k, i in enumerate(scalars) if types[i] is float)
    form = _Form(tensors, scalars, floats, len(tensors) + len(scalars) < len(types))
    remember(_forms, types, form)
    return form


def split_key(key: CacheKey, rows_at: Sequence[tuple[int, int] | None]) -> tuple[CacheKey, Sizes] | None:
    """The key of all calls that differ in the number of rows only, for two rows or more; and the sizes of the
    rows. Rows are the dimensions of a tensor between those that
    `rows_at` counts before and after them.

    None if rows are not contiguous, because then their number may affect strides; and if tensors disagree on
    the number of rows."""
    grad, types, scalars, *tensors = key
    family: list[Any] = [grad, types, scalars]
    odd: list[int] = []  # strides of dimensions of one, if they are not those of a contiguous tensor
    lead = None
    for i, item in zip(form_of(types).tensors, tensors, strict=True):
        around = rows_at[i]
        if around is None:
            family.append(item)
            continue
        shape, strides = tuple(item[0]), item[1]
        before, end = around[0], len(shape) - around[1]
        rows = shape[before:end]
        if lead is None:
            lead = rows
        elif rows != lead:
            return None
        size = 1
        for d in range(len(shape) - 1, -1, -1):
            n = shape[d]
            if strides[d] != size:
                if n != 1:
                    return None
                odd += (i, strides[d])
            size *= n
        family += (shape[:before], shape[end:], item[2:])
    if lead is None or prod(lead) < 2:
        return None
    return (*family, len(lead), *odd), lead


def remember(answers: dict[Any, Any], key: Hashable, answer: Any) -> None:
    """Cache an answer for calls with this key. If there are too many, an eighth is dropped, those that were
    cached first: a rollout whose every step has a new key keeps those of its last steps."""
    if key is None:
        return
    if len(answers) >= MOST_KEYS:
        for old in list(answers)[: max(MOST_KEYS // 8, 1)]:
            answers.pop(old, None)  # another thread may have dropped it
    answers[key] = answer
