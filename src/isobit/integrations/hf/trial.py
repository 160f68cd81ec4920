"""Do the bits of a token depend on the rest of the batch? Tests a model, and each class of module in it.

A batch of three sequences, padded on the left, goes through the model. Then each sequence alone, then the
batch again in chunks with a cache, the last token by itself: the logits of a token must have the same bits in
all of them. Modules that are not isobit's get a part of the batch's inputs alone, forward and backward.

Passing is not a proof. The test uses the sizes at which eager kernels most often change their algorithm: one
row, less than sixteen, more.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Lengths of the three sequences. The second chunk of the prefill begins at `CUT`, in the padded batch.
LENGTHS, CUT = (17, 9, 3), 10

#: The part of the batch that a module gets alone: (sequences, positions).
Part = tuple[slice, slice]
ALL: Part = (slice(None), slice(None))
PARTS: tuple[Part, ...] = (
    (slice(0, 1), slice(None)), (slice(1, 2), slice(-1, None)), (slice(0, 2), slice(-5, None))
)  # fmt: skip


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements have different bits."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(words) != b.contiguous().view(words)).sum())


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [B, T]
    mask: Tensor
    positions: Tensor

    @classmethod
    def of(cls, vocab: int, device: torch.device) -> "Batch":
        B, T = len(LENGTHS), max(LENGTHS)
        ids = torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(0)).to(device)
        mask = torch.arange(T, device=device) >= T - torch.tensor(LENGTHS, device=device)[:, None]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return cls(ids, mask.long(), positions)

    def inputs(self, end: int | None = None, start: int = 0) -> dict[str, Tensor]:
        """Inputs of a forward of the columns from `start` on."""
        here = slice(start, end)
        return {"input_ids": self.ids[:, here], "attention_mask": self.mask[:, :end],
                "position_ids": self.positions[:, here]}  # fmt: skip


@dataclass
class Call:
    """The inputs of a module in the batch."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


#: The class of a module, and the shapes of its parameters: a norm of heads and one of rows are tested
#: separately.
ModuleClass = tuple[type, tuple[torch.Size, ...]]


def class_of_module(module: nn.Module) -> ModuleClass:
    return type(module), tuple(p.shape for p in module.parameters())


@contextmanager
def calls_of(model: nn.Module, classes: Collection[ModuleClass]) -> Iterator[dict[ModuleClass, Call]]:
    """The first call of a module of each of these classes in this block."""
    calls: dict[ModuleClass, Call] = {}

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(class_of_module(module), Call(module, args, kwargs))

    modules = [m for m in model.modules() if class_of_module(m) in classes]
    hooks = [m.register_forward_hook(seen, with_kwargs=True) for m in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode, and restores the mode of each module."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def of_model(
    model: Any, vocab: int, classes: Collection[ModuleClass]
) -> tuple[dict[str, int], dict[ModuleClass, Call]]:
    """({what was done: how many logits have different bits}, first calls of these classes in the batch)."""
    batch = Batch.of(vocab, model.get_input_embeddings().weight.device)
    T = batch.ids.shape[1]
    tokens = batch.mask.bool()
    with evaluating(model):
        with calls_of(model, classes) as calls:
            whole = model(**batch.inputs(), use_cache=False).logits
        alone = torch.zeros_like(whole)
        for b, length in enumerate(LENGTHS):
            alone[b, T - length :] = model(batch.ids[b : b + 1, T - length :], use_cache=False).logits[0]
        pieces, cache = [], None
        for start, end in ((0, CUT), (CUT, T - 1), (T - 1, T)):
            made = model(**batch.inputs(end, start), use_cache=True, past_key_values=cache)
            cache = made.past_key_values
            pieces.append(made.logits)
    return {
        "alone": differing(whole[tokens], alone[tokens]),
        "in pieces, with a cache": differing(alone[tokens], torch.cat(pieces, 1)[tokens]),
    }, calls


def of_module(call: Call) -> str | None:
    """What changes if the module gets a part of its inputs alone, or None."""
    for part in PARTS:
        whole, alone = _run(call, ALL, part), _run(call, part, ALL)
        for what, in_batch, by_itself in zip(("output", "gradient"), whole, alone, strict=True):
            for a, b in zip(in_batch, by_itself, strict=True):
                count = differing(a, b)
                if count:
                    return f"{count} of {a.numel()} elements of its {what} have other bits alone"
    return None


def _run(call: Call, given: Part, returned: Part) -> tuple[list[Tensor], list[Tensor]]:
    """(outputs, gradients of inputs) of the tokens `returned`, when the module gets the tokens `given`. Only
    tensors with one entry per token are used."""
    leaves: list[Tensor] = []

    def take(t: Tensor) -> Tensor:
        if t.ndim == 3 and t.shape[1:] == (len(LENGTHS), max(LENGTHS)):  # positions of several kinds
            return t.detach()[:, given[0], given[1]].clone()
        if not _of_tokens(t):
            return t.detach()
        t = t.detach()[given].clone()
        if t.is_floating_point():
            leaves.append(t.requires_grad_())
        return t

    wave = torch.sin(torch.arange(len(LENGTHS) * max(LENGTHS)) * 0.7).view(len(LENGTHS), -1)[given]
    with torch.enable_grad():
        made = call.module(*_mapped(call.args, take), **_mapped(call.kwargs, take))
        outputs = [t for t in _tensors(made) if t.shape[:2] == wave.shape]
        roots = [t for t in outputs if t.requires_grad] if leaves else []
        gradients: list[Tensor | None] = []
        if roots:
            # Not ones, which would hide what depends on the direction of a gradient.
            each = wave.to(roots[0].device)
            douts = [each.reshape(*wave.shape, *[1] * (t.ndim - 2)).expand_as(t).to(t.dtype) for t in roots]
            gradients = list(torch.autograd.grad(roots, leaves, douts, allow_unused=True))
    return [t.detach()[returned] for t in outputs], [g[returned] for g in gradients if g is not None]


def _of_tokens(t: Tensor) -> bool:
    return t.shape[:2] == (len(LENGTHS), max(LENGTHS))


def _tensors(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    _mapped(tree, lambda t: tensors.append(t) or t)  # type: ignore[func-returns-value]
    return tensors


def _mapped(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return tuple(_mapped(x, function) for x in tree)
    if isinstance(tree, dict):
        return {name: _mapped(x, function) for name, x in tree.items()}
    return tree
