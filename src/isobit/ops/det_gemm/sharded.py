"""Linear layers whose weight is shared by the ranks of a group, with the bits of one rank.

    column   W [N, K] is cut along N. Every rank has all of x, and its columns of y. dx is a sum over N.
    row      W is cut along K. Every rank has its columns of x, and all of y, which is a sum over K.

Each rank has consecutive leaves of the tree of class tree8: 8, 4, 2 or 1 of them on 1, 2, 4 or 8 ranks. It
folds its own into one fp32 result, and the results of ranks are the upper part of the tree (`ordered_sum`).
dweight and dbias are sums over tokens, which every rank has: they stay where they are.

A fused weight (q, k and v; gate and up) is cut in *parts*, each in eighths. Leaf i of its dx is the i-th
eighth of every part, one after the other, as one chain.

With sequence parallelism x of a column layer, and y of a row layer, are cut along a dimension of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isobit.frame.contract import ContractError, describe
from isobit.frame.op import OPS
from isobit.numerics import CHAIN16, LEAVES, TREE8, Numerics
from isobit.ops.det_gemm.calls import rows
from isobit.ranks import Group, agree, gather_rows, ordered_scatter, ordered_sum, shown, under_the_name


@dataclass(frozen=True)
class Layer:
    """A layer as all ranks must know it."""

    kind: Literal["column", "row"]
    group: Group
    parts: tuple[int, ...] | None
    sequence_dim: int | None
    operand_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    numerics: str | None
    backend: str | None

    @property
    def what(self) -> str:
        return f"{self.kind}_linear"

    @property
    def leaves(self) -> int:
        """Of this rank."""
        return LEAVES // self.group.size

    def controls(self, device: torch.device) -> dict[str, str | None]:
        """Those of the ops that it is made of: the class, and the backend if one was given."""
        scalars = {"prefer": None, "backend": self.backend, "numerics": self.numerics}
        return OPS["det_linear"].bound_to(scalars, device)

    def narrow(self, weight: Tensor) -> torch.dtype:
        return self.operand_dtype or weight.dtype

    def sums_a_tree(self) -> bool:
        named = self.backend is not None and self.backend in [
            b.name for b in OPS["det_gemm_subtree"].backends
        ]
        return named or (self.numerics is not None and self.numerics.split("/")[0] == TREE8)


def shard_parts(t: Tensor | None, parts: Sequence[int], group: Group) -> Any:
    """This rank's rows of a fused weight, or bias, whose parts have these sizes: its share of every part."""
    if t is None:
        return None
    cuts = [part.tensor_split(group.size)[group.rank] for part in t.split(list(parts))]
    return cuts[0] if len(cuts) == 1 else torch.cat(cuts)


def in_ranks(t: Tensor, parts: Sequence[int], ranks: int) -> Tensor:
    """The rows of a fused weight, or bias, in the order of ranks: those of rank 0, its share of every part,
    then those of rank 1."""
    shares = [part.tensor_split(ranks) for part in t.split(list(parts))]
    return torch.cat([share[rank] for rank in range(ranks) for share in shares])


def in_parts(t: Tensor, parts: Sequence[int], ranks: int) -> Tensor:
    """The rows of all ranks, one after the other, in the order of parts again."""
    own = [rank.split([part // ranks for part in parts]) for rank in t.tensor_split(ranks)]
    return torch.cat([rank[i] for i in range(len(parts)) for rank in own])


def _call(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """The call in words: what must be the same on all ranks. Which gradients there are decides what a
    backward exchanges: a sum for x, and all tokens of x for those of weight and bias."""
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(t, Tensor) and not (name == "bias" and t is None):
            raise ContractError(f"{layer.what}({name}: {type(t).__name__}): must be a tensor")
    tensors = [f"{n}: {describe(t)}" for n, t in (("x", x), ("weight", weight), ("bias", bias))]
    options = [
        f"{name}={shown(value)}"
        for name in ("parts", "sequence_dim", "operand_dtype", "out_dtype", "numerics", "backend")
        if (value := getattr(layer, name)) is not None
    ]
    of_tokens = weight.requires_grad or (bias is not None and bias.requires_grad)
    needs = [name for name, need in (("x", x.requires_grad), ("weight or bias", of_tokens)) if need]
    gradients = [f"with gradients of {' and '.join(needs)}"] if torch.is_grad_enabled() and needs else []
    return f"{layer.what}({', '.join(tensors + options + gradients)})"


def _check(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Everything that is wrong with a call on this rank, before it exchanges anything. Returns the numerics
    class here: backends of one class may differ."""
    what, group = layer.what, layer.group
    dim = layer.sequence_dim
    if x.ndim < 1 or weight.ndim != 2:
        raise ContractError(
            f"{what}(x: {describe(x)}, weight: {describe(weight)}): must be [*, K] and [N, K]"
        )
    if dim is not None and not 0 <= dim < x.ndim - 1:
        raise ContractError(
            f"{what}(sequence_dim: {dim}): must be one of the {x.ndim - 1} dimensions of x before the last, "
            "counted from 0"
        )
    if layer.kind == "row" and x.shape[-1] != weight.shape[1]:
        raise ContractError(
            f"{what}(x: {describe(x)}, weight: {describe(weight)}): must have the same columns of K, those "
            "of this rank: x.chunk(ranks, -1)[rank] and weight.chunk(ranks, 1)[rank] of the whole tensors"
        )
    if dim is not None and layer.kind == "row" and x.shape[dim] % group.size:
        raise ContractError(
            f"{what}(x: {describe(x)}): {x.shape[dim]} tokens cannot be cut into {group.size} equal parts; "
            "pad them"
        )
    needs_x = torch.is_grad_enabled() and x.requires_grad
    if (layer.kind == "row" or needs_x) and not layer.sums_a_tree():
        summed = "y is a sum over k, and k"
        if layer.kind == "column":
            summed = "the gradient of x is a sum over N, and N"
        raise ContractError(
            f"{what}(numerics: {layer.numerics!r}): {summed} is shared by the ranks. Class {CHAIN16} is one "
            f'chain on one rank; ask for numerics="{TREE8}", on one rank as on several'
        )
    N = weight.shape[0]
    if layer.parts is not None and sum(layer.parts) != N * group.size:
        raise ContractError(
            f"{what}(parts: {layer.parts}): must add up to N of the whole weight, {N * group.size}"
        )
    if layer.kind == "row" and weight.shape[1] % layer.leaves:
        raise ContractError(
            f"{what}(weight: {describe(weight)}): K of the whole weight, {weight.shape[1] * group.size}, "
            f"must be a multiple of {LEAVES}: class {TREE8} cuts it into {LEAVES} equal leaves"
        )
    whole = N if layer.kind == "row" else N * group.size
    for part in layer.parts or (whole,):
        if part % (LEAVES if needs_x else group.size if layer.kind == "column" else 1):
            raise ContractError(
                f"{what}(weight: {describe(weight)}): N of the whole weight, or of each of its parts, must "
                f"be a multiple of {LEAVES} and is {part}: the gradient of x is a sum over N in {LEAVES} "
                "equal leaves"
            )
    linear = OPS["det_linear"]
    options = {"operand_dtype": layer.operand_dtype, "out_dtype": layer.out_dtype}
    own = {"numerics": layer.numerics, "backend": layer.backend}
    if layer.kind == "row":  # y is made by another op
        own = dict.fromkeys(own)
    with under_the_name(what, "det_linear"):
        served = linear.explain(x=x, weight=weight, bias=bias, **options, **own)
    return f"numerics class {served.numerics}"


def _in_leaves(layer: Layer, t: Tensor, dim: int) -> Tensor:
    """Columns, or rows of a weight, in the order of leaves: of each the eighth of every part."""
    if layer.parts is None or len(layer.parts) == 1:
        return t
    own = [part // layer.group.size for part in layer.parts]
    pieces = [part.unflatten(dim, (layer.leaves, -1)) for part in t.split(own, dim)]
    at = dim if dim >= 0 else t.ndim + dim
    return torch.cat(pieces, at + 1).flatten(at, at + 1)


def _summed(
    layer: Layer, a: Tensor, b: Tensor, lead: torch.Size, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The sum over ranks of a b, [*lead, N]; or this rank's part of it along the dimension of tokens."""
    partial = OPS["det_gemm_subtree"](a=a, b=b, leaves=layer.leaves, **layer.controls(a.device))
    partial = partial.view(*lead, b.shape[1])
    if layer.sequence_dim is None:
        return ordered_sum(layer.group, partial, bias, dtype)
    first = ordered_scatter(layer.group, partial.movedim(layer.sequence_dim, 0), bias, dtype)
    return first.movedim(0, layer.sequence_dim)


def _whole(layer: Layer, t: Tensor) -> Tensor:
    """All tokens of a tensor that is cut along them."""
    return t if layer.sequence_dim is None else gather_rows(layer.group, t, layer.sequence_dim)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.x_dtype = x.dtype
        y: Tensor = OPS["det_linear"](
            x=_whole(layer, x), weight=weight, bias=bias, operand_dtype=layer.operand_dtype,
            out_dtype=layer.out_dtype, numerics=layer.numerics, backend=layer.backend,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        layer: Layer = ctx.layer
        x, weight = ctx.saved_tensors
        narrow, dx, dweight, dbias = layer.narrow(weight), None, None, None
        if ctx.needs_input_grad[1]:
            left = rows(_in_leaves(layer, dy.to(narrow), -1))
            right = _in_leaves(layer, weight.to(narrow), 0)
            dx = _summed(layer, left, right, dy.shape[:-1], None, narrow).to(ctx.x_dtype)
        if any(ctx.needs_input_grad[2:]):
            x = None if x is None else _whole(layer, x)
            dweight, dbias = _token_sums(ctx, layer, dy, x, weight)
        return None, dx, dweight, dbias


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.x_dtype = x.dtype
        narrow = layer.narrow(weight)
        added = bias if bias is None or layer.operand_dtype is None else bias.to(narrow)
        return _summed(
            layer, rows(x.to(narrow)), weight.to(narrow).t(), x.shape[:-1], added, layer.out_dtype or narrow
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        layer: Layer = ctx.layer
        x, weight = ctx.saved_tensors
        dx, dweight, dbias = _local(ctx, layer, _whole(layer, dy), x, weight, want_x=ctx.needs_input_grad[1])
        return None, None if dx is None else dx.to(ctx.x_dtype), dweight, dbias


def _token_sums(
    ctx: Any, layer: Layer, dy: Tensor, x: Tensor | None, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    _, dweight, dbias = _local(ctx, layer, dy, x, weight, want_x=False)
    return dweight, dbias


def _local(
    ctx: Any, layer: Layer, dy: Tensor, x: Tensor | None, weight: Tensor, want_x: bool
) -> tuple[Tensor | None, ...]:
    """Gradients that this rank computes alone."""
    made = OPS["det_linear_bwd"](
        dy=dy, x=x, weight=weight, operand_dtype=layer.operand_dtype, bias_dtype=ctx.bias_dtype,
        want_x=want_x, want_weight=ctx.needs_input_grad[2], want_bias=ctx.needs_input_grad[3],
        **layer.controls(weight.device),
    )  # fmt: skip
    wanted = (want_x, *ctx.needs_input_grad[2:])
    return tuple(each if need else None for each, need in zip(made, wanted, strict=True))


#: A layer, and this rank's parts of x, weight and bias.
Parts = tuple[Layer, Tensor, Tensor, Tensor | None]


def sharded_linear(group: Group, parts: Callable[[], Parts], device: Any, validate: bool | None) -> Tensor:
    """The layer on this rank. `parts` may find an error: other ranks hear of it."""
    ready: list[Parts] = []

    def call() -> str:
        ready.append(parts())
        return _call(*ready[0])

    agree(group, call, lambda: _check(*ready[0]), device, validate)
    layer, x, weight, bias = ready[0]
    function = _Column if layer.kind == "column" else _Row
    y: Tensor = function.apply(layer, x, weight, bias)
    return y


def device_of(weight: Any) -> torch.device:
    """Where ranks exchange what they agree about. A weight that is no tensor is an error later."""
    return weight.device if isinstance(weight, Tensor) else torch.device("cpu")


def sizes_of(what: str, parts: Any) -> tuple[int, ...] | None:
    """The parts of a fused weight, as a user gives them."""
    if parts is None:
        return None
    if not isinstance(parts, Sequence) or not all(type(part) is int and part > 0 for part in parts):
        raise ContractError(f"{what}(parts: {parts!r}): must be numbers of columns, such as (1024, 256, 256)")
    return tuple(parts)


def layer_of(
    kind: Literal["column", "row"], group: Group, *, parts: Sequence[int] | None = None,
    sequence_dim: int | None = None, operand_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None, numerics: str | Numerics | None = None, backend: str | None = None,
) -> Layer:  # fmt: skip
    if sequence_dim is not None and type(sequence_dim) is not int:
        raise ContractError(f"{kind}_linear(sequence_dim: {sequence_dim!r}): must be a number, or None")
    return Layer(
        kind, group, sizes_of(f"{kind}_linear", parts), sequence_dim, operand_dtype, out_dtype,
        None if numerics is None else str(numerics), backend,
    )  # fmt: skip
