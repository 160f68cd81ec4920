"""Class lse/triton-8x1 of `logp` in numpy, operation by operation: the backend for CPU tensors, and what
kernels are compared with. `exp2` and `log2` are numpy's, as in Triton's interpreter.

The logits may be those of some shards only: `shard` is the first of them, and `shards` their number.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.host.logprob import Rows
from isobit.kernels.host.row_order import Order, order_of
from isobit.kernels.host.temperature import scaling
from isobit.kernels.host.vocab_shards import SHARDS, Shards, shards_of

Array = np.ndarray
#: (m, s, t), of which the last axis counts lanes, splits or shards.
Sums = tuple[Array, Array, Array]

F32 = np.float32
INF = F32(np.inf)
LN2 = F32(0.6931471805599453)


def why_not(args: dict[str, Any]) -> str | None:
    return "logits are fp64; the class is of fp32 sums" if args["logits"].dtype == torch.float64 else None


# Sums


def _finite_or_zero(m: Array) -> Array:
    return np.where(np.isinf(m), F32(0), m)


def _rescaled(m: Array, s: Array, t: Array, to: Array, scale: Array) -> tuple[Array, Array]:
    d = (m - to) * scale
    r = np.exp2(d)
    return s * r, np.where(r > 0, r * (t + d * s), F32(0))


def _fold(sums: Sums, scale: Array) -> Sums:
    """Sums along the last axis, a power of two of them, into one: neighbours, repeatedly."""
    m, s, t = sums
    top = np.fmax.reduce(m, axis=-1, keepdims=True)
    s, t = _rescaled(m, s, t, _finite_or_zero(top), scale[:, None])
    while s.shape[-1] > 1:
        s, t = s[:, ::2] + s[:, 1::2], t[:, ::2] + t[:, 1::2]
    return top[:, 0], s[:, 0], t[:, 0]


def _of_split(z: Array, scale: Array, order: Order) -> Sums:
    """(m, s, t) of rows z [N, columns] of a split."""
    N, lanes = len(z), 1 << order.log_block
    step = order.unroll * lanes
    m, s, t = np.full((N, lanes), -INF), np.zeros((N, lanes), F32), np.zeros((N, lanes), F32)
    for first in range(0, z.shape[1], step):
        whole = np.full((N, step), -INF)
        some = z[:, first : first + step]
        whole[:, : some.shape[1]] = some
        tiles = whole.reshape(N, order.unroll, lanes)
        top = np.fmax(m, np.fmax.reduce(tiles, axis=1))
        to = _finite_or_zero(top)
        s, t = _rescaled(m, s, t, to, scale[:, None])
        for i in range(order.unroll):
            u = (tiles[:, i] - to) * scale[:, None]
            e = np.exp2(u)
            s, t = s + e, t + e * np.fmax(u, F32(-1000))
        m = top
    return _fold((m, s, t), scale)


def _of_shard(z: Array, scale: Array, order: Order, splits: int) -> Sums:
    """(m, s, t) of rows z [N, columns] of a shard, which has room for so many splits."""
    N, width = len(z), 1 << (splits - 1).bit_length()
    m, s, t = np.full((N, width), -INF), np.zeros((N, width), F32), np.zeros((N, width), F32)
    for split, first in enumerate(range(0, z.shape[1], order.split)):
        own = _of_split(z[:, first : first + order.split], scale, order)
        m[:, split], s[:, split], t[:, split] = own
    return _fold((m, s, t), scale)


# Calls


class _Rows(NamedTuple):
    """The rows of a call that are live and have a valid token, on the CPU."""

    all: Rows
    ids: Array
    scale: Array
    inverse: Array

    @property
    def good(self) -> Tensor:
        return self.all.good


def _rows(args: dict[str, Any], V: int) -> _Rows:
    ids, mask, temperature = args["token_ids"].cpu(), args["mask"], args["temperature"]
    mask = None if mask is None else mask.cpu()
    rows = Rows.of(ids, mask, args["ignore_index"], 1.0, V, torch.float32)
    count = int(rows.good.sum())
    if isinstance(temperature, Tensor):
        own = scaling(temperature.cpu().reshape(-1)[rows.good], count)
        assert own.scales is not None and own.inverses is not None
        scale, inverse = own.scales.numpy(), own.inverses.numpy()
    else:
        own = scaling(temperature, count)
        scale, inverse = np.full(count, own.scale, F32), np.full(count, own.inverse, F32)
    return _Rows(rows, rows.ids[rows.good].long().numpy(), scale, inverse)


def _logits(args: dict[str, Any], good: Tensor, columns: int) -> Array:
    z = args["logits"].cpu()
    return np.asarray(z.reshape(good.numel(), z.shape[-1])[good][:, :columns].float().numpy())


def _states(cut: Shards, args: dict[str, Any]) -> Tensor:
    """[N, S]: of every row m of each shard here, then s, then t, then its token's logit. 0 for other rows."""
    rows, order = _rows(args, cut.V), order_of(cut.width)
    z, splits = _logits(args, rows.good, cut.columns), -(-cut.width // order.split)
    sums = 3 if args["return_entropy"] else 2
    out = np.zeros((rows.good.numel(), sums * cut.count + 1), F32)
    own = np.zeros((len(z), out.shape[1]), F32)
    with np.errstate(all="ignore"):  # infinities and NaN are valid
        for shard, (first, end) in enumerate(cut.bounds()):
            of_rows = _of_shard(z[:, first:end], rows.scale, order, splits)
            for i in range(sums):
                own[:, i * cut.count + shard] = of_rows[i]
    tokens = rows.ids - cut.column
    inside = (tokens >= 0) & (tokens < cut.columns)
    own[inside, -1] = z[inside, tokens[inside]]
    out[rows.good.numpy()] = own
    return torch.from_numpy(out).to(args["logits"].device)


def logp_states(**args: Any) -> Tensor:
    """[N, S] of the shards of a rank."""
    return _states(shards_of(args, args["vocab"]), args)


def logp_merged(**args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats [2, *] = (m, s)) from the states [R, N, S] of all ranks."""
    ids, states = args["token_ids"], args["states"]
    rows, ranks = _rows(args, args["vocab"]), len(states)
    sums, shards = 3 if args["return_entropy"] else 2, SHARDS // ranks
    here = states.cpu()[:, rows.good].numpy()
    owner = rows.ids // (args["padded_vocab"] // ranks)
    z = here[owner, np.arange(len(owner)), -1]
    # [sums, N, all shards]
    parts = here[..., :-1].reshape(ranks, len(owner), sums, shards).transpose(2, 1, 0, 3)
    m, s, *rest = parts.reshape(sums, len(owner), SHARDS)
    with np.errstate(all="ignore"):
        m, s, t = _fold((m, s, rest[0] if rest else np.zeros_like(s)), rows.scale)
        log_s = np.log2(s) * LN2
        lse = m * rows.inverse + log_s
        log_s = np.where(m == INF, F32(np.nan), log_s)
        logp = (z - m) * rows.inverse - log_s
        entropy = log_s - t / s * LN2
        stats = np.stack((m, np.where(m == INF, F32(np.nan), s)))
    fill = rows.all.fill(torch.float32)
    blank = (fill, fill, fill, torch.stack((fill, torch.ones_like(fill))))
    wanted = (True, args["return_entropy"], args["return_lse"], args["return_stats"])

    def whole(found: Array, rest: Tensor) -> Tensor:
        out = rest.clone()
        out[..., rows.good] = torch.from_numpy(np.ascontiguousarray(found))
        return out.reshape(*rest.shape[:-1], *ids.shape).to(states.device)

    of_all = (whole(found, rest) for found, rest in zip((logp, entropy, lse, stats), blank, strict=True))
    return tuple(out if want else None for out, want in zip(of_all, wanted, strict=True))


def logp(**args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats) with all shards here."""
    cut = shards_of(args, args["logits"].shape[-1])
    return logp_merged(**args | {"states": _states(cut, args)[None], "vocab": cut.V, "padded_vocab": cut.P})


def logp_bwd(**args: Any) -> Tensor:
    """dlogits with all shards here."""
    return logp_shard_bwd(**args, first_column=0, tokens=args["logits"].shape[-1])


def logp_shard_bwd(**args: Any) -> Tensor:
    """dlogits of the columns of a rank; 0 behind the last token."""
    logits, first, V = args["logits"], args["first_column"], args["tokens"]
    rows, columns = _rows(args, V), min(max(V - first, 0), logits.shape[-1])

    def given(name: str) -> Array | None:
        t = args[name]
        return None if t is None else t.cpu().reshape(-1)[rows.good].numpy()

    z, (m, s) = _logits(args, rows.good, columns), args["stats"].cpu().reshape(2, -1)[:, rows.good].numpy()
    entropy, dlogp, dentropy, dlse = (given(name) for name in ("entropy", "dlogp", "dentropy", "dlse"))
    with np.errstate(all="ignore"):
        on_target = on_p = on_plogp = np.zeros_like(s)
        if dlogp is not None:
            on_target = dlogp * rows.inverse
            on_p = -on_target
        if dlse is not None:
            on_p = on_p + dlse * rows.inverse
        if dentropy is not None:
            on_plogp = -dentropy * rows.inverse
            on_p = on_p + on_plogp * entropy
        u = (z - m[:, None]) * rows.scale[:, None]
        p, weight = np.exp2(u) * (F32(1) / s)[:, None], on_p[:, None]
        if dentropy is not None:
            log_p = (np.fmax(u, F32(-1000)) - np.log2(s)[:, None]) * LN2
            weight = weight + on_plogp[:, None] * log_p
        hit = np.arange(columns) == (rows.ids - first)[:, None]
        dz = p * weight + np.where(hit, on_target[:, None], F32(0))
    out = rows.all.fill(torch.float32)[:, None].expand(-1, logits.shape[-1]).to(logits.dtype).clone()
    some = torch.zeros(len(z), logits.shape[-1], dtype=logits.dtype)
    some[:, :columns] = torch.from_numpy(np.ascontiguousarray(dz)).to(logits.dtype)
    out[rows.good] = some
    return out.reshape(logits.shape).to(logits.device)
