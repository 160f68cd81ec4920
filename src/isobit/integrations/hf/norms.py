"""RMSNorms of transformers through `isobit.rms_norm`.

Models have their own classes for it, which differ in two things: where the normalised row is rounded, and
whether the weight is an offset from 1. No attribute says which. Therefore a copy of a module with random
weights is compared with each variant of `isobit.rms_norm`, and the module is swapped if one of them matches.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobit.integrations.hf.delta_nets import DetRMSNormGated, swapped_class
from isobit.integrations.hf.errors import HFError
from isobit.ops.rms_norm import rms_norm
from isobit.ops.rms_norm.sharded import rms_norm_of_heads
from isobit.ranks import Group, as_group

#: (cast, offset) of `isobit.rms_norm`.
VARIANTS = (("before", 0.0), ("after", 0.0), ("after", 1.0), ("before", 1.0))

#: Rows that are compared, and the fraction of elements that must have the same bits. Another order of the sum
#: changes a few elements by a rounding; a rounding in another place changes every fourth.
ROWS, AGREE = 64, 0.97

NAMES_OF_EPS = ("variance_epsilon", "eps")


class Options(NamedTuple):
    eps: float
    cast: Any
    offset: float


class DetRMSNorm(nn.Module):
    """A swapped norm: the same object with the same weight, and another class."""

    weight: Tensor
    options: Options
    #: The dimension of x with heads, if the ranks of the mesh that the weight is on share these.
    heads_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        eps, cast, offset = self.options
        if self.heads_at is not None:
            weight, group = whole_of(self.weight)
            at = self.heads_at
            return rms_norm_of_heads(x, weight, group, at, eps=eps, cast=cast, offset=offset)
        return rms_norm(x, self.weight, eps=eps, cast=cast, offset=offset)

    def extra_repr(self) -> str:
        eps, cast, offset = self.options
        return f"{tuple(self.weight.shape)}, eps={eps}, cast={cast!r}, offset={offset}"


def whole_of(weight: Any) -> tuple[Tensor, Group]:
    """A weight that every rank of a mesh has, as a plain tensor, and these ranks."""
    from torch.distributed.tensor import Replicate

    if tuple(weight.placements) != (Replicate(),):
        raise HFError(f"a norm of single heads: its weight is placed {weight.placements}, not whole")
    return weight.to_local(grad_placements=[Replicate()]), as_group("zero_drift", weight.device_mesh)


def _eps_of(module: nn.Module) -> Any:
    return next((getattr(module, name) for name in NAMES_OF_EPS if hasattr(module, name)), None)


@torch.no_grad()
def options_of(module: nn.Module) -> Options | None:
    """The options with which `isobit.rms_norm` computes the same as this module. None if there are none, or
    it is a `DetRMSNorm` already."""
    eps, parameters = _eps_of(module), dict(module.named_parameters())
    if not isinstance(eps, float) or "RMSNorm" not in type(module).__name__ or "forward" in vars(module):
        return None
    if isinstance(module, DetRMSNorm | DetRMSNormGated) or swapped_class(module) is DetRMSNormGated:
        return None
    if list(parameters) != ["weight"] or any(True for _ in module.children()) or dict(module.named_buffers()):
        return None
    weight = parameters["weight"]
    if weight.ndim != 1 or weight.dtype not in (torch.bfloat16, torch.float16):
        return None
    gen = torch.Generator().manual_seed(0)
    drawn = torch.randn(ROWS + 1, len(weight), generator=gen).to(weight)
    twin = copy.deepcopy(module)
    twin.weight = nn.Parameter(drawn[0] * 0.3 + 1.0, requires_grad=False)
    theirs = twin(drawn[1:])
    for cast, offset in VARIANTS:
        options = Options(eps, cast, offset)
        ours = rms_norm(drawn[1:], twin.weight, eps=eps, cast=options.cast, offset=offset)
        if ours.dtype == theirs.dtype and (ours == theirs).double().mean() >= AGREE:
            return options
    return None


def options_of_all(model: nn.Module) -> list[tuple[nn.Module, Options]]:
    """Every RMSNorm of a model that `isobit.rms_norm` can compute."""
    known: dict[Any, Options | None] = {}
    norms: list[tuple[nn.Module, Options]] = []
    for module in model.modules():
        weights = [(p.shape, p.dtype) for p in module.parameters(recurse=False)]
        key = (type(module), _eps_of(module), *weights, "forward" in vars(module))
        if key not in known:  # hundreds of norms are of two or three kinds
            known[key] = options_of(module)
        if (options := known[key]) is not None:
            norms.append((module, options))
    return norms
