"""The log-probabilities of a rollout engine against the trainer's forward of the same tokens.

The first row of a report is the file as it is. Then the trainer's forward is repeated as the engine's options
say, one option after the other: temperature and top-k or top-p of processed log-probabilities, the dtype of
the weights, an LM head in fp32. Each row is what is left with all options so far, so that the last one is
what no option explains.

Before anything is said about kernels, mistakes that look like drift are tried on that rest: another
temperature, log-probabilities that are shifted by one token, a missing or an additional BOS. One is named if
it explains most of the difference. If none does and the difference is large, the log-probabilities are of
another model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isobit.drift import axes
from isobit.drift.calls import Run
from isobit.drift.metrics import of_finite
from isobit.drift.readings import RAW, Read, Sampling, processed, read_as
from isobit.drift.report import Report, Row
from isobit.drift.rollout_file import Rollout, read_rollouts
from isobit.drift.subject import Progress, Subject, check_causal, checked_sequences, subject
from isobit.frame.contract import ContractError, dtype_name
from isobit.integrations.hf.trial import evaluating

#: Temperatures that are tried, and then more around the best of them.
TEMPERATURES = tuple(n / 10 for n in range(3, 21))
CLOSER = tuple(n / 100 for n in range(-9, 10))

#: A mean difference of log-probabilities that kernels alone do not make, and how much smaller it must be for
#: a mistake to be its cause.
LARGE, EXPLAINED = 0.02, 0.2

#: Mistakes are tried above this mean difference: a temperature of 1.02 changes likely tokens by very little.
TRY = 1e-5

#: This share of tokens may lie outside the trainer's top-k or top-p: at its border numerics decide. With
#: more, the distribution is another one.
OUTSIDE = 0.05

#: Above this mean difference, and with nothing that explains it, the weights are others.
OTHER_WEIGHTS = 0.3


def measure_rollout(
    model: Any,
    rollouts: Path | str | Sequence[Rollout],
    *,
    tokens: int | None = None,
    random_weights: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare the log-probabilities of a rollout with those of a model's forward, each sequence alone.

    Args:
        model: a causal LM, as for `measure`.
        rollouts: the file, see `docs/drift.md`; or what `read_rollouts` made of one.
        tokens: use no more tokens than this, in whole sequences. None uses all of them.
        random_weights: say in the report that the weights are random.
        progress: called with a line of text before each step.

    Returns:
        A report. The first row is the rollout as it is in the file. Each option of the engine that differs
        from the trainer's has a row, and so has a mistake that was recognised: what is left without it.
        `causes` names them.
    """
    say = progress or (lambda line: None)
    every = read_rollouts(Path(rollouts)) if isinstance(rollouts, Path | str) else list(rollouts)
    if not every:
        raise ContractError("drift(rollouts): none")
    given = _limited(every, tokens)
    about = subject(model, random_weights)
    # Errors before it runs.
    sequences = checked_sequences([one.ids for one in given], about.vocab, None, about.device)
    trainer = _Trainer(about, given)
    with evaluating(model):
        check_causal(model, sequences[0])
        rows, causes, remarks = _explained(trainer, say)
    if len(given) < len(every):
        beyond = f"the others are beyond {tokens} tokens"
        remarks.append(f"{len(given)} of {len(every)} sequences were compared: {beyond}")
    outputs = sum(len(one.output_ids) for one in given)
    return about.report(len(given), outputs, rows, causes=causes, remarks=remarks)


@dataclass(frozen=True)
class Forward:
    """How the trainer's log-probabilities are computed. `samplings` has one for each sequence; `prefix` comes
    in front of each prompt, and `drop` of its first tokens are left out."""

    samplings: tuple[Sampling, ...]
    dtype: torch.dtype | None = None
    fp32_head: bool = False
    prefix: tuple[int, ...] = ()
    drop: int = 0


@dataclass(frozen=True)
class Option:
    """An option of the engine that differs from the trainer's, and what it changes in the forward. It may not
    be `said` that log-probabilities are processed; then they are if that is nearer."""

    name: str
    differs: str
    change: dict[str, Any]
    said: bool = True


Pairs = tuple[list[Tensor], list[Tensor]]


def _explained(trainer: "_Trainer", say: Progress) -> tuple[list[Row], list[str], list[str]]:
    """(rows, causes, remarks)."""
    given = trainer.given
    say(f"the trainer's forward of {len(given)} sequences")
    forward = Forward((RAW,) * len(given))
    left = trainer.compared(forward)
    before = _mean_difference(left)
    rows, causes, remarks = [Row("rollout", _engine(given), _numbers(left))], list[str](), list[str]()
    for option in trainer.options():
        say(f"the same with {option.name}")
        changed = replace(forward, **option.change)
        now = trainer.compared(changed)
        after = _mean_difference(now)
        if not option.said and after > before:
            remarks.append(f"{option.name} is in the options, and log-probabilities are nearer to those "
                           "without it: the engine returns raw ones")  # fmt: skip
            continue
        rows.append(Row("rollout", f"with {option.name}", _numbers(now)))
        if outside := of_finite(*now).infinite:
            remarks.append(f"{outside} tokens are not among those of the trainer's {option.name}: they "
                           "differ, and are in no mean")  # fmt: skip
        causes.append(f"{option.differs}: a mean difference of {before:.2g}, and {after:.2g} with that")
        forward, before = changed, after
    if unread := list(dict.fromkeys(text for one in given for text in one.options.unread)):
        remarks.append(f"options that are not read, and what they change is in the last row: "
                       f"{', '.join(unread)}")  # fmt: skip
    if before > TRY:
        say("trying temperature, shift and BOS")
        cause, rest = min(trainer.mistakes(forward), key=lambda tried: _mean_difference(tried[1]))
        if _mean_difference(rest) < EXPLAINED * before:
            causes.append(cause)
            rows.append(Row("rollout", "without that", _numbers(rest)))
        elif before > LARGE:
            causes.append(_unexplained(before))
    return rows, causes, remarks


def _unexplained(difference: float) -> str:
    if difference > OTHER_WEIGHTS:
        return "the log-probabilities are of another model: other weights, or another prompt than in the file"
    return (
        f"a mean difference of {difference:.2g} is more than kernels make, and no temperature, shift or BOS "
        "explains it: weights of another step, a quantised engine, or another prompt than in the file"
    )


@dataclass
class _Trainer:
    """The forward of a model, of the file's sequences or of some that are changed."""

    about: Subject
    given: list[Rollout]

    def options(self) -> list[Option]:
        """Those of the engine that differ from the trainer's."""
        differing, given = [], [one.options for one in self.given]
        samplings = tuple(RAW if options.processed is False else options.sampling for options in given)
        name = " or ".join(dict.fromkeys(str(each) for each in samplings if each != RAW))
        if name:
            text = f"the engine's log-probabilities are of {name}, the trainer's of logits as they are"
            said = all(options.processed is not None for options in given)
            differing.append(Option(name, text, {"samplings": samplings}, said))
        dtype, own = self._of_all("dtype"), _head(self.about.model).weight.dtype
        if dtype not in (None, own):
            text = f"the engine's weights are in {dtype_name(dtype)}, the trainer's in {dtype_name(own)}"
            differing.append(Option(f"weights in {dtype_name(dtype)}", text, {"dtype": dtype}))
        if self._of_all("fp32_head") and (dtype or own) != torch.float32:
            text = f"the engine's LM head is in fp32, the trainer's in {dtype_name(own)}"
            differing.append(Option("an LM head in fp32", text, {"fp32_head": True}))
        return differing

    def _of_all(self, name: str) -> Any:
        values = {getattr(one.options, name) for one in self.given}
        if len(values) > 1:
            raise ContractError(f"drift(rollouts): lines differ in options.{name}: one file is of one engine")
        return values.pop()

    def compared(self, forward: Forward) -> Pairs:
        """(the trainer's log-probabilities of outputs, the engine's)."""

        def read(logits: Tensor, targets: Tensor, sequence: int) -> Tensor:
            return processed(logits, targets, forward.samplings[sequence])

        (pairs,) = self.read(forward, [read])
        return pairs

    def read(self, forward: Forward, reads: Sequence[Read]) -> list[Pairs]:
        """The same in several readings of the logits of one forward."""
        given = ([*forward.prefix, *one.ids[forward.drop :]] for one in self.given)
        ids = [torch.tensor(each, dtype=torch.long, device=self.about.device) for each in given]
        with _as_the_engine(self.about.model, forward) as call:
            made = Run(call, self.about.device).read(axes.alone(ids), ids, reads)
        theirs = [one.logprobs for one in self.given]
        return [
            ([x[len(x) - len(one.output_ids) :] for x, one in zip(logps, self.given, strict=True)], theirs)
            for logps in made
        ]

    def mistakes(self, forward: Forward) -> list[tuple[str, Pairs]]:
        """(what could be wrong, what is compared without it)."""
        return [*self._temperatures(forward), *self._shifts(forward), *self._bos(forward)]

    def _temperatures(self, forward: Forward) -> list[tuple[str, Pairs]]:
        tried = self._at(forward, TEMPERATURES)
        best = min(tried, key=lambda t: _mean_difference(tried[t]))
        tried |= self._at(forward, tuple(round(best + more, 2) for more in CLOSER))
        said = " or ".join(dict.fromkeys(f"{each.temperature:g}" for each in forward.samplings))
        text = "the engine's log-probabilities are of temperature {:g}, the trainer's of {}"
        return [(text.format(t, said), pairs) for t, pairs in tried.items()]

    def _at(self, forward: Forward, temperatures: Sequence[float]) -> dict[float, Pairs]:
        reads = [read_as(Sampling(t)) for t in temperatures]
        return dict(zip(temperatures, self.read(forward, reads), strict=True))

    def _shifts(self, forward: Forward) -> list[tuple[str, Pairs]]:
        ours, theirs = self.compared(forward)
        later = [x[1:] for x in ours], [x[:-1] for x in theirs]
        sooner = [x[:-1] for x in ours], [x[1:] for x in theirs]
        if not any(len(x) for x in later[0]):
            return []
        text = "log-probabilities are shifted by one: each belongs to the token {}"
        return [(text.format("after it"), later), (text.format("before it"), sooner)]

    def _bos(self, forward: Forward) -> list[tuple[str, Pairs]]:
        bos = getattr(getattr(self.about.model, "config", None), "bos_token_id", None)
        if not isinstance(bos, int):
            return []
        if not any(one.prompt_ids[0] == bos for one in self.given):
            name = f"a BOS is missing: the engine had token {bos} in front of each prompt"
            return [(name, self.compared(replace(forward, prefix=(bos,))))]
        if all(one.prompt_ids[0] == bos and one.prompt_ids[1:] for one in self.given):
            name = f"a BOS too much: the engine did not have token {bos} in front of each prompt"
            return [(name, self.compared(replace(forward, drop=1)))]
        return []


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


@contextmanager
def _as_the_engine(model: nn.Module, forward: Forward) -> Iterator[Callable[..., Any]]:
    """The model with weights of the engine's dtype, and with its LM head in fp32. The model keeps its own."""
    hook = _head(model).register_forward_hook(_in_fp32) if forward.fp32_head else None
    try:
        if forward.dtype is None:
            yield model
        else:
            cast = {
                name: p.to(forward.dtype) for name, p in model.named_parameters() if p.is_floating_point()
            }  # buffers, such as the frequencies of rotary embeddings, stay
            yield partial(_called, model, cast)
    finally:
        if hook is not None:
            hook.remove()


def _called(model: nn.Module, parameters: dict[str, Tensor], **inputs: Any) -> Any:
    return torch.func.functional_call(model, parameters, kwargs=inputs)


def _in_fp32(head: Any, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    bias = getattr(head, "bias", None)
    return nn.functional.linear(given[0].float(), head.weight.float(), None if bias is None else bias.float())


def _mean_difference(pairs: Pairs) -> float:
    """Of tokens that both sides can sample, if those are nearly all."""
    a, b = (torch.cat(side).double() for side in pairs)
    both = a.isfinite() & b.isfinite()
    if int((~both).sum()) > OUTSIDE * len(a):
        return math.inf
    return (a - b)[both].abs().mean().item()


def _numbers(pairs: Pairs) -> dict[str, Any]:
    """Metrics of a row. The trainer's log-probabilities may all be outside a wrong top-k."""
    numbers = of_finite(*pairs).numbers
    if not numbers:
        raise ContractError(
            "drift(rollouts): no log-probability of the trainer is a number: they are NaN, or none of the "
            "tokens is among those of top_k and top_p"
        )
    return numbers


def _limited(given: list[Rollout], tokens: int | None) -> list[Rollout]:
    """The first sequences with so many tokens together; the first one in any case."""
    kept, left = given[:1], None if tokens is None else tokens - len(given[0].ids)
    for one in given[1:]:
        left = None if left is None else left - len(one.ids)
        if left is not None and left < 0:
            break
        kept.append(one)
    return kept


def _engine(given: list[Rollout]) -> str:
    names = dict.fromkeys(f"{one.engine} {one.version}".strip() for one in given)
    return ", ".join(names)
