"""What decides the bits: the numerics classes by name, and the arithmetic of matrix products on the CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isobit.numerics.classes import (
    CHAIN16,
    LSE_TRITON_1,
    NO_CLASS,
    NUMERICS,
    SEG16_512,
    Numerics,
    known_numerics,
)

if TYPE_CHECKING:
    from isobit.numerics.mma import HOPPER, Step, canonical, chain, cut, segments, step

__all__ = [
    "CHAIN16",
    "HOPPER",
    "LSE_TRITON_1",
    "NO_CLASS",
    "NUMERICS",
    "SEG16_512",
    "Numerics",
    "Step",
    "canonical",
    "chain",
    "cut",
    "known_numerics",
    "segments",
    "step",
]


def __getattr__(name: str) -> Any:
    """The arithmetic is loaded when it is first asked for: most who import isobit never do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("isobit.numerics.mma"), name)
