"""isobit: kernels for RL post-training whose bits do not depend on the batch."""

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from isobit.frame.backend import Explanation, UnsupportedError, resolve
from isobit.frame.contract import ContractError
from isobit.frame.op import OPS, known_op
from isobit.frame.public_op import PublicOp
from isobit.ops.attention import attention
from isobit.ops.attention_sink import attention_sink
from isobit.ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from isobit.ops.combine import combine, spread
from isobit.ops.delta_gates import delta_gates
from isobit.ops.delta_rule import chunk_gated_delta_rule_bwd_dhu
from isobit.ops.det_gemm import det_gemm, det_gemm_dw, det_linear
from isobit.ops.det_grouped_linear import det_grouped_dw, det_grouped_linear
from isobit.ops.gated_delta_rule import chunk_gated_delta_rule_fwd_h, gated_delta_rule
from isobit.ops.gated_delta_rule_step import gated_delta_rule_step
from isobit.ops.gated_delta_rule_step.state import DeltaState
from isobit.ops.grpo_loss import group_advantages, grpo_loss
from isobit.ops.linear_logp import linear_logp
from isobit.ops.linear_policy_loss import linear_policy_loss
from isobit.ops.logp import logp
from isobit.ops.ratio_kl import ratio_kl
from isobit.ops.rms_norm import rms_norm
from isobit.ops.rms_norm_gated import rms_norm_gated
from isobit.ops.rope import rope
from isobit.ops.route import route
from isobit.ops.swiglu import swiglu, swiglu_packed

if TYPE_CHECKING:
    from isobit import drift, integrations, losses, nn, parallel
    from isobit.integrations.hf.warmup import warmup

__version__ = "0.1.0"


def explain(op: str, *args: object, **kwargs: object) -> Explanation:
    """Which backend serves this call of `op`, under which numerics class, and why not the others.

    Example:
        >>> import torch, isobit
        >>> print(isobit.explain("logp", torch.zeros(2, 8), torch.tensor([0, 1])).backend)
        reference
    """
    if not isinstance(op, str):
        raise ContractError(
            f"explain(op): must be the name of an op, such as 'logp', not {type(op).__name__}"
        )
    named = known_op(op)
    assert named.function is not None
    try:
        bound = inspect.signature(named.function).bind_partial(*args, **kwargs)
    except TypeError as error:
        raise ContractError(f"{op}: {error}") from None
    given = bound.arguments
    if isinstance(named, PublicOp) and named.explained and given.get("group") is not None:
        bound.apply_defaults()
        of_ranks: Explanation = resolve(named.explained)(dict(bound.arguments))
        return of_ranks
    return named.explain(**named.adapt(given))


def __getattr__(name: str) -> Any:
    """`isobit.drift`, `isobit.integrations`, `isobit.losses`, `isobit.nn`, `isobit.parallel` and
    `isobit.warmup` are loaded when they are first used: many programs use none of them."""
    if name == "warmup":
        return import_module("isobit.integrations.hf.warmup").warmup
    if name in __all__:  # everything else in it is here already
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "OPS",
    "ContractError",
    "DeltaState",
    "Explanation",
    "UnsupportedError",
    "attention",
    "attention_sink",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "combine",
    "delta_gates",
    "det_gemm",
    "det_gemm_dw",
    "det_grouped_dw",
    "det_grouped_linear",
    "det_linear",
    "drift",
    "explain",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "group_advantages",
    "grpo_loss",
    "integrations",
    "linear_logp",
    "linear_policy_loss",
    "logp",
    "losses",
    "nn",
    "parallel",
    "ratio_kl",
    "rms_norm",
    "rms_norm_gated",
    "rope",
    "route",
    "spread",
    "swiglu",
    "swiglu_packed",
    "warmup",
]
