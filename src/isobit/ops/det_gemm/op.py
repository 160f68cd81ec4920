"""Matrix products whose bits do not depend on the batch, and their gradients.

    det_gemm     c  = a b
    det_linear   y  = x W^T + bias
    det_gemm_dw  dW = dy^T x, summed over the token stream

A product is one chain of tensor-core steps over ascending k, 16 at a time, with one rounding to the output's
dtype at the end (class chain16); or eight such chains, one for each eighth of k, added as a tree (class
tree8, if it is requested). A bias is added to the fp32 sum before that rounding. A sum over tokens
starts a fresh chain every 512 rows of the stream and folds them in ascending order in fp32 (class seg16/512).
Tiles, instructions and schedules are free: no sum depends on them.

Gradients are these two kinds of products on transposed views. With dy in the operands' dtype,

    dx = dy W,  da = dc b^T         chain16 or tree8
    dW = dy^T x,  db = a^T dc       seg16/512, rounded once to the operand's dtype
    dbias = dy^T 1                  seg16/512
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import resolve
from isobit.frame.contract import F32, Contract, Float, Half, Int, Mask, Single, dtype_name, is_dtensor
from isobit.frame.device import arch_key, hopper_cannot_run, triton_cannot_run
from isobit.frame.op import Op, op
from isobit.frame.public_op import public_op
from isobit.numerics import CHAIN16, NO_CLASS, SEG16_512, TREE8, Numerics
from isobit.ops.det_gemm import calls


def _flops(first: str, second: str) -> Callable[[dict[str, Any]], int]:
    """FLOPs of a product: each element of the first is multiplied by the last dimension of the second."""
    return lambda args: 2 * math.prod(args[first].shape) * args[second].shape[-1]


@public_op("det_gemm", flops=_flops("a", "b"))
def gemm() -> Float[Tensor, "* M N in out_dtype or a"]:
    """a b."""


@gemm.public
def det_gemm(
    a: Half[Tensor, "* M K; any strides"],
    b: Half[Tensor, "* K N; any strides"],
    *,
    out_dtype: torch.dtype | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """The product a b, with bits that do not depend on the batch.

    Args:
        a: [*, M, K] in bf16 or fp16. Any leading shape and any strides: transposed operands are read in
            place.
        b: [*, K, N], of the same dtype and leading shape. Sizes are free, 0 included.
        out_dtype: bf16, fp16 or fp32; None is the dtype of the inputs. The fp32 sum is rounded to it once.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "chain16" or "tree8"; None takes that of the
            backend that serves, which `isobit.explain` reports and is never tree8. It is an error if no
            backend can keep it. tree8 is for a long K and few outputs; K must be a multiple of 8.
        backend: force "hopper", "triton" or "model", or one of class tree8: "hopper-tree8", "triton-tree8",
            "model-tree8"; None takes the first that can serve.

    Returns: [*, M, N]. In the classes chain16 and tree8 the bits of a row depend on that row of `a` and on
        `b`, and not on M, other rows, strides or the schedule.

    Gradients: da = dc b^T in the class of the result and db = a^T dc in seg16/512, each rounded once to the
    dtype of a and b. If out_dtype is another one, dc is rounded to the dtype of a and b first.

    Example:
        >>> import torch, isobit
        >>> a, b = torch.randn(3, 40).bfloat16(), torch.randn(40, 5).bfloat16()
        >>> c = isobit.det_gemm(a, b, out_dtype=torch.float32)
        >>> c.shape
        torch.Size([3, 5])
        >>> torch.equal(c[1:2], isobit.det_gemm(a[1:2], b, out_dtype=torch.float32))
        True
    """
    return gemm(
        a=a, b=b, out_dtype=out_dtype, validate=validate, numerics=numerics, backend=backend,
    )  # fmt: skip


def _gemm_bwd_flops(args: dict[str, Any]) -> int:
    K = args["b"].shape[-2] if args["a"] is None else args["a"].shape[-1]
    return (args["want_a"] + args["want_b"]) * 2 * math.prod(args["dc"].shape) * K


@op("det_gemm_bwd", flops=_gemm_bwd_flops)
def gemm_bwd(
    dc: Float[Tensor, "* M N; any strides"],
    a: Half[Tensor, "* M K; any strides"] | None,
    b: Half[Tensor, "* K N; any strides"] | None,
    want_a: bool,
    want_b: bool,
) -> tuple[Half[Tensor, "* M K in a or b if want_a"], Half[Tensor, "* K N in a or b if want_b"]]:
    """(da, db): dc b^T and a^T dc, each from the other operand."""


@public_op(
    "det_linear",
    aside=("group",),
    explained="isobit.ops.det_gemm.dtensors:explained",
    flops=lambda args: 2 * math.prod(args["x"].shape) * len(args["weight"]),
)
def linear() -> Float[Tensor, "* N in out_dtype or operand_dtype or x"]:
    """x weight^T + bias."""


@linear.public
def det_linear(
    x: Single[Tensor, "* K; any strides"],
    weight: Single[Tensor, "N K; any strides"],
    bias: Single[Tensor, "N"] | None = None,
    *,
    operand_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    group: Any = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """x weight^T + bias, with bits that do not depend on the batch: a drop-in for `F.linear`.

    Args:
        x: [*, K] in bf16 or fp16, any leading shape and strides.
        weight: [N, K], of the same dtype, any strides.
        bias: [N], of the same dtype or fp32. It is added to the fp32 sum before the one rounding.
        operand_dtype: bf16 or fp16. x, weight and bias may then be fp32 and are rounded to it first. Their
            gradients are rounded to it too, and then converted to the dtypes of x, weight and bias. Autocast
            does the same around `F.linear`; here it is part of the op, where a compiler cannot remove it.
        out_dtype: bf16, fp16 or fp32; None is operand_dtype, or else the dtype of x.
        group: for a weight that is a DTensor, `Shard(0)` or `Shard(1)`: its mesh, or the process group of
            that. It says that these ranks share the layer (see isobit.parallel). FSDP2 cuts parameters in
            the same way and means something else, so without it such a weight is refused, unless x is a
            DTensor on the same mesh. Shards that are plain tensors are for `isobit.parallel.column_linear`
            and `row_linear`.
        validate: as in every op; this op has no values to check.
        numerics: the numerics class that the result must have, "chain16" or "tree8"; None takes that of the
            backend that serves, which `isobit.explain` reports and is never tree8. It is an error if no
            backend can keep it. tree8 is for a long K and few outputs; K must be a multiple of 8, and for
            the gradient of x N too.
        backend: force "hopper", "triton" or "model", or one of class tree8: "hopper-tree8", "triton-tree8",
            "model-tree8"; None takes the first that can serve.

    Returns:
        [*, N]. In the classes chain16 and tree8 the bits of a row depend on that row of x, on weight and on
        bias only.

    Gradients: dx = dy weight in the class of y; dweight and dbias are sums over the rows of x in seg16/512.
    Each is rounded once, to the dtype of its parameter. If out_dtype is not the dtype of x, dy is rounded to
    the dtype of x first. Gradients that are not needed cost nothing: with a frozen weight x is not saved.

    Example:
        >>> import torch, isobit
        >>> x = torch.ones(2, 3, 4, dtype=torch.bfloat16)
        >>> weight = torch.full((5, 4), 0.5, dtype=torch.bfloat16, requires_grad=True)
        >>> y = isobit.det_linear(x, weight, torch.ones(5))
        >>> y[1, 2]
        tensor([3., 3., 3., 3., 3.], dtype=torch.bfloat16, grad_fn=<SelectBackward0>)
        >>> y.sum().backward()
        >>> weight.grad[0]
        tensor([6., 6., 6., 6.], dtype=torch.bfloat16)
    """
    if group is not None or (type(weight) is not Tensor and is_dtensor(weight)):
        by_ranks: Callable[..., Tensor] = resolve(f"{__package__}.dtensors:linear_of_dtensors")
        return by_ranks(
            x, weight, bias, group=group, operand_dtype=operand_dtype, out_dtype=out_dtype, validate=validate,
            numerics=numerics, backend=backend,
        )  # fmt: skip
    return linear(
        x=x, weight=weight, bias=bias, operand_dtype=operand_dtype, out_dtype=out_dtype, validate=validate,
        numerics=numerics, backend=backend,
    )  # fmt: skip


def _linear_bwd_flops(args: dict[str, Any]) -> int:
    return (args["want_x"] + args["want_weight"]) * 2 * math.prod(args["dy"].shape) * args["weight"].shape[1]


@op("det_linear_bwd", like=linear.params(..., "operand_dtype"), flops=_linear_bwd_flops)
def linear_bwd(
    dy: Float[Tensor, "* N; any strides"],
    x: Single[Tensor, "* K; any strides"] | None,
    weight: Single[Tensor, "N K; any strides"],
    *,
    bias_dtype: torch.dtype | None,
    want_x: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[
    Half[Tensor, "* K in operand_dtype or weight if want_x"],
    Single[Tensor, "N K in weight if want_weight"],
    Single[Tensor, "N in bias_dtype or weight if want_bias"],
]:
    """(dx, dweight, dbias): dy weight, dy^T x and dy^T 1, where dy is rounded to the operands' dtype first.

    With operand_dtype the sums over tokens are rounded to it too, and then converted to the dtype of their
    parameter. These roundings happen inside the op, because outside it a compiler may remove a rounding
    that is followed by a conversion to a wider dtype."""


@op("det_gemm_subtree", flops=_flops("a", "b"))
def subtree(
    a: Half[Tensor, "M K; any strides"], b: Half[Tensor, "K N; any strides"], leaves: int
) -> F32[Tensor, "M N"]:
    """The fp32 sum over k of some consecutive leaves of class tree8, 1, 2, 4 or 8 of them: what one rank
    contributes to a product whose k is shared by several. Bits are those of that node of the tree."""


@public_op("det_gemm_dw", flops=_flops("x", "dy"))
def gemm_dw() -> F32[Tensor, "N K"]:
    """init + dy^T x over the token stream."""


@gemm_dw.public
def det_gemm_dw(
    x: Half[Tensor, "* K; any strides"],
    dy: Half[Tensor, "* N; any strides"],
    *,
    mask: Mask[Tensor, "*"] | None = None,
    cu_seqlens: Int[Tensor, "S+1; any strides"] | None = None,
    init: F32[Tensor, "N K"] | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """dy^T x in fp32, the gradient of a weight, summed over the token stream in a fixed order.

    The stream is the rows whose mask is nonzero, in order. A new segment begins every 512 of these rows and
    at every sequence, and segments are added to `init` in order. So padding changes no bit, wherever it is
    and whatever it holds. Nor does a split into several calls, between sequences or at a multiple of 512 rows
    of the stream, if each call takes the result of the one before as `init`.

    Args:
        x: [*, K] in bf16 or fp16, any leading shape and strides.
        dy: [*, N], of the same dtype.
        mask: [*], bool or integer; rows where it is 0 are masked, and not read.
        cu_seqlens: [S + 1], int32 or int64: the first row of each sequence, from 0 up to the number of rows,
            which is its last element. None is one sequence.
        init: [N, K] fp32, the initial value of the sum; None is 0.
        validate: check cu_seqlens on a GPU too (a host sync). None checks on CPU tensors, and everywhere
            with ISOBIT_VALIDATE=1. Without the check, wrong bounds give a wrong sum, but no read is out of
            bounds.
        numerics: the numerics class that the result must have, "seg16/512"; None takes that of the backend
            that serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "hopper", "triton" or "model"; None takes the first that can serve.

    Returns:
        [N, K] fp32.

    Example:
        >>> import torch, isobit
        >>> x, dy = torch.randn(700, 8).bfloat16(), torch.randn(700, 4).bfloat16()
        >>> whole = isobit.det_gemm_dw(x, dy)
        >>> part = isobit.det_gemm_dw(x[:512], dy[:512])
        >>> torch.equal(whole, isobit.det_gemm_dw(x[512:], dy[512:], init=part))
        True
    """
    return gemm_dw(
        x=x, dy=dy, mask=mask, cu_seqlens=cu_seqlens, init=init, validate=validate, numerics=numerics,
        backend=backend,
    )  # fmt: skip


# Rules that annotations cannot express


def one_dtype(first: str, second: str) -> Callable[[Contract, dict[str, Any]], None]:
    def rule(contract: Contract, args: dict[str, Any]) -> None:
        if args[second].dtype != args[first].dtype:
            wanted = dtype_name(args[first].dtype)
            raise contract.error(second, args[second], f"dtype must be that of {first}, {wanted}")

    return rule


def _out_dtype(contract: Contract, args: dict[str, Any]) -> None:
    if args["out_dtype"] not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise contract.error("out_dtype", args["out_dtype"], "must be bf16, fp16, fp32 or None (the inputs')")


_HALF = (torch.bfloat16, torch.float16)


def _operand_dtypes(contract: Contract, args: dict[str, Any]) -> None:
    """bf16 or fp16, the same in both; with operand_dtype, which rounds them, bf16, fp16 or fp32 in each."""
    x, bias, narrow = (args[name] for name in ("x", "bias", "operand_dtype"))
    if narrow is not None:
        if narrow not in _HALF:
            raise contract.error("operand_dtype", narrow, "must be bf16, fp16 or None (the inputs')")
        return
    if x.dtype not in _HALF:
        rule = "dtype must be 16-bit floating point (bf16, fp16); operand_dtype rounds fp32 inputs to one"
        raise contract.error("x", x, rule)
    one_dtype("x", "weight")(contract, args)
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        raise contract.error("bias", bias, f"dtype must be that of x, {dtype_name(x.dtype)}, or fp32")


def _needs(name: str, wanted: str) -> Callable[[Contract, dict[str, Any]], None]:
    """The gradient of one operand is computed from the other."""

    def rule(contract: Contract, args: dict[str, Any]) -> None:
        if args[wanted] and args[name] is None:
            raise contract.error(name, None, f"is required with {wanted}")

    return rule


def _stream_form(contract: Contract, args: dict[str, Any]) -> None:
    init, cu_seqlens = args["init"], args["cu_seqlens"]
    if init is not None and init.dtype != torch.float32:
        raise contract.error("init", init, "dtype must be fp32, like the result that it begins")
    if cu_seqlens is not None and len(cu_seqlens) == 0:
        raise contract.error("cu_seqlens", cu_seqlens, "needs at least one element, the 0 it begins with")


def _sequences_ascend(contract: Contract, args: dict[str, Any]) -> None:
    """0 <= ... <= T: otherwise rows would be missing or belong to the wrong sequence."""
    bounds, T = args["cu_seqlens"], args["x"].shape[:-1].numel()
    if bounds is None:
        return
    starts = bounds.tolist()
    for i, (here, last) in enumerate(zip(starts, [0, *starts], strict=False)):
        if here < last or (i == 0 and here != 0):
            rule = "must begin with 0" if i == 0 else f"must not descend: [{i - 1}]={last}, [{i}]={here}"
            raise contract.error("cu_seqlens", bounds, rule)
    if starts[-1] != T:
        raise contract.error("cu_seqlens", bounds, f"must end with the number of rows, {T}, not {starts[-1]}")


gemm.rule(one_dtype("a", "b"), _out_dtype)
subtree.rule(one_dtype("a", "b"))
gemm_bwd.rule(_needs("b", "want_a"), _needs("a", "want_b"))
linear.rule(_operand_dtypes, _out_dtype)
linear_bwd.rule(_needs("x", "want_weight"))
gemm_dw.rule(one_dtype("x", "dy"), _stream_form)
gemm_dw.value_rule(_sequences_ascend)


# Backends, fastest first. Each is one module with the functions described in `calls`, and serves all ops
# here.

#: (op, whether it is a sum over tokens, the products it needs, how to run it).
_OPS: tuple[tuple[Op, bool, Callable[..., Iterator[calls.Question]], Callable[..., Any]], ...] = (
    (gemm, False, calls.of_gemm, calls.run_gemm),
    (gemm_bwd, False, calls.of_gemm_bwd, calls.run_gemm_bwd),
    (linear, False, calls.of_linear, calls.run_linear),
    (linear_bwd, False, calls.of_linear_bwd, calls.run_linear_bwd),
    (gemm_dw, True, calls.of_dw, calls.run_dw),
)


def _device(args: dict[str, Any]) -> torch.device:
    """The device of the first argument; all arguments are on the same one."""
    return next(iter(args.values())).device


def _add_backend(
    name: str,
    module: str,
    cannot_run: Callable[[torch.device], str | None],
    of_products: Callable[[torch.device], str],
    of_sums: Callable[[torch.device], str] | None,
    **options: Any,
) -> None:
    """Registers one module as a backend of all ops here, or of products alone if `of_sums` is None. It is
    imported at the first call that needs it. A backward does both, and reports the class of its product."""
    kernels = f"{__package__}.{module}"
    for target, over_tokens, questions, run in _OPS:
        numerics = of_sums if over_tokens else of_products
        if numerics is None:
            continue

        def when(args: dict[str, Any], questions: Any = questions) -> str | None:
            reason = None
            for what, one, other in questions(**args):
                if 0 not in (*one.shape, *other.shape):
                    reason = reason or resolve(f"{kernels}:why_not_{what}")(one, other)
            return reason

        target.backend(
            name, run=partial(run, kernels), numerics=numerics,
            cannot_run=cannot_run, when=when, **options,
        )  # fmt: skip
    if of_sums is None:  # of class tree8: it has subtrees
        subtree.backend(
            name, run=partial(calls.run_subtree, kernels), numerics=of_products, cannot_run=cannot_run,
            when=partial(calls.why_not_subtree, kernels), **options,
        )  # fmt: skip


def always(numerics: Numerics) -> Callable[[torch.device], str]:
    return lambda device: str(numerics)


def of_this_hardware(numerics: Numerics) -> Callable[[torch.device], str]:
    """The class of `tl.dot` chains in the order of this class. On Hopper it is the class itself. On other
    GPUs a step is whatever the hardware does, so the class carries its name. The interpreter multiplies with
    numpy and promises no bits."""

    def name(device: torch.device) -> str:
        if device.type in ("cpu", "meta"):
            return str(NO_CLASS)
        arch = arch_key(device)
        return str(numerics) if arch == "sm_90" else f"{numerics}/{arch}"

    return name


def not_on_the_cpu(args: dict[str, Any]) -> str | None:
    if _device(args).type == "cpu":
        return None
    return "it computes on the CPU, thousands of times slower: select it by name to compare bits"


_add_backend("hopper", "kernels_hopper", hopper_cannot_run, always(CHAIN16), always(SEG16_512), launches=True)
_add_backend(
    "triton", "kernels_triton", triton_cannot_run, of_this_hardware(CHAIN16), of_this_hardware(SEG16_512),
    interpreted=True, launches=True,
)  # fmt: skip
_add_backend(
    "model", "model", lambda device: None, always(CHAIN16), always(SEG16_512),
    not_by_default=not_on_the_cpu,
)  # fmt: skip

# Those of class tree8 come last: a call that names no class never gets another than chain16.
_add_backend("hopper-tree8", "kernels_hopper_tree", hopper_cannot_run, always(TREE8), None, launches=True)
_add_backend(
    "triton-tree8", "kernels_triton_tree", triton_cannot_run, of_this_hardware(TREE8), None,
    interpreted=True, launches=True,
)  # fmt: skip
_add_backend(
    "model-tree8", "model_tree", lambda device: None, always(TREE8), None, not_by_default=not_on_the_cpu
)


# Autograd, once for all backends


def _save_gemm(call: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The gradient of one operand is computed from the other."""
    a, b = call["a"], call["b"]
    return {"a": a if b.requires_grad else None, "b": b if a.requires_grad else None}


def _save_linear(call: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    x = call["x"] if call["weight"].requires_grad else None  # a frozen weight keeps no activations
    return saved | {"x": x, "bias_dtype": None if call["bias"] is None else call["bias"].dtype}


_WHY = "isobit.{} has no second derivative: its backward is made of kernels without a gradient of their own."

gemm.derivative("a", "b", by=gemm_bwd, outputs=("c",), save=_save_gemm, once=_WHY.format("det_gemm"))
linear.derivative(
    "x", "weight", "bias", by=linear_bwd, outputs=("y",), save=_save_linear, once=_WHY.format("det_linear")
)
gemm_bwd.not_differentiable(_WHY.format("det_gemm"))
linear_bwd.not_differentiable(_WHY.format("det_linear"))
subtree.not_differentiable("a part of a sum has no gradient of its own: isobit.parallel has that of the sum")
gemm_dw.not_differentiable(
    "isobit.det_gemm_dw is a gradient and has none of its own: call it under torch.no_grad(), or on "
    "detached tensors."
)
