"""Attention whose rotary embedding is rounded once, as vLLM's kernel does it (`zero_drift(rounding="vllm")`).

transformers rotates queries and keys with a function, which the forward of an attention calls by its name.
Replaced in a module of transformers it would be another one for all models of the process. So a swapped
attention runs the same forward, in which this one name is another function: all else stays transformers' own.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from isobit.integrations.rounding import DENSE
from isobit.ops.rope import rope

#: The function of transformers.
ROTATES = "apply_rotary_pos_emb"


def rotated_once(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `ROTATES`. q and k are [B, H, T, D], and stay views of that shape."""
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rounding="vllm")
    return q.transpose(1, 2), k.transpose(1, 2)


@cache
def _with_one_rounding(forward: FunctionType) -> Callable[..., Any]:
    """The forward of a class, with the other function. What it calls is looked up as it was at the first
    call."""
    names = {**forward.__globals__, ROTATES: rotated_once}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


class DetAttention(nn.Module):
    """A swapped attention: the same object with the same parameters, and another class."""

    #: Its class in transformers.
    own: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _with_one_rounding(self.own.forward)(self, *args, **kwargs)


def rotates(module: nn.Module) -> bool:
    """Whether the forward of a module is that of its class, and calls `ROTATES` itself."""
    forward = type(module).forward
    plain = isinstance(forward, FunctionType) and "forward" not in vars(module)
    return plain and ROTATES in forward.__code__.co_names


def swap(module: Any) -> None:
    module.own = type(module)
    module.__class__ = DetAttention


def why_not(model: nn.Module) -> str | None:
    """Why a model cannot have the roundings of vLLM's kernels, whatever its modules are, or None."""
    name = type(model).__name__
    if name in DENSE:
        return None
    return f"rounding='vllm': where vLLM rounds in {name} was not compared; it was in {', '.join(DENSE)}"
