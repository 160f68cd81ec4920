"""The products of one decoding step: all linear layers of a model and the logits, for B sequences. Random
weights, bf16.

    native         `F.linear`
    isobit         `isobit.det_linear`, with its default class in all layers
    isobit:mixed   the same with the classes that `isobit.nn.propose_classes` proposes, if they differ

The products alone are timed, one after another in a CUDA graph: q, k, v, o, gate, up and down of every layer,
then the head. They are separate as in transformers, not merged as in engines. What is between them is left
out: attention, norms, rotations, activations, residuals. It would be the same for all, and make their
difference smaller.

A product reads what another has just written, as in a model: `READS`. So activations are in the L2 cache. No
two layers share a weight, and a step reads 1 GB (0.5B) or 8 GB (4B) of them, so weights come from memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.bench.goals import Goal
from isobit.layers.propose import proposed_class
from isobit.numerics import TREE8
from isobit.ops.det_gemm.op import det_linear
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import Pool, Series
from isobit.spec.truth import spread_evenly

#: A product takes the output of another that has the right size: o that of q in place of attention's, down
#: that of up. "x" is what a layer gets from the one before.
READS = {
    "q": "x", "k": "x", "v": "x", "o": "q", "gate": "o", "up": "o", "down": "up", "head": "down",
}  # fmt: skip

#: Steps in one graph, the same number for all implementations: a replay takes some microseconds to start.
STEPS = 8

#: Limit of the time, as a multiple of `native`.
MOST = 1.03


# Models


@dataclass(frozen=True)
class Model:
    """Sizes of a model. `q` and `kv` are heads times head size; `bias`: q, k and v have one."""

    hidden: int
    intermediate: int
    layers: int
    q: int
    kv: int
    vocab: int
    bias: bool

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the products of a layer, in order."""
        D, wide = self.hidden, self.intermediate
        attention = {"q": (self.q, D), "k": (self.kv, D), "v": (self.kv, D), "o": (D, self.q)}
        return attention | {"gate": (wide, D), "up": (wide, D), "down": (D, wide)}

    @property
    def products(self) -> list[tuple[str, int, int]]:
        """(name, N, K) of all products of a step."""
        layer = [(name, N, K) for name, (N, K) in self.shapes.items()]
        return [*(layer * self.layers), ("head", self.vocab, self.hidden)]

    @property
    def classes(self) -> dict[str, str]:
        """Proposed for each product of a layer. Those that engines merge count as one, and have one class."""
        shapes, merged = self.shapes, (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
        return {
            name: proposed_class(shapes[name][1], sum(shapes[each][0] for each in names))
            for names in merged
            for name in names
        }

    def has_bias(self, name: str) -> bool:
        return self.bias and name in ("q", "k", "v")

    def draw(self, device: torch.device, dtype: torch.dtype, seed: int) -> "list[Parameters]":
        """Weights and biases of all products, drawn on the device. A product keeps the size of its input."""
        gen = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            std = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
            return torch.empty(*shape, dtype=dtype, device=device).normal_(0.0, std, generator=gen)

        return [
            (name, normal(N, K), normal(N) if self.has_bias(name) else None) for name, N, K in self.products
        ]


#: Name, weight and bias of a product.
Parameters = tuple[str, Tensor, Tensor | None]

MODELS = {
    "qwen2.5-0.5b-decode": Model(896, 4864, 24, 14 * 64, 2 * 64, 151936, bias=True),
    "qwen3-4b-decode": Model(2560, 9728, 36, 32 * 128, 8 * 128, 151936, bias=False),
}
#: For a CPU.
TINY = Model(32, 48, 2, 64, 16, 80, bias=True)


# Steps


def step(
    linear: Callable[[str, Tensor, Tensor, Tensor | None], Tensor], args: Args
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the last layer got, its products, and the logits."""
    values = {"down": args["x"]}
    for name, weight, bias in args["parameters"]:
        if name == "q":  # a layer begins, and what the one before has written is freed
            values = {"x": values["down"]}
        values[name] = linear(name, values[READS[name]], weight, bias)
    return tuple(values.values())


def native(args: Args) -> tuple[Tensor, ...]:
    return step(lambda name, x, weight, bias: F.linear(x, weight, bias), args)


def isobit(classes: Mapping[str, str], args: Args, backend: str | None = None) -> tuple[Tensor, ...]:
    """With the class of each layer in `classes`, and the default one in the others."""
    assert backend is None
    return step(
        lambda name, x, weight, bias: det_linear(x, weight, bias, numerics=classes.get(name)), args
    )  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """Knows the products of the last layer, and the logits, at some rows and columns."""

    parameters: Sequence[Parameters]

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float:
        """The largest error against fp64, of each product by the input that it had."""
        values = dict(zip(("x", *READS), result, strict=True))
        errors = []
        for name, weight, bias in self.parameters[-len(READS) :]:
            x, y = values[READS[name]], values[name]
            rows, columns = (spread_evenly(n, 32, y.device) for n in y.shape)
            truth = x[rows].double() @ weight[columns].double().t()
            truth += 0.0 if bias is None else bias[columns].double()
            errors.append((y[rows][:, columns].double() - truth).abs().max())
        return float(torch.stack(errors).max())


# Series

CASES = [Case({"B": B}, torch.bfloat16, data="random") for B in (8, 40, 72, 144)]
SMALL = [Case({"B": 3}, torch.bfloat16, data="random")]


def _make(name: str, model: Model, case: Case, pool: Pool) -> list[Args]:
    model = TINY if pool.device.type == "cpu" else model
    draw = partial(model.draw, pool.device, case.dtype, pool.inputs.seed)
    parameters = pool.made(f"{name} {case.dtype}", draw)
    x = pool.normal("x", case.dims["B"], model.hidden, dtype=case.dtype)
    return [{"x": x, "parameters": parameters}] * STEPS


def cost(model: Model, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Each operand read once, each output written once."""
    B = dims["B"]
    elements = sum(N * K + N * model.has_bias(name) + B * (N + K) for name, N, K in model.products)
    return Cost(elements * dtype.itemsize, fwd_flops=sum(2 * B * N * K for _, N, K in model.products))


def _variants(model: Model) -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    return {"mixed": partial(isobit, model.classes)} if TREE8 in model.classes.values() else {}


def _series(name: str, model: Model) -> Series:
    return Series(
        op=None, name=name, cases=CASES, core=CASES, small=SMALL, make=partial(_make, name, model),
        call=partial(isobit, {}), variants=_variants(model),
        cost=partial(cost, model),
        judge=lambda args: Judge(args["parameters"]),
        rivals={"native": Rival("native", native, directions=None, jit=False)}, directions=("fwd",),
        needs=("det_linear",), about="all products of a decoding step: B tokens, separate layers, logits",
        against="native", copy=False, shared=lambda case: (name, case.dtype),
    )  # fmt: skip


def _goal(name: str, impl: str) -> Goal:
    what = name if impl == "isobit" else f"{name}, {impl}"
    return Goal(what, lambda cell: cell.op == name, most=MOST, impl=impl)


SERIES: Sequence[Series] = tuple(_series(name, model) for name, model in MODELS.items())
GOALS = tuple(
    _goal(one.name, impl) for one in SERIES for impl in ("isobit", *(f"isobit:{v}" for v in one.variants))
)
