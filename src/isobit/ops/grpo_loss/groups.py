"""Groups of sequences, the samples of one prompt each: given by their size, or by where they begin.

`samples_per_prompt` = n divides a batch into groups of n sequences. `group_boundaries` [G + 1] divides it
into groups of any sizes: group g is the sequences from boundary g up to boundary g + 1, the first boundary is
0 and the last one B.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.frame.call_plan import validates
from isobit.frame.contract import INTS, Contract
from isobit.kernels.host import bounds, bounds_of_lists
from isobit.kernels.host.tokens import live_rows

Boundaries = Sequence[int] | Tensor


# Rules on shapes and numbers


def one_spec(contract: Contract, args: dict[str, Any]) -> None:
    """Rewards need exactly one of the two forms of groups."""
    size, given = args["samples_per_prompt"], args["group_boundaries"]
    if size is None and given is None:
        raise contract.error("samples_per_prompt", None, "is required with rewards, or group_boundaries is")
    if size is not None and given is not None:
        rule = "is given in addition to samples_per_prompt; give one"
        raise contract.error("group_boundaries", given, rule)
    B = args["rewards"].shape[0]
    if size is not None and (size < 1 or B % size):
        rule = "must be at least 1" if size < 1 else f"does not divide the number of sequences, {B}"
        raise contract.error("samples_per_prompt", size, rule)
    if given is not None and given.shape[0] == 0:
        raise contract.error("group_boundaries", given, "needs at least one element, the 0 it begins with")


def floor_is_positive(contract: Contract, args: dict[str, Any]) -> None:
    if not 0 < args["eps"] < float("inf"):
        raise contract.error("eps", args["eps"], "must be a positive number: equal rewards are divided by it")


# Boundaries


def ascend(contract: Contract, args: dict[str, Any]) -> None:
    """Boundaries begin with 0, ascend, and end with the number of sequences. Reads their values."""
    if args["group_boundaries"] is not None:
        check(contract, args["group_boundaries"], args["group_boundaries"].tolist(), args["rewards"].shape[0])


def rewards_are_finite(contract: Contract, args: dict[str, Any]) -> None:
    """A reward that is NaN or infinite makes the advantages of its group NaN, and of no other. So it is a
    mistake only if someone asked: where they are not trained on, it may stand for "no reward". Reads the
    rewards, and which sequences are live."""
    rewards = args["rewards"]
    if rewards is None or not validates(args["validate"]):
        return
    finite = rewards.isfinite()
    if "token_ids" in args:  # of a loss, which masked sequences do not reach
        finite |= ~live_rows(args["token_ids"], args["mask"], args["ignore_index"]).any(-1)
    if bool(finite.all()):
        return
    at = int((~finite).nonzero()[0])
    size, given = args["samples_per_prompt"], args["group_boundaries"]
    starts = list(range(0, len(rewards) + 1, size)) if given is None else given.tolist()
    group = bisect_right(starts, at) - 1
    rule = f"[{at}] is {rewards[at].item()}, so all advantages of its group would be NaN"
    of_group = f"group {group}, sequences {starts[group]} to {starts[group + 1] - 1}"
    raise contract.error("rewards", rewards, f"{rule}: {of_group}")


def check(contract: Contract, given: Boundaries, values: Sequence[int], B: int) -> None:
    bounds.check(contract, "group_boundaries", given, values, B, of="sequences", empty=False)


def adapted(contract: Contract, args: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with boundaries as a tensor on the device of the others. A list, or a tensor on the
    CPU, can be read without waiting for a device, so it is always checked, if there are rewards to check it
    against. A call without them is a mistake that the contract reports."""
    given, rewards = args.get("group_boundaries"), args.get("rewards")
    values: list[int] | None = None
    if bounds_of_lists.is_list(given):
        values = bounds_of_lists.numbers(contract, "group_boundaries", given)
        boundaries = torch.tensor(values, dtype=torch.int64, device="cpu")
    elif isinstance(given, Tensor) and given.device.type == "cpu" and given.ndim == 1:
        boundaries = given
    else:
        return args  # None, on a GPU, or a mistake too
    if isinstance(rewards, Tensor) and rewards.ndim == 1:
        if values is not None:
            check(contract, given, values, rewards.shape[0])
        elif boundaries.dtype in INTS and not torch.compiler.is_compiling():
            # Not while compiling: a graph is checked when it runs.
            check(contract, given, boundaries.tolist(), rewards.shape[0])
    others = (t.device for t in args.values() if isinstance(t, Tensor) and t is not given)
    device = next(others, boundaries.device)
    # A copy that does not wait for the device.
    return args | {"group_boundaries": boundaries.to(device, non_blocking=True)}
