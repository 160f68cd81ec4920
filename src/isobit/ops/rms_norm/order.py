"""Constants that determine the order of sums of class rms/1, for kernels, the model and the proof."""

#: log2 of the lanes of a row: lane j adds columns j, j + 1024, ... With 1024 lanes a thread of four warps has
#: 8 neighbouring lanes, and so loads 16 bytes of a 16-bit row at once.
LOG_LANES = 10

#: Rows per group in dweight, added one after another. Groups are added by a tree, so a program may take any
#: power of two of them. Smaller groups would mean more partial sums to write and read again, larger ones
#: fewer programs for a small batch.
GROUP = 16


def log_lanes(D: int) -> int:
    """log2 of the lanes of a row of D columns, no more than there are columns. Lanes without a column hold +0
    and change no sum, so the order is the same for all D."""
    return min(LOG_LANES, (D - 1).bit_length())
