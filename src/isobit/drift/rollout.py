"""The log-probabilities of a rollout engine against the trainer's forward of the same tokens.

A rollout is a file with one JSON object a line:

    {"prompt_ids": [1, 5, 9], "output_ids": [7, 2], "logprobs": [-0.25, -1.5],
     "logprob_bits": ["be800000", "bfc00000"], "engine": "vllm", "version": "0.26.0",
     "options": {"temperature": 1.0}}

`logprob_bits` are the fp32 bits in hexadecimal; without them the decimal numbers are rounded to fp32. The
last three may be left out.

Before anything is said about kernels, mistakes that look like drift are tried: another temperature, ids that
are shifted by one, a missing or an additional BOS. One is named if it explains most of the difference. If
none does and the difference is large, the log-probabilities are of another model.
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.drift import axes
from isobit.drift.calls import Run
from isobit.drift.measure import checked_sequences, facts
from isobit.drift.metrics import metrics
from isobit.drift.report import Report, Row
from isobit.frame.contract import ContractError
from isobit.integrations.hf.trial import evaluating

#: Temperatures that are tried in addition to the one in the options.
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)

#: A mean difference of log-probabilities that kernels alone do not make, and how much smaller it must be for
#: a mistake to be its cause.
LARGE, EXPLAINED = 0.02, 0.2

#: Above this mean difference, and with nothing that explains it, the weights are others.
OTHER_WEIGHTS = 0.3


@dataclass(frozen=True)
class Rollout:
    """One line of the file."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: Tensor  # fp32 [T]
    engine: str = "engine"
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]


def read_rollouts(path: Path) -> list[Rollout]:
    """All lines of a file; an error names the first one that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"--rollout {path}: cannot be read ({error})") from None
    rollouts = [_rollout(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not rollouts:
        raise ContractError(f"--rollout {path}: no lines in it")
    return rollouts


def _rollout(line: str, place: str) -> Rollout:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ContractError(f"{place}: not JSON ({error}); each line is an object") from None
    if not isinstance(given, dict):
        raise ContractError(f"{place}: not an object with prompt_ids, output_ids and logprobs")
    missing = [
        key for key in ("prompt_ids", "output_ids", "logprobs") if not isinstance(given.get(key), list)
    ]
    if missing:
        raise ContractError(f"{place}: {', '.join(missing)} missing: lists of numbers")
    prompt, output, decimal = given["prompt_ids"], given["output_ids"], given["logprobs"]
    if not prompt or not output or not all(type(i) is int for i in (*prompt, *output)):
        raise ContractError(f"{place}: prompt_ids and output_ids are lists of integers, with one at least")
    if len(decimal) != len(output):
        raise ContractError(f"{place}: {len(decimal)} logprobs for {len(output)} output_ids")
    wrong = [x for x in decimal if not isinstance(x, int | float) or not math.isfinite(x) or x > 1e-3]
    if wrong:
        raise ContractError(f"{place}: {wrong[0]!r} is not a log-probability")
    logprobs = torch.tensor(decimal, dtype=torch.float32)
    if given.get("logprob_bits") is not None:
        logprobs = _from_bits(given["logprob_bits"], logprobs, place)
    options = given.get("options") or {}
    return Rollout(
        prompt, output, logprobs, str(given.get("engine", "engine")), str(given.get("version", "")), options
    )  # fmt: skip


def _from_bits(words: Any, decimal: Tensor, place: str) -> Tensor:
    try:
        bits = torch.tensor([struct.unpack(">f", bytes.fromhex(word))[0] for word in words])
    except (ValueError, TypeError, struct.error):
        raise ContractError(f"{place}: logprob_bits are strings of 8 hexadecimal digits") from None
    if len(bits) != len(decimal) or not torch.allclose(bits, decimal, rtol=1e-3, atol=1e-3):
        raise ContractError(f"{place}: logprob_bits are not those of logprobs")
    return bits


def measure_rollout(
    model: Any,
    rollouts: Path | str | Sequence[Rollout],
    *,
    tokens: int | None = None,
    random_weights: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compare the log-probabilities of a rollout with those of a model's forward, each sequence alone.

    Args:
        model: a causal LM, as for `measure`.
        rollouts: the file, see `docs/drift.md`; or what `read_rollouts` made of one.
        tokens: use no more tokens than this, in whole sequences. None uses all of them.
        random_weights: say in the report that the weights are random.
        progress: called with a line of text before each step.

    Returns:
        A report. `causes` names mistakes that were recognised. The first row is the rollout as it is in the
        file; if a cause was recognised, the second is what is left without it.
    """
    say = progress or (lambda line: None)
    given = read_rollouts(Path(rollouts)) if isinstance(rollouts, Path | str) else list(rollouts)
    given = _limited(given, tokens)
    device, dtype, vocab = facts(model)
    checked_sequences([one.ids for one in given], vocab, None, device)  # errors before anything runs
    trainer = _Trainer(model, device, given)
    with evaluating(model):
        say(f"the trainer's forward of {len(given)} sequences")
        plain = trainer.compared()
        rows = [Row("rollout", _engine(given), metrics(*plain))]
        causes = []
        before = _mean_difference(plain)
        if before > LARGE:
            say("the difference is large: trying temperature, shift and BOS")
            cause, left = min(trainer.mistakes(), key=lambda tried: _mean_difference(tried[1]))
            if _mean_difference(left) < EXPLAINED * before:
                causes.append(cause)
                rows.append(Row("rollout", "without that", metrics(*left)))
            elif before > OTHER_WEIGHTS:
                causes.append("the log-probabilities are of another model: other weights, or another prompt "
                              "than in the file")  # fmt: skip
    return Report(
        model=type(model).__name__,
        device=str(device),
        dtype=dtype,
        random_weights=random_weights,
        sequences=len(given),
        tokens=sum(len(one.output_ids) for one in given),
        rows=rows,
        causes=causes,
    )


Pairs = tuple[list[Tensor], list[Tensor]]


@dataclass
class _Trainer:
    """The forward of a model, of the file's sequences or of some that are changed."""

    model: Any
    device: torch.device
    given: list[Rollout]

    def compared(self, temperature: float = 1.0, prefix: Sequence[int] = (), drop: int = 0) -> Pairs:
        """(the trainer's log-probabilities of outputs, the engine's), with tokens in front of each prompt or
        with some of its first ones dropped."""
        ids = [
            torch.tensor([*prefix, *one.ids[drop:]], dtype=torch.long, device=self.device)
            for one in self.given
        ]
        logps = Run(self.model, self.device).logps(axes.alone(ids), ids, temperature)
        outputs = [x[len(x) - len(one.output_ids) :] for x, one in zip(logps, self.given, strict=True)]
        return outputs, [one.logprobs for one in self.given]

    def mistakes(self) -> list[tuple[str, Pairs]]:
        """(what could be wrong, what is compared without it)."""
        tried = []
        stated = {float(t) for one in self.given if (t := one.options.get("temperature")) not in (None, 0, 1)}
        for temperature in sorted({*stated, *TEMPERATURES}):
            name = f"the engine's log-probabilities are of temperature {temperature:g}, the trainer's of 1"
            tried.append((name, self.compared(temperature)))
        ours, theirs = self.compared()
        later = [x[1:] for x in ours], [x[:-1] for x in theirs]
        sooner = [x[:-1] for x in ours], [x[1:] for x in theirs]
        if any(len(x) for x in later[0]):
            text = "log-probabilities are shifted by one: each belongs to the token {}"
            tried += [(text.format("after it"), later), (text.format("before it"), sooner)]
        bos = getattr(getattr(self.model, "config", None), "bos_token_id", None)
        if isinstance(bos, int) and not any(one.prompt_ids[0] == bos for one in self.given):
            name = f"a BOS is missing: the engine had token {bos} in front of each prompt"
            tried.append((name, self.compared(prefix=[bos])))
        if isinstance(bos, int) and all(
            one.prompt_ids[0] == bos and one.prompt_ids[1:] for one in self.given
        ):
            name = f"a BOS too much: the engine did not have token {bos} in front of each prompt"
            tried.append((name, self.compared(drop=1)))
        return tried


def _mean_difference(pairs: Pairs) -> float:
    a, b = (torch.cat(side).double() for side in pairs)
    return (a - b).abs().mean().item()


def _limited(given: list[Rollout], tokens: int | None) -> list[Rollout]:
    if tokens is None:
        return given
    kept, left = [], tokens
    for one in given:
        left -= len(one.ids)
        if left < 0:
            break
        kept.append(one)
    if not kept:
        raise ContractError(f"--tokens {tokens}: the first sequence has {len(given[0].ids)}")
    return kept


def _engine(given: list[Rollout]) -> str:
    names = dict.fromkeys(f"{one.engine} {one.version}".strip() for one in given)
    return ", ".join(names)
