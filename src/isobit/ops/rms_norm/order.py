"""The numbers that order the sums of class rms/1. Kernels, the model and the proof read them here."""

#: Lanes of a row: lane j adds columns j, j + 1024, ... A thread of four warps reads 16 bytes of a 16-bit row
#: where neighbours share a thread, which is what 1024 lanes are for.
LOG_LANES = 10

#: Rows of a group in dweight, added one after another. Groups are added by a tree, so a program may take any
#: power of two of them. Fewer rows would leave more partial sums to write and to read again, more would leave
#: fewer programs where the batch is small.
GROUP = 16


def log_lanes(D: int) -> int:
    """Lanes of a row of D columns, as a power of two: no more than there are columns. Lanes without a column
    hold +0 and change no sum, so this is one order for all D."""
    return min(LOG_LANES, (D - 1).bit_length())
