"""Ranks agree about a call before they exchange tensors: when they are asked, and what happens later."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobit import ContractError
from isobit.parallel import Group, RanksError, in_turn
from isobit.ranks import agree

CPU: Any = torch.device("cpu")
#: On such a device only the first call of a kind is compared.
OTHER: Any = SimpleNamespace(type="other")


def fine() -> None:
    pass


def two_calls(later: Callable[[Group], tuple[str, Any, bool | None]]) -> Callable[[Group], torch.Tensor]:
    """Ranks agree about a first call; then each makes the one that `later` says, and exchanges a tensor."""

    def on_one_rank(group: Group) -> torch.Tensor:
        agree(group, "a", fine, CPU)
        call, device, validate = later(group)
        agree(group, call, fine, device, validate)
        return group.all_gather(torch.ones(4))

    return on_one_rank


def test_a_kind_of_call_is_compared_once_unless_it_is_asked_for() -> None:
    in_turn(2, two_calls(lambda group: ("a", OTHER, None)))
    with pytest.raises(TypeError):  # it asks: no tensor can be on this device
        in_turn(2, two_calls(lambda group: ("a", OTHER, True)))
    with pytest.raises(TypeError):
        in_turn(2, two_calls(lambda group: ("b", OTHER, None)))


def test_every_rank_is_told_of_other_calls_where_every_call_is_compared() -> None:
    with pytest.raises(ContractError, match="do not make the same call: rank 0: a; rank 1: b"):
        in_turn(2, two_calls(lambda group: ("ab"[group.rank], CPU, None)))


def test_a_rank_that_makes_a_new_call_later_waits_for_others_that_exchange_tensors() -> None:
    """What the page on ranks warns of. Ranks in turn notice it; processes would hang."""
    with pytest.raises(
        RanksError, match=r"rank 0: all_gather of \[4\] .*; rank 1: all_gather of \[8\] .*uint8"
    ):
        in_turn(2, two_calls(lambda group: ("ab"[group.rank], (OTHER, CPU)[group.rank], None)))
