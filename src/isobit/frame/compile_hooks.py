"""Kernels with layouts, and the hooks that Triton calls when it compiles.

A process may set `triton.knobs.runtime.jit_post_compile_hook`; vLLM's monitor of compilations does. Triton
then writes the kernel's constants as JSON. Layouts are constants of Gluon kernels, JSON cannot hold them, and
the launch fails although the kernel is compiled. So hooks get the text of a layout instead of the layout.
"""

import inspect
from collections.abc import Callable
from typing import Any

_GLUON = "triton.experimental.gluon"


def _as_text(constants: dict[Any, Any]) -> dict[Any, Any]:
    """Constants of a kernel, with layouts as text."""
    return {
        place: repr(value) if type(value).__module__.startswith(_GLUON) else value
        for place, value in constants.items()
    }


def let_hooks_read_layouts(kernel: Any) -> None:
    """For one kernel, and for all of its launches. Does nothing if this version of Triton describes kernels
    by another function."""
    theirs: Callable[..., Any] | None = getattr(kernel, "_call_hook", None)
    if theirs is None or "constants" not in inspect.signature(theirs).parameters:
        return
    signature = inspect.signature(theirs)

    def call_hook(hook: Any, *args: Any, **more: Any) -> Any:
        if not hook:
            return None
        given = signature.bind(hook, *args, **more).arguments
        return theirs(**given | {"constants": _as_text(given["constants"])})

    kernel._call_hook = call_hook
