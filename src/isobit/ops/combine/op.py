"""Rows of tokens to their experts, and back. `place` [T, k] names the row of each expert of a token, among
rows that are sorted by expert.

    spread     y[place[t, j]] = x[t]
    combine    out[t] = round(sum_j round(y[place[t, j]] w[t, j]))     the inner rounding with rounding="hf"

Sums are in fp32, in the order of j, from the first term on. Gradients:

    spread     dx[t]     = round(sum_j dy[place[t, j]])
    combine    dy[place[t, j]] = round(dout[t] w[t, j])
               dw[t, j]  = round(dout[t] . y[place[t, j]])     512 lanes, then a tree of neighbours

Nothing here is approximate on one device and exact on another: products, sums and roundings are IEEE's, so
the class has the same bits on all of them.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from isobit.frame.contract import Contract, Int, Single, dtype_name
from isobit.frame.device import triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.numerics import Numerics

COMBINE_1 = Numerics(
    "combine/1",
    "Products and sums in fp32 without contraction, the rows of a token in the order of its experts, from the"
    " first on. A dot product over columns by 512 lanes, lane i takes columns i, i + 512, ..., from 0 on;"
    " then neighbours are added until one is left. Roundings to nearest where the op's formula has them.",
    "any: IEEE arithmetic in a fixed order",
)

#: Experts of a token that the kernels take: their loop is unrolled.
MOST = 32

ROUNDINGS = ("hf", "once")


@public_op("combine")
def forward() -> Single[Tensor, "T D in y"]:
    """out."""


@forward.public
def combine(
    y: Single[Tensor, "R D"],
    weights: Single[Tensor, "T k"],
    place: Int[Tensor, "T k"],
    *,
    rounding: Literal["hf", "once"] = "hf",
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """The sum of what the experts of a token return, each times its weight, in the order of the experts.

    Args:
        y: [R, D] in bf16, fp16 or fp32: the rows that experts return, sorted by expert.
        weights: [T, k], of the dtype of y or fp32: of each token's experts.
        place: [T, k], int32 or int64: the row of y of each of them, no row twice; `route` makes it.
        rounding: "hf" rounds weight times row to the dtype of y before the sum, as transformers does; "once"
            rounds the sum alone.
        validate: check place on a GPU too (a host sync). None checks on CPU tensors, and everywhere with
            ISOBIT_VALIDATE=1. Without the check a place outside y adds nothing; nothing is read or written
            out of bounds.
        numerics: the numerics class that the result must have, "combine/1"; None takes that of the backend
            that serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton" or "model"; None takes the first that can serve.

    Returns:
        [T, D] in the dtype of y. The bits of a token depend on its own rows and weights only.

    Gradients: of y, weight times the gradient, and 0 for rows of no token; of weights, a dot product over the
    columns in a fixed order. With as many places as rows, and unchecked places that name a row twice or one
    outside, the gradient of a row that none names is anything.

    Example:
        >>> import torch, isobit
        >>> y = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
        >>> isobit.combine(y, torch.tensor([[0.5, 0.5], [1.0, 2.0]]), torch.tensor([[0, 2], [3, 1]]))
        tensor([[ 3.,  4.],
                [13., 16.]])
    """
    return forward(
        y=y, weights=weights, place=place, rounding=rounding, validate=validate, numerics=numerics,
        backend=backend,
    )  # fmt: skip


@op("combine_bwd", like=forward.params("y", "weights", "place"))
def backward(
    dout: Single[Tensor, "T D"],
    want_y: bool,
    want_weights: bool,
) -> tuple[Single[Tensor, "R D in y if want_y"], Single[Tensor, "T k in weights if want_weights"]]:
    """(dy, dweights), those that are wanted."""


def _rows_of(args: dict[str, Any]) -> dict[str, int]:
    return {"R": math.prod(args["place"].shape) if args["rows"] is None else args["rows"]}


@public_op("spread", sizes=_rows_of)
def spreading() -> Single[Tensor, "R D in x"]:
    """y."""


@spreading.public
def spread(
    x: Single[Tensor, "T D"],
    place: Int[Tensor, "T k"],
    *,
    rows: int | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """The row of every token, once for each of its experts, where `place` says.

    Args:
        x: [T, D] in bf16, fp16 or fp32.
        place: [T, k], int32 or int64: the row of each expert of a token, no row twice; `route` makes it.
        rows: how many there are; None is one for each place.
        validate: check place on a GPU too (a host sync). None checks on CPU tensors, and everywhere with
            ISOBIT_VALIDATE=1. Without the check nothing is written for a place outside the rows.
        numerics: the numerics class that the result must have, "combine/1"; None takes that of the backend
            that serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton" or "model"; None takes the first that can serve.

    Returns:
        [rows, D] in the dtype of x; 0 where no place points. With as many places as rows every row has one,
        and memory is not cleared first: if unchecked places name a row twice, or one outside, then rows that
        none names hold anything.

    Gradients: of x, the sum of its rows' gradients in fp32 in the order of the experts, rounded once.

    Example:
        >>> import torch, isobit
        >>> isobit.spread(torch.tensor([[1.0], [2.0]]), torch.tensor([[0, 3], [2, 1]])).flatten()
        tensor([1., 2., 2., 1.])
    """
    return spreading(x=x, place=place, rows=rows, validate=validate, numerics=numerics, backend=backend)


@op("spread_bwd", like=spreading.params("place"))
def spread_bwd(dy: Single[Tensor, "R D"]) -> Single[Tensor, "T D in dy"]:
    """dx."""


# Rules that annotations cannot express


@forward.rule
def _dtypes(contract: Contract, args: dict[str, Any]) -> None:
    y, weights = args["y"], args["weights"]
    if weights.dtype not in (y.dtype, torch.float32):
        raise contract.error("weights", weights, f"dtype must be that of y, {dtype_name(y.dtype)}, or fp32")


@forward.rule
def _known_rounding(contract: Contract, args: dict[str, Any]) -> None:
    if args["rounding"] not in ROUNDINGS:
        raise contract.error("rounding", args["rounding"], f"must be one of {', '.join(ROUNDINGS)}")


def _rows_positive(contract: Contract, args: dict[str, Any]) -> None:
    if args["rows"] is not None and args["rows"] < 0:
        raise contract.error("rows", args["rows"], "must not be negative")


def _places_exist(contract: Contract, args: dict[str, Any]) -> None:
    """Each is a row, and no row is there twice: its gradient would be that of one of them."""
    place = args["place"]
    R = len(args["y"]) if "y" in args else _rows_of(args)["R"]
    flat = place.flatten()
    wrong = ((flat < 0) | (flat >= R)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        where = [int(n) for n in torch.unravel_index(torch.tensor(i), place.shape)]
        raise contract.error("place", place, f"must be in [0, {R}), the rows: {where} is {int(flat[i])}")
    if len(flat.unique()) < len(flat):
        raise contract.error("place", place, "must not have a row twice")


forward.value_rule(_places_exist)
spreading.rule(_rows_positive)
spreading.value_rule(_places_exist)


# Backends, fastest first


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    place = args["place"]
    if place.shape[-1] > MOST:
        return f"{place.shape[-1]} experts per token; the kernels take up to {MOST}"
    return triton_cannot_run(place.device)


_OPS = ((forward, "combine"), (backward, "combine_bwd"), (spreading, "spread"), (spread_bwd, "spread_bwd"))
for each, function in _OPS:
    each.grows = f"{__package__}.growth:tokens_and_rows"
    each.backend(
        "triton", run=f"kernels_triton:{function}", numerics=str(COMBINE_1), when=_triton_cannot_serve,
        interpreted=True, launches=True,
    )  # fmt: skip
    each.backend("model", run=f"model:{function}", numerics=str(COMBINE_1))


# Autograd, once for all backends

forward.derivative("y", "weights", by=backward, outputs=("out",))
spreading.derivative("x", by=spread_bwd, outputs=("y",))
backward.not_differentiable(
    "isobit.combine has no second derivative: its backward is a kernel without a gradient of its own."
)
spread_bwd.not_differentiable("isobit.spread has no second derivative: its gradient is a sum of rows.")
