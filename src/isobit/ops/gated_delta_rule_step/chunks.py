"""Many new tokens at once: whole chunks by the kernels of the forward, all in one call.

Sequences that have begun are at different places of their chunks, and only the device knows where. So a call
has three parts, and each sequence its own share of each, which may be nothing:

    rows      up to the end of the chunk that is open
    chunks    whole ones, packed one sequence after another, by `gated_delta_rule`
    rows      the last 1 to 64: the state keeps them, so that they can be taken back; with drafts 64 more

The chunk that is open must be closed before whole ones can follow, and rows close it when the next one comes.
So the first part has one row too many, which the second computes again, with the same bits.

Shares are computed on the device and no size depends on them: nothing waits for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule.op import BY_TOKEN, gated_delta_rule
from isobit.ops.gated_delta_rule_step.state import CHUNK, CHUNKS, ROWS, DeltaState

Args = dict[str, Any]

#: The op for at most 64 tokens.
Rows = Callable[..., Tensor]


def kept(state: DeltaState) -> int:
    """How many of the last tokens rows compute, at most: those that can be taken back."""
    return 2 * CHUNK if state.drafts else CHUNK


def by_rows_alone(state: DeltaState, tokens: int, from_empty: bool) -> bool:
    """Whether rows compute so few tokens in no more calls than they would need before and after chunks."""
    return tokens <= kept(state) + (0 if from_empty else CHUNK)


def chosen(args: Args, *index: Any) -> Args:
    """What calls take by tokens, at these places."""
    return {name: None if args[name] is None else args[name][index] for name in BY_TOKEN}


# Prompts of one length, from the first token on


def first_chunks(state: DeltaState, args: Args, backend: str) -> Tensor | None:
    """The whole chunks of new sequences, as far as the state need not keep their rows; None if there is none.
    A last chunk that is full is closed, unless drafts may be taken back."""
    B, T = args["q"].shape[:2]
    whole = max((T - 1) // CHUNK - 1, 0) * CHUNK if state.drafts else T // CHUNK * CHUNK
    if not whole:
        return None
    index, there, at = _slots(state, args["slots"], B)
    seeded = state.is_seeded[at] & there
    begun = torch.where(seeded[:, None, None, None], state.start[at, 0], 0.0)
    out, end = _forward(args, chosen(args, slice(None), slice(whole)), begun, None, backend)
    state.begin(index, end, whole // CHUNK)
    return torch.where(there[:, None, None, None], out, 0.0)


# Sequences that may have begun


class Shares(NamedTuple):
    """[B] each: the tokens of a sequence, and how many of them come before and in whole chunks."""

    total: Tensor
    before: Tensor
    whole: Tensor
    opened: Tensor  # whether a chunk is open

    @classmethod
    def of(cls, state: DeltaState, there: Tensor, at: Tensor, lengths: Tensor | None, T: int) -> "Shares":
        total = torch.where(there, T if lengths is None else lengths.long().clamp(0, T), 0)
        # As kernels do: counts that are not valid give wrong results, but no access is out of bounds.
        rows = state.place[at, ROWS].long().clamp(0, CHUNK)
        opened = rows > 0
        to_border = torch.where(opened, CHUNK - rows, 0)
        whole = (total - to_border - 1).div(CHUNK, rounding_mode="floor") * CHUNK - (kept(state) - CHUNK)
        return cls(total, torch.minimum(total, to_border), whole.clamp(min=0), opened)


def continued(state: DeltaState, args: Args, by_rows: Rows, backend: str, from_empty: bool) -> Tensor:
    """All new tokens of sequences, if they are more than rows compute."""
    B, T = args["q"].shape[:2]
    device, (HV, V) = state.device, args["v"].shape[2:]
    index, there, at = _slots(state, args["slots"], B)
    share = Shares.of(state, there, at, args["lengths"], T)
    sequence = torch.arange(B, device=device)[:, None]
    # One row more than there are, for whatever is not an output.
    out = torch.zeros(B * T + 1, HV, V, dtype=args["v"].dtype, device=device)

    def put(made: Tensor, of: Tensor, tokens: Tensor, exist: Tensor) -> None:
        place = torch.where(exist, of * T + tokens, B * T)
        out.index_copy_(0, place.flatten(), made.flatten(0, -3))

    def rows(first: Tensor, count: Tensor, more: Tensor | int = 0) -> None:
        """64 rows from `first` on at most; `more` of them are no outputs."""
        i = torch.arange(CHUNK, device=device)
        tokens = first[:, None] + i
        own = chosen(args, sequence, tokens.clamp(max=T - 1))
        made = by_rows(**args | own | {"lengths": count + more}, backend=backend)
        put(made, sequence, tokens, i < count[:, None])

    if not from_empty:
        rows(torch.zeros_like(share.total), share.before, (share.whole > 0) & share.opened)
    # Token i of the packed ones. Those behind the last bound are in no sequence: kernels leave them out.
    room = (T - 1) // CHUNK * CHUNK - (kept(state) - CHUNK)
    bounds = torch.zeros(B + 1, dtype=torch.int32, device=device)
    torch.cumsum(share.whole, 0, dtype=torch.int32, out=bounds[1:])
    i = torch.arange(B * room, dtype=torch.int32, device=device)
    of = torch.searchsorted(bounds[1:], i, right=True).clamp(max=B - 1)
    tokens = (share.before[of] + i - bounds[of]).clamp(max=T - 1)
    packed = {name: None if t is None else t[None] for name, t in chosen(args, of, tokens).items()}
    made, end = _forward(args, packed, _starts(state, there, at), bounds, backend)
    put(made, of, tokens, i < bounds[-1])
    chunks = state.place[at, CHUNKS] + share.whole // CHUNK
    state.begin(torch.where(share.whole > 0, index, -1), end, chunks)
    for done in range(0, kept(state), CHUNK):
        first = share.before + share.whole + done
        rows(first, share.total - first)
    return out[:-1].unflatten(0, (B, T))


def _starts(state: DeltaState, there: Tensor, at: Tensor) -> Tensor:
    """[B, HV, K, V]: the states at the starts of chunks."""
    chunks = state.place[at, CHUNKS]
    held = there & ((chunks != 0) | state.is_seeded[at])
    return torch.where(held[:, None, None, None], state.start[at, state.half(chunks)], 0.0)


def _slots(state: DeltaState, slots: Tensor | None, B: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B] each: the numbers of slots, which of them there are, and numbers that can be read."""
    index = torch.arange(B, device=state.device) if slots is None else slots.long()
    return index, (index >= 0) & (index < state.slots), index.clamp(0, max(state.slots - 1, 0))


def _forward(
    args: Args, tokens: Args, begun: Tensor, bounds: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    """(out, the states after these tokens)."""
    out, end = gated_delta_rule(
        **tokens, scale=args["scale"], initial_state=begun,
        use_qk_l2norm_in_kernel=args["use_qk_l2norm_in_kernel"],
        output_final_state=True, cu_seqlens=bounds, validate=False, backend=backend,
    )  # fmt: skip
    assert end is not None
    return out, end
