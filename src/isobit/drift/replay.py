"""How much a module adds by itself: it gets the inputs of the reference, in the shapes of the other plan.

A module behind others mostly gets inputs that differ already. So its rows of this sequence are replaced by
those of the reference, and it is called again: what its outputs differ by then, it has added, and the rest it
had inherited. This needs tensors. They are kept for a few layers at a time, and the plans run once more for
each group.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.drift import bits
from isobit.drift.calls import Plan, Run
from isobit.drift.record import Arguments, Key, Recording, Trace, Watcher, tensors, token_rows
from isobit.drift.where import Found, Where

#: Bytes of tensors that are kept at a time.
MEMORY = 256 << 20

#: Kinds whose inputs are numbers that change. Others get ids and positions.
REPLAYED = ("linear", "router", "norm", "layer norm", "quantised", "activation", "attention", "other")


class Kept(Watcher):
    """Inputs and outputs of some modules, for the tokens of a sequence. All of them are in one forward."""

    def __init__(self, keys: set[Key]) -> None:
        self.keys = keys
        self.inputs: dict[Key, list[Tensor]] = {}
        self.outputs: dict[Key, list[Tensor]] = {}

    def after(self, key: Key, kind: str, args: Arguments, output: Any, again: Callable[..., Any]) -> None:
        if key in self.keys:
            self.outputs[key] = [x.clone() for x in _outputs(kind, args, output)]
            self.inputs[key] = [x.clone() for x in _inputs(kind, args)]


class Replayed(Watcher):
    """Calls modules again with kept inputs, and notes what differs in `by_key`."""

    def __init__(self, kept: Kept, by_key: dict[Key, Found]) -> None:
        self.kept, self.by_key = kept, by_key

    def after(self, key: Key, kind: str, args: Arguments, output: Any, again: Callable[..., Any]) -> None:
        if key not in self.kept.inputs:
            return
        given = _replaced(kind, args, self.kept.inputs[key])
        made = _outputs(kind, args, again(*given.args, **given.kwargs))
        one = self.by_key[key]
        ran = _outputs(kind, args, output)
        for now, before, expected in zip(made, ran, self.kept.outputs[key], strict=True):
            reference = expected[args.piece.positions]
            scale = expected.abs().max().double().item() or 1.0
            one.added = max(one.added or 0.0, _largest(now - reference) / scale)
            one.differs = max(one.differs or 0.0, _largest(before - reference) / scale)
            differ = bits.of_rows(now) != bits.of_rows(reference)
            at = (differ.nonzero()[:, 0] + args.piece.first).tolist()
            one.adds_replayed = sorted({*one.adds_replayed, *at})


def _largest(x: Tensor) -> float:
    return x.abs().max().double().item() if x.numel() else 0.0


def _inputs(kind: str, args: Arguments) -> list[Tensor]:
    """The rows of tokens; of attention, queries, keys and values by position."""
    if kind == "attention":
        return [x[args.piece.line, :, args.piece.columns] for x in args.args[:3]]
    return [rows for _, rows in _token_tensors((args.args, args.kwargs), args)]


def _outputs(kind: str, args: Arguments, output: Any) -> list[Tensor]:
    return [rows for _, rows in _token_tensors(output[:1] if kind == "attention" else output, args)]


def _token_tensors(tree: Any, args: Arguments) -> Iterator[tuple[Tensor, Tensor]]:
    for _, x in tensors(tree):
        rows = token_rows(x, args.call, args.piece) if x.is_floating_point() else None
        if rows is not None:
            yield x, rows


def _replaced(kind: str, args: Arguments, kept: list[Tensor]) -> Arguments:
    """The arguments of this call, with the tokens of the sequence as they were kept."""
    piece = args.piece
    if kind == "attention":
        given = [x.clone() for x in args.args[:3]]
        given[0][piece.line, :, piece.columns] = kept[0][:, piece.positions]
        for x, theirs in zip(given[1:], kept[1:], strict=True):
            column, end = args.keys_from(x.shape[2]), piece.first + piece.count
            oldest = max(0, -column)  # the position of the first key that a cache with a window still has
            x[piece.line, :, column + oldest : column + end] = theirs[:, oldest:end]
        return Arguments((*given, *args.args[3:]), args.kwargs, args.call, piece)
    clones = {}
    for (x, _), theirs in zip(_token_tensors((args.args, args.kwargs), args), kept, strict=True):
        copy = x.clone()
        rows = token_rows(copy, args.call, piece)
        assert rows is not None
        rows.copy_(theirs[piece.positions])
        clones[id(x)] = copy
    return Arguments(_with(args.args, clones), _with(args.kwargs, clones), args.call, piece)


def _with(tree: Any, clones: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return clones.get(id(tree), tree)
    if type(tree) in (list, tuple):
        return type(tree)(_with(x, clones) for x in tree)
    if type(tree) is dict:
        return {name: _with(x, clones) for name, x in tree.items()}
    return tree


def groups(keys: Sequence[Key], trace: Trace, memory: int) -> Iterator[set[Key]]:
    """Modules whose tensors fit into this memory together; at least one at a time."""
    group: set[Key] = set()
    size = 0
    for key in keys:
        size += trace.events[key].bytes
        if group and size > memory:
            yield group
            group, size = set(), trace.events[key].bytes
        group.add(key)
    if group:
        yield group


@torch.no_grad()
def replay(run: Run, reference: Plan, other: Plan, where: Where, trace: Trace, memory: int = MEMORY) -> None:
    """Fill in how much each module adds by itself. `trace` is that of the reference, for sizes."""
    by_key = {key: found for key, found in where.by_key.items()
              if found.kind in REPLAYED and found.outputs_equal < found.tokens}  # fmt: skip
    for group in groups(list(by_key), trace, memory):
        kept = Kept(group)
        for watcher, plan in ((kept, reference), (Replayed(kept, by_key), other)):
            recording = Recording(run.model, where.sequence, watcher)
            with recording.on():
                for _ in Run(run.model, run.device, recording.begin).logits(plan):
                    pass
