"""The forwards of a model that compute given tokens, and where each token is in them.

A `Plan` is a list of calls that may share a cache. A call computes a batch [B, T]; its pieces say which
sequence's tokens are in which line and columns. Everything that compares two plans goes by sequence and
position, so a token is found again however it is computed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.ops.logp import logp


@dataclass(frozen=True)
class Piece:
    """Tokens [first, first + count) of a sequence, in one line of a batch from `column` on. The logits of
    tokens that are not `measured` are only there for the tokens after them."""

    sequence: int
    line: int
    column: int
    first: int
    count: int
    measured: bool = True

    @property
    def columns(self) -> slice:
        return slice(self.column, self.column + self.count)

    @property
    def positions(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True)
class Call:
    """One forward. `past` is the number of columns that the cache has before it."""

    ids: Tensor  # [B, T]
    pieces: tuple[Piece, ...]
    mask: Tensor | None = None  # [B, past + T]
    positions: Tensor | None = None  # [B, T]
    past: int = 0

    def inputs(self) -> dict[str, Tensor]:
        named = {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": self.positions}
        return {name: x for name, x in named.items() if x is not None}


@dataclass(frozen=True)
class Plan:
    """Calls in their order. `cache` is "", "dynamic" or "static"."""

    calls: tuple[Call, ...]
    cache: str = ""
    autocast: torch.dtype | None = None

    @property
    def sequences(self) -> set[int]:
        return {piece.sequence for call in self.calls for piece in call.pieces}


@dataclass
class Run:
    """Runs plans on a model. `before` is called before each forward."""

    model: Any
    device: torch.device
    before: Callable[[Call], None] = field(default=lambda call: None)

    @torch.no_grad()
    def logits(self, plan: Plan) -> Iterator[tuple[Call, Tensor]]:
        cache = self._static_cache(plan) if plan.cache == "static" else None
        for call in plan.calls:
            self.before(call)
            options: dict[str, Any] = {"use_cache": bool(plan.cache)}
            if plan.cache:
                options["past_key_values"] = cache
            with self._autocast(plan):
                made = self.model(**call.inputs(), **options)
            if plan.cache:
                cache = made.past_key_values
            yield call, made.logits

    def logps(
        self, plans: Sequence[Plan], sequences: Sequence[Tensor], temperature: float = 1.0
    ) -> list[Tensor]:
        """For each sequence, fp32 [T]: the log-probability of each token given those before it. NaN where
        nothing was computed or measured, and for the first one."""
        logps = [torch.full((len(ids),), torch.nan) for ids in sequences]
        for plan in plans:
            for call, logits in self.logits(plan):
                for piece in call.pieces:
                    ids = sequences[piece.sequence]
                    targets = ids[piece.first + 1 : piece.first + piece.count + 1]
                    if not piece.measured or not len(targets):
                        continue
                    rows = logits[piece.line, piece.columns][: len(targets)]
                    here = slice(piece.first + 1, piece.first + 1 + len(targets))
                    logps[piece.sequence][here] = _logp(rows.float(), targets, temperature).cpu()
        return logps

    def _static_cache(self, plan: Plan) -> Any:
        columns = max(call.past + call.ids.shape[1] for call in plan.calls)
        return import_module("transformers").StaticCache(config=self.model.config, max_cache_len=columns)

    def _autocast(self, plan: Plan) -> contextlib.AbstractContextManager[Any]:
        if plan.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=plan.autocast)


def _logp(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[N]. The kernels of a GPU give a row the same bits in any number of rows. On a CPU nothing promises
    that, so each row is computed alone."""
    if logits.is_cuda:
        return logp(logits, targets, temperature=temperature)
    scaled = logits / temperature
    return torch.stack([z[token] - z.logsumexp(0) for z, token in zip(scaled, targets, strict=True)])
