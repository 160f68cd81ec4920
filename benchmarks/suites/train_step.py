"""One eager training step of a Hugging Face model: forward, mean of the tokens' negative log-probability,
backward; no optimizer. Random weights, bf16, gradients of all parameters.

    plain         the model as it is: logits, in fp32, cross-entropy
    isobit:head   its body, and `isobit.linear_logp` instead of logits
    isobit        the same, every linear layer through `isobit.det_linear`, and experts, if there are any,
                  through `isobit.nn.DetExperts`; their router is the model's own, and so is what gated delta
                  nets compute between their linear layers

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
from isobit.spec.series import NotHere, Pool, Series

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

    @property
    def kinds(self) -> Sequence[str]:
        """Of its layers."""
        found: Sequence[str] = self.more.get("layer_types", ["full_attention"] * self.num_hidden_layers)
        return found

    @property
    def delta_nets(self) -> int:
        """How many of its layers are gated delta nets."""
        return list(self.kinds).count("linear_attention")

    @property
    def states(self) -> int:
        """Elements of the state of a sequence in a gated delta net; 0 in a model that has none."""
        if not self.delta_nets:
            return 0
        K, V = self.more["linear_key_head_dim"], self.more["linear_value_head_dim"]
        return int(self.more["linear_num_value_heads"] * K * V)

    def mixing(self) -> int:
        """Weights of linear layers by which tokens are mixed, in all layers: of attention, whose queries
        have a gate in models with gated delta nets, and of these."""
        D, more = self.hidden_size, self.more
        q, kv = (self.head_dim * n for n in (self.num_attention_heads, self.num_key_value_heads))
        attention = (3 if self.delta_nets else 2) * D * q + 2 * D * kv
        if not self.delta_nets:
            return self.num_hidden_layers * attention
        heads = more["linear_num_value_heads"]
        k, v = (
            more["linear_num_key_heads"] * more["linear_key_head_dim"],
            heads * more["linear_value_head_dim"],
        )
        net = D * (2 * k + 3 * v + 2 * heads)
        return (self.num_hidden_layers - self.delta_nets) * attention + self.delta_nets * net

    def products(self, tokens: int) -> tuple[int, int]:
        """(multiplications of a token by weights, weights that are read for so many tokens), with the
        head."""
        D, (count, of_a_token, columns) = self.hidden_size, self.experts
        shared = self.more.get("shared_expert_intermediate_size", 0)
        layer = (D * count if count > 1 else 0) + 3 * D * shared + (D if shared else 0)
        hit = count * (1 - (1 - 1 / count) ** (tokens * of_a_token)) if count > 1 else 1
        rest = self.num_hidden_layers * layer + self.mixing() + D * self.vocab_size
        each = self.num_hidden_layers * 3 * D * columns * of_a_token
        return rest + each, rest + self.num_hidden_layers * int(3 * D * columns * hit)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
        """The model with random weights, drawn on the device."""
        import transformers

        own = ("kind", "rope_theta", "more", "attention")
        sizes = {name: value for name, value in vars(self).items() if name not in own}
        of_text = getattr(transformers, f"{self.kind}TextConfig", None)
        config = (of_text or getattr(transformers, f"{self.kind}Config"))(
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

#: The layers of Qwen3-Next and Qwen3.5: a quarter of them are attention, and the others gated delta nets.
DELTA_NETS = {
    "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
#: With the experts of Qwen3-Next-80B-A3B: 512 of them, 10 of a token, and one that all tokens share.
QWEN_NEXT = Config(
    "Qwen3Next", 151936, 2048, 5120, 4, 16, 2, tie_word_embeddings=False, rope_theta=1e7,
    more={
        **DELTA_NETS, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
    },
)  # fmt: skip
QWEN_35 = Config(
    "Qwen3_5", 248320, 4096, 12288, 4, 16, 4, tie_word_embeddings=False, rope_theta=1e7, more=DELTA_NETS
)

#: What a tiny model has instead.
TINY = {
    "head_dim": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "sliding_window": 6, "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}  # fmt: skip


def shrunk(config: Config, **sizes: Any) -> Config:
    """A model of that kind for a CPU, with the last two kinds of its layers."""
    more = {name: TINY.get(name, value) for name, value in config.more.items()}
    if "layer_types" in more:
        more["layer_types"] = more["layer_types"][-2:]
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
    """Of gated delta nets transformers may call FLA's kernels, whose backward raises an error on Hopper with
    some versions of Triton."""
    models: Models = args["models"]
    try:
        step = plain(args)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "linear_attention" not in (getattr(models.plain.config, "layer_types", None) or ()):
            raise
        raise NotHere(f"the model as it is does not train: {error}") from error
    loss, norms = _loss_and_norms(models.names, step)
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
    flops = 2 * B * T * each + (config.num_hidden_layers - config.delta_nets) * 2 * B * T * T * q
    flops += delta_rule(config, B * T)
    read = weights * dtype.itemsize
    return Cost(read, 2 * read, flops, 2 * flops)


def delta_rule(config: Config, tokens: int) -> int:
    """Operations of the gated delta rule as a recurrence: q and k by the state, and the state's update."""
    return 2 * 3 * tokens * config.delta_nets * config.states


QWEN_NAME, LLAMA_NAME = "qwen2.5-0.5b", "llama-3-8b-4-layers"
MOE_NAME = "qwen3-30b-a3b-4-layers"
QWEN_NEXT_NAME, QWEN_35_NAME = "qwen3-next-80b-a3b-4-layers", "qwen3.5-9b-4-layers"
_WITH_EXPERTS = (MOE_NAME, QWEN_NEXT_NAME)


def _tokens(cell: Cell) -> int:
    return cell.sizes["B"] * cell.sizes["T"]


def _large_llama(cell: Cell) -> bool:
    return cell.op == LLAMA_NAME and _tokens(cell) >= 8 * 2048


def _large(cell: Cell) -> bool:
    return _tokens(cell) >= 4096 and not _large_llama(cell) and cell.op not in _WITH_EXPERTS


def _large_with_experts(cell: Cell) -> bool:
    return cell.op in _WITH_EXPERTS and _tokens(cell) >= 4096


GOALS = (
    Goal("1 x 512 tokens", lambda cell: _tokens(cell) < 4096, most=1.15),
    Goal("4096 tokens and more", _large, most=1.05),
    Goal("8 x 2048 tokens, Llama", _large_llama, most=1.06),
    Goal("4096 tokens and more, experts", _large_with_experts, most=1.0),
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
    _series(QWEN_NEXT_NAME, QWEN_NEXT),
    _series(QWEN_35_NAME, QWEN_35),
)
