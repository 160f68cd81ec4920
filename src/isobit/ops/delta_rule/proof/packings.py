"""Lengths of packed sequences, as options of cases write them."""

from itertools import accumulate, pairwise


def lengths_of(text: str) -> list[int]:
    """`5+2x3` as 5, 3, 3."""
    parts = (part.rpartition("x") for part in text.split("+"))
    return [int(length) for times, _, length in parts for _ in range(int(times or 1))]


def spread(count: int, total: int, least: int, most: int) -> str:
    """`count` lengths from `least` to `most` that sum to `total`: evenly spaced, but bent as far as the sum
    needs."""
    inner, room = [i / (count - 1) for i in range(1, count - 1)], most - least
    surplus = sum(least + room * x for x in inner) - (total - least - most)
    bend = surplus / (room * sum(x * (1 - x) for x in inner))
    assert abs(bend) <= 1, "the ends do not allow this sum"
    ends = accumulate((least + room * x * (1 - bend * (1 - x)) for x in inner), initial=least)
    return "+".join(str(end - first) for first, end in pairwise([0, *map(round, ends), total]))


#: Those that are timed: two short ones, then of 8192 tokens and of 32768. They are checked, too.
TIMED = (
    "117+174+221",
    "124+170+200+274",
    spread(20, 8192, 409, 410),
    spread(20, 8192, 296, 571),
    spread(25, 8192, 197, 558),
    spread(20, 8192, 205, 762),
    spread(20, 32768, 1185, 2286),
    spread(25, 32768, 788, 2233),
    spread(25, 32768, 400, 2200),
)
