"""Which d-logits of `linear_logp`'s backward are alive at a time, on Hopper.

All of [N, V] would be gigabytes. The backward makes them a *slab* of the vocabulary at a time, and uses each
slab up, for dH and dW, before the next. Wide slabs are better: dH's fp32 sums are read and written once a
slab, and its last wave of tiles leaves SMs idle. So

- memory for them grows with the rows, 16 KB each, so that a slab is 8192 wide in a large batch too; but not
  beyond what the weight takes;
- as long as dW is not computed its memory is free, and the slab lies there if that makes it wider: at
  N = 16384, D = 4096, V = 128256 the first slab is 25600 wide;
- where no sum runs over tokens (a frozen head) the rows are cut into *blocks* too, and each block walks the
  whole vocabulary with slabs as many times wider.

None of it changes a bit: a slab is a multiple of 512 wide (but for the last), as the segments of dH are.
"""

from functools import lru_cache
from typing import NamedTuple

from isobit.blocks.stream import SEGMENT

#: Bytes for gradients of logits in a kernel's backward, and for sums of splits in triton's forward, unless
#: the caller says otherwise. On Hopper they are more for many rows, so many for each.
WORKSPACE_BYTES = 1 << 26
ROW_BYTES = 1 << 14

#: Slots of a block, at most. Of 64 MB, taller blocks would mean more traffic of dH's sums (once a slab),
#: lower ones more of the weight (once a block): 8 / width + 4 / slots bytes a product are least here.
BLOCK_SLOTS = 4096

#: What a slab costs beside its products, in columns' worth of them: the traffic of dH's sums.
_COLUMNS_A_SLAB = 768


class Slab(NamedTuple):
    """Columns `first` to `end` of the vocabulary, and whether their d-logits lie in dW's memory."""

    first: int
    end: int
    lent: bool

    @property
    def stride(self) -> int:
        """Elements from one row of its d-logits to the next."""
        return -(-(self.end - self.first) // SEGMENT) * SEGMENT


def default_room(slots: int, weight_bytes: int) -> int:
    """Bytes for gradients of logits of so many slots, where the caller says nothing."""
    return max(WORKSPACE_BYTES, min(ROW_BYTES * slots, weight_bytes))


def block_slots(slots: int) -> int:
    """Slots of each block, but for the last: as few blocks as can be, equally tall."""
    blocks = -(-slots // BLOCK_SLOTS)
    return -(-slots // (128 * blocks)) * 128


@lru_cache(maxsize=4096)  # the number of rows is whatever the batch was
def slabs(
    V: int, slots: int, D: int, room: int, lent_rows: int, lent_width: int, sms: int
) -> tuple[Slab, ...]:
    """The slabs of a vocabulary for so many slots, each as wide as memory allows, and at least 512; or less
    wide by up to 15 * 512, where its tiles then fill the SMs better.

    `room` bytes are ours. dW, if it is wanted, lends what lies behind a slab's own rows of it: it is
    [lent_rows, lent_width] in d-logits' worth of memory, D of them wide, or 2 D in fp32.
    """
    own = max(room // (2 * slots) // SEGMENT, 1) * SEGMENT

    def cost(width: int) -> float:
        """Products that the SMs could have done until the slab is used up, a column of it."""
        logits = -(-(slots // 128 * -(-width // 256)) // sms) * sms * 128 * 256 * D
        dweight = -(-(-(-width // 128) * -(-D // 128)) // sms) * sms * 128 * 128 * slots
        return (logits + dweight + slots * D * _COLUMNS_A_SLAB) / width

    made, first = [], 0
    while first < V:
        lent = (lent_rows - first) * lent_width // (slots + lent_width) // SEGMENT * SEGMENT
        width, most = V - first, max(own, lent)
        if width > most:
            width = min(range(most, max(0, most - 16 * SEGMENT), -SEGMENT), key=cost)
        made.append(Slab(first, first + width, width > own))
        first += width
    return tuple(made)
