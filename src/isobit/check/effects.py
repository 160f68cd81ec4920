"""Flags of a check that would have no effect are errors, before anything runs.

There is no list of which flags go together. A law declares which flags it reads, an op which gradients it
has; and whether `--data` changes inputs is tested by making small inputs without it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from isobit.check.candidate import Candidate
from isobit.check.laws import LAWS
from isobit.check.request import Request, candidates, cases_of, check_case, check_options, ops_of
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import arch_key
from isobit.frame.op import Op
from isobit.spec.compare import differing
from isobit.spec.proof import Args, Case, Proof
from isobit.spec.proofs import proof_of

#: Cases up to this product of sizes are used to test what changes inputs.
SMALL = 1 << 18

#: The cases of each op, backend and law.
Planned = Mapping[tuple[str, str, str], Sequence[Case]]


def check_effects(request: Request, given: Sequence[str] | None = None) -> None:
    """Raise ContractError for flags that would be ignored. `given` are those of `SETS` that were given; by
    default those that differ from their defaults."""
    ops = ops_of(request)
    check_options(ops, request)
    check_case(ops, request, request.laws or tuple(LAWS))
    laws = [law for law in request.laws or LAWS if not all(law in _lacks(op) for op in ops)]
    pairs = candidates(ops, request)
    planned = {
        (op.name, backend, law): cases_of(op, backend, law, request) for op, backend in pairs for law in laws
    }
    _check_names(request, ops, planned)
    _check_constant(request, planned)
    for flag in request.given() if given is None else given:
        readers = [law for law in laws if flag in LAWS[law].reads]
        why = _why_no_effect(flag, request, ops, readers) if readers else None
        if laws and not readers:
            known = ", ".join(law for law in LAWS if flag in LAWS[law].reads)
            plural = "s" if len(laws) > 1 else ""
            why = f"on the law{plural} {', '.join(laws)}: leave it out, or add a law that reads it: {known}"
        if why is not None:
            raise ContractError(f"{flag} has no effect {why}")


def _lacks(op: Op) -> Mapping[str, str]:
    return op.lacks if isinstance(op, Candidate) else {}


def _check_names(request: Request, ops: Sequence[Op], planned: Planned) -> None:
    """Raise ContractError for an op, a law or a backend that is named but would have no cell."""
    pairs = candidates(ops, request)
    for op in ops if request.ops else ():
        if not any(op.name == other.name for other, _ in pairs):
            known, asked = ", ".join(b.name for b in op.backends), ", ".join(request.backends)
            raise ContractError(f"--op {op.name}: has no backend {asked}; it has {known}")
    within = "" if request.case is None else f" [{request.case}]"
    for name in request.ops:
        if planned and not any(cases for (op, _, _), cases in planned.items() if op == name):
            raise ContractError(f"--op {name}: none of its cases was chosen{within}: leave it out")
    for law in request.laws:
        mine = [cases for (_, _, other), cases in planned.items() if other == law]
        if mine and not any(mine):
            raise ContractError(f"--law {law}: has no case{within}: leave it out, or choose another case")


def _check_constant(request: Request, planned: Planned) -> None:
    """A constant that a dtype cannot represent is not a valid input."""
    cases = (case for each in planned.values() for case in each if case.data == "constant")
    for dtype in dict.fromkeys(case.dtype for case in cases):
        most = torch.finfo(dtype).max
        if abs(request.inputs.constant) > most:
            value = f"--data constant={request.inputs.constant:g}"
            raise ContractError(f"{value}: {dtype_name(dtype)} holds {most:g} at most; choose with --dtype")


def _why_no_effect(flag: str, request: Request, ops: Sequence[Op], laws: Sequence[str]) -> str | None:
    """Why a flag that these laws read has no effect for these ops; None if it has one."""
    names = ", ".join(op.name for op in ops)
    if flag == "--data cotangents":
        if not any(op.differentiable for op in ops):
            return f"on {names}: {'it has' if len(ops) == 1 else 'they have'} no gradients"
    elif flag == "--tolerances":
        bounds = {
            (proof_of(op).op_class, direction, case.dtype)
            for op, backend in candidates(ops, request) for law in laws
            for case in cases_of(op, backend, law, request)
            for direction in LAWS[law].bounds
        }  # fmt: skip
        if not any(request.tolerances.has(*each, arch_key(request.device)) for each in bounds):
            classes = ", ".join(sorted({op_class for op_class, _, _ in bounds}))
            return f"on {names}: it has no figure of {classes} for the laws and dtypes that run"
    elif flag.startswith("--data") and not any(_changes_inputs(flag, request, op, laws) for op in ops):
        return f"on the inputs of {names}: they are the same without it (--data {request.data})"
    return None


def _changes_inputs(flag: str, request: Request, op: Op, laws: Sequence[str]) -> bool:
    """Whether a flag changes the inputs of an op, or their cotangents. Assumed to be true if there is no
    small case to test, and for the value that is the default."""
    other = request.without(flag)
    if other == request:
        return True
    drawn = op.differentiable and request.cotangents == "random"  # cotangents, with the seed of the inputs
    if flag == "--data seed" and drawn and any("--data cotangents" in LAWS[law].reads for law in laws):
        return True
    cases = {
        case.name: (proof_of(op).of(backend), case)
        for _, backend in candidates([op], request) for law in laws
        for case in cases_of(op, backend, law, request)
    }  # fmt: skip
    small = [
        (proof, case) for proof, case in cases.values()
        if not case.heavy and not case.gpu_gb and math.prod(case.dims.values()) <= SMALL
    ]  # fmt: skip

    def differs(proof: Proof, case: Case) -> bool:
        without = replace(case, data=other.data) if flag == "--data" else case
        one = proof.make(case, request.device, request.inputs)
        return _differ(one, proof.make(without, request.device, other.inputs))

    return not small or any(starmap(differs, small))


def _differ(one: Args, other: Args) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and a.dtype == b.dtype and not bool(differing(a, b).any())
        return isinstance(a, Tensor) == isinstance(b, Tensor) and (callable(a) or bool(a == b))

    return one.keys() != other.keys() or not all(same(value, other[name]) for name, value in one.items())
