"""The proofs of all ops, loaded from their folders when a check or a bench first needs them.

A folder of `isobit.ops` has a module `proof` with a list `PROOFS`. There is no other list of them.
"""

import pkgutil
from functools import cache
from importlib import import_module

from isobit.check.candidate import Candidate
from isobit.check.proof import Proof
from isobit.op import Op


@cache
def proofs() -> dict[str, Proof]:
    """Proofs by the name of their op."""
    package, found = import_module("isobit.ops"), dict[str, Proof]()
    for folder in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        for proof in import_module(f"{package.__name__}.{folder}.proof").PROOFS:
            found[proof.op.name] = proof
    return found


def proof_of(op: Op) -> Proof:
    if isinstance(op, Candidate):  # judged by what it supports
        assert op.proof is not None
        return op.proof
    return proofs()[op.name]
