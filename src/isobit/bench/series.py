"""What an op declares to be timed: one kind of call over many sizes, its rivals, its cost, its truth."""

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from isobit.bench.goals import Goal
from isobit.bench.rival import DIRECTIONS, Rival
from isobit.bench.timing import Verdict, copies_for
from isobit.bench.truth import Errors, truth_of
from isobit.check.options import known_options
from isobit.check.proof import Args, Case, Cost, InputOptions
from isobit.check.proofs import proof_of
from isobit.check.trial import cloned
from isobit.op import Op, known_op


class Judge(Protocol):
    """Knows the truth of some part of a result."""

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | Errors | Verdict | None:
        """Largest error of what it knows, NaN if there is one, or more about them; None where it knows
        nothing."""


class NotHere(Exception):
    """What a series times cannot be called on this machine. The message says why."""


class Pool:
    """What several cases share, so that gigabytes are drawn once and not for every size."""

    def __init__(self, device: torch.device, inputs: InputOptions | None = None) -> None:
        self.device = device
        self.inputs = inputs or InputOptions()
        self._key: Hashable = None
        self._tensors: dict[str, Tensor] = {}
        self._made: dict[str, Any] = {}

    def keep(self, key: Hashable) -> None:
        """Drop what was shared, unless it was shared under this key."""
        if key != self._key or key is None:
            self._tensors.clear()
            self._made.clear()
        self._key = key

    def made(self, name: str, make: Callable[[], Any]) -> Any:
        """What was made under this name; made now, if nothing was."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def normal(self, name: str, rows: int, columns: int, *, dtype: torch.dtype) -> Tensor:
        """Rows of the random matrix of this name, drawn where it will live, and anew when more are asked
        for than there are."""
        known = self._tensors.get(name)
        if known is None or len(known) < rows:
            self._tensors.pop(name, None)  # give the smaller one back first
            gen = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.inputs.seed} {name}".encode()))
            known = torch.empty(rows, columns, dtype=dtype, device=self.device).normal_(generator=gen)
            self._tensors[name] = known
        return known[:rows]


@dataclass(frozen=True)
class Series:
    """One kind of call, timed over many sizes.

    `make` returns the arguments of several calls in a row, enough of them that together they exceed the L2
    cache several times. `call(args, backend)` returns the first output, or a tuple of several. `judge` looks
    at the arguments of the first call; None judges nothing. With `inputs`, gradients with respect to them are
    timed as well, in the directions `bwd` and `fwd_bwd`; without, there is one direction, named as one likes.
    `options` are those of every case, in which this kind of call differs from others of the op: it is checked
    with them. `takes` names the options that a case may have beside these.

    `op` is None for what is no call of one op, such as a training step: `needs` names the ops that it rests
    on, which are checked as they serve by default, and `imports` modules without which nothing can be timed.

    `new` returns, for cases that have them, the arguments of many more calls, all of other sizes. They are
    timed beside the usual ones as `<impl>:new`, and no size comes twice: directions share them out.

    A `step` takes its gradients itself: `call` and the functions of rivals return (output, *gradients). It is
    timed whole, on the wall.
    """

    op: Op | None
    name: str
    cases: Sequence[Case]
    make: Callable[[Case, Pool], list[Args]]
    call: Callable[[Args, str | None], Any]
    cost: Callable[[dict[str, int], torch.dtype], Cost]
    judge: Callable[[Args], Judge | None]
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    step: bool = False
    new: Callable[[Case, Pool], list[Args]] = lambda case, pool: []
    #: Other uses of isobit than `call`, timed beside it as `isobit:<name>`.
    ways: Mapping[str, Callable[[Args], Any]] = field(default_factory=dict)
    #: Cases for a CPU; None makes them from the declared ones.
    small: Sequence[Case] | None = None
    #: The figure to read: the key of a row that tables show.
    figure: str = "ms"
    #: The cases that stand for all, where there is no time for all.
    core: Sequence[Case] = ()
    #: Sizes that are asked for are timed by another series of the same calls, and not once more by this one.
    declared_only: bool = False
    #: What a backend's own rule expects of a call, in milliseconds; None where it has none.
    predict: Callable[[str | None, Args], float | None] = lambda backend, args: None
    #: Backends that are timed beside the default, each at some of the cases.
    also: Mapping[str, Sequence[Case]] = field(default_factory=dict)
    directions: tuple[str, ...] = DIRECTIONS
    #: Cases with the same answer share tensors; None shares nothing.
    shared: Callable[[Case], Hashable] = lambda case: None
    #: Cases with the same answer run the same kernels: compiling ahead takes one of them.
    kernels: Callable[[Case], Hashable] = lambda case: case.name
    #: The rival whose speed is 1.
    against: str | None = None
    #: Compare the bits of rivals with ours: they might be equal.
    bits: bool = False
    #: Time a copy of as many bytes beside it.
    copy: bool = True
    goals: Sequence[Goal] = ()


def by_rows(
    op_name: str,
    cases: Sequence[Case],
    cost: Callable[[dict[str, int], torch.dtype], Cost],
    rivals: Mapping[str, Rival],
    *,
    name: str | None = None,
    inputs: tuple[str, ...] | None = None,
    judge: Callable[[Args], Judge | None] | None = None,
    **rest: Any,
) -> Series:
    """The series of an op whose proof says all: whole batches of its own inputs, forward and backward, with
    whatever options its declared cases have. `inputs` are those whose gradients are taken, by default all
    that can be."""
    op = known_op(op_name)
    proof = proof_of(op)
    taken = op.differentiable if inputs is None else inputs

    def make(case: Case, pool: Pool) -> list[Args]:
        args: Args = proof.make(case, pool.device, pool.inputs)
        size = sum(v.nbytes for v in args.values() if isinstance(v, Tensor))
        # Not clone(), which would make a dense tensor of a view with holes.
        return [args, *(cloned(args) for _ in range(copies_for(size, pool.device) - 1))]

    def call(args: Args, backend: str | None) -> Any:
        assert op.function is not None
        return op.function(**args, backend=backend)

    def truth(args: Args) -> Judge | None:
        return truth_of(op, args, taken)

    return Series(
        op=op, name=name or op.name, cases=cases, make=make, call=call, cost=cost, judge=judge or truth,
        rivals=rivals, inputs=taken, takes=tuple(known_options(op)), **rest,
    )  # fmt: skip
