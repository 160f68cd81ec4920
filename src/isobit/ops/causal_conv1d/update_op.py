"""`causal_conv1d` for decoding: the new tokens of each sequence, and a state that is read and written in
place. States are in slots of one tensor, as an engine keeps them for the sequences that it serves."""

from typing import Any, Literal

import torch
from torch import Tensor

from isobit.frame.contract import Contract, Int, Single, dtype_name
from isobit.frame.op import op
from isobit.numerics import Numerics
from isobit.ops.causal_conv1d.op import MODEL, TRITON, WIDTHS


@op("causal_conv1d_update")
def update(
    x: Single[Tensor, "B T D"],
    state: Single[Tensor, "P U D; written"],
    weight: Single[Tensor, "D W"],
    bias: Single[Tensor, "D"] | None,
    activation: Literal["silu"] | None,
    slots: Int[Tensor, "B; any strides"] | None,
) -> Single[Tensor, "B T D in x"]:
    """out."""


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = None,
    slots: Tensor | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """The next tokens of sequences whose last inputs are in `state`, which is updated in place. Their bits
    are those of `causal_conv1d` on the whole sequences.

    Args:
        x: [B, T, D] in bf16, fp16 or fp32: T new tokens of each sequence, mostly 1. The last dimension is
            contiguous.
        state: [P, W - 1, D], of the dtype of x, contiguous: the last inputs in each slot, the oldest first.
            Zeros are a sequence that has not begun.
        weight, bias, activation: as in `causal_conv1d`.
        slots: [B], int32 or int64: the slot of each sequence; no two may be the same. None is 0 to B - 1.
        validate: check slots on a GPU too (a host sync). None checks on CPU tensors, and everywhere with
            ISOBIT_VALIDATE=1. Without the check, a sequence with a slot that does not exist gets NaN and
            writes nothing.
        numerics, backend: as in `causal_conv1d`.

    Returns:
        [B, T, D] in the dtype of x.

    Gradients: none. Train with `causal_conv1d`.

    Example:
        >>> import torch, isobit
        >>> state, weight = torch.zeros(8, 1, 1), torch.tensor([[10.0, 1.0]])
        >>> slots = torch.tensor([5])
        >>> x = torch.ones(1, 1, 1)
        >>> [isobit.causal_conv1d_update(x, state, weight, slots=slots).item() for _ in range(2)]
        [1.0, 11.0]
    """
    out: Tensor = update(
        x=x, state=state, weight=weight, bias=bias, activation=activation, slots=slots, validate=validate,
        numerics=numerics, backend=backend,
    )  # fmt: skip
    return out


def _forms(contract: Contract, args: dict[str, Any]) -> None:
    x, state, weight, bias = args["x"], args["state"], args["weight"], args["bias"]
    W = weight.shape[-1]
    if W not in WIDTHS:
        raise contract.error("weight", weight, f"must have 2, 3 or 4 taps, not {W}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise contract.error("weight", weight, f"dtype must be that of x, {dtype_name(x.dtype)}, or fp32")
    if bias is not None and bias.dtype != weight.dtype:
        raise contract.error("bias", bias, f"dtype must be that of weight, {dtype_name(weight.dtype)}")
    if state.dtype != x.dtype:
        raise contract.error("state", state, f"dtype must be that of x, {dtype_name(x.dtype)}")
    if state.shape[1] != W - 1:
        raise contract.error("state", state, f"must hold W - 1 = {W - 1} inputs, not {state.shape[1]}")
    if args["activation"] not in (None, "silu"):
        raise contract.error("activation", args["activation"], "must be 'silu' or None")
    if args["slots"] is None and len(state) < len(x):
        raise contract.error("state", state, f"has {len(state)} slots for {len(x)} sequences")


def _slots_exist(contract: Contract, args: dict[str, Any]) -> None:
    slots, P = args["slots"], len(args["state"])
    if slots is None:
        return
    given = slots.tolist()
    for b, slot in enumerate(given):
        if not 0 <= slot < P:
            raise contract.error("slots", slots, f"must be from 0 to {P - 1}, but [{b}]={slot}")
    if len({*given}) < len(given):
        raise contract.error("slots", slots, "no two sequences may have one slot")


update.rule(_forms)
update.value_rule(_slots_exist)
update.backend("triton", run="kernels_triton:causal_conv1d_update", **TRITON)
update.backend("model", run="model:causal_conv1d_update", **MODEL)
update.not_differentiable(
    "isobit.causal_conv1d_update has no gradient, because it writes into the state: call it under "
    "torch.no_grad(), and train with isobit.causal_conv1d."
)
