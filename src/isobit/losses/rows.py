"""What all losses do with their rows: bring inputs to one shape, zero masked rows, sum.

A masked row is replaced by zeros on entry: its log-ratio, advantage, KL and entropy are 0, and so is its
term. Values there, NaN included, are gone before an exp could turn the gradient into 0 * inf.
"""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import ContractError, describe
from isobit.kernels.host.difference import difference

Stats = dict[str, Tensor]
INF = float("inf")


class Rows:
    """The rows of one call: their log-probabilities, which of them are live, and the sequence of each."""

    def __init__(
        self,
        loss: str,
        logp: Tensor,
        mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        name: str = "logp",
    ) -> None:
        """`name` is that of the argument in the function `loss`, for errors."""
        self.loss, self.name = loss, name
        if not isinstance(logp, Tensor) or not logp.is_floating_point() or logp.ndim not in (1, 2):
            raise self.error(name, logp, "must be a floating point tensor [n] or [B, T]")
        self.shape, self.device = logp.shape, logp.device
        self.dtype = torch.promote_types(logp.dtype, torch.float32)  # losses are fp32, or fp64 for fp64
        self.live = None if mask is None else self._integers("mask", mask, "a bool or integer") != 0
        self.sequence_ids = sequence_ids
        if sequence_ids is not None:
            self._integers("sequence_ids", sequence_ids, "an integer")
        self.logp = self.differentiable(name, logp)
        self.active = self.zero_masked(torch.ones_like(self.logp.detach()))  # 1 for live rows, else 0

    def error(self, name: str, value: Any, rule: str) -> ContractError:
        return ContractError(f"{self.loss}({name}: {describe(value)}): {rule}")

    def _with_rows(self, name: str, value: Tensor) -> Tensor:
        if value.device != self.device:
            raise self.error(name, value, f"is on {value.device} but {self.name} is on {self.device}")
        return value

    # Inputs

    def differentiable(self, name: str, value: Tensor | None, per_sequence: bool = False) -> Tensor:
        """An input in the shape and dtype of the rows, 0 where they are masked; some may be one per
        sequence."""
        if isinstance(value, Tensor):
            of_rows: Tensor | None = self._with_rows(name, value).to(self.dtype)
            if value.shape != self.shape:
                of_rows = self._repeated(value.to(self.dtype)) if per_sequence else None
            if of_rows is not None:
                return self.zero_masked(of_rows)
        rule = f"must be a tensor {list(self.shape)}"
        if per_sequence and len(self.shape) > 1:
            rule += f" or {list(self.shape[:-1])}"
        elif per_sequence:
            rule += ", or one per sequence with sequence_ids"
        raise self.error(name, value, f"{rule}, as the rows are {list(self.shape)}")

    def _repeated(self, value: Tensor) -> Tensor | None:
        """The entry of its sequence at every row; None for a shape that cannot be one per sequence. How many
        packed sequences there are is not read back: entries that are too many or too few become NaN."""
        if len(self.shape) > 1:
            return value.unsqueeze(-1).expand(self.shape) if value.shape == self.shape[:-1] else None
        if self.sequence_ids is None or value.ndim != 1 or not 1 <= len(value) <= self.shape[0]:
            return None
        first, number = self._sequences()
        entries = value[number.clamp(max=len(value) - 1)]
        return torch.where(first.sum() == len(value), entries, float("nan"))

    def constant(self, name: str, value: Tensor | None, per_sequence: bool = False) -> Tensor:
        return self.differentiable(name, value.detach() if isinstance(value, Tensor) else value, per_sequence)

    def log_ratio(self, old_logp: Tensor | None) -> Tensor:
        """logp - old_logp; without old_logp it is 0, with the gradient of logp."""
        old = self.logp.detach() if old_logp is None else self.constant("old_logp", old_logp)
        return difference(self.logp, old)

    def number(self, name: str, value: Any, least: float, most: float = INF) -> float:
        # Not a tensor: it decides whether there is a term at all, and reading a tensor would wait for the
        # GPU. Not a bool either: True would be taken for 1.
        if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
            bounds = f" from {least:g} to {most:g}" if most < INF else f" not below {least:g}"
            raise self.error(name, value, f"must be a number{bounds if least > -INF else ''}")
        return float(value)

    def finite(self, name: str, value: Any, least: float = -INF) -> float:
        """A number that multiplies or divides: an infinite one would make terms of 0 NaN."""
        if not math.isfinite(number := self.number(name, value, least)):
            raise self.error(name, value, "must be finite")
        return number

    def _integers(self, name: str, value: Tensor, kind: str) -> Tensor:
        given = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        if not given or value.shape != self.shape:
            raise self.error(name, value, f"must be {kind} tensor {list(self.shape)}")
        return self._with_rows(name, value)

    # Rows and sequences

    def zero_masked(self, x: Tensor) -> Tensor:
        """x, with 0 for masked rows; no gradient goes there."""
        return x if self.live is None else torch.where(self.live, x, 0.0)

    def _sequences(self) -> tuple[Tensor, Tensor]:
        """(which of the rows begin a sequence, the index of the sequence of each among those of these rows),
        of flattened rows."""
        assert self.sequence_ids is not None
        ids = self.sequence_ids.flatten()
        first = torch.ones_like(ids, dtype=torch.bool)
        first[1:] = ids[1:] != ids[:-1]
        return first, first.cumsum(0) - 1

    def sequence_sum(self, x: Tensor) -> Tensor:
        """The sum of x over the sequence of each row, at every row."""
        if self.sequence_ids is None:
            if len(self.shape) == 1:
                rule = "whole sequences are needed: rows [B, T], or sequence_ids"
                raise self.error(self.name, self.logp, rule)
            return x.sum(-1, keepdim=True).expand(self.shape)
        _, number = self._sequences()
        # There are at most as many sequences as rows, so nothing has to be read back to know their number.
        # Segment sums, and not index_add, whose order varies on a GPU.
        begin = torch.searchsorted(number, torch.arange(len(number) + 1, device=number.device))
        sums = torch.segment_reduce(x.flatten(), "sum", offsets=begin, unsafe=True)
        return sums[number].view(self.shape)

    def lengths(self) -> Tensor:
        """How many rows of its sequence are live, at every row; 1 if none is."""
        return self.sequence_sum(self.active).clamp(min=1.0)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the live rows, for stats."""
        if self.live is None:
            return x.detach().sum(dtype=self.dtype)
        return (x.detach() * self.active).sum()

    def normalized(self, x: Tensor, normalizer: float | Tensor) -> Tensor:
        """The sum of all rows divided by the normalizer. A normalizer of 0 is right if no row is live: the
        sum is 0 too, and so is the result. If a row is live it is a mistake of the caller, and the loss is
        not finite."""
        total = x.sum()
        if isinstance(normalizer, Tensor):
            if normalizer.ndim != 0:
                raise self.error("normalizer", normalizer, "must be a number or a tensor without dimensions")
            if normalizer.device.type != "cpu":  # one on the CPU may divide rows that are elsewhere
                self._with_rows("normalizer", normalizer)
            divisor = normalizer.detach().to(self.dtype)
        elif value := self.finite("normalizer", normalizer, 0):
            return total / value
        else:
            divisor = torch.zeros_like(total)
        return total / torch.where((divisor == 0) & (self.active.sum() == 0), 1.0, divisor)
