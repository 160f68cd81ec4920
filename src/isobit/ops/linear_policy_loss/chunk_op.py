"""`linear_logp` and its gradients, one chunk of rows at a time. For `linear_policy_loss`, which knows the
gradients of a chunk's outputs before it computes the next chunk.

The forward of a chunk stores its probabilities in the memory that it is given. The backward turns them into
d-logits in place. From these it computes dhidden of the chunk's rows, and adds the chunk's terms to dweight
and dbias. All three are fp32: nothing is rounded to the dtype of the parameters yet.

Sums over tokens are made in segments of 512 rows, but a chunk may end anywhere. Rows after its last whole
segment wait in the *queue*, with their d-logits, for the next chunk. So dweight and dbias have the bits of
`linear_logp` on all rows at once, wherever chunks end.

When the gradient of the loss is known, one more op multiplies them by it and rounds them. If all rows are one
chunk, dweight may be postponed: then yet another op computes it, multiplies it and rounds it.

Two backends support this: `hopper`, which stores probabilities in 16 bits, and `reference`, which stores
logits in fp32, needs no queue and postpones nothing. On `triton` all rows are one chunk, and its logits are
computed twice.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float, Int
from isobit.frame.device import hopper_cannot_run
from isobit.frame.op import op
from isobit.kernels.host import tokens
from isobit.ops.linear_logp.op import forward as linear_logp

# The contract


_ROWS = ("hidden", "weight", "token_ids", "bias", "mask")


@op("linear_logp_chunk", like=linear_logp.params(*_ROWS, "ignore_index", "temperature"))
def forward(
    memory: Float[Tensor, "M; written"],
    kept_base: F32[Tensor, "R G 4; written"] | None,
    queued: Int[Tensor, "1"] | None,
    return_entropy: bool,
) -> tuple[F32[Tensor, "*"], F32[Tensor, "* if return_entropy"], F32[Tensor, "2 *"]]:
    """(logp, entropy, stats); memory and kept_base hold what the backward needs."""


@op("linear_logp_chunk_bwd", like=linear_logp.params(*_ROWS))
def backward(
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
    """The number of rows in the queue after this chunk, out of those that were `queued` and its own. The
    chunk is the rows of dhidden from `first_row` on. `first`: dweight and dbias are not initialised yet.
    `last`: no row may stay in the queue. `kept`: the probabilities of the chunk fit in memory, and the
    forward has stored them there. `postpone`: leave dweight to `linear_logp_chunk_dw` and all rows in the
    queue; only with a single chunk whose probabilities are stored."""


@op("linear_logp_chunk_dw", sizes=lambda args: {"V": args["vocab"]})
def finish(
    memory: Float[Tensor, "M"],
    queue: Float[Tensor, "Q D"],
    count: Int[Tensor, "1"],
    factor: F32[Tensor, ""],
    vocab: int,
) -> Float[Tensor, "V D in queue"]:
    """factor dz^T hidden: dweight from the `count` rows in memory and queue, times a factor, rounded once."""


@op("linear_logp_chunk_rounded")
def rounded(
    sums: F32[Tensor, "*"], factor: F32[Tensor, ""], dtype: torch.dtype
) -> Float[Tensor, "* in dtype"]:
    """sums * factor, rounded once."""


def _has_rows(contract: Contract, args: dict[str, Any]) -> None:
    if args["token_ids"].numel() == 0:
        raise contract.error("token_ids", args["token_ids"], "a chunk has at least one row")


def _contiguous(contract: Contract, args: dict[str, Any]) -> None:
    if not args["sums"].is_contiguous():
        raise contract.error("sums", args["sums"], "must be contiguous")


def _postponed(contract: Contract, args: dict[str, Any]) -> None:
    if args["postpone"] and not (args["first"] and args["last"] and args["kept"]):
        raise contract.error("postpone", True, "only where there is one chunk, and it was kept")


forward.rule(tokens.scalars, _has_rows)
backward.rule(tokens.scalars, _has_rows, tokens.entropy_is_there, _postponed)
rounded.rule(_contiguous)


# Backends, fastest first


def _hopper_cannot_serve(args: dict[str, Any]) -> str | None:
    from isobit.ops.linear_logp.kernels_hopper import why_not

    return why_not(args | {"softcap": None, "logit_scale": None})


forward.backend(
    "hopper",
    run="kernels_hopper:linear_logp_chunk",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    when=_hopper_cannot_serve,
    launches=True,
)


backward.backend(
    "hopper",
    run="kernels_hopper:linear_logp_chunk_bwd",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    when=_hopper_cannot_serve,
    launches=True,
)


forward.backend("reference", run="reference_chunk:linear_logp_chunk", numerics=NONE)


backward.backend("reference", run="reference_chunk:linear_logp_chunk_bwd", numerics=NONE)


finish.backend(
    "hopper",
    run="kernels_hopper:linear_logp_chunk_dw",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    launches=True,
)


rounded.backend(
    "hopper",
    run="kernels_hopper:linear_logp_chunk_rounded",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    launches=True,
)


rounded.backend("reference", run="reference_chunk:linear_logp_chunk_rounded", numerics=NONE)


for declared in (forward, backward, finish, rounded):
    declared.not_differentiable(
        "isobit.linear_logp_chunk is a part of a chunked call that computes gradients itself: call it under "
        "torch.no_grad()."
    )
