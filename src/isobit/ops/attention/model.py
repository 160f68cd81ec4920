"""The arithmetic of `attn/1` and `attn/2` in numpy, operation by operation. Kernels are compared with it, and
it is the backend for CPU tensors.

What one operation of the device does is a parameter (`Arithmetic`). With `CPU` the class is `attn/1/cpu` or
`attn/2/cpu`: the bits of the Triton kernels in the interpreter. With the tensor-core steps of
`isobit.numerics`, fused multiply-adds, and the `exp2` and `log2` of a Hopper GPU it gives the bits of that
GPU; the proof checks this.

Rows are independent, so all queries of a KV head are computed at once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.frame.contract import dtype_name
from isobit.kernels.host.temperature import LOG2E
from isobit.numerics.cpu_steps import GROUP, fused, product
from isobit.ops.attention.calls import SEGMENT, block_keys, call_of, factors_of, key_bounds, which_tanh
from isobit.ops.attention.softcap import bent, too_large

Array = np.ndarray

F32 = np.float32
LN2 = F32(0.6931471805599453)


class Arithmetic(NamedTuple):
    """The operations of a device, on fp32 arrays."""

    #: (left [m, k], right [k, n], acc [m, n], dtype of the factors) -> acc after steps over ascending k.
    product: Callable[[Array, Array, Array, torch.dtype], Array]
    fma: Callable[[Array, Any, Array], Array]
    exp2: Callable[[Array], Array]
    log2: Callable[[Array], Array]


CPU = Arithmetic(product, fused, np.exp2, np.log2)


# Where the sequences are


class Sequence(NamedTuple):
    """Where the queries and the keys of one sequence are."""

    rows: tuple[int, slice]  # index of its queries in q
    keys: tuple[Any, Any]  # index of its keys in k and v


def _sequences(args: dict[str, Any]) -> Iterator[Sequence]:
    call, table = call_of(args), args["block_table"]
    q_bounds, k_bounds = (None if t is None else t.tolist() for t in (args["cu_seqlens_q"], key_bounds(args)))
    firsts, ends = (None if args[n] is None else args[n].tolist() for n in ("key_start", "key_end"))

    def inside(x: int, low: int, high: int) -> int:
        return min(max(x, low), high)

    for n in range(call.sequences):
        rows = (n, slice(0, call.T))
        if q_bounds is not None:
            first = inside(q_bounds[n], 0, call.T)
            rows = (0, slice(first, inside(q_bounds[n + 1], first, call.T)))
        if k_bounds is not None:
            first = inside(k_bounds[n], 0, call.S)
            yield Sequence(rows, (0, slice(first, inside(k_bounds[n + 1], first, call.S))))
            continue
        first = 0 if firsts is None else inside(firsts[n], 0, call.S)
        end = call.S if ends is None else inside(ends[n], first, call.S)
        if table is None:
            yield Sequence(rows, (n, slice(first, end)))
        else:
            at = torch.arange(first, end, device="cpu")
            pages = table[n].cpu().long().clamp(0, call.pages - 1)[at // call.page]
            yield Sequence(rows, (pages, at % call.page))


def _array(t: Tensor) -> Array:
    return t.detach().float().numpy()


def _rounded(x: Array, dtype: torch.dtype) -> Array:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy()


# Softmax


def _tanh(x: Array, do: Arithmetic) -> Array:
    a = np.abs(x)
    e = do.exp2(a * F32(-2.8853900817779268))
    far = (F32(1.0) - e) / (F32(1.0) + e)
    y = x * x
    near = F32(0.13333333333333333) + y * (F32(-0.053968253968253968) + y * F32(0.021869488536155203))
    near = a + a * y * (F32(-0.33333333333333333) + y * near)
    size = np.where(a < 0.25, near, far)
    return np.where(x < 0, -size, size)


def _halves(x: Array, least: int) -> Array:
    """The second half of each row is added to the first, until there are `least` columns."""
    while x.shape[1] > least:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x


def _finite(m: Array) -> Array:
    return np.where(m == -np.inf, F32(0.0), m)


class _Scores(NamedTuple):
    """Turns products of q and k into scores z, which `c` scales to exponents of 2."""

    c: np.float32
    cap: np.float32
    slope: np.float32
    tangent: int  # the class whose tanh caps scores; 0 without a cap
    do: Arithmetic
    dtype: torch.dtype

    def __call__(self, left: Array, right: Array) -> tuple[Array, Array | None]:
        """(z, tanh) of left [m, D] and right [n, D]."""
        z = self.do.product(left, right.T, np.zeros((len(left), len(right)), F32), self.dtype)
        if self.tangent == 0:
            return z, None
        if self.tangent == 2:
            z = bent(z, self.slope, self.do.exp2, self.do.fma)
            return z, z
        y = _tanh(z * self.slope, self.do)
        return self.cap * y, y

    def gradient(self, p: Array, y: Array | None, gap: Array) -> Array:
        """dS of probabilities p, of the tanh y, and of dP - delta."""
        if y is None:
            return p * gap
        if self.tangent == 2:
            return p * self.do.fma(y, y, np.full_like(y, -1.0)) * -gap
        return p * gap * (F32(1.0) - y * y)


def _sees(args: dict[str, Any], rows: int, keys: int) -> Array:
    """Causal and window mask of one sequence, [rows, keys]."""
    key, position = np.arange(keys)[None, :], keys - rows + np.arange(rows)[:, None]
    sees = np.ones((rows, keys), bool)
    if args["causal"]:
        sees &= key <= position
    if args["window"] is not None:
        sees &= key > position - args["window"]
    return sees


def _filled(x: Array, axis: int, multiple: int, value: float = 0.0, before: int = 0) -> Array:
    """Padded along `axis`: `before` entries in front, then as many behind as make the length a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, -(x.shape[axis] + before) % multiple)
    return np.pad(x, widths, constant_values=value)


def _folded(
    q: Array, k: Array, v: Array, sees: Array, scores: _Scores, segment: int, block: int
) -> tuple[Array, Array]:
    """(out, lse) in fp32 of queries q [R, D] that see some of the keys."""
    do, c, R = scores.do, scores.c, len(q)
    k, v = _filled(k, 0, block), _filled(v, 0, block)
    sees = _filled(sees, 1, block, False)
    M, L, ACC = np.full(R, -np.inf, F32), np.zeros(R, F32), np.zeros((R, v.shape[1]), F32)
    for begin in range(0, len(k), segment):
        m, lanes, acc = np.full(R, -np.inf, F32), np.zeros((R, 4), F32), np.zeros_like(ACC)
        for at in range(begin, min(begin + segment, len(k)), block):
            here = slice(at, at + block)
            if not sees[:, here].any():
                continue
            z = np.where(sees[:, here], scores(q, k[here])[0], F32(-np.inf))
            top = np.maximum(m, z.max(1))
            a = do.exp2((m - _finite(top)) * c)
            p = do.exp2(do.fma(z, c, -(_finite(top) * c)[:, None]))
            lanes = do.fma(lanes, a[:, None], _pairs(_halves(p, 8)))
            acc = do.product(_rounded(p, scores.dtype), v[here], acc * a[:, None], scores.dtype)
            m = top
        s = _joined(lanes)
        top, seen = np.maximum(M, m), s != 0.0
        old, new = do.exp2((M - _finite(top)) * c), do.exp2((m - _finite(top)) * c)
        ACC = np.where(seen[:, None], do.fma(acc, new[:, None], ACC * old[:, None]), ACC)
        L = np.where(seen, do.fma(s, new, L * old), L)
        M = np.where(seen, top, M)
    seen = L != 0.0
    safe = np.where(seen, L, F32(1.0))
    out = np.where(seen[:, None], ACC / safe[:, None], F32(0.0))
    return out, np.where(seen, (M * c + do.log2(safe)) * LN2, F32(-np.inf))


def _pairs(x: Array) -> Array:
    """Sums of neighbours: [R, 8] to the four lanes [R, 4]."""
    return x[:, 0::2] + x[:, 1::2]


def _joined(x: Array) -> Array:
    return (x[:, 0] + x[:, 1]) + (x[:, 2] + x[:, 3])


# The backends


def why_not(args: dict[str, Any]) -> str | None:
    """Why class attn/1 cannot serve a call, or None."""
    if args["q"].dtype.itemsize != 2:
        return f"inputs are {dtype_name(args['q'].dtype)}; the class has 16-bit operands"
    return None


def why_not_2(args: dict[str, Any]) -> str | None:
    return why_not(args) or too_large(args)


def _by_heads(t: Tensor, place: tuple[Any, Any], kv: int, group: int) -> Array:
    """[G * rows, D] of the query heads of a KV head, head by head."""
    return _array(t[place][:, kv * group : (kv + 1) * group].movedim(1, 0).flatten(0, 1))


def _scores_of(args: dict[str, Any], tangent: int, do: Arithmetic) -> _Scores:
    c, cap, slope, _ = map(F32, factors_of(args, tangent))
    return _Scores(c, cap, slope, which_tanh(args, tangent), do, args["q"].dtype)


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def attention(
    do: Arithmetic = CPU, segment: int = SEGMENT, block: int | None = None, tangent: int = 1, **args: Any
) -> tuple[Tensor, Tensor | None]:
    """(out, lse). `tangent` is the class whose tanh caps scores."""
    q, k, v = (args[name].detach().cpu() for name in ("q", "k", "v"))
    call, scores = call_of(args), _scores_of(args, tangent, do)
    out = torch.zeros(q.shape, dtype=q.dtype, device="cpu")
    lse = torch.full((call.B, call.H, call.T), -torch.inf, dtype=torch.float32, device="cpu")
    for one in _sequences(args):
        b, rows = one.rows
        for kv in range(call.KV):
            own = _by_heads(q, one.rows, kv, call.group)
            keys, values = (_array(t[one.keys][:, kv]) for t in (k, v))
            sees = np.tile(_sees(args, len(own) // call.group, len(keys)), (call.group, 1))
            result = _folded(own, keys, values, sees, scores, segment, block or block_keys(call.D))
            heads = slice(kv * call.group, (kv + 1) * call.group)
            by_head = torch.from_numpy(result[0]).unflatten(0, (call.group, -1))
            out[b, rows, heads] = by_head.movedim(0, 1).to(q.dtype)
            lse[b, heads, rows] = torch.from_numpy(result[1]).unflatten(0, (call.group, -1))
    return out.to(args["q"].device), lse.to(args["q"].device) if args["return_lse"] else None


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def attention_bwd(do: Arithmetic = CPU, tangent: int = 1, **args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv), those that are wanted. `tangent` is the class whose tanh caps scores."""
    names = ("q", "k", "v", "out", "dout")
    q, k, v, out, dout = (args[name].detach().cpu() for name in names)
    call, scores, scale = call_of(args), _scores_of(args, tangent, do), F32(factors_of(args).scale)
    lse, dlse = args["lse"].cpu(), None if args["dlse"] is None else args["dlse"].cpu()
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device="cpu") for t in (q, k, v))
    for one in _sequences(args):
        b, rows = one.rows
        for kv in range(call.KV):
            keys, values = (_array(t[one.keys][:, kv]) for t in (k, v))
            count, n = max(rows.stop - rows.start, 0), len(keys)
            if count == 0:
                continue
            sees = _sees(args, count, n)
            before = (n - count) % GROUP  # groups of 16 queries are aligned to positions, not to rows
            total_k, total_v = np.zeros((n, call.D), F32), np.zeros((n, call.D), F32)
            for g in range(kv * call.group, (kv + 1) * call.group):
                own, do_h, out_h = (_array(t[b, rows, g]) for t in (q, dout, out))
                wide = 1 << (call.D - 1).bit_length()
                delta = _halves(_filled(out_h * do_h, 1, wide), 1)[:, 0]
                if dlse is not None:
                    delta = delta - _array(dlse[b, g, rows])
                live = sees.any(1, keepdims=True)  # q and dout of a query that sees no key may be NaN
                own, do_h = np.where(live, own, F32(0.0)), np.where(live, do_h, F32(0.0))
                z, y = scores(own, keys)
                base = _array(lse[b, g, rows]) * F32(LOG2E)
                p = np.where(sees, do.exp2(do.fma(z, scores.c, -base[:, None])), F32(0.0))
                dp = do.product(do_h, values.T, np.zeros_like(p), q.dtype)
                ds = scores.gradient(p, y, dp - delta[:, None])
                ds = _rounded(np.where(sees, ds, F32(0.0)), q.dtype)
                own_dq = do.product(ds, keys, np.zeros_like(own), q.dtype) * scale
                dq[b, rows, g] = torch.from_numpy(own_dq).to(q.dtype)
                own, do_h, ds, p = (_filled(x, 0, GROUP, before=before) for x in (own, do_h, ds, p))
                total_v = do.product(_rounded(p, q.dtype).T, do_h, total_v, q.dtype)
                total_k = do.product(ds.T, own, total_k, q.dtype)
            dk[one.keys + (kv,)] = torch.from_numpy(total_k * scale).to(k.dtype)
            dv[one.keys + (kv,)] = torch.from_numpy(total_v).to(v.dtype)
    wanted = (args["want_q"], args["want_k"], args["want_v"])
    gradients = (t.to(args["q"].device) for t in (dq, dk, dv))
    return tuple(t if want else None for t, want in zip(gradients, wanted, strict=True))


attention_2, attention_2_bwd = partial(attention, tangent=2), partial(attention_bwd, tangent=2)
