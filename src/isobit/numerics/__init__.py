"""Numerics classes by name, and the arithmetic of matrix products on the CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from isobit.frame.numerics_class import NUMERICS, Numerics, known_numerics
from isobit.numerics.classes import CHAIN16, LEAVES, LSE_TRITON_1, NO_CLASS, SEG16_512, TREE8

if TYPE_CHECKING:
    from isobit.numerics.mma import HOPPER, Step, canonical, chain, cut, segments, step

__all__ = [
    "CHAIN16",
    "HOPPER",
    "LEAVES",
    "LSE_TRITON_1",
    "NO_CLASS",
    "NUMERICS",
    "SEG16_512",
    "TREE8",
    "Numerics",
    "Step",
    "canonical",
    "chain",
    "cut",
    "known_numerics",
    "segments",
    "step",
    "tree",
]


def __getattr__(name: str) -> Any:
    """The arithmetic is loaded at its first use: most importers of isobit never need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "tree":
        return import_module("isobit.numerics.trees").tree
    return getattr(import_module("isobit.numerics.mma"), name)
