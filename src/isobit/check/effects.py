"""Options of a check that would have no effect are errors, before anything runs.

There is no list of which options go together. A law declares which flags it reads, an op which gradients it
has; and whether a flag changes inputs is tested by making small inputs with another value.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.check.candidate import Candidate
from isobit.check.laws import LAWS
from isobit.check.request import (
    BEHIND,
    Request,
    behind,
    candidates,
    cases_of,
    changed,
    check_case,
    check_options,
    ops_of,
)
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import arch_key
from isobit.frame.op import Op
from isobit.spec.compare import differing
from isobit.spec.proof import Args, Case
from isobit.spec.proofs import proof_of

#: Cases up to this product of sizes are used to test what changes inputs.
SMALL = 1 << 18


def check_effects(request: Request, given: Mapping[str, str] | None = None) -> None:
    """Raise ContractError for options that would be ignored. `given` are the flags that were given, as they
    were written: `--vocab` stands for `--dim`."""
    given = request.given() if given is None else given
    ops = ops_of(request)
    check_options(ops, request)
    check_case(ops, request, request.laws or tuple(LAWS))
    laws = [law for law in request.laws or LAWS if not all(law in _lacks(op) for op in ops)]
    planned = {(op.name, law): cases_of(op, law, request) for op in ops for law in laws}
    _all_named_have_cases(request, ops, planned)
    _held_by_dtypes(request, [case for cases in planned.values() for case in cases])
    for flag, said in ((flag, said) for flag, said in given.items() if flag in BEHIND):
        reading = [law for law in laws if flag in LAWS[law].reads]
        if laws and not reading:
            _refuse(said, f"on {_laws(laws)}", f"leave it out, or add a law that reads it: {_readers(flag)}")
        why = _why_no_effect(flag, request, ops, reading)
        if why is not None:
            _refuse(said, *why)


def _refuse(said: str, where: str, then: str) -> None:
    raise ContractError(f"{said} has no effect {where}: {then}")


def _lacks(op: Op) -> Mapping[str, str]:
    return op.lacks if isinstance(op, Candidate) else {}


def _laws(names: Sequence[str]) -> str:
    return f"the law{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _readers(flag: str) -> str:
    return ", ".join(law for law in LAWS if flag in LAWS[law].reads)


def _all_named_have_cases(
    request: Request, ops: Sequence[Op], planned: Mapping[tuple[str, str], Sequence[Case]]
) -> None:
    """Raises an error for an op, a law or a backend that is named but would have no cell."""
    pairs = candidates(ops, request)
    for op in ops if request.ops else ():
        if not any(op.name == other.name for other, _ in pairs):
            known = ", ".join(b.name for b in op.backends)
            asked = ", ".join(request.backends)
            raise ContractError(f"--op {op.name}: has no backend {asked}; it has {known}")
    within = "" if request.case is None else f" [{request.case}]"
    for name in request.ops:
        if planned and not any(cases for (op, _), cases in planned.items() if op == name):
            raise ContractError(f"--op {name}: none of its cases was chosen{within}: leave it out")
    for law in request.laws:
        mine = [cases for (_, other), cases in planned.items() if other == law]
        if mine and not any(mine):
            raise ContractError(f"--law {law}: has no case{within}: leave it out, or choose another case")


def _held_by_dtypes(request: Request, cases: Sequence[Case]) -> None:
    """A constant that a dtype cannot represent is not a valid input."""
    for dtype in dict.fromkeys(case.dtype for case in cases if case.data == "constant"):
        most = torch.finfo(dtype).max
        if abs(request.inputs.constant) > most:
            value = f"--constant-value {request.inputs.constant:g}"
            raise ContractError(f"{value}: {dtype_name(dtype)} holds {most:g} at most; choose with --dtype")


def _why_no_effect(
    flag: str, request: Request, ops: Sequence[Op], laws: Sequence[str]
) -> tuple[str, str] | None:
    """(where, what to do) if a flag that these laws read has no effect for these ops."""
    names = ", ".join(op.name for op in ops)
    if flag in ("--no-gradient", "--grad-mode", "--grad-seed"):
        if not any(op.differentiable for op in ops):
            return f"on {names}", "it has no gradients" if len(ops) == 1 else "they have no gradients"
        switched_off = all("--no-gradient" in LAWS[law].reads for law in laws) and not request.gradient
        if switched_off and flag != "--no-gradient":
            return "with --no-gradient", "leave one of them out"
    elif flag in _OTHERS and not any(_changes_inputs(flag, request, op, laws) for op in ops):
        if flag == "--constant-value" and request.data != "constant":
            return f"in --input-mode {request.data}", "give --input-mode constant with it"
        return f"on the inputs of {names}", f"they are the same without it (--input-mode {request.data})"
    elif flag in ("--tolerances", "--arch-key"):
        arch, held = request.arch or arch_key(request.device), list(_bounds(request, ops, laws))
        classes = ", ".join(dict.fromkeys(op_class for op_class, _, _ in held))
        if flag == "--tolerances" and not any(request.tolerances.has(*each, arch) for each in held):
            return f"on {names}", f"it has no figure of {classes} for the laws and dtypes that run"
        if flag == "--arch-key" and not any(request.tolerances.has_on(arch, *each) for each in held):
            return f"on {names}", f"no figure of {classes} differs on {arch}; --tolerances FILE can give one"
    return None


def _bounds(
    request: Request, ops: Sequence[Op], laws: Sequence[str]
) -> Iterator[tuple[str, str, torch.dtype]]:
    """Class, direction and dtype of every figure that is looked up."""
    for op in ops:
        for law in laws:
            for case in cases_of(op, law, request):
                for direction in LAWS[law].bounds:
                    yield proof_of(op).op_class, direction, case.dtype


#: Another value of an input flag, made from the given one; the same if there is no other.
_OTHERS: dict[str, Any] = {
    "--input-mode": lambda data: "edge",
    "--seed": lambda seed: seed ^ 1,
    "--constant-value": lambda value: 0.5 if value != 0.5 else 0.25,
    "--token-value": lambda token: token + 1,
}


def _changes_inputs(flag: str, request: Request, op: Op, laws: Sequence[str]) -> bool:
    """Whether another value of this flag changes the inputs of an op. Assumed to be true if there is no small
    case to test."""
    value = behind(request, flag)
    other = changed(request, flag, _OTHERS[flag](value))
    if behind(other, flag) == value:
        return True
    cases = {case.name: case for law in laws for case in cases_of(op, law, request)}
    small = [c for c in cases.values()
             if not c.heavy and not c.gpu_gb and math.prod(c.dims.values()) <= SMALL]  # fmt: skip
    proof, device = proof_of(op), request.device

    def beside(case: Case) -> Args:
        case = replace(case, data=other.data) if flag == "--input-mode" else case
        return proof.make(case, device, other.inputs)

    return not small or any(_differ(proof.make(c, device, request.inputs), beside(c)) for c in small)


def _differ(one: Args, other: Args) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and a.dtype == b.dtype and not bool(differing(a, b).any())
        return isinstance(a, Tensor) == isinstance(b, Tensor) and (callable(a) or bool(a == b))

    return one.keys() != other.keys() or not all(same(value, other[name]) for name, value in one.items())
