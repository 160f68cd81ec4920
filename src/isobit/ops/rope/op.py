"""Rotary position embedding of queries and keys, in one launch.

A head is rotated in its first R columns, as two halves x1 and x2; what is behind them passes through. With
the halves c1, c2 of cos and s1, s2 of sin:

    out1 = x1 c1 - x2 s1
    out2 = x2 c2 + x1 s2

rounding "hf" rounds every product, and then the sum, to the dtype of q, as Hugging Face's models do. rounding
"vllm" computes in fp32 and rounds once, as vLLM's kernel does. Backward, rounded in the same places:

    dx1 = dout1 c1 + dout2 s2
    dx2 = dout2 c2 - dout1 s1

and +0 is added to all of them, as autograd does when it adds the gradients of slices: -0 becomes +0.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from isobit.frame.contract import Contract, Float, dtype_name
from isobit.frame.device import triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.numerics import Numerics

ROPE_1 = Numerics(
    "rope/1",
    "Every product and every sum is computed in fp32 and rounded to nearest, without contraction; rounding"
    " 'hf' rounds each of them to the dtype of q, rounding 'vllm' only the sum. fp64 is computed in fp64.",
    "any device: the bits of PyTorch's eager ops",
)

ROUNDINGS = ("hf", "vllm")


@public_op("rope")
def forward() -> tuple[Float[Tensor, "* H D in q"], Float[Tensor, "* G D in k"]]:
    """(q_out, k_out)."""


@forward.public
def rope(
    q: Float[Tensor, "* H D"],
    k: Float[Tensor, "* G D"],
    cos: Float[Tensor, "* R"],
    sin: Float[Tensor, "* R"],
    *,
    rounding: Literal["hf", "vllm"] = "hf",
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by their positions, with the bits of Hugging Face's eager code.

    Args:
        q: [*, H, D] in bf16, fp16, fp32 (or fp64, on the reference backend): the heads of every token. Any
            leading shape and strides, the last dimension contiguous: where a model has [B, H, T, D], give
            `q.transpose(1, 2)`, and nothing is copied.
        k: [*, G, D], of the dtype of q. G may be another number of heads, also 0.
        cos: [*, R], of the dtype of q, R even and no more than D: as the rotary modules of Hugging Face
            return it, both halves of R. Columns from R on pass through. A leading shape that can be expanded
            to that of q will do: [T, R] or [1, T, R] for a q of [B, T, H, D]. There is no gradient for it.
        sin: the same.
        rounding: "hf" rounds both products and their sum, as Hugging Face's models do. "vllm" rounds once, as
            vLLM's own kernel does. In fp32 they are the same.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "rope/1".
        backend: force "triton" or "reference"; None takes the first that can serve.

    Returns:
        (q, k) rotated, contiguous, in their shapes and dtype. The bits of a head depend on that head and on
        the cos and sin of its token only.

    Gradients: of q and k, rounded as autograd rounds those of the eager code.

    Example:
        >>> import torch, isobit
        >>> q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # one token, one head
        >>> cos, sin = torch.zeros(1, 4), torch.ones(1, 4)  # a quarter turn
        >>> isobit.rope(q, q, cos, sin)[0]
        tensor([[[-3., -4.,  1.,  2.]]])
    """
    given = {"q": q, "k": k, "cos": cos, "sin": sin, "rounding": rounding}
    q_out, k_out = forward(**_adapt(given), validate=validate, numerics=numerics, backend=backend)
    return q_out, k_out


@op("rope_bwd", like=forward.params("cos", "sin", "rounding"))
def backward(
    dq_out: Float[Tensor, "* H D"],
    dk_out: Float[Tensor, "* G D"],
) -> tuple[Float[Tensor, "* H D in dq_out"], Float[Tensor, "* G D in dk_out"]]:
    """(dq, dk)."""


def _adapt(given: dict[str, Any]) -> dict[str, Any]:
    """cos and sin with the leading shape of q, as views. What does not fit stays as it is: the contract
    rejects it with a message."""
    adapted, q = given.copy(), given.get("q")
    for name in ("cos", "sin"):
        table = given.get(name)
        if not isinstance(q, Tensor) or not isinstance(table, Tensor) or q.ndim < 2 or table.ndim < 1:
            continue
        lead, own = q.shape[:-2], table.shape[:-1]
        fits = len(own) <= len(lead) and all(
            size in (1, wanted) for size, wanted in zip(reversed(own), reversed(lead), strict=False)
        )
        if fits and own != lead:
            adapted[name] = table.expand(*lead, table.shape[-1])
    return adapted


forward.adapt = _adapt


# Rules that annotations cannot express


def _sizes(contract: Contract, args: dict[str, Any]) -> None:
    R, D = args["cos"].shape[-1], args["q"].shape[-1]
    if R % 2 or R > D:
        raise contract.error("cos", args["cos"], f"R must be even, and at most D={D}")


def _dtypes(contract: Contract, args: dict[str, Any]) -> None:
    wanted = args["q"].dtype
    for name in ("k", "cos", "sin"):
        if args[name].dtype != wanted:
            raise contract.error(name, args[name], f"dtype must be that of q, {dtype_name(wanted)}")


def _roundings(contract: Contract, args: dict[str, Any]) -> None:
    if args["rounding"] not in ROUNDINGS:
        raise contract.error("rounding", args["rounding"], "must be 'hf' or 'vllm'")


forward.rule(_sizes, _dtypes, _roundings)


# Backends, fastest first


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    if args["cos"].dtype == torch.float64:
        return "q is fp64; the kernels compute in fp32"
    return triton_cannot_run(args["cos"].device)


TRITON: dict[str, Any] = {
    "numerics": str(ROPE_1),
    "when": _triton_cannot_serve,
    "interpreted": True,
    "launches": True,
}
forward.backend("triton", run="kernels_triton:rope", **TRITON)
backward.backend("triton", run="kernels_triton:rope_bwd", **TRITON)
forward.backend("reference", run="reference:rope", numerics=str(ROPE_1))
backward.backend("reference", run="reference:rope_bwd", numerics=str(ROPE_1))


# Autograd, once for all backends


def _save(call: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The numbers of heads, and not q and k themselves: a rotation is undone without them."""
    return saved | {"heads": (call["q"].shape[-2], call["k"].shape[-2])}


def _gradient(saved: dict[str, Any], grads: tuple[Tensor | None, ...]) -> dict[str, Tensor | None]:
    """An output that was not used has a gradient of 0. An input that needs no gradient has no heads here."""
    some = next((g for g in grads if g is not None), None)
    if some is None:
        return {}
    given = {}
    for name, heads, grad in zip(("q", "k"), saved["heads"], grads, strict=True):
        if name not in saved["needs"]:
            grad = some[..., :0, :]
        elif grad is None:
            grad = some.new_zeros(*some.shape[:-2], heads, some.shape[-1])
        given[f"d{name}_out"] = grad
    common = {name: saved[name] for name in ("cos", "sin", "rounding")}
    dq, dk = backward(**common, **given, **saved["follow"])
    return {name: g for name, g in (("q", dq), ("k", dk)) if name in saved["needs"]}


forward.derivative("q", "k", by=backward, outputs=("q_out", "k_out"), save=_save, gradient=_gradient)
backward.not_differentiable(
    "isobit.rope has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate q * cos + rotate_half(q) * sin instead where you need one."
)
