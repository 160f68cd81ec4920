"""What `isobit.warmup` rehearses for a model of transformers, and how it shows its progress.

A rehearsal generates two tokens after a prompt of each length, with `generate` itself: so prefill, decoding,
masks and caches are those of a rollout. Prompts of one batch are rehearsed without padding and with it. A
training step is `token_logps` and its gradients.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isobit.frame.contract import ContractError
from isobit.frame.rehearsed import Warmed
from isobit.integrations.hf.adapters import base_of
from isobit.integrations.hf.logps import token_logps
from isobit.integrations.hf.trial import evaluating

Sizes = int | Sequence[int]


def warmup(
    model_or_calls: Any | Callable[[], object] | Sequence[Callable[[], object]],
    *,
    batch: Sizes = 1,
    lengths: Sizes = (),
    train: bool = False,
    processes: int | None = None,
    quiet: bool = False,
) -> Warmed:
    """Compile the kernels that calls will need, in several processes, before the first call waits for them.

    The calls are rehearsed with their real sizes: nothing is computed, and every launch is noted. What is
    not compiled yet is then compiled in parallel. It stays in Triton's cache on disk, so the next process
    compiles nothing. On a CPU this does nothing.

    Args:
        model_or_calls: a causal LM of transformers, mostly under `zero_drift`; or a function without
            arguments that makes calls of isobit, or a list of them. A function is called once, its results
            are whatever was in memory, and it must change nothing that is needed: no step of an optimizer.
            No other thread may call isobit meanwhile.
        batch: how many sequences the model will get at a time; several numbers if that varies.
        lengths: tokens of prompts. Kernels differ between a few tokens and thousands, so give the shortest,
            the longest, and one that is usual. Steps of decoding that follow are included, whatever the
            length they reach.
        train: also what a training step with `isobit.integrations.hf.token_logps` needs.
        processes: how many at most; by default one per core, up to eight.
        quiet: show no progress on standard error.

    Returns:
        How many `kernels` were compiled, in how many `processes`, in how many `seconds`.

    Example:
        >>> import torch, isobit
        >>> logits, ids = torch.randn(4, 1000), torch.tensor([1, 2, 3, 4])
        >>> warmed = isobit.warmup(lambda: isobit.logp(logits, ids))
        >>> warmed.kernels  # on a CPU there is nothing to compile
        0
    """
    if isinstance(model_or_calls, nn.Module):
        return of_model(model_or_calls, batch, lengths, train, processes, quiet)
    calls = list(model_or_calls) if isinstance(model_or_calls, Sequence) else [model_or_calls]
    if not calls or not all(map(callable, calls)):
        raise ContractError("warmup(model_or_calls): must be a model, a function, or a list of functions")
    if train or _several(lengths):
        raise ContractError("warmup(lengths, train): they are for a model; a function has its own sizes")
    return Warmed(0, 0, 0.0) if not torch.cuda.is_available() else _shown(calls, processes, quiet)


def of_model(
    model: nn.Module, batch: Sizes, lengths: Sizes, train: bool, processes: int | None, quiet: bool,
    *more: Callable[[], object],
) -> Warmed:  # fmt: skip
    """Rehearse a model in these sizes, after `more` calls."""
    if not hasattr(model, "generate"):
        raise ContractError(
            f"warmup(model: {type(model).__name__}): it has no generate; give a function that calls it"
        )
    sizes = [(B, T) for B in _several(batch) for T in _several(lengths)]
    if not sizes or min(min(size) for size in sizes) < 1:
        raise ContractError("warmup(batch, lengths): numbers of sequences, and of tokens of a prompt")
    if _device(model).type == "cpu":
        return Warmed(0, 0, 0.0)
    calls: list[Callable[[], object]] = [*more, *(partial(_generates, model, B, T) for B, T in sizes)]
    calls += [partial(_trains, model, B, T) for B, T in sizes] if train else []
    return _shown(calls, processes, quiet)


def of_calls(model: nn.Module, *calls: Callable[[], object]) -> None:
    """Of a model that is not ready for its own calls."""
    if _device(model).type != "cpu":
        _shown(calls, None, True)


def _several(sizes: Sizes) -> list[int]:
    return [sizes] if isinstance(sizes, int) else list(sizes)


def _device(model: Any) -> torch.device:
    device: torch.device = base_of(model).get_input_embeddings().weight.device
    return device


# Calls of a model


@contextmanager
def _as_before(model: Any) -> Iterator[None]:
    """Random numbers that a rehearsal takes are there again after it."""
    device = _device(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _batches(model: Any, B: int, T: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(token ids, mask), without padding and with it on the left, as prompts have it."""
    ids = torch.ones(B, T, dtype=torch.int64, device=_device(model))
    yield ids, torch.ones_like(ids)
    if B > 1 and T > 1:
        mask = torch.ones_like(ids)
        mask[1:, : T // 2] = 0
        yield ids, mask


def _generates(model: Any, B: int, T: int) -> None:
    """Two tokens after a prompt: prefill, and a step with a cache. Logits are not computed, so they are not
    sampled from."""
    with _as_before(model), evaluating(model), torch.no_grad():
        for ids, mask in _batches(model, B, T):
            model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=2, min_new_tokens=2, do_sample=False,
                temperature=None, top_p=None, top_k=None,
            )  # fmt: skip


def _trains(model: Any, B: int, T: int) -> None:
    """Log-probabilities and all gradients; `grad` of parameters stays as it is."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    with _as_before(model), torch.enable_grad():
        for ids, mask in _batches(model, B, max(T, 2)):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logp = token_logps(model, ids, mask, model_inputs={"position_ids": positions})
            torch.autograd.grad(logp.sum(), wanted, allow_unused=True)


# Progress


def _shown(calls: Sequence[Callable[[], object]], processes: int | None, quiet: bool) -> Warmed:
    from isobit.frame import rehearsal  # it imports Triton

    shown = _Progress(quiet)
    done = rehearsal.warm(calls, processes, shown)
    shown.end(done)
    return done


class _Progress:
    """One line on standard error: on a terminal it is rewritten, elsewhere it is written at the end."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.live, self.begin = quiet, sys.stderr.isatty(), time.monotonic()

    def __call__(self, done: int, count: int) -> None:
        if self.live and not self.quiet:
            seconds = time.monotonic() - self.begin
            print(f"\risobit: {done} of {count} kernels compiled, {seconds:.1f} s", end="", file=sys.stderr)

    def end(self, done: Warmed) -> None:
        if done.kernels and not self.quiet:
            print(f"{chr(13) * self.live}isobit: compiled {done}", file=sys.stderr, flush=True)
