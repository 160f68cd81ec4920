"""The CUDA context of a thread.

A context is current in a thread only after the thread has called CUDA's runtime. A thread that begins with a
kernel of ours may have none: autograd's thread if it was started before the GPU was used, or a thread of the
caller's. Loading and launching a kernel do without, because Triton then sets one; encoding a tensor map of a
kernel that is loaded fails with "invalid device context".
"""

import ctypes
import threading
from functools import cache
from typing import Any

import torch


class _Thread(threading.local):
    attached = False


_thread = _Thread()


def attach() -> None:
    """Make the primary context of PyTorch's current device current in this thread, if it has none."""
    if _thread.attached:
        return
    if torch.cuda.is_initialized() and not torch.version.hip:
        cuda, context = _driver(), ctypes.c_void_p()
        _succeeds(cuda.cuCtxGetCurrent(ctypes.byref(context)))
        if not context:
            device = ctypes.c_int()
            _succeeds(cuda.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()))
            _succeeds(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
            _succeeds(cuda.cuCtxSetCurrent(context))
    _thread.attached = True


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _succeeds(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver gave this thread no context: error {status}")
