"""What an op declares for `isobit check` and `isobit bench`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import DTYPE_NAMES, dtype_name
from isobit.frame.op import Op
from isobit.ranks import Group

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point}

Args = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One set of inputs: sizes by name, a dtype, a kind of data and of layout, scalar options.

    `heavy` cases need a real device: they would take minutes in Triton's CPU interpreter, or on a backend
    that its proof declares slow. `gpu_gb`: the case needs a GPU with that much memory.
    """

    dims: dict[str, int]
    dtype: torch.dtype = torch.float32
    data: str = "edge"
    layout: str = "dense"
    options: dict[str, Any] = field(default_factory=dict)
    heavy: bool = False
    gpu_gb: int = 0

    @property
    def name(self) -> str:
        parts = [f"{k}={v}" for k, v in self.dims.items()] + [dtype_name(self.dtype)]
        if self.data != "edge":
            parts.append(self.data)
        if self.layout != "dense":
            parts.append(self.layout)
        for key, value in self.options.items():
            parts.append(f"{key}={dtype_name(value) if isinstance(value, torch.dtype) else value}")
        return " ".join(parts)


@dataclass(frozen=True)
class InputOptions:
    """How to fill a case; the command line sets these."""

    seed: int = 123
    constant: float = 0.25
    token: int | None = None


@dataclass(frozen=True)
class Cost:
    """Bytes that must be moved and floating-point operations that must be done, per direction."""

    fwd_bytes: int
    bwd_bytes: int = 0
    fwd_flops: int = 0
    bwd_flops: int = 0

    def bytes(self, direction: str) -> int:
        return self.fwd_bytes * (direction != "bwd") + self.bwd_bytes * (direction != "fwd")

    def flops(self, direction: str) -> int:
        return self.fwd_flops * (direction != "bwd") + self.bwd_flops * (direction != "fwd")


@dataclass(frozen=True)
class Mutant:
    """A call that must be rejected, with the argument that its message must name. `values`: because of what a
    tensor holds, so on a GPU with validate=True."""

    what: str
    arg: str
    change: Callable[[Args], Args]
    values: bool = False


@dataclass(frozen=True)
class Control:
    """The same mathematics in another order: some bit must change, or equal bits elsewhere prove nothing.

    Without `cotangents` the outputs must change. With it, the gradients that have rows; it turns the
    cotangents of the whole batch into those of the changed one.

    If the change moves results, `back` moves the outputs back to their places, and `of` names the gradients
    that stay in theirs: moved ones would differ whatever their order.
    """

    what: str
    change: Callable[[Args], Args]
    cotangents: Callable[[list[Tensor]], list[Tensor]] | None = None
    back: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda outputs: outputs
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoSum:
    """In place of controls: nothing is added here, so there is no other order that could change bits. `why`
    says so in words. The law tests it: an element of an output, or of a gradient that has rows, depends on
    one element of each floating-point argument and incoming gradient at most.

    Or on two, if `pairs` says on which: (args, the name of an argument or an output, a tensor of its shape)
    -> a number for every element, the same for the two of a pair. A sum of two terms has one order only."""

    why: str
    pairs: Callable[[Args, str, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Stream:
    """For an op that sums over its rows: the names of the arguments that mask rows, where sequences
    begin, and the initial value. Segments of `segment` rows are added one after another."""

    mask: str
    cuts: str
    start: str
    segment: int


@dataclass(frozen=True)
class Shared:
    """Gradients of arguments that all rows share, in an op whose padding rows are masked: they are sums
    over the live rows."""

    #: The argument that masks rows.
    mask: str
    #: (args) -> the live rows.
    live: Callable[[Args], Tensor]
    #: (args, rows) -> rows like those of `padding`, but excluded by the mask only.
    maskable: Callable[[Args, int], Args]
    #: (args) -> arguments that change the schedule and nothing else, by description.
    schedules: Callable[[Args], Mapping[str, Args]]


@dataclass(frozen=True)
class Groups:
    """For an op whose rows act in groups, the names of arguments: the size of groups, or where groups begin
    and the last one ends. A call without either has no groups."""

    size: str
    bounds: str


@dataclass(frozen=True)
class Shards:
    """A way in which the ranks of a group compute a call together. Results are tensors by name."""

    what: str
    #: On one rank: (group, trial, the arguments of the whole call, cotangents) -> the results of this rank.
    run: Callable[[Group, Any, Args, Sequence[Tensor]], dict[str, Tensor]]
    #: The same without a group: (trial, arguments, cotangents) -> results.
    whole: Callable[[Any, Args, Sequence[Tensor]], dict[str, Tensor]]
    #: By name, the dimension along which ranks have parts of a result; None if every rank has all of it.
    spread: Mapping[str, int | None]
    #: Sums over ranks that are made otherwise, and must have other bits: (trial, arguments, cotangents) ->
    #: (what, ours, theirs).
    controls: Callable[[Any, Args, Sequence[Tensor]], Sequence[tuple[str, list[Tensor], list[Tensor]]]]
    #: (trial) -> None, or why this backend or case has no such way.
    why_not: Callable[[Any], str | None] = lambda trial: None


@dataclass(frozen=True)
class Kernels:
    """Kernels of a backend that compile without a GPU: `record` calls their launchers with a recorder, on
    meta tensors; `targets` are the targets that must compile on any machine, the main one first.
    """

    record: Callable[[Any, torch.dtype], None]
    targets: Sequence[tuple[str, int | str, int]] = (
        ("cuda", 90, 32),
        ("cuda", 80, 32),
        ("hip", "gfx942", 64),
    )

    def by_name(self) -> dict[str, tuple[str, int | str, int]]:
        """The targets by their usual names: `cuda:90`."""
        return {f"{kind}:{arch}": (kind, arch, width) for kind, arch, width in self.targets}


#: An index into a tensor, and the bits that must be there.
Sample = tuple[tuple[Any, ...], Tensor]


@dataclass(frozen=True)
class Proof:
    """Everything that check and bench need to know about an op, in addition to its contract."""

    op: Op
    #: Class in tolerances.json.
    op_class: str
    #: Names of the outputs that the public function and `formula` return, in order.
    outputs: tuple[str, ...]
    #: Inputs of a case: every tensor and scalar argument by name.
    make: Callable[[Case, torch.device, InputOptions], Args]
    #: The truth, in plain differentiable PyTorch; precision follows the inputs' dtype.
    formula: Callable[[Args], tuple[Tensor, ...]]
    #: Size of the largest intermediate of every element of every output and gradient, from fp64 inputs,
    #: outputs and cotangents: the unit of the accuracy law's slack.
    scale: Callable[[Args, Sequence[Tensor], Sequence[Tensor]], dict[str, Tensor]]
    #: Negative controls of the invariant law, which fails without one; or that there can be none, and why.
    controls: Sequence[Control] | NoSum
    #: Rows that must change nothing wherever they are: (args, rows) -> row-wise arguments.
    padding: Callable[[Args, int], Args]
    #: Other strides and alignments of the same values.
    layouts: Sequence[str]
    lay_out: Callable[[Args, str], Args]
    #: Peak bytes beyond inputs, outputs and gradients: (case, backend, direction) -> bytes.
    memory: Callable[[Case, str, str], int]
    cases: Sequence[Case]
    #: Cases large enough that a reordered sum must change bits, and that reach every schedule of the kernels.
    bit_cases: Sequence[Case]
    memory_cases: Sequence[Case]
    mutants: Sequence[Mutant]
    #: (args) -> args that violate a value rule, and the flat index of the row that does, or None if no single
    #: row does; None without such a rule.
    bad_value: Callable[[Args], tuple[Args, int | None]] | None
    #: Backends with kernels of their own.
    kernels: Mapping[str, Kernels]

    #: The dimension of the contract that counts rows; or several, if they have the same size.
    rows: str = "*"
    #: Numbers of rows that are computed alone, in addition to half of a batch and all but one.
    batch_sizes: Sequence[int] = (1, 2, 3, 7)
    #: For ops that sum over their rows; their outputs follow the laws of a stream instead of those of rows.
    stream: Stream | None = None
    #: The exact bits of the numerics class, independent of every backend, on a sample of every output and
    #: gradient: (args, cotangents or none) -> samples by name. None if there is no such model.
    exact: Callable[[Args, Sequence[Tensor]], dict[str, Sample]] | None = None
    #: Cases on which backends of one class are compared with each other.
    agree_cases: Sequence[Case] = ()
    #: Backends that compute on the CPU wherever the tensors are: they skip heavy cases, and no graph can
    #: capture them.
    slow: tuple[str, ...] = ()
    #: Dimensions that must not be 0.
    positive: tuple[str, ...] = ()
    #: Observations that a check records without judging them: (device) -> facts. On GPUs only.
    observe: Callable[[torch.device], list[dict[str, Any]]] | None = None
    #: For ops with a mask and with gradients of arguments that all rows share.
    shared: Shared | None = None
    #: For ops whose rows act together in groups.
    groups: Groups | None = None
    #: Arguments that choose a schedule and change no result: a candidate need not take them.
    hints: tuple[str, ...] = ()
    #: Options without which a case that has them would promise no bits; they must not be dropped.
    essential: tuple[str, ...] = ()
    #: The outputs that are judged, if not all: (args, outputs) -> outputs.
    judged: Callable[[Args, tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda args, outputs: outputs
    #: Options of cases whose calls have no gradient, though the op has one.
    without_gradient: tuple[str, ...] = ()
    #: An invariant law of its own, for a function whose outputs are sums over the batch and whose rows have
    #: forms that a contract cannot express: (trial) -> checks.
    invariant: Callable[[Any], list[Any]] | None = None
    #: Parts of a call that must have its bits, other than rows: (trial) -> checks, none if there are no such
    #: parts. Of the invariant law, and so of candidates too.
    parts: Callable[[Any], list[Any]] | None = None
    #: Other calls that must have the same bits, specific to the op: (trial) -> checks, none if they do not
    #: apply. Part of the agree law.
    also: Callable[[Any], list[Any]] | None = None
    #: How ranks compute it together, and the cases on which that is shown. None if no group can.
    shards: Sequence[Shards] = ()
    shard_cases: Sequence[Case] = ()
    #: Fields that are different for some backends, by their names: for those of another numerics class.
    differs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, backend: str) -> "Proof":
        """The proof for one backend."""
        return replace(self, **self.differs[backend]) if backend in self.differs else self
