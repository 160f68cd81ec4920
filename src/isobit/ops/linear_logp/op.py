"""Log-probability of chosen tokens from hidden states and an LM head, without storing the logits.

For every row h of `hidden`, with the options in this order and all of it in fp32:

    z       = weight h + bias           one chain of products over ascending D
    z       = round(z, logits_dtype)    as engines with 16-bit logits do; straight-through gradient
    z       = z * logit_scale
    z       = softcap * tanh(z / softcap)
    z       = z / temperature           a number, or one for every row
    lse     = log sum_v exp(z[v])
    logp    = z[token_id] - lse
    entropy = lse - sum_v softmax(z)[v] * z[v]

A masked row is one whose token id is `ignore_index` or whose mask is 0. It gives 0 and gets a zero gradient,
and its values, NaN included, reach no result.

Backward, with p = softmax(z) and H = entropy, for every row

    dz[v] = (dlogp * ([v = token_id] - p[v]) + p[v] * (dlse - dentropy * (log p[v] + H))) / temperature

times the slopes of softcap and logit_scale, rounded once to the inputs' dtype by the kernels. From it

    dhidden = dz weight,    dweight = dz^T hidden,    dbias = dz^T 1

in fp32, rounded once to the dtype of their parameter. For this the logits are recomputed, a part of the
vocabulary at a time; or, where `workspace_bytes` allows it, probabilities are stored by the forward.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from isobit.frame.backend import NONE, resolve
from isobit.frame.contract import F32, Contract, Float, Int, Mask, dtype_name, is_dtensor
from isobit.frame.device import hopper_cannot_run, triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.kernels.host import tokens
from isobit.kernels.host.vocab_shards import PADDED_TO, SHARDS, padded
from isobit.numerics import Numerics
from isobit.numerics.classes import LINEAR_LSE_TRITON_8X4, LSE_8X4, LSE_8X4_CPU
from isobit.ops.linear_logp.slabs import SLAB_BYTES

#: `linear_logp` by the ranks of a group, which is made of this op: it is imported when it is needed.
_OF_RANKS = "isobit.ops.linear_logp.sharded:linear_logp_sharded"


def vocabulary(args: dict[str, Any]) -> int:
    """Number of tokens: rows of the weight without its padding."""
    return args["weight"].shape[0] if args["vocab_size"] is None else args["vocab_size"]


def _product_flops(args: dict[str, Any]) -> int:
    """FLOPs of one product of all hidden states with the vocabulary."""
    hidden = args["hidden"]
    return 2 * math.prod(hidden.shape) * vocabulary(args)


# Stored probabilities

#: Rows and columns of stored probabilities are rounded up to multiples of these, the tile that stores them.
KEPT_ROWS, KEPT_COLUMNS = 128, 256


def kept_bytes(N: int, vocab: int) -> int:
    """Memory for the probabilities of N rows in 16 bits and the maxima they are relative to, plus 64 MB for a
    slab of gradients, whatever N is."""
    rows, columns = -(-N // KEPT_ROWS) * KEPT_ROWS, -(-vocab // KEPT_COLUMNS) * KEPT_COLUMNS
    return rows * (2 * columns + 16 * (columns // KEPT_COLUMNS)) + SLAB_BYTES


def kept_sizes(args: dict[str, Any]) -> dict[str, int]:
    """Sizes of `kept` [R, C] and `kept_base` [R, G, 4]. They depend on shapes, options and the device only,
    because a compiled graph must know them before a backend is chosen. 0 where no backend could store
    any."""
    hidden = args["hidden"]
    N, vocab = math.prod(hidden.shape[:-1]), vocabulary(args)
    if (
        hidden.dtype.itemsize != 2
        or args["softcap"] is not None
        or hopper_cannot_run(hidden.device) is not None
    ):
        return {"R": 0, "C": 0, "G": 0}
    groups = -(-vocab // KEPT_COLUMNS)
    return {"R": -(-N // KEPT_ROWS) * KEPT_ROWS, "C": groups * KEPT_COLUMNS, "G": groups}


# The contract


@public_op(
    "linear_logp",
    before="workspace_bytes",
    aside=("group",),
    sizes=kept_sizes,
    flops=_product_flops,
    explained="isobit.ops.linear_logp.sharded:explained",
)
def forward(return_stats: bool = False, keep: bool = False) -> tuple[
    F32[Tensor, "*"],
    F32[Tensor, "* if return_entropy"],
    F32[Tensor, "* if return_lse"],
    F32[Tensor, "2 * if return_stats"],
    Float[Tensor, "R C in hidden if keep"],
    F32[Tensor, "R G 4 if keep"],
]:  # fmt: skip
    """(logp, entropy, lse, stats, kept, kept_base).

    stats are a row's m = max of z before the temperature and s = sum of exp((z - m) / temperature); autograd
    asks for them where a backward may follow. The contents of kept and kept_base are up to the backend;
    `kept_sizes` gives their sizes."""


def _can_keep(
    workspace_bytes: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int | None,
    padded_vocab: int | None, numerics: str | Numerics | None, backend: str | None,
    **others: Any,
) -> bool:  # fmt: skip
    """Whether a backward may follow for which all probabilities can be stored. The contract has not been
    checked yet: an invalid call stores none here, and raises its error later."""
    if backend not in (None, "hopper") or str(numerics) not in ("None", "lse/1") or padded_vocab is not None:
        return False
    tensors = all(isinstance(t, Tensor) for t in (hidden, weight) + (() if bias is None else (bias,)))
    numbers = isinstance(workspace_bytes, int) and isinstance(vocab_size, int | None)
    if not (tensors and numbers and hidden.ndim and weight.ndim):
        return False
    followed = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if not (followed and torch.is_grad_enabled()):
        return False
    vocab = len(weight) if vocab_size is None else vocab_size
    return kept_bytes(math.prod(hidden.shape[:-1]), vocab) <= workspace_bytes


@overload
def linear_logp(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, *, return_entropy: Literal[True], **options: Any
) -> tuple[Tensor, ...]: ...
@overload
def linear_logp(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, ...]: ...
@overload
def linear_logp(hidden: Tensor, weight: Tensor, token_ids: Tensor, **options: Any) -> Tensor: ...
@forward.public  # type: ignore[misc]
def linear_logp(  # overloads take any options
    hidden: Float[Tensor, "* D"],
    weight: Float[Tensor, "V D"],
    token_ids: Int[Tensor, "*"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    mask: Mask[Tensor, "*"] | None = None,
    ignore_index: int = -100,
    temperature: float | F32[Tensor, "*"] = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    logits_dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    padded_vocab: int | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    workspace_bytes: int | None = None,
    group: Any = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Log-probabilities of `token_ids` under softmax of hidden @ weight.T, in fp32, without storing logits.

    Args:
        hidden: [*, D] in bf16, fp16, fp32 (or fp64, on the reference backend). Any leading shape and strides,
            the last dimension contiguous; `hidden[:, :-1]` may be copied by a backend, 2 N D bytes.
        weight: [V, D], of the same dtype: the weight of the LM head.
        token_ids: [*], int32 or int64. In a live row an id outside the vocabulary is a
            ContractError on CPU tensors. On a GPU it makes that row's results and its row of dhidden NaN;
            it adds nothing to dweight and dbias, and no read is out of bounds.
        bias: [V], of the same dtype or fp32; added in fp32.
        mask: [*], bool or integer; rows where it is 0 are masked.
        ignore_index: rows with this token id are masked, too. Masked rows give 0 and get a zero
            gradient, and their values, NaN included, reach no result.
        temperature: a positive number that divides the logits, or an fp32 tensor [*] with one for every row
            (it gets no gradient).
        softcap: logits become softcap * tanh(logits / softcap).
        logit_scale: logits are multiplied by it, before the softcap.
        logits_dtype: bf16 or fp16 rounds the logits to it, before all of the above, as an engine with logits
            in that dtype does. None keeps them in fp32.
        vocab_size: rows of the weight from here on are padding: they are ignored, and get zero gradients.
        padded_vocab: the padded vocabulary P of class lse/8x4, a multiple of 64 that is at least the
            vocabulary: its eight shards have P / 8 columns each, so it must be the same wherever bits are
            compared. Giving it selects that class. None is the vocabulary rounded up to a multiple of 64.
        return_entropy, return_lse: also return the entropy of the distribution and the log-sum-exp, both
            differentiable.
        workspace_bytes: memory for gradients of logits in the backward. None is 64 MB; on the hopper backend
            16 KB a row if that is more, but then no more than the size of the weight. Kernels may exceed it
            by what they need at least (hopper: 512 columns, 1 KB a row). If it does not hold the whole
            vocabulary, fp32 sums of dhidden [N, D] are stored in addition. The size changes no bits, with
            one exception: if it holds all probabilities and 64 MB, the hopper backend keeps them from the
            forward, in 16 bits, and does not recompute logits. That changes bits of gradients, so make it
            large enough for every batch, or for none. In class lse/8x4 nothing is kept.
        group: a process group of torch.distributed, or a DeviceMesh of one dimension, with 1, 2, 4 or 8 ranks
            that share the vocabulary: weight and bias are this rank's rows, [r P / R, (r + 1) P / R) of the
            padded vocabulary, and vocab_size counts the tokens of all ranks (by default R times the rows
            here). Everything else is the same on every rank, and so are the results and dhidden, with the
            bits of one GPU in class lse/8x4; dweight and dbias are those of the rank's rows. With a weight
            (and bias) that is a DTensor, Shard(0), it is weight.device_mesh; it may be left out if hidden is
            a DTensor on that mesh, Replicate(). Results are plain tensors in any case.
        validate: check ids and temperatures on a GPU too (a host sync). None checks on CPU tensors, and
            everywhere with ISOBIT_VALIDATE=1.
        numerics: the numerics class that the result must have, "lse/1" or "lse/8x4" on a Hopper GPU,
            "linear-lse/triton-1" or "linear-lse/triton-8x4"; None takes that of the backend that serves,
            which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "hopper", "triton" or "reference", or in the classes with shards "hopper-8x4",
            "triton-8x4" or "model-8x4"; None takes the first that can serve.

    Returns:
        logp [*], or (logp, entropy), (logp, lse), (logp, entropy, lse) as requested.

    Gradients go to hidden, weight and bias; only those that are needed are computed. On the hopper and triton
    backends a row's results and its row of dhidden do not depend on the other rows, and dweight and dbias
    depend only on the live rows, in their order (`isobit.explain` names the numerics class).

    Example:
        >>> import torch, isobit
        >>> head = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]], requires_grad=True)
        >>> logp = isobit.linear_logp(torch.eye(2), head, torch.tensor([2, 0]))
        >>> logp
        tensor([-0.4076, -1.0986], grad_fn=<LinearLogpBackward>)
        >>> logp.sum().backward()
        >>> head.grad[:, 1]
        tensor([ 0.6667, -0.3333, -0.3333])
    """
    given: dict[str, Any] = {
        "hidden": hidden, "weight": weight, "token_ids": token_ids, "bias": bias, "mask": mask,
        "ignore_index": ignore_index, "temperature": temperature, "softcap": softcap,
        "logit_scale": logit_scale, "logits_dtype": logits_dtype, "vocab_size": vocab_size,
        "padded_vocab": padded_vocab, "return_entropy": return_entropy, "return_lse": return_lse,
        "workspace_bytes": workspace_bytes, "validate": validate, "numerics": numerics, "backend": backend,
    }  # fmt: skip
    if group is not None or is_dtensor(weight):
        made: Tensor | tuple[Tensor, ...] = resolve(_OF_RANKS)(given, group)
        return made
    if workspace_bytes is not None:
        given = {**given, "keep": _can_keep(**given)}
    out, entropy, lse, *_ = forward(**given)
    if not (return_entropy or return_lse):
        return out
    return (out,) + ((entropy,) if return_entropy else ()) + ((lse,) if return_lse else ())


def _backward_flops(args: dict[str, Any]) -> int:
    """One product for the logits, unless probabilities were stored, and one for each gradient of a matrix."""
    products = (args["kept"] is None) + args["want_hidden"] + args["want_weight"]
    return products * _product_flops(args)


_SHARED = forward.params(
    "hidden", "weight", "token_ids", "bias", "mask", ..., "ignore_index", "temperature", "softcap",
    "logit_scale", "logits_dtype", "vocab_size", "padded_vocab", "workspace_bytes",
)  # fmt: skip


@op("linear_logp_bwd", like=_SHARED, flops=_backward_flops)
def backward(
    stats: F32[Tensor, "2 *"],
    entropy: F32[Tensor, "*"] | None,
    kept: Float[Tensor, "R C"] | None,
    kept_base: F32[Tensor, "R G 4"] | None,
    dlogp: F32[Tensor, "*"] | None,
    dentropy: F32[Tensor, "*"] | None,
    dlse: F32[Tensor, "*"] | None,
    *,
    want_hidden: bool,
    want_weight: bool,
    want_bias: bool,
    grad_dtype: torch.dtype | None,
    dhidden_dtype: torch.dtype | None,
    shard: int,
    shards: int,
) -> tuple[
    Float[Tensor, "* D in dhidden_dtype or grad_dtype or hidden if want_hidden"],
    Float[Tensor, "V D in grad_dtype or weight if want_weight"],
    Float[Tensor, "V in grad_dtype or bias or hidden if want_bias"],
]:
    """(dhidden, dweight, dbias), from the gradients of any of the outputs; in grad_dtype, or in the dtypes of
    their parameters. dhidden may have its own dtype. The weight holds `shards` shards of a padded vocabulary
    from `shard` on; with fewer than all, dhidden is their part of the sum."""


# Rules that annotations cannot express


def _one_dtype(contract: Contract, args: dict[str, Any]) -> None:
    own, bias = args["hidden"].dtype, args["bias"]
    if args["weight"].dtype != own:
        raise contract.error("weight", args["weight"], f"dtype must be that of hidden, {dtype_name(own)}")
    if bias is not None and bias.dtype not in (own, torch.float32):
        raise contract.error("bias", bias, f"dtype must be that of hidden, {dtype_name(own)}, or fp32")


def _scalars(contract: Contract, args: dict[str, Any]) -> None:
    def require(name: str, holds: Callable[[Any], bool], rule: str) -> None:
        if args[name] is not None and not holds(args[name]):
            raise contract.error(name, args[name], rule)

    # Kernels multiply by its inverse in fp32.
    require("softcap", lambda c: 1e-38 <= c <= 1e38, "must be a positive number, 1e-38 to 1e38")
    require("logit_scale", lambda x: abs(x) <= 1e38, "must be a number, at most 1e38")
    require("logits_dtype", lambda d: d in (torch.bfloat16, torch.float16), "must be bf16, fp16 or None")
    require("workspace_bytes", lambda n: n >= 0, "must not be negative")


def _sizes(contract: Contract, args: dict[str, Any]) -> None:
    V, D = args["weight"].shape
    if V == 0 or D == 0:
        raise contract.error("weight", args["weight"], f"{'V' if V == 0 else 'D'} must be at least 1")
    if args["vocab_size"] is not None and not 1 <= args["vocab_size"] <= V:
        raise contract.error("vocab_size", args["vocab_size"], f"must be 1 to V={V}, the rows of weight")
    padding(contract, args, vocabulary(args))


def padding(contract: Contract, args: dict[str, Any], V: int) -> None:
    """A padded vocabulary has room for all tokens, and eight shards of whole words."""
    P = args["padded_vocab"]
    if P is not None and (P < V or P % PADDED_TO):
        rule = f"must be a multiple of {PADDED_TO} and at least the vocabulary, {V}: {padded(V)}, say"
        raise contract.error("padded_vocab", P, rule)


def _sizes_here(contract: Contract, args: dict[str, Any]) -> None:
    if args["shards"] == SHARDS:
        _sizes(contract, args)


def _grad_dtype(contract: Contract, args: dict[str, Any]) -> None:
    own, given = args["hidden"].dtype, args["grad_dtype"]
    if given not in (None, own, torch.bfloat16, torch.float16, torch.float32):
        raise contract.error("grad_dtype", given, "must be bf16, fp16, fp32, or that of hidden")


def _bias_is_there(contract: Contract, args: dict[str, Any]) -> None:
    if args["want_bias"] and args["bias"] is None:
        raise contract.error("bias", None, "is required with want_bias")


def _ids_in_range(contract: Contract, args: dict[str, Any]) -> None:
    tokens.ids_below(vocabulary(args), contract, args)


ROW_RULES = (_one_dtype, tokens.scalars, _scalars)
forward.rule(*ROW_RULES, _sizes)
forward.value_rule(_ids_in_range, tokens.temperatures_are_positive)
backward.rule(*ROW_RULES, _sizes_here, tokens.entropy_is_there, _bias_is_there, _grad_dtype)


# Backends, fastest first


def _without_probs(args: dict[str, Any], outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The outputs of a backend that never stores probabilities. If memory for them was requested, it is
    filled with NaN, so that a backward that used it by mistake would be noticed."""
    if not args["keep"]:
        return (*outputs, None, None)
    hidden, (rows, columns, groups) = args["hidden"], kept_sizes(args).values()
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (
        *outputs,
        hidden.new_empty(rows, columns),
        hidden.new_full((rows, groups, 4), math.nan, dtype=wide),
    )


def is_padded(args: dict[str, Any]) -> str | None:
    """Why a call does not get a class without shards."""
    if args["padded_vocab"] is None:
        return None
    return "padded_vocab belongs to class lse/8x4, or linear-lse/triton-8x4"


def is_not_padded(args: dict[str, Any]) -> str | None:
    """Why a call that names no class does not get one with shards."""
    if args["padded_vocab"] is not None:
        return None
    return "a class for a vocabulary that ranks share: request it by padded_vocab= or numerics="


def _hopper_cannot_serve(args: dict[str, Any]) -> str | None:
    return is_padded(args) or resolve("isobit.ops.linear_logp.kernels_hopper:why_not")(args)


_ON_HOPPER: dict[str, Any] = {
    "numerics": "lse/1", "cannot_run": hopper_cannot_run, "when": _hopper_cannot_serve, "launches": True
}  # fmt: skip
forward.backend("hopper", run="kernels_hopper:linear_logp", **_ON_HOPPER)
backward.backend("hopper", run="kernels_hopper_bwd:linear_logp_bwd", **_ON_HOPPER)


def not_on_the_cpu(args: dict[str, Any]) -> str | None:
    if args["hidden"].device.type == "cpu":
        return None
    return "it computes on the CPU, thousands of times slower: select it by name to compare"


def triton_cannot_serve(args: dict[str, Any]) -> str | None:
    if args["hidden"].dtype == torch.float64:
        return "inputs are fp64; the kernels compute in fp32"
    return triton_cannot_run(args["hidden"].device)


def _triton_cannot_serve_unpadded(args: dict[str, Any]) -> str | None:
    return is_padded(args) or triton_cannot_serve(args)


def numerics_in_triton(name: str) -> Callable[[torch.device], str]:
    """The interpreter multiplies with numpy and promises no bits."""
    return lambda device: NONE if device.type in ("cpu", "meta") else name


def _by(module: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """The forward of a module that never stores probabilities."""

    def run(**args: Any) -> tuple[Tensor | None, ...]:
        return _without_probs(args, resolve(f"{__package__}.{module}:linear_logp")(**args))

    return run


_ON_TRITON: dict[str, Any] = {
    "numerics": numerics_in_triton("linear-lse/triton-1"), "when": _triton_cannot_serve_unpadded,
    "interpreted": True, "launches": True,
}  # fmt: skip
forward.backend("triton", run=_by("kernels_triton"), **_ON_TRITON)
backward.backend("triton", run="kernels_triton_bwd:linear_logp_bwd", **_ON_TRITON)

# Classes with shards: a call that names neither such a class nor a padded vocabulary gets none of them.

#: Of every op here, by backend.
SHARDED: dict[str, dict[str, Any]] = {
    "hopper-8x4": {"numerics": str(LSE_8X4), "cannot_run": hopper_cannot_run,
                   "when": "isobit.ops.linear_logp.kernels_hopper:why_not"},
    "triton-8x4": {"numerics": numerics_in_triton(str(LINEAR_LSE_TRITON_8X4)), "when": triton_cannot_serve,
                   "interpreted": True},
    "model-8x4": {"numerics": str(LSE_8X4_CPU), "when": "isobit.ops.linear_logp.model_shards:why_not",
                  "not_by_default": not_on_the_cpu},
}  # fmt: skip
_RUN = {
    "hopper-8x4": ("kernels_hopper_shards", "kernels_hopper_shards", True),
    "triton-8x4": ("kernels_triton_shards", "kernels_triton_shards", True),
    "model-8x4": ("model_shards", "model_shards", False),
}
for _name, (_ahead, _back, _launches) in _RUN.items():
    _options = SHARDED[_name] | {"other_class_by_default": is_not_padded, "launches": _launches}
    forward.backend(_name, run=_by(_ahead), **_options)
    backward.backend(_name, run=f"{_back}:linear_logp_bwd", **_options)

forward.backend("reference", run=_by("reference"), numerics=NONE)
backward.backend("reference", run="reference:linear_logp_bwd", numerics=NONE)


# Autograd, once for all backends


def _save(call: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Without probabilities that no backend could store."""
    if saved["kept"] is not None and len(saved["kept"]) == 0:
        saved |= {"kept": None, "kept_base": None}
    return saved | {"grad_dtype": None, "dhidden_dtype": None, "shard": 0, "shards": SHARDS}


forward.derivative(
    "hidden", "weight", "bias", by=backward, save=_save,
    outputs=("logp", "entropy", "lse", "stats", "kept", "kept_base"), constant=("stats", "kept", "kept_base"),
    flags=("return_stats",),
)  # fmt: skip
backward.not_differentiable(
    "isobit.linear_logp has no second derivative: its backward is made of kernels without a gradient of "
    "their own. Differentiate a log_softmax of the logits instead where you need one."
)
