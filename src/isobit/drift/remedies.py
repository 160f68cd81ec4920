"""What removes a difference that a kind of module adds, in words, and how `--try` does it.

A remedy that can be tried by itself changes the modules that add a difference, and no others; the end of its
with-block restores them. What only `zero_drift` does is tried with it, as a whole.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from isobit.integrations.hf.attention import NAME, register_attention
from isobit.integrations.hf.errors import HFError
from isobit.integrations.hf.norms import DetRMSNorm, options_of_all
from isobit.integrations.hf.rotary import ROTATES
from isobit.layers.linear import swap_linear
from isobit.ops.rope import rope
from isobit.ops.swiglu import swiglu

#: The fraction of elements in which isobit's rotation must have the bits of the model's: rotations of other
#: columns change nearly all.
AGREE = 0.97

#: Changes the modules of these names in a model until the end of the block; ContractError if it cannot. Gives
#: the names of modules whose own code isobit computes then.
Applied = Callable[[Any, Collection[str]], AbstractContextManager[Collection[str]]]


@dataclass(frozen=True)
class Remedy:
    """The call of isobit, and how to try it; None if there is nothing to try alone."""

    call: str
    applied: Applied | None = None


@contextmanager
def _linear(model: Any, names: Collection[str]) -> Iterator[Collection[str]]:
    swap = swap_linear(model, sorted(names))
    try:
        yield ()
    finally:
        swap.undo()


@contextmanager
def _attention(model: Any, names: Collection[str]) -> Iterator[Collection[str]]:
    """In all layers: models have one attention function."""
    register_attention()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield ()
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _norms(model: Any, names: Collection[str]) -> Iterator[Collection[str]]:
    options = {id(module): given for module, given in options_of_all(model)}
    norms = {name: model.get_submodule(name) for name in names}
    if others := [name for name, module in norms.items() if id(module) not in options]:
        raise HFError(f"{others[0]}: not an RMSNorm in bf16 or fp16 that isobit.rms_norm computes")
    classes = [(module, type(module)) for module in norms.values()]
    try:
        for module in norms.values():
            module.__class__, module.options = DetRMSNorm, options[id(module)]
        yield ()
    finally:
        for module, theirs in classes:
            module.__class__ = theirs
            vars(module).pop("options", None)


@contextmanager
def _rope(model: Any, names: Collection[str]) -> Iterator[Collection[str]]:
    """The rotation is a function of the file that a model's attention is in."""
    layers = [model.get_submodule(name) for name in names]
    files = {type(layer).__module__: layer for layer in layers}
    with ExitStack() as undo:
        for name, layer in files.items():
            file = import_module(name)
            theirs = getattr(file, ROTATES, None)
            if theirs is None or not _rotates_as_llama(theirs, layer):
                raise HFError(f"{type(layer).__name__}: its queries and keys are not rotated as in Llama")
            undo.callback(setattr, file, ROTATES, theirs)
            setattr(file, ROTATES, _rotated)
        yield names


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """As transformers' function of that name, of [B, H, T, D] or, with 2, of [B, T, H, D]."""
    if unsqueeze_dim == 2:
        return rope(q, k, cos, sin)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotates_as_llama(theirs: Callable[..., Any], layer: nn.Module) -> bool:
    weight = next(layer.parameters())
    D, gen = int(getattr(layer, "head_dim", 0)), torch.Generator().manual_seed(0)
    if not D or D % 2:
        return False
    q, k = (torch.randn(1, heads, 5, D, generator=gen).to(weight) for heads in (2, 1))
    angles = torch.randn(1, 5, D // 2, generator=gen)
    cos, sin = (torch.cat((x, x), -1).to(weight) for x in (angles.cos(), angles.sin()))
    try:
        expected = theirs(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    made = _rotated(q, k, cos, sin)
    pairs = zip(made, expected, strict=True)
    return all(a.shape == b.shape and bool((a == b).double().mean() >= AGREE) for a, b in pairs)


@contextmanager
def _swiglu(model: Any, names: Collection[str]) -> Iterator[Collection[str]]:
    """In the MLP around each activation, together with the product by which it gates."""
    gated = {model.get_submodule(name.rpartition(".")[0]): name.rpartition(".")[0] for name in names}
    for name in names:
        mlp = model.get_submodule(name.rpartition(".")[0])
        parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
        silu = "silu" in type(model.get_submodule(name)).__name__.lower()
        if not silu or not all(hasattr(mlp, part) for part in parts) or "forward" in vars(mlp):
            raise HFError(f"{name}: not the SiLU of a gate_proj next to an up_proj and a down_proj")
    try:
        for mlp in gated:
            mlp.forward = _gated(mlp)
        yield gated.values()
    finally:
        for mlp in gated:
            vars(mlp).pop("forward", None)


def _gated(mlp: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        made: Tensor = mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
        return made

    return forward


#: By kind of module.
REMEDIES = {
    "linear": Remedy("isobit.det_linear: isobit.nn.swap_linear(model) or zero_drift", _linear),
    "router": Remedy("isobit.det_linear and isobit.route, if it is one of a mixture of experts: zero_drift"),
    "attention": Remedy('isobit.attention: attn_implementation="isobit" or zero_drift', _attention),
    "norm": Remedy("isobit.rms_norm, if it is an RMSNorm: zero_drift", _norms),
    "layer norm": Remedy("nothing of isobit: it has RMSNorm, no LayerNorm"),
    "quantised": Remedy("nothing of isobit: a quantised layer; its own kernels decide"),
    "rope": Remedy("isobit.rope, if queries and keys are rotated as in Llama", _rope),
    "activation": Remedy(
        "isobit.swiglu, if it is the SiLU of a gate: its product is computed with it", _swiglu
    ),
    "own code": Remedy(
        "zero_drift, if it is that of experts or of a gated delta net; else look at this module"
    ),
}
NOTHING = Remedy("nothing of isobit: look at this module")


def remedy(kind: str) -> Remedy:
    return REMEDIES.get(kind, NOTHING)
