"""Inputs of `causal_conv1d` that would expose a wrong kernel, and variations of them."""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions

#: Tokens of every case on which bits are compared: `histories_swapped` has one sequence per token, and the
#: way back must know how many belong together.
T_OF_BITS = 5


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Options: W, bias, state, silu, lengths of packed sequences "3+0+4", first (the
    sequences of a batch begin at different tokens), and `weight` if its dtype differs."""
    B, T, D = (case.dims[n] for n in ("B", "T", "D"))
    given = {"W": 4, "bias": True, "state": True, "silu": True} | case.options
    gen = torch.Generator().manual_seed(options.seed)
    x = torch.randn(B, T, D, generator=gen)
    if case.data == "edge":
        x[..., -1:] += 50.0  # exposes a dropped tail
        x[:, 1::4] *= 30.0  # exp overflows
        x[:, 2::4] *= 1e-3
        x[:, 3::4, ::2] = -0.0
    elif case.data == "constant":
        x.fill_(options.constant)
    lengths = [int(n) for n in given["lengths"].split("+")] if "lengths" in given else None
    S, W = B if lengths is None else len(lengths), given["W"]
    weight, bias = torch.randn(D, W, generator=gen), torch.randn(D, generator=gen)
    state = torch.randn(S, W - 1, D, generator=gen)
    wide = given.get("weight", case.dtype)
    args: Args = {
        "x": x.to(device, case.dtype),
        "weight": weight.to(device, wide),
        "bias": bias.to(device, wide) if given["bias"] else None,
        "activation": "silu" if given["silu"] else None,
        "initial_state": state.to(device, case.dtype) if given["state"] else None,
        "first": None,
        "cu_seqlens": None,
    }
    if lengths is not None:
        args["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], device=device, dtype=torch.int32)
    if given.get("first"):
        args["first"] = (torch.arange(B, device=device) * 2 + 1).clamp(max=T)
    return lay_out(args, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    return alter.laid_out_some(args, ("x",), layout)


def padding(args: Args, rows: int) -> Args:
    """Sequences of NaN and infinities; they must not change others."""

    def like(t: Tensor) -> Tensor:
        made = t.new_full((rows, *t.shape[1:]), alter.NAN)
        made[1::2] = alter.INF
        return made

    state, first = args["initial_state"], args["first"]
    return {
        "x": like(args["x"]),
        "initial_state": None if state is None else like(state),
        "first": None if first is None else first.new_zeros(rows),
    }


def starts(args: Args) -> list[tuple[int, int, int]]:
    """(row of x, first token, end) of each sequence."""
    B, T = args["x"].shape[:2]
    if args["cu_seqlens"] is not None:
        bounds = args["cu_seqlens"].tolist()
        return [(0, a, b) for a, b in pairwise(bounds)]
    firsts = [0] * B if args["first"] is None else args["first"].tolist()
    return [(b, first, T) for b, first in enumerate(firsts)]


def histories(args: Args) -> list[Tensor]:
    """[W - 1 + tokens, D] of each sequence: the inputs before it, and its own."""
    x, state, U = args["x"], args["initial_state"], args["weight"].shape[-1] - 1
    zeros = x.new_zeros(U, x.shape[-1])
    return [
        torch.cat([zeros if state is None else state[s], x[row, first:end]])
        for s, (row, first, end) in enumerate(starts(args))
    ]


def windows(history: Tensor, W: int) -> Tensor:
    """[tokens, D, W]: the inputs of every token of a sequence."""
    n = len(history) - W + 1
    return torch.stack([history[k : k + n] for k in range(W)], -1)


def taps_swapped(weight: Tensor) -> Tensor:
    return weight[:, [0, 2, 1, 3]].contiguous()


def histories_swapped(args: Args) -> Args:
    """Every token as a sequence of its own, with its second and third inputs exchanged, and their taps too:
    the same terms in another order."""
    four = torch.cat([windows(h, 4).transpose(1, 2) for h in histories(args)])[:, [0, 2, 1, 3]]
    swapped: Args = {"weight": taps_swapped(args["weight"]), "first": None}
    swapped |= {"x": four[:, 3:].contiguous(), "initial_state": four[:, :3].contiguous()}
    return args | swapped


def swapped_back(outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    out, final = outputs
    last = final.unflatten(0, (-1, T_OF_BITS))[:, -1]
    return out.reshape(-1, T_OF_BITS, out.shape[-1]), last[:, [1, 0, 2]].contiguous()
