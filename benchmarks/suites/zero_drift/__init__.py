"""A Hugging Face model without drift next to the same model on PyTorch's attention: what it costs, and what
it achieves. Random weights, bf16, eager.

    sdpa     the model as it is
    eager    the same for GPT-OSS, whose sinks PyTorch's attention does not have
    isobit   the same parameters after `isobit.integrations.hf.zero_drift`

Two kinds of steps, timed by wall time. `decode` is one more token for each of B sequences with S keys in a
dynamic cache, as in `generate`; the keys are random numbers. A gated delta net has the state after S random
tokens, which every step takes one token further. `fwd_bwd` is a training step, with the model's
own loss and gradients of all parameters.

Before anything is timed, each model decodes in the ways of `drift.RUNS`, and every decoded sequence
goes through the model alone, in one forward as in training. `tokens` is how many were decoded, and
`tokens_differ` how many of them have different bits of log-probability in the two; `max_abs` is the largest
difference. With isobit both must be 0, no element of a sequence's gradient may depend on its batch, and the
mean log-probability of the decoded tokens must equal that of `sdpa` for the same tokens up to `CLOSE`. This
is done once for a model, and not for every case. Training steps are compared with the loss and the gradients
of `sdpa` as in `train_step`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.train_step import (
    EXPERTS,
    QWEN_35,
    QWEN_35_NAME,
    QWEN_EXPERTS,
    QWEN_NEXT,
    QWEN_NEXT_NAME,
    Config,
    Models,
    agreement,
    delta_rule,
    plain,
    shrunk,
)
from benchmarks.suites.zero_drift.drift import (
    FEW_RUNS,
    FEW_TRAINED,
    RUNS,
    TRAINED,
    Decoded,
    Run,
    decoded_by,
    gradients_that_differ,
    trained_logp,
)
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import Cell, Goal, limit
from isobit.integrations.hf import zero_drift
from isobit.spec.compare import differing
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import Pool, Series
from isobit.spec.truth import Verdict

#: Allowed relative difference of the mean log-probability of decoded tokens from that of `sdpa`.
CLOSE = 1e-2


# Models

LLAMA = Config("Llama", 128256, 4096, 14336, 8, 32, 8, tie_word_embeddings=False, rope_theta=5e5)
QWEN = Config(
    "Qwen3", 151936, 1024, 3072, 28, 16, 8, tie_word_embeddings=True, rope_theta=1e6, more={"head_dim": 128}
)
QWEN_MOE = Config(
    "Qwen3Moe", 151936, 2048, 6144, 2, 32, 4, tie_word_embeddings=False, rope_theta=1e6, more=QWEN_EXPERTS
)

#: With the widths of gpt-oss-20b, its sinks and biases, and a window in one of two layers.
GPT_OSS = Config(
    "GptOss", 201088, 2880, 2880, 2, 64, 8, tie_word_embeddings=False, rope_theta=1.5e5, attention="eager",
    more={
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)  # fmt: skip
LLAMA_NAME, QWEN_NAME = "llama-3-8b-8-layers", "qwen3-0.6b"
QWEN_MOE_NAME, GPT_OSS_NAME = "qwen3-30b-a3b-2-layers", "gpt-oss-20b-2-layers"


def tiny(config: Config) -> Config:
    """A model of that kind for a CPU, with head sizes that `isobit.attention` takes."""
    return shrunk(config, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1)


# Steps

#: Tokens at once, when the state of a gated delta net is made.
PIECE = 1024

#: Marks which model a decoding step was of, among its results.
OURS, THEIRS = torch.tensor(0), torch.tensor(1)


@dataclass
class Decoding:
    """One more token; afterwards the keys in the cache are as before."""

    model: Any
    cache: Any
    inputs: dict[str, Tensor]

    def step(self) -> Tensor:
        before = [dict(vars(layer)) for layer in self.cache.layers]
        with torch.no_grad():
            made = self.model(**self.inputs, past_key_values=self.cache, use_cache=True)
        for layer, known in zip(self.cache.layers, before, strict=True):
            vars(layer).update(
                known
            )  # a dynamic cache makes new tensors; one with a window cannot be cropped
        logits: Tensor = made.logits
        return logits


def decoding(model: Any, B: int, S: int, seed: int) -> Decoding:
    """With random keys and values, of the magnitude that norms and rotations give."""
    import transformers

    config, weight = model.config, model.lm_head.weight
    heads = config.num_key_value_heads
    gen = torch.Generator(weight.device).manual_seed(seed)
    cache = transformers.DynamicCache(config=config)

    def drawn(*shape: int) -> Tensor:
        empty = torch.empty(*shape, dtype=weight.dtype, device=weight.device)
        return empty.normal_(generator=gen)

    for i, layer in enumerate(model.model.layers):
        if hasattr(layer, "self_attn"):
            size = (B, heads, S, layer.self_attn.head_dim)
            cache.update(drawn(*size), drawn(*size), i)
            continue
        for first in range(0, S, PIECE):
            given = drawn(B, min(PIECE, S - first), config.hidden_size)
            with torch.no_grad():
                layer.linear_attn(given, cache_params=cache)
    ones = torch.ones(B, S + 1, dtype=torch.int64, device=weight.device)
    inputs = {"input_ids": ones[:, :1], "attention_mask": ones, "position_ids": ones[:, :1] * S}
    return Decoding(model, cache, inputs)


def decode(mark: Tensor, args: Args, backend: str | None = None) -> tuple[Tensor, ...]:
    assert backend is None
    made: Decoding = args["ours" if mark is OURS else "theirs"]
    return made.step(), mark


def train(args: Args, backend: str | None = None) -> tuple[Tensor, ...]:
    """Like `plain`, with the model without drift."""
    assert backend is None
    models: Models = args["models"]
    return plain({**args, "models": Models(models.swapped, models.swapped, models.names, models.parameters)})


# The check


@dataclass
class Judge:
    """What each model decoded, and the verdict on it. One for all cases of a model."""

    models: Models
    runs: Sequence[Run]
    trained: Sequence[int]  # lengths of the batch for gradients
    known: dict[bool, list[Decoded]] = field(default_factory=dict)
    passed: bool = False

    def decoded(self, ours: bool) -> list[Decoded]:
        if ours not in self.known:
            model = self.models.swapped if ours else self.models.plain
            self.known[ours] = decoded_by(model, self.runs, compiles=ours)
        return self.known[ours]

    def error(self, direction: str, result: tuple[Tensor, ...]) -> Verdict:
        """Raises CheckFailed if isobit drifts, or computes something else."""
        ours = result[1] is OURS
        sequences = self.decoded(ours)
        decoded, trained = (
            torch.cat([getattr(one, name) for one in sequences]) for name in ("decoded", "trained")
        )
        count, tokens = int(differing(decoded, trained).sum()), decoded.numel()
        if ours and not self.passed:
            if count:
                raise _failed(f"{count} of {tokens} tokens have other bits in decoding than in one forward")
            self.check_gradients()
            self.check_mean(sequences, float(trained.mean()))
            self.passed = True
        largest = float((decoded - trained).abs().max())
        return Verdict(largest, more={"tokens": tokens, "tokens_differ": count})

    def check_gradients(self) -> None:
        count, total = gradients_that_differ(self.models.swapped, self.trained)
        if count:
            raise _failed(f"{count} of {total} elements of gradients have other bits in a batch than alone")

    def check_mean(self, sequences: Sequence[Decoded], mean: float) -> None:
        theirs = [trained_logp(self.models.plain, one.tokens, one.prompt) for one in sequences]
        wanted = float(torch.cat(theirs).mean())
        if not abs(mean - wanted) <= CLOSE * abs(wanted):  # NaN is never close
            raise _failed(f"the mean log-probability is {mean:.6g} and that of sdpa {wanted:.6g}")


def _failed(what: str) -> CheckFailed:
    return CheckFailed(f"zero_drift: {what}, so nothing is timed")


def judge(args: Args) -> Judge:
    one: Judge = args["judge"]
    return one


# Series

#: Processes that compile for the judge of a model.
PARTS = 4


def _cases(first: str, second: str, *sizes: tuple[int, int]) -> list[Case]:
    return [Case({first: a, second: b}, torch.bfloat16, data="random") for a, b in sizes]


DECODE = _cases("B", "S", (1, 4096), (16, 4096), (64, 1024), (16, 16384))
DECODE_SMALL = _cases("B", "S", (2, 12))
TRAIN = _cases("B", "T", (1, 4096), (8, 1024), (4, 4096))
TRAIN_SMALL = _cases("B", "T", (2, 12))


def _make(name: str, config: Config, training: bool, case: Case, pool: Pool) -> list[Args]:
    on_cpu = pool.device.type == "cpu"
    config = tiny(config) if on_cpu else config
    seed = pool.inputs.seed
    models = pool.made(name, partial(Models.of, zero_drift, config, pool.device, case.dtype, seed))
    B, length = case.dims.values()
    if training:
        gen = torch.Generator().manual_seed(seed)
        ids = torch.randint(config.vocab_size, (B, length), generator=gen).to(pool.device)
        return [{"models": models, "ids": ids}]
    judging = partial(Judge, models, *((FEW_RUNS, FEW_TRAINED) if on_cpu else (RUNS, TRAINED)))
    return [{
        "models": models, "judge": pool.made(f"judge of {name}", judging),
        "ours": decoding(models.swapped, B, length, seed), "theirs": decoding(models.plain, B, length, seed),
    }]  # fmt: skip


def rehearse(config: Config, part: int, pool: Pool) -> None:
    """A part of what the judge does with our model. That compiles dozens of kernels: one for each tile that
    the lengths of prompts need."""
    model = Models.of(zero_drift, config, pool.device, torch.bfloat16, pool.inputs.seed).swapped
    decoded_by(model, RUNS[part::PARTS])
    if part == PARTS - 1:
        gradients_that_differ(model, TRAINED)


def cost(config: Config, training: bool, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Products of the linear layers and the head, attention, and the gated delta rule; every weight and every
    key is read once, and a state in 16 bits."""
    B, length = dims.values()
    tokens = B * length if training else B
    each, weights = config.products(tokens)
    heads = [config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads)]
    q, kv, read, seen = *heads, weights * dtype.itemsize, _seen(config, length)
    if not training:
        read += B * (seen * kv * 2 + config.delta_nets * config.states) * dtype.itemsize
        return Cost(read, 0, 2 * B * each + 4 * B * seen * q + delta_rule(config, B), 0)
    flops = 2 * tokens * each + 2 * tokens * seen * q + delta_rule(config, tokens)
    return Cost(read, 2 * read, flops, 2 * flops)


def _seen(config: Config, length: int) -> int:
    """Keys that the last token of a sequence sees, in all layers."""
    window = min(length, config.more.get("sliding_window", length))
    keys = {"full_attention": length, "sliding_attention": window, "linear_attention": 0}
    return sum(keys[kind] for kind in config.kinds)


def _goals(name: str, config: Config, training: bool) -> list[Goal]:
    direction = "fwd_bwd" if training else "decode"

    def own(cell: Cell) -> bool:
        return (cell.op, cell.direction) == (name, direction)

    if training:
        return [Goal(f"{name}, a training step", own, most=1.10, against=config.attention)]
    none = Goal(
        f"{name}, tokens with other bits", own, most=0, figure="tokens_differ", against=limit(1, "token")
    )
    return [Goal(f"{name}, a decoding step", own, most=1.10, against=config.attention), none]


#: The op of attention with sinks.
SINKS = ("attention_sink",)

#: The ops of a gated delta net.
NETS = ("gated_delta_rule", "gated_delta_rule_step", "causal_conv1d", "delta_gates", "rms_norm_gated")


def own_ops(config: Config) -> tuple[str, ...]:
    """What not every model is computed by."""
    experts = EXPERTS if config.experts[0] > 1 else ()
    return (*experts, *(SINKS if config is GPT_OSS else ()), *(NETS if config.delta_nets else ()))


def _trained_by(config: Config) -> list[Case]:
    """Scores of eager attention are stored, so the largest case of others is left out."""
    return TRAIN if config.attention == "sdpa" else TRAIN[:-1]


def _series(name: str, config: Config, training: bool) -> Series:
    direction = "fwd_bwd" if training else "decode"
    theirs: Callable[[Args], Any] = plain if training else partial(decode, THEIRS)
    cases = _trained_by(config) if training else DECODE
    own = own_ops(config)

    return Series(
        op=None, name=name, cases=cases, core=cases[:2], small=TRAIN_SMALL if training else DECODE_SMALL,
        make=partial(_make, name, config, training), call=train if training else partial(decode, OURS),
        cost=partial(cost, config, training), judge=agreement if training else judge,
        rivals={config.attention: Rival(config.attention, theirs, directions=None)}, directions=(direction,),
        needs=("attention", "det_linear", "rms_norm", "logp", *own), imports=("transformers",), step=True,
        against=config.attention, copy=False,
        about="a step of a model without drift", shared=lambda case: (name, case.dtype),
        rehearse=() if training else tuple(partial(rehearse, config, part) for part in range(PARTS)),
    )  # fmt: skip


_MODELS = {
    LLAMA_NAME: LLAMA, QWEN_NAME: QWEN, QWEN_MOE_NAME: QWEN_MOE, GPT_OSS_NAME: GPT_OSS,
    QWEN_NEXT_NAME: QWEN_NEXT, QWEN_35_NAME: QWEN_35,
}  # fmt: skip
SERIES: Sequence[Series] = tuple(
    _series(name, config, training) for name, config in _MODELS.items() for training in (False, True)
)
GOALS = tuple(
    goal
    for name, config in _MODELS.items()
    for training in (False, True)
    for goal in _goals(name, config, training)
)
