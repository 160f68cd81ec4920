"""isobit inside other libraries: one module per library, and nothing happens until its `enable()` is called.

A module is imported when it is first used, and imports none of the libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobit.integrations import fla, hf, trl, verl, vllm

__all__ = ["fla", "hf", "trl", "verl", "vllm"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
