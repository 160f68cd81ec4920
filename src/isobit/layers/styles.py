"""Parallel styles for `torch.distributed.tensor.parallel.parallelize_module`: linear layers that the ranks of
a mesh share, with the bits of one rank."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from isobit.frame.contract import ContractError
from isobit.layers.classes import check_class, check_k
from isobit.layers.linear import DetLinear, Swap, swap_linear
from isobit.numerics import CHAIN16, LEAVES, TREE8, Numerics
from isobit.ops.det_gemm.sharded import in_ranks, sizes_of
from isobit.ranks import agree, as_group, shown


class _Style(ParallelStyle):
    """What both styles do: the layer becomes a `DetLinear`, if it is none, and its parameters DTensors."""

    kind: Literal["column", "row"]
    parts: tuple[int, ...] | None = None

    def __init__(self, *, sequence_dim: int | None = None, numerics: str | Numerics | None = None) -> None:
        super().__init__()
        check_class(type(self).__name__, numerics)
        self.sequence_dim, self.numerics = sequence_dim, None if numerics is None else str(numerics)

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """All ranks apply the same style to the same layer, or none of them changes it."""
        group, swaps = as_group(type(self).__name__, device_mesh), list[Swap]()
        before = getattr(module, "numerics", None)
        try:
            agree(
                group, lambda: self._said(module), lambda: self._prepare(module, device_mesh, swaps),
                torch.device(device_mesh.device_type), True,
            )  # fmt: skip
            assert isinstance(module, DetLinear)
            parameters = self.placed(module, device_mesh)
        except BaseException:
            if isinstance(module, DetLinear):
                module.numerics = before
            for swap in swaps:
                swap.undo()
            raise
        self.put(module, parameters)
        return module

    def _said(self, module: nn.Module) -> str:
        told = {name: shown(value) for name, value in module.named_parameters(recurse=False)}
        own = {"parts": self.parts, "sequence_dim": self.sequence_dim, "numerics": self.numerics}
        return f"{type(self).__name__} of {type(module).__name__} {told}: {own}"

    def _prepare(self, module: nn.Module, device_mesh: Any, swaps: list[Swap]) -> str:
        """Everything that may be wrong, before anything is exchanged. Returns the class of the layer."""
        what = type(self).__name__
        if not isinstance(module, nn.Linear):
            raise ContractError(f"{what}: the module is a {type(module).__name__}, and must be an nn.Linear")
        layer = self._as_det_linear(module, swaps)
        N, K = layer.weight.shape
        cut, name = (N, "out_features") if self.kind == "column" else (K, "in_features")
        if cut % LEAVES:
            raise ContractError(
                f"{what}: {name}={cut} must be a multiple of {LEAVES}, to be cut over {device_mesh.size()} "
                "ranks as over any other number of them"
            )
        self._check_parts(layer, N)
        for name, placement in self._placements().items():
            parameter: Any = getattr(layer, name)
            if not isinstance(parameter, DTensor):
                continue
            if parameter.device_mesh != device_mesh or parameter.placements != (placement,):
                raise ContractError(
                    f"{what}: {name} is a DTensor already, placed {parameter.placements} on "
                    f"{parameter.device_mesh}; must be ({placement},) on {device_mesh}"
                )
        return str(layer.numerics)

    def _placements(self) -> dict[str, Any]:
        if self.kind == "column":
            return {"weight": Shard(0), "bias": Shard(0)}
        return {"weight": Shard(1), "bias": Replicate()}

    def placed(self, layer: DetLinear, device_mesh: Any) -> dict[str, nn.Parameter]:
        """The parameters of a layer as DTensors, by name. The ranks exchange them; the layer is unchanged."""
        made = {}
        for name, placement in self._placements().items():
            parameter = getattr(layer, name)
            if parameter is None or isinstance(parameter, DTensor):
                continue
            whole = parameter.data
            if self.parts is not None:
                whole = in_ranks(whole, self.parts, device_mesh.size())
            cut = distribute_tensor(whole, device_mesh, [placement])
            made[name] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
        return made

    def put(self, layer: DetLinear, parameters: dict[str, nn.Parameter]) -> None:
        """Make it a layer of ranks."""
        layer.of_ranks, layer.sequence_dim, layer.parts = True, self.sequence_dim, self.parts
        for name, parameter in parameters.items():
            setattr(layer, name, parameter)

    def _check_parts(self, layer: DetLinear, N: int) -> None:
        if self.parts is None:
            return
        what = f"{type(self).__name__}(parts: {self.parts})"
        if sum(self.parts) != N or any(part % LEAVES for part in self.parts):
            raise ContractError(
                f"{what}: must add up to out_features={N}, and each must be a multiple of {LEAVES}"
            )
        if isinstance(layer.weight, DTensor):
            raise ContractError(f"{what}: the weight is cut already, and not in these parts")

    def _as_det_linear(self, module: nn.Linear, swaps: list[Swap]) -> DetLinear:
        """A layer that was swapped keeps its class if the style names none, and must be of tree8."""
        if not isinstance(module, DetLinear):
            swaps.append(swap_linear(module, [""], numerics=self.numerics or TREE8))
        assert isinstance(module, DetLinear)
        if self.numerics is not None:
            check_k(type(self).__name__, self.numerics, module.in_features)
            module.numerics = self.numerics
        given = None if module.numerics is None else str(module.numerics).split("/")[0]
        if given != TREE8 and self.kind == "row":
            raise ContractError(
                f"{type(self).__name__}: the layer is of class {module.numerics or CHAIN16}, which has no "
                f'sum over ranks. Ask for numerics="{TREE8}", on one rank as on several'
            )
        return module


class DetColwise(_Style):
    """A linear layer whose columns of the output are cut over the ranks of a mesh.

    The input is whole on every rank; the output is this rank's columns, a plain tensor. The gradient of the
    input is a sum over ranks in the order of class tree8: 1, 2, 4 and 8 ranks have the same bits.

    Args:
        parts: for a layer in which several are fused, such as q, k and v: how many columns of the output each
            has. A rank gets its share of each, one after the other. So the rows of the weight, a DTensor, are
            in the order of ranks: `isobit.parallel.join_parts` gives those of its `full_tensor()` in the
            order of parts. The gradient of the input depends on the parts: one rank must declare them too.
        sequence_dim: the dimension of the input along which ranks share the tokens: it is gathered first,
            and its gradient is cut again. None: every rank has all tokens.
        numerics: the class of the layer, "tree8", or "chain16" for a model without gradients; None is the
            class of a layer that is a `DetLinear` already, and else tree8.
    """

    kind = "column"

    def __init__(
        self, *, parts: Sequence[int] | None = None, sequence_dim: int | None = None,
        numerics: str | Numerics | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sequence_dim=sequence_dim, numerics=numerics)
        self.parts = sizes_of(type(self).__name__, parts)


class DetRowwise(_Style):
    """A linear layer whose columns of the input are cut over the ranks of a mesh.

    The input is this rank's columns; the output is a sum over ranks in the order of class tree8, whole on
    every rank, with the same bits on 1, 2, 4 and 8 of them. The bias is whole, and added once.

    Args:
        sequence_dim: the dimension of the output along which ranks share the tokens afterwards. None: every
            rank has all of them.
        numerics: the class of the layer, "tree8"; None is the class of a layer that is a `DetLinear`
            already, and else tree8.
    """

    kind = "row"
