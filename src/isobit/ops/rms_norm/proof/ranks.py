"""`rms_norm` of single heads that ranks share. The controls are gradients of the weight as an all-reduce has
them: each rank's own sum over its heads, added afterwards."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.rms_norm.sharded import rms_norm_of_heads
from isobit.ranks import Group
from isobit.spec.proof import Args, Shards
from isobit.spec.trial import Trial, cloned

Results = dict[str, Tensor]

#: Ranks of the controls.
RANKS = 2


def _heads(trial: Trial) -> int:
    """The dimension of heads."""
    return list(trial.case.dims).index("H")


def _differentiated(
    call: Callable[[Tensor, Tensor], Tensor], trial: Trial, args: Args, dout: Tensor
) -> Results:
    """Results with the heads in front."""
    mine = cloned({name: args[name] for name in ("x", "weight")})
    wanted = [name for name in trial.leaves(args) if name in mine]
    for name in wanted:
        mine[name].requires_grad_()
    out = call(mine["x"], mine["weight"])
    grads = torch.autograd.grad(out, [mine[name] for name in wanted], dout) if wanted else ()
    results = {"out": out.detach()} | {f"gradient:{n}": g for n, g in zip(wanted, grads, strict=True)}
    at = _heads(trial)
    return {name: t.movedim(at, 0) if t.ndim > 1 else t for name, t in results.items()}


def _on_a_rank(group: Group, trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> Results:
    at = _heads(trial)
    options = {name: args[name] for name in ("eps", "offset", "cast")}

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_of_heads(x, weight, group, at, **options, backend=trial.backend)

    own, dout = (t.tensor_split(group.size, at)[group.rank] for t in (args["x"], cotangents[0]))
    return _differentiated(call, trial, args | {"x": own}, dout)


def _alone(trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> Results:
    options = {name: args[name] for name in ("eps", "offset", "cast")}

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, **options, backend=trial.backend)

    return _differentiated(call, trial, args, cotangents[0])


def _all_reduced(
    trial: Trial, args: Args, cotangents: Sequence[Tensor]
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    at, name = _heads(trial), "gradient:weight"
    cut = [t.tensor_split(RANKS, at) for t in (args["x"], cotangents[0])]
    own = [_alone(trial, args | {"x": x}, (dout,))[name] for x, dout in zip(*cut, strict=True)]
    ours = _alone(trial, args, cotangents)[name]
    return [("dweight as an all-reduce of two ranks", [ours], [torch.stack(own).sum(0)])]


def _without_heads(trial: Trial) -> str | None:
    if trial.case.dims.get("H", 1) % 8 or trial.case.options.get("residual"):
        return "it has no heads that 8 ranks could share"
    if not trial.gradient:
        return "only the gradient of the weight is a sum over ranks"
    return None


HEADS = Shards(
    "norms of single heads", _on_a_rank, _alone,
    spread={"out": 0, "gradient:x": 0, "gradient:weight": None}, controls=_all_reduced,
    why_not=_without_heads,
)  # fmt: skip
