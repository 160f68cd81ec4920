"""The proof of `group_advantages`."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.ops.grpo_loss import reference
from isobit.ops.grpo_loss.op import advantages_of
from isobit.ops.grpo_loss.proof import model
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Groups, InputOptions, Kernels, Mutant, Proof

F16, F32, F64, NAN = torch.float16, torch.float32, torch.float64, float("nan")


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Rewards on which naive formulas lose accuracy: large compared with their differences, equal, far apart,
    alternating. Random ones have all magnitudes, because next to a small reward all digits of the mean are
    visible. The second half of each group repeats the first."""
    (B,) = case.dims.values()
    gen = torch.Generator().manual_seed(options.seed)
    rewards = torch.randn(B, generator=gen, dtype=F64)
    if case.data == "constant":
        rewards.fill_(options.constant)
    elif case.data == "edge":
        kind = torch.arange(B) // 7 % 4
        rewards = torch.where(kind == 1, 1000.0 + rewards / 100, rewards)
        rewards = torch.where(kind == 2, 0.1, rewards)
        rewards = torch.where(kind == 3, 1e4 * rewards, rewards)
    args: Args = {"rewards": rewards.to(device, case.dtype), "eps": case.options.get("eps", 1e-6)}
    args["scale"] = case.options.get("scale", True)
    by, size = case.options.get("by", "samples"), case.options.get("size")
    args |= {"samples_per_prompt": size or 7, "group_boundaries": None}
    if by == "bounds":
        bounds = torch.tensor(sorted({min(n, B) for n in (0, 1, 3, 9, B)}), device=device)
        args |= {"samples_per_prompt": None, "group_boundaries": bounds}
    if case.data == "random":
        sizes = torch.exp2(6 * torch.randn(B, generator=gen, dtype=F64))
        args["rewards"] = (rewards * sizes).to(device, case.dtype)
        for first, end in pairwise(_bounds(args, B)):
            half = (end - first) // 2
            args["rewards"][first + half : first + 2 * half] = args["rewards"][first : first + half]
    return args if case.layout == "dense" else lay_out(args, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    given = args["rewards"]
    holes = given.new_full((len(given), 3), NAN)
    return args | {"rewards": holes[:, 1].copy_(given)}


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The dividend is a difference of differences, and sums have rounding errors."""
    (advantages,), (B,) = outputs, args["rewards"].shape
    bounds = _bounds(args, B)
    sizes = advantages.abs()
    for first, end in pairwise(bounds):
        group = args["rewards"][first:end] - args["rewards"][first]
        std = (group - group.mean()).square().mean().sqrt().clamp(min=args["eps"])
        widest = group.abs().max() / (std if args["scale"] else 1.0)
        sizes[first:end] += widest * (math.log2(end - first) + 2)
    return {"advantages": sizes}


def _bounds(args: Args, B: int) -> list[int]:
    n = args["samples_per_prompt"]
    return list(range(0, B + 1, n)) if n else args["group_boundaries"].tolist()


def halves(args: Args) -> Args:
    """Each group whose second half repeats the first becomes two groups: the same means, from other sums."""
    ends: list[int] = [0]
    for first, end in pairwise(_bounds(args, len(args["rewards"]))):
        half = (end - first) // 2
        ends += [first + half, end] if 2 * half == end - first else [end]
    bounds = torch.tensor(ends, device=args["rewards"].device)
    return args | {"samples_per_prompt": None, "group_boundaries": bounds}


def descending(args: Args) -> tuple[Args, None]:
    """Invalid boundaries; no single row is at fault."""
    B, device = len(args["rewards"]), args["rewards"].device
    bounds = torch.tensor([0, B, B], device=device)
    return args | {"samples_per_prompt": None, "group_boundaries": bounds}, None


def _bounded(bounds: Sequence[float]) -> Mutant:
    given = {"samples_per_prompt": None, "group_boundaries": bounds}
    return Mutant(f"boundaries {bounds}", "group_boundaries", lambda args: args | given)


def record(launch: Any, dtype: torch.dtype) -> None:
    from isobit.ops.grpo_loss import kernels_triton as kernels

    rewards, bounds = (torch.empty(n, dtype=d, device="meta") for n, d in ((64, dtype), (5, torch.int64)))
    for size, given, scaled in ((4, None, True), (None, bounds, False)):
        kernels.group_advantages(
            launch, rewards=rewards, samples_per_prompt=size, group_boundaries=given, eps=1e-6, scale=scaled
        )


_BOUNDS = {"by": "bounds"}

ADVANTAGES = Proof(
    op=advantages_of,
    op_class="advantages",
    outputs=("advantages",),
    make=make,
    formula=lambda args: reference.advantages_formula(**args),
    scale=scale,
    controls=[Control("groups in two halves that are equal", halves)],
    padding=lambda args, rows: {"rewards": alter.rows_of_nan(args["rewards"][:, None], rows)[:, 0]},
    layouts=("strided",),
    lay_out=lay_out,
    memory=lambda case, backend, direction: (1 << 20) + 128 * math.prod(case.dims.values()),
    cases=[
        Case({"B": 28}, F32),
        Case({"B": 0}, F32),
        Case({"B": 28}, F32, options={"size": 14, "scale": False}),
        Case({"B": 8}, F32, options={"size": 2}),
        Case({"B": 30}, torch.bfloat16, layout="strided", options=_BOUNDS),
        Case({"B": 3}, F16, options={"size": 1}),
        Case({"B": 1500}, F64, options=_BOUNDS),
        Case({"B": 65537}, F32, options=_BOUNDS, heavy=True),
        Case({"B": 65536}, F32, options={"size": 8}, heavy=True),
    ],
    # In fp64, where the order of a sum is visible in the result.
    bit_cases=[
        Case({"B": 56}, F64, data="random", options={"size": 14}),
        Case({"B": 401}, F64, data="random", options=_BOUNDS),
        # Not a multiple of the 128 lanes: otherwise a group and its half would be summed in the same order.
        Case({"B": 65520}, F64, data="random", options={"size": 252}, heavy=True),
    ],
    memory_cases=[Case({"B": 512}, F32, options={"size": 8})],
    mutants=[
        Mutant("no groups", "samples_per_prompt", lambda a: a | {"samples_per_prompt": None}),
        Mutant("two kinds of groups", "group_boundaries", lambda a: a | {"group_boundaries": [0, 28]}),
        Mutant("groups that do not divide", "samples_per_prompt", lambda a: a | {"samples_per_prompt": 5}),
        Mutant("groups of none", "samples_per_prompt", lambda a: a | {"samples_per_prompt": 0}),
        Mutant("eps = 0", "eps", lambda a: a | {"eps": 0.0}),
        Mutant("whole numbers", "rewards", lambda a: a | {"rewards": a["rewards"].int()}),
        *(_bounded(b) for b in ([], [1, 28], [0, 27], [0, 5, 5, 28], [0, 30, 28], [0, 14.0, 28])),
    ],
    bad_value=descending,
    kernels={"triton": Kernels(record)},
    rows="B",
    groups=Groups("samples_per_prompt", "group_boundaries"),
    exact=model.exact_advantages,
    agree_cases=[
        Case({"B": 56}, F64, data="random", options={"size": 14}),
        Case({"B": 701}, F64, data="random", options=_BOUNDS),
        Case({"B": 65537}, F64, data="random", options=_BOUNDS, heavy=True),
    ],
)  # fmt: skip
