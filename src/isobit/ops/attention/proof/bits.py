"""Bit laws specific to attention: other calls with the same queries and keys. Each changes something that
must not affect bits. The controls at the end prove that another order of sums would have been noticed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from isobit.ops.attention.proof.inputs import BY_TOKEN, NAN, paged
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial

Run = tuple[tuple[Tensor, ...], dict[str, Tensor]]

#: Keys per segment: part of the class.
SEGMENT = 1024


def same_elsewhere(trial: Trial) -> list[OutputCheck]:
    """All of these laws, on a dense causal case."""
    args = trial.args()
    if _bounded(args) or not args["causal"]:
        return []
    if args["q"].shape[1] == 1:
        # The order of keys shows best if all of them count, whatever the scale of the case.
        args, _ = cancelling(args | {"scale": None}, trial.cotangents(trial.forward(args)))
        return [*_orders(trial, args), *_rooms(trial, args)]
    law = _Law(trial, args)
    return [*law.cuts(), *law.left_padding(), *law.right_padding(), *law.packing(), *law.heads()]


def single_queries(trial: Trial) -> list[OutputCheck]:
    """The first and the last query of a dense causal case, each alone with the keys that it sees, as in
    decoding: out, lse and dq."""
    args = trial.args()
    (T, S), bounded = (args[n].shape[1] for n in ("q", "k")), _bounded(args)
    if bounded or not args["causal"] or T < 2 or S < T:
        return []
    trial = replace(trial, only=("q",))
    outputs, grads = trial.backward(args)
    given, checks = trial.cotangents(outputs), []
    axes = [1 if name == "out" else 2 for name in trial.proof.outputs]
    for t in (0, T - 1):
        cut = args | {n: args[n][:, : S - T + t + 1] for n in ("k", "v")}
        cut["q"] = args["q"][:, t : t + 1]
        its = tuple(g.narrow(axis, t, 1) for g, axis in zip(given, axes, strict=True))
        ours, dq = replace(trial, given=its).backward(cut)
        what = f"query {t} of {T} alone"
        for i, (name, axis) in enumerate(zip(trial.proof.outputs, axes, strict=True)):
            checks.append(same_bits(f"{i}:{name}", ours[i], outputs[i].narrow(axis, t, 1), what))
        checks += [same_bits(f"gradient:{n}", dq[n], grads[n][:, t : t + 1], what) for n in dq]
    return checks


def _bounded(args: Args) -> bool:
    return any(args[n] is not None for n in ("key_start", "key_end", "cu_seqlens_q", "block_table"))


def cancelling(args: Args, cotangents: Sequence[Tensor]) -> tuple[Args, list[Tensor]]:
    """Inputs whose sums nearly cancel. What remains depends visibly on the order of additions; other sums
    hide it in the rounding to 16 bits. For dk and dv every second head of q repeats the one before it, with a
    cotangent of nearly opposite sign. For out and dq the second half of the keys repeats the first, with
    values of nearly opposite sign."""
    (H, KV), half = (args[n].shape[2] for n in ("q", "k")), args["k"].shape[1] // 2
    k, v, factor = args["k"].clone(), args["v"].clone(), -65 / 64
    k[:, half : 2 * half] = k[:, :half]
    v[:, half : 2 * half] = v[:, :half] * factor
    dout, dlse = (
        cotangents[0],
        cotangents[1] / 64,
    )  # the gradient from lse is equal for all keys and would not cancel
    if H // KV % 2:
        return args | {"k": k, "v": v}, [dout, dlse]
    q = args["q"][:, :, ::2].repeat_interleave(2, 2)
    dout, dlse = dout[:, :, ::2].repeat_interleave(2, 2), dlse[:, ::2].repeat_interleave(2, 1)
    sign = torch.tensor([1.0, factor], device=q.device).repeat(H // 2)[:, None]
    return args | {"q": q, "k": k, "v": v}, [(dout * sign).to(dout.dtype), dlse * sign]


class _Law:
    """A batch of B sequences with as many queries as keys, with its outputs and gradients."""

    def __init__(self, trial: Trial, args: Args) -> None:
        self.trial = trial
        self.args, self.cotangents = cancelling(args, trial.cotangents(trial.forward(args)))
        self.whole = self.run(self.args, self.cotangents)
        self.T = args["q"].shape[1]

    def run(self, args: Args, given: Sequence[Tensor]) -> Run:
        return replace(self.trial, given=tuple(given)).backward(args)

    def compare(self, what: str, ours: Run, gradients: Sequence[str], mine: Run) -> list[OutputCheck]:
        names = self.trial.proof.outputs
        checks = [same_bits(f"{i}:{n}", ours[0][i], mine[0][i], what) for i, n in enumerate(names)]
        return checks + [
            same_bits(f"gradient:{n}", ours[1][n], mine[1][n], what) for n in gradients if n in ours[1]
        ]

    def rows(self, first: int, end: int, batch: slice = slice(None)) -> tuple[Run, list[Tensor]]:
        """Outputs and gradients of some queries, taken from the whole run, and their cotangents."""
        (out, lse), grads = self.whole
        dout, dlse = self.cotangents
        mine = (
            (out[batch, first:end], lse[batch, :, first:end]),
            {n: g[batch, first:end] for n, g in grads.items()},
        )
        return mine, [dout[batch, first:end], dlse[batch, :, first:end]]

    def cuts(self) -> list[OutputCheck]:
        """Chunked prefill, down to single queries, with the keys so far: once as they are, and once in a
        larger cache whose free part is NaN."""
        checks, T = [], self.T
        for first, end in {(0, 1), (1, T // 2), (T // 2, T), (T - 1, T)}:
            if first >= end:
                continue
            mine, given = self.rows(first, end)
            cut = self.args | {"q": self.args["q"][:, first:end]}
            cut |= {n: self.args[n][:, :end] for n in ("k", "v")}
            checks += self.compare(f"queries [{first}, {end}) alone", self.run(cut, given), ("q",), mine)
            if end - first > 1:
                continue
            room = cut | {n: _widened(cut[n], 0, 37) for n in ("k", "v")}
            room["key_end"] = torch.full((len(cut["q"]),), end, dtype=torch.int32, device=cut["q"].device)
            checks += self.compare(
                f"query {first} from a cache with room", self.run(room, given), ("q",), mine
            )
            for page in (16, 48):
                pages = cut | paged(cut, page, torch.Generator().manual_seed(page))
                outputs = replace(self.trial.in_class(pages), gradient=False).forward(pages)
                checks += self.compare(f"query {first} from pages of {page}", (outputs, {}), (), mine)
        return checks

    def left_padding(self) -> list[OutputCheck]:
        """Left padding with queries and keys of NaN."""
        pad, args = 21, self.args
        padded = args | {n: _widened(args[n], pad, 0) for n in BY_TOKEN}
        padded["key_start"] = torch.full((len(args["q"]),), pad, dtype=torch.int64, device=args["q"].device)
        dout, dlse = self.cotangents
        given = [_widened(dout, pad, 0, 1.0), torch.nn.functional.pad(dlse, (pad, 0), value=1.0)]
        (out, lse), grads = self.run(padded, given)
        mine = (out[:, pad:], lse[..., pad:]), {n: g[:, pad:] for n, g in grads.items()}
        checks = self.compare("behind left padding", mine, BY_TOKEN, self.whole)
        none = {"0:out": out, **{f"gradient:{n}": g for n, g in grads.items()}}
        for name, gradient in none.items():
            zero = torch.zeros_like(gradient[:, :pad])
            checks.append(same_bits(name, gradient[:, :pad], zero, "left padding itself"))
        return checks

    def right_padding(self) -> list[OutputCheck]:
        """Right padding with finite queries and keys that get zero cotangents."""
        more, args = 19, self.args
        padded = args | {n: _widened(args[n], 0, more, 2.0) for n in BY_TOKEN}
        dout, dlse = self.cotangents
        given = [_widened(dout, 0, more, 0.0), torch.nn.functional.pad(dlse, (0, more))]
        (out, lse), grads = self.run(padded, given)
        mine = (out[:, : self.T], lse[..., : self.T]), {n: g[:, : self.T] for n, g in grads.items()}
        return self.compare("in front of right padding", mine, BY_TOKEN, self.whole)

    def packing(self) -> list[OutputCheck]:
        """All sequences of the batch, and parts of them, packed one after another."""
        args, (B, T) = self.args, self.args["q"].shape[:2]
        lengths = [T, 0, *(max(1, T - 7 * b) for b in range(1, B)), 5]
        of = [0, 0, *range(1, B), 0]

        def packed(t: Tensor) -> Tensor:
            return torch.cat([t[b, :n] for b, n in zip(of, lengths, strict=True)])[None]

        dout, dlse = self.cotangents
        given = [packed(dout), packed(dlse.mT).mT]
        one = args | {n: packed(args[n]) for n in BY_TOKEN}
        one["cu_seqlens_q"] = torch.tensor([0, *accumulate(lengths)], device=args["q"].device)
        (out, lse), grads = self.run(one, given)
        checks, at = [], 0
        for b, n in zip(of, lengths, strict=True):
            mine, its = self.rows(0, n, slice(b, b + 1))
            if n and n < T:  # a shorter prefix is another sequence, and has gradients of its own
                short = args | {name: args[name][b : b + 1, :n] for name in BY_TOKEN}
                mine = self.run(short, its)
            here = slice(at, at + n)
            ours = (out[:, here], lse[..., here]), {name: g[:, here] for name, g in grads.items()}
            if n:
                checks += self.compare(f"packed, {n} tokens at {at}", ours, BY_TOKEN, mine)
            at += n
        return checks

    def heads(self) -> list[OutputCheck]:
        """Control for dk and dv: the heads of a group, which are summed in ascending order, in another
        order."""
        H, KV = self.args["q"].shape[2], self.args["k"].shape[2]
        if H // KV % 2 or not self.whole[1]:
            return []
        order = torch.arange(H, device=self.args["q"].device).view(KV, -1).flip(1).flatten()
        dout, dlse = self.cotangents
        _, grads = self.run(
            self.args | {"q": self.args["q"][:, :, order]}, [dout[:, :, order], dlse[:, order]]
        )
        before, after = ([gradients[n] for n in ("k", "v")] for gradients in (self.whole[1], grads))
        return [self.trial.control("heads of a group in another order", before, after)]


def _widened(t: Tensor, before: int, after: int, value: float = NAN) -> Tensor:
    """[B, rows, ...] with `before` rows in front and `after` behind."""
    front, back = (t.new_full((t.shape[0], n, *t.shape[2:]), value) for n in (before, after))
    return torch.cat([front, t, back], 1)


# Decoding a single query


def _rooms(trial: Trial, args: Args) -> list[OutputCheck]:
    """Keys inside a larger cache, and in pages."""
    whole = trial.forward(args)
    B, S = args["k"].shape[:2]
    around = args | {n: _widened(args[n], 77, 300) for n in ("k", "v")}
    for name, at in (("key_start", 77), ("key_end", 77 + S)):
        around[name] = torch.full((B,), at, dtype=torch.int32, device=args["q"].device)
    pages = args | paged(args, 64, torch.Generator().manual_seed(3))
    alike = {"keys inside a larger cache": around, "keys in pages": pages}
    return [
        same_bits(f"{i}:{name}", result[i], whole[i], what)
        for what, changed in alike.items()
        for result in [replace(trial.in_class(changed), gradient=False).forward(changed)]
        for i, name in enumerate(trial.proof.outputs)
    ]


def _orders(trial: Trial, args: Args) -> list[OutputCheck]:
    """Controls: the same keys and values for one query, with shifted boundaries, and in another order. Keys
    are put in front to shift them, and a window masks these."""
    S = args["k"].shape[1]
    whole = trial.forward(args | {"window": S})
    changes = {"groups of 16 that begin elsewhere": 8, "blocks that begin elsewhere": 32}
    if S > SEGMENT:
        changes["segments that begin elsewhere"] = 128
    checks = []
    for what, more in changes.items():
        shifted = args | {n: _widened(args[n], more, 0, 0.5) for n in ("k", "v")} | {"window": S}
        checks.append(trial.control(what, whole, trial.forward(shifted)))
    reordered = args | {n: torch.roll(args[n], 3, 1) for n in ("k", "v")}
    checks.append(trial.control("keys in another order", whole, trial.forward(reordered)))
    return checks
