"""Bit laws specific to the gated delta rule. Each changes something that must not affect bits. The controls
prove that another computation would have been noticed."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule.model import CHUNK
from isobit.ops.gated_delta_rule.proof.inputs import (
    BY_TOKEN,
    OF_STATES,
    features_regrouped,
    one_of_packed,
    part,
)
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.inputs import in_other_groups
from isobit.spec.proof import Args
from isobit.spec.trial import Trial

#: What later tokens hold. In fp16 the third is an infinity too; the last one is subnormal.
LATER = (float("inf"), float("nan"), 1e38, 1e-40)


def rows_so_far(trial: Trial) -> list[OutputCheck]:
    """A row is a function of its sequence's tokens up to itself: the first tokens alone, as in prefill and
    decoding, and whatever later tokens hold, give the same bits."""
    args = trial.args()
    T = args["v"].shape[1]
    if args["cu_seqlens"] is not None or T < 2:
        return []
    args = one_of_packed(args, 0, 0, T, ()) | {n: args[n][:1] for n in BY_TOKEN if args[n] is not None}
    whole, checks = trial.forward(args)[0], []
    cuts = sorted({1, min(17, T - 1), min(CHUNK, T - 1), T - 1})
    for n in cuts:
        alone = trial.forward(part(args, 0, n, args["initial_state"]))[0]
        checks.append(same_bits("0:o", alone, whole[:, :n], f"the first {n} of {T} tokens alone"))
    for i, value in enumerate(LATER):
        n = cuts[i % len(cuts)]
        after = trial.forward(_with_later(args, n, value))[0]
        checks.append(same_bits("0:o", after[:, :n], whole[:, :n], f"{value} in all tokens from {n} on"))
    return checks


def _with_later(args: Args, n: int, value: float) -> Args:
    changed = dict(args)
    for name in BY_TOKEN:
        if args[name] is not None:
            changed[name] = args[name].clone()
            changed[name][:, n:] = value
    return changed


def same_elsewhere(trial: Trial) -> list[OutputCheck]:
    """Packed sequences alone; and a sequence continued from the state at a border of chunks. Controls: one
    that is continued from elsewhere, so that chunks begin elsewhere; from a state that was rounded; and the
    recurrence, token by token."""
    args = trial.args()
    if args["cu_seqlens"] is not None:
        return _packed_alone(trial, args, BY_TOKEN) + gradients_alone(trial, args)
    T = args["v"].shape[1]
    if T <= CHUNK:
        return []
    whole = trial.forward(args)
    first = trial.forward(part(args, 0, CHUNK, args["initial_state"]))
    rest = trial.forward(part(args, CHUNK, T, first[1]))
    checks = [
        same_bits("0:o", torch.cat((first[0], rest[0]), 1), whole[0], f"continued after {CHUNK} tokens"),
        same_bits("1:final_state", rest[1], whole[1], f"continued after {CHUNK} tokens"),
    ]
    early = CHUNK // 2 + 5
    head = trial.forward(part(args, 0, early, args["initial_state"]))
    tail = trial.forward(part(args, early, T, head[1]))
    checks.append(_control(trial, "chunks that begin elsewhere", whole, (head[0], tail[0]), tail[1]))
    low = first[1].to(args["v"].dtype).to(first[1].dtype)
    tail = trial.forward(part(args, CHUNK, T, low))
    checks.append(_control(trial, "a state that is rounded to 16 bits", whole, (first[0], tail[0]), tail[1]))
    state, rows = args["initial_state"], []
    for t in range(min(T, 6)):
        one = trial.forward(part(args, t, t + 1, state))
        rows.append(one[0])
        state = one[1]
    by_token = torch.cat(rows, 1)
    checks.append(trial.control("the recurrence", [whole[0][:, : by_token.shape[1]].clone()], [by_token]))
    return checks


def _control(
    trial: Trial, what: str, whole: tuple[Tensor, ...], rows: tuple[Tensor, Tensor], last: Tensor
) -> OutputCheck:
    return trial.control(what, whole, (torch.cat(rows, 1), last))


def gradients_alone(trial: Trial, args: Args) -> list[OutputCheck]:
    """The gradients of packed sequences are those of each alone, whatever the others hold. Control: groups of
    16 features in another order, where other gradients than those of q, k and the state stay in place."""
    if not trial.leaves(args):
        return []
    outputs, whole = trial.backward(args)
    do, dfinal = given = trial.cotangents(outputs)
    bounds, checks = args["cu_seqlens"].tolist(), []
    longest = max(range(len(bounds) - 1), key=lambda s: bounds[s + 1] - bounds[s])
    others = _with_others(args, bounds[longest], bounds[longest + 1])
    for s, (first, end) in enumerate(pairwise(bounds)):
        one = one_of_packed(args, s, first, end, BY_TOKEN)
        own = replace(trial, given=(do[:, first:end], dfinal[s : s + 1]))
        for name, gradient in own.backward(one)[1].items():
            mine = whole[name][s : s + 1] if name == "initial_state" else whole[name][:, first:end]
            checks.append(same_bits(f"gradient:{name}", gradient, mine, f"sequence {s} alone"))
    _, changed = replace(trial, given=tuple(given)).backward(others)
    here = slice(bounds[longest], bounds[longest + 1])
    for name in BY_TOKEN:
        if name in whole:
            what = "other sequences full of NaN"
            checks.append(same_bits(f"gradient:{name}", changed[name][:, here], whole[name][:, here], what))
    axis = -1 if args["state_v_first"] else -2
    moved = (do, in_other_groups(dfinal, axis))
    _, after = replace(trial, given=moved).backward(features_regrouped(args))
    stay = [name for name in ("v", "g", "beta") if name in whole]
    what = "gradients with groups of 16 features in another order"
    return [*checks, trial.control(what, [whole[n] for n in stay], [after[n] for n in stay])]


def _with_others(args: Args, first: int, end: int) -> Args:
    """NaN in all tokens but these."""
    changed = dict(args)
    for name in BY_TOKEN:
        if args[name] is not None:
            changed[name] = torch.full_like(args[name], float("nan"))
            changed[name][:, first:end] = args[name][:, first:end]
    return changed


def states_alone(trial: Trial) -> list[OutputCheck]:
    """Packed sequences of `chunk_gated_delta_rule_fwd_h` alone."""
    args = trial.args()
    return [] if args["cu_seqlens"] is None else _packed_alone(trial, args, OF_STATES)


def _packed_alone(trial: Trial, args: Args, names: tuple[str, ...]) -> list[OutputCheck]:
    whole, at, checks = trial.forward(args), 0, []
    for s, (first, end) in enumerate(pairwise(args["cu_seqlens"].tolist())):
        ours = trial.forward(one_of_packed(args, s, first, end, names))
        chunks = -(-(end - first) // CHUNK)
        places = {"h": slice(at, at + chunks), "o": slice(first, end), "v_new": slice(first, end)}
        for i, name in enumerate(trial.proof.outputs):
            mine = whole[i][s : s + 1] if name == "final_state" else whole[i][:, places[name]]
            if ours[i].numel():
                checks.append(same_bits(f"{i}:{name}", ours[i], mine, f"sequence {s} alone"))
        at += chunks
    return checks
