"""Bounds that divide rows into pieces (sequences or groups), [pieces + 1] from 0 to the number of rows."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from isobit.frame.contract import Contract


def check(
    contract: Contract, name: str, given: Any, values: Sequence[int], end: int, *, of: str, empty: bool = True
) -> None:
    """Raise an error if bounds are invalid. `given` is the argument of this name, `values` its values, and
    `end` the number of rows. `empty`: whether pieces may be empty."""
    if not values or values[0] != 0:
        rule = "must begin with 0" + (f", not {values[0]}" if values else "")
        raise contract.error(name, given, rule)
    for i, (here, after) in enumerate(pairwise(values)):
        if after < here or (after == here and not empty):
            rule = "must not descend" if empty else "must ascend"
            raise contract.error(name, given, f"{rule}: [{i}]={here}, [{i + 1}]={after}")
    if values[-1] != end:
        raise contract.error(name, given, f"must end with the number of {of}, {end}, not {values[-1]}")
