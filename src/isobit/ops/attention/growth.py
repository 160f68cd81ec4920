"""A decode loop: its cache grows at every step, and all of its calls are one family, or two."""

from typing import Any

from isobit.frame.contract import Contract
from isobit.frame.device import sm_count
from isobit.frame.family import Varying, growth
from isobit.ops.attention.calls import FEW_ROWS, SEGMENT, call_of


def lengths_ahead(args: dict[str, Any]) -> list[int]:
    """Lengths from which on a cache that grows needs other kernels than now: where its keys are split over
    programs, and where these are more than the SMs (`kernels_hopper_decode`). A call with one query per
    sequence is a step of a decode loop. Others may have any queries, and compile what they need."""
    call = call_of(args)
    if call.T != 1 or call.group > FEW_ROWS or 0 in (call.B, call.KV):
        return []
    full = sm_count(args["q"].device) // (call.B * call.KV) * SEGMENT
    return [length for length in (SEGMENT + 1, full + 1) if length > call.S]


def keys(contract: Contract) -> Varying:
    """The keys of a call. Without pages and packing, rules and backends read of their number only whether
    they are split."""
    unless = ("cu_seqlens_q", "block_table")
    return growth(contract, "S", unless, kind=lambda S: S > SEGMENT, ahead=lengths_ahead)
