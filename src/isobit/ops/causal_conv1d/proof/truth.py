"""The truth of `causal_conv1d`, and how far a computation may be from it."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.causal_conv1d.proof.inputs import histories, starts, windows
from isobit.spec.proof import Args


def formula(args: Args) -> tuple[Tensor, Tensor]:
    """(out, final_state), in fp64 for fp64 inputs and in fp32 for all others, rounded at the end."""
    x, weight, bias = args["x"], args["weight"], args["bias"]
    wide, W = torch.promote_types(x.dtype, torch.float32), weight.shape[-1]
    rows: list[list[Tensor]] = [[] for _ in range(x.shape[0])]
    finals = []
    for (row, first, _), history in zip(starts(args), histories(args), strict=True):
        if args["cu_seqlens"] is None:
            rows[row].append(x.new_zeros(first, x.shape[-1]))
        z = (windows(history.to(wide), W) * weight.to(wide)).sum(-1)
        z = z if bias is None else z + bias.to(wide)
        rows[row].append((F.silu(z) if args["activation"] else z).to(x.dtype))
        finals.append(history[len(history) - (W - 1) :].detach())
    if not rows:  # nothing, but with a gradient
        nothing = x * weight.sum().to(x.dtype) * (1 if bias is None else bias.sum().to(x.dtype))
        return nothing, x.new_zeros(0, W - 1, x.shape[-1])
    out = torch.stack([torch.cat(each) for each in rows])
    return out, torch.stack(finals)


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """A sum of W + 1 terms rounds that often, relative to the sum of their sizes. silu has a slope of at most
    1.1 and four roundings of its own, its derivative a slope of at most 0.5. A result that is then rounded to
    16 bits may round to the other neighbour: twice as far."""
    x, weight, bias = args["x"], args["weight"], args["bias"]
    (B, T, D), W = x.shape, weight.shape[-1]
    sizes = torch.zeros_like(outputs[0])
    e, g = torch.zeros_like(x), torch.zeros_like(x)
    dx, dweight, dbias = torch.zeros_like(x), torch.zeros_like(weight), x.new_zeros(D)
    for (row, first, end), history in zip(starts(args), histories(args), strict=True):
        n, here = end - first, (row, slice(first, end))
        given = windows(history, W)
        z, near = (given * weight).sum(-1), (given * weight).abs().sum(-1)
        if bias is not None:
            z, near = z + bias, near + bias.abs()
        off = near * math.sqrt(W + 1)
        s = torch.sigmoid(z)
        sizes[here] = 2 * (1.1 * off + 4 * (z * s).abs() if args["activation"] else off)
        if not cotangents:
            continue
        g[here] = cotangents[0][here].abs()
        slope = s * (1 + z.abs() * (1 - s)) if args["activation"] else torch.ones_like(z)
        e[here] = g[here] * ((0.5 * off + 6 * slope) if args["activation"] else torch.zeros_like(z))
        size = g[here] * slope
        for j in range(min(W, n)):
            dx[row, first : end - j] += weight[:, W - 1 - j].abs() * e[row, first + j : end]
            dx[row, first : end - j] += math.sqrt(W) * weight[:, W - 1 - j].abs() * size[j:]
        dweight += ((e[here] + math.sqrt(B * T) * size)[..., None] * given.abs()).sum(0)
        dbias += (e[here] + math.sqrt(B * T) * size).sum(0)
    scales = {"out": sizes, "final_state": torch.zeros_like(outputs[1])}
    if cotangents:
        scales |= {"gradient:x": 2 * dx, "gradient:weight": 2 * dweight, "gradient:bias": 2 * dbias}
    return scales
