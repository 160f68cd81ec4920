"""`rms_norm` of single heads that ranks share: each has some of the heads, and the whole weight.

A row's result, and its dx, need that row alone. dweight is a sum over the rows of all heads, and on one rank
these stand between each other: token 0 head 0, token 0 head 1, ... Sums of ranks could not be added to its
bits. So the backward gathers rows and their gradients, and every rank computes dweight of all of them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isobit.frame.composed import outside_graphs
from isobit.ops.rms_norm.op import backward, forward
from isobit.ranks import Group, agree, gather_rows, shown


class _OfHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: Group, dim: int, options: dict[str, Any]
    ) -> Tensor:
        out, _, rstd = forward(x=x, weight=weight, residual=None, return_rstd=True, **options)
        ctx.save_for_backward(x, weight, rstd)
        ctx.group, ctx.dim = group, dim % x.ndim
        ctx.options = {name: options[name] for name in ("offset", "backend")}
        made: Tensor = out
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        want_x, want_weight, *_ = ctx.needs_input_grad
        x, weight, rstd = ctx.saved_tensors
        dout = dout.contiguous()
        dx = dweight = None
        if want_x:
            dx, _ = backward(
                h=x, weight=weight, rstd=rstd, dout=dout, dsummed=None, want_h=True, want_weight=False,
                **ctx.options,
            )  # fmt: skip
        if want_weight:
            rows, every, grads = (gather_rows(ctx.group, t, ctx.dim) for t in (x, rstd, dout))
            _, dweight = backward(
                h=rows, weight=weight, rstd=every, dout=grads, dsummed=None, want_h=False, want_weight=True,
                **ctx.options,
            )  # fmt: skip
        return dx, dweight, None, None, None


def _rms_norm_of_heads(
    x: Tensor, weight: Tensor, group: Group, dim: int, *, eps: float, offset: float, cast: str,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """`rms_norm` of x [*, D], whose dimension `dim` are the heads of this rank, all ranks with equally many.
    dweight is whole on every rank, with the bits of one rank that has all heads."""
    options = {"eps": eps, "offset": offset, "cast": cast, "backend": backend}

    def call() -> str:
        told = {"x": x, "weight": weight, "dim": dim} | options
        needs = torch.is_grad_enabled() and weight.requires_grad  # what the backward exchanges rows for
        said = ", ".join(f"{name}={shown(value)}" for name, value in told.items())
        return f"rms_norm of heads: {said}, gradient of weight={needs}"

    def check() -> str:
        return str(forward.explain(x=x, weight=weight, residual=None, return_rstd=True, **options).numerics)

    agree(group, call, check, x.device)
    out: Tensor = _OfHeads.apply(x, weight, group, dim, options)
    return out


rms_norm_of_heads = outside_graphs(_rms_norm_of_heads, "its backward exchanges tensors with other ranks")
