"""Which axis of an op's tensors has the rows, read from its contract.

Rows are one dimension, `*` unless the op's proof names another (or several, of the same size). A tensor whose
spec has that dimension has rows on that axis; all others are shared by all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.frame.contract import Spec
from isobit.frame.op import Op
from isobit.spec.proof import Args
from isobit.spec.proofs import proof_of


@dataclass(frozen=True)
class Rows:
    """The axes of rows, counted from the end, by argument and by output; None for an output without rows.
    They are valid once the leading shape is one dimension: see `flat`."""

    args: dict[str, int]
    outputs: tuple[int | None, ...]
    merged: bool

    def flat(self, args: Args) -> Args:
        """The same arguments with one leading dimension instead of any number of them, if these are the
        rows."""
        if not self.merged:
            return args
        return args | {n: _one_leading(args[n], -self.args[n]) for n in self.present(args)}

    def count(self, args: Args) -> int:
        name = self.present(args)[0]
        return int(args[name].shape[self.args[name]])

    def present(self, args: Args) -> list[str]:
        """The arguments with rows that are given as tensors: optional ones may be missing, and one number may
        stand for all rows."""
        return [n for n in self.args if isinstance(args.get(n), Tensor)]

    def select(self, args: Args, index: Tensor) -> Args:
        """These rows, in this order."""
        return args | {n: args[n].index_select(self.args[n], index) for n in self.present(args)}

    def join(self, *parts: Args) -> Args:
        """The rows of several batches in one; other arguments are taken from the first."""
        first = parts[0]
        names = self.present(first)
        return first | {n: torch.cat([p[n] for p in parts], self.args[n]) for n in names}

    def of_outputs(self, outputs: Sequence[Tensor], index: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            o if axis is None else o.index_select(axis, index)
            for o, axis in zip(outputs, self.outputs, strict=True)
        )

    def of_gradients(self, grads: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
        return {name: g.index_select(self.args[name], index) for name, g in grads.items()}

    def spread(self, outputs: Sequence[Tensor], index: Tensor, total: int, fill: float = 0.0) -> list[Tensor]:
        """Rows of outputs at other places among `total` rows, with `fill` elsewhere."""
        result = []
        for o, axis in zip(outputs, self.outputs, strict=True):
            if axis is None:
                result.append(o)
                continue
            shape = list(o.shape)
            shape[axis] = total
            result.append(o.new_full(shape, fill).index_copy(o.ndim + axis, index, o))
        return result


def rows_of(op: Op) -> Rows:
    dims = proof_of(op).rows.split()
    args = {p.name: _axis(p.spec, dims) for p in op.contract.params if p.spec is not None}
    outputs = tuple(_axis(spec, dims) for spec in op.contract.outputs[: len(proof_of(op).outputs)])
    return Rows({n: axis for n, axis in args.items() if axis is not None}, outputs, dims == ["*"])


def _axis(spec: Spec, dims: Sequence[str]) -> int | None:
    return next((spec.dims.index(dim) - len(spec.dims) for dim in dims if dim in spec.dims), None)


def _one_leading(t: Tensor, keep: int) -> Tensor:
    """The last `keep` - 1 dimensions unchanged, all before them flattened into one."""
    lead = t.ndim - (keep - 1)
    return t.flatten(0, lead - 1) if lead else t[None]
