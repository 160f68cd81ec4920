"""A short causal convolution along the tokens, for every channel alone.

For a token t of a sequence, a channel with W taps w, and inputs x that are 0 before the sequence begins,

    z[t]   = bias + w[0] x[t-W+1] + ... + w[W-1] x[t]      in fp32, added in this order
    out[t] = silu(z[t])                                    or z[t], rounded once to the dtype of x

The state of a sequence is its last W - 1 inputs. Backward, with dz = dout silu'(z) in fp32,

    dx[t]      = dz[t] w[W-1] + dz[t+1] w[W-2] + ...       in this order
    dweight[k] = sum over all rows of dz[t] x[t-W+1+k],    dbias = sum over all rows of dz[t]
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from isobit.frame.contract import Contract, Int, Single, dtype_name
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.frame.triton_and_model import triton_and_model
from isobit.kernels.host import bounds
from isobit.numerics import Numerics

CONV_1 = Numerics(
    "conv/1",
    "The taps of a token from the oldest input to its own, added one after another to the bias or to +0 in"
    " fp32, without contraction; inputs before a sequence are +0. silu with the exp of the device's math"
    " library, and one rounding. Gradients of weight and bias: groups of 16 rows one after another, groups"
    " by a tree of neighbours.",
    "any GPU through Triton",
)

CONV_1_CPU = Numerics("conv/1/cpu", "The order of conv/1 with numpy's exp.", "any CPU through the model")

#: Taps that are served.
WIDTHS = (2, 3, 4)


def _sizes(args: dict[str, Any]) -> dict[str, int]:
    packed = args["cu_seqlens"]
    S = args["x"].shape[0] if packed is None else len(packed) - 1
    return {"S": S, "U": args["weight"].shape[-1] - 1}


@public_op("causal_conv1d", sizes=_sizes)
def forward() -> tuple[Single[Tensor, "B T D in x"], Single[Tensor, "S U D in x if return_final_state"]]:
    """(out, final_state)."""


@overload
def causal_conv1d(
    x: Tensor, weight: Tensor, *, return_final_state: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(x: Tensor, weight: Tensor, **options: Any) -> Tensor: ...
@forward.public  # type: ignore[misc]
def causal_conv1d(  # overloads take any options
    x: Single[Tensor, "B T D"],
    weight: Single[Tensor, "D W"],
    *,
    bias: Single[Tensor, "D"] | None = None,
    activation: Literal["silu"] | None = None,
    initial_state: Single[Tensor, "S U D"] | None = None,
    first: Int[Tensor, "B; any strides"] | None = None,
    cu_seqlens: Int[Tensor, "S+1; any strides"] | None = None,
    return_final_state: bool = False,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal convolution of 2 to 4 taps along the tokens, every channel alone, whose bits are the same in
    training, in prefill at once or in pieces, and in decoding.

    Args:
        x: [B, T, D] in bf16, fp16 or fp32: tokens before channels, the last dimension contiguous.
        weight: [D, W], of the dtype of x or fp32: W = 2, 3 or 4 taps, the last one for a token itself. It is
            `conv1d.weight.squeeze(1)` of a Hugging Face model.
        bias: [D], of the dtype of the weight.
        activation: "silu", or None for none.
        initial_state: [S, W - 1, D], of the dtype of x: the inputs before each sequence, the oldest first.
            None is zeros. It has no gradient.
        first: [B], int32 or int64: where each sequence begins in its row of x. What stands before is padding:
            it is not read, its out is 0 and so is its gradient. None is 0. Not with cu_seqlens.
        cu_seqlens: [S + 1], int32 or int64: the first token of each packed sequence, from 0 to T, with B = 1.
            Sequences may be empty. None: every batch element is a sequence.
        return_final_state: also return the last W - 1 inputs of each sequence, which is the initial_state of
            its next tokens.
        validate: check first and cu_seqlens on a GPU too (a host sync). None checks on CPU tensors, and
            everywhere with ISOBIT_VALIDATE=1. Without the check, wrong bounds give wrong results, but no
            access is out of bounds.
        numerics: the numerics class that the result must have, "conv/1", or "conv/1/cpu" on a CPU; None takes
            that of the backend that serves. It is an error if no backend can keep it.
        backend: force "triton" or "model"; None takes the first that can serve.

    Returns:
        [B, T, D] in the dtype of x; with return_final_state, (that, [S, W - 1, D]). A token's bits depend on
        its own W inputs and the weight only.

    Gradients: of x, weight and bias. dweight and dbias are sums over the rows of x in their order, by groups
    of 16, rounded once: rows of padding add nothing, but shift the groups.

    Example:
        >>> import torch, isobit
        >>> x, weight = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]), torch.tensor([[10.0, 1.0]])
        >>> isobit.causal_conv1d(x, weight).flatten()
        tensor([ 1., 12., 23., 34.])
        >>> out, state = isobit.causal_conv1d(x[:, :2], weight, return_final_state=True)
        >>> isobit.causal_conv1d(x[:, 2:], weight, initial_state=state).flatten()
        tensor([23., 34.])
    """
    out, final_state = forward(
        x=x, weight=weight, bias=bias, activation=activation, initial_state=initial_state, first=first,
        cu_seqlens=cu_seqlens, return_final_state=return_final_state, validate=validate, numerics=numerics,
        backend=backend,
    )  # fmt: skip
    return (out, final_state) if return_final_state else out


@op(
    "causal_conv1d_bwd",
    like=forward.params("x", "weight", "bias", "activation", "initial_state", "first", "cu_seqlens"),
)
def backward(
    dout: Single[Tensor, "B T D"],
    want_x: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[
    Single[Tensor, "B T D in x if want_x"], Single[Tensor, "D W in weight if want_weight"],
    Single[Tensor, "D in weight if want_bias"],
]:  # fmt: skip
    """(dx, dweight, dbias), those that are wanted."""


# Rules that annotations cannot express


def _taps(contract: Contract, args: dict[str, Any]) -> None:
    W = args["weight"].shape[-1]
    if W not in WIDTHS:
        raise contract.error("weight", args["weight"], f"must have 2, 3 or 4 taps, not {W}")


def _dtypes(contract: Contract, args: dict[str, Any]) -> None:
    x, weight = args["x"], args["weight"]
    wanted = dtype_name(x.dtype)
    if weight.dtype not in (x.dtype, torch.float32):
        either = "" if x.dtype == torch.float32 else ", or fp32"
        raise contract.error("weight", weight, f"dtype must be that of x, {wanted}{either}")
    bias = args["bias"]
    if bias is not None and bias.dtype != weight.dtype:
        raise contract.error("bias", bias, f"dtype must be that of weight, {dtype_name(weight.dtype)}")
    state = args.get("initial_state")
    if state is not None and state.dtype != x.dtype:
        raise contract.error("initial_state", state, f"dtype must be that of x, {wanted}")


def _activation(contract: Contract, args: dict[str, Any]) -> None:
    if args["activation"] not in (None, "silu"):
        raise contract.error("activation", args["activation"], "must be 'silu' or None")


def _sequences(contract: Contract, args: dict[str, Any]) -> None:
    packed, state, B = args["cu_seqlens"], args["initial_state"], args["x"].shape[0]
    if packed is not None:
        if B != 1:
            raise contract.error("cu_seqlens", packed, f"needs packed sequences, B = 1, but B={B} from x")
        if len(packed) == 0:
            raise contract.error("cu_seqlens", packed, "needs at least one element, the 0 it begins with")
        if args["first"] is not None:
            rule = "is for sequences in rows of their own; packed ones begin where cu_seqlens says"
            raise contract.error("first", args["first"], rule)
    if state is not None:
        sizes = _sizes(args)
        if state.shape[:2] != (sizes["S"], sizes["U"]):
            rule = f"must be [{sizes['S']}, {sizes['U']}, D]: a sequence each, and W - 1 inputs"
            raise contract.error("initial_state", state, rule)


def _bounds_hold(contract: Contract, args: dict[str, Any]) -> None:
    T, first, packed = args["x"].shape[1], args["first"], args["cu_seqlens"]
    if packed is not None:
        bounds.check(contract, "cu_seqlens", packed, packed.tolist(), T, of="tokens")
    if first is not None:
        for b, begin in enumerate(first.tolist()):
            if not 0 <= begin <= T:
                raise contract.error("first", first, f"must be from 0 to T={T}, but [{b}]={begin}")


forward.rule(_taps, _dtypes, _activation, _sequences)
forward.value_rule(_bounds_hold)


# Backends, fastest first

TRITON, MODEL = triton_and_model(str(CONV_1), str(CONV_1_CPU), "x")
forward.backend("triton", run="kernels_triton:causal_conv1d", **TRITON)
backward.backend("triton", run="kernels_triton_bwd:causal_conv1d_bwd", **TRITON)
forward.backend("model", run="model:causal_conv1d", **MODEL)
backward.backend("model", run="model:causal_conv1d_bwd", **MODEL)


# Autograd, once for all backends

forward.derivative(
    "x", "weight", "bias", by=backward, outputs=("out", "final_state"), constant=("final_state",)
)
backward.not_differentiable(
    "isobit.causal_conv1d has no second derivative: its backward is a kernel without a gradient of its own. "
    "Differentiate torch.nn.functional.conv1d instead where you need one."
)
