"""Rows that pick tokens: which of them are live, and rules on ids, `ignore_index`, temperature and entropy
that annotations cannot express."""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import Contract, dtype_name


def live_rows(token_ids: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    """The rows that are not masked: neither by the mask nor by their id."""
    live = token_ids != ignore_index
    return live if mask is None else live & (mask != 0)


def scalars(contract: Contract, args: dict[str, Any]) -> None:
    """A temperature, or one for every row, and an `ignore_index`."""
    temperature, ignore_index = args["temperature"], args["ignore_index"]
    if isinstance(temperature, Tensor):
        if temperature.dtype not in (torch.float32, next(iter(args.values())).dtype):
            rule = f"dtype must be fp32, not {dtype_name(temperature.dtype)}"
            raise contract.error("temperature", temperature, rule)
    elif not 1e-38 <= temperature <= 1e38:  # kernels multiply by its inverse, in fp32
        raise contract.error("temperature", temperature, "must be a positive number, 1e-38 to 1e38")
    ids = torch.iinfo(args["token_ids"].dtype)
    if not (-(2**31) <= ignore_index < 2**31 or ids.min <= ignore_index <= ids.max):
        raise contract.error("ignore_index", ignore_index, "must be a value that token_ids can hold")


def entropy_is_there(contract: Contract, args: dict[str, Any]) -> None:
    if args["dentropy"] is not None and args["entropy"] is None:
        raise contract.error("entropy", None, "is required with dentropy")


def ids_below(V: int, contract: Contract, args: dict[str, Any]) -> None:
    """Every id of a live row must be one of V tokens. Reads the values."""
    ids = args["token_ids"]
    live = live_rows(ids, args["mask"], args["ignore_index"])
    bad = (live & ((ids < 0) | (ids >= V))).nonzero()
    if len(bad):
        at = bad[0].tolist()
        rule = f"id {ids[tuple(at)].item()} at {at} is outside [0, {V}) and is not ignore_index"
        raise contract.error("token_ids", ids, f"{rule}={args['ignore_index']}")


def temperatures_are_positive(contract: Contract, args: dict[str, Any]) -> None:
    """The temperatures of live rows must be positive. Reads the values."""
    each = args["temperature"]
    if not isinstance(each, Tensor):
        return
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    bad = (live & ~((each >= 1e-38) & (each <= 1e38))).nonzero()
    if len(bad):
        at = bad[0].tolist()
        rule = f"{each[tuple(at)].item()} at {at} is not a positive number, 1e-38 to 1e38"
        raise contract.error("temperature", each, rule)
