"""What calls of ops are made of, for the stub of libcuda: tensors that are to be made, and a call of an op.

Nothing is computed there, so what tensors hold does not matter. `Call.args(shift)` makes the same call with
tensors of its own, each of them `shift` elements into its memory: calls of one kind at other addresses.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isobit.frame.op import CONTROLS, OPS, Op
from stub_cuda import STREAM, Launch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64, BOOL = torch.int32, torch.int64, torch.bool


@dataclass(frozen=True)
class Shape:
    """A tensor that is to be made."""

    sizes: tuple[int, ...]
    dtype: torch.dtype = BF16
    expanded: bool = False  # one number for all, as the gradient of a sum is

    def make(self, shift: int) -> Tensor:
        if self.expanded:
            return torch.ones(shift + 1, dtype=self.dtype)[shift].expand(self.sizes)
        numel = torch.Size(self.sizes).numel()
        memory = torch.ones(shift + numel, dtype=self.dtype)  # a token, a temperature, a row that counts
        return memory[shift:].view(self.sizes)


def shape(*sizes: int, dtype: torch.dtype = BF16) -> Shape:
    return Shape(sizes, dtype)


@dataclass(frozen=True)
class Call:
    """An op, the backend that is to serve, and the arguments that are not their defaults."""

    op: str
    backend: str
    given: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Call":
        return Call(self.op, self.backend, {**self.given, **changes})

    def on(self, backend: str) -> "Call":
        return Call(self.op, backend, self.given)

    @property
    def declared(self) -> Op:
        return OPS[self.op]

    def run(self, **args: Any) -> Any:
        """The backend's own function."""
        return self.declared.backend_named(self.backend).run(**args)

    def named(self, shift: int = 0) -> dict[str, Any]:
        """What a caller of the op passes."""
        return {k: v.make(shift) if isinstance(v, Shape) else v for k, v in self.given.items()}

    def args(self, shift: int = 0) -> dict[str, Any]:
        return self.bound(self.named(shift))

    def bound(self, named: dict[str, Any]) -> dict[str, Any]:
        """What a backend gets."""
        values = dict(zip(self.declared.contract.names, self.declared.bind(named), strict=True))
        return {k: v for k, v in values.items() if k not in {p.name for p in CONTROLS}}


def tensors_of(args: dict[str, Any]) -> list[Tensor]:
    return [v for v in args.values() if isinstance(v, Tensor)]


def as_launch(outputs: Any) -> Launch:
    """Outputs as a launch with these arguments: so their addresses can be compared like those of kernels."""
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    params = (b"" if t is None else t.data_ptr().to_bytes(8, "little") for t in several)
    return Launch("outputs", 0, (1, 1, 1), (1, 1, 1), 0, STREAM, (), tuple(params))
