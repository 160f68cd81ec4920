"""What an op declares so that `isobit check` can prove it and `isobit bench` can time it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.contract import DTYPE_NAMES, dtype_name

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items() if dtype.is_floating_point}

Args = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One set of inputs: sizes by name, a dtype, a kind of data and of layout, scalar options.

    `heavy` cases need a real device: they would take minutes in Triton's CPU interpreter. `gpu_gb` says
    that a case needs a GPU with that much memory.
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
    """Bytes that must move and floating-point operations that must be done, per direction."""

    fwd_bytes: int
    bwd_bytes: int
    flops: int = 0

    def bytes(self, direction: str) -> int:
        return self.fwd_bytes * (direction != "bwd") + self.bwd_bytes * (direction != "fwd")


@dataclass(frozen=True)
class Mutant:
    """A call that must be rejected, with the argument that its message must name."""

    what: str
    arg: str
    change: Callable[[Args], Args]


@dataclass(frozen=True)
class Proof:
    """Everything that check and bench need to know about an op, beside its contract."""

    #: Class in tolerances.json.
    op_class: str
    #: Names of the outputs that `call` and `formula` return, in order.
    outputs: tuple[str, ...]
    #: Arguments that receive gradients.
    grad_inputs: tuple[str, ...]
    #: Inputs of a case: every tensor and scalar argument by name.
    make: Callable[[Case, torch.device, InputOptions], Args]
    #: The public function, asked for all outputs: (args, backend, validate=None) -> outputs.
    call: Callable[..., tuple[Tensor, ...]]
    #: The public function as most call it, asked for nothing optional; outputs as in `call`, the first few.
    call_alone: Callable[[Args, str | None], tuple[Tensor, ...]]
    #: The truth, in plain differentiable PyTorch; precision follows the inputs' dtype.
    formula: Callable[[Args], tuple[Tensor, ...]]
    #: Size of the largest intermediate behind every element of every output and gradient, from fp64
    #: inputs, outputs, cotangents: the unit of the accuracy law's slack.
    scale: Callable[[Args, Sequence[Tensor], Sequence[Tensor]], dict[str, Tensor]]
    #: Same mathematics, another order of the sums: a negative control that must change bits.
    reorder: Callable[[Args], Args]
    #: Rows to append that do not count and must change nothing: (args, rows) -> row-wise arguments.
    padding: Callable[[Args, int], Args]
    #: Other strides and alignments of the same values.
    layouts: Sequence[str]
    lay_out: Callable[[Args, str], Args]
    #: Peak bytes beyond inputs, outputs and gradients: (case, backend, direction) -> bytes.
    memory: Callable[[Case, str, str], int]
    cost: Callable[[dict[str, int], torch.dtype], Cost]
    cases: Sequence[Case]
    #: Cases large enough that a reordered sum must show, and that reach every schedule of the kernels.
    bit_cases: Sequence[Case]
    memory_cases: Sequence[Case]
    bench_cases: Sequence[Case]
    mutants: Sequence[Mutant]
    #: (args) -> args with a live row that breaks a value rule, and that row's flat index; None without one.
    bad_value: Callable[[Args], tuple[Args, int]] | None
    #: Calls launchers with a recorder, on meta tensors: (launch, dtype) -> None.
    record: Callable[[Any, torch.dtype], None]
    #: What users would pick instead: () -> {name: Rival}; imported by the bench only.
    rivals: Callable[[], dict[str, Any]]
