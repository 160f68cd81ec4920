"""Ratio of a policy to the one that acted, and its KL penalty against a reference, from logits.

For every row, with logp and ref_logp the log-probabilities of its token under softmax(logits / temperature)
of the policy's and of the reference's logits (or `ref_logp` itself):

    ratio = exp(logp - old_logp)
    d     = ref_logp - logp
    kl    = expm1(d) - d            the estimator k3 of KL(policy || reference): at least 0

Without `old_logp` the policy itself produced the samples: ratio is 1, and its gradient is that of logp. Two
log-probabilities of -inf are equal: the ratio is 1 and d is 0 there, too. Only the policy's logits get a
gradient:

    dlogp = dratio * ratio - dkl * expm1(d)        plus the gradient of logp itself, if it was requested

and from there as in `logp`. A masked row, whose token id is `ignore_index` or whose mask is 0,
has ratio 1, kl 0 and gradient 0, and its values reach no result.
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


@public_op("ratio_kl")
def forward(return_stats: bool = False) -> tuple[
    F32[Tensor, "*"],
    F32[Tensor, "* if return_kl"],
    F32[Tensor, "* if return_logp"],
    F32[Tensor, "* if return_entropy"],
    F32[Tensor, "2 * if return_stats"],
    F32[Tensor, "2 * if return_stats"],
]:  # fmt: skip
    """(ratio, kl, logp, entropy, stats, slopes). stats are a row's m = max(policy_logits) and sum of
    exp((logit - m) / T), slopes the derivatives of ratio and of kl with respect to logp. Autograd asks for
    them where a backward may follow."""


@overload
def ratio_kl(
    policy_logits: Tensor, ref_logits: Tensor | None, token_ids: Tensor, *, return_logp: Literal[True],
    **options: Any,
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def ratio_kl(
    policy_logits: Tensor, ref_logits: Tensor | None, token_ids: Tensor, *, return_entropy: Literal[True],
    **options: Any,
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def ratio_kl(
    policy_logits: Tensor, ref_logits: Tensor | None, token_ids: Tensor, *, return_kl: Literal[False],
    **options: Any,
) -> Tensor: ...  # fmt: skip
@overload
def ratio_kl(
    policy_logits: Tensor, ref_logits: Tensor | None, token_ids: Tensor, **options: Any
) -> tuple[Tensor, Tensor]: ...
@forward.public  # type: ignore[misc]
def ratio_kl(  # overloads take any options
    policy_logits: Float[Tensor, "* V"],
    ref_logits: Float[Tensor, "* V"] | None,
    token_ids: Int[Tensor, "*"],
    *,
    old_logp: F32[Tensor, "*"] | None = None,
    mask: Mask[Tensor, "*"] | None = None,
    ignore_index: int = -100,
    ref_logp: F32[Tensor, "*"] | None = None,
    temperature: float | F32[Tensor, "*"] = 1.0,
    return_kl: bool = True,
    return_logp: bool = False,
    return_entropy: bool = False,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Policy ratio and KL penalty of `token_ids`, from the logits of a policy and of a reference, in fp32.

        ratio = exp(logp - old_logp)
        kl    = expm1(d) - d,  d = ref_logp - logp

    Args:
        policy_logits: [*, V] in bf16, fp16, fp32 (or fp64, on the reference backend). Any leading shape and
            strides, the last dimension contiguous: `logits[:, :-1]` is read in place. Gradients go here.
        ref_logits: the same shape, in any of these dtypes and with strides of its own. It gets no gradient.
            None with `ref_logp`, or with `return_kl=False`, which reads no reference.
        token_ids: [*], int32 or int64. In a live row an id outside [0, V) is a ContractError on
            CPU tensors; on a GPU it makes that row's results and gradients NaN, and no read is out of
            bounds.
        old_logp: [*] in fp32, under the policy that produced the samples. If it came from `isobit.logp` on
            the same logits in the same numerics class, the ratio is exactly 1. None means that this policy
            produced them: ratio 1, with the gradient of logp.
        mask: [*], bool or integer; rows where it is 0 are masked.
        ignore_index: rows with this token id are masked, too. Masked rows have ratio 1, kl 0 and a
            zero gradient, and their values, NaN included, reach no result (the kernels do not read them).
        ref_logp: [*] in fp32, in place of `ref_logits`.
        temperature: a positive number that divides both logits, or an fp32 tensor [*] with one for every row
            (it gets no gradient).
        return_kl: False leaves kl out.
        return_logp, return_entropy: also return the policy's log-probabilities and the entropy of its
            distribution, both differentiable.
        validate: check ids and temperatures on a GPU too (a host sync). None checks on CPU tensors, and
            everywhere with ISOBIT_VALIDATE=1.
        numerics: the numerics class that the result must have, "lse/triton-1", or "lse/1" (bits of
            `linear_logp`, on a Hopper GPU); None takes that of the backend that serves, which
            `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton", "hopper" or "reference"; None takes the first that can serve.

    Returns:
        (ratio, kl), followed by logp and entropy as requested; `ratio` alone if nothing else is left.

    On the triton backend all logits are read once; a row's bits do not depend on the other
    rows, on N, on strides or on alignment (numerics class lse/triton-1); logp has the bits of `isobit.logp`;
    and the gradient costs one read and one write of the policy's logits.

    Example:
        >>> import torch, isobit
        >>> policy = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
        >>> reference, token_ids = torch.zeros(2, 3), torch.tensor([2, 0])
        >>> old_logp = isobit.logp(policy.detach(), token_ids)
        >>> ratio, kl = isobit.ratio_kl(policy, reference, token_ids, old_logp=old_logp)
        >>> ratio
        tensor([1., 1.], grad_fn=<RatioKlBackward>)
        >>> kl
        tensor([0.1921, 0.0000], grad_fn=<RatioKlBackward>)
        >>> (ratio + 0.1 * kl).sum().backward()
        >>> policy.grad[1]
        tensor([ 0.6667, -0.3333, -0.3333])
    """
    ratio, kl, logp, entropy, *_ = forward(
        policy_logits=policy_logits, ref_logits=ref_logits, token_ids=token_ids, old_logp=old_logp,
        mask=mask, ignore_index=ignore_index, ref_logp=ref_logp, temperature=temperature,
        return_kl=return_kl, return_logp=return_logp, return_entropy=return_entropy, validate=validate,
        numerics=numerics, backend=backend,
    )  # fmt: skip
    wanted = ((return_kl, kl), (return_logp, logp), (return_entropy, entropy))
    more = tuple(output for asked, output in wanted if asked)
    return (ratio, *more) if more else ratio


@op(
    "ratio_kl_bwd",
    like=forward.params("policy_logits", "token_ids", "mask", ..., "ignore_index", "temperature"),
)
def backward(
    stats: F32[Tensor, "2 *"],
    slopes: F32[Tensor, "2 *"],
    entropy: F32[Tensor, "*"] | None,
    dratio: F32[Tensor, "*"] | None,
    dkl: F32[Tensor, "*"] | None,
    dlogp: F32[Tensor, "*"] | None,
    dentropy: F32[Tensor, "*"] | None,
) -> Like[Tensor, "policy_logits"]:
    """The gradient of policy_logits, from the gradients of any of the outputs. slopes are read for those of
    ratio and kl."""


# Rules that annotations cannot express


def _has_tokens(contract: Contract, args: dict[str, Any]) -> None:
    if args["policy_logits"].shape[-1] == 0:
        raise contract.error("policy_logits", args["policy_logits"], "V must be at least 1")


def _one_reference(contract: Contract, args: dict[str, Any]) -> None:
    logits, logp = args["ref_logits"], args["ref_logp"]
    if logits is not None and logp is not None:
        rule = "is given in addition to ref_logits; one of the two must be None"
        raise contract.error("ref_logp", logp, rule)
    if args["return_kl"] and logits is None and logp is None:
        rule = "a kl needs it, or ref_logp; with return_kl=False no reference is read"
        raise contract.error("ref_logits", None, rule)


def _log_probs_are_fp32(contract: Contract, args: dict[str, Any]) -> None:
    for name in ("old_logp", "ref_logp"):
        given = args[name]
        if given is not None and given.dtype not in (torch.float32, args["policy_logits"].dtype):
            raise contract.error(name, given, "dtype must be fp32, or fp64 if policy_logits are fp64")


def _ids_in_range(contract: Contract, args: dict[str, Any]) -> None:
    tokens.ids_below(args["policy_logits"].shape[-1], contract, args)


forward.rule(tokens.scalars, _has_tokens, _one_reference, _log_probs_are_fp32)
forward.value_rule(_ids_in_range, tokens.temperatures_are_positive)
backward.rule(tokens.scalars, _has_tokens, tokens.entropy_is_there)


# Backends, fastest first


def _triton_cannot_serve(args: dict[str, Any]) -> str | None:
    for name in ("policy_logits", "ref_logits"):
        if args.get(name) is not None and args[name].dtype == torch.float64:
            return f"{name} are fp64; the kernels compute in fp32"
    return triton_cannot_run(args["policy_logits"].device)


forward.backend(
    "triton",
    run="kernels_triton:ratio_kl",
    numerics="lse/triton-1",
    when=_triton_cannot_serve,
    interpreted=True,
    launches=True,
)


backward.backend(
    "triton",
    run="kernels_triton:ratio_kl_bwd",
    numerics="lse/triton-1",
    when=_triton_cannot_serve,
    interpreted=True,
    launches=True,
)


forward.backend(
    "hopper",
    run="kernels_hopper:ratio_kl",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    when="kernels_hopper:why_not",
    launches=True,
)


# The gradient is elementwise, from the sums of the forward, so there is no order of additions.
backward.backend(
    "hopper", run="kernels_triton:ratio_kl_bwd", numerics="lse/1", cannot_run=hopper_cannot_run, launches=True
)


forward.backend("reference", run="reference:ratio_kl", numerics=NONE)


backward.backend("reference", run="reference:ratio_kl_bwd", numerics=NONE)


# Autograd, once for all backends

forward.derivative(
    "policy_logits", by=backward, outputs=("ratio", "kl", "logp", "entropy", "stats", "slopes"),
    constant=("stats", "slopes"), flags=("return_stats",),
)  # fmt: skip
backward.not_differentiable(
    "isobit.ratio_kl has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate a log_softmax of the logits instead where you need one."
)
