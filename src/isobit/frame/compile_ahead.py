"""Compiles the kernels of calls that have not been made.

A decode loop meets a longer cache at every step, and at some lengths another kernel serves. Compiled only
there, it would stop a rollout for seconds. So the first call of such a loop compiles them all: the launcher
runs for the lengths to come, with tensors that have no memory (`isobit.frame.traced`), and what it launches
is compiled.
"""

from collections.abc import Callable, Sequence

from isobit.frame.backend import Args, Backend, UnsupportedError
from isobit.frame.caller import warn
from isobit.frame.launch import Recorder, prepare, stand_in
from isobit.frame.replay import traced_args
from isobit.frame.traced import Allocations, ShapeOf


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
                prepare(kernel, *map(stand_in, own), **options)
        except UnsupportedError:  # another backend serves that size, or none: its own call will say so
            return
        except Exception as error:  # it must not fail a call of this size, but nobody should miss it
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            warn(f"isobit: a kernel for longer calls could not be compiled ahead. {why}")
            return
