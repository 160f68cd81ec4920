"""What one of 1, 2, 4 or 8 ranks computes of a layer that they share, at the widths of Llama 3.1 8B and 70B:
the linear layers of a block in class tree8, and the LM head with log-probabilities in class lse/8x4. Random
weights, bf16; forward, and with the gradients of tokens and weight.

    isobit     a call of rank 0 with a group: its kernels, with those that fold sums over ranks
    torch.mm   cuBLAS with the same shard, and nothing else: no sum over ranks, no log-probabilities

It is one process with one GPU. `Rank` stands in for the group: the rank's own part of every exchange is
copied, as collectives copy it, and what others would send is 0 and in memory before anything is timed. So
times have no wire in them, and nothing is claimed about it; `sent_mb` is what this rank sends to others.

Ranks of one layer have the same sizes, so one of them is timed. Its results lack the others' parts. Those
elements that do not are compared with fp64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.ops.linear_logp.op import linear_logp
from isobit.parallel import Group, column_linear, row_linear
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.truth import Verdict, spread_evenly

BASELINE = "torch.mm"

RANKS, TOKENS, TRAINED = (1, 2, 4, 8), (8, 72, 512, 8192), (512, 8192)

#: What has gradients.
INPUTS = ("x", "weight")

#: The columns of q, k and v, of gate and up; and (N, K) of all products, by what cuts them.
MODELS = {
    "8b": {
        "qkv": ("column", (4096, 1024, 1024), 4096), "o": ("row", (4096,), 4096),
        "gate_up": ("column", (14336, 14336), 4096), "down": ("row", (4096,), 14336),
        "head": ("head", (128256,), 4096),
    },
    "70b": {
        "qkv": ("column", (8192, 1024, 1024), 8192), "o": ("row", (8192,), 8192),
        "gate_up": ("column", (28672, 28672), 8192), "down": ("row", (8192,), 28672),
        "head": ("head", (128256,), 8192),
    },
}  # fmt: skip

#: For a CPU: parts of N, and K.
SMALL = {"column": ((32, 16, 16), 64), "row": ((32,), 64), "head": ((512,), 24)}


class Rank(Group):
    """Rank 0 of several, without the others."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, 0
        self._received: dict[Any, Tensor] = {}

    def all_gather(self, t: Tensor) -> Tensor:
        self.sent += (self.size - 1) * t.nbytes
        return self._with_own("all_gather", t, (self.size, *t.shape))

    def all_to_all(self, t: Tensor) -> Tensor:
        self.sent += (self.size - 1) * t[0].nbytes
        return self._with_own("all_to_all", t[0], t.shape)

    def _with_own(self, what: str, own: Tensor, shape: Sequence[int]) -> Tensor:
        key = what, tuple(shape), own.dtype, own.device
        if key not in self._received:
            self._received[key] = own.new_zeros(shape)
        out = self._received[key]
        out[0].copy_(own)
        return out

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


# Calls. Each takes the arguments of a case; the group does not ask what others call.


def column(args: Args, backend: str | None = None) -> Tensor:
    assert backend is None
    return column_linear(
        args["x"], args["weight"], group=args["group"], parts=args["parts"], validate=False
    )  # fmt: skip


def row(args: Args, backend: str | None = None) -> Tensor:
    assert backend is None
    return row_linear(args["x"], args["weight"], group=args["group"], validate=False)


def head(args: Args, backend: str | None = None) -> Tensor:
    assert backend is None
    V = sum(args["parts"])
    logp = linear_logp(
        args["x"], args["weight"], args["token_ids"], vocab_size=V, group=args["group"], validate=False
    )
    assert isinstance(logp, Tensor)
    return logp


CALLS = {"column": column, "row": row, "head": head}


def product(args: Args) -> Tensor:
    return F.linear(args["x"], args["weight"])


RIVALS = {BASELINE: Rival(BASELINE, product, judged=False, jit=False)}


# The check


@dataclass(frozen=True)
class Judge:
    """Knows the first rows of a call in fp64, of which this rank has all sums. With zeros from the others, y
    of a row layer is the rank's partial sum there, and log-probabilities are among its own tokens."""

    kind: str
    args: Args

    def error(self, direction: str, result: tuple[Tensor, ...]) -> Verdict:
        x, weight, group = (self.args[name] for name in ("x", "weight", "group"))
        whole = len(x) if self.kind != "row" else max(len(x) // group.size, 1)
        rows = spread_evenly(whole, 16, x.device)
        truth = x[rows].double() @ weight.double().t()
        if self.kind == "head":
            truth = truth.log_softmax(-1).gather(1, self.args["token_ids"][rows, None])[:, 0]
        error = float((result[0].detach()[rows].double() - truth).abs().max())
        return Verdict(error, more={"sent_mb": sent(self.kind, self.args, direction) / 1e6})


def sent(kind: str, args: Args, direction: str) -> int:
    """The bytes that a rank sends to others."""
    group, training = Rank(args["group"].size), direction != "fwd"
    leaves = {name: args[name].detach().requires_grad_(training) for name in INPUTS}
    y = CALLS[kind](args | leaves | {"group": group})
    if training:
        torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))
    return group.sent


# Series


def _sizes(kind: str, case: Case) -> tuple[int, int]:
    """(N, K) of this rank's shard."""
    N, K, ranks = (case.dims[name] for name in "NKR")
    return (N, K // ranks) if kind == "row" else (N // ranks, K)


def _make(kind: str, parts: tuple[int, ...], case: Case, pool: Pool) -> list[Args]:
    M, ranks = case.dims["M"], case.dims["R"]
    parts = parts if sum(parts) == case.dims["N"] else (case.dims["N"],)  # of a case for a CPU
    N, K = _sizes(kind, case)
    x = pool.normal("x", M, K, dtype=case.dtype)
    given = {"x": x, "parts": parts, "group": pool.made(f"group of {ranks}", lambda: Rank(ranks))}
    if kind == "head":
        given["token_ids"] = torch.arange(M, device=pool.device) * 31 % N
    copies = range(copies_for(N * K * case.dtype.itemsize, pool.device))

    def weight() -> Tensor:
        gen = torch.Generator(pool.device).manual_seed(pool.inputs.seed)
        drawn = torch.empty(N, K, dtype=case.dtype, device=pool.device)
        return drawn.normal_(0.0, K**-0.5, generator=gen)

    return [{**given, "weight": pool.made(f"weight {i}", weight)} for i in copies]


def cost(kind: str, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Each operand of this rank read once, each result written once; backward two products."""
    M, ranks = dims["M"], dims["R"]
    N, K = (dims["N"], dims["K"] // ranks) if kind == "row" else (dims["N"] // ranks, dims["K"])
    outputs = 4 * M if kind == "head" else M * N * dtype.itemsize
    read, flops = (M * K + N * K) * dtype.itemsize, 2 * M * N * K
    return Cost(read + outputs, 2 * read + outputs, flops, 2 * flops)


def _case(M: int, N: int, K: int, ranks: int) -> Case:
    return Case({"M": M, "N": N, "K": K, "R": ranks}, torch.bfloat16, data="random")


def _series(model: str, layer: str, training: bool) -> Series:
    kind, parts, K = MODELS[model][layer]
    few, least = SMALL[kind]
    cases = [_case(M, sum(parts), K, R) for R in RANKS for M in (TRAINED if training else TOKENS)]
    needs = {"head": ("linear_logp",)}.get(kind, ("det_linear",))
    return Series(
        op=None, name=f"{model}-{layer}{'-training' if training else ''}", cases=cases,
        core=[case for case in cases if case.dims["M"] in (8, 8192) and case.dims["R"] in (1, 8)],
        small=[_case(6, sum(few), least, 2)], make=partial(_make, kind, parts), call=CALLS[kind],
        cost=partial(cost, kind), judge=lambda args: Judge(kind, args), rivals=RIVALS,
        inputs=INPUTS if training else (), directions=("fwd_bwd",) if training else ("fwd",),
        needs=needs, against=BASELINE, copy=False,
        shared=lambda case: (*list(case.dims.values())[1:], case.dtype),
        about=f"{layer} of Llama 3.1 {model.upper()} on one of R ranks"
              f"{', with gradients' if training else ''}",
    )  # fmt: skip


SERIES: Sequence[Series] = tuple(
    _series(model, layer, training)
    for model, layers in MODELS.items() for layer in layers for training in (False, True)
)  # fmt: skip
