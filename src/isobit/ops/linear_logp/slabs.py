"""Which d-logits of `linear_logp`'s backward are in memory at a time, on Hopper.

All of [N, V] would be gigabytes. The backward computes them one *slab* of the vocabulary at a time, and uses
each slab for dH and dW before the next. Wide slabs are faster: the fp32 sums of dH are read and written once
per slab, and the last wave of tiles of a slab leaves SMs idle. So

- memory for them grows with the rows, 16 KB each, so that a slab is 8192 wide in a large batch too; but not
  beyond the size of the weight;
- as long as dW is not computed its memory is free, and the slab is stored there if that makes it wider: at
  N = 16384, D = 4096, V = 128256 the first slab is 25600 wide;
- if no sum runs over tokens (a frozen head) the rows are also divided into *blocks*. Each block goes through
  the whole vocabulary, with slabs that are wider by the number of blocks.

None of this changes a bit: slab widths are multiples of 512 (except the last), like the segments of dH.
"""

from functools import lru_cache
from typing import NamedTuple

from isobit.kernels.host.token_stream import SEGMENT

#: Bytes for a slab of gradients of logits in a kernel's backward, and for sums of splits in triton's forward,
#: unless the caller gives another limit.
SLAB_BYTES = 1 << 26

#: On Hopper a slab may have this many bytes per slot, if that is more than SLAB_BYTES.
SLAB_BYTES_PER_SLOT = 1 << 14

#: Maximum number of slots in a block. With 64 MB, taller blocks cause more traffic of dH's sums (once per
#: slab), lower ones more of the weight (once per block): 8 / width + 4 / slots bytes per product has its
#: minimum here.
BLOCK_SLOTS = 4096

#: The cost of a slab in addition to its products, mostly traffic of dH's sums, in columns of a slab.
_SLAB_COST_COLUMNS = 768


class Slab(NamedTuple):
    """Columns `first` to `end` of the vocabulary, and whether their d-logits are in dW's memory."""

    first: int
    end: int
    lent: bool

    @property
    def stride(self) -> int:
        """Row stride of its d-logits, in elements."""
        return -(-(self.end - self.first) // SEGMENT) * SEGMENT


def default_slab_bytes(slots: int, weight_bytes: int) -> int:
    """Default number of bytes for a slab of gradients of logits of this many slots."""
    return max(SLAB_BYTES, min(SLAB_BYTES_PER_SLOT * slots, weight_bytes))


def block_slots(slots: int) -> int:
    """Slots per block, except the last: as few blocks as possible, equally tall."""
    blocks = -(-slots // BLOCK_SLOTS)
    return -(-slots // (128 * blocks)) * 128


@lru_cache(maxsize=4096)  # the number of rows changes with the batch
def slabs(
    V: int, slots: int, D: int, slab_bytes: int, lent_rows: int, lent_width: int, sms: int
) -> tuple[Slab, ...]:
    """The slabs of a vocabulary for this many slots, each as wide as memory allows, and at least 512; or
    narrower by up to 15 * 512, if its tiles then fill the SMs better.

    `slab_bytes` are allocated for slabs. If dW is wanted, a slab may also use the part of dW behind its own
    rows: [lent_rows, lent_width], counted in d-logits, so D wide, or 2 D in fp32.
    """
    own = max(slab_bytes // (2 * slots) // SEGMENT, 1) * SEGMENT

    def cost(width: int) -> float:
        """Time until the slab is used up, per column, as the number of products that all SMs could do in
        it."""
        logits = -(-(slots // 128 * -(-width // 256)) // sms) * sms * 128 * 256 * D
        dweight = -(-(-(-width // 128) * -(-D // 128)) // sms) * sms * 128 * 128 * slots
        return (logits + dweight + slots * D * _SLAB_COST_COLUMNS) / width

    made, first = [], 0
    while first < V:
        lent = (lent_rows - first) * lent_width // (slots + lent_width) // SEGMENT * SEGMENT
        width, most = V - first, max(own, lent)
        if width > most:
            width = min(range(most, max(0, most - 16 * SEGMENT), -SEGMENT), key=cost)
        made.append(Slab(first, first + width, width > own))
        first += width
    return tuple(made)
