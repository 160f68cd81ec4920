"""The program of a worker process: it runs the requests it is sent. `workers` starts it, and reads cells."""

import gc
import json
import os
from collections.abc import Callable

import torch

from isobit.check import process
from isobit.check.compiled_once import compile_each_kernel_once
from isobit.check.gpu_memory import Full
from isobit.check.request import Request
from isobit.check.runner import Stuck, run
from isobit.check.workers import FULL, STUCK

#: Bytes of tensors that may outlive their cell.
LEFT_BEHIND = 1 << 28


def answer(request: Request, say: Callable[[str], None]) -> None:
    """Run one request, and say each cell as soon as it is done."""
    try:
        run(request, lambda cell: say(json.dumps(vars(cell))), part=True)
    except Stuck:
        os._exit(STUCK)
    except Full:
        os._exit(FULL)
    if torch.cuda.is_initialized():
        if torch.cuda.memory_allocated() > LEFT_BEHIND:
            gc.collect()  # frames of an error that was raised form cycles, and hold its tensors
        torch.cuda.empty_cache()  # memory that it caches is not available to the others


if __name__ == "__main__":
    compile_each_kernel_once()
    process.serve(answer)
