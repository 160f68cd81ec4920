"""What a measurement is of: a model, and sequences of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from isobit.drift.report import Report, Row
from isobit.frame.contract import ContractError, dtype_name

Prompts = Sequence[Sequence[int]] | Sequence[Tensor]

#: Kernels change a logit by less than this, relative to the largest: experts may compute a token in another
#: shape when another one changes. In an encoder with small random weights it may be as little; but its layers
#: say that they are not causal.
NOT_CAUSAL = 0.05

#: Called with a line of text before each step.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A causal LM, and what a report says of it."""

    model: Any
    device: torch.device
    dtype: str
    vocab: int
    window: int | None  # of its attention, if it reads no more keys than that in some layer
    random_weights: bool = False

    def report(self, sequences: int, tokens: int, rows: list[Row], **more: Any) -> Report:
        return Report(
            type(self.model).__name__, str(self.device), self.dtype, self.random_weights, sequences, tokens,
            rows, **more,
        )  # fmt: skip


def subject(model: Any, random_weights: bool = False) -> Subject:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not callable(model):
        raise ContractError(f"drift(model: {type(model).__name__}): not a causal LM: it has no LM head "
                            "(get_output_embeddings)")  # fmt: skip
    weight = head.weight
    vocab = weight.shape[0]
    return Subject(model, weight.device, dtype_name(weight.dtype), vocab, _window(model), random_weights)


@torch.no_grad()
def check_causal(model: Any, sequence: Tensor) -> None:
    """An error if the logits of a token change with the token after it."""
    ids = sequence[:2][None]
    vocab = model.get_output_embeddings().weight.shape[0]
    changed = ids.clone()
    changed[0, 1] = (changed[0, 1] + vocab // 2) % vocab
    a, b = (model(input_ids=each, use_cache=False).logits[0, 0].double() for each in (ids, changed))
    layers = [m.is_causal for m in getattr(model, "modules", list)() if hasattr(m, "is_causal")]
    limit = 0 if layers and not any(layers) else NOT_CAUSAL
    if (b - a).abs().max() > limit * (a - a.mean()).abs().max():
        raise ContractError(
            f"drift(model: {type(model).__name__}): not a causal LM: the logits of a token change with the "
            "token after it"
        )


def _window(model: Any) -> int | None:
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return window if window and (kinds is None or "sliding_attention" in kinds) else None


def made_up(vocab: int, tokens: int = 1024, longest: int = 128) -> list[Tensor]:
    """Random ids, `tokens` in all, in sequences of several lengths."""
    lengths: list[int] = []
    for share in cycle((1.0, 0.5, 0.75, 0.5)):
        here = min(max(2, int(longest * share)), tokens - sum(lengths))
        if here < 2:
            break
        lengths.append(here)
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return list(ids.split(lengths))


def checked_sequences(prompts: Prompts, vocab: int, tokens: int | None, device: torch.device) -> list[Tensor]:
    """Checked, cut to a number of tokens, and on the device."""
    rows, left = [], tokens
    for i, prompt in enumerate(prompts):
        try:
            ids = torch.as_tensor(prompt)
        except (TypeError, ValueError, RuntimeError):
            raise ContractError(f"drift(prompts[{i}]: {prompt!r:.40}): token ids, integers") from None
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ContractError(
                f"drift(prompts[{i}]: {list(ids.shape)}): token ids of one sequence, integers"
            )
        if len(ids) < 2:
            raise ContractError(f"drift(prompts[{i}]): {len(ids)} tokens: a log-probability needs 2")
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            wrong = int(ids.max()) if int(ids.max()) >= vocab else int(ids.min())
            raise ContractError(f"drift(prompts[{i}]): id {wrong} is outside the vocabulary of {vocab}")
        if left is not None:
            ids = ids[: max(0, left)]
            left -= len(ids)
        if len(ids) >= 2:
            rows.append(ids.long().to(device))
    if not rows:
        raise ContractError("drift(prompts): no sequence of at least 2 tokens")
    return rows
