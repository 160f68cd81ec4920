"""The difference of two log-probabilities of a token, which is 0 where both are -inf.

A token to which both policies give the probability 0, as after top-k filtering, has two equal
log-probabilities: the ratio is 1 and the KL 0, although -inf - -inf is NaN.
"""

from typing import Any

import torch
from torch import Tensor


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b, and 0 where both are -inf; its gradient is that of a - b everywhere."""
    function = _Zeroed if torch.compiler.is_compiling() else _ZeroedEagerly
    return function.apply(a - b, a == b)


class _Zeroed(torch.autograd.Function):
    """x, with 0 where `zero` is true, and the gradient of x even there. torch.where would drop that."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, zero: Tensor) -> Tensor:
        return torch.where(zero, 0.0, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _ZeroedEagerly(_Zeroed):
    """With a derivative in forward mode, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Any:
        return tangent.view_as(tangent)
