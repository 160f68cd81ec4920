"""Calls that write their first result to memory of the caller: for engines, which give that memory.

They have no gradient and are no ops of `torch.library`: an engine calls them inside an op of its own. Their
plans are cached by the op and replayed like all others, with the given memory as one more input.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import Args
from isobit.frame.cache_key import cache_key_of, remember
from isobit.frame.call_plan import CallPlan
from isobit.frame.contract import dtype_name
from isobit.frame.op import Op
from isobit.frame.watched import is_watched


def call_into(op: Op, out: Tensor, given: Args) -> None:
    """Call an op by keyword, with its first result in `out`, which has its shape and is contiguous."""
    values = op.contract.in_order(given)
    key = None if is_watched() else cache_key_of((*values, out), torch.is_grad_enabled())
    plan = None if key is None or op._planned_for != op.backends else op._plans.into.get(key)
    if plan is None:
        values = op.bind(given)
        _check(op, out, given)
        plan = PlanInto(op.plan(values), values, out)
        remember(op._plans.into, key, plan)
    plan.run(*[values[i] for i in plan.positions[:-1]], out)


def _check(op: Op, out: Tensor, given: Args) -> None:
    result = op.fake(**given)[0]
    if out.shape != result.shape or out.dtype != result.dtype or not out.is_contiguous():
        rule = f"must be contiguous and like the result, {list(result.shape)} {dtype_name(result.dtype)}"
        raise op.contract.error("out", out, rule)


class PlanInto(CallPlan):
    """The plan of calls like one with these values, whose last tensor is the memory of the first result. A
    launcher takes it as `out`; what another backend returns is copied."""

    __slots__ = ()

    def __init__(self, plan: CallPlan, values: Sequence[Any], out: Tensor) -> None:
        backend, at = plan._backend, len(plan._names)

        def run(out: Tensor, **args: Any) -> Any:
            if backend.launches:
                _, *others = backend.run(out=out, **args)
            else:
                first, *others = backend.run(**args)
                out.copy_(first)
            return None, *others

        def check(values: Sequence[Any]) -> None:
            plan._check((*values[:at], *values[at + 1 :]))

        names, all_values = (*plan._names, "out"), (*values[:at], out, *values[at:])
        made = replace(backend, run=run)
        super().__init__(plan._name, names, made, check, plan._validate, None, all_values)
