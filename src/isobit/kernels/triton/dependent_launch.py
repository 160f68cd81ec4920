"""Kernels that start before the kernel that they depend on is done: NVIDIA's programmatic dependent launch.

A launch costs about two microseconds more if it begins only when the one before it has ended. A kernel that
is launched with `launch_pdl` may begin as soon as all programs of the one before it have called
`start_next_launch` (or are done). Until it calls `wait_for_last_launch` it may read nothing that the kernels
before it in the chain write, and write nothing that they use.

Waiting covers one launch only. So in a chain of such kernels every program of each has to wait, even if it
reads nothing of the one before: what comes behind it relies on all of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from isobit.frame.device import launches_early


@triton.jit
def start_next_launch():
    """Let the next kernel start, if it was launched to start early. It starts when all programs of this one
    have come here or are done."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_last_launch():
    """Wait until the previous kernel is done and all its writes are visible."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def early_options(device: torch.device) -> dict[str, Any]:
    """Of a launch whose kernel has the constant EARLY, and waits if it is set."""
    return {"EARLY": True, "launch_pdl": True} if launches_early(device) else {"EARLY": False}
