"""`linear_logp` and its gradients a chunk of rows at a time, for whoever knows a chunk's gradients before the
next chunk is there: `linear_policy_loss`.

A forward keeps the probabilities of its chunk in memory that it is given. The backward that follows makes
d-logits of them in the same memory, and from those dhidden of the chunk's rows, and its terms of dweight and
dbias, which it adds to what the chunks before have left. All three are in fp32: nothing is rounded to the
dtype of the parameters yet.

Sums over tokens are made in segments of 512 rows, and where a chunk ends is free. Rows behind its last whole
segment wait, with their d-logits, for the next chunk: the *queue*. So the bits of dweight and dbias are those
of `linear_logp` on all rows at once, wherever chunks end.

Where all rows are one chunk, dweight may be left for later. An op of its own makes it then, multiplies it by
a factor and rounds it.

Two backends can do it: `hopper`, which keeps 16 bits a probability, and `reference`, which keeps logits in
fp32, needs no queue and postpones nothing. On `triton` all rows are one chunk, and its logits are computed
twice.
"""

from typing import Any

from torch import Tensor

from isobit.backend import NONE, Lazy
from isobit.blocks import tokens
from isobit.blocks.devices import hopper_cannot_run
from isobit.contract import F32, Contract, Float, Int, Mask
from isobit.op import op

# The contract


@op("linear_logp_chunk")
def forward(
    hidden: Float[Tensor, "* D"],
    weight: Float[Tensor, "V D"],
    token_ids: Int[Tensor, "*"],
    bias: Float[Tensor, "V"] | None,
    mask: Mask[Tensor, "*"] | None,
    ignore_index: int,
    temperature: float | F32[Tensor, "*"],
    memory: Float[Tensor, "M; written"],
    kept_base: F32[Tensor, "R G 4; written"] | None,
    queued: Int[Tensor, "1"] | None,
    return_entropy: bool,
) -> tuple[F32[Tensor, "*"], F32[Tensor, "* if return_entropy"], F32[Tensor, "2 *"]]:
    """(logp, entropy, stats); memory and kept_base hold what the backward wants to know."""


@op("linear_logp_chunk_bwd")
def backward(
    hidden: Float[Tensor, "* D"],
    weight: Float[Tensor, "V D"],
    token_ids: Int[Tensor, "*"],
    bias: Float[Tensor, "V"] | None,
    mask: Mask[Tensor, "*"] | None,
    stats: F32[Tensor, "2 *"],
    entropy: F32[Tensor, "*"] | None,
    dlogp: F32[Tensor, "*"] | None,
    dentropy: F32[Tensor, "*"] | None,
    ignore_index: int,
    temperature: float | F32[Tensor, "*"],
    memory: Float[Tensor, "M; written"],
    kept_base: F32[Tensor, "R G 4"] | None,
    queue: Float[Tensor, "Q D; written"] | None,
    queue_rows: Int[Tensor, "Q; written"] | None,
    queued: Int[Tensor, "1"] | None,
    dhidden: F32[Tensor, "N D; written"] | None,
    dweight: F32[Tensor, "V D; written"] | None,
    dbias: F32[Tensor, "V; written"] | None,
    first_row: int,
    kept: bool,
    first: bool,
    last: bool,
    postpone: bool,
) -> Int[Tensor, "1"]:
    """How many rows wait after this chunk, of those that were `queued` and its own. Its rows are those of
    dhidden from `first_row` on. `first`: dweight and dbias hold nothing yet; `last`: no row may wait.
    `kept`: there is room for its probabilities in memory, and the forward has kept them there. `postpone`:
    dweight is left to `linear_logp_chunk_dw`, for which all rows wait; only where there is one chunk, and it
    was kept."""


@op("linear_logp_chunk_dw", sizes=lambda args: {"V": args["vocab"]})
def finish(
    memory: Float[Tensor, "M"],
    queue: Float[Tensor, "Q D"],
    count: Int[Tensor, "1"],
    factor: F32[Tensor, ""],
    vocab: int,
) -> Float[Tensor, "V D in queue"]:
    """factor dz^T hidden: dweight, from the `count` rows that a chunk has left in memory and queue, times a
    factor and rounded once."""


def _has_rows(contract: Contract, args: dict[str, Any]) -> None:
    if args["token_ids"].numel() == 0:
        raise contract.error("token_ids", args["token_ids"], "a chunk has at least one row")


for declared in (forward, backward):
    declared.rule(tokens.scalars)
    declared.rule(_has_rows)
backward.rule(tokens.entropy_is_there)


@backward.rule
def _postponed(contract: Contract, args: dict[str, Any]) -> None:
    if args["postpone"] and not (args["first"] and args["last"] and args["kept"]):
        raise contract.error("postpone", True, "only where there is one chunk, and it was kept")


# Backends, fastest first

_reference = Lazy(f"{__package__}.reference_chunk")
_hopper, _hopper_chunk = (Lazy(f"{__package__}.kernels_hopper{name}") for name in ("", "_chunk"))


def _hopper_cannot_serve(args: dict[str, Any]) -> str | None:
    options = {"softcap": None, "logit_scale": None}
    return hopper_cannot_run(args["hidden"].device) or _hopper.why_not(args | options)


@forward.backend("hopper", numerics="lse/1", when=_hopper_cannot_serve, launches=True)
def _(**args: Any) -> Any:
    return _hopper_chunk.linear_logp_chunk(**args)


@backward.backend("hopper", numerics="lse/1", when=_hopper_cannot_serve, launches=True)
def _(**args: Any) -> Any:
    return _hopper_chunk.linear_logp_chunk_bwd(**args)


@forward.backend("reference", numerics=NONE)
def _(**args: Any) -> Any:
    return _reference.linear_logp_chunk(**args)


@backward.backend("reference", numerics=NONE)
def _(**args: Any) -> Any:
    return _reference.linear_logp_chunk_bwd(**args)


@finish.backend(
    "hopper", numerics="lse/1", when=lambda args: hopper_cannot_run(args["memory"].device), launches=True
)
def _(**args: Any) -> Any:
    return _hopper_chunk.linear_logp_chunk_dw(**args)


for declared in (forward, backward, finish):
    declared.not_differentiable(
        "isobit.linear_logp_chunk takes part in a sweep that computes gradients itself: call it under "
        "torch.no_grad()."
    )
