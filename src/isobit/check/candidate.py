"""A user's function in place of an op: which arguments it takes, what it returns, and how it is called.

A candidate is called by keyword, with the names of the op's contract. Its signature determines which
arguments it takes; a call that needs another one is UNSUPPORTED, with that reason. One small call shows which
outputs it returns, and whether they have a gradient. It is judged by the op's own proof, restricted to what
it supports. Nothing of isobit computes in its place: it has no backend, no backward, and a numerics class of
its own.
"""

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit.check.torch_state import in_words, preserved
from isobit.frame.backend import Backend, UnsupportedError
from isobit.frame.composed import Composed
from isobit.frame.contract import MISSING, ContractError, Param, dtype_name
from isobit.frame.op import CONTROLS, Op
from isobit.spec.proof import Args, Case, InputOptions, Proof

Function = Callable[..., Any]

#: The numerics class of every candidate: its bits are compared only with its own.
OWN_CLASS = "candidate"

_IGNORED = "it does not take ignore_index, and some rows here are ignored"

_CONTROLS = {p.name for p in CONTROLS}


class BadOutputs(ContractError):
    """What a candidate returned cannot be outputs of the op."""


@dataclass(eq=False)
class Candidate(Op):
    """An op as implemented by a candidate. It is not among the public ops, and is not a `torch.library`
    op."""

    proof: Proof | None = None
    #: Laws that cannot apply to it, with the reason.
    lacks: dict[str, str] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    #: Flags of the command line that select it; None for a function that cannot be imported by name.
    flags: str | None = None
    #: The user's functions behind it, to find the line that raised an exception.
    written: tuple[Function, ...] = ()
    whole: Op | None = None  # the op that it implements
    served: tuple[int, ...] = ()
    output_dtype: torch.dtype | None = None
    #: What importing it, and what the small calls before all others, changed of PyTorch's state.
    imported: list[str] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    _refused: dict[str, list[str]] = field(default_factory=dict)
    _simplified: dict[tuple[str, bool], Case] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forget()

    def __call__(self, **given: Any) -> Any:
        raise TypeError(f"a candidate for {self.name} is called through its function")

    def fake(self, **given: Any) -> tuple[Tensor, ...]:
        """The outputs that it supports, in its declared output dtype."""
        assert self.whole is not None
        result = self.whole.fake(**given)
        return tuple(_recast(result[i], self.output_dtype) for i in self.served)

    def refusal(self, args: Args) -> str | None:
        """Why it cannot be called with these arguments, or None. Reads token ids, since rows may be ignored
        by them."""
        lacks = self._lacking(args)
        if lacks == [_IGNORED]:
            return _IGNORED
        return f"it does not take {', '.join(lacks)}" if lacks else None

    def _lacking(self, args: Args) -> list[str]:
        """The arguments of a call that it does not take, or one sentence for another reason."""
        assert self.proof is not None
        needless = {*self.takes, *self.proof.hints}
        others = [p for p in _own(self.contract.params) if p.name in args and p.name not in needless]
        lacks = [p.name for p in others if not _is_default(p, args[p.name])]
        if not lacks and "ignore_index" in self.contract.names and "ignore_index" not in self.takes:
            ignored = args.get("token_ids") == args.get("ignore_index", -100)
            if isinstance(ignored, Tensor) and bool(ignored.any()):
                return [_IGNORED]
        return lacks

    def given_none(self, args: Args) -> str:
        """`ref_logits=None`: arguments without a default that are None in this call."""
        required = (p.name for p in self.contract.params if p.default is MISSING)
        return ", ".join(f"{name}=None" for name in required if name in args and args[name] is None)

    def supported_cases(self, cases: Sequence[Case], of_bits: bool = False) -> list[Case]:
        """The cases on which a law runs: all of them, and those that it does not support also without the
        options that it does not take. Otherwise sizes and values that only occur with such an option would
        not be tested. A law of bits keeps the options without which a case promises none."""
        light = [c for c in cases if not c.heavy and not c.gpu_gb and min(c.dims.values(), default=0) > 0]
        light = [c for c in light if c.dtype != torch.float64]  # which only the reference serves
        simpler = [self._simpler(case, of_bits) for case in light if self._lacks_of(case)]
        plain = {case.name: case for case in simpler if not self._lacks_of(case)}
        return list({case.name: case for case in (*cases, *plain.values())}.values())

    def _lacks_of(self, case: Case) -> list[str]:
        assert self.proof is not None
        if case.name not in self._refused:
            made = self.proof.make(case, torch.device("cpu"), InputOptions())
            self._refused[case.name] = self._lacking(made)
        return self._refused[case.name]

    def _is_call(self, case: Case) -> bool:
        """Whether a case that is not declared is a valid call of the op."""
        assert self.proof is not None and self.whole is not None
        if case.name in self._refused:
            return True
        try:
            made = self.proof.make(case, torch.device("cpu"), InputOptions())
            self.whole.explain(**made)
        except (ContractError, IndexError, ValueError, RuntimeError):  # options of other sizes
            return False
        self._refused[case.name] = self._lacking(made)  # making it again may take seconds
        return True

    def _simpler(self, case: Case, of_bits: bool) -> Case:
        """The case with fewer options, or with other declared ones, as long as fewer of its arguments are
        unsupported."""
        if (case.name, of_bits) not in self._simplified:
            self._simplified[case.name, of_bits] = self._simplify(case, of_bits)
        return self._simplified[case.name, of_bits]

    def _simplify(self, case: Case, of_bits: bool) -> Case:
        assert self.proof is not None
        fixed = {name for name in self.proof.essential if of_bits and name in case.options}
        # Of options that heavy cases alone have, inputs take long to make: only where no other way is left.
        light, heavy = (
            {(k, str(v)): v for c in self.proof.cases if c.heavy is kind for k, v in c.options.items()}
            for kind in (False, True)
        )
        while left := self._lacks_of(case):
            options = case.options
            fewer = list[Case]()
            for declared in (light, {key: value for key, value in heavy.items() if key not in light}):
                if fewer:
                    break
                ways = [
                    {k: v for k, v in options.items() if k != name} for name in options if name not in fixed
                ]
                ways += [
                    options | {name: value} for (name, _), value in declared.items() if name not in fixed
                ]
                others = [other for way in ways if self._is_call(other := replace(case, options=way))]
                fewer = [other for other in others if len(self._lacks_of(other)) < len(left)]
            if not fewer:
                break
            case = min(fewer, key=lambda other: len(self._lacks_of(other)))
        return case

    def small(self) -> Case | None:
        """The first case that it supports, used to find out what it returns."""
        assert self.proof is not None

        def first(cases: Sequence[Case]) -> Case | None:
            light = (c for c in cases if not c.heavy and not c.gpu_gb and min(c.dims.values(), default=0) > 1)
            return next((case for case in light if not self._lacks_of(case)), None)

        return first(self.proof.cases) or first(self.supported_cases(self.proof.cases))

    def first_changes(self) -> list[str]:
        """What its first calls changed of PyTorch's state, and perhaps only they: reported once."""
        result, self.probed = self.probed, []
        return result

    @property
    def summary(self) -> dict[str, Any]:
        """Which part of the op it supports, for the report."""
        assert self.whole is not None and self.proof is not None
        return {
            "takes": list(self.takes),
            "outputs": list(self.proof.outputs),
            "gradients": list(self.differentiable),
            "output_dtype": None if self.output_dtype is None else dtype_name(self.output_dtype),
            **({"import_changed": list(self.imported)} if self.imported else {}),
        }

    @property
    def in_words(self) -> str:
        summary = self.summary
        text = f"takes {', '.join(summary['takes'])}; judged by {', '.join(summary['outputs'])}"
        assert self.whole is not None
        forward_only = self.whole.differentiable and not summary["gradients"]
        text += "; forward only" if forward_only else ""
        return text + (f"; importing it {in_words(self.imported)}, set back here" if self.imported else "")


def candidate_of(
    op: Op,
    proof: Proof,
    function: Any,
    device: torch.device,
    *,
    name: str,
    flags: str | None = None,
    adapter: Function | None = None,
    output_dtype: torch.dtype | None = None,
) -> Candidate:
    """The candidate for an op from a function. A small call on the device shows what it returns."""
    made = inspect.isclass(function) and adapter is not None  # by the adapter
    given = function if made else _callable(function, name)
    called = given if adapter is None else _adapted(adapter, given, name)
    takes = _taken(called, op, name)
    expected = _expected(op, proof, takes)
    backend = Backend(name, called, OWN_CLASS, lambda args: None, False, lambda args: None)
    result = Candidate(
        copy.copy(op.contract), op.package, op.sizes, op.flops, [backend], list(op.rules),
        list(op.value_rules), takes=takes, flags=flags, written=(given, called), whole=op, proof=proof,
        output_dtype=output_dtype,
    )  # fmt: skip
    case = result.small()
    small = proof.make(case, device, InputOptions()) if case is not None else None
    with preserved() as result.probed:
        result.served, result.differentiable = _probe(called, op, takes, expected, small, len(proof.outputs))
    result.contract.outputs = [op.contract.outputs[i] for i in result.served]
    result.function = _public(called, op, takes, expected, result.served)
    result.proof = _cut(proof, result)
    result.lacks = _lacks(proof, result)
    return result


def _callable(thing: Any, name: str) -> Function:
    """What to call: the thing itself, or its `forward` if that is all it has."""
    if inspect.isclass(thing):
        example = f"a function of it, for example {name}.apply"
        if issubclass(thing, torch.nn.Module):
            example = "an object of it, or the class with an --adapter that makes one"
        raise ContractError(f"{name} is a class: name {example}")
    result = thing if callable(thing) else getattr(thing, "forward", None)
    if not callable(result):
        raise ContractError(f"{name} is {type(thing).__name__}: it is not callable and has no forward")
    return result


def _adapted(adapter: Function, given: Function, name: str) -> Function:
    try:
        made = adapter(given)
    except (Exception, SystemExit) as error:  # it is the caller's own code
        raise ContractError(f"the adapter of {name} raised {type(error).__name__}: {error}") from error
    return _callable(made, f"what the adapter made of {name}")


# What it takes


def _own(params: Sequence[Param]) -> list[Param]:
    """The arguments of an op, without the controls that every op has."""
    return [p for p in params if p.name not in _CONTROLS]


def _is_default(p: Param, value: Any) -> bool:
    return value is p.default or (not isinstance(value, Tensor) and bool(value == p.default))


def _taken(function: Function, op: Op, name: str) -> tuple[str, ...]:
    """Arguments of the contract that the signature of the function names. `**kwargs` names none."""
    params = _own(op.contract.params)
    signature = _signature(function)
    if signature is None:
        raise ContractError(f"{name} has no signature to read: give an --adapter with named arguments")
    named = {p.name: p for p in signature.parameters.values()
             if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}  # fmt: skip
    only = [p.name for p in signature.parameters.values()
            if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]  # fmt: skip
    missing = [p.name for p in params if p.default is MISSING and p.name not in named]
    more = [n for n, p in named.items() if p.default is p.empty and n not in {p.name for p in params}] + only
    if missing or more:
        rules = [f"does not take {', '.join(missing)} by name"] if missing else []
        rules += [f"requires {', '.join(more)}, which {op.name} does not have"] if more else []
        raise ContractError(f"{name}{signature} {' and '.join(rules)}: give an --adapter that maps the names")
    return tuple(p.name for p in params if p.name in named)


def _signature(function: Function) -> inspect.Signature | None:
    """The signature of the function itself, not of what it wraps; unless it only passes on *args and
    **kwargs, as decorators, an `nn.Module` and an op of `torch.library.custom_op` do."""
    try:
        result = inspect.signature(function, follow_wrapped=False)
        anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        if {p.kind for p in result.parameters.values()} <= anything:
            inner = getattr(function, "__wrapped__", None)
            if isinstance(function, torch.nn.Module):  # a compiled one holds the module that it was made of
                inner = getattr(function, "_orig_mod", function).forward
            elif isinstance(function, torch.library.CustomOpDef):
                inner = function._init_fn
            return result if inner is None else _signature(inner)
    except (TypeError, ValueError):  # C functions have none
        return None
    return result


# What it returns


def _switches(op: Op) -> set[str]:
    """Arguments that request an output."""
    flags = {p.name for p in op.contract.params if p.scalar is bool}
    return flags & {str(spec.when) for spec in op.contract.outputs}


def _expected(op: Op, proof: Proof, takes: Sequence[str]) -> list[tuple[int, str, str | None]]:
    """(number, name, flag) of the outputs that it may return. Those that need a flag it does not take are
    left out, unless they are returned by default."""
    defaults = {p.name: p.default for p in op.contract.params}
    result = []
    for i, name in enumerate(proof.outputs):
        when = op.contract.outputs[i].when
        flag = when if when in _switches(op) else None
        if flag is None or flag in takes or defaults[flag] is True:
            result.append((i, name, flag if flag in takes else None))
    return result


def _by_number(
    outputs: Any, expected: Sequence[tuple[int, str, str | None]], given: Args, defaults: Args
) -> dict[int, Any]:
    """The returned values, by the number of the output. Outputs that were not requested may be left out, or
    be None; a dictionary names those in it. Too many outputs are an error."""
    items = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    named = {k: v for item in items if isinstance(item, dict) for k, v in item.items()}
    items = [item for item in items if not isinstance(item, dict)]
    asked = [(i, n) for i, n, flag in expected if flag is None or given.get(flag, defaults[flag])]
    places = asked if len(items) <= len(asked) else [(i, n) for i, n, _ in expected]
    if len(items) > len(places):
        names = ", ".join(n for _, n in places)
        raise BadOutputs(f"returned {len(items)} outputs, of which there are {len(places)} ({names})")
    result = dict(zip((i for i, _ in places), items, strict=False))
    result |= {i: named[n] for i, n in asked if n in named}
    if named and not result:
        names = ", ".join(n for _, n in asked)
        raise BadOutputs(f"returned a dictionary of {', '.join(map(str, named))}: outputs are {names}")
    return result


def _defaults(op: Op) -> Args:
    return {p.name: p.default for p in op.contract.params}


def _probe(
    function: Function,
    op: Op,
    takes: Sequence[str],
    expected: Sequence[tuple[int, str, str | None]],
    small: Args | None,
    total: int,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(outputs that it returns, arguments that get a gradient), from small calls. If a call fails, or none is
    possible, everything that it could support is assumed: the laws then report how it fails."""
    everything = tuple(i for i, _, _ in expected)
    if small is None:
        return everything, op.differentiable
    flags = {flag: True for _, _, flag in expected if flag is not None}
    there = {i: o.numel() > 0 or o.shape != (0,) for i, o in enumerate(op.fake(**flags | small)[:total])}

    def outputs_of(args: Args) -> dict[int, Any]:
        given = {n: v for n, v in (flags | args).items() if n in takes}
        return _by_number(function(**given), expected, given, _defaults(op))

    def copied() -> Args:
        return {n: v.clone() if isinstance(v, Tensor) else v for n, v in small.items()}

    try:
        with torch.no_grad():
            outputs = outputs_of(copied())
    except (Exception, SystemExit):  # laws report what it raises, with the line
        return everything, op.differentiable
    served = tuple(
        i for i in everything if isinstance(outputs.get(i), Tensor) or (i in outputs and not there[i])
    )
    args = copied()
    leaves = [n for n in op.differentiable if isinstance(args.get(n), Tensor)]
    for leaf in leaves:
        args[leaf].requires_grad_()
    try:
        with torch.enable_grad():
            outputs = outputs_of(args)
    except (Exception, SystemExit):
        return served or everything, op.differentiable
    graded = [o for o in outputs.values() if isinstance(o, Tensor) and o.requires_grad]
    has = graded and _has_backward(graded, [args[leaf] for leaf in leaves])
    return served or everything, op.differentiable if has else ()


def _has_backward(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    """False if it says itself that it has none, as an op of `torch.library.custom_op` without one does. What
    else is wrong with it, laws report."""
    try:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
    except NotImplementedError:
        return False
    except (Exception, SystemExit) as error:
        return "no autograd formula was registered" not in str(error)
    return True


def _public(
    function: Function,
    op: Op,
    takes: Sequence[str],
    expected: Sequence[tuple[int, str, str | None]],
    served: Sequence[int],
) -> Function:
    """The function that a check calls in place of the op's public function. It reads no tensor values, so
    that it can be compiled. Outputs that were not requested are None."""
    defaults = _defaults(op)

    def call(**given: Any) -> tuple[Any, ...]:
        passed = {name: given[name] for name in takes if name in given}
        try:
            returned = function(**passed)
        except NotImplementedError as error:
            raise UnsupportedError(f"it says: {error or 'not implemented'}") from error
        result = _by_number(returned, expected, passed, defaults)
        return tuple(result.get(i) for i in served)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in takes]
    made: Any = call
    made.__signature__ = inspect.Signature(parameters)
    return call


def _recast(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    return t if dtype is None or not t.is_floating_point() else t.to(dtype)


# What it is judged by


def _cut(proof: Proof, candidate: Candidate) -> Proof:
    """The op's proof, restricted to the outputs that the candidate supports. With another output dtype, the
    truth is rounded once to that dtype."""
    served, dtype = candidate.served, candidate.output_dtype

    def formula(args: Args) -> tuple[Tensor, ...]:
        result = proof.formula(args)
        wide = any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in args.values())
        return tuple(_recast(result[i], None if wide else dtype) for i in served)

    def scale(args: Args, outputs: Any, cotangents: Any) -> dict[str, Tensor]:
        everything = proof.formula(args)
        given = dict(zip(served, cotangents, strict=False))
        filled = [given.get(i, torch.zeros_like(o)) for i, o in enumerate(everything)] if given else ()
        result = proof.scale(args, everything, filled)
        if dtype is None or torch.finfo(dtype).bits >= 32:
            return result
        # A result with an error of d may round to the other neighbour: at most 2 d farther from the truth.
        names = {proof.outputs[i] for i in served}
        return {name: 2 * size if name in names else size for name, size in result.items()}

    def judged(args: Args, outputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """An output that was not requested, or that only other calls have, becomes an empty tensor."""
        if all(o is not None for o in outputs):
            return outputs
        device = next(t.device for t in args.values() if isinstance(t, Tensor))
        expected = candidate.fake(**{n: v for n, v in args.items() if n in candidate.contract.names})
        empty = [torch.empty(0, dtype=e.dtype, device=device) for e in expected]
        return tuple(e if o is None and math.prod(x.shape) == 0 else o
                     for o, e, x in zip(outputs, empty, expected, strict=True))  # fmt: skip

    return replace(
        proof, op=candidate, outputs=tuple(proof.outputs[i] for i in served), formula=formula, scale=scale,
        judged=judged, exact=None, also=None, observe=None, kernels={}, slow=(),
    )  # fmt: skip


def _lacks(proof: Proof, candidate: Candidate) -> dict[str, str]:
    """Laws that do not apply to candidates, or not to this one."""
    result = {
        "contract": "to refuse bad calls with isobit's own errors is a promise of isobit's functions",
        "compile": "the kernels behind a candidate are not known here",
    }
    if isinstance(candidate.whole, Composed):
        result["traceable"] = (
            f"rows of what the caller gives {candidate.name} cannot be cut as this law cuts them"
        )
    if proof.shared is None:
        result["agree"] = "nothing else shares its numerics class"
    if proof.invariant is not None:
        result["invariant"] = f"the law of bits of {candidate.name} looks into isobit's own schedule"
    if not candidate.differentiable and candidate.whole is not None and candidate.whole.differentiable:
        result["gradient"] = "forward only: it has no backward"
        if "agree" not in result:
            result["agree"] = result["gradient"]
    return result
