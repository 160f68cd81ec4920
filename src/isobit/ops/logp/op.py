"""Log-probability of chosen tokens from logits.

With z = logits / temperature (a number, or one for every row), for every row:

    lse     = log sum_v exp(z[v])
    logp    = z[token_id] - lse
    entropy = lse - sum_v softmax(z)[v] * z[v]

A masked row is one whose token id is `ignore_index` or whose mask is 0. It gives 0 and gets a zero gradient,
and its values reach no result.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float, Int, Like, Mask
from isobit.frame.device import hopper_cannot_run, triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.kernels.host import tokens
from isobit.numerics import Numerics


@public_op("logp")
def forward(return_stats: bool = False) -> tuple[
    F32[Tensor, "*"],
    F32[Tensor, "* if return_entropy"],
    F32[Tensor, "* if return_lse"],
    F32[Tensor, "2 * if return_stats"],
]:  # fmt: skip
    """(logp, entropy, lse, stats): stats are a row's m = max(logits) and sum of exp((logit - m) / T).
    Autograd asks for them where a backward may follow."""


@overload
def logp(
    logits: Tensor, token_ids: Tensor, *, return_entropy: Literal[True], **options: Any
) -> tuple[Tensor, ...]: ...
@overload
def logp(
    logits: Tensor, token_ids: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, ...]: ...
@overload
def logp(logits: Tensor, token_ids: Tensor, **options: Any) -> Tensor: ...
@forward.public  # type: ignore[misc]
def logp(  # overloads take any options
    logits: Float[Tensor, "* V"],
    token_ids: Int[Tensor, "*"],
    *,
    mask: Mask[Tensor, "*"] | None = None,
    ignore_index: int = -100,
    temperature: float | F32[Tensor, "*"] = 1.0,
    return_entropy: bool = False,
    return_lse: bool = False,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probabilities of `token_ids` under softmax(logits / temperature), in fp32.

    Args:
        logits: [*, V] in bf16, fp16, fp32 (or fp64, on the reference backend). Any leading shape and
            strides, the last dimension contiguous: `logits[:, :-1]` is read in place.
        token_ids: [*], int32 or int64. In a live row an id outside [0, V) is a ContractError on
            CPU tensors; on a GPU it makes that row's results and gradients NaN, and no read is out of
            bounds.
        mask: [*], bool or integer; rows where it is 0 are masked.
        ignore_index: rows with this token id are masked, too. Masked rows give 0 and get a zero
            gradient, and their values, NaN included, reach no result (the kernels do not read them).
        temperature: a positive number that divides the logits, or an fp32 tensor [*] with one for every row
            (it gets no gradient).
        return_entropy, return_lse: also return the entropy of the distribution and the log-sum-exp,
            both differentiable.
        validate: check ids and temperatures on a GPU too (a host sync). None checks on CPU tensors, and
            everywhere with ISOBIT_VALIDATE=1.
        numerics: the numerics class that the result must have, "lse/triton-1", or "lse/1" (bits of
            `linear_logp`, on a Hopper GPU); None takes that of the backend that serves, which
            `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton", "hopper" or "reference"; None takes the first that can serve.

    Returns:
        logp [*], or (logp, entropy), (logp, lse), (logp, entropy, lse) as requested.

    On the triton backend a row's bits do not depend on the other rows, on N, on strides or on alignment
    (numerics class lse/triton-1), and the gradient costs one read and one write of the logits.

    Example:
        >>> import torch, isobit
        >>> logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
        >>> logp = isobit.logp(logits, torch.tensor([2, 0]))
        >>> logp
        tensor([-0.4076, -1.0986], grad_fn=<LogpBackward>)
        >>> logp.sum().backward()
        >>> logits.grad[1]
        tensor([ 0.6667, -0.3333, -0.3333])
    """
    out, entropy, lse, _ = forward(
        logits=logits, token_ids=token_ids, mask=mask, ignore_index=ignore_index, temperature=temperature,
        return_entropy=return_entropy, return_lse=return_lse, validate=validate, numerics=numerics,
        backend=backend,
    )  # fmt: skip
    if not (return_entropy or return_lse):
        return out
    return (out,) + ((entropy,) if return_entropy else ()) + ((lse,) if return_lse else ())


@op("logp_bwd", like=forward.params("logits", "token_ids", "mask", ..., "ignore_index", "temperature"))
def backward(
    stats: F32[Tensor, "2 *"],
    entropy: F32[Tensor, "*"] | None,
    dlogp: F32[Tensor, "*"] | None,
    dentropy: F32[Tensor, "*"] | None,
    dlse: F32[Tensor, "*"] | None,
) -> Like[Tensor, "logits"]:
    """dlogits, from the gradients of any of the outputs."""


# Rules that annotations cannot express


def _has_tokens(contract: Contract, args: dict[str, Any]) -> None:
    if args["logits"].shape[-1] == 0:
        raise contract.error("logits", args["logits"], "V must be at least 1")


def _ids_in_range(contract: Contract, args: dict[str, Any]) -> None:
    tokens.ids_below(args["logits"].shape[-1], contract, args)


forward.rule(tokens.scalars, _has_tokens)
forward.value_rule(_ids_in_range, tokens.temperatures_are_positive)
backward.rule(tokens.scalars, _has_tokens, tokens.entropy_is_there)


# Backends, fastest first


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    if args["logits"].dtype == torch.float64:
        return "logits are fp64; the kernels compute in fp32"
    return triton_cannot_run(args["logits"].device)


forward.backend(
    "triton",
    run="kernels_triton:logp",
    numerics="lse/triton-1",
    when=_triton_cannot_serve,
    interpreted=True,
    launches=True,
)


backward.backend(
    "triton",
    run="kernels_triton:logp_bwd",
    numerics="lse/triton-1",
    when=_triton_cannot_serve,
    interpreted=True,
    launches=True,
)


forward.backend(
    "hopper",
    run="kernels_hopper:logp",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    when="kernels_hopper:why_not",
    launches=True,
)


# The gradient is elementwise, from the sums of the forward, so there is no order of additions.
backward.backend("hopper", run="kernels_triton:logp_bwd", numerics="lse/1", cannot_run=hopper_cannot_run)


forward.backend("reference", run="reference:logp", numerics=NONE)


backward.backend("reference", run="reference:logp_bwd", numerics=NONE)


# Autograd, once for all backends

forward.derivative(
    "logits", by=backward, outputs=("logp", "entropy", "lse", "stats"), constant=("stats",),
    flags=("return_stats",),
)  # fmt: skip
backward.not_differentiable(
    "isobit.logp has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate a log_softmax of the logits instead where you need one."
)
