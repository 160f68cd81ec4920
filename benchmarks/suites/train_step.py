"""One eager training step of a Hugging Face model: forward, mean of the tokens' negative log-probability,
backward; no optimizer. Random weights, bf16, gradients of all parameters.

    plain         the model as it is: logits, in fp32, cross-entropy
    isobit:head   its body, and `isobit.linear_logp` instead of logits
    isobit        the same, every linear layer through `isobit.det_linear`, and experts, if there are any,
                  through `isobit.nn.DetExperts`; their router is the model's own

A step launches hundreds of kernels, so the time of a small one depends on the host: wall time is measured.
The rows `:new` are micro-batches that are packed and not padded: every step has another number of tokens. No
number occurs twice, not even in two implementations, because attention plans for a new number, which takes
longer than all the rest. Their time is the mean over these steps.

Before anything is timed, the loss and the norms of the gradients must agree with those of `plain`, up to what
bf16 allows: `LOSS`, `NORM` and `NORM_OF_ONE`.
"""

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import Cell, Goal
from isobit.integrations.hf import register_experts
from isobit.nn import swap_linear
from isobit.ops.linear_logp.op import linear_logp
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import Pool, Series

#: Allowed relative differences from `plain`: of the loss, of the norm of all gradients, and of the norm of
#: each matrix's gradient. Vectors are left out of the last: the gradient of the bias of keys is nearly pure
#: rounding, since a softmax is invariant to a common shift.
LOSS, NORM, NORM_OF_ONE = 1e-3, 1e-2, 0.1

#: A target that is ignored.
IGNORED = -100

#: Steps with new numbers of tokens per implementation, including warm-up, and their maximum distance from the
#: usual number, relative to it.
NEW_STEPS, NEW_SPREAD = 19, 1 / 8
IMPLEMENTATIONS = 3


# Models


@dataclass(frozen=True)
class Config:
    """Sizes of a model, named as in transformers; `kind` is the name of its class there. `more` is what else
    its config there has, and `attention` is what computes its attention."""

    kind: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool
    rope_theta: float
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention: str = "sdpa"

    @property
    def head_dim(self) -> int:
        found: int = self.more.get("head_dim", self.hidden_size // self.num_attention_heads)
        return found

    @property
    def experts(self) -> tuple[int, int, int]:
        """How many a layer has, how many of them a token has, and columns between the products of one. A
        layer without a mixture has one of them."""
        count = self.more.get("num_experts", self.more.get("num_local_experts", 1))
        columns = self.more.get("moe_intermediate_size", self.intermediate_size)
        return count, self.more.get("num_experts_per_tok", 1), columns

    def products(self, tokens: int) -> tuple[int, int]:
        """(multiplications of a token by weights, weights that are read for so many tokens), with the
        head."""
        D, (count, of_a_token, columns) = self.hidden_size, self.experts
        q, kv = (self.head_dim * n for n in (self.num_attention_heads, self.num_key_value_heads))
        router = D * count if count > 1 else 0
        hit = count * (1 - (1 - 1 / count) ** (tokens * of_a_token)) if count > 1 else 1
        layer, head = 2 * D * q + 2 * D * kv + router, D * self.vocab_size
        each = self.num_hidden_layers * (layer + 3 * D * columns * of_a_token) + head
        return each, self.num_hidden_layers * (layer + int(3 * D * columns * hit)) + head

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
        """The model with random weights, drawn on the device."""
        import transformers

        own = ("kind", "rope_theta", "more", "attention")
        sizes = {name: value for name, value in vars(self).items() if name not in own}
        config = getattr(transformers, f"{self.kind}Config")(
            **sizes, **self.more, rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            attn_implementation=self.attention, use_cache=False,
        )  # fmt: skip
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.device(device):
            torch.manual_seed(seed)
            model: nn.Module = getattr(transformers, f"{self.kind}ForCausalLM")(config)
        for parameter in model.parameters():  # not `to`, which would round the frequencies of RoPE too
            parameter.data = parameter.data.to(dtype)
        return model.train()


QWEN = Config("Qwen2", 151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True, rope_theta=1e6)
LLAMA = Config("Llama", 128256, 4096, 14336, 4, 32, 8, tie_word_embeddings=False, rope_theta=5e5)

#: The experts of Qwen3-30B-A3B: 128 of them, and 8 of a token.
QWEN_EXPERTS = {
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
QWEN_MOE = Config(
    "Qwen3Moe", 151936, 2048, 6144, 4, 32, 4, tie_word_embeddings=False, rope_theta=1e6, more=QWEN_EXPERTS
)

#: What a tiny model has instead.
TINY = {
    "head_dim": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "sliding_window": 6,
}  # fmt: skip


def shrunk(config: Config, **sizes: Any) -> Config:
    """A model of that kind for a CPU."""
    more = {name: TINY.get(name, value) for name, value in config.more.items()}
    return replace(config, vocab_size=256, hidden_size=64, num_hidden_layers=2, more=more, **sizes)


def tiny(config: Config) -> Config:
    return shrunk(config, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)


@dataclass(frozen=True)
class Models:
    """A model as it is, and the same parameters in one whose modules isobit has swapped."""

    plain: Any
    swapped: Any
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @classmethod
    def of(
        cls, swap: Callable[[Any], object], config: Config, device: torch.device, dtype: torch.dtype,
        seed: int,
    ) -> "Models":  # fmt: skip
        plain = config.build(device, dtype, seed)
        kept = {id(t): t for t in (*plain.parameters(), *plain.buffers())}
        swapped = copy.deepcopy(plain, kept)
        swap(swapped)
        names, parameters = zip(*plain.named_parameters(), strict=True)
        return cls(plain, swapped, names, parameters)


def swap(model: Any) -> None:
    """Linear layers, and experts."""
    swap_linear(model)
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation(register_experts())


# Steps


def _stepped(models: Models, loss: Tensor) -> tuple[Tensor, ...]:
    """(loss, *gradients); none of them is left on the parameters."""
    loss.backward()
    gradients = tuple(parameter.grad for parameter in models.parameters)
    for parameter in models.parameters:
        parameter.grad = None
    return (loss.detach(), *gradients)  # type: ignore[arg-type]  # of a parameter without one, None


def plain(args: Args) -> tuple[Tensor, ...]:
    """With the loss that the model itself computes."""
    models: Models = args["models"]
    return _stepped(models, models.plain(input_ids=args["ids"], labels=args["ids"]).loss)


def _without_logits(models: Models, model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """Every token but the first is the target of the one before it; the last row has none, as in `plain`."""
    hidden = model.model(input_ids=ids).last_hidden_state
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    logp = linear_logp(hidden, model.lm_head.weight, targets, ignore_index=IGNORED)
    return _stepped(models, -logp.sum() / (ids.numel() - len(ids)))


def head(args: Args) -> tuple[Tensor, ...]:
    return _without_logits(args["models"], args["models"].plain, args["ids"])


def whole(args: Args, backend: str | None = None) -> tuple[Tensor, ...]:
    assert backend is None
    return _without_logits(args["models"], args["models"].swapped, args["ids"])


# The check


@dataclass(frozen=True)
class Agreement:
    """Loss and gradient norms of a plain step, with which others are compared."""

    names: tuple[str, ...]
    loss: float
    norms: tuple[float, ...]
    matrices: tuple[bool, ...]

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float:
        """The difference of the loss. Raises CheckFailed if it or a norm differs too much."""
        loss, norms = _loss_and_norms(self.names, result)
        self.compare("loss", loss, self.loss, LOSS)
        self.compare("norm of all gradients", math.hypot(*norms), math.hypot(*self.norms), NORM)
        for name, ours, theirs, matrix in zip(self.names, norms, self.norms, self.matrices, strict=True):
            if matrix:
                self.compare(f"norm of the gradient of {name}", ours, theirs, NORM_OF_ONE)
        return abs(loss - self.loss)

    @staticmethod
    def compare(what: str, ours: float, theirs: float, tolerance: float) -> None:
        if not abs(ours - theirs) <= tolerance * abs(theirs):  # NaN is never close
            raise CheckFailed(
                f"train_step: {what} is {ours:.6g} and not that of plain, {theirs:.6g}, up to {tolerance:g} "
                "of it, so nothing is timed"
            )


def _loss_and_norms(names: Sequence[str], result: tuple[Tensor, ...]) -> tuple[float, tuple[float, ...]]:
    loss, *gradients = result
    without = [name for name, g in zip(names, gradients, strict=True) if g is None]
    if without:
        raise CheckFailed(f"train_step: no gradient of {', '.join(without)}, so nothing is timed")
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
    return float(loss), tuple(norms.tolist())


def agreement(args: Args) -> Agreement:
    models: Models = args["models"]
    loss, norms = _loss_and_norms(models.names, plain(args))
    return Agreement(models.names, loss, norms, tuple(p.ndim > 1 for p in models.parameters))


# Series

CASES = [
    Case({"B": B, "T": T}, torch.bfloat16, data="random")
    for B, T in ((1, 512), (8, 512), (8, 2048), (1, 4096))
]
SMALL = [Case({"B": B, "T": T}, torch.bfloat16, data="random") for B, T in ((2, 16), (1, 64))]
#: Cases that also have new numbers of tokens.
PACKED = (CASES[-1], SMALL[-1])


def _ids(vocab: int, B: int, T: int, pool: Pool) -> Tensor:
    gen = torch.Generator().manual_seed(pool.inputs.seed)
    return torch.randint(vocab, (B, T), generator=gen).to(pool.device)


def _make(name: str, config: Config, case: Case, pool: Pool) -> list[Args]:
    if pool.device.type == "cpu":
        config = tiny(config)
    B, T = case.dims.values()
    build = partial(Models.of, swap, config, pool.device, case.dtype, pool.inputs.seed)
    models = pool.made(f"{name} {case.dtype}", build)
    return [{"models": models, "ids": _ids(config.vocab_size, B, T, pool)}]


def lengths(T: int, seed: int) -> list[int]:
    """Numbers of tokens around T, all different and none of them T, for each implementation in turn. The
    longest come first and then the shortest, as warm-up: memory for all of them, and kernels for both
    ends."""
    spread = int(T * NEW_SPREAD)
    known = [n for n in range(T - spread, T + spread + 1) if n != T]
    each = min(NEW_STEPS, len(known) // IMPLEMENTATIONS)
    chosen = sorted(random.Random(seed).sample(known, each * IMPLEMENTATIONS))
    shortest, longest = chosen[:IMPLEMENTATIONS], chosen[-IMPLEMENTATIONS:]
    rest = chosen[IMPLEMENTATIONS:-IMPLEMENTATIONS]
    random.Random(seed).shuffle(rest)
    return [*reversed(longest), *shortest, *rest]


def _new(name: str, config: Config, case: Case, pool: Pool) -> list[Args]:
    if case not in PACKED:
        return []
    (args,) = _make(name, config, case, pool)
    numbers = lengths(case.dims["T"], pool.inputs.seed)
    ids = _ids(args["models"].plain.config.vocab_size, 1, numbers[0], pool)
    return [{**args, "ids": ids[:, :n].contiguous()} for n in numbers]


def rehearse(name: str, config: Config, pool: Pool) -> None:
    """Steps with all new numbers of tokens. A few of them have a tile that the others do not have, and its
    kernel takes longer to compile than several steps take to run."""
    for args in _new(name, config, PACKED[pool.device.type == "cpu"], pool):
        whole(args)


def cost(config: Config, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Products of the linear layers and the head, and causal attention; every weight is read once per
    pass."""
    B, T = dims.values()
    each, weights = config.products(B * T)
    q = config.head_dim * config.num_attention_heads
    flops = 2 * B * T * each + config.num_hidden_layers * 2 * B * T * T * q
    read = weights * dtype.itemsize
    return Cost(read, 2 * read, flops, 2 * flops)


QWEN_NAME, LLAMA_NAME = "qwen2.5-0.5b", "llama-3-8b-4-layers"
MOE_NAME = "qwen3-30b-a3b-4-layers"


def _tokens(cell: Cell) -> int:
    return cell.sizes["B"] * cell.sizes["T"]


def _large_llama(cell: Cell) -> bool:
    return cell.op == LLAMA_NAME and _tokens(cell) >= 8 * 2048


def _large(cell: Cell) -> bool:
    return _tokens(cell) >= 4096 and not _large_llama(cell) and cell.op != MOE_NAME


GOALS = (
    Goal("1 x 512 tokens", lambda cell: _tokens(cell) < 4096, most=1.15),
    Goal("4096 tokens and more", _large, most=1.05),
    Goal("8 x 2048 tokens, Llama", _large_llama, most=1.06),
    Goal("4096 tokens and more, experts", lambda cell: cell.op == MOE_NAME and _tokens(cell) >= 4096,
         most=1.0),
    Goal("another number of tokens every step", lambda cell: True, most=1.10, impl="isobit:new",
         against="plain:new"),
)  # fmt: skip


#: The ops of a layer of experts.
EXPERTS = ("route", "spread", "det_grouped_linear", "swiglu_packed", "combine")


def _series(name: str, config: Config) -> Series:
    experts = EXPERTS if config.experts[0] > 1 else ()
    return Series(
        op=None, name=name, cases=CASES, core=CASES, small=SMALL, make=partial(_make, name, config),
        new=partial(_new, name, config), call=whole, variants={"head": head}, cost=partial(cost, config),
        judge=agreement, rivals={"plain": Rival("plain", plain, directions=None)}, directions=("fwd_bwd",),
        needs=("linear_logp", "det_linear", *experts), imports=("transformers",), step=True, against="plain",
        about="a training step with isobit's linear layers and head",
        copy=False, shared=lambda case: (name, case.dtype), rehearse=(partial(rehearse, name, config),),
    )  # fmt: skip


SERIES: Sequence[Series] = (
    _series(QWEN_NAME, QWEN),
    _series(LLAMA_NAME, LLAMA),
    _series(MOE_NAME, QWEN_MOE),
)
