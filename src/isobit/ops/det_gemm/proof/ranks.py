"""`det_linear` by the ranks of a group: cut along N, along k, in parts, and along tokens between layers.

The controls make the sum over ranks in the ways that are usual elsewhere: one partial sum after the other, as
a ring does; with partial sums in 16 bits; and over chains of fewer ranks, without the tree. All must have
other bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from isobit.frame.op import OPS
from isobit.numerics import CHAIN16, LEAVES, TREE8
from isobit.ops.det_gemm.op import linear
from isobit.ops.det_gemm.sharded import layer_of, shard_parts, sharded_linear
from isobit.ranks import Group
from isobit.spec.proof import Args, Shards
from isobit.spec.trial import Trial, cloned

Results = dict[str, Tensor]

#: Parts of a fused weight, in eighths of N: as many columns of q as of k and v together.
FUSED = (4, 2, 2)

_TENSORS = ("x", "weight", "bias")


def _of_tree(trial: Trial) -> bool:
    return trial.numerics.split("/")[0] == TREE8


def _cut(t: Tensor | None, group: Group, dim: int) -> Tensor | None:
    return None if t is None else t.tensor_split(group.size, dim)[group.rank]


def _differentiated(
    call: Callable[..., Tensor], args: Args, dy: Tensor | None, wanted: Sequence[str]
) -> Results:
    """y, and the gradients that are wanted of those that are given."""
    mine = cloned({name: args[name] for name in _TENSORS})
    names = [n for n in wanted if mine[n] is not None] if dy is not None else []
    for name in names:
        mine[name].requires_grad_()
    y = call(*mine.values())
    gradients = torch.autograd.grad(y, [mine[n] for n in names], dy) if names else ()
    return {"y": y.detach()} | {f"gradient:{n}": g for n, g in zip(names, gradients, strict=True)}


def _wanted(trial: Trial, args: Args) -> list[str]:
    """A column layer of class chain16 has no gradient of x: that would be a sum over ranks."""
    return [name for name in trial.leaves(args) if name != "x" or _of_tree(trial)]


def _options(trial: Trial, args: Args) -> Args:
    return {name: args[name] for name in ("operand_dtype", "out_dtype")} | {"backend": trial.backend}


def _run(
    kind: Literal["column", "row"], sequence_dim: int | None, fused: bool,
    group: Group, trial: Trial, args: Args, cotangents: Sequence[Tensor],
) -> Results:  # fmt: skip
    """On one rank."""
    N, dy = len(args["weight"]), cotangents[0] if trial.leaves(args) else None
    parts = [N // LEAVES * share for share in FUSED] if fused else None
    layer = layer_of(kind, group, parts=parts, sequence_dim=sequence_dim, **_options(trial, args))
    mine = dict(args)
    if kind == "row":
        mine |= {"x": _cut(args["x"], group, -1), "weight": _cut(args["weight"], group, 1)}
        if sequence_dim is not None:
            dy = _cut(dy, group, sequence_dim)
    else:
        mine |= {n: shard_parts(args[n], parts or [N], group) for n in ("weight", "bias")}
        dy = None if dy is None else shard_parts(dy.movedim(-1, 0), parts or [N], group).movedim(0, -1)
        if sequence_dim is not None:
            mine["x"] = _cut(args["x"], group, sequence_dim)

    def call(*tensors: Any) -> Tensor:
        return sharded_linear(group, lambda: (layer, *tensors), trial.device, None)

    results = _differentiated(call, mine, dy, _wanted(trial, args))
    return _by_parts(results, parts, group.size) if fused else results


def _by_parts(results: Results, parts: Sequence[int] | None, size: int) -> Results:
    """Columns of y, and rows of gradients, part by part."""
    own, result = [part // size for part in parts or ()], dict(results)
    for name in ("y", "gradient:weight", "gradient:bias"):
        if name in results:
            pieces = result.pop(name).split(own, -1 if name == "y" else 0)
            result |= {f"{name}.{i}": piece for i, piece in enumerate(pieces)}
    return result


def _whole(trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> Results:
    dy = cotangents[0] if trial.leaves(args) else None
    call = partial(_plain, trial, args)
    return _differentiated(call, args, dy, _wanted(trial, args))


def _plain(trial: Trial, args: Args, *tensors: Tensor) -> Tensor:
    y: Tensor = linear(**args | dict(zip(_TENSORS, tensors, strict=True)), backend=trial.backend)
    return y


def _whole_fused(trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> Results:
    """Without a group: by parts everything but dx is what it is without them, and dx is the product of
    columns in the order of leaves."""
    N = len(args["weight"])
    parts = [N // LEAVES * share for share in FUSED]
    results = _whole(trial, args, cotangents)
    if "gradient:x" in results:
        order = torch.cat([
            torch.arange(N).split(parts)[p].view(LEAVES, -1)[leaf]
            for leaf in range(LEAVES) for p in range(len(parts))
        ]).to(args["weight"].device)  # fmt: skip
        moved = args | {"weight": args["weight"][order], "bias": None}
        call = partial(_plain, trial, moved)
        results["gradient:x"] = _differentiated(call, moved, cotangents[0][..., order], ["x"])["gradient:x"]
    return _by_parts(results, parts, 1)


def _controls(
    kind: Literal["column", "row"], trial: Trial, args: Args, cotangents: Sequence[Tensor]
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """The sum of the layer over ranks: y of a row layer, dx of a column layer; y if it has none."""
    narrow = args["operand_dtype"] or args["x"].dtype
    weight = args["weight"].to(narrow)
    if kind == "column" and _of_tree(trial) and trial.leaves(args):
        a, b = cotangents[0].to(narrow).flatten(0, -2), weight
    else:
        a, b = args["x"].to(narrow).flatten(0, -2), weight.t()
    out, K = torch.float32, a.shape[1]
    gemm = partial(OPS["det_gemm"], out_dtype=out, backend=trial.backend)
    ours = [gemm(a=a, b=b)]

    def chains(count: int) -> list[Tensor]:
        """The partial sums of so many ranks, each one chain, as a row layer without the tree has them."""
        cut = K // count
        chain = partial(
            OPS["det_gemm"], out_dtype=out, numerics=trial.numerics.replace(str(TREE8), str(CHAIN16))
        )
        return [chain(a=a[:, i * cut : (i + 1) * cut], b=b[i * cut : (i + 1) * cut]) for i in range(count)]

    leaves = chains(LEAVES)
    added = {
        "ring order": [_one_by_one(leaves)],
        "bf16 partial sums": [_one_by_one([leaf.bfloat16().float() for leaf in leaves])],
        "two ranks without the tree": [_one_by_one(chains(2))],
    }
    return [(f"a sum over ranks in {what}", ours, theirs) for what, theirs in added.items()]


def _one_by_one(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _uneven(trial: Trial) -> str | None:
    for name in ("K", "N"):
        if trial.case.dims[name] % LEAVES:
            return f"{name}={trial.case.dims[name]} cannot be cut in eighths"
    return None


def _needs_tree(trial: Trial) -> str | None:
    if not _of_tree(trial):
        return f"class {trial.numerics} has no sum over ranks"
    return _uneven(trial)


def _shards(
    what: str, kind: Literal["column", "row"], spread: dict[str, int | None], sequence_dim: int | None = None,
    fused: bool = False, why_not: Callable[[Any], str | None] = _needs_tree,
) -> Shards:  # fmt: skip
    return Shards(
        what, partial(_run, kind, sequence_dim, fused), _whole_fused if fused else _whole, spread,
        partial(_controls, kind), why_not,
    )  # fmt: skip


_COLUMN: dict[str, int | None] = {
    "y": -1, "gradient:x": None, "gradient:weight": 0, "gradient:bias": 0,
}  # fmt: skip
_ROW: dict[str, int | None] = {
    "y": None, "gradient:x": -1, "gradient:weight": 1, "gradient:bias": None,
}  # fmt: skip

SHARDS = [
    _shards("a column layer", "column", _COLUMN, why_not=_uneven),
    _shards("a row layer", "row", _ROW),
    _shards("a column layer, tokens cut before it", "column", _COLUMN | {"gradient:x": 0}, sequence_dim=0),
    _shards("a row layer, tokens cut after it", "row", _ROW | {"y": 0}, sequence_dim=0),
    _shards(
        "a fused column layer", "column",
        {"gradient:x": None} | {f"{n}.{i}": -1 if n == "y" else 0
                                for n in ("y", "gradient:weight", "gradient:bias") for i in range(3)},
        fused=True,
    ),
]  # fmt: skip
