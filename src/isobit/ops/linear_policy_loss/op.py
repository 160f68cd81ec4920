"""Any loss of log-probabilities, directly from hidden states and an LM head, in three matrix products.

    logp, entropy = linear_logp(hidden, weight, token_ids, ...)          of a chunk of rows
    loss         += loss_fn(logp, entropy, **inputs)                      the caller's loss of this chunk

The gradients of the chunk's log-probabilities are known then, so its other gradients are computed before the
next chunk begins:

    product 1   the logits: log-probabilities, and probabilities p, which are stored
    product 2   dhidden  = dz weight        dz = dlogp (one-hot - p), in the memory of p
    product 3   dweight += dz^T hidden

So there is never more of [N, V] in memory than one chunk, and no logit is computed twice. `linear_logp` needs
a fourth product: it computes all rows before its backward begins. Logits are computed twice here too if the
entropy has a gradient, and for a sequence that does not fit in the workspace, unless the loss is a sum over
rows (`isobit.losses.by_rows`): then the sequence is split.

Gradients stay in fp32 from the forward to the backward. There they are multiplied by the gradient of the
loss and rounded once. If all rows are one chunk, Hopper does product 3 there, in a kernel that multiplies and
rounds. If no row is stored, everything but the loss is left to the backward of `linear_logp`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import resolve
from isobit.frame.composed import composed
from isobit.frame.contract import F32, Contract, Float, Int, Mask, is_dtensor
from isobit.kernels.host import bounds, bounds_of_lists
from isobit.numerics import Numerics
from isobit.ops.linear_logp import op as linear_logp
from isobit.ops.linear_policy_loss.batch import Batch
from isobit.ops.linear_policy_loss.chunked import PLAIN, Call, evaluate
from isobit.ops.linear_policy_loss.loss_call import Loss

#: A call by the ranks of a group: it is imported when it is needed.
_OF_RANKS = "isobit.ops.linear_policy_loss.sharded:call_of_rank"


@composed(
    "linear_policy_loss",
    aside=("vocab_size", "group"),
    explained="isobit.ops.linear_policy_loss.sharded:explained",
)
def declared() -> F32[Tensor, ""]:
    """(loss, sums): the loss, fp64 if loss_fn returns that, and the sums that it returns too."""


@declared.public
def linear_policy_loss(
    hidden: Float[Tensor, "* D"],
    weight: Float[Tensor, "V D"],
    token_ids: Int[Tensor, "*"],
    *,
    loss_fn: Callable[..., Any],
    inputs: Mapping[str, Any] | None = None,
    bias: Float[Tensor, "V"] | None = None,
    mask: Mask[Tensor, "*"] | None = None,
    ignore_index: int = -100,
    temperature: float | F32[Tensor, "*"] = 1.0,
    entropy: bool = False,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    padded_vocab: int | None = None,
    workspace_bytes: int | None = None,
    vocab_size: int | None = None,
    group: Any = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """The sum of `loss_fn` over chunks of rows, from hidden states and the weight of an LM head.

    Neither logits nor log-probabilities of all rows are stored, and no logit is computed twice: the gradients
    of a chunk are finished before the next one begins.

    Args:
        hidden: [N, D], or [B, T, D] with one sequence per line; in bf16, fp16, fp32 (or fp64, on the
            reference backend). Any strides, the last dimension contiguous.
        weight: [V, D], of the same dtype: the weight of the LM head.
        token_ids: [N] or [B, T], int32 or int64; ids outside the vocabulary as in `linear_logp`.
        loss_fn: called as loss_fn(logp, entropy, **inputs) with the rows of a chunk: [n], or [b, T] with
            whole sequences, or [1, t] with a part of one that does not fit in the workspace, if the loss is
            declared by `isobit.losses.by_rows`. Plain PyTorch. It returns the chunk's share of the loss, a
            scalar, or (loss, sums), where sums is a dict of other values to be summed over chunks. Shares
            must add up: return a sum over rows divided by a fixed number, not a mean over the rows of the
            chunk. `isobit.losses` has some. Without rows it is called once, with empty tensors.
        inputs: other arguments of loss_fn, by name. Tensors with the shape of token_ids are split like the
            rows; tensors [B] (with cu_seqlens: one element per sequence, and sequences without rows are left
            out) like the sequences; values without dimensions are passed unchanged. They get no gradient.
        bias: [V], of the same dtype as the weight or fp32; added in fp32.
        mask: [N] or [B, T], bool or integer; rows where it is 0 are masked. Masked rows have log-probability
            0 and get no gradient, and their values, NaN included, reach no result. loss_fn does not receive
            the mask, unless it is among the inputs too.
        ignore_index: rows with this token id are masked, too.
        temperature: a positive number that divides the logits, or an fp32 tensor with one for every row.
        entropy: pass the entropies to loss_fn too; otherwise it gets None. If the loss uses their gradient,
            logits are computed twice.
        cu_seqlens: where packed sequences begin, [S + 1] from 0 to N: chunks then hold whole sequences, or a
            part of one as above. A list, a numpy array or a tensor; one on a GPU is read by the host, which
            waits once. Not needed for rows [B, T].
        padded_vocab: the padded vocabulary of class lse/8x4, as in `linear_logp`. In that class nothing is
            kept: logits are computed twice.
        workspace_bytes: memory for the probabilities of a chunk and its other buffers; None is 1.3 GiB. Fewer
            rows take less. Larger chunks are faster, since fp32 sums of dweight are read and written once per
            chunk. Logits are computed twice for a sequence that does not fit, unless the loss is declared by
            `isobit.losses.by_rows`, and for all rows if fewer than 1024 fit. That changes bits of gradients;
            where chunks end does not.
        vocab_size: with a group, the number of tokens of all ranks.
        group: ranks that share the vocabulary, in class lse/8x4, as in `linear_logp`: weight and bias are
            this rank's rows, and everything else is the same on every rank, `inputs` and loss_fn included. So
            are the loss and dhidden, with the bits of one GPU; dweight and dbias are those of the rank's
            rows.
        validate: check ids and temperatures on a GPU too, and also run loss_fn on both halves of a chunk, or
            on two chunks as one, to see whether shares add up (host syncs). None does it on CPU tensors, and
            everywhere with ISOBIT_VALIDATE=1.
        numerics: the numerics class that the result must have, as in `linear_logp`.
        backend: force one of `linear_logp`; None takes the first that can serve.

    Returns:
        (loss, stats): the sum of all shares, in their order, and the sums over chunks of what else loss_fn
        returned, detached. The loss is fp32, or fp64 if loss_fn returns fp64; shares and sums in 16 bits are
        added in fp32.

    Log-probabilities and entropies have the bits of `linear_logp`. Gradients go to hidden, weight and bias;
    only those that are needed are computed, and without any there is one product. They equal those of
    `linear_logp` with stored probabilities and the same loss, bit for bit if the gradient of the loss is 1;
    any other value is multiplied in fp32, before the one rounding. Between the call and the backward they
    take 4 V D + 4 N D bytes at most.

    `torch.compile` cannot trace it: a compiled function has a graph break there.

    Example:
        >>> import torch, isobit
        >>> hidden, head = torch.randn(2, 5, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> token_ids, advantages = torch.randint(0, 100, (2, 5)), torch.tensor([1.0, -1.0])
        >>> def reinforce(logp, entropy, advantages, tokens):
        ...     return -(logp * advantages[:, None]).sum() / tokens, {"logp": logp.sum()}
        >>> loss, stats = isobit.linear_policy_loss(
        ...     hidden, head, token_ids, loss_fn=reinforce, inputs={"advantages": advantages, "tokens": 10}
        ... )
        >>> loss.backward()
        >>> hidden.grad.shape, head.grad.shape, stats["logp"].shape
        (torch.Size([2, 5, 16]), torch.Size([100, 16]), torch.Size([]))
    """
    given: dict[str, Any] = {
        "hidden": hidden, "weight": weight, "token_ids": token_ids, "loss_fn": loss_fn, "inputs": inputs,
        "bias": bias, "mask": mask, "ignore_index": ignore_index, "temperature": temperature,
        "entropy": entropy, "cu_seqlens": cu_seqlens, "padded_vocab": padded_vocab,
        "workspace_bytes": workspace_bytes, "validate": validate, "numerics": numerics, "backend": backend,
    }  # fmt: skip
    if group is not None or is_dtensor(weight):
        call: Call = resolve(_OF_RANKS)(given, vocab_size, group)
    elif vocab_size is not None:
        rule = "is for a vocabulary that ranks share; without a group pass weight[:vocab_size], and bias too"
        raise declared.contract.error("vocab_size", vocab_size, rule)
    else:
        call = call_of(given)
    tensors = (call.args["hidden"], call.args["weight"], call.args["bias"])
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        with torch.no_grad():
            sums = evaluate(call)
        return sums.loss, sums.stats
    from isobit.ops.linear_policy_loss.autograd import with_gradients  # only training needs it

    return with_gradients(call, tensors)


def call_of(given: dict[str, Any]) -> Call:
    """A call that satisfies the contract, and the backend that serves it."""
    served = declared.serve(given)
    args = served.args
    batch = batch_of(args)
    sorted_inputs = batch.sort(args["inputs"] or {}, _input_error)
    loss = Loss(declared.contract, args["loss_fn"])
    return Call(args, served.backend, batch, sorted_inputs, loss, served.validated)


def _input_error(name: str, value: Any, rule: str) -> Exception:
    return declared.contract.error("inputs", value, f"{name!r} {rule}")


# Rules that annotations cannot express


def _of_linear_logp(rule: Callable[[Contract, dict[str, Any]], None]) -> Callable[..., None]:
    return lambda contract, args: rule(contract, args | PLAIN)


for of_rows in linear_logp.forward.rules:
    declared.rule(_of_linear_logp(of_rows))
for of_values in linear_logp.forward.value_rules:
    declared.value_rule(_of_linear_logp(of_values))


@declared.rule
def _loss_fn(contract: Contract, args: dict[str, Any]) -> None:
    if not callable(args["loss_fn"]):
        raise contract.error("loss_fn", args["loss_fn"], "must be a function of (logp, entropy, **inputs)")


@declared.rule
def _inputs(contract: Contract, args: dict[str, Any]) -> None:
    inputs = args["inputs"]
    if inputs is not None and not (isinstance(inputs, Mapping) and all(isinstance(k, str) for k in inputs)):
        raise contract.error("inputs", inputs, "must be a dict of the arguments of loss_fn by name")


@declared.rule
def _temperature(contract: Contract, args: dict[str, Any]) -> None:
    given = args["temperature"]
    if isinstance(given, Tensor) and given.requires_grad and torch.is_grad_enabled():
        raise contract.error("temperature", given, "no gradient goes to it; detach() it")


@declared.rule
def _rows(contract: Contract, args: dict[str, Any]) -> None:
    ids, given = args["token_ids"], args["cu_seqlens"]
    if ids.ndim not in (1, 2):
        raise contract.error("token_ids", ids, "must be [N], or [B, T] with B sequences of T rows")
    if given is None:
        return
    if bounds_of_lists.is_list(given):
        integers = len(bounds_of_lists.numbers(contract, "cu_seqlens", given)) > 0
    else:
        integers = isinstance(given, Tensor) and given.ndim == 1 and len(given) > 0
        integers = integers and not given.is_floating_point() and given.dtype != torch.bool
    if not integers:
        rule = "must be whole numbers, a list or a tensor [S + 1], and begin with 0"
        raise contract.error("cu_seqlens", given, rule)
    if ids.ndim != 1:
        raise contract.error("cu_seqlens", given, f"is for packed rows [N]; token_ids is {list(ids.shape)}")


declared.like(linear_logp.forward, PLAIN)
declared.differentiable = ("hidden", "weight", "bias")


def batch_of(args: dict[str, Any]) -> Batch:
    """The rows of a call, and where its sequences begin. Reads cu_seqlens, which waits for the GPU if it is
    there."""
    given, shape = args["cu_seqlens"], args["token_ids"].shape
    if given is None:
        lines = None if len(shape) == 1 else [line * shape[1] for line in range(shape[0] + 1)]
        return Batch(tuple(shape), lines)
    is_list = bounds_of_lists.is_list(given)
    starts = bounds_of_lists.numbers(declared.contract, "cu_seqlens", given) if is_list else given.tolist()
    bounds.check(declared.contract, "cu_seqlens", given, starts, shape.numel(), of="rows")
    return Batch.packed(starts)
