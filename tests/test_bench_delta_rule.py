"""The benchmark of delta-rule gradients: what is declared, what the command line can ask for, errors."""

import pytest

from isobit.ops.delta_rule.proof.packings import lengths_of, spread
from isobit.ops.delta_rule.rivals import PACKED

# Packed sequences


def test_lengths_may_be_repeated() -> None:
    assert lengths_of("5+2x3+0") == [5, 3, 3, 0]


@pytest.mark.parametrize(("case", "count", "least", "most"), [
    (0, 3, 117, 221), (1, 4, 124, 274), (2, 20, 409, 410), (3, 20, 205, 762), (4, 25, 400, 2200),
])  # fmt: skip
def test_packed_sequences_have_the_lengths_that_are_declared(
    case: int, count: int, least: int, most: int
) -> None:
    found = lengths_of(PACKED[case].options["lengths"])
    assert (len(found), min(found), max(found)) == (count, least, most)
    assert sum(found) == PACKED[case].dims["T"]


def test_a_sum_that_the_ends_do_not_allow_is_an_error() -> None:
    with pytest.raises(AssertionError, match="do not allow this sum"):
        spread(4, 1000, 10, 20)
