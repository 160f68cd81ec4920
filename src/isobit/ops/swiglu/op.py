"""SwiGLU: the gated activation between the two products of an MLP.

With sigmoid and exp in fp32, and `round` a rounding to the dtype of gate:

    act = round(gate / (1 + exp(-gate)))
    out = round(act up)

These are the two roundings of `silu(gate) * up` in Hugging Face's models, and of vLLM's own kernel. Backward,
with the roundings that autograd has there, and s = 1 / (1 + exp(-gate)):

    dup   = round(dout act)
    dgate = round(round(dout up) s (1 + gate (1 - s)))

`swiglu_packed` takes gate and up as one tensor, as one product returns them: two halves, or every other
column. With `limit` it is the activation of GPT-OSS, which is rounded after every step:

    x = min(gate, limit),  v = max(min(up, limit), -limit)
    s = round(1 / (1 + exp(-round(alpha x))))
    glu = round(x s)
    out = round(round(v + 1) glu)

and backward, as autograd has it there, with dgate and dup 0 where gate and up are beyond the limit:

    dglu  = round(dout round(v + 1))
    dup   = round(dout glu)
    da    = round(round(round(dglu x) round(1 - s)) s)
    dgate = round(round(dglu s) + round(da alpha))
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


PACKED_1 = Numerics(
    "swiglu-packed/1",
    "Element by element, in fp32. Without a limit the bits of swiglu/1 for gate and up. With one every step"
    " of the op's formula is rounded to the dtype of gate_up, with exp of the device's math library,"
    " quotients to nearest and no contraction.",
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


@public_op("swiglu_packed", sizes=lambda args: {"D": args["gate_up"].shape[-1] // 2})
def packed() -> Float[Tensor, "* D in gate_up"]:
    """out."""


@packed.public
def swiglu_packed(
    gate_up: Float[Tensor, "* C"],
    *,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float = 1.702,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """silu(gate) * up of gate and up in one tensor; with `limit` the clamped activation of GPT-OSS.

    Args:
        gate_up: [*, 2 D] in bf16, fp16, fp32 (or fp64, on the reference backend). Any leading shape and
            strides, the last dimension contiguous.
        interleaved: gate and up are every other column, gate first, as in GPT-OSS; otherwise gate is the
            first half.
        limit: clamp gate from above and up on both sides, and return (up + 1) gate sigmoid(alpha gate) of
            these, rounded after every step as transformers does.
        alpha: of the sigmoid; read with a limit only.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "swiglu-packed/1"; None takes that of the
            backend that serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton" or "reference"; None takes the first that can serve.

    Returns:
        [*, D] in the dtype of gate_up. In class swiglu-packed/1 an element's bits depend on its gate and up
        only.

    Gradients: of gate_up, each part with the roundings that autograd has in eager code.

    Example:
        >>> import torch, isobit
        >>> isobit.swiglu_packed(torch.tensor([[0.0, 5.0, 1.0, 1.0, 2.0, 0.5]]), interleaved=True)
        tensor([[0.0000, 0.7311, 0.8808]])
    """
    return packed(
        gate_up=gate_up, interleaved=interleaved, limit=limit, alpha=alpha, validate=validate,
        numerics=numerics, backend=backend,
    )  # fmt: skip


@op("swiglu_packed_bwd", like=packed.params("gate_up", "interleaved", "limit", "alpha"))
def packed_bwd(dout: Float[Tensor, "* D"]) -> Float[Tensor, "* C in gate_up"]:
    """dgate_up."""


# Rules that annotations cannot express


@packed.rule
def _two_halves(contract: Contract, args: dict[str, Any]) -> None:
    gate_up, limit = args["gate_up"], args["limit"]
    if gate_up.shape[-1] % 2:
        raise contract.error("gate_up", gate_up, "its columns must be even in number, gate and up")
    if limit is not None and not limit > 0:
        raise contract.error("limit", limit, "must be positive")


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


def _triton_cannot_serve_packed(args: dict[str, Any]) -> str | None:
    if args["gate_up"].dtype == torch.float64:
        return "gate_up is fp64; class swiglu-packed/1 is fp32 arithmetic"
    return triton_cannot_run(args["gate_up"].device)


TRITON: dict[str, Any] = {
    "numerics": str(SWIGLU_1),
    "when": _triton_cannot_serve,
    "interpreted": True,
    "launches": True,
}
PACKED = TRITON | {"numerics": str(PACKED_1), "when": _triton_cannot_serve_packed}
packed.backend("triton", run="kernels_triton_packed:swiglu_packed", **PACKED)
packed_bwd.backend("triton", run="kernels_triton_packed:swiglu_packed_bwd", **PACKED)
packed.backend("reference", run="reference:swiglu_packed", numerics=NONE)
packed_bwd.backend("reference", run="reference:swiglu_packed_bwd", numerics=NONE)
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

packed.derivative("gate_up", by=packed_bwd, outputs=("out",))
packed_bwd.not_differentiable(
    "isobit.swiglu_packed has no second derivative: its backward is a kernel without a gradient of its own."
)
