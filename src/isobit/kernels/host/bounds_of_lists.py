"""Bounds that a caller gives as numbers of the host: in a list, a tuple or a numpy array."""

import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

from isobit.frame.contract import Contract


def is_list(given: Any) -> TypeGuard[Sequence[int]]:
    """Whether bounds are given as numbers that the host has: in a sequence, or in a numpy array."""
    of_numpy = type(given).__module__ == "numpy" and hasattr(given, "dtype")
    return of_numpy or (isinstance(given, Sequence) and not isinstance(given, str | bytes))


def numbers(contract: Contract, name: str, given: Sequence[int]) -> list[int]:
    """The bounds of such a list as Python's numbers, or an error. numpy's numbers are whole numbers too: a
    list is often made by its cumsum."""
    if getattr(given, "ndim", 1) != 1:
        raise contract.error(name, given, "must have one dimension")
    if all(type(b) is int for b in given):
        values = list(given)
    elif any(isinstance(b, bool) for b in given):  # which is an int in Python
        raise contract.error(name, given, "must be whole numbers")
    else:
        try:
            values = [operator.index(b) for b in given]
        except TypeError:
            raise contract.error(name, given, "must be whole numbers") from None
    if any(not -(2**63) <= b < 2**63 for b in values):
        raise contract.error(name, given, "must be numbers that 64 bits can hold")
    return values
