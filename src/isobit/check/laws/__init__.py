"""Every law: its name, its function, and the cases of a proof on which it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isobit.check.laws import accuracy, bits, compilation, parallel, system
from isobit.spec.compare import OutputCheck
from isobit.spec.proof import Case, Proof
from isobit.spec.trial import Trial


@dataclass(frozen=True)
class Law:
    """One promise. `once`: it is about calls rather than numbers, so one case from the command line is
    enough. `reads` names the flags of the command line that can affect it, except those that every law reads.
    `bounds` are the directions of the tolerances that it uses. `takes`: how long its longest cases take on a
    GPU, next to those of other laws. They compile a kernel for each kind of call that they make."""

    name: str
    run: Callable[[Trial], list[OutputCheck]]
    cases: Callable[[Proof], Sequence[Case]]
    once: bool = False
    reads: frozenset[str] = frozenset()
    bounds: tuple[str, ...] = ()
    takes: int = 1


def small_case(proof: Proof) -> Case:
    """The first declared case that is not degenerate, without options."""
    result = next(c for c in proof.cases if c.dims and min(c.dims.values()) > 1)
    return replace(result, options={}, layout="dense")


def _gradient_cases(proof: Proof) -> Sequence[Case]:
    if not proof.op.differentiable:
        return proof.cases[:1]  # to report this once
    return [c for c in proof.cases if not c.options.keys() & set(proof.without_gradient)]


def _compile_cases(proof: Proof) -> Sequence[Case]:
    """The small case in two dtypes."""
    first = small_case(proof)
    others = [replace(first, dtype=c.dtype) for c in proof.cases if c.dtype != first.dtype]
    return [first, *others[:1]]


# Flags of the command line that not every law reads.
_SIZES = frozenset({"--dim", "--option", "--data"})
_INPUTS = _SIZES | {"--data seed", "--data token"}
_BACKWARD = _INPUTS | {"--data cotangents"}
_BOUNDS = frozenset({"--tolerances"})

#: In the order in which they run: forward before backward, numbers before machinery.
LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("accuracy", accuracy.accuracy, lambda proof: proof.cases, reads=_INPUTS | _BOUNDS,
            bounds=("forward",)),
        Law("gradient", accuracy.gradient, _gradient_cases, reads=_BACKWARD | _BOUNDS,
            bounds=("forward", "gradient"), takes=3),
        Law("repeatable", bits.repeatable, lambda proof: proof.cases[::3], reads=_BACKWARD),
        Law("written", bits.written, lambda proof: proof.cases[::3], reads=_BACKWARD),
        Law("invariant", bits.invariant, lambda proof: proof.bit_cases, reads=_BACKWARD, takes=4),
        Law("agree", bits.agree, lambda proof: proof.agree_cases or proof.bit_cases[:1],
            reads=_BACKWARD, takes=10),
        Law("parallel", parallel.parallel, lambda proof: proof.shard_cases or [small_case(proof)],
            reads=_BACKWARD),
        Law("contract", system.contract, lambda proof: [small_case(proof)], once=True, reads=_BACKWARD),
        Law("traceable", system.traceable, lambda proof: [small_case(proof)], once=True,
            reads=_BACKWARD, takes=2),
        Law("memory", system.memory, lambda proof: proof.memory_cases, reads=_SIZES | {"--data cotangents"}),
        Law("compile", compilation.compiles, _compile_cases, once=True, reads=frozenset({"--law compile"}),
            takes=5),
    )
}  # fmt: skip

#: Laws whose cases promise bits.
OF_BITS = ("invariant", "agree", "parallel")
