"""`isobit.attention` with the result in memory that the caller has: for engines, which give that memory.

It has no gradient and is no op of `torch.library`. An engine calls it inside an op of its own.
"""

from typing import Any

from torch import Tensor

from isobit.frame.cache_key import CacheKey, cache_key_of, remember
from isobit.frame.call_plan import CallPlan
from isobit.frame.contract import ContractError, dtype_name
from isobit.ops.attention.op import forward

#: Of calls that were made before.
_plans: dict[CacheKey, CallPlan] = {}


def attention_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Write `isobit.attention(q, k, v, **options)` to `out`, which has its shape and is contiguous. Nothing
    waits for the device, and only workspaces are allocated: it can be captured into a CUDA graph."""
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        given, rule = (f"{list(t.shape)} {dtype_name(t.dtype)}" for t in (out, q))
        raise ContractError(f"attention_into(out: {given}): must be contiguous and like q, {rule}")
    values = forward.bind(forward.adapt({"q": q, "k": k, "v": v, **options}))
    key = cache_key_of(values, False)
    plan = None if key is None else _plans.get(key)
    if plan is None:
        plan = forward.plan(values)
        remember(_plans, key, plan)
    plan.run_into(out.view(values[0].shape), [values[i] for i in plan.positions])
