"""Computes log-probabilities, the loss, and all gradients, chunk after chunk.

If the probabilities of a chunk fit in the workspace, its three products follow one another. Only dhidden,
dweight and dbias in fp32, and the queued rows whose segment is not complete yet, outlive a chunk.

If no probabilities are stored there is one chunk, and its logits are computed twice: now and in the backward,
as in `linear_logp`. Then only the gradients of log-probabilities and entropies are known in advance.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.ops.linear_logp.op import forward
from isobit.ops.linear_policy_loss import chunk_op as chunk_ops
from isobit.ops.linear_policy_loss.batch import Batch, Chunk, Inputs
from isobit.ops.linear_policy_loss.chunk_buffers import CHUNK_BYTES, ChunkBuffers, capacity
from isobit.ops.linear_policy_loss.loss_call import Loss, Share, widened

#: Options of `linear_logp` that this op does not have.
PLAIN: dict[str, Any] = dict.fromkeys(("softcap", "logit_scale", "logits_dtype", "vocab_size"))


class Gradients(NamedTuple):
    """In fp32, of the loss itself (not yet scaled); None for what is not wanted or postponed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Postponed(NamedTuple):
    """d-logits and hidden states of `rows` rows, from which dweight is still to be computed."""

    memory: Tensor
    queue: Tensor
    rows: Tensor

    def dweight(self, vocab: int, factor: Tensor) -> Tensor:
        """dweight times a factor, rounded."""
        own = {"memory": self.memory, "queue": self.queue, "count": self.rows}
        dweight: Tensor = chunk_ops.finish(**own, vocab=vocab, factor=factor)
        return dweight


class Differentiated(NamedTuple):
    """The results of all chunks."""

    sums: "Sums"
    gradients: Gradients
    postponed: Postponed | None = None


@dataclass(frozen=True)
class Call:
    """A call that satisfies the contract. `check`: also see whether shares of the loss add up."""

    args: Mapping[str, Any]
    backend: str
    batch: Batch
    inputs: Inputs
    loss: Loss
    check: bool
    #: (logp, entropy) of all rows, which are one chunk, from a vocabulary that ranks share.
    of_ranks: Callable[[], tuple[Tensor, Tensor | None]] | None = None

    @cached_property
    def workspace_bytes(self) -> int:
        given = self.args["workspace_bytes"]
        return CHUNK_BYTES if given is None else given

    @cached_property
    def chunks(self) -> list[Chunk]:
        hidden, (V, D) = self.args["hidden"], self.args["weight"].shape
        most = capacity(self.backend, V, D, hidden.dtype, self.workspace_bytes)
        return self.batch.chunks(most, self.loss.by_rows)

    @property
    def fits(self) -> bool:
        """Whether the probabilities of any chunk fit in the workspace, or there are no rows at all."""
        return len(self.chunks) != 1 or self.chunks[0].fits

    @cached_property
    def controls(self) -> dict[str, Any]:
        """The backend is already chosen, and values are already validated."""
        return {"backend": self.backend, "validate": False}

    def of_rows(self, chunk: Chunk) -> dict[str, Any]:
        """The chunk's part of the arguments, and those that all rows share."""
        names = ("hidden", "token_ids", "mask", "temperature")
        of_chunk = {name: self.batch.of_rows(self.args[name], chunk) for name in names}
        return of_chunk | {name: self.args[name] for name in ("weight", "bias", "ignore_index")}


def _forward(
    call: Call, chunk: Chunk, stats: bool = False, workspace_bytes: int | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logp, entropy, stats) of rows, without storing probabilities. `workspace_bytes` are those of a later
    backward."""
    if call.of_ranks is not None:
        return (*call.of_ranks(), None)
    logp, entropy, _, row_stats, *_ = forward(
        **call.of_rows(chunk), **PLAIN, padded_vocab=call.args["padded_vocab"],
        return_entropy=call.args["entropy"], return_stats=stats, workspace_bytes=workspace_bytes,
        **call.controls,
    )  # fmt: skip
    return logp, entropy if call.args["entropy"] else None, row_stats


class Computed(NamedTuple):
    """A chunk with its results and its share."""

    chunk: Chunk
    logp: Tensor
    entropy: Tensor | None
    share: Share


class Sums:
    """Accumulates over chunks, in their order: the loss and its sums."""

    def __init__(self, call: Call, gradients: bool) -> None:
        self.loss: Tensor
        self.stats: dict[str, Any]
        self._call, self._gradients, self._chunks = call, gradients, 0
        self._unchecked = call.check and not torch.is_inference_mode_enabled()
        self._last: Computed | None = None  # the last chunk, while nothing has been checked

    def add_no_rows(self) -> None:
        """Run the loss where the batch has no rows, so that its sums have their names there too."""
        args, batch = self._call.args, self._call.batch
        wide = torch.promote_types(args["hidden"].dtype, torch.float32)
        logp = torch.zeros(batch.shape, dtype=wide, device=args["hidden"].device)
        self.add(
            batch.everything, batch.everything, logp, torch.zeros_like(logp) if args["entropy"] else None
        )

    def add(self, chunk: Chunk, of: Chunk, logp: Tensor, entropy: Tensor | None) -> Share:
        """Run the loss on a chunk of the rows that have these log-probabilities."""
        call = self._call
        share = self._share(chunk, of, logp, entropy, self._gradients)
        if self._unchecked:
            self._check(Computed(chunk, *self._part(chunk, of, logp, entropy), share))
        loss, sums = widened(share.loss), {name: widened(value) for name, value in share.sums.items()}
        if self._chunks == 0:
            self.loss, self.stats = loss, sums
        elif sums.keys() != self.stats.keys():
            names = [sorted(keys) for keys in (self.stats, sums)]
            raise call.loss.error(
                f"must return the same sums for all chunks; got {names[0]}, then {names[1]}"
            )
        else:
            self.loss = self.loss + loss
            self.stats = {name: value + sums[name] for name, value in self.stats.items()}
        self._chunks += 1
        return share

    def _check(self, now: Computed) -> None:
        """See whether shares add up: those of the halves of a chunk, or, where every chunk is a single unit,
        those of two chunks."""
        before, self._last = self._last, now
        whole, logp, entropy, known = now.chunk, now.logp, now.entropy, {now.chunk: now.share}
        batch = self._call.batch
        parts = batch.halves(whole)
        if not parts and (before is None or batch.is_part(before.chunk) or batch.is_part(whole)):
            return
        if not parts and before is not None:
            parts, known[before.chunk] = [before.chunk, whole], before.share
            whole, logp = before.chunk.joined(whole), torch.cat((before.logp, logp))
            if before.entropy is not None and entropy is not None:
                entropy = torch.cat((before.entropy, entropy))
        if not self._gradients:  # the check compares gradients too
            known = {}
        shares = [known.get(p) or self._share(p, whole, logp, entropy, None) for p in (whole, *parts)]
        self._call.loss.together(shares[0], shares[1:], logp)
        self._unchecked, self._last = False, None

    def _share(
        self, part: Chunk, of: Chunk, logp: Tensor, entropy: Tensor | None, gradients: bool | None
    ) -> Share:
        """The share of a part of the rows that have these log-probabilities."""
        call = self._call
        where = f"rows {part.first} to {part.end} of {call.batch.rows}"
        results = self._part(part, of, logp, entropy)
        return call.loss.share(*results, call.inputs.of(part), gradients, where)

    def _part(
        self, part: Chunk, of: Chunk, logp: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(logp, entropy) of a part of the rows that have these."""
        cut = self._call.batch.part
        return cut(logp, part, of), None if entropy is None else cut(entropy, part, of)


def evaluate(call: Call) -> Sums:
    """The loss only. No probabilities are stored, so all log-probabilities are computed at once. The loss
    runs on the same chunks as with gradients."""
    sums = Sums(call, gradients=False)
    for whole in call.batch.chunks(None):  # one chunk, or none if there are no rows
        logp, entropy, _ = _forward(call, whole)
        for chunk in call.chunks:
            sums.add(chunk, whole, logp, entropy)
    if not call.chunks:
        sums.add_no_rows()
    return sums


def without_probs(call: Call) -> tuple[Sums, Share, list[Tensor]]:
    """The loss of all rows, the gradients of their log-probabilities and entropies, and these themselves.
    Their own backward computes logits a second time."""
    args, sums, (chunk,) = call.args, Sums(call, gradients=True), call.chunks
    workspace_bytes = args["workspace_bytes"]
    if workspace_bytes is not None and call.backend == "hopper" and args["weight"].requires_grad:
        # There are no fp32 sums of dweight, so their memory can hold d-logits too, except for sums of
        # dhidden.
        (V, D), N = args["weight"].shape, call.batch.rows
        workspace_bytes += max(0, 4 * V * D - 4 * N * D)
    logp, entropy, _ = _forward(call, chunk, workspace_bytes=workspace_bytes)
    share = sums.add(chunk, chunk, logp, entropy)
    return sums, share, [logp] if entropy is None else [logp, entropy]


def differentiate(call: Call, wanted: Mapping[str, bool]) -> Differentiated:
    """The loss, and the wanted gradients, chunk after chunk."""
    hidden, chunks = call.args["hidden"], call.chunks
    # On Hopper dweight of a single chunk is left to the backward, which knows its factor.
    postpone = call.backend == "hopper" and wanted["weight"] and len(chunks) == 1
    now = {**wanted, "weight": wanted["weight"] and not postpone}
    sums, gradients = Sums(call, gradients=True), _new(call, now, torch.empty if chunks else torch.zeros)
    stored, recomputed = (max((c.rows for c in chunks if c.fits is f), default=0) for f in (True, False))
    queues = (wanted["weight"] or wanted["bias"]) and len(chunks) > 1
    V = len(call.args["weight"])
    buffers = ChunkBuffers.of(call.backend, hidden, V, stored, recomputed, queues, call.workspace_bytes)
    queued = torch.zeros(1, dtype=torch.int32, device=hidden.device)
    for i, chunk in enumerate(chunks):
        rows, own = call.of_rows(chunk), {**buffers._asdict(), "queued": queued}
        if chunk.fits:
            place = {name: own[name] for name in ("memory", "kept_base", "queued")}
            options = {"return_entropy": call.args["entropy"], **call.controls}
            logp, entropy, stats = chunk_ops.forward(**rows, **place, **options)
        else:
            logp, entropy, stats = _forward(call, chunk, stats=True)
        # One that was not requested is an empty tensor if the dispatcher saw the call, as for a subclass.
        entropy = entropy if call.args["entropy"] else None
        share = sums.add(chunk, chunk, logp, entropy)
        queued = chunk_ops.backward(
            **rows, **own, stats=stats, entropy=entropy, dlogp=share.dlogp, dentropy=share.dentropy,
            **{f"d{name}": g for name, g in gradients._asdict().items()}, first_row=chunk.first,
            kept=chunk.fits, first=i == 0, last=i == len(chunks) - 1, postpone=postpone, **call.controls,
        )  # fmt: skip
    if not chunks:
        sums.add_no_rows()
    if not postpone:
        return Differentiated(sums, gradients)
    assert buffers.queue is not None
    return Differentiated(sums, gradients, Postponed(buffers.memory, buffers.queue, queued))


def _new(call: Call, wanted: Mapping[str, bool], make: Callable[..., Tensor]) -> Gradients:
    """The wanted gradients, in fp32."""
    hidden, weight = call.args["hidden"], call.args["weight"]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    shapes = ((call.batch.rows, hidden.shape[-1]), weight.shape, weight.shape[:1])
    names = zip(Gradients._fields, shapes, strict=True)
    return Gradients(
        *(make(shape, dtype=wide, device=hidden.device) if wanted[name] else None for name, shape in names)
    )
