"""Programmatic dependent launch (NVIDIA): a kernel starts before the kernel that it depends on is done.

A launch costs about two microseconds more if it begins only when the previous one has ended. A kernel that is
launched with `launch_pdl` may begin as soon as all programs of the previous kernel have called
`start_next_launch` or are done. Until it calls `wait_for_last_launch` it must not read what earlier kernels
of the chain write, nor write what they use.

A wait covers the previous launch only. So in a chain of such kernels every program of each kernel has to
wait, even one that reads nothing of the previous kernel: later kernels rely on it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from isobit.frame.device import launches_early


@triton.jit
def start_next_launch():
    """Let the next kernel start, if it was launched with `launch_pdl`. It starts when all programs of this
    kernel have called this or are done."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_last_launch():
    """Wait until the previous kernel is done and all its writes are visible."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def dependent_launch_options(device: torch.device) -> dict[str, Any]:
    """Launch options for programmatic dependent launch; the kernel must call `wait_for_last_launch` if
    EARLY."""
    return {"EARLY": True, "launch_pdl": True} if launches_early(device) else {"EARLY": False}
