"""The gates of a gated delta-net layer: the decay of a token and how much of it is written, for every head.

    g    = -exp(A_log) softplus(a + dt_bias)      fp32
    beta = sigmoid(b)                             rounded to the dtype of b

Backward, with t = a + dt_bias and s = sigmoid(b):

    da      = -exp(A_log) sigmoid(t) dg           (sigmoid is 1 where t > 20)
    db      = s (1 - s) dbeta
    dA_log  = sum over all rows of g dg,    ddt_bias = sum over all rows of da before it is rounded
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import F32, Contract, Single, dtype_name
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.frame.triton_and_model import triton_and_model
from isobit.numerics import Numerics

GATES_1 = Numerics(
    "gates/1",
    "Every gate alone in fp32, with the exp and the log of the device's math library, quotients rounded to"
    " nearest and no contraction. Gradients of A_log and dt_bias: groups of 16 rows one after another,"
    " groups by a tree of neighbours.",
    "any GPU through Triton",
)
GATES_1_CPU = Numerics("gates/1/cpu", "gates/1 with numpy's exp and log.", "any CPU through the model")

#: The most heads: a program has all heads of its rows.
MOST_HEADS = 256


@public_op("delta_gates")
def forward() -> tuple[F32[Tensor, "* H"], Single[Tensor, "* H in b"]]:
    """(g, beta)."""


@forward.public
def delta_gates(
    a: Single[Tensor, "* H"],
    b: Single[Tensor, "* H"],
    A_log: Single[Tensor, "H"],
    dt_bias: Single[Tensor, "H"],
    *,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(g, beta) of a gated delta-net layer, with bits that do not depend on the batch, on a CPU either.

    On a CPU PyTorch's softplus and sigmoid have other bits for the last elements of a tensor, and a token has
    few heads: there plain PyTorch is not enough.

    Args:
        a, b: [*, H] in bf16, fp16 or fp32, of one dtype: the layer's projections of each token. Any leading
            shape and strides, the last dimension contiguous, at most 256 heads.
        A_log, dt_bias: [H], each of the dtype of a or fp32.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "gates/1", or "gates/1/cpu" on a CPU.
        backend: force "triton" or "model"; None takes the first that can serve.

    Returns:
        (g [*, H] fp32, beta [*, H] in the dtype of b): the natural logarithm of the decay and the rate of
        writing, as `isobit.gated_delta_rule` takes them.

    Gradients: of all four. Those of A_log and dt_bias are sums over the rows in their order, by groups of
    16, rounded once.

    Example:
        >>> import torch, isobit
        >>> g, beta = isobit.delta_gates(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2), torch.zeros(2))
        >>> g, beta
        (tensor([[-0.6931, -0.6931]]), tensor([[0.5000, 0.5000]]))
    """
    g, beta = forward(
        a=a, b=b, A_log=A_log, dt_bias=dt_bias, validate=validate, numerics=numerics, backend=backend
    )
    return g, beta


@op("delta_gates_bwd", like=forward.params("a", "b", "A_log", "dt_bias"))
def backward(
    dg: F32[Tensor, "* H"] | None,
    dbeta: Single[Tensor, "* H"] | None,
    want_a: bool,
    want_b: bool,
    want_A_log: bool,
    want_dt_bias: bool,
) -> tuple[
    Single[Tensor, "* H in a if want_a"], Single[Tensor, "* H in b if want_b"],
    Single[Tensor, "H in A_log if want_A_log"], Single[Tensor, "H in dt_bias if want_dt_bias"],
]:  # fmt: skip
    """(da, db, dA_log, ddt_bias), those that are wanted. A gradient that is None is 0."""


# Rules that annotations cannot express


def _dtypes(contract: Contract, args: dict[str, Any]) -> None:
    a, b = args["a"], args["b"]
    if b.dtype != a.dtype:
        raise contract.error("b", b, f"dtype must be that of a, {dtype_name(a.dtype)}")
    for name in ("A_log", "dt_bias"):
        if args[name].dtype not in (a.dtype, torch.float32):
            rule = f"dtype must be that of a, {dtype_name(a.dtype)}, or fp32"
            raise contract.error(name, args[name], rule)


def _heads(contract: Contract, args: dict[str, Any]) -> None:
    H = args["a"].shape[-1]
    if not 1 <= H <= MOST_HEADS:
        raise contract.error("a", args["a"], f"must have 1 to {MOST_HEADS} heads, not {H}")


forward.rule(_dtypes, _heads)
backward.rule(_dtypes, _heads)


# Backends, fastest first

_TRITON, _MODEL = triton_and_model(str(GATES_1), str(GATES_1_CPU), "a")
forward.backend("triton", run="kernels_triton:delta_gates", **_TRITON)
backward.backend("triton", run="kernels_triton:delta_gates_bwd", **_TRITON)
forward.backend("model", run="model:delta_gates", **_MODEL)
backward.backend("model", run="model:delta_gates_bwd", **_MODEL)


# Autograd, once for all backends

forward.derivative("a", "b", "A_log", "dt_bias", by=backward, outputs=("g", "beta"))
backward.not_differentiable(
    "isobit.delta_gates has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate the formula in torch instead where you need one."
)
