"""Does a causal LM decode with the bits of its training forward? The suite `zero_drift` counts it before it
times anything.

Tokens: `generate` decodes prompts of different lengths, padded on the left, in the ways of `RUNS`. Then every
sequence goes through the model alone, without padding and without a cache, in one forward as in training. The
log-probabilities of the decoded tokens must have the same bits in both.

Gradients: of the embeddings, and of the hidden states after every layer, in a padded batch and alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from isobit.ops.logp.op import logp
from isobit.spec.compare import differing


@dataclass(frozen=True)
class Run:
    """Lengths of prompts, how many tokens follow, and how they are decoded. `chunk` is the size of a chunk of
    the prefill."""

    lengths: tuple[int, ...]
    new: int
    sample: bool = False
    static: bool = False  # a static cache, else a dynamic one
    chunk: int | None = None


#: A batch has the first of these.
LENGTHS = (200, 131, 17, 64, 1, 183, 90, 33)

#: Greedy and sampled, with both caches, in batches of 1, 3 and 8. Half of them are prefilled in chunks: both
#: ways with both caches.
SHORT = tuple(
    Run(LENGTHS[:batch], 8, sample, static, chunk=64 if sample is static else None)
    for batch, sample, static in product((1, 3, 8), (False, True), (False, True))
)

#: Keys are split over programs in decoding, into segments of 1024, if there are more than one segment. While
#: these decode, sequences go beyond 1024 and 2048 keys, and a cache too: the kernel changes in between.
LONG = (
    Run((1018,), 12),
    Run((2043, 1019, 300), 12, chunk=512),
    Run((2041, 1500, 1021), 12, sample=True, static=True),
)

RUNS = (*SHORT, *LONG)

#: Lengths of a padded batch for gradients.
TRAINED = (1100, 150, 17)

#: For tiny models on a CPU.
FEW_RUNS = (Run((9, 2, 5), 3, chunk=4), Run((2, 5), 3, sample=True, static=True, chunk=2))
FEW_TRAINED = (9, 2, 5)


# Tokens


@dataclass(frozen=True)
class Decoded:
    """A sequence without padding, how many of its tokens are the prompt, and the log-probabilities of the
    others: in decoding, and in one forward."""

    tokens: Tensor
    prompt: int
    decoded: Tensor
    trained: Tensor


@torch.no_grad()
def decoded_by(model: Any, runs: Sequence[Run], compiles: bool = True) -> list[Decoded]:
    """Every sequence of every run. Without `compiles`, `generate` does not compile steps with a static cache:
    that takes minutes."""
    return [
        one for run in runs for one in _decoded(model, run, {} if compiles else {"disable_compile": True})
    ]


def _decoded(model: Any, run: Run, more: dict[str, Any]) -> list[Decoded]:
    ids, mask = padded(model, run.lengths)
    T = ids.shape[1]
    with torch.random.fork_rng([ids.device] if ids.is_cuda else []):
        torch.manual_seed(0)
        generated = model.generate(
            ids, attention_mask=mask, max_new_tokens=run.new, min_new_tokens=run.new, do_sample=run.sample,
            use_cache=True, cache_implementation="static" if run.static else None,
            prefill_chunk_size=run.chunk, return_dict_in_generate=True, output_logits=True, pad_token_id=0,
            **more,
        )  # fmt: skip
    steps = torch.stack(generated.logits, 1).float()
    sequences = [
        (row, generated.sequences[row, T - length :], length) for row, length in enumerate(run.lengths)
    ]
    return [
        Decoded(tokens, length, logp(steps[row], tokens[length:]), trained_logp(model, tokens, length))
        for row, tokens, length in sequences
    ]


@torch.no_grad()
def trained_logp(model: Any, tokens: Tensor, prompt: int) -> Tensor:
    """Of the tokens behind the prompt, in one forward of this sequence alone."""
    return logp(model(tokens[None], use_cache=False).logits[0, prompt - 1 : -1].float(), tokens[prompt:])


def padded(model: Any, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(ids, mask) of random prompts of these lengths, padded on the left."""
    device, T = model.lm_head.weight.device, max(lengths)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (len(lengths), T), generator=gen).to(device)
    return ids, (torch.arange(T) >= T - torch.tensor(lengths)[:, None]).long().to(device)


# Gradients


def gradients_that_differ(model: Any, lengths: Sequence[int]) -> tuple[int, int]:
    """(how many elements of gradients have different bits in a batch of these lengths than alone, of how
    many)."""
    ids, mask = padded(model, lengths)
    whole = _gradients(model, ids, mask)
    count = total = 0
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, -length:]
        for in_batch, alone in zip(whole, _gradients(model, own, torch.ones_like(own)), strict=True):
            count += int(differing(in_batch[row, -length:], alone[0]).sum())
            total += alone.numel()
    return count, total


def _gradients(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Of the embeddings and the states after each layer, [B, T, D]. The loss is a sum over tokens, each with
    a weight of its own; the first of a sequence, and padding, have none."""
    states = [model.get_input_embeddings()(ids).detach().requires_grad_()]

    def keep(module: Any, args: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    try:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        logits = model(inputs_embeds=states[0], **given).logits
    finally:
        for hook in hooks:
            hook.remove()
    weights = torch.sin(ids[:, 1:].float()) * mask[:, 1:] * mask[:, :-1]
    loss = (logp(logits[:, :-1].float(), ids[:, 1:]) * weights).sum()
    return torch.autograd.grad(loss, states)
