"""The proofs of all ops, loaded from their folders when a check or a bench first needs them.

A folder of `isobit.ops` has a module `proof` with a list `PROOFS`. There is no other list of them.
"""

import pkgutil
from functools import cache
from importlib import import_module

from isobit.frame.op import Op
from isobit.spec.proof import Proof


@cache
def proofs() -> dict[str, Proof]:
    """Proofs by the name of their op."""
    package, result = import_module("isobit.ops"), dict[str, Proof]()
    for folder in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        for proof in import_module(f"{package.__name__}.{folder}.proof").PROOFS:
            result[proof.op.name] = proof
    return result


def is_candidate(op: Op) -> bool:
    """Whether this is somebody else's implementation of an op. It brings the proof of what it supports."""
    return getattr(op, "proof", None) is not None


def proof_of(op: Op) -> Proof:
    own: Proof | None = getattr(op, "proof", None)
    return proofs()[op.name] if own is None else own
