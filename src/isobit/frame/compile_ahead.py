"""Compiles the kernels of calls that have not been made.

A decode loop meets a longer cache at every step, and at some lengths another kernel serves. Compiled only
there, it would stop a rollout for seconds. So the first call of such a loop compiles them all: the launcher
runs for the lengths to come, with tensors that have no memory (`isobit.frame.traced`), and what it launches
is compiled.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isobit.frame.backend import Args, Backend, UnsupportedError
from isobit.frame.caller import warn
from isobit.frame.launch import Recorder, prepare
from isobit.frame.replay import traced_args
from isobit.frame.traced import Allocations, ShapeOf, Traced


def compile_ahead(
    serves: Callable[[Args], Backend], args: Args, sizes: Sequence[tuple[int, ...]], shape_of: ShapeOf
) -> None:
    """For calls with these arguments, but of other sizes. `serves(args)` is the backend of such a call."""
    for size in sizes:
        given, inputs = traced_args(args, size, shape_of)
        recorder = Recorder()
        try:
            backend = serves(given)
            with Allocations(inputs[0].made):
                backend.run(**given, launch=recorder)
            for kernel, own, options in recorder.launches:
                prepare(kernel, *map(_real, own), **options)
        except UnsupportedError:  # another backend serves that size, or none: its own call will say so
            return
        except Exception as error:  # it must not fail a call of this size, but nobody should miss it
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            warn(f"isobit: a kernel for longer calls could not be compiled ahead. {why}")
            return


def _real(value: Any) -> Any:
    """In place of a tensor without memory, one that a kernel is compiled for in the same way: of its dtype,
    and as far from a multiple of 16 bytes. Nothing reads it."""
    if isinstance(value, Traced):
        shift = value.data_ptr() % 16
        memory = torch.empty(64, dtype=torch.uint8, device=value.device)
        return memory[shift : shift + 16].view(value.dtype)
    if isinstance(getattr(value, "base", None), Traced):
        made = copy.copy(value)
        made.base = _real(value.base)
        return made
    return value
