"""Proofs of `swiglu` and of `swiglu_packed`, one file each."""

from isobit.ops.swiglu.proof.packed import PACKED
from isobit.ops.swiglu.proof.plain import PLAIN

PROOFS = [PLAIN, PACKED]
