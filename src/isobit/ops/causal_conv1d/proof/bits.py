"""Other calls of `causal_conv1d` that must give the same bits, and its class operation by operation."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.causal_conv1d.proof.inputs import histories, starts, taps_swapped, windows
from isobit.ops.causal_conv1d.update_op import causal_conv1d_update
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial


def same_elsewhere(trial: Trial) -> list[OutputCheck]:
    """The class by its definition; sequences packed, padded on the left, and in pieces; and one token after
    another with a state in slots. Gradients of the weight do not depend on the layout nor on rows at the end
    whose dout is 0. Controls: two taps in another order, and the rows in another order."""
    args = trial.args()
    outputs, grads = trial.backward(args)
    checks = _by_definition(trial, args, outputs, grads)
    alone = _alone(trial, args)
    for s, (row, first, end) in enumerate(starts(args)):
        checks.append(same_bits("0:out", outputs[0][row, first:end], alone[s][0], f"sequence {s} alone"))
        checks.append(same_bits("1:final_state", outputs[1][s], alone[s][1], f"sequence {s} alone"))
    checks += _padded(trial, args, outputs)
    checks += _decoded(trial, args, outputs)
    return checks + (_shared(trial, args) if grads else [])


# The class


def sums(history: Tensor, args: Args) -> Tensor:
    """z in fp32: elementwise operations, which have the same bits everywhere."""
    weight, bias = args["weight"].float(), args["bias"]
    n = len(history) - weight.shape[1] + 1
    z = torch.zeros(n, len(weight), device=history.device)
    z = z if bias is None else z + bias.float()
    for k in range(weight.shape[1]):
        z = z + history[k : k + n].float() * weight[:, k]
    return z


def _silu(z: Tensor) -> Tensor:
    """On a GPU PyTorch's, on a CPU with numpy's exp."""
    if z.is_cuda:
        return F.silu(z)
    with np.errstate(over="ignore"):
        return torch.from_numpy(z.numpy() / (np.float32(1) + np.exp(-z.numpy())))


def _slope(z: Tensor) -> Tensor:
    if z.is_cuda:
        s = torch.sigmoid(z)
    else:
        with np.errstate(over="ignore"):
            s = torch.from_numpy(np.float32(1) / (np.float32(1) + np.exp(-z.numpy())))
    return s * (1.0 + z * (1.0 - s))


def by_definition(args: Args, dout: Tensor | None) -> dict[str, Tensor]:
    """Outputs, and with dout the gradients."""
    x, weight = args["x"], args["weight"]
    (B, T, D), W = x.shape, weight.shape[1]
    out, dz = torch.zeros_like(x), torch.zeros(B, T, D, device=x.device)
    given = torch.zeros(B, T, W, D, device=x.device)
    dx = torch.zeros(B, T, D, device=x.device)
    for (row, first, end), history in zip(starts(args), histories(args), strict=True):
        n, here = end - first, (row, slice(first, end))
        if n == 0:
            continue
        z = sums(history, args)
        out[here] = (_silu(z) if args["activation"] else z).to(x.dtype)
        given[here] = windows(history, W).transpose(1, 2).float()
        if dout is not None:
            own = dout[here].float()
            own = own * _slope(z) if args["activation"] else own
            dz[here] = own
            for j in range(min(W, n)):
                dx[row, first : end - j] += own[j:] * weight[:, W - 1 - j].float()
    expected = {"0:out": out}
    if dout is not None:
        expected["gradient:x"] = dx.to(x.dtype)
        terms = (dz[:, :, None] * given).flatten(0, 1)
        expected["gradient:weight"] = _over_rows(terms).T.contiguous().to(weight.dtype)
        if args["bias"] is not None:
            expected["gradient:bias"] = _over_rows(dz.flatten(0, 1)).to(weight.dtype)
    return expected


def _over_rows(terms: Tensor) -> Tensor:
    """Groups of 16 rows one after another from +0, groups by a tree of neighbours."""
    level = []
    for first in range(0, max(len(terms), 1), 16):
        total = torch.zeros_like(terms[0]) if len(terms) else terms.new_zeros(terms.shape[1:])
        for term in terms[first : first + 16]:
            total = total + term
        level.append(total)
    while len(level) > 1:
        level += [torch.zeros_like(level[0])] * (len(level) % 2)
        level = [a + b for a, b in zip(level[0::2], level[1::2], strict=True)]
    return level[0]


def _by_definition(
    trial: Trial, args: Args, outputs: tuple[Tensor, ...], grads: dict[str, Tensor]
) -> list[OutputCheck]:
    """On the device that computes: the model does on the CPU, wherever its tensors are."""
    where = torch.device("cpu") if trial.backend in trial.proof.slow else trial.device
    ours = {"0:out": outputs[0]} | {f"gradient:{n}": g for n, g in grads.items()}
    given = {n: t.to(where) if isinstance(t, Tensor) else t for n, t in args.items()}
    expected = by_definition(given, trial.cotangents(outputs)[0].to(where) if grads else None)
    what = f"{trial.numerics} by its definition"
    checks = [same_bits(n, ours[n].to(where), expected[n], what) for n in ours]
    if args["weight"].shape[1] == 4 and args["x"].dtype == torch.float32:
        other = dict(args)
        other["weight"] = taps_swapped(args["weight"])
        changed = [_sums_swapped(history, other) for history in histories(args)]
        plain = [sums(history, args) for history in histories(args)]
        checks.append(trial.control("two taps in another order", plain, changed))
    return checks


def _sums_swapped(history: Tensor, args: Args) -> Tensor:
    """The same terms, the second and the third exchanged."""
    weight, bias = args["weight"].float(), args["bias"]
    n = len(history) - 3
    z = torch.zeros(n, len(weight), device=history.device)
    z = z if bias is None else z + bias.float()
    for k, at in enumerate((0, 2, 1, 3)):
        z = z + history[at : at + n].float() * weight[:, k]
    return z


# Other calls


def _piece(trial: Trial, args: Args, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, final_state) of some tokens [n, D] of one sequence."""
    one = {"x": x[None], "first": None, "cu_seqlens": None}
    out, final = trial.forward(args | one | {"initial_state": None if state is None else state[None]})
    return out[0], final[0]


def _alone(trial: Trial, args: Args) -> list[tuple[Tensor, Tensor]]:
    """(out, final_state) of every sequence by itself, in two pieces: the second has the state of the first.
    A piece may be shorter than the taps."""
    results = []
    for s, (row, first, end) in enumerate(starts(args)):
        cut = first + min(2, end - first)
        state = None if args["initial_state"] is None else args["initial_state"][s]
        here, state = _piece(trial, args, args["x"][row, first:cut], state)
        there, state = _piece(trial, args, args["x"][row, cut:end], state)
        results.append((torch.cat([here, there]), state))
    return results


def _padded(trial: Trial, args: Args, outputs: tuple[Tensor, ...]) -> list[OutputCheck]:
    """All sequences in rows of their own, with NaN in front of them."""
    where = starts(args)
    if not where:
        return []
    longest = max(end - first for _, first, end in where) + 3
    x = args["x"].new_full((len(where), longest, args["x"].shape[-1]), float("nan"))
    for s, (row, first, end) in enumerate(where):
        x[s, longest - (end - first) :] = args["x"][row, first:end]
    begins = torch.tensor([longest - (end - first) for _, first, end in where], device=x.device)
    out, final = trial.forward(args | {"x": x, "first": begins, "cu_seqlens": None})
    checks = [same_bits("1:final_state", final, outputs[1], "padded on the left")]
    for s, (row, first, end) in enumerate(where):
        own = out[s, longest - (end - first) :]
        checks.append(same_bits("0:out", own, outputs[0][row, first:end], f"sequence {s} padded on the left"))
        rest = out[s, : longest - (end - first)]
        checks.append(same_bits("0:out", rest, torch.zeros_like(rest), f"padding of sequence {s}"))
    return checks


def _decoded(trial: Trial, args: Args, outputs: tuple[Tensor, ...]) -> list[OutputCheck]:
    """Token by token, then two at a time, with states in slots, in descending order. Slots that belong to no
    sequence stay as they are."""
    where, W = starts(args), args["weight"].shape[1]
    if not where:
        return []
    S, D = len(where), args["x"].shape[-1]
    shared = {n: args[n] for n in ("weight", "bias", "activation")}
    controls = {n: trial.controls()[n] for n in ("backend", "numerics")}

    def run(at_once: int) -> tuple[list[Tensor], Tensor]:
        state = args["x"].new_full((2 * S + 1, W - 1, D), 7.0)
        slots = torch.arange(2 * S - 1, 0, -2, device=state.device)
        state[slots] = 0.0 if args["initial_state"] is None else args["initial_state"]
        tokens: list[list[Tensor]] = [[] for _ in where]
        longest = max(end - first for _, first, end in where)
        for t in range(0, longest, at_once):
            live = [s for s, (_, first, end) in enumerate(where) if first + t + at_once <= end]
            if not live:
                break
            x = torch.stack([args["x"][where[s][0], where[s][1] + t :][:at_once] for s in live])
            out = causal_conv1d_update(x, state, slots=slots[live], **shared, **controls)
            for s, own in zip(live, out, strict=True):
                tokens[s].append(own)
        untouched = torch.arange(0, 2 * S + 1, 2, device=state.device)
        assert bool((state[untouched] == 7.0).all()), "a slot of no sequence was written"
        rows = [torch.cat([args["x"][0, :0], *each]) for each in tokens]
        return rows, state[slots]

    checks = []
    for at_once in (1, 2):
        rows, states = run(at_once)
        for s, (row, first, _) in enumerate(where):
            expected = outputs[0][row, first : first + len(rows[s])]
            checks.append(same_bits("0:out", rows[s], expected, f"decoding {at_once} tokens at a time"))
        if at_once == 1:
            checks.append(same_bits("1:final_state", states, outputs[1], "the state after decoding"))
    return checks


def _shared(trial: Trial, args: Args) -> list[OutputCheck]:
    """dweight and dbias in fp32: a long sum in 16 bits seldom shows its order."""
    wide = args | {n: None if args[n] is None else args[n].float() for n in ("weight", "bias")}
    dout = trial.cotangents(trial.forward(wide))[0]
    names = tuple(n for n in ("weight", "bias") if args[n] is not None)

    def gradients(changed: Args, dout: Tensor) -> list[Tensor]:
        final = torch.zeros(0, device=dout.device)
        grads = replace(trial, given=(dout, final), only=names).backward(changed)[1]
        return [grads[n] for n in names]

    whole = gradients(wide, dout)
    checks: list[OutputCheck] = []

    def same(what: str, ours: list[Tensor]) -> None:
        checks.extend(
            same_bits(f"gradient:{n}", a, b, what) for n, a, b in zip(names, ours, whole, strict=True)
        )

    x, (B, T, D) = wide["x"], wide["x"].shape
    same("layout padded", gradients(trial.proof.lay_out(wide, "padded"), dout))
    if args["cu_seqlens"] is None and args["first"] is None and B > 1:
        bounds = torch.arange(0, B * T + 1, T, device=x.device)
        same("packed", gradients(wide | {"x": x.reshape(1, B * T, D), "cu_seqlens": bounds},
                                 dout.reshape(1, B * T, D)))  # fmt: skip
    if args["cu_seqlens"] is None and B * T > 1:
        order: Callable[[Tensor], Tensor] = lambda t: t.flip(0)  # noqa: E731
        changed = wide | {n: None if wide[n] is None else order(wide[n]) for n in ("initial_state", "first")}
        rolled = gradients(changed | {"x": order(x)}, order(dout))
        checks.append(trial.control("sequences in another order", whole, rolled))
    return checks
