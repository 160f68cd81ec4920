"""Products of experts: every row times the weight of its expert, with the bits of `det_linear`.

Rows are sorted by expert: those of expert e are offsets[e] to offsets[e + 1].

    det_grouped_linear   y[i]  = x[i] W[e]^T + bias[e]
    det_grouped_dw       dW[e] = dy^T x, summed over the rows of expert e

A row of y is one chain of tensor-core steps over ascending k (class chain16), so it has the bits of
`det_linear(x[i], W[e], bias[e])`, whatever other rows and experts there are. A sum over an expert's rows
starts a fresh chain every 512 of them and folds these in ascending order in fp32 (class seg16/512): the bits
of `det_gemm_dw` on these rows alone. Gradients:

    dx[i] = dy[i] W[e]                          chain16
    dW[e] = dy^T x,  dbias[e] = dy^T 1          seg16/512, rounded once to the dtype of the parameter

Rows from the last offset on belong to no expert: their y and their dx are 0, and no sum includes them.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import resolve
from isobit.frame.contract import F32, Contract, Half, Int, Single, dtype_name
from isobit.frame.device import hopper_cannot_run, triton_cannot_run
from isobit.frame.op import Op, op
from isobit.frame.public_op import public_op
from isobit.kernels.host import bounds
from isobit.numerics import CHAIN16, SEG16_512, Numerics
from isobit.ops.det_gemm.op import always, not_on_the_cpu, of_this_hardware, one_dtype


def _flops(args: dict[str, Any]) -> int:
    return 2 * math.prod(args["x"].shape) * args["weight"].shape[1]


@public_op("det_grouped_linear", flops=_flops)
def linear() -> Half[Tensor, "* N in x"]:
    """x weight[e]^T + bias[e]."""


@linear.public
def det_grouped_linear(
    x: Half[Tensor, "* K; any strides"],
    weight: Half[Tensor, "E N K; any strides"],
    offsets: Int[Tensor, "E+1"],
    bias: Single[Tensor, "E N"] | None = None,
    *,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """x weight[e]^T + bias[e] for the rows of each expert e, with the bits that `det_linear` has for them.

    Args:
        x: [*, K] in bf16 or fp16, the rows of expert 0 first, then those of expert 1, and so on.
        weight: [E, N, K], of the same dtype, any strides: a view of [E, K, N] is read in place.
        offsets: [E + 1], int32 or int64: the first row of each expert, from 0 on, and the end of the last
            one. It stays on the device: there is no host sync. Rows from offsets[E] on are of no expert.
        bias: [E, N], of the same dtype or fp32. It is added to the fp32 sum before the one rounding.
        validate: check offsets on a GPU too (a host sync). None checks on CPU tensors, and everywhere with
            ISOBIT_VALIDATE=1. Without the check wrong offsets give rows to the wrong expert, but nothing is
            read or written out of bounds.
        numerics: the numerics class that the result must have, "chain16"; None takes that of the backend that
            serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "hopper", "triton" or "model"; None takes the first that can serve.

    Returns:
        [*, N] in the dtype of x; 0 for rows of no expert. In class chain16 the bits of a row depend on that
        row of x, and on the weight and bias of its expert, and on nothing else.

    Gradients: dx = dy weight[e] in the class of y; dweight and dbias are sums over the rows of each expert in
    seg16/512, rounded once to the dtype of the parameter. Those that are not needed cost nothing.

    Example:
        >>> import torch, isobit
        >>> x, weight = torch.randn(5, 16).bfloat16(), torch.randn(3, 4, 16).bfloat16()
        >>> y = isobit.det_grouped_linear(x, weight, torch.tensor([0, 2, 2, 5]))
        >>> torch.equal(y[2:], isobit.det_linear(x[2:], weight[2]))
        True
    """
    return linear(
        x=x, weight=weight, offsets=offsets, bias=bias, validate=validate, numerics=numerics, backend=backend
    )


def _linear_bwd_flops(args: dict[str, Any]) -> int:
    return (args["want_x"] + args["want_weight"]) * 2 * math.prod(args["dy"].shape) * args["weight"].shape[2]


@op("det_grouped_linear_bwd", flops=_linear_bwd_flops)
def linear_bwd(
    dy: Half[Tensor, "* N; any strides"],
    x: Half[Tensor, "* K; any strides"] | None,
    weight: Half[Tensor, "E N K; any strides"],
    offsets: Int[Tensor, "E+1"],
    *,
    bias_dtype: torch.dtype | None,
    want_x: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[
    Half[Tensor, "* K in weight if want_x"],
    Half[Tensor, "E N K in weight if want_weight"],
    Single[Tensor, "E N in bias_dtype or weight if want_bias"],
]:
    """(dx, dweight, dbias), those that are wanted."""


@public_op(
    "det_grouped_dw",
    flops=lambda args: 2 * math.prod(args["x"].shape) * args["dy"].shape[-1],
    sizes=lambda args: {"E": args["offsets"].shape[0] - 1},
)
def grouped_dw() -> F32[Tensor, "E N K"]:
    """init[e] + dy^T x over the rows of each expert."""


@grouped_dw.public
def det_grouped_dw(
    x: Half[Tensor, "* K; any strides"],
    dy: Half[Tensor, "* N; any strides"],
    offsets: Int[Tensor, "E+1"],
    *,
    cu_seqlens: Int[Tensor, "E S+1"] | None = None,
    init: F32[Tensor, "E N K"] | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """dy^T x in fp32 for the rows of each expert: the gradient of the experts' weights.

    A new segment begins every 512 rows of an expert, and at every sequence, and segments are added to `init`
    in order: the bits of `det_gemm_dw` on the rows of the expert. So a batch may be split into several calls
    between sequences, if each call takes the result of the one before as `init`.

    Args:
        x: [*, K] in bf16 or fp16, sorted by expert, as in `det_grouped_linear`.
        dy: [*, N], of the same dtype.
        offsets: [E + 1], int32 or int64: the first row of each expert, and the end of the last one.
        cu_seqlens: [E, S + 1], of the dtype of offsets: the first row of each of S sequences among the rows
            of each expert, from offsets[e] to offsets[e + 1]. None is one sequence.
        init: [E, N, K] fp32, the initial value of the sums; None is 0.
        validate: check offsets and cu_seqlens on a GPU too (a host sync). None checks on CPU tensors, and
            everywhere with ISOBIT_VALIDATE=1. Without the check, wrong bounds give a wrong sum, but no read
            is out of bounds.
        numerics: the numerics class that the result must have, "seg16/512"; None takes that of the backend
            that serves, which `isobit.explain` reports. It is an error if no backend can keep it.
        backend: force "hopper", "triton" or "model"; None takes the first that can serve.

    Returns:
        [E, N, K] fp32; init, or 0, for an expert without rows.

    Example:
        >>> import torch, isobit
        >>> x, dy = torch.randn(5, 8).bfloat16(), torch.randn(5, 4).bfloat16()
        >>> dw = isobit.det_grouped_dw(x, dy, torch.tensor([0, 2, 2, 5]))
        >>> torch.equal(dw[2], isobit.det_gemm_dw(x[2:], dy[2:]))
        True
    """
    return grouped_dw(
        x=x, dy=dy, offsets=offsets, cu_seqlens=cu_seqlens, init=init, validate=validate, numerics=numerics,
        backend=backend,
    )  # fmt: skip


# Rules that annotations cannot express


def _offsets_form(contract: Contract, args: dict[str, Any]) -> None:
    """One offset more than there are experts: a contract cannot express that."""
    offsets, experts = args["offsets"], args.get("weight")
    if experts is None:
        experts = args.get("init")
    if len(offsets) == 0:
        raise contract.error("offsets", offsets, "needs at least one element, the 0 it begins with")
    if experts is not None and len(offsets) != len(experts) + 1:
        rule = f"must have one element more than there are experts, {len(experts) + 1}"
        raise contract.error("offsets", offsets, rule)


def _bias_dtype(contract: Contract, args: dict[str, Any]) -> None:
    x, bias = args["x"], args["bias"]
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        raise contract.error("bias", bias, f"dtype must be that of x, {dtype_name(x.dtype)}, or fp32")


def _sequences_form(contract: Contract, args: dict[str, Any]) -> None:
    init, sequences, experts = args["init"], args["cu_seqlens"], len(args["offsets"]) - 1
    if init is not None and init.dtype != torch.float32:
        raise contract.error("init", init, "dtype must be fp32, like the result that it begins")
    if sequences is None:
        return
    if len(sequences) != experts or sequences.shape[1] == 0:
        rule = f"needs one row per expert, {experts}, and in each the end of the last sequence"
        raise contract.error("cu_seqlens", sequences, rule)
    one_dtype("offsets", "cu_seqlens")(contract, args)


def _needs_x(contract: Contract, args: dict[str, Any]) -> None:
    if args["want_weight"] and args["x"] is None:
        raise contract.error("x", None, "is required with want_weight")


def _offsets_ascend(contract: Contract, args: dict[str, Any]) -> None:
    """0 <= ... <= the number of rows: otherwise rows would be of the wrong expert."""
    offsets, R = args["offsets"], args["x"].shape[:-1].numel()
    values = offsets.tolist()
    if values[-1] > R:
        rule = f"must not exceed the number of rows, {R}: [{len(values) - 1}]={values[-1]}"
        raise contract.error("offsets", offsets, rule)
    bounds.check(contract, "offsets", offsets, values, values[-1], of="rows")


def _sequences_ascend(contract: Contract, args: dict[str, Any]) -> None:
    sequences = args["cu_seqlens"]
    if sequences is None:
        return
    starts = args["offsets"].tolist()
    for e, row in enumerate(sequences.tolist()):
        first, end = starts[e], starts[e + 1]
        ascends = all(a <= b for a, b in pairwise(row))
        if row[0] != first or row[-1] != end or not ascends:
            rule = f"must ascend from {first} to {end} for expert {e}, and is {row}"
            raise contract.error("cu_seqlens", sequences, rule)


linear.rule(one_dtype("x", "weight"), _offsets_form, _bias_dtype)
linear.value_rule(_offsets_ascend)
linear_bwd.rule(one_dtype("dy", "weight"), _offsets_form, _needs_x)
grouped_dw.rule(one_dtype("x", "dy"), _offsets_form, _sequences_form)
grouped_dw.value_rule(_offsets_ascend, _sequences_ascend)


# Backends, fastest first. Each is one module with the functions described in `calls`, and serves all ops
# here.

#: (op, whether it is a sum over tokens, its name in `calls`).
_OPS: tuple[tuple[Op, bool, str], ...] = (
    (linear, False, "linear"),
    (linear_bwd, False, "linear_bwd"),
    (grouped_dw, True, "dw"),
)


def _call(function: str) -> Any:
    return resolve(f"{__package__}.calls:{function}")


def _run(name: str, kernels: str, **args: Any) -> Any:
    return _call(f"run_{name}")(kernels, **args)


def _add_backend(
    name: str,
    module: str,
    cannot_run: Callable[[torch.device], str | None],
    numerics: Callable[[Numerics], Callable[[torch.device], str]],
    **options: Any,
) -> None:
    """Registers one module as a backend of all ops here. It is imported at the first call that needs it, and
    so is `calls`."""
    kernels = f"{__package__}.{module}"
    for target, over_tokens, call in _OPS:

        def when(args: dict[str, Any], call: str = call) -> str | None:
            questions = _call(f"of_{call}")(**args)
            reasons = (resolve(f"{kernels}:why_not_{what}")(*two) for what, *two in questions)
            return next((reason for reason in reasons if reason is not None), None)

        target.backend(
            name, run=partial(_run, call, kernels), numerics=numerics(SEG16_512 if over_tokens else CHAIN16),
            cannot_run=cannot_run, when=when, **options,
        )  # fmt: skip


_add_backend("hopper", "kernels_hopper", hopper_cannot_run, always, launches=True)
_add_backend("triton", "kernels_triton", triton_cannot_run, of_this_hardware, interpreted=True, launches=True)
_add_backend("model", "model", lambda device: None, always, not_by_default=not_on_the_cpu)


# Autograd, once for all backends


def _save_linear(call: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    x = call["x"] if call["weight"].requires_grad else None  # frozen weights keep no activations
    return saved | {"x": x, "bias_dtype": None if call["bias"] is None else call["bias"].dtype}


_WHY = (
    "isobit.det_grouped_linear has no second derivative: its backward is made of kernels without a gradient."
)

linear.derivative("x", "weight", "bias", by=linear_bwd, outputs=("y",), save=_save_linear, once=_WHY)
linear_bwd.not_differentiable(_WHY)
grouped_dw.not_differentiable(
    "isobit.det_grouped_dw is a gradient and has none of its own: call it under torch.no_grad(), or on "
    "detached tensors."
)
