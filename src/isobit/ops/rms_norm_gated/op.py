"""RMSNorm of the heads of a gated delta-net layer, multiplied by silu of a gate.

For a row x of D numbers, a weight and a row of gates, with everything in between in fp32:

    rstd = 1 / sqrt(mean(x^2) + eps)
    y    = x rstd                       rounded to the dtype of x
    m    = y weight                     rounded to the dtype of x, unless the weight is fp32
    out  = m silu(gate)                 rounded to the dtype of x

Backward, with dm = dout silu(gate), g = dm weight, and y as it was before its rounding,

    dx      = rstd (g - y mean(g y))
    dgate   = dout m silu'(gate)
    dweight = sum over all rows of dm y
"""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import F32, Contract, Single, dtype_name
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.frame.triton_and_model import triton_and_model
from isobit.numerics import Numerics

RMS_GATED_1 = Numerics(
    "rms-gated/1",
    "Sums of a row and over rows as in rms/1: columns by a tree of neighbours, rows by groups of 16 and a"
    " tree. silu with the exp of the device's math library. No contraction; roundings to the input's dtype"
    " where the op's formula has them.",
    "any GPU through Triton",
)
RMS_GATED_1_CPU = Numerics("rms-gated/1/cpu", "rms-gated/1 with numpy's exp.", "any CPU through the model")

#: The longest row. In rms/1 rows up to this length have one column per lane.
LONGEST = 1024


@public_op("rms_norm_gated")
def forward(return_rstd: bool = False) -> tuple[
    Single[Tensor, "* D in x"], F32[Tensor, "* if return_rstd"]
]:  # fmt: skip
    """(out, rstd). Autograd asks for rstd where a backward may follow."""


@forward.public
def rms_norm_gated(
    x: Single[Tensor, "* D"],
    weight: Single[Tensor, "D"],
    gate: Single[Tensor, "* D"],
    *,
    eps: float = 1e-6,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), row by row, with bits that do not depend on the batch.

    Args:
        x: [*, D] in bf16, fp16 or fp32, D at most 1024: the heads of a layer. Any leading shape and strides,
            the last dimension contiguous.
        weight: [D], of the dtype of x or fp32.
        gate: [*, D], of the dtype of x.
        eps: a number of 0 or more, added to the mean of squares.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "rms-gated/1", or "rms-gated/1/cpu" on a CPU.
        backend: force "triton" or "model"; None takes the first that can serve.

    Returns:
        [*, D] in the dtype of x, rounded where Hugging Face's `Qwen3NextRMSNormGated` rounds: the normalised
        row, its product with the weight, and the result. A row's bits depend on that row, its gates and the
        weight only.

    Gradients: of x, weight and gate, each rounded once. dweight is a sum over the rows in their order, by
    groups of 16: it does not depend on the leading shape, on strides or on the schedule, and finite rows at
    the end whose dout is 0 do not change it.

    Example:
        >>> import torch, isobit
        >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])
        >>> isobit.rms_norm_gated(x, torch.ones(2), gate, eps=0.0)
        tensor([[0.0000, 0.8271]])
    """
    out: Tensor = forward(
        x=x, weight=weight, gate=gate, eps=eps, validate=validate, numerics=numerics, backend=backend
    )[0]
    return out


@op("rms_norm_gated_bwd", like=forward.params("x", "weight", "gate"))
def backward(
    rstd: F32[Tensor, "*"],
    dout: Single[Tensor, "* D"],
    want_x: bool,
    want_weight: bool,
    want_gate: bool,
) -> tuple[
    Single[Tensor, "* D in x if want_x"], Single[Tensor, "D in weight if want_weight"],
    Single[Tensor, "* D in x if want_gate"],
]:  # fmt: skip
    """(dx, dweight, dgate), those that are wanted."""


# Rules that annotations cannot express


def _columns(contract: Contract, args: dict[str, Any]) -> None:
    D = args["x"].shape[-1]
    if not 1 <= D <= LONGEST:
        rule = f"D must be from 1 to {LONGEST}: it is for heads; for longer rows multiply isobit.rms_norm"
        raise contract.error("x", args["x"], rule)


def _dtypes(contract: Contract, args: dict[str, Any]) -> None:
    x, weight, gate = args["x"], args["weight"], args["gate"]
    wanted = dtype_name(x.dtype)
    if weight.dtype not in (x.dtype, torch.float32):
        raise contract.error("weight", weight, f"dtype must be that of x, {wanted}, or fp32")
    if gate.dtype != x.dtype:
        raise contract.error("gate", gate, f"dtype must be that of x, {wanted}")


def _eps(contract: Contract, args: dict[str, Any]) -> None:
    if not 0 <= args["eps"] < math.inf:
        raise contract.error("eps", args["eps"], "must be a finite number, 0 or more")


forward.rule(_columns, _dtypes, _eps)
backward.rule(_columns, _dtypes)


# Backends, fastest first

_TRITON, _MODEL = triton_and_model(str(RMS_GATED_1), str(RMS_GATED_1_CPU), "x")
forward.backend("triton", run="kernels_triton:rms_norm_gated", **_TRITON)
backward.backend("triton", run="kernels_triton:rms_norm_gated_bwd", **_TRITON)
forward.backend("model", run="model:rms_norm_gated", **_MODEL)
backward.backend("model", run="model:rms_norm_gated_bwd", **_MODEL)


# Autograd, once for all backends

forward.derivative(
    "x", "weight", "gate", by=backward, outputs=("out", "rstd"), constant=("rstd",), flags=("return_rstd",)
)
backward.not_differentiable(
    "isobit.rms_norm_gated has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate torch.nn.functional.rms_norm and silu instead where you need one."
)
