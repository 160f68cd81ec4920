"""Bit laws of decoding. A token has the bits of its row in a forward over the whole sequence, however it came
there, and nothing else that is in memory matters."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule.op import gated_delta_rule
from isobit.ops.gated_delta_rule.proof.bits import LATER
from isobit.ops.gated_delta_rule_step.chunks import kept
from isobit.ops.gated_delta_rule_step.op import gated_delta_rule_step
from isobit.ops.gated_delta_rule_step.proof.inputs import (
    BY_TOKEN,
    backend_for,
    histories,
    lengths_of,
    slots_of,
    tokens_of,
)
from isobit.ops.gated_delta_rule_step.state import CHUNK, DeltaState
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial

NAN = float("nan")


def invariant(trial: Trial) -> list[OutputCheck]:
    args = trial.args()
    whole, after = stepped(trial, args)
    checks = as_forward(trial, args, whole)
    checks += alone(trial, args, whole, after)
    checks += in_other_company(trial, args, whole, after)
    checks += later_tokens(trial, args, whole)
    checks += in_pieces(trial, args, whole, after)
    checks += taken_back(trial, args, whole, after)
    checks += prompts(trial, args)
    checks += long_prompts(trial, args)
    for layout in trial.proof.layouts:
        laid = trial.proof.lay_out(args, layout)
        checks.append(same_bits("0:out", stepped(trial, laid)[0], whole, f"layout {layout}"))
    return checks + controls(trial, args, whole)


def stepped(trial: Trial, args: Args) -> tuple[Tensor, DeltaState]:
    """(out, the state after the call), from a copy of the state."""
    state = args["state"].clone()
    return trial.call(args | {"state": state})[0], state


def part(args: Args, batch: Any, tokens: slice = slice(None)) -> Args:
    """Some sequences, and some of their new tokens."""
    few = {n: None if args[n] is None else args[n][batch, tokens] for n in BY_TOKEN}
    slots = args["slots"]
    if slots is None:
        slots = torch.arange(args["q"].shape[0], dtype=torch.int32, device=args["q"].device)
    lengths = args["lengths"]
    if lengths is not None:
        first, end, _ = tokens.indices(args["q"].shape[1])
        lengths = (lengths[batch] - first).clamp(0, end - first)
    return args | few | {"slots": slots[batch], "lengths": lengths}


def stored(state: DeltaState, slot: int) -> dict[str, Tensor]:
    """What later calls read of a slot."""
    rows, chunks, _, seeded, _ = state.place[slot].tolist()
    half = chunks & (state.start.shape[1] - 1)
    result = {n: getattr(state, n)[slot, half, :, :rows] for n in ("k_rows", "bv_rows", "vn_rows", "inverse")}
    result |= {n: getattr(state, n)[slot, half, :, :rows] for n in ("beta_rows", "gate_rows")}
    if chunks or seeded:
        result |= {n: getattr(state, n)[slot, half] for n in ("start", "start16")}
    return result | {"place": state.place[slot, :2]}


def same_slots(what: str, ours: DeltaState, other: DeltaState, slots: list[int]) -> list[OutputCheck]:
    """The slots of two states hold the same bits, as far as anything reads them."""
    checks = []
    for slot in slots:
        mine, theirs = stored(ours, slot), stored(other, slot)
        checks += [same_bits(f"state:{n}", mine[n], theirs[n], f"{what}, slot {slot}") for n in theirs]
    return checks


def used(args: Args) -> list[int]:
    return [s for s in slots_of(args) if 0 <= s < args["state"].slots]


# What must have the same bits


def as_forward(trial: Trial, args: Args, whole: Tensor) -> list[OutputCheck]:
    """Rows of a forward over all tokens of the sequence."""
    checks, backend = [], backend_for(trial.backend, trial.device)
    for b, own in enumerate(histories(args)):
        if own is not None:
            o, _ = gated_delta_rule(**own[0], backend=backend)
            what = f"the forward of {o.shape[1]} tokens, from {own[1]} on"
            checks.append(same_bits("0:out", whole[b, : o.shape[1] - own[1]], o[0, own[1] :], what))
    return checks


def alone(trial: Trial, args: Args, whole: Tensor, after: DeltaState) -> list[OutputCheck]:
    """Each sequence by itself; all other slots stay as they are."""
    checks = []
    for b, slot in enumerate(slots_of(args)):
        out, state = stepped(trial, part(args, slice(b, b + 1)))
        checks.append(same_bits("0:out", out, whole[b : b + 1], f"sequence {b} alone"))
        checks += same_slots(f"sequence {b} alone", state, after, [slot])
        others = [s for s in range(state.slots) if s != slot]
        checks += same_slots(f"other slots next to sequence {b}", state, args["state"], others)
    return checks


def in_other_company(trial: Trial, args: Args, whole: Tensor, after: DeltaState) -> list[OutputCheck]:
    """In another order, among sequences without a slot, with NaN in tokens and rows that are not there."""
    B, T = args["q"].shape[:2]
    slots, back = slots_of(args), list(range(B))[::-1]
    order = torch.tensor([*back, back[0], back[-1]], device=trial.device)
    mixed = part(args, order)
    ends = torch.tensor([slots[b] for b in back] + [-1, 2**31 - 1], dtype=torch.int64, device=trial.device)
    counts = [lengths_of(args)[b] for b in order.tolist()]
    mixed |= {"slots": ends, "lengths": torch.tensor(counts, device=trial.device)}
    # One token more than there is, so that it has to be left out.
    mixed |= {n: None if mixed[n] is None else torch.cat((mixed[n], mixed[n][:, :1]), 1) for n in BY_TOKEN}
    for b, n in enumerate(counts):
        for name in BY_TOKEN:
            if mixed[name] is not None:
                mixed[name][b, n if b < B else 0 :] = NAN
    state = args["state"].clone()
    for slot in range(state.slots):
        _spoil(state, slot)
    out, state = stepped(trial, mixed | {"state": state})
    what = "backwards, among sequences without slots, NaN where nothing is"
    checks = [same_bits("0:out", out[:B, :T].flip(0), whole, what)]
    for part_of, rest in (("sequences without slots", out[B:]), ("tokens that are not there", out[:, T:])):
        checks.append(same_bits("0:out", rest, torch.zeros_like(rest), f"{part_of} are 0"))
    return checks + same_slots(what, state, after, used(args))


def later_tokens(trial: Trial, args: Args, whole: Tensor) -> list[OutputCheck]:
    """Whatever later tokens of the call hold: drafts may be garbage."""
    T, checks = args["q"].shape[1], []
    for i, value in enumerate(LATER if T > 1 else ()):
        n = (1, T - 1)[i % 2]
        call = dict(args)
        for name in BY_TOKEN:
            if args[name] is not None:
                call[name] = args[name].clone()
                call[name][:, n:] = value
        out = stepped(trial, call)[0]
        checks.append(same_bits("0:out", out[:, :n], whole[:, :n], f"{value} in all tokens from {n} on"))
    return checks


def _spoil(state: DeltaState, slot: int) -> None:
    """NaN in everything of a slot that does not exist."""
    rows, chunks, oldest, seeded, _ = state.place[slot].tolist()
    half = chunks & (state.start.shape[1] - 1)
    for name in ("k_rows", "bv_rows", "vn_rows", "inverse", "beta_rows", "gate_rows"):
        own = getattr(state, name)[slot]
        own[half, :, rows:] = NAN
        if state.drafts and oldest == chunks:
            own[1 - half] = NAN
    if not chunks and not seeded:
        state.start[slot, half] = state.start16[slot, half] = NAN


def in_pieces(trial: Trial, args: Args, whole: Tensor, after: DeltaState) -> list[OutputCheck]:
    """One token at a time, and in two calls."""
    T, checks = args["q"].shape[1], []
    for cuts in ([*range(T + 1)], [0, T - T // 3, T]):
        state, outs = args["state"].clone(), []
        for first, end in pairwise(cuts):
            piece = part(args, slice(None), slice(first, end))
            outs.append(trial.call(piece | {"state": state})[0])
        what = f"in calls of {[b - a for a, b in pairwise(cuts)]} tokens"
        checks.append(same_bits("0:out", torch.cat(outs, 1), whole, what))
        checks += same_slots(what, state, after, used(args))
    return checks


def taken_back(trial: Trial, args: Args, whole: Tensor, after: DeltaState) -> list[OutputCheck]:
    """Other tokens first, taken back; then the tokens. As far as rows can be taken back."""
    state = args["state"].clone()
    counts = torch.tensor(lengths_of(args), device=trial.device)
    slots = torch.tensor(slots_of(args), device=trial.device)
    room = torch.full_like(slots, CHUNK) if state.drafts else CHUNK - state.place[slots, 0]
    drafts = torch.minimum(counts, room)
    others = {n: None if args[n] is None else args[n].flip(1) for n in ("q", "k", "v")}
    trial.call(args | others | {"state": state, "lengths": drafts})
    state.crop(drafts.int(), slots)
    out = trial.call(args | {"state": state})[0]
    what = f"after {drafts.tolist()} other tokens were taken back"
    return [same_bits("0:out", out, whole, what), *same_slots(what, state, after, used(args))]


# What must have other bits


def controls(trial: Trial, args: Args, whole: Tensor) -> list[OutputCheck]:
    """The recurrence, chunks that begin with the call, and a state that is carried in 16 bits."""
    recurrent, restarted, narrow = (whole.clone() for _ in range(3))
    shown = False
    common: Args = {"output_final_state": True, "backend": backend_for(trial.backend, trial.device)}
    for b, own in enumerate(histories(args)):
        if own is None:
            continue
        history, n = own
        tokens = {name: history[name] for name in BY_TOKEN}
        rest = {name: value for name, value in history.items() if name not in BY_TOKEN}

        def some(first: int, end: int, state: Tensor | None, tokens: Args = tokens, rest: Args = rest) -> Any:
            cut: Args = {name: None if t is None else t[:, first:end] for name, t in tokens.items()}
            return gated_delta_rule(**cut, **rest | {"initial_state": state}, **common)

        state = history["initial_state"]
        if n:
            state = some(0, n, state)[1]
        end = history["q"].shape[1]
        restarted[b, : end - n] = some(n, end, state)[0][0]
        for t in range(n, end):
            o, state = some(t, t + 1, state)
            recurrent[b, t - n] = o[0, 0]
        if border := carried_border(n, end):
            shown = True
            first = some(0, border, history["initial_state"])[1].to(whole.dtype).float()
            narrow[b, : end - n] = some(border, end, first)[0][0, n - border :]
    checks = [
        trial.control("the recurrence, token by token", [whole], [recurrent]),
        trial.control("chunks that begin with the call", [whole], [restarted]),
    ]
    if shown:
        checks.append(trial.control("a state carried in 16 bits", [whole], [narrow]))
    return checks


def carried_border(n: int, end: int) -> int:
    """The last border before token n whose state the chunk of the last token does not begin with: rows of
    its own chunk read a state rounded to 16 bits in any case. 0 if there is none."""
    return max(min(n // CHUNK, (end - 1) // CHUNK - 1), 0) * CHUNK


def prompts(trial: Trial, args: Args) -> list[OutputCheck]:
    """Prompts by the kernels of the forward leave the state that rows leave."""
    state, backend = args["state"], backend_for(trial.backend, trial.device)
    longest = max((p["q"].shape[1] for p in state.prompts.values()), default=0)
    tokens = min(longest, 2 * CHUNK + 5)
    if tokens < CHUNK:
        return []
    slot = next(s for s, p in state.prompts.items() if p["q"].shape[1] == longest)
    prompt = {
        n: None if t is None else t[:, :tokens] for n, t in state.prompts[slot].items() if n in BY_TOKEN
    }
    call = prompt | {n: args[n] for n in ("scale", "use_qk_l2norm_in_kernel")} | {"backend": backend}
    results = []
    for at_once in (False, True):
        fresh = state.select([-1, -1])
        begun = state.prompts[slot]["initial_state"]
        if begun is not None:
            fresh.reset([1], begun)
        where = torch.tensor([1], device=trial.device)
        results.append((gated_delta_rule_step(fresh, **call, slots=where, from_empty=at_once), fresh))
    (rows, by_rows), (chunks, by_chunks) = results
    what = f"a prompt of {tokens} tokens by whole chunks"
    checks = [same_bits("0:out", chunks, rows, what)]
    # A chunk that is full is closed with the next token: rows keep it, chunks do not.
    return checks + (same_slots(what, by_chunks, by_rows, [1]) if tokens % CHUNK else [])


def long_prompts(trial: Trial, args: Args) -> list[OutputCheck]:
    """Prompts of several chunks in one call, by sequences at different places, have the rows of a forward.
    In pieces of 64 tokens, in two long ones and where they are the first of their sequences they leave the
    same bits. Control: the rows of the chunk that was open, left out."""
    state, backend = args["state"], backend_for(trial.backend, trial.device)
    if trial.device.type == "cpu" and trial.backend != backend:
        return []  # the model would compute it, which has cells of its own
    B, gen = args["q"].shape[0], torch.Generator().manual_seed(7)
    T = CHUNK + kept(state) + 6
    lengths = torch.tensor([T - 61 * b % T for b in range(B)], device=trial.device)
    many = args | tokens_of(trial.case, B, T, gen, trial.device) | {"lengths": lengths}

    def after(given: Args, cuts: list[int], from_empty: bool = False) -> tuple[Tensor, DeltaState]:
        own, outs = given["state"].clone(), []
        for first, end in pairwise(cuts):
            piece = part(given, slice(None), slice(first, end)) | {"state": own, "from_empty": from_empty}
            outs.append(gated_delta_rule_step(**piece, backend=backend))
        return torch.cat(outs, 1), own

    whole, at_once = after(many, [0, T])
    checks = as_forward(trial, many, whole)
    empty = state.clone()
    empty.reset()
    fresh, first = after(many | {"state": empty}, [0, T])
    for what, given, cuts, expected, other in (
        ("64 at a time", many, [*range(0, T, CHUNK), T], whole, at_once),
        ("5 first", many, [0, 5, T], whole, at_once),
        ("as the first tokens", many | {"state": empty}, [], fresh, first),
    ):
        out, own = after(given, cuts or [0, T], from_empty=not cuts)
        checks.append(same_bits("0:out", out, expected, f"{T} tokens, {what}"))
        checks += same_slots(f"{T} tokens, {what}", own, other, used(args))
        checks.append(same_bits("state:place", own.place, other.place, f"{T} tokens, {what}"))
    if bool((state.place[slots_of(args), 0] % CHUNK > 0).any()):
        closed = state.clone()
        closed.place[:, 0] = 0
        left_out = after(many | {"state": closed}, [0, T])[0]
        checks.append(trial.control("a prompt without the rows of the open chunk", [whole], [left_out]))
    return checks


def borders(trial: Trial) -> list[OutputCheck]:
    """The state at a chunk's border is the final state of a forward up to there."""
    args, checks = trial.args(), []
    _, after = stepped(trial, args)
    backend = backend_for(trial.backend, trial.device)
    for slot, own in zip(slots_of(args), histories(args), strict=True):
        if own is None or not after.place[slot, 1]:
            continue
        at = int(after.place[slot, 1]) * CHUNK
        cut = {n: t[:, :at] if n in BY_TOKEN and t is not None else t for n, t in own[0].items()}
        _, final = gated_delta_rule(**cut, output_final_state=True, backend=backend)
        assert final is not None
        half = int(after.place[slot, 1]) & (after.start.shape[1] - 1)
        checks.append(
            same_bits("state:start", after.start[slot, half], final[0], f"the state after {at} tokens")
        )
    return checks
