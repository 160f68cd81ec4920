"""What decides the bits: the numerics classes by name, and the arithmetic of matrix products on the CPU."""

from isobit.numerics.classes import (
    CHAIN16,
    LSE_TRITON_1,
    NO_CLASS,
    NUMERICS,
    SEG16_512,
    Numerics,
    known_numerics,
)
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
