"""SwiGLU: the gated activation between the two products of an MLP.

With sigmoid and exp in fp32, and `round` a rounding to the dtype of gate:

    act = round(gate / (1 + exp(-gate)))
    out = round(act up)

These are the two roundings of `silu(gate) * up` in Hugging Face's models, and of vLLM's own kernel. Backward,
with the roundings that autograd has there, and s = 1 / (1 + exp(-gate)):

    dup   = round(dout act)
    dgate = round(round(dout up) s (1 + gate (1 - s)))
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import Contract, Float, dtype_name
from isobit.frame.device import triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.numerics import Numerics

SWIGLU_1 = Numerics(
    "swiglu/1",
    "Element by element, in fp32: exp of the device's math library, quotients to nearest, in dgate one fused"
    " multiply-add for 1 + gate (1 - s) and no other contraction. Roundings to the dtype of gate where the"
    " op's formula has them.",
    "GPUs through Triton; the bits of PyTorch's eager ops on the same GPU",
)


@public_op("swiglu")
def forward() -> Float[Tensor, "* D in gate"]:
    """out."""


@forward.public
def swiglu(
    gate: Float[Tensor, "* D"],
    up: Float[Tensor, "* D"],
    *,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """silu(gate) * up, rounded where Hugging Face's models round: after silu, and after the product.

    Args:
        gate: [*, D] in bf16, fp16, fp32 (or fp64, on the reference backend). Any leading shape and strides,
            the last dimension contiguous: so gate and up may be the two halves of one tensor,
            `gate_up.chunk(2, -1)`, and nothing is copied.
        up: [*, D], of the dtype of gate.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "swiglu/1"; None takes that of the backend
            that serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton" or "reference"; None takes the first that can serve.

    Returns:
        [*, D] in the dtype of gate. In class swiglu/1 an element's bits depend on that element of gate and of
        up only.

    Gradients: of gate and up, each with the roundings that autograd has in `silu(gate) * up`.

    Example:
        >>> import torch, isobit
        >>> gate_up = torch.tensor([[0.0, 1.0, 2.0, 5.0, 1.0, 0.5]])
        >>> isobit.swiglu(*gate_up.chunk(2, -1))
        tensor([[0.0000, 0.7311, 0.8808]])
    """
    return forward(gate=gate, up=up, validate=validate, numerics=numerics, backend=backend)


@op("swiglu_bwd", like=forward.params("gate", "up"))
def backward(
    dout: Float[Tensor, "* D"],
    want_gate: bool,
    want_up: bool,
) -> tuple[Float[Tensor, "* D in gate if want_gate"], Float[Tensor, "* D in up if want_up"]]:
    """(dgate, dup), those that are wanted."""


# Rules that annotations cannot express


@forward.rule
def _one_dtype(contract: Contract, args: dict[str, Any]) -> None:
    gate, up = args["gate"], args["up"]
    if up.dtype != gate.dtype:
        raise contract.error("up", up, f"dtype must be that of gate, {dtype_name(gate.dtype)}")


# Backends, fastest first


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    if args["gate"].dtype == torch.float64:
        return "gate is fp64; class swiglu/1 is fp32 arithmetic"
    return triton_cannot_run(args["gate"].device)


TRITON: dict[str, Any] = {
    "numerics": str(SWIGLU_1),
    "when": _triton_cannot_serve,
    "interpreted": True,
    "launches": True,
}
forward.backend("triton", run="kernels_triton:swiglu", **TRITON)
backward.backend("triton", run="kernels_triton:swiglu_bwd", **TRITON)
# PyTorch's exp on a CPU is another one for the last elements of a tensor, so it can keep no class.
forward.backend("reference", run="reference:swiglu", numerics=NONE)
backward.backend("reference", run="reference:swiglu_bwd", numerics=NONE)


# Autograd, once for all backends

forward.derivative("gate", "up", by=backward, outputs=("out",))
backward.not_differentiable(
    "isobit.swiglu has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate torch.nn.functional.silu(gate) * up instead where you need one."
)
