"""What to check: the command line as a value, and the ops, backends and cases that it selects."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch

from isobit.check.candidate import Candidate
from isobit.check.laws import LAWS, OF_BITS, small_case
from isobit.frame.backend import UnsupportedError
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import triton_is_interpreted
from isobit.frame.op import Op, known_op
from isobit.spec.options import fit, known_options, options_of, text_of, varied, words
from isobit.spec.proof import Args, Case, InputOptions
from isobit.spec.proofs import proof_of, proofs
from isobit.spec.tolerances import Tolerances


@dataclass(frozen=True)
class Request:
    """Empty tuples mean everything."""

    ops: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dims: dict[str, int] | None = None
    case: str | None = None  # the name of one declared case
    data: str = "edge"
    vary: dict[str, Any] = field(default_factory=dict)  # options of every case, and `layout`
    inputs: InputOptions = field(default_factory=InputOptions)
    cotangents: str = "random"  # or "ones"; "none" checks no gradients
    heavy: bool = True  # also cases that need a real device
    targets: tuple[str, ...] = ()  # of the compile law, by name: cuda:90
    brief: bool = False  # as in a check of all laws: some of them take less (docs/dev/laws.md)
    tolerances: Tolerances = field(default_factory=Tolerances)
    candidate: Candidate | None = None  # a user's function in place of the op's backends

    def for_law(self, name: str) -> "Request":
        """The same request without the flags that this law does not read."""
        request = self
        for flag in SETS:
            if flag not in LAWS[name].reads:
                request = request.without(flag)
        return request

    def without(self, flag: str) -> "Request":
        """The same request with the default of what a flag sets."""
        request, default = self, Request()
        for path in SETS[flag]:
            first, _, rest = path.partition(".")
            value = getattr(default, first)
            if rest:
                value = replace(getattr(request, first), **{rest: getattr(value, rest)})
            request = replace(request, **{first: value})
        return request

    def given(self) -> list[str]:
        """The flags that not every law reads and that differ from their defaults."""
        return [flag for flag in SETS if self.without(flag) != self]

    def command(self) -> str:
        """The command that repeats this request."""
        parts = ["isobit check"]
        parts += [f"--op {name}" for name in self.ops] + [f"--backend {name}" for name in self.backends]
        if self.candidate is not None:
            parts = [self.start(self.candidate.name, "")]
        parts += [self.law_flags(name) for name in self.laws]
        parts += [f"--dtype {dtype_name(dtype)}" for dtype in self.dtypes]
        parts += [f"--case {shlex.quote(self.case)}"] if self.case else []
        parts += ["--brief"] if self.brief else []
        return " ".join([*parts, self.options()])

    def start(self, op: str, backend: str) -> str:
        """The beginning of a command that repeats something for one op and backend, or for the candidate."""
        if self.candidate is None:
            return f"isobit check --op {op} --backend {backend}"
        interpreted = "TRITON_INTERPRET=1 " if triton_is_interpreted() else ""  # its kernels may be Triton's
        return f"{interpreted}isobit check --op {op} {self.candidate.flags}"

    def options(self) -> str:
        """The flags that repeat this request, for reproduction commands and for worker processes."""
        parts = [f"--device {self.device}"]
        parts += [f"--tolerances {shlex.quote(self.tolerances.path)}"] if self.tolerances.path else []
        parts += [f"--dim {k}={v}" for k, v in (self.dims or {}).items()]
        parts += [f"--option {shlex.quote(f'{k}={text_of(v)}')}" for k, v in self.vary.items()]
        return " ".join([*parts, *(f"--data {text}" for text in self._data())])

    def _data(self) -> list[str]:
        """What `--data` was given, as far as it differs from the defaults."""
        default = InputOptions()
        texts = [self.data] if self.data != Request().data else []
        if self.inputs.constant != default.constant:
            texts = [f"constant={self.inputs.constant}"]
        texts += [f"seed={self.inputs.seed}"] if self.inputs.seed != default.seed else []
        texts += [f"token={self.inputs.token}"] if self.inputs.token is not None else []
        return texts + ([f"cotangents={self.cotangents}"] if self.cotangents != Request().cotangents else [])

    def law_flags(self, law: str) -> str:
        """The flags that select a law; the law of compilation with its targets, if some are named."""
        texts = [f"compile={target}" for target in self.targets] if law == "compile" else []
        return " ".join(f"--law {text}" for text in texts or [law])


#: Flags that not every law reads, with the attributes of a request that each sets.
SETS: dict[str, tuple[str, ...]] = {
    "--dim": ("dims",), "--option": ("vary",), "--tolerances": ("tolerances",),
    "--data": ("data", "inputs.constant"), "--data seed": ("inputs.seed",),
    "--data token": ("inputs.token",), "--data cotangents": ("cotangents",), "--law compile": ("targets",),
}  # fmt: skip


def ops_of(request: Request) -> list[Op]:
    """The named ops; without names all of them, or those that have dimensions and options of these names."""
    if request.candidate is not None:
        return [request.candidate]
    if request.ops:
        return [known_op(name) for name in request.ops]
    ops = [proof.op for proof in proofs().values()]
    fitting = [op for op in ops if request.dims is None or _order_of(op, request.dims)]
    fitting = [op for op in fitting if set(request.vary) <= set(known_options(op))]
    return fitting or ops


def check_options(ops: Sequence[Op], request: Request) -> None:
    """Options that an op does not have are errors, before anything runs; and so are values that its contract
    refuses in every case: that is no fault of a backend."""
    for op in ops:
        fit(op, request.vary)
        if request.vary:
            _check_values(op, request)


def _check_values(op: Op, request: Request) -> None:
    proof, asked = proof_of(op), op.whole if isinstance(op, Candidate) else op
    assert asked is not None
    declared = [
        c for c in proof.cases if not c.heavy and not c.gpu_gb and min(c.dims.values(), default=0) > 0
    ]
    few = sorted(declared, key=lambda case: math.prod(case.dims.values()))[:4]
    refused: list[ContractError] = []
    for case in few:
        try:
            asked.explain(**proof.make(varied(case, request.vary), torch.device("cpu"), InputOptions()))
        except UnsupportedError:
            return
        except ContractError as error:
            refused.append(error)
        else:
            return
    if refused:
        given = " ".join(f"--option {name}={text_of(value)}" for name, value in request.vary.items())
        raise ContractError(f"{given}: {refused[0]}")


def candidates(ops: Sequence[Op], request: Request) -> list[tuple[Op, str]]:
    """Ops and backends. A backend that only some of the ops have is selected for those."""
    known = {op.name: [b.name for b in op.backends] for op in ops}
    there = dict.fromkeys(name for names in known.values() for name in names)
    for name in request.backends:
        if name not in there:
            raise ContractError(f"{', '.join(known)}: unknown backend {name!r}; known: {', '.join(there)}")
    wanted = request.backends or tuple(there)
    return [(op, name) for op in ops for name in wanted if name in known[op.name]]


def small_args(op: Op, device: torch.device, backend: str = "") -> Args:
    """The arguments of the small case, of which a backend may have its own."""
    proof = proof_of(op).of(backend)
    return proof.make(small_case(proof), device, InputOptions())


def cases_of(op: Op, backend: str, law: str, request: Request) -> list[Case]:
    """The cases on which a law runs: declared ones, of which a backend may have its own, or the one that the
    command line describes."""
    proof, chosen, request = proof_of(op).of(backend), LAWS[law], request.for_law(law)
    if request.dims is not None:
        dims = _check_dims(op, request.dims)
        made = [Case(dims, d, request.data) for d in (request.dtypes or (small_case(proof).dtype,))]
        made = [varied(case, request.vary) for case in made]
        return made[:1] if chosen.once else made
    cases = list(chosen.cases(proof))
    if isinstance(op, Candidate):
        cases = op.supported_cases(cases, law in OF_BITS)
    if request.data != "edge":
        cases = [replace(c, data=request.data) for c in cases]
    if request.vary:
        cases = list({c.name: c for c in (varied(c, request.vary) for c in cases)}.values())
    if request.dtypes:
        # Every law runs in every requested dtype, not only in those of its declared cases.
        recast = [replace(c, dtype=d) for c in cases for d in request.dtypes]
        cases = list({c.name: c for c in recast}.values())
    return [c for c in cases if request.case in (None, c.name)]


def described(op: Op, case: Case, request: Request, arch: str) -> dict[str, Any]:
    """Everything needed to make the inputs and the bound of a case again, as JSON."""
    return {
        "op_class": proof_of(op).op_class,
        "dtype": dtype_name(case.dtype),
        "arch": arch,
        "data": case.data,
        "options": words(options_of(case)),
        "seed": request.inputs.seed,
        "constant": request.inputs.constant,
        "token": request.inputs.token,
        "grad_mode": request.cotangents,
        "grad_seed": request.inputs.seed,
    }


def _check_dims(op: Op, dims: dict[str, int]) -> dict[str, int]:
    """The dimensions in the order that the op declares; missing ones are taken from a small declared case
    with the given ones."""
    proof = proof_of(op)
    having = [c for c in (small_case(proof), *proof.cases) if set(dims) <= set(c.dims)]
    if having:
        dims = {**min(having, key=lambda c: len(c.dims)).dims, **dims}
    order = _order_of(op, dims)
    if order is None:
        sets = {tuple(c.dims) for c in proof_of(op).cases}
        known = "; ".join(", ".join(s) for s in sorted(sets))
        raise ContractError(f"{op.name}: dimensions {', '.join(dims)}; known sets: {known}")
    for name, size in dims.items():
        if size <= 0 and (name in proof_of(op).positive or size < 0):
            raise ContractError(f"{op.name}: {name}={size} must be positive")
    return {name: dims[name] for name in order}


def _order_of(op: Op, dims: dict[str, int]) -> tuple[str, ...] | None:
    return next((tuple(c.dims) for c in proof_of(op).cases if set(c.dims) == set(dims)), None)


def check_case(ops: Sequence[Op], request: Request, laws: Sequence[str]) -> None:
    """A case that is named must be declared by one of the ops."""
    if request.case is None or request.dims is not None:
        return
    free = replace(request, case=None)
    pairs = candidates(ops, request)
    known = {c.name for pair in pairs for law in laws for c in cases_of(*pair, law, free)}
    if pairs and request.case not in known:
        unknown = f"{', '.join(op.name for op in ops)}: unknown case {request.case!r}"
        others = [law for law in LAWS if law not in laws]
        having = [
            x for x in others if any(c.name == request.case for p in pairs for c in cases_of(*p, x, free))
        ]
        if having:
            raise ContractError(f"{unknown} of {', '.join(laws)}: it is one of {', '.join(having)}")
        closest = "; ".join(get_close_matches(request.case, known, n=3, cutoff=0))
        raise ContractError(f"{unknown}; known: {'; '.join(sorted(known))}. Closest: {closest}")
