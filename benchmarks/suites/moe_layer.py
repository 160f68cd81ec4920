"""A whole layer of a mixture of experts: the router's product, the choice of experts, rows sorted by expert,
two grouped products with SwiGLU between them, and the weighted sum of what the experts return. Random
weights, bf16; forward alone, and with the gradients of the tokens and of all weights.

    isobit                     det_linear, route, spread, det_grouped_linear, swiglu_packed, combine
    transformers.grouped_mm    its block of Qwen3-MoE with `experts_implementation="grouped_mm"`
    transformers.eager         the same with "eager": a loop over experts that waits for the device
    torch._grouped_mm          that product, with as little as possible around it
    torch.mm_loop              a loop over experts with cuBLAS; their sizes are read back once
    liger                      Liger's experts in Triton, after the same router as for these two

`ms` is device time, `host_us` the time until an eager call returns, `peak_mb` the memory of a call. The rows
`:new` have another number of tokens in every call. Before anything is timed, the layer must agree with fp64
on tokens whose experts no rounding decides.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import Cell, Goal
from isobit.bench.timing import ONCE_CALLS
from isobit.ops.combine import combine, spread
from isobit.ops.det_gemm import det_linear
from isobit.ops.det_grouped_linear import det_grouped_linear
from isobit.ops.route import route
from isobit.ops.swiglu import swiglu_packed
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.truth import spread_evenly

BASELINE, EAGER = "transformers.grouped_mm", "transformers.eager"

DIRECTIONS = ("fwd", "fwd_bwd")
WORDS = {"fwd": "forward", "fwd_bwd": "training"}
INPUTS = ("x", "router", "gate_up", "down")

#: (E, k, D, F): experts, those of a token, columns of a token, columns between the products.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "olmoe-1b-7b": (64, 8, 2048, 1024),
    "qwen3-next-80b-a3b": (512, 10, 2048, 512),
}
TOKENS = (256, 4096, 16384, 32768)

#: Numbers of tokens of calls with new sizes, and the usual number next to which they are timed.
USUAL, NEW_TOKENS = 768, range(513, 1024)
assert len(NEW_TOKENS) - 1 >= ONCE_CALLS

#: The most that a call with a new number of tokens may take the host, as a multiple of a usual one.
NEW_MOST = 2.0

#: Tokens that are compared with fp64; how much a logit must be larger than all that are not chosen, relative
#: to the largest one; and the largest error, relative to the largest true value.
JUDGED, APART, CLOSE = 16, 2e-2, 5e-2


# Layers. Each takes the arguments of a case, and returns [N, D].


def layer(args: Args, backend: str | None = None) -> Tensor:
    assert backend is None
    x = args["x"]
    routed = route(det_linear(x, args["router"]), args["k"], normalize=True, validate=False)
    rows = spread(x, routed.place, validate=False)
    gate_up = det_grouped_linear(rows, args["gate_up"], routed.offsets, validate=False)
    y = det_grouped_linear(swiglu_packed(gate_up), args["down"], routed.offsets, validate=False)
    return combine(y, routed.weights, routed.place, validate=False)


def _routed(args: Args) -> tuple[Tensor, Tensor]:
    """(weights, experts) as transformers computes them."""
    logits = F.linear(args["x"], args["router"])
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(args["k"], dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def _around(product: Callable[[Tensor, Tensor, Tensor], Tensor], args: Args) -> Tensor:
    """What the products need around them. `product(rows, weight, ends)`: rows are sorted by expert, and
    `ends` says where those of each expert end."""
    x, E, k = args["x"], len(args["gate_up"]), args["k"]
    weights, experts = _routed(args)
    chosen, order = experts.flatten().sort()
    ends = torch.searchsorted(chosen, torch.arange(E, device=x.device), right=True).to(torch.int32)
    gate, up = product(x[order // k], args["gate_up"], ends).chunk(2, -1)
    y = product(F.silu(gate) * up, args["down"], ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (y[back].view(len(x), k, -1) * weights[..., None]).sum(1)


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = torch._grouped_mm(rows, weight.mT, offs=ends)
    return out


def _loop(args: Args) -> Tensor:
    known: list[int] = []  # of both products: there is one wait for the device

    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if not known:
            known.extend((0, *ends.tolist()))
        bounds = enumerate(pairwise(known))
        return torch.cat([rows[first:end] @ weight[e].t() for e, (first, end) in bounds if first < end])

    return _around(product, args)


def _liger(args: Args) -> Tensor:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    weights, experts = _routed(args)
    out: Tensor = LigerFusedMoEFunction.apply(
        args["x"], args["gate_up"], args["down"], experts.to(torch.int32), weights
    )
    return out


def _liger_available(case: Case, device: torch.device) -> str | None:
    return cannot_import("liger_kernel.ops.fused_moe") or (
        "its kernels need a GPU" if device.type == "cpu" else None
    )


def _block(implementation: str, args: Args) -> Args:
    """transformers' block, without parameters: `_served` gives it the tensors of a call."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    E, D, columns = args["down"].shape
    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=columns, num_experts=E, num_experts_per_tok=args["k"],
        norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    for module in (block.gate, block.experts):
        module._parameters.clear()
    return args | {"block": block}


def _served(args: Args) -> Tensor:
    block = args["block"]
    if vars(block.gate).get("weight") is not args["router"]:  # once: a user's layer has its own parameters
        block.gate.weight = args["router"]
        block.experts.gate_up_proj, block.experts.down_proj = args["gate_up"], args["down"]
    out: Tensor = block(args["x"][None])
    return out[0]


def _has_transformers(case: Case, device: torch.device) -> str | None:
    return cannot_import("transformers.models.qwen3_moe.modeling_qwen3_moe")


def _has_grouped_mm(case: Case, device: torch.device) -> str | None:
    return None if hasattr(torch, "_grouped_mm") else "this PyTorch has none"


_plain = partial(Rival, directions=DIRECTIONS, jit=False)

RIVALS = {
    rival.name: rival
    for rival in (
        _plain(BASELINE, _served, prepare=partial(_block, "grouped_mm"), available=_has_transformers),
        _plain(EAGER, _served, prepare=partial(_block, "eager"), available=_has_transformers, graph=False),
        _plain("torch._grouped_mm", partial(_around, _grouped_mm), available=_has_grouped_mm),
        _plain("torch.mm_loop", _loop, graph=False),
        # It reads back how many tiles there are.
        Rival("liger", _liger, directions=DIRECTIONS, available=_liger_available, graph=False),
    )
}


# The check


@dataclass(frozen=True)
class Judge:
    """Some tokens, and what the layer returns for them, in fp64."""

    tokens: Tensor
    truth: Tensor

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float:
        """The largest error. Raises CheckFailed if a result is wrong, or has a gradient that is not
        finite."""
        out, *gradients = result
        error = float((out.detach()[self.tokens].double() - self.truth).abs().max())
        if not error <= CLOSE * float(self.truth.abs().max()):  # NaN is never close
            raise CheckFailed(
                f"moe_layer: the output differs by {error:.3g} from fp64, {CLOSE:g} of the largest value is "
                "allowed, so nothing is timed"
            )
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise CheckFailed("moe_layer: a gradient is not finite, so nothing is timed")
        return error


@torch.no_grad()
def judge(args: Args) -> Judge | None:
    """None if rounding decides the experts of all tokens that would be compared."""
    x, k = args["x"], args["k"]
    tokens = spread_evenly(len(x), JUDGED, x.device)
    logits = x[tokens].double() @ args["router"].double().t()
    best, experts = logits.topk(min(k + 1, logits.shape[1]), dim=-1)
    if best.shape[1] > k:
        clear = best[:, k - 1] - best[:, k] > APART * best[:, 0].abs()
        tokens, best, experts = tokens[clear], best[clear, :k], experts[clear, :k]
    if not len(tokens):
        return None
    weights, truth = best.softmax(-1), []
    for token, own, chosen in zip(tokens, weights, experts, strict=True):
        gate, up = (args["gate_up"][chosen].double() @ x[token].double()).chunk(2, -1)
        y = (args["down"][chosen].double() @ (F.silu(gate) * up)[..., None])[..., 0]
        truth.append(own @ y)
    return Judge(tokens, torch.stack(truth))


# Series


def _make(case: Case, pool: Pool) -> list[Args]:
    """Weights are of a magnitude that keeps that of the tokens."""
    N, E, k, D, columns = case.dims.values()
    gen = torch.Generator(pool.device).manual_seed(pool.inputs.seed)

    def drawn(*shape: int) -> Tensor:
        t = torch.empty(shape, dtype=case.dtype, device=pool.device)
        return t.normal_(0.0, shape[-1] ** -0.5, generator=gen)

    def weights() -> dict[str, Tensor]:
        shapes = {"router": (E, D), "gate_up": (E, 2 * columns, D), "down": (E, D, columns)}
        return {name: drawn(*shape) for name, shape in shapes.items()}

    size = 3 * E * D * columns * case.dtype.itemsize
    x = pool.normal("x", N, D, dtype=case.dtype)
    copies = range(copies_for(size, pool.device))
    return [{"x": x, "k": k, **pool.made(f"weights {i}", weights)} for i in copies]


def _new(case: Case, pool: Pool) -> list[Args]:
    if case.dims["N"] != USUAL:
        return []
    known = [n for n in NEW_TOKENS if n != USUAL]
    (args, *_) = _make(Case(case.dims | {"N": known[-1]}, case.dtype, data=case.data), pool)
    numbers = random.Random(pool.inputs.seed).sample(known, len(known))
    return [args | {"x": args["x"][:n]} for n in numbers]


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Tokens are read and written, and the weights of the experts that are hit read, once. Backward these are
    read and written again."""
    N, E, k, D, columns = dims.values()
    hit = E * (1 - (1 - 1 / E) ** (N * k))
    weights = int((3 * hit * columns + E) * D) * dtype.itemsize
    tokens, flops = N * D * dtype.itemsize, 2 * N * D * (3 * k * columns + E)
    return Cost(2 * tokens + weights, 3 * tokens + 2 * weights, flops, 2 * flops)


def _case(N: int, E: int, k: int, D: int, columns: int) -> Case:
    return Case({"N": N, "E": E, "k": k, "D": D, "F": columns}, torch.bfloat16, data="random")


def _series(name: str, direction: str, sizes: tuple[int, int, int, int], new: bool) -> Series:
    """A table shows one direction, so each has a series."""
    cases = [_case(N, *sizes) for N in (TOKENS if not new else sorted((*TOKENS, USUAL)))]
    core = [case for case in cases if case.dims["N"] in (USUAL, 4096)]
    return Series(
        op=None, name=f"{name}-{WORDS[direction]}", cases=cases, core=core,
        small=[_case(24, 4, 2, 64, 32)], make=_make, call=layer, cost=cost, judge=judge, rivals=RIVALS,
        inputs=INPUTS, directions=(direction,), new=_new if new else lambda case, pool: [],
        needs=("det_linear", "route", "spread", "det_grouped_linear", "swiglu_packed", "combine"),
        shared=lambda case: (*list(case.dims.values())[1:], case.dtype), against=BASELINE, copy=False,
        about=f"a layer of a mixture of experts, N tokens, {direction}",
    )  # fmt: skip


SERIES: Sequence[Series] = tuple(
    _series(name, direction, sizes, new=name == "qwen3-30b-a3b")
    for name, sizes in MODELS.items()
    for direction in DIRECTIONS
)


# Goals


def _in(direction: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.direction == direction


def _next_to(rival: str) -> list[Goal]:
    faster: Any = partial(Goal, mean=1.15, against=rival)
    return [faster(f"{WORDS[d]}, next to {rival}", _in(d)) for d in DIRECTIONS]


GOALS = (
    *_next_to(BASELINE),
    *_next_to(EAGER),
    Goal("memory, training", _in("fwd_bwd"), most=0.999, against=BASELINE, figure="peak_mb"),
    Goal("memory, forward", _in("fwd"), most=0.999, against=BASELINE, figure="peak_mb"),
    Goal("host time, forward", _in("fwd"), most=1.0, against=BASELINE, figure="host_us"),
    Goal("host time, training", _in("fwd_bwd"), most=1.0, against=BASELINE, figure="host_us"),
    Goal("host time with a new number of tokens", lambda cell: True, most=NEW_MOST, against="isobit",
         figure="host_us", impl="isobit:new"),
)  # fmt: skip
