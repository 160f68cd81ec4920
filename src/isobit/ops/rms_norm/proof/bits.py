"""Other calls of `rms_norm` that must give the same bits."""

from dataclasses import replace

import torch
from torch import Tensor

from isobit.ops.rms_norm.proof.exact import exact
from isobit.ops.rms_norm.proof.inputs import BY_ROWS, lay_out
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial


def same_elsewhere(trial: Trial) -> list[OutputCheck]:
    """Fused = unfused; roundings to 16 bits are where the class has them; and dweight depends on the sequence
    of rows only, not on their layout nor on rows at the end whose dout is 0. It is compared in fp32, since a
    long sum in 16 bits seldom shows its order. Controls: the other `cast`, and the rows in another order."""
    args = trial.args()
    outputs, grads = trial.backward(args)
    given = tuple(trial.cotangents(outputs))
    flat = args | {n: None if args[n] is None else args[n].flatten(0, -2) for n in BY_ROWS}
    flat["weight"] = args["weight"].float()
    dout, N = given[0].flatten(0, -2), flat["x"].shape[0]
    checks = _unfused(trial, args, outputs) + _in_16_bits(trial, args)
    if not grads:  # they are switched off
        return checks

    def dweight(changed: Args, dout: Tensor) -> Tensor:
        summed = torch.zeros_like(dout if changed["residual"] is not None else dout[:0, 0])
        cotangents = (dout, summed)
        return replace(trial, given=cotangents, only=("weight",)).backward(changed)[1]["weight"]

    whole = dweight(flat, dout)

    def same(what: str, changed: Args, dout: Tensor) -> None:
        checks.append(same_bits("gradient:weight", dweight(changed, dout), whole, what))

    once = whole.to(args["weight"].dtype)
    checks.append(same_bits("gradient:weight", grads["weight"], once, "of rows in one dimension, rounded"))
    halves = {n: None if flat[n] is None else flat[n][None] for n in BY_ROWS}
    same("rows in two dimensions", flat | halves, dout[None])
    for layout in ("padded", "offset"):
        same(f"layout {layout}", lay_out(flat, layout), dout)
    for rows in (1, 40):
        longer = {n: None if flat[n] is None else _followed(flat[n], rows) for n in BY_ROWS}
        ended = torch.cat([dout, torch.zeros_like(dout[:1]).expand(rows, -1)])
        same(f"{rows} rows without a gradient behind", flat | longer, ended)
    rolls = torch.arange(N, device=trial.device).roll(1)
    rolled = flat | {n: None if flat[n] is None else flat[n][rolls] for n in BY_ROWS}
    checks.append(trial.control("rows rolled by one", [whole], [dweight(rolled, dout[rolls])]))
    return checks


def _followed(t: Tensor, rows: int) -> Tensor:
    return torch.cat([t, t[:1].expand(rows, -1)])


def _in_16_bits(trial: Trial, args: Args) -> list[OutputCheck]:
    """The same rows in bf16: too few bits to show an order, but roundings are visible."""
    if args["x"].dtype != torch.float32:
        return []
    names = [n for n in (*BY_ROWS, "weight") if args[n] is not None]
    narrow = args | {n: args[n].bfloat16() for n in names}
    outputs, grads = trial.backward(narrow)
    ours = dict(zip(trial.proof.outputs, outputs, strict=True))
    ours |= {f"gradient:{n}": g for n, g in grads.items()}
    checks = [
        same_bits(name, ours[name][where].cpu(), expected, f"{trial.numerics} in bf16 by its model")
        for name, (where, expected) in exact(narrow, trial.cotangents(outputs) if grads else ()).items()
    ]
    other = {"cast": "after" if args["cast"] == "before" else "before"}
    where, elsewhere = exact(narrow | other, ())["out"]
    return [*checks, trial.control("the other cast", [outputs[0][where].cpu()], [elsewhere])]


def _unfused(trial: Trial, args: Args, outputs: tuple[Tensor, ...]) -> list[OutputCheck]:
    if args["residual"] is None:
        return []
    summed = args["x"] + args["residual"]
    out, _ = trial.forward(args | {"x": summed, "residual": None})
    return [
        same_bits("1:summed", outputs[1], summed, "the sum by PyTorch"),
        same_bits("0:out", outputs[0], out, "fused against added before"),
    ]
