"""Attention sinks: one more logit in the softmax of every query, with no value behind it.

A softmax over the scores z_j of a query and the sink s of its head has the probabilities of the softmax
without the sink, all multiplied by the same factor. So sinks need no attention kernel of their own. With x
and lse from `isobit.attention`, and `round` a rounding to the dtype of x:

    f   = sum_j exp(z_j) / (sum_j exp(z_j) + exp(s)) = 1 / (1 + exp(s - lse))
    out = round(f x)

A query that sees no key has lse = -inf and f = 0. Backward, with h = 1 - f = 1 / (1 + exp(lse - s)):

    dx     = round(f dout)
    dlse   = f h (x dout)              x dout: a sum over the elements of a head
    dsinks = - sum over tokens of dlse
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float
from isobit.frame.device import triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.numerics import Numerics

SINK_1 = Numerics(
    "sink/1",
    "In fp32, without contraction: exp of the device's math library, quotients to nearest. Products of x and"
    " dout are added by halves: the second half of a head, filled up with zeros to a power of two, to the"
    " first. dsinks: 1024 lanes, lane j adds tokens j, j + 1024, ... in order, then the lanes by halves.",
    "GPUs through Triton, each architecture for itself",
)
SINK_1_CPU = Numerics("sink/1/cpu", "The order of sink/1 with numpy's exp.", "any CPU, each numpy for itself")


@public_op("attention_sink")
def forward() -> Float[Tensor, "* H D in x"]:
    """out."""


@forward.public
def attention_sink(
    x: Float[Tensor, "* H D; any strides"],
    lse: F32[Tensor, "* H; any strides"],
    sinks: Float[Tensor, "H"],
    *,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """The result of attention as if every head had one more key, with the score of its sink and a value of 0.

    Args:
        x: [*, H, D], the result of `isobit.attention`, in bf16, fp16, fp32 (or fp64, on the reference).
        lse: [*, H] in fp32 (fp64 for fp64 x), what `isobit.attention` returns with `return_lse=True`, heads
            last: `lse.transpose(-1, -2)`. Any strides, so nothing is copied.
        sinks: [H], the score of each head's sink, in the dtype of x, or in fp32 if that is narrower.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "sink/1"; None takes that of the backend that
            serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton", "model" or "reference"; None takes the first that can serve.

    Returns:
        [*, H, D] in the dtype of x. A row's bits depend on its own x, lse and sink, and on nothing else.

    Gradients: of x, lse and sinks. That of lse goes on into `isobit.attention`.

    Example:
        >>> import torch, isobit
        >>> q, k, v = (torch.randn(1, 5, 2, 64).bfloat16() for _ in range(3))
        >>> x, lse = isobit.attention(q, k, v, return_lse=True)
        >>> sinks = torch.tensor([0.5, float("-inf")])
        >>> out = isobit.attention_sink(x, lse.transpose(-1, -2), sinks)
        >>> torch.equal(out[:, :, 1], x[:, :, 1])  # a sink of -inf is none
        True
    """
    given: dict[str, Any] = {"x": x, "lse": lse, "sinks": sinks}
    return forward(**given, validate=validate, numerics=numerics, backend=backend)


@op("attention_sink_bwd", like=forward.params("x", "lse", "sinks"))
def backward(
    dout: Float[Tensor, "* H D; any strides"],
    want_x: bool,
    want_lse: bool,
    want_sinks: bool,
) -> tuple[
    Float[Tensor, "* H D in x if want_x"],
    F32[Tensor, "* H if want_lse"],
    Float[Tensor, "H in sinks if want_sinks"],
]:
    """(dx, dlse, dsinks), those that are wanted."""


# Rules that annotations cannot express


@forward.rule
def _dtypes(contract: Contract, args: dict[str, Any]) -> None:
    wide = torch.promote_types(args["x"].dtype, torch.float32)
    if args["lse"].dtype != wide:
        raise contract.error("lse", args["lse"], "dtype must be fp32, or fp64 if x is fp64")
    if args["sinks"].dtype not in (args["x"].dtype, wide):
        raise contract.error("sinks", args["sinks"], "dtype must be that of x, or fp32 if that is narrower")


# Backends, fastest first


def _is_fp64(args: dict[str, Any]) -> str | None:
    return "x is fp64; class sink/1 is fp32 arithmetic" if args["x"].dtype == torch.float64 else None


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    return _is_fp64(args) or triton_cannot_run(args["x"].device)


def _not_on_the_cpu(args: dict[str, Any]) -> str | None:
    if args["x"].device.type == "cpu":
        return None
    return "it computes on the CPU: select it by name to compare"


def _class_of(device: torch.device) -> str:
    """Triton's interpreter has numpy's exp."""
    return str(SINK_1_CPU if device.type == "cpu" else SINK_1)


_TRITON: dict[str, Any] = {
    "numerics": _class_of, "when": _triton_cannot_serve, "interpreted": True, "launches": True,
}  # fmt: skip
_MODEL: dict[str, Any] = {"numerics": str(SINK_1_CPU), "when": _is_fp64, "not_by_default": _not_on_the_cpu}
forward.backend("triton", run="kernels_triton:attention_sink", **_TRITON)
backward.backend("triton", run="kernels_triton:attention_sink_bwd", **_TRITON)
forward.backend("model", run="model:attention_sink", **_MODEL)
backward.backend("model", run="model:attention_sink_bwd", **_MODEL)
forward.backend("reference", run="reference:attention_sink", numerics=NONE)
backward.backend("reference", run="reference:attention_sink_bwd", numerics=NONE)


# Autograd, once for all backends

forward.derivative("x", "lse", "sinks", by=backward, outputs=("out",))
backward.not_differentiable(
    "isobit.attention_sink has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate x * torch.sigmoid(lse - sinks)[..., None] instead where you need one."
)
