"""Bounds on the error of a kernel, propagated along the recurrence.

e is the error of D. Rounding D to 16 bits adds half a unit u of it. In a product a b of n terms every step of
a chain of 16 truncates at most 21/4 units of 2^-23 of |a| |b| (see `isobit.spec.error_bounds`). Then, with
all factors in absolute value,

    dh        e + u (|D| + e)
    dv2       2^(g[last] - g) (|K| (the error of dh) + chain) + few units of its parts, then rounded
    e after   decay e + |W|^T (the error of dv2) + chains + few units of the parts

Powers of two have errors of some units, plus that of their rounded argument. Nothing here is fitted.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from isobit.spec.proof import Args

UNIT = 2.0**-23

#: Error of a power of two in units, for an argument of a few dozens that was rounded.
POWER = 64.0


def _chain(a: Tensor, b: Tensor) -> Tensor:
    """Error of a product, from the absolute values of its factors."""
    return 21 / 4 * UNIT * (a.shape[-1] / 16 + 1) * (a @ b)


def _sequences(args: Args) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, batch element, first token, end) of each."""
    if args["cu_seqlens"] is None:
        for b in range(args["q"].shape[0]):
            yield b, b, 0, args["q"].shape[1]
    else:
        for s, (first, end) in enumerate(pairwise(args["cu_seqlens"].tolist())):
            yield s, 0, first, end


def error_bounds(args: Args, narrow: torch.dtype) -> dict[str, Tensor]:
    """Error bounds of dh, dh0 and dv2 in units of 2^-23, for fp64 arguments that came from the dtype
    `narrow`."""
    u = torch.finfo(narrow).eps / 2 if narrow.itemsize == 2 else UNIT / 2
    least = torch.finfo(narrow).smallest_normal * u  # error of rounding to a subnormal number
    C, scale = args["chunk_size"], args["scale"]
    HV, V = args["dv"].shape[2:]
    K = args["q"].shape[3]
    dh: list[Tensor] = []
    dh0: list[Tensor] = []
    dv2 = torch.zeros_like(args["dv"])

    def heads(name: str, b: int, s: int, e: int) -> Tensor:
        """[HV, tokens, columns] of some tokens."""
        t = args[name][b, s:e]
        return t.repeat_interleave(HV // t.shape[1], 1).movedim(1, 0)

    def rounded(error: Tensor, value: Tensor) -> Tensor:
        return error + u * (value.abs() + error) + least

    for n, b, first, end in _sequences(args):
        D = args["dv"].new_zeros(HV, K, V)
        if args["dht"] is not None:
            D = args["dht"][n].mT if args["state_v_first"] else args["dht"][n]
        e, states = torch.zeros_like(D), []
        for start in reversed(range(first, end, C)):
            stop = min(start + C, end)
            q, k, w, do, dv = (heads(name, b, start, stop) for name in ("q", "k", "w", "do", "dv"))
            ratio = gate = torch.ones_like(do[..., :1])
            decay = D.new_zeros(HV, 1, 1)
            if args["g"] is not None:
                g = args["g"][b, start:stop].T[..., None]
                ratio, gate, decay = (g[:, -1:] - g).exp2(), g.exp2(), g[:, -1:]
            if args["gk"] is not None:
                decay = decay + args["gk"][b, stop - 1][..., None]
            decay = decay.exp2()
            of_dh = rounded(e, D)
            states.append(of_dh)
            KD, size = k @ D, k.abs() @ (D.abs() + of_dh)
            X = ratio * KD + dv
            error = ratio * (k.abs() @ of_dh + _chain(k.abs(), D.abs() + of_dh) + POWER * UNIT * size)
            of_x = rounded(error + 2 * UNIT * (X.abs() + dv.abs()), X)
            dv2[b, start:stop] = of_x.movedim(0, 1)
            qg, x_size = (q * gate).abs().mT * scale, X.abs() + of_x
            after = decay * D + scale * (q * gate).mT @ do - w.mT @ X
            e = (
                decay * (e + POWER * UNIT * (D.abs() + e))
                + _chain(qg, do.abs()) * 2 + (POWER * UNIT + u * u) * (qg @ do.abs())
                + least * q.abs().mT.sum(-1, keepdim=True)
                + w.abs().mT @ of_x + _chain(w.abs().mT, x_size)
                # Chains that begin with the state truncate that, too.
                + 21 / 4 * UNIT * (3 * C / 16 + 3) * (decay * D.abs() + qg @ do.abs() + w.abs().mT @ x_size)
            )  # fmt: skip
            D = after
        dh += reversed(states)
        dh0.append(e)
    state = (HV, K, V)
    B = args["q"].shape[0]
    of_dh = torch.stack(dh) if dh else D.new_zeros(0, *state)
    of_dh = of_dh.view(B, -1, *state) if B and len(of_dh) else of_dh.new_zeros(B, 0, *state)
    of_dh0 = torch.stack(dh0) if dh0 else of_dh.new_zeros(0, *state)
    if args["state_v_first"]:
        of_dh, of_dh0 = of_dh.mT, of_dh0.mT
    if args["h0"] is None:
        of_dh0 = of_dh0.new_zeros(0)
    return {"dh": of_dh / UNIT, "dh0": of_dh0 / UNIT, "dv2": dv2 / UNIT}
