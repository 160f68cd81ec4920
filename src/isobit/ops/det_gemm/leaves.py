"""When k can be cut into the eight leaves of class tree8."""

from torch import Tensor

from isobit.numerics import LEAVES, TREE8


def why_not_leaves(a: Tensor, leaves: int = LEAVES) -> str | None:
    """Why k, the last dimension of a, cannot be cut into so many of the eight leaves."""
    if a.shape[-1] % leaves == 0:
        return None
    return f"class {TREE8} cuts k into {leaves} equal leaves, and {a.shape[-1]} is not a multiple of {leaves}"
