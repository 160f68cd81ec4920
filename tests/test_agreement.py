"""Ranks agree about a call before they exchange tensors: when they are asked, and what happens later."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import isobit
from isobit import ContractError
from isobit.parallel import Group, RanksError, in_turn
from isobit.ranks import agree, bits, shown
from isobit.ranks.checksum import checksum

CPU: Any = torch.device("cpu")
#: On such a device only the first call of a kind is compared.
OTHER: Any = SimpleNamespace(type="other")


def fine() -> None:
    pass


def two_calls(later: Callable[[Group], tuple[str, Any, bool | None]]) -> Callable[[Group], torch.Tensor]:
    """Ranks agree about a first call; then each makes the one that `later` says, and exchanges a tensor."""

    def on_one_rank(group: Group) -> torch.Tensor:
        agree(group, lambda: "a", fine, CPU)
        call, device, validate = later(group)
        agree(group, lambda: call, fine, device, validate)
        return group.all_gather(torch.ones(4))

    return on_one_rank


def test_a_kind_of_call_is_compared_once_unless_it_is_asked_for() -> None:
    in_turn(2, two_calls(lambda group: ("a", OTHER, None)))
    with pytest.raises(TypeError):  # it asks: no tensor can be on this device
        in_turn(2, two_calls(lambda group: ("a", OTHER, True)))
    with pytest.raises(TypeError):
        in_turn(2, two_calls(lambda group: ("b", OTHER, None)))


def test_every_rank_is_told_of_other_calls_where_every_call_is_compared() -> None:
    with pytest.raises(ContractError, match=r"do not make the same call: rank 0: a, compared .*; rank 1: b"):
        in_turn(2, two_calls(lambda group: ("ab"[group.rank], CPU, None)))


def test_a_rank_that_makes_a_new_call_later_waits_for_others_that_exchange_tensors() -> None:
    """What the page on ranks warns of. Ranks in turn notice it; processes would hang."""
    with pytest.raises(
        RanksError, match=r"rank 0: all_gather of \[4\] .*; rank 1: all_gather of \[8\] .*uint8"
    ):
        in_turn(2, two_calls(lambda group: ("ab"[group.rank], (OTHER, CPU)[group.rank], None)))


def test_others_hear_of_an_error_of_any_kind_on_one_rank() -> None:
    def mistaken(group: Group) -> str:
        return str(1 // group.rank)

    def heard(call: Callable[[Group], str], check: Callable[[Group], str]) -> list[str]:
        def on_one_rank(group: Group) -> str:
            try:
                agree(group, lambda: call(group), lambda: check(group), CPU)
            except (ContractError, ZeroDivisionError) as error:
                return str(error)
            return ""

        return in_turn(2, on_one_rank)

    for one, other in (heard(mistaken, lambda group: ""), heard(lambda group: "", mistaken)):
        assert one == "integer division or modulo by zero"
        assert "rank 0: refused: ZeroDivisionError: integer division" in other


def test_what_serves_a_call_is_part_of_it() -> None:
    """Of hopper-8x4 on one rank and triton-8x4 on another, whose classes differ."""
    with pytest.raises(ContractError, match=r"a, computed by fast, .*; rank 1: a, computed by slow, "):
        in_turn(2, lambda group: agree(group, lambda: "a", lambda: ("fast", "slow")[group.rank], CPU))


def test_values_are_compared_as_well_and_those_of_masked_rows_are_not() -> None:
    live = torch.tensor([True, False, True])

    def with_row(row: int) -> Callable[[Group], None]:
        def on_one_rank(group: Group) -> None:
            states = torch.ones(3, 2).bfloat16()
            states[row] += group.rank
            agree(group, lambda: "a", fine, CPU, values=lambda: bits({"hidden": states}, live))

        return on_one_rank

    in_turn(2, with_row(1))
    with pytest.raises(ContractError, match=r"rank 0: a, bits of hidden: .*; rank 1: a, bits of hidden: "):
        in_turn(2, with_row(2))


def test_checksums_differ_where_bits_or_their_order_do() -> None:
    t = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    other = t.clone()
    other[4, 2] = torch.nextafter(other[4, 2], torch.tensor(9.0))
    ids = torch.arange(4)
    found = [checksum(each) for each in (t, other, t.flip(0), t.half(), ids, ids.flip(0), ids[:0], ids[0])]
    assert len({*found}) == len(found) and checksum(t) == checksum(t.clone())


def test_what_is_long_is_shown_in_short_with_a_hash_of_all_of_it() -> None:
    bounds = [*range(1000)]
    assert shown(bounds) != shown([*bounds[:-1], 1001]) and len(shown(bounds)) < 130
    assert shown(np.array(bounds)) == shown(bounds)


def test_a_call_with_a_group_is_explained() -> None:
    rows, weight, ids = torch.ones(3, 8).bfloat16(), torch.ones(32, 8).bfloat16(), torch.arange(3)

    def on_one_rank(group: Group) -> list[str]:
        given = {"token_ids": ids, "group": group}
        found = [
            isobit.explain("linear_logp", rows, weight, **given),
            isobit.explain("linear_policy_loss", rows, weight, **given, loss_fn=len),
            isobit.explain("logp", torch.ones(3, 32), **given),
        ]
        return [each.numerics for each in found]

    assert in_turn(2, on_one_rank) == [["lse/8x4/cpu", "lse/8x4/cpu", "lse/triton-8x1/cpu"]] * 2
