"""RMSNorm, with an optional residual that is added first.

For a row x of D numbers and a weight, with everything in between in fp32:

    h    = x                                    or x + residual, rounded to the dtype of x
    rstd = 1 / sqrt(mean(h^2) + eps)
    y    = h rstd                               rounded to the dtype of x where cast is "before"
    out  = y (offset + weight)                  rounded to the dtype of x

With a residual both out and h are returned: h is the next residual. Backward, with g = dout (offset + weight)
and y as it was before its rounding,

    dx = dresidual = rstd (g - y mean(g y)) + dh
    dweight        = sum over all rows of dout y
"""

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float, dtype_name
from isobit.frame.device import triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.numerics import Numerics

RMS_1 = Numerics(
    "rms/1",
    "A row's sum of squares, and in the gradient of products, in fp32: 1024 lanes, lane j takes columns j,"
    " j + 1024, ... one after another, lanes are added by a tree of neighbours. Gradients of the weight:"
    " groups of 16 rows one after another, groups by a tree of neighbours. No contraction; division and"
    " square root rounded to nearest; roundings to the input's dtype where the op's formula has them.",
    "any GPU through Triton, any CPU through the model",
)


@public_op("rms_norm")
def forward(return_rstd: bool = False) -> tuple[
    Float[Tensor, "* D in x"], Float[Tensor, "* D in x if residual"], F32[Tensor, "* if return_rstd"]
]:  # fmt: skip
    """(out, summed, rstd): summed only with a residual. Autograd asks for rstd where a backward may
    follow."""


@overload
def rms_norm(x: Tensor, weight: Tensor, *, residual: Tensor, **options: Any) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, **options: Any) -> Tensor: ...
@forward.public  # type: ignore[misc]
def rms_norm(  # overloads take any options
    x: Float[Tensor, "* D"],
    weight: Float[Tensor, "D"],
    *,
    residual: Float[Tensor, "* D"] | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Literal["before", "after"] = "before",
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * (offset + weight), row by row, with bits that do not depend on the batch.

    Args:
        x: [*, D] in bf16, fp16, fp32 (or fp64, on the reference backend). Any leading shape and strides, the
            last dimension contiguous.
        weight: [D], of the dtype of x or fp32.
        residual: [*, D], of the dtype of x: x + residual is normalised, rounded to that dtype, as if it had
            been added before the call.
        eps: a number of 0 or more, added to the mean of squares.
        offset: added to the weight in fp32. 1.0 is Gemma's (1 + weight), with cast="after".
        cast: where the normalised row is rounded to the dtype of x: "before" it is multiplied by the weight,
            and once more after it, as Hugging Face's Llama, Mistral and Qwen do; or only "after" it, as
            `torch.nn.functional.rms_norm` and Hugging Face's Gemma do.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "rms/1"; None takes that of the backend that
            serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton", "model" or "reference"; None takes the first that can serve.

    Returns:
        [*, D] in the dtype of x; with a residual, (that, x + residual). In class rms/1 a row's bits depend on
        that row and on the weight only.

    Gradients: x and residual share one gradient tensor, rounded once. dweight is a sum over the rows in their
    order, by groups of 16, rounded once: it does not depend on the leading shape, on strides or on the
    schedule, and finite rows at the end whose dout is 0 do not change it.

    Example:
        >>> import torch, isobit
        >>> x, weight = torch.tensor([[3.0, 4.0], [0.6, 0.8]]), torch.tensor([1.0, 2.0])
        >>> isobit.rms_norm(x, weight, eps=0.0)
        tensor([[0.8485, 2.2627],
                [0.8485, 2.2627]])
        >>> out, summed = isobit.rms_norm(x, weight, residual=x, eps=0.0)
        >>> summed
        tensor([[6.0000, 8.0000],
                [1.2000, 1.6000]])
    """
    out, summed, _ = forward(
        x=x, weight=weight, residual=residual, eps=eps, offset=offset, cast=cast, validate=validate,
        numerics=numerics, backend=backend,
    )  # fmt: skip
    return out if residual is None else (out, summed)


@op("rms_norm_bwd", like=forward.params(..., "offset"))
def backward(
    h: Float[Tensor, "* D"],
    weight: Float[Tensor, "D"],
    rstd: F32[Tensor, "*"],
    dout: Float[Tensor, "* D"],
    dsummed: Float[Tensor, "* D"] | None,
    *,
    want_h: bool,
    want_weight: bool,
) -> tuple[Float[Tensor, "* D in h if want_h"], Float[Tensor, "D in weight if want_weight"]]:
    """(dx, dweight), those that are wanted; dx is dresidual too."""


# Rules that annotations cannot express


def _has_columns(contract: Contract, args: dict[str, Any]) -> None:
    if args["x"].shape[-1] == 0:
        raise contract.error("x", args["x"], "D must be at least 1")


def _dtypes(contract: Contract, args: dict[str, Any]) -> None:
    x, weight, residual = args["x"], args["weight"], args["residual"]
    wanted = dtype_name(x.dtype)
    if weight.dtype not in (x.dtype, torch.float32):
        either = "" if x.dtype == torch.float32 else ", or fp32"
        raise contract.error("weight", weight, f"dtype must be that of x, {wanted}{either}")
    if residual is not None and residual.dtype != x.dtype:
        raise contract.error("residual", residual, f"dtype must be that of x, {wanted}")


def _scalars(contract: Contract, args: dict[str, Any]) -> None:
    if not 0 <= args["eps"] < math.inf:
        raise contract.error("eps", args["eps"], "must be a finite number, 0 or more")
    if not math.isfinite(args["offset"]):
        raise contract.error("offset", args["offset"], "must be a finite number")
    if args["cast"] not in ("before", "after"):
        raise contract.error("cast", args["cast"], "must be 'before' or 'after' (the weight)")


forward.rule(_has_columns, _dtypes, _scalars)


# Backends, fastest first


def _first(args: dict[str, Any]) -> Tensor:
    """x, or h in the backward."""
    first: Tensor = args["x"] if "x" in args else args["h"]
    return first


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    return _is_fp64(args) or triton_cannot_run(_first(args).device)


def _is_fp64(args: dict[str, Any]) -> str | None:
    return "x is fp64; class rms/1 is fp32 arithmetic" if _first(args).dtype == torch.float64 else None


def _not_on_the_cpu(args: dict[str, Any]) -> str | None:
    if _first(args).device.type == "cpu":
        return None
    return "it runs one PyTorch kernel per addition: select it by name to compare"


forward.backend(
    "triton",
    run="kernels_triton:rms_norm",
    numerics=str(RMS_1),
    when=_triton_cannot_serve,
    interpreted=True,
    launches=True,
)


backward.backend(
    "triton",
    run="kernels_triton_bwd:rms_norm_bwd",
    numerics=str(RMS_1),
    when=_triton_cannot_serve,
    interpreted=True,
    launches=True,
)


forward.backend(
    "model", run="model:rms_norm", numerics=str(RMS_1), when=_is_fp64, not_by_default=_not_on_the_cpu
)


backward.backend(
    "model", run="model:rms_norm_bwd", numerics=str(RMS_1), when=_is_fp64, not_by_default=_not_on_the_cpu
)


forward.backend("reference", run="reference:rms_norm", numerics=NONE)


backward.backend("reference", run="reference:rms_norm_bwd", numerics=NONE)


# Autograd, once for all backends


def _save(call: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    return saved | {"h": call["x"] if call["residual"] is None else call["summed"]}


def _gradient(saved: dict[str, Any], grads: tuple[Tensor | None, ...]) -> dict[str, Tensor | None]:
    dout, dsummed, _ = grads
    needs = saved["needs"]
    if dout is None:  # only summed was used
        return {name: dsummed for name in ("x", "residual") if name in needs}
    dx, dweight = backward(
        **{name: saved[name] for name in ("h", "weight", "rstd", "offset")}, dout=dout, dsummed=dsummed,
        want_h="x" in needs or "residual" in needs, want_weight="weight" in needs, **saved["follow"],
    )  # fmt: skip
    gradients = {"x": dx, "residual": dx, "weight": dweight}
    return {name: g for name, g in gradients.items() if name in needs}


forward.derivative(
    "x", "weight", "residual", by=backward, outputs=("out", "summed", "rstd"), constant=("rstd",),
    flags=("return_rstd",), save=_save, gradient=_gradient,
)  # fmt: skip
backward.not_differentiable(
    "isobit.rms_norm has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate torch.nn.functional.rms_norm instead where you need one."
)
