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

from isobit.drift.readings import RAW, Read, read_as

#: Caches: the one that the model makes, which drops keys behind a window if its attention has one; one that
#: keeps all keys; one of a fixed size.
CACHES = OWN, DYNAMIC, STATIC = "own", "dynamic", "static"


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
    def targets(self) -> slice:
        """The positions of tokens whose log-probabilities its logits are."""
        return slice(self.first + 1, self.first + self.count + 1)

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
    """Calls in their order. `cache` is one of `CACHES`, or "" for none."""

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
        cache = self._cache(plan)
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

    def logps(self, plans: Sequence[Plan], sequences: Sequence[Tensor]) -> list[Tensor]:
        """For each sequence, fp32 [T]: the log-probability of each token given those before it. NaN where
        nothing was computed or measured, and for the first one."""
        (logps,) = self.read(plans, sequences, [read_as(RAW)])
        return logps

    def read(
        self, plans: Sequence[Plan], sequences: Sequence[Tensor], reads: Sequence[Read]
    ) -> list[list[Tensor]]:
        """The same in several readings of the logits of one forward: for each, a list as of `logps`."""
        made = [_nothing_yet(sequences) for _ in reads]
        for plan in plans:
            self._fill(made, plan, sequences, reads)
        return made

    def twice(self, plans: Sequence[Plan], sequences: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """As `logps`, and once more: each plan right after itself, so that a model that changes with every
        second call is seen."""
        first, again = _nothing_yet(sequences), _nothing_yet(sequences)
        for plan in plans:
            for made in (first, again):
                self._fill([made], plan, sequences, [read_as(RAW)])
        return first, again

    def _fill(
        self, made: list[list[Tensor]], plan: Plan, sequences: Sequence[Tensor], reads: Sequence[Read]
    ) -> None:
        for call, logits in self.logits(plan):
            for piece in call.pieces:
                ids = sequences[piece.sequence]
                targets = ids[piece.targets]
                if not piece.measured or not len(targets):
                    continue
                rows = logits[piece.line, piece.columns][: len(targets)].float()
                here = slice(piece.first + 1, piece.first + 1 + len(targets))
                for logps, read in zip(made, reads, strict=True):
                    logps[piece.sequence][here] = read(rows, targets, piece.sequence).cpu()

    def _cache(self, plan: Plan) -> Any:
        """None for the one that the model makes."""
        if plan.cache == DYNAMIC:
            return import_module("transformers").DynamicCache()
        if plan.cache == STATIC:
            columns = max(call.past + call.ids.shape[1] for call in plan.calls)
            return import_module("transformers").StaticCache(config=self.model.config, max_cache_len=columns)
        return None

    def _autocast(self, plan: Plan) -> contextlib.AbstractContextManager[Any]:
        if plan.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=plan.autocast)


def measured(plans: Sequence[Plan], sequences: Sequence[Tensor]) -> list[Tensor]:
    """For each sequence, [T] whether plans compute the log-probability of a token and measure it. Not told
    from numbers: a model may compute NaN."""
    made = [torch.zeros(len(ids), dtype=torch.bool) for ids in sequences]
    for plan in plans:
        for call in plan.calls:
            for piece in call.pieces:
                if piece.measured:
                    made[piece.sequence][piece.targets] = True
    return made


def _nothing_yet(sequences: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full((len(ids),), torch.nan) for ids in sequences]
