"""What a layer of gated delta-rule attention keeps between calls, for many sequences.

Sequences have slots. A slot holds, for each head, the state S at the start of the present chunk of 64 rows,
and what later rows of that chunk need of its earlier ones. S itself changes once in 64 tokens, when the first
row of the next chunk arrives. So rows can be taken back: only a count changes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.frame.cache_key import CacheKey, cache_key_of
from isobit.frame.call_plan import validates
from isobit.frame.contract import ContractError, describe, dtype_name

#: Rows of a chunk.
CHUNK = 64

#: Columns of `place`: rows of the present chunk, chunks before it, the first chunk that is still stored,
#: whether the state of the very first chunk's start was given (otherwise it is 0, whatever is stored), and
#: how many programs of a launch have read these, which is 0 before and after it.
ROWS, CHUNKS, OLDEST, SEEDED, ARRIVED = range(5)

#: How many columns there are.
PLACE = 5

#: The tensors of a state, by name.
TENSORS = (
    "start", "start16", "k_rows", "bv_rows", "vn_rows", "inverse", "beta_rows", "gate_rows", "place",
)  # fmt: skip

Slots = Sequence[int] | Tensor | None


def _error(method: str, argument: str, value: Any, rule: str) -> ContractError:
    return ContractError(f"DeltaState.{method}({argument}: {describe(value)}): {rule}")


class DeltaState:
    """The states of `slots` sequences for `gated_delta_rule_step`, allocated once, on one device.

    Counts are on the device, so nothing here waits for it, and calls can be captured into CUDA graphs. A slot
    is empty at first: its state is 0 and its next token is the first of a chunk.

    A slot takes, in bytes, with P = 2 if drafts else 1:

        P (HV (6 K V + 64 (4 V + 64 * 4 + 8)) + 128 H K) + 20

    Args:
        slots: how many sequences there is room for.
        heads: H, the heads of q and k.
        value_heads: HV, the heads of v, g and beta: a multiple of H. None is H.
        K, V: head sizes. K is 64, 128 or 256, V a multiple of 64.
        dtype: of q, k and v: bf16 or fp16.
        device: where it is; None is PyTorch's default.
        drafts: store the chunk before the present one too, so that `crop` can go back over its end. For
            speculative decoding. Without it rows of the present chunk can be taken back.

    Example:
        >>> import torch, isobit
        >>> state = isobit.DeltaState(2, heads=1, K=64, V=64)
        >>> q, k, v = (torch.randn(2, 3, 1, 64).bfloat16() for _ in range(3))
        >>> g, beta = -torch.rand(2, 3, 1), torch.rand(2, 3, 1)
        >>> out = isobit.gated_delta_rule_step(state, q, k, v, g, beta)
        >>> state.tokens.tolist()
        [3, 3]
        >>> state.crop(1)  # take back the last token
        >>> again = isobit.gated_delta_rule_step(state, *(x[:, 2:] for x in (q, k, v, g, beta)))
        >>> torch.equal(again, out[:, 2:])
        True
    """

    start: Tensor  #: [slots, P, HV, K, V] fp32: S at the start of the present chunk
    start16: Tensor  #: [slots, P, HV, K, V]: the same, rounded to the dtype
    k_rows: Tensor  #: [slots, P, H, 64, K]: k of the chunk's rows
    bv_rows: Tensor  #: [slots, P, HV, 64, V]: beta v, rounded
    vn_rows: Tensor  #: [slots, P, HV, 64, V]: v_new, rounded
    inverse: Tensor  #: [slots, P, HV, 64, 64] fp32: rows of T = (I + A)^-1
    beta_rows: Tensor  #: [slots, P, HV, 64] fp32
    gate_rows: Tensor  #: [slots, P, HV, 64] fp32: the sum of g from the chunk's start
    place: Tensor  #: [slots, 5] int32
    _form: tuple[list[Tensor], list[int], CacheKey | None]  # its tensors, their addresses, and `form`

    def __init__(
        self,
        slots: int,
        heads: int,
        value_heads: int | None = None,
        *,
        K: int = 128,
        V: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        drafts: bool = False,
    ) -> None:
        HV = heads if value_heads is None else value_heads
        for name, value in (("slots", slots), ("heads", heads), ("value_heads", HV)):
            if isinstance(value, bool) or not isinstance(value, int) or value < (name != "slots"):
                raise _error("__init__", name, value, "must be a whole number, at least 1 (slots: 0)")
        if HV % heads:
            raise _error("__init__", "value_heads", HV, f"must be a multiple of heads, {heads}")
        if K not in (64, 128, 256):
            raise _error("__init__", "K", K, "must be 64, 128 or 256")
        if not isinstance(V, int) or V < 64 or V % 64:
            raise _error("__init__", "V", V, "must be a multiple of 64")
        if dtype not in (torch.bfloat16, torch.float16):
            raise _error("__init__", "dtype", dtype, "must be torch.bfloat16 or torch.float16")
        if not isinstance(drafts, bool):
            raise _error("__init__", "drafts", drafts, "must be True or False")
        lead, narrow, wide = (slots, 2 if drafts else 1), {"dtype": dtype}, {"dtype": torch.float32}

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((*lead, *shape), dtype=dtype, device=device)

        # Nothing is read before it is written: what is stored there does not matter.
        self.start, self.start16 = empty(HV, K, V, **wide), empty(HV, K, V, **narrow)
        self.k_rows = empty(heads, CHUNK, K, **narrow)
        self.bv_rows, self.vn_rows = (empty(HV, CHUNK, V, **narrow) for _ in range(2))
        self.inverse = empty(HV, CHUNK, CHUNK, **wide)
        self.beta_rows, self.gate_rows = (empty(HV, CHUNK, **wide) for _ in range(2))
        self.place = torch.zeros((slots, PLACE), dtype=torch.int32, device=device)

    # What it is

    @property
    def slots(self) -> int:
        return self.place.shape[0]

    @property
    def heads(self) -> int:
        return self.k_rows.shape[2]

    @property
    def value_heads(self) -> int:
        return self.start.shape[2]

    @property
    def K(self) -> int:
        return self.start.shape[3]

    @property
    def V(self) -> int:
        return self.start.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        return self.start16.dtype

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def drafts(self) -> bool:
        return self.start.shape[1] == 2

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    @property
    def tokens(self) -> Tensor:
        """[slots] int64: how many tokens each slot has taken since it was reset."""
        return self.place[:, CHUNKS].long() * CHUNK + self.place[:, ROWS]

    @property
    def is_seeded(self) -> Tensor:
        """[slots] bool: whether a state to begin with was given."""
        return self.place[:, SEEDED] != 0

    @property
    def form(self) -> CacheKey | None:
        """All that calls ask of a state before kernels run: everything about its tensors but their values.
        None if they are unusual. Kept, as long as it has the same tensors at the same addresses."""
        own = [getattr(self, name) for name in TENSORS]
        at = [t.data_ptr() for t in own]
        known = self.__dict__.get("_form")
        if known is None or known[1] != at or any(a is not b for a, b in zip(known[0], own, strict=True)):
            known = self._form = own, at, cache_key_of(own, False)
        return known[2]

    def half(self, chunks: Tensor) -> Tensor:
        """Where a chunk is stored, if so many are before it: the second index of the tensors."""
        return chunks.long() & (self.start.shape[1] - 1)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        return {name: getattr(self, name) for name in TENSORS}

    def __repr__(self) -> str:
        sizes = f"slots={self.slots}, heads={self.heads}, value_heads={self.value_heads}, K={self.K}"
        return f"DeltaState({sizes}, V={self.V}, {dtype_name(self.dtype)}, {self.device})"

    # Which slots

    def _hit(self, method: str, slots: Slots) -> Tensor:
        """[slots, n] bool: which slot each number names; a number that names none has no effect."""
        index = self._index(method, "slots", slots)
        return torch.arange(self.slots, device=self.device)[:, None] == index[None, :]

    def _index(self, method: str, name: str, given: Slots) -> Tensor:
        if given is None:
            return torch.arange(self.slots, device=self.device)
        if not isinstance(given, Tensor):
            try:
                given = torch.tensor(list(given), dtype=torch.int64, device=self.device)
            except (TypeError, ValueError, RuntimeError):
                raise _error(method, name, given, "must be whole numbers, a list or a tensor") from None
        if given.ndim != 1 or given.dtype not in (torch.int32, torch.int64):
            raise _error(method, name, given, "must be one-dimensional, int32 or int64")
        if given.device != self.device:
            raise _error(method, name, given, f"is on {given.device} but the state is on {self.device}")
        return given.long()

    # What can be done with it

    @torch.no_grad()
    def reset(self, slots: Slots = None, initial_state: Tensor | None = None) -> None:
        """Empty these slots, or all: their next token is the first of a sequence.

        Args:
            slots: their numbers, a list or a tensor [n]. Numbers outside the state have no effect.
            initial_state: [n, HV, K, V] fp32, the states to begin with; None is 0.
        """
        if initial_state is None:
            self.place.masked_fill_(self._hit("reset", slots).any(1, keepdim=True), 0)
            return
        index = self._index("reset", "slots", slots)
        wanted = (len(index), *self.start.shape[2:])
        if tuple(initial_state.shape) != wanted or initial_state.dtype != torch.float32:
            rule = f"must be fp32 and [slots, HV, K, V] = {list(wanted)}"
            raise _error("reset", "initial_state", initial_state, rule)
        self.begin(index, initial_state, 0)

    @torch.no_grad()
    def begin(self, index: Tensor, states: Tensor, chunks: int | Tensor) -> None:
        """Put sequences at the start of a chunk: after `chunks` chunks, one number or [n], with these states
        [n, HV, K, V] in fp32, in the slots [n]. Numbers outside the state have no effect."""
        if not self.slots or not len(index):
            return
        there = (index >= 0) & (index < self.slots)
        # A row without a slot repeats one that has one: the same values are written twice, and no size
        # depends on a value. If there is none, a slot is written with what it holds.
        some, first = there.any(), there.int().argmax()
        source = torch.where(there, torch.arange(len(index), device=self.device), first)
        to = torch.where(some, index[source].clamp(0, self.slots - 1), 0)
        # Written by kernels: a copy from the host would wait, and could not be captured into a graph.
        before = torch.zeros(len(index), dtype=torch.int32, device=self.device) + chunks
        before = before.int()[source]
        for t in (self.start, self.start16):
            here = to, self.half(before)
            t[here] = torch.where(some, states[source].to(t.dtype), t[here])
        seeded = (before == 0) | self.is_seeded[to]
        none = torch.zeros_like(before)
        place = torch.stack((none, before, before, seeded.int(), none), 1)
        self.place[to] = torch.where(some, place, self.place[to])

    @torch.no_grad()
    def crop(self, rows: int | Tensor, slots: Slots = None, *, validate: bool | None = None) -> None:
        """Take back the last rows of these slots, or of all: as if these tokens had not been passed.

        Rows of the present chunk can be taken back, and with `drafts` those of the chunk before it: at least
        the last 64.

        Args:
            rows: how many, one number, or a tensor [n] with one for each of `slots`.
            slots: the numbers of slots, a list or a tensor [n]. Numbers outside the state have no effect.
            validate: raise an error if there are fewer rows, which waits for a GPU. None does it on the CPU,
                and everywhere with ISOBIT_VALIDATE=1. Without it as many are taken back as there are.
        """
        hit = self._hit("crop", slots)
        if isinstance(rows, Tensor):
            if rows.dtype not in (torch.int32, torch.int64) or tuple(rows.shape) != (hit.shape[1],):
                raise _error("crop", "rows", rows, f"must be one number, or int32 or int64 [{hit.shape[1]}]")
            back = (hit * rows.to(self.device).clamp(min=0)).amax(1) if hit.shape[1] else hit.sum(1)
        elif isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise _error("crop", "rows", rows, "must be 0 or more")
        else:
            back = hit.any(1) * rows
        left, chunk = self.place[:, ROWS].long(), self.place[:, CHUNKS].long()
        stored = left + CHUNK * (chunk - self.place[:, OLDEST]).clamp(0, 1)
        check = self.device.type == "cpu" or validates(None) if validate is None else validate
        if check and bool((back > stored).any()):
            at = int((back - stored).argmax())
            rule = f"slot {at} has {int(stored[at])} rows that can be taken back, not {int(back[at])}"
            raise _error("crop", "rows", rows, rule)
        back = torch.minimum(back, stored)
        over = (back > left).long()
        self.place[:, ROWS] = (left - back + CHUNK * over).int()
        self.place[:, CHUNKS] = (chunk - over).int()

    @torch.no_grad()
    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Slot i becomes a copy of slot index[i], as beam search does. A number outside the state leaves slot
        i as it is."""
        source = self._index("reorder", "index", index)
        if len(source) != self.slots:
            raise _error("reorder", "index", index, f"must have one number a slot, {self.slots}")
        own = torch.arange(self.slots, device=self.device)
        source = torch.where((source >= 0) & (source < self.slots), source, own)
        for t in self.tensors().values():
            t.copy_(t[source])

    @torch.no_grad()
    def select(self, index: Sequence[int] | Tensor) -> "DeltaState":
        """A new state with copies of these slots. A number outside the state gives an empty slot."""
        source = self._index("select", "index", index)
        there = (source >= 0) & (source < self.slots)
        if self.slots:
            made = self._like({n: t[source.clamp(0, self.slots - 1)] for n, t in self.tensors().items()})
        else:
            made = self._like({n: t.new_zeros(len(source), *t.shape[1:]) for n, t in self.tensors().items()})
        made.place.masked_fill_(~there[:, None], 0)
        return made

    @torch.no_grad()
    def clone(self) -> "DeltaState":
        """A copy that shares no memory with this."""
        return self._like({name: t.clone() for name, t in self.tensors().items()})

    @torch.no_grad()
    def with_drafts(self) -> "DeltaState":
        """A copy that stores the chunk before the present one too, from the next end of a chunk on. Until
        then rows of the present chunk can be taken back, as before."""
        if self.drafts:
            return self.clone()
        made = DeltaState(
            self.slots, self.heads, self.value_heads, K=self.K, V=self.V, dtype=self.dtype,
            device=self.device, drafts=True,
        )  # fmt: skip
        made.place.copy_(self.place)  # without drafts, the first chunk that is stored is the present one
        every, half = torch.arange(self.slots, device=self.device), made.half(self.place[:, CHUNKS])
        for name, t in self.tensors().items():
            if name != "place":
                getattr(made, name)[every, half] = t[:, 0]
        return made

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> "DeltaState":
        """A state whose memory are these tensors, by the names that `tensors` gives them: for a cache that
        keeps them itself."""
        return DeltaState._like({name: tensors[name] for name in TENSORS})

    @staticmethod
    def _like(tensors: dict[str, Tensor]) -> "DeltaState":
        made = object.__new__(DeltaState)
        for name, t in tensors.items():
            setattr(made, name, t)
        return made
