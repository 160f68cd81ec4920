"""Bounds that divide rows into pieces (sequences or groups), [pieces + 1] from 0 to the number of rows."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from isobit.frame.contract import Contract


def check(
    contract: Contract, name: str, given: Any, found: Sequence[int], end: int, *, of: str, empty: bool = True
) -> None:
    """Raise an error if bounds are invalid. `given` is the argument of this name, `found` its values, and
    `end` the number of rows. `empty`: whether pieces may be empty."""
    if not found or found[0] != 0:
        rule = "must begin with 0" + (f", not {found[0]}" if found else "")
        raise contract.error(name, given, rule)
    for i, (here, after) in enumerate(pairwise(found)):
        if after < here or (after == here and not empty):
            rule = "must not descend" if empty else "must ascend"
            raise contract.error(name, given, f"{rule}: [{i}]={here}, [{i + 1}]={after}")
    if found[-1] != end:
        raise contract.error(name, given, f"must end with the number of {of}, {end}, not {found[-1]}")
