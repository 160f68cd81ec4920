"""Ways of computing the same tokens: one axis changes one thing, and has one or more settings.

The reference is `alone`: each sequence in one forward, as a trainer would with one row and no padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobit.drift.calls import DYNAMIC, OWN, STATIC, Call, Piece, Plan


@dataclass(frozen=True)
class Sizes:
    """The sizes that the axes use. `window` is that of the model's attention, if it has one."""

    batches: tuple[int, ...] = (2, 8)
    padding: int = 13
    chunk: int = 16
    micro_batch: int = 4
    window: int | None = None


#: The plans of one setting of an axis, by what it is in words.
Settings = dict[str, list[Plan]]


def alone(sequences: Sequence[Tensor]) -> list[Plan]:
    return [Plan((Call(ids[None], (Piece(i, 0, 0, 0, len(ids)),)),)) for i, ids in enumerate(sequences)]


def batch(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """Next to other sequences of the same length, in different lines; the largest batch a second time, with
    every sequence in another line. Where there are not enough sequences, a batch is filled with tokens of
    others."""
    settings = {f"{size} rows": _batches(sequences, size) for size in sizes.batches}
    largest = max(sizes.batches)
    if largest > 1:
        settings[f"{largest} rows, other places"] = _batches(sequences, largest, largest // 2)
    return settings


def _batches(sequences: Sequence[Tensor], size: int, shift: int = 0) -> list[Plan]:
    by_length: dict[int, list[int]] = {}
    for i, ids in enumerate(sequences):
        by_length.setdefault(len(ids), []).append(i)
    plans: list[Plan] = []
    for T, group in by_length.items():
        for start in range(0, len(group), size):
            here = group[start : start + size]
            others = [_stretched(sequences, here[0] + 1 + n, T) for n in range(size - len(here))]
            lines = [sequences[i] for i in here] + others
            turn = (len(plans) + shift) % size  # another line for each batch
            lines = lines[-turn:] + lines[:-turn] if turn else lines
            pieces = tuple(Piece(i, (n + turn) % size, 0, 0, T) for n, i in enumerate(here))
            plans.append(Plan((Call(torch.stack(lines), pieces),)))
    return plans


def _stretched(sequences: Sequence[Tensor], i: int, length: int) -> Tensor:
    """Sequence i, repeated or cut to a length."""
    ids = sequences[i % len(sequences)]
    return ids.repeat(length // len(ids) + 1)[:length]


def padding(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """With padding on one side, which a mask hides."""
    return {
        f"{sizes.padding} on the {side}": [
            _padded([(i, ids)], len(ids) + sizes.padding, left=side == "left")
            for i, ids in enumerate(sequences)
        ]
        for side in ("left", "right")
    }  # fmt: skip


def _padded(rows: Sequence[tuple[int, Tensor]], width: int, left: bool) -> Plan:
    """Sequences in one batch of this width."""
    ids = rows[0][1].new_zeros(len(rows), width)
    mask, pieces = torch.zeros_like(ids), []
    for line, (i, row) in enumerate(rows):
        piece = Piece(i, line, width - len(row) if left else 0, 0, len(row))
        ids[line, piece.columns], mask[line, piece.columns] = row, 1
        pieces.append(piece)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return Plan((Call(ids, tuple(pieces), mask, positions),))


def micro_batch(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """In the order they came, some at a time, padded to the longest: as trainers do."""
    return {
        f"{sizes.micro_batch} rows, padded on the {side}": [
            _padded(group, max(len(ids) for _, ids in group), left=side == "left")
            for group in _in_order(sequences, sizes.micro_batch)
        ]
        for side in ("left", "right")
    }  # fmt: skip


def _in_order(sequences: Sequence[Tensor], size: int) -> list[list[tuple[int, Tensor]]]:
    """Numbered sequences, some at a time."""
    numbered = list(enumerate(sequences))
    return [numbered[start : start + size] for start in range(0, len(numbered), size)]


def chunk(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """A prefill in chunks, with a cache."""
    plans = []
    for i, ids in enumerate(sequences):
        cuts = list(range(0, len(ids), sizes.chunk))
        plans.append(_cached(i, ids, cuts, [True] * len(cuts), OWN))
    return {f"{sizes.chunk} tokens": plans}


def decode(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """The first half at once, and the rest token by token from a cache: each sequence alone, and several in a
    batch. Only the rest is measured."""
    caches = {"dynamic": OWN, "static": STATIC}
    if sizes.window is not None:  # the model's own cache drops keys that no token reads any more
        caches = {"dynamic": DYNAMIC, "sliding": OWN, "static": STATIC}
    settings = {}
    for name, cache in caches.items():
        plans = []
        for i, ids in enumerate(sequences):
            half = _prefilled(ids)
            cuts = [0, *range(half, len(ids))]
            plans.append(_cached(i, ids, cuts, [False] + [True] * (len(cuts) - 1), cache))
        settings[f"{name} cache"] = plans
    groups = _in_order(sequences, sizes.micro_batch)
    settings[f"{sizes.micro_batch} rows, padded on the left"] = [_decoded_together(group) for group in groups]
    return settings


def _prefilled(ids: Tensor) -> int:
    return max(1, len(ids) // 2)


def _cached(i: int, ids: Tensor, cuts: Sequence[int], measured: Sequence[bool], cache: str) -> Plan:
    calls = []
    for start, end, seen in zip(cuts, [*cuts[1:], len(ids)], measured, strict=True):
        piece = Piece(i, 0, 0, start, end - start, seen)
        positions = torch.arange(start, end, device=ids.device)[None]
        mask = ids.new_ones(1, end)
        calls.append(Call(ids[None, start:end], (piece,), mask, positions, past=start))
    return Plan(tuple(calls), cache)


def _decoded_together(rows: Sequence[tuple[int, Tensor]]) -> Plan:
    """As `generate` does: prompts padded on the left, then a token for each row. A row that has ended goes
    on with token 0, which nothing compares."""
    prompts = [_prefilled(ids) for _, ids in rows]
    width = max(prompts)
    (prefill,) = _padded([(i, ids[:n]) for (i, ids), n in zip(rows, prompts, strict=True)], width, True).calls
    assert prefill.mask is not None
    calls = [replace(prefill, pieces=tuple(replace(piece, measured=False) for piece in prefill.pieces))]
    mask, first = prefill.mask, torch.tensor(prompts, device=prefill.ids.device)[:, None]
    for step in range(max(len(ids) - n for (_, ids), n in zip(rows, prompts, strict=True))):
        tokens, pieces = mask.new_zeros(len(rows), 1), []
        for line, ((i, ids), n) in enumerate(zip(rows, prompts, strict=True)):
            if n + step < len(ids):
                tokens[line, 0] = ids[n + step]
                pieces.append(Piece(i, line, 0, n + step, 1))
        mask = torch.cat((mask, torch.ones_like(tokens)), 1)
        calls.append(Call(tokens, tuple(pieces), mask, first + step, past=width + step))
    return Plan(tuple(calls), OWN)


def length(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """With as many tokens again after it: a causal model must not see them."""
    plans = []
    for i, ids in enumerate(sequences):
        longer = torch.cat((ids, _stretched(sequences, i + 1, len(ids))))
        plans.append(Plan((Call(longer[None], (Piece(i, 0, 0, 0, len(ids)),)),)))
    return {"twice as long": plans}


def packed(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """All in one row, separated by positions that start again at 0."""
    pieces, column = [], 0
    for i, ids in enumerate(sequences):
        pieces.append(Piece(i, 0, column, 0, len(ids)))
        column += len(ids)
    positions = torch.cat([torch.arange(len(ids), device=ids.device) for ids in sequences])
    return {
        "one row": [Plan((Call(torch.cat(list(sequences))[None], tuple(pieces), None, positions[None]),))]
    }


def autocast(sequences: Sequence[Tensor], sizes: Sizes) -> Settings:
    """Alone, under torch.autocast."""
    plans = [Plan(plan.calls, autocast=torch.bfloat16) for plan in alone(sequences)]
    return {"bf16": plans}


AXES: dict[str, Callable[[Sequence[Tensor], Sizes], Settings]] = {
    "batch": batch, "padding": padding, "chunk": chunk, "decode": decode, "length": length,
    "packed": packed, "micro-batch": micro_batch, "autocast": autocast,
}  # fmt: skip

#: Those that are measured unless others are named. The rest change several things at once, or the precision.
DEFAULT = ("batch", "padding", "chunk", "decode", "length")
