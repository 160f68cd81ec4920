"""Files of rollouts: what an engine returned, one JSON object a line.

    {"prompt_ids": [1, 5, 9], "output_ids": [7, 2], "logprobs": [-0.25, -1.5],
     "logprob_bits": ["be800000", "bfc00000"], "engine": "vllm", "version": "0.26.0",
     "options": {"temperature": 0.7, "logprobs_mode": "processed_logprobs", "dtype": "bfloat16"}}

`logprob_bits` are the fp32 bits in hexadecimal; without them the decimal numbers are rounded to fp32. The
last four may be left out.
"""

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.drift.readings import RAW, Sampling
from isobit.frame.contract import ContractError

DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
}  # fmt: skip

#: Values of `logprobs_mode`, as vLLM names them, and whether log-probabilities are those of the distribution
#: that is sampled from.
MODES = {"raw_logprobs": False, "processed_logprobs": True, "raw": False, "processed": True}


#: Options that are read, and those that change no log-probability of a token.
READ = ("temperature", "top_k", "top_p", "logprobs_mode", "dtype", "fp32_head")
WITHOUT_EFFECT = (
    "seed",
    "n",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
)

#: Values with which others change nothing, besides null, false and empty ones.
NEUTRAL = {"min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}


@dataclass(frozen=True)
class Options:
    """What is known of an engine's options. Those that a file does not have are None. Others are not read,
    and `unread` names those that may change a log-probability."""

    sampling: Sampling = RAW
    processed: bool | None = None
    dtype: torch.dtype | None = None
    fp32_head: bool | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One line of the file."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: Tensor  # fp32 [T]
    engine: str = "engine"
    version: str = ""
    options: Options = field(default_factory=Options)

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
    options = options_of(given.get("options") or {}, place)
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


def options_of(given: Any, place: str) -> Options:
    """The options that explain a difference."""
    if not isinstance(given, dict):
        raise ContractError(f'{place}: options is an object, such as {{"temperature": 1.0}}')

    def number(name: str, default: float, rule: str, valid: Any) -> Any:
        value = default if given.get(name) is None else given[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not valid(value):
            raise ContractError(f"{place}: options: {name} {value!r}: {rule}")
        return value

    def one_of(name: str, known: dict[str, Any]) -> Any:
        value = given.get(name)
        if value is None or value == "auto":
            return None
        short = str(value).removeprefix("torch.")
        if short not in known:
            raise ContractError(f"{place}: options: {name} {value!r}: one of {', '.join(known)}")
        return known[short]

    temperature = number("temperature", 1.0, "a number from 0 on", lambda t: 0 <= t < math.inf)
    sampling = Sampling(
        temperature or 1.0,  # 0 is greedy decoding: nothing is divided
        max(0, number("top_k", 0, "an integer; 0 or -1 for all", lambda k: k == int(k) and k >= -1)),
        number("top_p", 1.0, "above 0, at most 1", lambda p: 0 < p <= 1),
    )
    head = given.get("fp32_head")
    if head is not None and not isinstance(head, bool):
        raise ContractError(f"{place}: options: fp32_head {head!r}: true or false")
    unread = tuple(
        f"{name} {value!r:.40}" for name, value in given.items()
        if name not in (*READ, *WITHOUT_EFFECT) and value and value != NEUTRAL.get(name)
    )  # fmt: skip
    return Options(sampling, one_of("logprobs_mode", MODES), one_of("dtype", DTYPES), head, unread)
