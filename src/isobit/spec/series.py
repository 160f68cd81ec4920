"""What an op declares for timing: one kind of call over many sizes, its rivals, its cost, its truth."""

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from isobit.frame.op import Op, known_op
from isobit.spec.options import known_options
from isobit.spec.proof import Args, Case, Cost, InputOptions
from isobit.spec.proofs import proof_of
from isobit.spec.rival import DIRECTIONS, Rival
from isobit.spec.rotation import copies_for
from isobit.spec.trial import cloned
from isobit.spec.truth import Errors, Verdict, truth_of


class Judge(Protocol):
    """Knows the truth of some part of a result."""

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | Errors | Verdict | None:
        """The largest error of the known part, NaN if there is one, or more figures; None if nothing is
        known."""


class NotHere(Exception):
    """What a series times cannot be called on this machine. The message is the reason."""


class Pool:
    """Tensors that several cases share, so that gigabytes are drawn once and not for every size."""

    def __init__(self, device: torch.device, inputs: InputOptions | None = None) -> None:
        self.device = device
        self.inputs = inputs or InputOptions()
        self._key: Hashable = None
        self._tensors: dict[str, Tensor] = {}
        self._made: dict[str, Any] = {}

    def keep(self, key: Hashable) -> None:
        """Drop shared tensors, unless they were shared under this key."""
        if key != self._key or key is None:
            self._tensors.clear()
            self._made.clear()
        self._key = key

    def made(self, name: str, make: Callable[[], Any]) -> Any:
        """The object with this name; made now if it does not exist."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def normal(self, name: str, rows: int, columns: int, *, dtype: torch.dtype) -> Tensor:
        """Rows of the random matrix with this name, drawn on the device, and drawn again if more are needed
        than exist."""
        known = self._tensors.get(name)
        if known is None or len(known) < rows:
            self._tensors.pop(name, None)  # free the smaller one first
            gen = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.inputs.seed} {name}".encode()))
            known = torch.empty(rows, columns, dtype=dtype, device=self.device).normal_(generator=gen)
            self._tensors[name] = known
        return known[:rows]


@dataclass(frozen=True)
class Series:
    """One kind of call, timed over many sizes.

    `make` returns the arguments of several calls, enough of them that together they exceed the L2 cache
    several times. `call(args, backend)` returns the first output, or a tuple of several. `judge` gets the
    arguments of the first call; None judges nothing. With `inputs`, gradients with respect to them are timed
    as well, in the directions `bwd` and `fwd_bwd`; without, there is one direction, with any name. `options`
    are those of every case, in which this kind of call differs from others of the op: it is checked with
    them. `takes` names the options that a case may have in addition.

    `op` is None for what is not a call of one op, such as a training step: `needs` names the ops that it
    uses, which are checked on their default backends, and `imports` the modules without which nothing can be
    timed.

    `new` returns, for cases that have them, the arguments of many more calls, all with different sizes. They
    are timed next to the usual ones as `<impl>:new`, and no size occurs twice: directions share them.

    A `step` computes its own gradients: `call` and the functions of rivals return (output, *gradients). Its
    wall time is measured as a whole. One that takes seconds is timed in this many `runs`, after one more.
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
    runs: int | None = None
    #: How many tokens a call generates, for the tokens per second of its row.
    tokens: Callable[[Args], int] | None = None
    new: Callable[[Case, Pool], list[Args]] = lambda case, pool: []
    #: Other uses of isobit than `call`, timed next to it as `isobit:<name>`.
    variants: Mapping[str, Callable[[Args], Any]] = field(default_factory=dict)
    #: What kind of call it is, in a few words.
    about: str = ""
    #: Cases for a CPU; None makes them from the declared ones.
    small: Sequence[Case] | None = None
    #: The figure to read: the key of the row that tables show.
    figure: str = "ms"
    #: The cases for `--core`, if there is not enough time for all.
    core: Sequence[Case] = ()
    #: Requested sizes are timed by another series of the same calls, and not again by this one.
    declared_only: bool = False
    #: The time that a backend's own model expects for a call, in milliseconds; None if it has none.
    predict: Callable[[str | None, Args], float | None] = lambda backend, args: None
    #: Backends that are timed next to the default one, each at some of the cases.
    also: Mapping[str, Sequence[Case]] = field(default_factory=dict)
    directions: tuple[str, ...] = DIRECTIONS
    #: Cases with the same key share tensors; None shares nothing.
    shared: Callable[[Case], Hashable] = lambda case: None
    #: Cases with the same key run the same kernels: precompiling takes one of them.
    kernels: Callable[[Case], Hashable] = lambda case: case.name
    #: Parts of a check that compiles much. Precompiling runs them too, each in a process of its own.
    rehearse: Sequence[Callable[[Pool], object]] = ()
    #: The baseline: the rival whose speed is 1.
    against: str | None = None
    #: Compare the bits of rivals with ours: they might be equal.
    bits: bool = False
    #: Report how far the results of rivals are from ours: `max_diff`.
    difference: bool = False
    #: Time a copy of as many bytes next to it.
    copy: bool = True
    #: Bytes decide most of its cases. Pages show the share of a copy's speed next to that of the
    #: baseline's, or without a copy TB/s in a grid of their own.
    bandwidth: bool = False


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
    """The series of an op whose proof has everything: whole batches of its own inputs, forward and backward,
    with the options of its declared cases. `inputs` are those whose gradients are computed, by default all
    possible ones."""
    op = known_op(op_name)
    proof = proof_of(op)
    taken = op.differentiable if inputs is None else inputs

    def make(case: Case, pool: Pool) -> list[Args]:
        args: Args = proof.make(case, pool.device, pool.inputs)
        size = sum(v.nbytes for v in args.values() if isinstance(v, Tensor))
        # Not clone(), which would make a dense tensor of a view with gaps.
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
