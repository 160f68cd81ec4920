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

from isobit.frame.backend import NONE, resolve
from isobit.frame.contract import F32, Contract, Float, Int, Like, Mask, is_dtensor
from isobit.frame.device import hopper_cannot_run, triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.kernels.host import tokens
from isobit.kernels.host.vocab_shards import PADDED_TO, padded
from isobit.numerics import Numerics
from isobit.numerics.classes import LSE_TRITON_8X1, LSE_TRITON_8X1_CPU

#: `logp` by the ranks of a group, which is made of parts of this op: it is imported when it is needed.
_OF_RANKS = "isobit.ops.logp.sharded:logp_sharded"


@public_op("logp", aside=("vocab_size", "group"), explained="isobit.ops.logp.sharded:explained")
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
    vocab_size: int | None = None,
    padded_vocab: int | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    group: Any = None,
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
        vocab_size: with a group, the tokens of all ranks: columns from there on are padding, which is ignored
            and gets zero gradients. None is all columns. Without a group pass `logits[..., :vocab_size]`.
        padded_vocab: the padded vocabulary P of class lse/triton-8x1, a multiple of 64 that is at least the
            vocabulary: its eight shards have P / 8 columns each, so it must be the same wherever bits are
            compared. Giving it selects that class. None is the vocabulary rounded up to a multiple of 64.
        return_entropy, return_lse: also return the entropy of the distribution and the log-sum-exp,
            both differentiable.
        group: a process group of torch.distributed, or a DeviceMesh of one dimension, with 1, 2, 4 or 8 ranks
            that share the vocabulary: logits are this rank's columns, [r P / R, (r + 1) P / R) of the padded
            vocabulary, and token ids count from the first column of all. Everything else is the same on every
            rank, and so are the results, with the bits of one GPU in class lse/triton-8x1; gradients are
            those of the rank's columns. DTensor logits with Shard(-1) have their group with them.
        validate: check ids and temperatures on a GPU too (a host sync). None checks on CPU tensors, and
            everywhere with ISOBIT_VALIDATE=1.
        numerics: the numerics class that the result must have, "lse/triton-1", "lse/triton-8x1", or "lse/1"
            (bits of `linear_logp`, on a Hopper GPU); None takes that of the backend that serves, which
            `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "triton", "hopper" or "reference", or in the class with shards "triton-8x1" or
            "model-8x1"; None takes the first that can serve.

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
    given: dict[str, Any] = {
        "logits": logits, "token_ids": token_ids, "mask": mask, "ignore_index": ignore_index,
        "temperature": temperature, "padded_vocab": padded_vocab, "return_entropy": return_entropy,
        "return_lse": return_lse, "validate": validate, "numerics": numerics, "backend": backend,
    }  # fmt: skip
    if group is not None or is_dtensor(logits):
        made: Tensor | tuple[Tensor, ...] = resolve(_OF_RANKS)(given | {"vocab_size": vocab_size}, group)
        return made
    if vocab_size is not None:
        rule = "belongs to a call with a group; without one pass logits[..., :vocab_size]"
        raise forward.contract.error("vocab_size", vocab_size, rule)
    out, entropy, lse, _ = forward(**given)
    if not (return_entropy or return_lse):
        return out
    return (out,) + ((entropy,) if return_entropy else ()) + ((lse,) if return_lse else ())


_SHARED = ("logits", "token_ids", "mask", ..., "ignore_index", "temperature", "padded_vocab")


@op("logp_bwd", like=forward.params(*_SHARED))
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


def padding(contract: Contract, args: dict[str, Any], V: int) -> None:
    """A padded vocabulary has room for all tokens, and eight shards of whole words."""
    P = args["padded_vocab"]
    if P is not None and (P < V or P % PADDED_TO):
        rule = f"must be a multiple of {PADDED_TO} and at least the vocabulary, {V}: {padded(V)}, say"
        raise contract.error("padded_vocab", P, rule)


def _has_room(contract: Contract, args: dict[str, Any]) -> None:
    padding(contract, args, args["logits"].shape[-1])


def _ids_in_range(contract: Contract, args: dict[str, Any]) -> None:
    tokens.ids_below(args["logits"].shape[-1], contract, args)


forward.rule(tokens.scalars, _has_tokens, _has_room)
forward.value_rule(_ids_in_range, tokens.temperatures_are_positive)
backward.rule(tokens.scalars, _has_tokens, _has_room, tokens.entropy_is_there)


# Backends, fastest first


def _is_padded(args: dict[str, Any]) -> str | None:
    """Why a call does not get a class without shards."""
    if args["padded_vocab"] is None:
        return None
    return f"padded_vocab belongs to class {LSE_TRITON_8X1}"


def _is_not_padded(args: dict[str, Any]) -> str | None:
    """Why a call that names no class does not get one with shards."""
    if args["padded_vocab"] is not None:
        return None
    return "a class for a vocabulary that ranks share: request it by padded_vocab= or numerics="


def triton_cannot_serve(args: dict[str, Any]) -> str | None:
    if args["logits"].dtype == torch.float64:
        return "logits are fp64; the kernels compute in fp32"
    return triton_cannot_run(args["logits"].device)


def _triton_cannot_serve_unpadded(args: dict[str, Any]) -> str | None:
    return _is_padded(args) or triton_cannot_serve(args)


_ON_TRITON: dict[str, Any] = {
    "numerics": "lse/triton-1", "when": _triton_cannot_serve_unpadded, "interpreted": True, "launches": True
}  # fmt: skip
forward.backend("triton", run="kernels_triton:logp", **_ON_TRITON)
backward.backend("triton", run="kernels_triton:logp_bwd", **_ON_TRITON)


def _hopper_cannot_serve(args: dict[str, Any]) -> str | None:
    return _is_padded(args) or resolve("isobit.ops.logp.kernels_hopper:why_not")(args)


forward.backend(
    "hopper",
    run="kernels_hopper:logp",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    when=_hopper_cannot_serve,
    launches=True,
)


# The gradient is elementwise, from the sums of the forward, so there is no order of additions.
backward.backend(
    "hopper",
    run="kernels_triton:logp_bwd",
    numerics="lse/1",
    cannot_run=hopper_cannot_run,
    when=_is_padded,
)


# Classes with shards: a call that names neither such a class nor a padded vocabulary gets none of them.


def _not_on_the_cpu(args: dict[str, Any]) -> str | None:
    if args["logits"].device.type == "cpu":
        return None
    return "it computes on the CPU, thousands of times slower: select it by name to compare"


def _numerics_in_triton(device: torch.device) -> str:
    """The interpreter has numpy's functions."""
    return str(LSE_TRITON_8X1_CPU if device.type == "cpu" else LSE_TRITON_8X1)


#: Of every op here, by backend.
SHARDED: dict[str, dict[str, Any]] = {
    "triton-8x1": {"numerics": _numerics_in_triton, "when": triton_cannot_serve, "interpreted": True,
                   "launches": True},
    "model-8x1": {"numerics": str(LSE_TRITON_8X1_CPU), "when": "isobit.ops.logp.model_shards:why_not",
                  "not_by_default": _not_on_the_cpu},
}  # fmt: skip
# With all columns here, the gradient from the sums of the forward is that of the class without shards.
for _name, _ahead, _back in (
    ("triton-8x1", "kernels_triton_shards", "kernels_triton"),
    ("model-8x1", "model_shards", "model_shards"),
):
    _options = SHARDED[_name] | {"other_class_by_default": _is_not_padded}
    forward.backend(_name, run=f"{_ahead}:logp", **_options)
    backward.backend(_name, run=f"{_back}:logp_bwd", **_options)


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
