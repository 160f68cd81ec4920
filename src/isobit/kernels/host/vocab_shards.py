"""How class lse/8x4 cuts a vocabulary, so that one GPU and several compute the same sums.

The vocabulary is padded to P columns, a multiple of 64, and cut into eight *shards* of P / 8 columns. Columns
from V on take no part. A shard is cut into tiles of 256 columns from its own start, and these into four
*splits* that differ by at most one tile; some may be empty. All bounds are functions of P alone. A GPU has
one or more whole shards, in order.
"""

from dataclasses import dataclass
from itertools import pairwise

SHARDS, SPLITS_PER_SHARD, TILE = 8, 4, 256

#: What a padded vocabulary is a multiple of. Shards are then multiples of 8 columns, 16 bytes of a bias.
PADDED_TO = 64


def padded(V: int) -> int:
    """The padded vocabulary, unless the caller gives one."""
    return -(-V // PADDED_TO) * PADDED_TO


def misfit(V: int, P: int, shard: int, shards: int, given: int, unit: str) -> str | None:
    """What is wrong with a rank that has so many rows of a weight, or columns of logits (the `unit`), of
    `shards` shards from `shard` on; behind the last token they may be missing. None if they fit."""
    whole, first, ranks = shards * P // SHARDS, shard * P // SHARDS, SHARDS // shards
    if min(max(V - first, 1), whole) <= given <= whole:
        return None
    advice = f"pad the LM head to {P} rows before it is cut"
    if given >= V and ranks > 1:
        dim = ", -1" if unit == "column" else ""
        advice = f"these are all {unit}s: a rank takes its own, .tensor_split({ranks}{dim})[rank]"
    elif given * ranks >= V and given * ranks % PADDED_TO == 0:
        advice = f"padded_vocab={given * ranks} would fit them; or {advice}"
    own = f"{whole} {unit}s of a vocabulary padded to {P}, from {unit} {first} on"
    return f"a rank of {ranks} has {own}, not {given}: {advice}"


@dataclass(frozen=True)
class Shards:
    """The shards of a vocabulary that are here: `count` of them from `first` on."""

    V: int
    P: int
    first: int = 0
    count: int = SHARDS

    @property
    def width(self) -> int:
        """Columns of a shard."""
        return self.P // SHARDS

    @property
    def tiles(self) -> int:
        """Tiles of a shard; the last one may be narrower."""
        return -(-self.width // TILE)

    @property
    def splits(self) -> int:
        """Splits of all shards here."""
        return SPLITS_PER_SHARD * self.count

    @property
    def column(self) -> int:
        """The first column here, counted in the whole vocabulary."""
        return self.first * self.width

    @property
    def columns(self) -> int:
        """Columns here that are tokens: they come before the padding."""
        return min(max(self.V - self.column, 0), self.count * self.width)

    def bounds(self) -> list[tuple[int, int]]:
        """(first column, end) of every shard here, counted from the first column here, without padding."""
        cuts = [min(i * self.width, self.columns) for i in range(self.count + 1)]
        return list(pairwise(cuts))

    def split_bounds(self) -> list[tuple[int, int]]:
        """The same of every split."""
        made = []
        for shard, (start, end) in enumerate(self.bounds()):
            cuts = [k * self.tiles // SPLITS_PER_SHARD * TILE for k in range(SPLITS_PER_SHARD + 1)]
            cuts = [min(shard * self.width + cut, end) for cut in cuts]
            made += [(max(a, start), max(b, start)) for a, b in pairwise(cuts)]
        return made

    @property
    def has_empty_splits(self) -> bool:
        return any(first >= end for first, end in self.split_bounds())


def shards_of(args: dict[str, object], V: int) -> Shards:
    """The shards of a call, whose arguments `shard` and `shards` say which are here, if not all."""
    P = args["padded_vocab"]
    first, count = args.get("shard", 0), args.get("shards", SHARDS)
    assert isinstance(first, int) and isinstance(count, int)
    return Shards(V, P if isinstance(P, int) else padded(V), first, count)
