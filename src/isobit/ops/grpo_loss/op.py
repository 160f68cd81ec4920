"""The clipped, group-normalised policy loss of GRPO, directly from logits.

For every live token, with ratio and kl from `ratio_kl`, A the advantage of its sequence and w its
rollout weight (1 by default):

    surrogate = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) w
    term      = surrogate + beta kl

The loss is a reduction of the terms:

    token_mean       sum over tokens / live tokens
    sequence_mean    sum over sequences of (sum over tokens / its live tokens) / live sequences
    sum              sum over tokens

`normalizer` replaces the last divisor, and a sequence is live if one of its tokens is. With
`rewards`, advantages are those of `group_advantages`: for every group of sequences

    A = (r - mean r) / max(std r, eps)

with the population standard deviation. Only the policy's logits get a gradient. The derivative of a term by
the token's log-probability is

    [not clipped] (-ratio A w) + beta (-expm1(ref_logp - logp))

The forward stores it, one number per token, because its factor is known only after all terms are summed. So
the backward is that of `ratio_kl`, with a multiplication before it.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from isobit.frame.backend import NONE, Backend, resolve
from isobit.frame.contract import F32, Contract, Float, Int, Like, Mask, Number
from isobit.frame.device import triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.kernels.host.tokens import live_rows
from isobit.numerics import Numerics
from isobit.ops.grpo_loss import groups
from isobit.ops.ratio_kl.op import backward as rows_backward
from isobit.ops.ratio_kl.op import forward as rows_forward

REDUCTIONS = ("token_mean", "sequence_mean", "sum")


@public_op("grpo_loss")
def forward(return_kept: bool = False) -> tuple[
    F32[Tensor, ""],
    F32[Tensor, ""],
    F32[Tensor, ""],
    F32[Tensor, ""],
    F32[Tensor, ""],
    F32[Tensor, ""],
    Int[Tensor, ""],
    F32[Tensor, " if return_entropy"],
    F32[Tensor, "2 B T if return_kept"],
    F32[Tensor, "B T if return_kept"],
    F32[Tensor, "B if return_kept"],
]:  # fmt: skip
    """(loss, policy_loss, kl, clip_low, clip_high, ratio, active_tokens, entropy, stats, slope, scale).

    stats are those of `ratio_kl`, slope the derivative of each token's term by its log-probability, and scale
    the factor of each sequence's terms in the loss. Autograd asks for these three where a backward may
    follow."""


@forward.public
def grpo_loss(
    policy_logits: Float[Tensor, "B T V"],
    ref_logits: Float[Tensor, "B T V"] | None,
    token_ids: Int[Tensor, "B T; any strides"],
    *,
    old_logp: F32[Tensor, "B T; any strides"] | None = None,
    rewards: Float[Tensor, "B; any strides"] | None = None,
    advantages: Float[Tensor, "B T; any strides"] | None = None,
    mask: Mask[Tensor, "B T; any strides"] | None = None,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | Int[Tensor, "G+1; any strides"] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    reduction: str = "token_mean",
    normalizer: float | Number[Tensor, ""] | None = None,
    rollout_weights: Float[Tensor, "B T; any strides"] | None = None,
    ref_logp: F32[Tensor, "B T; any strides"] | None = None,
    temperature: float | F32[Tensor, "B T; any strides"] = 1.0,
    eps: float = 1e-6,
    ignore_index: int = -100,
    return_entropy: bool = False,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy loss of GRPO with an optional KL penalty, from logits, in fp32.

    Args:
        policy_logits: [B, T, V] in bf16, fp16, fp32 (or fp64, on the reference backend), the last dimension
            contiguous: `logits[:, :-1]` is read in place. Only these get a gradient.
        ref_logits: [B, T, V] of the reference, of any of these dtypes, or None. Read only if `beta` > 0.
        token_ids: [B, T], int32 or int64. In a live token an id outside [0, V) is a ContractError on
            CPU tensors; on a GPU it makes the loss and the gradient of its own row NaN, and no read is out of
            bounds.
        old_logp: [B, T] fp32, log-probabilities under the policy that produced the samples. None: this policy
            produced them, and all ratios are 1.
        rewards: [B], one per sequence; with exactly one of `samples_per_prompt` and `group_boundaries`. One
            that is NaN or infinite makes all advantages of its group NaN, and so the loss, unless these
            sequences are masked.
        advantages: [B] or [B, T] instead of rewards, and then no groups.
        mask: [B, T], bool or integer; tokens where it is 0 are masked. They have no loss and no
            gradient, are in no count, and their values, NaN included, reach no result.
        samples_per_prompt: sequences per group; it must divide B.
        group_boundaries: where groups begin, and B: a list, a numpy array or an integer tensor [G + 1] from 0
            to B, strictly ascending. What is not on a GPU is always checked (and copied there). A tensor on a
            GPU is read there: a wrong one makes all advantages NaN, unless `validate` makes it an error.
        clip_low, clip_high: ratios are clipped to [1 - clip_low, 1 + clip_high].
        beta: weight of the KL penalty (the estimator k3). With 0 no reference is read.
        reduction: "token_mean", "sequence_mean" (tokens of a sequence first, then sequences) or "sum".
        normalizer: a positive number, or a 0-d tensor that is not read by the host, to divide by instead of
            the number of tokens (of sequences for "sequence_mean", of 1 for "sum"). With several
            micro-batches give that of the whole batch: their losses and gradients then add up to those of
            the batch. A tensor may contain 0 if no token is live.
        rollout_weights: [B, T], multiply the clipped terms and not the KL penalty, as in TRL and verl:
            truncated importance sampling.
        ref_logp: [B, T] fp32, log-probabilities under the reference, instead of `ref_logits`.
        temperature: a positive number that divides all logits, or an fp32 tensor [B, T].
        eps: lower bound of the standard deviation by which rewards are divided.
        ignore_index: tokens with this id are masked, too.
        return_entropy: report the entropy as well.
        validate: check ids, temperatures, boundaries and normalizer on a GPU too (a host sync). None checks
            on CPU tensors, and everywhere with ISOBIT_VALIDATE=1. True, or that variable, also checks that
            rewards are finite.
        numerics: the numerics class that the result must have, as in `ratio_kl`; None takes that of the
            backend that serves, which `isobit.explain` reports.
        backend: force one by name; None takes the first that can serve.

    Returns:
        (loss, stats). The loss is a 0-d tensor. stats are detached 0-d tensors by name:

        - `policy_loss`, and with `beta` > 0 `kl`: the parts of the loss, policy_loss + beta kl, each reduced
          like the loss;
        - `clip_fraction_low`, `clip_fraction_high`: the fraction of the tokens that are clipped from below
          (with a negative advantage) and from above (with a positive one);
        - `mean_ratio`, and `entropy` if it was requested: means over the tokens;
        - `active_tokens`: how many tokens are live. If none is, the loss and all means are 0.

    Nothing here waits for the device. A token's term does not depend on the batch, and terms are added in
    fp64 in the order given in docs/numerics.md: the same call gives the same bits.

    Example:
        >>> import torch, isobit
        >>> logits = torch.zeros(4, 2, 8, requires_grad=True)
        >>> ids, mask = torch.zeros(4, 2, dtype=torch.int64), torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
        >>> loss, stats = isobit.grpo_loss(
        ...     logits, None, ids, mask=mask, rewards=torch.tensor([1.0, 0.0, 0.5, 0.5]), samples_per_prompt=2
        ... )
        >>> loss  # the advantages are 1, -1, 0, 0
        tensor(-0.1429, grad_fn=<GrpoLossBackward>)
        >>> loss.backward()
        >>> stats["active_tokens"], stats["mean_ratio"]
        (tensor(7, dtype=torch.int32), tensor(1.))
    """
    given: dict[str, Any] = {
        "policy_logits": policy_logits, "ref_logits": ref_logits, "token_ids": token_ids,
        "old_logp": old_logp, "rewards": rewards, "advantages": advantages, "mask": mask,
        "samples_per_prompt": samples_per_prompt, "group_boundaries": group_boundaries, "clip_low": clip_low,
        "clip_high": clip_high, "beta": beta, "reduction": reduction, "normalizer": normalizer,
        "rollout_weights": rollout_weights, "ref_logp": ref_logp, "temperature": temperature, "eps": eps,
        "ignore_index": ignore_index, "return_entropy": return_entropy, "validate": validate,
        "numerics": numerics, "backend": backend,
    }  # fmt: skip
    loss, policy_loss, kl, low, high, ratio, active_tokens, entropy, *_ = forward(**_adapted(given))
    stats = {"policy_loss": policy_loss} | ({"kl": kl} if beta > 0 else {})
    stats |= {"clip_fraction_low": low, "clip_fraction_high": high, "mean_ratio": ratio}
    return loss, stats | ({"entropy": entropy} if return_entropy else {}) | {"active_tokens": active_tokens}


@op(
    "grpo_loss_bwd",
    like=forward.params("policy_logits", "token_ids", "mask", ..., "ignore_index", "temperature"),
)
def backward(
    stats: F32[Tensor, "2 B T"],
    slope: F32[Tensor, "B T"],
    scale: F32[Tensor, "B"],
    dloss: F32[Tensor, ""],
) -> Like[Tensor, "policy_logits"]:
    """The gradient of policy_logits."""


@public_op("group_advantages")
def advantages_of() -> F32[Tensor, "B"]:
    """(r - mean) / max(std, eps) in every group."""


@advantages_of.public
def group_advantages(
    rewards: Float[Tensor, "B; any strides"],
    *,
    samples_per_prompt: int | None = None,
    group_boundaries: Sequence[int] | Int[Tensor, "G+1; any strides"] | None = None,
    eps: float = 1e-6,
    scale: bool = True,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """Rewards relative to their group: (r - mean) / max(std, eps), with the population standard deviation.

    TRL and verl divide by the *sample* standard deviation plus an eps instead: their advantages are smaller
    by sqrt((n - 1) / n) in a group of n. To get theirs, use `scale=False` and divide.

    Args:
        rewards: [B], floating point, any stride. One that is NaN or infinite makes the advantages of its
            group NaN, and no others.
        samples_per_prompt: sequences per group; it must divide B. Give either this or group_boundaries.
        group_boundaries: where groups begin, and B: a list, a numpy array or an integer tensor [G + 1] from 0
            to B, strictly ascending. What is not on a GPU is always checked (and copied there). A tensor on a
            GPU is read there: a wrong one makes all advantages NaN, unless `validate` makes it an error.
        eps: lower bound of the standard deviation.
        scale: False subtracts the mean and does not divide, as in Dr. GRPO.
        validate: check the boundaries on a GPU too, and that rewards are finite (a host sync).
        numerics: the numerics class that the result must have, "advantages/1"; None takes that of the backend
            that serves.
        backend: force "triton" or "reference"; None takes the first that can serve.

    Returns:
        [B] fp32 (fp64 for fp64 rewards). It is computed in fp64 relative to the first reward of each group,
        so equal rewards give exactly 0, and rewards that are large compared with their differences lose no
        digits. A group of one gives 0; groups may have any size.

    Example:
        >>> import torch, isobit
        >>> isobit.group_advantages(torch.tensor([1.0, 0.0, 7.0, 7.0, 7.0]), group_boundaries=[0, 2, 5])
        tensor([ 1., -1.,  0.,  0.,  0.])
    """
    given: dict[str, Any] = {
        "rewards": rewards, "samples_per_prompt": samples_per_prompt, "group_boundaries": group_boundaries,
        "eps": eps, "scale": scale, "validate": validate, "numerics": numerics, "backend": backend,
    }  # fmt: skip
    return advantages_of(**groups.adapted(advantages_of.contract, given))


# Arguments that callers may give in other forms than the contract takes


def _adapted(args: dict[str, Any]) -> dict[str, Any]:
    """Advantages of sequences are expanded to their tokens (a view); boundaries become a tensor."""
    own, ids = args.get("advantages"), args.get("token_ids")
    if isinstance(own, Tensor) and own.ndim == 1 and isinstance(ids, Tensor) and ids.ndim == 2:
        if own.shape[0] != ids.shape[0]:
            rule = f"B={own.shape[0]} but B={ids.shape[0]} from token_ids"
            raise forward.contract.error("advantages", own, rule)
        args = args | {"advantages": own[:, None].expand(ids.shape)}
    return groups.adapted(forward.contract, args)


forward.adapt = _adapted
advantages_of.adapt = lambda args: groups.adapted(advantages_of.contract, args)


# Rules that annotations cannot express


def of_rows(args: dict[str, Any]) -> dict[str, Any]:
    """The call of `ratio_kl` within a call of this op. Without a KL penalty it gets no reference."""
    names = ("policy_logits", "token_ids", "old_logp", "mask", "ignore_index", "temperature")
    penalty = args["beta"] > 0
    rows = {name: args[name] for name in names} | {"return_kl": penalty, "return_logp": False}
    rows |= {name: args[name] if penalty else None for name in ("ref_logits", "ref_logp")}
    return rows | {"return_entropy": args["return_entropy"], "return_stats": args["return_kept"]}


def of_rows_backward(args: dict[str, Any], dlogp: Tensor | None) -> dict[str, Any]:
    """The call of its backward, with the gradient of logp only, so that no slopes are read."""
    names = ("policy_logits", "token_ids", "mask", "stats", "ignore_index", "temperature")
    nothing = dict.fromkeys(("entropy", "dratio", "dkl", "dentropy", "slopes"))
    return {name: args[name] for name in names} | nothing | {"dlogp": dlogp}


def _scalars(contract: Contract, args: dict[str, Any]) -> None:
    if not 0 <= args["clip_low"] <= 1:
        raise contract.error("clip_low", args["clip_low"], "must be a number, 0 to 1")
    if not args["clip_high"] >= 0:
        raise contract.error("clip_high", args["clip_high"], "must be a number, 0 or more")
    if not 0 <= args["beta"] < float("inf"):
        raise contract.error("beta", args["beta"], "must be a finite number, 0 or more")
    if args["reduction"] not in REDUCTIONS:
        raise contract.error("reduction", args["reduction"], f"unknown; known: {', '.join(REDUCTIONS)}")
    number = args["normalizer"]
    if number is not None and not isinstance(number, Tensor) and not 0 < number < float("inf"):
        raise contract.error("normalizer", number, "must be a positive number")


def _one_reference(contract: Contract, args: dict[str, Any]) -> None:
    if args["ref_logits"] is not None and args["ref_logp"] is not None:
        rule = "is given in addition to ref_logits; one must be None"
        raise contract.error("ref_logp", args["ref_logp"], rule)
    if args["beta"] > 0 and args["ref_logits"] is None and args["ref_logp"] is None:
        raise contract.error("ref_logits", None, f"beta={args['beta']:g} needs it, or ref_logp")


def _rewards_or_advantages(contract: Contract, args: dict[str, Any]) -> None:
    rewards, advantages = args["rewards"], args["advantages"]
    if rewards is None and advantages is None:
        raise contract.error("rewards", None, "is required unless advantages are given")
    if rewards is not None and advantages is not None:
        raise contract.error("advantages", advantages, "is given in addition to rewards; one must be None")
    if rewards is not None:
        return groups.one_spec(contract, args)
    for name in ("samples_per_prompt", "group_boundaries"):
        if args[name] is not None:
            raise contract.error(name, args[name], "is for rewards only; leave it out if you pass advantages")


def _of_ratio_kl(contract: Contract, args: dict[str, Any]) -> None:
    for rule in rows_forward.rules:
        rule(contract, of_rows(args))


def _values_of_ratio_kl(contract: Contract, args: dict[str, Any]) -> None:
    for rule in rows_forward.value_rules:
        rule(contract, of_rows(args))


def _normalizer_is_positive(contract: Contract, args: dict[str, Any]) -> None:
    """Unless there is nothing to divide. Reads its value."""
    number = args["normalizer"]
    if not isinstance(number, Tensor) or 0 < number.item() < float("inf"):
        return
    if bool(live_rows(args["token_ids"], args["mask"], args["ignore_index"]).any()):
        raise contract.error("normalizer", number, f"must be a positive number, not {number.item()}")


forward.rule(_scalars, groups.floor_is_positive, _one_reference, _rewards_or_advantages, _of_ratio_kl)
forward.value_rule(_values_of_ratio_kl, groups.ascend, groups.rewards_are_finite, _normalizer_is_positive)
advantages_of.rule(groups.floor_is_positive, groups.one_spec)
advantages_of.value_rule(groups.ascend, groups.rewards_are_finite)


# Backends: those of `ratio_kl`, fastest first, each followed by the token terms


def _add_backends(rows: Backend, rows_bwd: Backend) -> None:
    terms = f"{__package__}.{'reference' if rows.name == 'reference' else 'kernels_triton'}:token_loss"

    def run(**args: Any) -> Any:
        # A recorder of launches records those of `ratio_kl` too.
        recorded = {"launch": args.pop("launch")} if "launch" in args else {}
        ratio, kl, _, entropy, stats, slopes = rows.run(**of_rows(args), **recorded)
        *results, slope, scale = resolve(terms)(ratio, kl, entropy, slopes, **args, **recorded)
        return (*results, stats, slope, scale)

    def run_reference_backward(**args: Any) -> Any:
        from isobit.ops.grpo_loss.reference import token_loss_bwd

        dlogp = token_loss_bwd(args["slope"], args["scale"], args["dloss"])
        return rows_bwd.run(**of_rows_backward(args, dlogp))

    forward.backend(
        rows.name, run=run, numerics=rows.numerics, when=lambda args: rows.when(of_rows(args)),
        interpreted=rows.interpreted, not_by_default=lambda args: rows.not_by_default(of_rows(args)),
        launches=rows.launches,
    )  # fmt: skip
    backward.backend(
        rows.name,
        # Elsewhere it is one kernel, which is that of `ratio_kl`.
        run=run_reference_backward if rows.name == "reference" else "kernels_triton:grpo_loss_bwd",
        numerics=rows_bwd.numerics, when=lambda args: rows_bwd.when(of_rows_backward(args, None)),
        interpreted=rows_bwd.interpreted, launches=rows_bwd.launches,
    )  # fmt: skip


for backend in rows_forward.backends:
    _add_backends(backend, rows_backward.backend_named(backend.name))

ADVANTAGES_1 = Numerics(
    "advantages/1",
    "Advantages of a group in fp64, by additions, products, quotients and square roots that are rounded to"
    " nearest even: rewards relative to the group's first, summed in 128 lanes that are then added by a tree"
    " of neighbours; one rounding to the dtype of the result.",
    "GPUs through Triton; any CPU through its interpreter",
)


advantages_of.backend(
    "triton",
    run="kernels_triton:group_advantages",
    numerics=str(ADVANTAGES_1),
    cannot_run=triton_cannot_run,
    interpreted=True,
    launches=True,
)


advantages_of.backend("reference", run="reference:group_advantages", numerics=NONE)


# Autograd, once for all backends

_OUTPUTS = (
    "loss", "policy_loss", "kl", "clip_low", "clip_high", "ratio", "active_tokens", "entropy", "stats",
    "slope", "scale",
)  # fmt: skip
forward.derivative(
    "policy_logits", by=backward, outputs=_OUTPUTS, constant=_OUTPUTS[1:], flags=("return_kept",)
)
backward.not_differentiable(
    "isobit.grpo_loss has no second derivative: its backward is made of kernels without a gradient of their "
    "own. Differentiate a log_softmax of the logits instead where you need one."
)
advantages_of.not_differentiable(
    "isobit.group_advantages has no derivative: rewards are numbers. Call it on detached tensors."
)
