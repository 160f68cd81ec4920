"""Calls of the kernels that `grpo_loss` adds to those of `ratio_kl`, with inputs that reach every loop.

Run as a program under TRITON_INTERPRET=1 it saves their results.
"""

import sys
import warnings
from typing import Any
from unittest import mock

import torch
from torch import Tensor

F32, F64, NAN = torch.float32, torch.float64, float("nan")

Args = dict[str, Any]


def group_calls() -> dict[str, Args]:
    """Of `group_advantages`: by a size and by boundaries, groups below and above the lanes."""
    gen = torch.Generator().manual_seed(0)

    def rewards(B: int, dtype: torch.dtype = F64) -> Tensor:
        sizes = torch.exp2(6 * torch.randn(B, generator=gen))
        return (torch.randn(B, generator=gen, dtype=F64) * sizes).to(dtype)

    def call(rewards: Tensor, size: int | None = None, bounds: list[int] | None = None, **rest: Any) -> Args:
        given = None if bounds is None else torch.tensor(bounds)
        args = {"rewards": rewards, "samples_per_prompt": size, "group_boundaries": given, "eps": 1e-6}
        return args | {"scale": True} | rest

    found = {f"groups of {n}": call(rewards(2 * n), n) for n in (1, 2, 127, 128, 129, 300)}
    found["1500 in one"] = call(rewards(1500), 1500)
    found["boundaries"] = call(rewards(300, F32), bounds=[0, 1, 3, 140, 141, 300])
    found["many boundaries"] = call(rewards(290), bounds=[*range(0, 280, 2), 290])
    found["int32 boundaries"] = call(rewards(9), bounds=[0, 4, 9])
    found["int32 boundaries"]["group_boundaries"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    found["every other reward"] = call(rewards(12)[::2], 3)
    found["not scaled"] = call(rewards(8, torch.bfloat16), 4, scale=False)
    found["a large eps"] = call(rewards(8, F32), 4, eps=50.0)
    sizes = torch.tensor([1.0, 1e300, 1e-160], dtype=F64).repeat_interleave(3)
    found["squares that overflow"] = call(rewards(9) * sizes, 3)
    found["sums that overflow"] = call(
        torch.tensor([1.7e308, -1.7e308, 1.7e308, 1.0, 3.0, 2.0], dtype=F64), 3
    )
    found["sums that overflow, not scaled"] = found["sums that overflow"] | {"scale": False}
    return found


#: Invalid boundaries of 300 sequences; on a GPU they may be unchecked.
WRONG_BOUNDS: dict[str, list[int]] = {
    "end": [0, 5, 299], "begin": [1, 300], "equal": [0, 5, 5, 300], "beyond": [0, 400, 300],
    "negative": [0, -5, 300], "one": [0], "the other": [300], "far": [0, 2**62, 300],
    "back": [0, -(2**63), 300], "late": [*range(150), 148, 300],
}  # fmt: skip


#: Sequences of which every one must be NaN: the first ones, or from all over where the fault is far behind.
WRONG_SEQUENCES = {name: [*range(9)] for name in WRONG_BOUNDS}
WRONG_SEQUENCES |= {name: [*range(0, 290, 13), *range(290, 300)] for name in ("end", "late")}


def loss_calls() -> dict[str, tuple[tuple[Tensor | None, ...], Args]]:
    """Of `token_loss`: (ratio, kl, entropy, slopes), and the rest."""
    gen = torch.Generator().manual_seed(1)

    def call(B: int, T: int, **rest: Any) -> tuple[tuple[Tensor | None, ...], Args]:
        ids = torch.randint(0, 9, (B, T), generator=gen)
        mask = torch.rand(B, T, generator=gen) < 0.7
        if rest.pop("dead", False):
            mask = torch.zeros_like(mask)
        live = mask & (ids != 3)
        # Masked tokens hold NaN wherever they may.
        ratio = torch.where(live, torch.exp(0.4 * torch.randn(B, T, generator=gen)), 1.0)
        A = torch.randn(B, T, generator=gen)
        if rest.pop("huge", False):  # two terms that cancel: what was added to one of them before is lost
            first, last = live.int().argmax(1), T - 1 - live.flip(1).int().argmax(1)
            for at, sign in ((first, 1.0), (last, -1.0)):
                A[torch.arange(B), at], ratio[torch.arange(B), at] = sign * 2.0**58, 1.0
        args: Args = {"token_ids": ids, "mask": mask, "advantages": torch.where(live, A, NAN)}
        args |= {
            "rewards": None,
            "samples_per_prompt": None,
            "group_boundaries": None,
            "eps": 1e-6,
            "ignore_index": 3,
        }
        if rest.pop("infinite", False):  # with an advantage of 0, it has no part in the loss
            A[:, ::3] = 0.0
            ratio = torch.where(live & (A == 0), float("inf"), ratio)
            args["advantages"] = torch.where(live, A, NAN)
        args |= {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.0, "reduction": "token_mean"}
        args |= {"normalizer": None, "rollout_weights": None, "return_kept": True} | rest
        kl = torch.where(live, torch.rand(B, T, generator=gen), 0.0) if args["beta"] else None
        if args["rollout_weights"] is not None:
            args["rollout_weights"] = torch.where(live, 2 * torch.rand(B, T, generator=gen), NAN)
        slopes = torch.where(live, torch.randn(2, B, T, generator=gen), 0.0)
        return (ratio, kl, torch.where(live, torch.rand(B, T, generator=gen), 0.0), slopes), args

    found = {
        "two chunks, huge terms": call(2, 4700, beta=0.1, huge=True),
        "several steps, by sequences": call(3, 1100, reduction="sequence_mean", beta=0.1),
        "several tiles of sequences": call(130, 1, reduction="sequence_mean"),
        "a sum with weights": call(3, 7, reduction="sum", rollout_weights=True, beta=0.1),
        "a normalizer": call(3, 7, normalizer=12.5),
        "infinite ratios": call(3, 7, infinite=True),
        "infinite ratios without a bound": call(3, 7, infinite=True, clip_high=float("inf")),
        "a normalizer on the device": call(3, 7, normalizer=torch.tensor(7), reduction="sequence_mean"),
        "all masked": call(2, 3, dead=True, normalizer=torch.tensor(0)),
        "no sequences": call(0, 3),
        "no tokens": call(2, 0),
        "no advantages but of groups": call(
            4, 3, advantages=None, rewards=torch.randn(4, generator=gen), samples_per_prompt=2
        ),
    }
    transposed = call(5, 6, beta=0.1, rollout_weights=True)
    for name in ("token_ids", "mask", "advantages", "rollout_weights"):
        transposed[1][name] = transposed[1][name].T.contiguous().T
    return found | {"transposed": transposed}


def results() -> dict[str, Any]:
    from isobit.ops.grpo_loss import kernels_triton as kernels

    kernels.PROGRAMS = 3  # so that each has several groups
    groups = {name: kernels.group_advantages(**args) for name, args in group_calls().items()}
    some = torch.randn(300, generator=torch.Generator().manual_seed(2))
    wrong = {}
    for name, bounds in WRONG_BOUNDS.items():
        args = {"rewards": some, "samples_per_prompt": None, "group_boundaries": torch.tensor(bounds)}
        wrong[name] = kernels.group_advantages(**args, eps=1e-6, scale=True)
    losses = {name: kernels.token_loss(*given, **args) for name, (given, args) in loss_calls().items()}
    scaled = {name: args for name, args in group_calls().items() if args["scale"]}
    folded = {name: token_advantages(args, some_sequences(args)) for name, args in scaled.items()}
    for name, bounds in WRONG_BOUNDS.items():
        args = {"rewards": some, "samples_per_prompt": None, "group_boundaries": torch.tensor(bounds)}
        folded[name] = token_advantages(args | {"eps": 1e-6}, WRONG_SEQUENCES[name])
    gradients = {name: kernels.grpo_loss_bwd(**args) for name, args in gradient_calls().items()}
    of_rows = {name: of_row_gradients(args) for name, args in gradient_calls().items()}
    found = {"groups": groups, "wrong": wrong, "losses": losses, "folded": folded}
    return found | {"gradients": gradients, "of_rows": of_rows}


def some_sequences(args: Args) -> list[int]:
    """The first and the last ones, those around a multiple of the lanes, and those at both ends of a group:
    every loop and every mask ends at one of them."""
    B, size, bounds = len(args["rewards"]), args["samples_per_prompt"], args["group_boundaries"]
    ends = range(0, B + 1, size) if bounds is None else bounds.tolist()[-3:]
    near = {end + i for end in (0, *range(128, B, 128), *list(ends)[:3], B) for i in (-2, -1, 0, 1)}
    return sorted(near & set(range(B)))


def token_advantages(args: Args, sequences: list[int]) -> Tensor:
    """The advantages that `sum_chunks` finds by itself, of these sequences: each has a program, which takes
    the interpreter milliseconds. With ratios of 1, and a loss that is their negative sum, the slope of a
    token is that of its term."""
    from triton.runtime.interpreter import interpreter_builder

    from isobit.frame.launch import run
    from isobit.ops.grpo_loss import kernels_triton as kernels

    B = len(args["rewards"])

    def these(x: int, y: int, z: int) -> None:
        interpreter_builder.grid_idx = (sequences[x], y, z)

    def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        if kernel is not kernels.sum_chunks:
            run(kernel, grid, *given, **options)
            return
        assert grid[0] == B
        with mock.patch.object(interpreter_builder, "set_grid_idx", these):
            run(kernel, (len(sequences), *grid[1:]), *given, **options)

    ids = torch.zeros(B, 1, dtype=torch.int64)
    args = {n: args[n] for n in ("rewards", "samples_per_prompt", "group_boundaries", "eps")}
    args |= {"token_ids": ids, "mask": None, "advantages": None, "ignore_index": 3, "reduction": "sum"}
    args |= {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.0, "normalizer": None, "rollout_weights": None}
    slope = kernels.token_loss(torch.ones(B, 1), None, None, None, launch, **args, return_kept=True)[8]
    assert slope is not None
    return -slope[sequences, 0]


def gradient_calls() -> dict[str, Args]:
    """Of `grpo_loss_bwd`. A scale of 0 and an infinite one meet slopes of 0."""
    gen, F16 = torch.Generator().manual_seed(3), torch.float16

    def call(B: int, T: int, V: int, dtype: torch.dtype, dloss: float) -> Args:
        args: Args = {"policy_logits": torch.randn(B, T, V, generator=gen).to(dtype), "ignore_index": 3}
        args |= {"token_ids": torch.randint(0, V, (B, T), generator=gen), "temperature": 0.7}
        args |= {"mask": torch.rand(B, T, generator=gen) < 0.8, "dloss": torch.tensor(dloss)}
        args |= {"stats": 1 + torch.rand(2, B, T, generator=gen), "slope": torch.randn(B, T, generator=gen)}
        args["slope"][:, ::3] = 0.0
        return args | {"scale": torch.rand(B, generator=gen) / 3}

    found = {"fp16": call(3, 5, 33, F16, -1.75), "fp32": call(2, 4, 20, F32, 1 / 3)}
    found["none"], found["infinite"] = call(0, 3, 9, F32, 1.0), call(2, 4, 9, F32, float("inf"))
    other = call(4, 3, 17, F32, 0.1)  # as hooks may restore what was saved
    other["slope"], other["scale"] = other["slope"].T.contiguous().T, other["scale"].repeat(2, 1).T[:, 0]
    return found | {"other strides": other}


def of_row_gradients(args: Args) -> Tensor:
    """The same from the backward of `ratio_kl`, with the gradient of the log-probabilities."""
    from isobit.ops.grpo_loss import reference
    from isobit.ops.ratio_kl import kernels_triton

    given = {n: t for n, t in args.items() if n not in ("slope", "scale", "dloss")}
    dlogp = reference.token_loss_bwd(args["slope"], args["scale"], args["dloss"])
    return kernels_triton.ratio_kl_bwd(**given, dlogp=dlogp)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NaN, which numpy warns about
        torch.save(results(), sys.argv[1])
