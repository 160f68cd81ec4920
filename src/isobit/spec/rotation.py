"""How many copies of its inputs a call needs so that each call finds a cold L2 cache."""

import math

import torch

#: The rotation of inputs exceeds the L2 cache this many times, unless that needs more copies than this.
L2_TIMES, MAX_COPIES = 4, 256


def copies_for(nbytes: int, device: torch.device) -> int:
    """Number of copies of inputs of this size for a cold L2 cache."""
    if device.type != "cuda":
        return 1
    wanted = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, math.ceil(wanted / max(1, nbytes)))
