"""A GPU whose memory is used up: in most cases by other processes, about which a stack trace says nothing."""

import torch

from isobit.frame.contract import ContractError


class Full(ContractError):
    """There is no memory for the first tensor: nothing can be checked there now."""


def is_full(error: BaseException) -> bool:
    """Whether this is CUDA's error for it, or PyTorch's, which has another type."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def in_words(device: torch.device) -> str:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # which needs some memory itself
        left = "nothing is free"
    else:
        left = f"{free / 1e9:.1f} of {total / 1e9:.0f} GB are free"
    return f"{device} is out of memory: {left}. If another process holds the rest, run it again without that"
