"""The router of a mixture of experts: which experts a token goes to, with which weights, and where its rows
are among rows that are sorted by expert.

With z a row of logits and everything in fp32 (in fp64 for fp64 logits, which the reference alone takes):

    p = softmax(z), or 1 / (1 + exp(-z))
    the k experts with the largest z, or p + bias; of equal ones the lower expert first
    w[j] = p of the j-th expert; with normalize divided by their sum, which is added in their order
    w[j] = softmax over the k logits alone, with order="topk_softmax"

and w is rounded once. Rows are then sorted by expert with one counting sort that is stable:

    place[t, j]   the row of expert j of token t
    offsets[e]    the first row of expert e; rows from the last offset on are of masked tokens

Gradients of the logits, with g the gradient of w, p and w as above and before they are rounded:

    d = sum_j g[j] w[j]                                       in the order of the experts
    softmax, normalized or over the k:    w[j] (g[j] - d)     for those that were chosen, otherwise 0
    softmax:                              p[i] (g[i] - d)     with g = 0 for those that were not
    sigmoid, normalized:                  (g[j] - d) / sum p  p[j] (1 - p[j])
    sigmoid:                              g[j] p[j] (1 - p[j])
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float, Int, Mask
from isobit.frame.device import triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.numerics import Numerics

ROUTE_1 = Numerics(
    "route/1",
    "fp32: exp of the device's math library, quotients to nearest, no contraction. A sum over all experts"
    " adds neighbours until one is left, after zeros up to a power of two; a sum over the experts of a token"
    " goes from the first on. Weights and gradients are rounded once.",
    "GPUs through Triton",
)
ROWS_1 = Numerics("expert-rows/1", "A stable sort: integers, and no arithmetic that rounds.", "any")

#: Experts, and experts of a token, that the kernels take: a row is in registers, and its loop is unrolled.
MOST_EXPERTS, MOST = 512, 32

SCORINGS, ORDERS = ("softmax", "sigmoid"), ("softmax_topk", "topk_softmax")


class Routing(NamedTuple):
    """What `route` returns."""

    weights: Tensor
    experts: Tensor
    place: Tensor
    offsets: Tensor


def _sizes(args: dict[str, Any]) -> dict[str, int]:
    return {"k": args["top_k"], "E+1": args["logits"].shape[-1] + 1}


@public_op("route", sizes=_sizes)
def forward(
    sort: bool = True,
) -> tuple[
    Float[Tensor, "* k in dtype or logits"],
    Int[Tensor, "* k"],
    Int[Tensor, "* k if sort"],
    Int[Tensor, "E+1 if sort"],
]:
    """(weights, experts, place, offsets); the last two if `sort`: a layer of experts sorts by itself."""


@forward.public
def route(
    logits: Float[Tensor, "* E"],
    top_k: int,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    order: Literal["softmax_topk", "topk_softmax"] = "softmax_topk",
    normalize: bool = False,
    dtype: torch.dtype | None = None,
    bias: F32[Tensor, "E"] | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    mask: Mask[Tensor, "*"] | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Routing:
    """The experts of every token, their weights, and where the rows of tokens are when sorted by expert.

    Args:
        logits: [*, E] in bf16, fp16, fp32 (or fp64, on the reference backend). Any leading shape and strides,
            the last dimension contiguous.
        top_k: how many experts a token has.
        scoring: "softmax" or "sigmoid" of the logits.
        order: "softmax_topk" takes weights from the softmax over all experts; "topk_softmax" makes a softmax
            over the chosen ones alone, as GPT-OSS does.
        normalize: divide the weights of a token by their sum.
        dtype: of the weights, bf16, fp16 or fp32; None is that of logits. They are rounded to it once.
        bias: [E] fp32 (or fp64 for fp64 logits): added to scores to choose experts, and not part of the
            weights, as in DeepSeek-V3. It gets no gradient.
        groups: choose among the experts of `top_groups` of so many groups of consecutive experts only: those
            in which the two largest scores have the largest sum.
        top_groups: how many groups a token has.
        mask: [*], bool or integer: tokens with 0 go to no expert. Their experts are E, their weights and
            gradients 0, and their rows come last.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "route/1"; None takes that of the backend that
            serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton" or "reference"; None takes the first that can serve.

    Returns:
        Routing: weights [*, k] in `dtype`; experts [*, k] int32, the one with the largest score first; place
        [*, k] int32, the row of each, for `spread` and `combine`; offsets [E + 1] int32, where experts begin,
        for `det_grouped_linear`. They stay on the device: there is no host sync. In class route/1 the weights
        and experts of a token depend on its logits only.

    Gradients: of logits, by the weights. The choice of experts has none.

    Example:
        >>> import torch, isobit
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])
        >>> routed = isobit.route(logits, 2, normalize=True)
        >>> routed.experts.tolist(), routed.place.tolist(), routed.offsets.tolist()
        ([[1, 2], [0, 1]], [[1, 3], [0, 2]], [0, 1, 3, 4])
    """
    return Routing(*forward(
        logits=logits, top_k=top_k, scoring=scoring, order=order, normalize=normalize, dtype=dtype, bias=bias,
        groups=groups, top_groups=top_groups, mask=mask, validate=validate, numerics=numerics,
        backend=backend,
    ))  # fmt: skip


def choose_experts(
    logits: Tensor, top_k: int, *, order: str, normalize: bool, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """(weights, experts) as `route` returns them, without the sort: for a router whose experts are a module
    of their own, which sorts."""
    weights, experts, _, _ = forward(
        logits=logits, top_k=top_k, order=order, normalize=normalize, dtype=dtype, sort=False
    )
    return weights, experts


@op(
    "route_bwd",
    like=forward.params("logits", "top_k", "scoring", "order", "normalize", "mask"),
)
def backward(
    experts: Int[Tensor, "* k"],
    dweights: Float[Tensor, "* k"],
) -> Float[Tensor, "* E in logits"]:
    """dlogits."""


@op("expert_rows", sizes=lambda args: {"E+1": args["count"] + 1})
def rows_op(experts: Int[Tensor, "* k"], count: int) -> tuple[Int[Tensor, "* k"], Int[Tensor, "E+1"]]:
    """(place, offsets)."""


def expert_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(place, offsets) as `route` returns them, for `count` experts that were chosen by another router. What
    is not in [0, count) is of no expert, and comes last."""
    place, offsets = rows_op(experts=experts, count=count)
    return place, offsets


# Rules that annotations cannot express


@forward.rule
def _known(contract: Contract, args: dict[str, Any]) -> None:
    for name, known in (("scoring", SCORINGS), ("order", ORDERS)):
        if args[name] not in known:
            raise contract.error(name, args[name], f"must be one of {', '.join(known)}")
    if args["dtype"] not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise contract.error("dtype", args["dtype"], "must be bf16, fp16 or fp32")
    bias = args["bias"]
    if bias is not None and bias.dtype not in (torch.float32, args["logits"].dtype):
        raise contract.error("bias", bias, "dtype must be fp32, or fp64 if logits are fp64")


@forward.rule
def _goes_together(contract: Contract, args: dict[str, Any]) -> None:
    if args["order"] == "softmax_topk":
        return
    if args["scoring"] != "softmax":
        raise contract.error("order", args["order"], "is a softmax, and scoring is not")
    for name in ("bias", "groups"):
        if args[name] is not None:
            raise contract.error(name, args[name], "needs scores of all experts, order='softmax_topk'")


@forward.rule
def _enough_experts(contract: Contract, args: dict[str, Any]) -> None:
    E, k = args["logits"].shape[-1], args["top_k"]
    if not 0 < k <= E:
        raise contract.error("top_k", k, f"must be from 1 to the number of experts, {E}")
    groups, some = args["groups"], args["top_groups"]
    if groups is None:
        if some is not None:
            raise contract.error("top_groups", some, "needs groups")
        return
    if groups < 1 or E % groups or E // groups < 2:
        raise contract.error("groups", groups, f"must divide {E} experts into equal groups of two or more")
    if some is None or not 0 < some <= groups:
        raise contract.error("top_groups", some, f"must be from 1 to the number of groups, {groups}")
    if some * (E // groups) < k:
        raise contract.error("top_k", k, f"exceeds the {some * (E // groups)} experts of {some} groups")


def _rows_fit(contract: Contract, args: dict[str, Any]) -> None:
    """Rows are numbered in int32."""
    rows = args["experts"].shape if "count" in args else (*args["logits"].shape[:-1], args["top_k"])
    if math.prod(rows) >= 1 << 31:
        name = "experts" if "count" in args else "logits"
        raise contract.error(name, args[name], "has 2**31 rows or more; divide it")


def _count_positive(contract: Contract, args: dict[str, Any]) -> None:
    if args["count"] < 0:
        raise contract.error("count", args["count"], "must not be negative")


@backward.rule
def _experts_of_a_token(contract: Contract, args: dict[str, Any]) -> None:
    """The kernel reads `top_k` columns of experts and of dweights, whatever they have."""
    E, k, experts = args["logits"].shape[-1], args["top_k"], args["experts"]
    if not 0 < k <= E:
        raise contract.error("top_k", k, f"must be from 1 to the number of experts, {E}")
    if experts.shape[-1] != k:
        raise contract.error("experts", experts, f"must have top_k columns, {k}")


forward.rule(_rows_fit)
rows_op.rule(_rows_fit, _count_positive)


# Backends, fastest first


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    logits, groups = args["logits"], args.get("groups")
    E = logits.shape[-1]
    if logits.dtype == torch.float64:
        return "logits are fp64; class route/1 is fp32 arithmetic"
    if E > MOST_EXPERTS or args["top_k"] > MOST:
        return f"{E} experts, {args['top_k']} of a token; the kernels take up to {MOST_EXPERTS} and {MOST}"
    if groups is not None and (E & (E - 1) or groups & (groups - 1)):
        return f"{groups} groups of {E} experts; the kernels take powers of two"
    return triton_cannot_run(logits.device)


def _triton_cannot_sort(args: dict[str, Any]) -> str | None:
    return triton_cannot_run(args["experts"].device)


TRITON: dict[str, Any] = {"interpreted": True, "launches": True}
_SCORES: dict[str, Any] = {"numerics": str(ROUTE_1), "when": _triton_cannot_serve} | TRITON
forward.backend("triton", run="kernels_triton:route", **_SCORES)
backward.backend("triton", run="kernels_triton:route_bwd", **_SCORES)
rows_op.backend(
    "triton", run="kernels_triton_sort:expert_rows", numerics=str(ROWS_1), when=_triton_cannot_sort, **TRITON
)
forward.backend("reference", run="reference:route", numerics=NONE)
backward.backend("reference", run="reference:route_bwd", numerics=NONE)
rows_op.backend("reference", run="reference:expert_rows", numerics=str(ROWS_1))


# Autograd, once for all backends

forward.derivative(
    "logits", by=backward, outputs=("weights", "experts", "place", "offsets"),
    constant=("experts", "place", "offsets"),
)  # fmt: skip
backward.not_differentiable(
    "isobit.route has no second derivative: its backward is a kernel without a gradient of its own."
)
