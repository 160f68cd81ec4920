"""`DetLinear`, an `nn.Linear` whose bits do not depend on the batch; `swap_linear` puts it into a model."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from isobit.frame.contract import ContractError, describe
from isobit.frame.device import arch_key
from isobit.frame.op import known_op
from isobit.layers.classes import Classes, check_class, check_k, check_keys, classes_given
from isobit.layers.fsdp import class_of, set_class
from isobit.numerics import CHAIN16, Numerics
from isobit.ops.det_gemm import det_linear
from isobit.ops.det_gemm.dtensors import linear_of_dtensors

_HALF = (torch.bfloat16, torch.float16)

#: Options of a `DetLinear`, stored on the layer.
_OPTIONS = ("operand_dtype", "out_dtype", "numerics", "backend")

#: Devices with autocast. On others PyTorch must be asked first: querying the state there is an error.
_AUTOCAST = ("cuda", "cpu")


def _autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


class DetLinear(nn.Linear):
    """`nn.Linear` through `isobit.det_linear`: the same parameters and the same state dict.

    Parameters are bf16 or fp16. fp32 parameters work under `torch.autocast`, where they are rounded to its
    dtype as for `nn.Linear`: weight, bias and input. With `operand_dtype` they are rounded to that, under
    autocast and without it.

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`.
        operand_dtype, out_dtype, numerics, backend: as for `isobit.det_linear`.

    Example:
        >>> import torch, isobit
        >>> layer = isobit.nn.DetLinear(16, 4, dtype=torch.bfloat16, numerics="chain16")
        >>> layer
        DetLinear(in_features=16, out_features=4, bias=True, numerics='chain16')
        >>> x = torch.randn(8, 16, dtype=torch.bfloat16)
        >>> torch.equal(layer(x)[3], layer(x[3]))
        True
    """

    operand_dtype: torch.dtype | None = None  # of layers that were pickled before there was this option
    #: The dimension of tokens that ranks share before or after this layer; `isobit.parallel` sets it.
    sequence_dim: int | None = None
    #: Whether the ranks of the mesh that its weight is on share this layer; `isobit.parallel` sets it too.
    of_ranks = False
    #: The columns of each part of a fused layer that ranks share: its rows are then in the order of ranks.
    parts: tuple[int, ...] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        operand_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        numerics: str | Numerics | None = None,
        backend: str | None = None,
    ) -> None:
        _known("DetLinear", operand_dtype, backend)
        check_class("DetLinear", numerics)
        check_k(f"DetLinear(numerics: {str(numerics)!r})", numerics, in_features)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.operand_dtype, self.out_dtype = operand_dtype, out_dtype
        self.numerics, self.backend = numerics, backend

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        operand_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        numerics: str | Numerics | None = None,
        backend: str | None = None,
    ) -> "DetLinear":
        """A layer with the same parameter objects as `linear` (not copies: tied weights stay tied)."""
        reason = _cannot_swap(linear)
        if reason is not None:
            raise ContractError(f"DetLinear.from_linear(linear: {type(linear).__name__}): {reason}")
        made = cls(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta",
            operand_dtype=operand_dtype, out_dtype=out_dtype, numerics=numerics, backend=backend,
        )  # fmt: skip
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        kind, weight, operand_dtype = input.device.type, self.weight, self.operand_dtype
        if operand_dtype is None:
            autocast = torch.is_autocast_enabled(kind) if kind in _AUTOCAST else _autocasts(kind)
            if autocast and torch.float64 not in (input.dtype, weight.dtype):  # autocast leaves fp64 alone
                operand_dtype = torch.get_autocast_dtype(kind)
            elif weight.dtype not in _HALF:
                raise ContractError(
                    f"DetLinear(weight: {describe(weight)}): parameters must be bf16 or fp16; call "
                    ".to(torch.bfloat16) on the module, or run it under torch.autocast"
                )
        if self.of_ranks:
            return linear_of_dtensors(
                input, weight, self.bias, group=cast(Any, weight).device_mesh, operand_dtype=operand_dtype,
                out_dtype=self.out_dtype, validate=None, numerics=self.numerics, backend=self.backend,
                sequence_dim=self.sequence_dim, parts=self.parts,
            )  # fmt: skip
        return det_linear(
            input, weight, self.bias, operand_dtype=operand_dtype, out_dtype=self.out_dtype,
            numerics=self.numerics, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in _OPTIONS}
        given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
        return ", ".join([super().extra_repr(), *given])


@dataclass
class Swap:
    """The result of `swap_linear`: the names of the layers that it swapped, and of those it skipped, with the
    reason; and the numerics class of each."""

    swapped: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    _layers: list[nn.Linear] = field(default_factory=list, repr=False)

    @property
    def classes(self) -> dict[str, str]:
        """The numerics class of each swapped layer, by name; none after `undo`. It can be written as JSON,
        and given to `swap_linear` as `numerics`: the model then has the same bits."""
        return {name: class_here(layer) for name, layer in zip(self.swapped, self._layers, strict=False)}

    def undo(self) -> None:
        """Make them `nn.Linear` again, sharded or not. Does nothing the second time. If something else has
        changed the class of a layer since (parametrize) this is an error, and no layer is touched: undo that
        first."""
        for name, layer in zip(self.swapped, self._layers, strict=False):
            if class_of(layer) is not DetLinear:
                raise ContractError(
                    f"Swap.undo: {name} is now a {type(layer).__name__}; undo that change first"
                )
        for layer in self._layers:
            set_class(layer, nn.Linear)
            for option in (*_OPTIONS, "sequence_dim", "of_ranks", "parts"):
                vars(layer).pop(option, None)
        self._layers.clear()


def swap_linear(
    model: nn.Module,
    where: Callable[[str, nn.Linear], bool] | Iterable[str] | None = None,
    *,
    operand_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    numerics: Classes = None,
    backend: str | None = None,
) -> Swap:
    """Turn the `nn.Linear` layers of a model into `DetLinear`, in place.

    The layers stay the same objects, with their parameters, hooks and names; only their class changes. So
    tied weights stay tied, and an optimizer or a wrapper that holds a layer still holds it. Some layers are
    left unchanged, listed in `skipped`, and warned about: subclasses of `nn.Linear`, which may do more than
    multiply; layers whose `forward` was replaced on the object, which would ignore a new class; and those of
    PyTorch's own transformer layers, which do not call them. So is the `Conv1D` of transformers, which GPT-2
    has in place of linear layers. FSDP2 (`fully_shard`) may shard layers before they are swapped or after.

    Args:
        model: any module; itself, if it is an `nn.Linear`, under the name "".
        where: names of layers, or a function of (name, layer) that says which; None is all of them. A name
            that cannot be swapped is an error.
        operand_dtype, out_dtype, backend: as for `isobit.det_linear`, the same for all layers.
        numerics: a class, as for `isobit.det_linear`, the same for all layers; or a map {name: class}, whose
            names may be glob patterns such as "*.down_proj". A name comes before patterns. Layers that are
            not in the map are chain16. A key that matches no linear layer of the model is an error.

    Returns:
        A `Swap`: `swapped`, a list of names; `skipped`, reasons by name; `classes`, the numerics class of
        each layer, which can be saved and given as `numerics` again; `undo()`.

    Example:
        >>> import torch, isobit
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> swap = isobit.nn.swap_linear(model.bfloat16(), where=["2"], numerics="chain16")
        >>> swap.swapped, model[2]
        (['2'], DetLinear(in_features=8, out_features=4, bias=True, numerics='chain16'))
        >>> swap.undo()
        >>> model[2]
        Linear(in_features=8, out_features=4, bias=True)
    """
    if isinstance(where, str):
        raise ContractError(f"swap_linear(where: {where!r}): must be a list of names; write [{where!r}]")
    _known("swap_linear", operand_dtype, backend)
    linears = linear_layers(model)
    check_keys("swap_linear", numerics, linears)
    chosen, by_name = _chosen(linears, where)
    reasons = {name: _cannot_swap(layer) or _not_called(model, name) for name, layer in chosen.items()}
    swap = Swap(skipped={name: reason for name, reason in reasons.items() if reason is not None})
    if swap.skipped:
        text = "; ".join(f"{name}: {reason}" for name, reason in swap.skipped.items())
        if by_name:
            raise ContractError(f"swap_linear(where: {list(chosen)}): cannot swap {text}")
        warnings.warn(f"isobit.nn.swap_linear: left as they are: {text}", stacklevel=2)
    chosen = {name: layer for name, layer in chosen.items() if name not in swap.skipped}
    classes = classes_given("swap_linear", numerics, chosen)
    for name, layer in chosen.items():
        set_class(layer, DetLinear)
        options = (operand_dtype, out_dtype, classes[name], backend)
        vars(layer).update(zip(_OPTIONS, options, strict=True))
        swap.swapped.append(name)
        swap._layers.append(layer)
    return swap


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Those that a user would expect to be swapped, by name."""
    return {name: layer for name, layer in model.named_modules() if _is_linear(layer)}


def class_here(layer: nn.Linear) -> str:
    """The numerics class of a `DetLinear`, where its weight is now. By default that is chain16, which has the
    hardware's name behind it on GPUs other than Hopper."""
    assert isinstance(layer, DetLinear)
    device = layer.weight.device
    if layer.numerics is not None:
        return str(layer.numerics)
    if layer.backend is not None:
        return known_op("det_linear").backend_named(layer.backend).numerics_on(device)
    return default_class(device)


def default_class(device: torch.device) -> str:
    """The class of products for which none was given."""
    arch = arch_key(device)
    return str(CHAIN16) if arch in ("cpu", "meta", "sm_90") else f"{CHAIN16}/{arch}"


def _known(what: str, operand_dtype: torch.dtype | None, backend: str | None) -> None:
    """An option that does not exist for products is an error now, not at the first forward."""
    if operand_dtype not in (None, *_HALF):
        raise ContractError(f"{what}(operand_dtype: {operand_dtype}): must be bf16, fp16 or None")
    if backend is not None:
        try:
            known_op("det_linear").backend_named(backend)
        except ContractError as error:
            raise ContractError(f"{what}: {error}") from None


def _chosen(linears: dict[str, nn.Linear], where: Any) -> tuple[dict[str, nn.Linear], bool]:
    """The selected layers, and whether they were given by name."""
    if where is None or callable(where):
        return {name: layer for name, layer in linears.items() if where is None or where(name, layer)}, False
    names = list(where)
    unknown = [name for name in names if name not in linears]
    if unknown:
        known = ", ".join(list(linears)[:20]) + (", ..." if len(linears) > 20 else "")
        rule = f"no linear layer {unknown[0]!r}; there are: {known}"
        raise ContractError(f"swap_linear(where: {names}): {rule}")
    return {name: linears[name] for name in names}, True


def _is_conv1d(layer: nn.Module) -> bool:
    """The linear layer of GPT-2. By name: transformers need not be installed."""
    kinds = {(kind.__module__, kind.__name__) for kind in type(layer).__mro__}
    return ("transformers.pytorch_utils", "Conv1D") in kinds


def _is_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Layers that a user would expect to be swapped; `_cannot_swap` decides which of them can be."""
    return isinstance(layer, nn.Linear) or _is_conv1d(layer)


def _not_called(model: nn.Module, name: str) -> str | None:
    """In evaluation, PyTorch's own transformer layers read the weights of their linear layers without calling
    them."""
    parent = model.get_submodule(name.rpartition(".")[0])
    if name and isinstance(parent, nn.TransformerEncoderLayer | nn.MultiheadAttention):
        return f"its {type(parent).__name__} reads the weight without calling the layer"
    return None


def _cannot_swap(layer: nn.Linear) -> str | None:
    if isinstance(layer, DetLinear):
        return "it is a DetLinear already"
    if _is_conv1d(layer):
        return "it is a Conv1D of transformers, whose weight is the transpose of a linear layer's"
    if class_of(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}, which may do more than an nn.Linear"
    if "forward" in vars(layer):
        return "its forward was replaced on the object (by accelerate, for one)"
    return None
