"""Kernels of `grpo_loss` and `group_advantages` that are known to be bad: each must fail, on the law that is
there for it, and a correct one must pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.kernels.host.tokens import live_rows
from isobit.ops.grpo_loss import reference
from isobit.ops.grpo_loss.op import of_rows, of_rows_backward
from isobit.ops.grpo_loss.proof import model
from isobit.ops.ratio_kl import reference as rows

CPU = torch.device("cpu")
PLAIN, SEQUENCES = "B=2 T=2 V=17 fp32", "B=4 T=2 V=257 bf16 by=samples mask=bool reduction=sequence_mean"
SUM = "B=3 T=2 V=65 fp32 shifted by=tokens mask=int64 ref=logp reduction=sum normalizer=tensor"
WEIGHTED = "B=3 T=2 V=130 fp16 by=bounds weights=True normalizer=12.5"
BITS = "B=9 T=1 V=3030 fp32 random reduction=sum"
GROUPS = "B=9 T=1 V=3030 fp32 random by=bounds reduction=sequence_mean normalizer=3.0"
ORDERED = "B=4 T=40 V=33 fp32 random by=samples mask=bool reduction=sequence_mean"

ADVANTAGES = "B=56 fp64 random size=14"

Run = Callable[..., Any]


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidates(**runs: Run) -> Iterator[None]:
    """Backends named "candidate" that claim a numerics class, so that bit laws apply to them."""
    added = [
        (OPS[op], Backend("candidate", run, "test/rows", never, False, never)) for op, run in runs.items()
    ]
    for op, backend in added:
        op.backends.append(backend)
    try:
        yield
    finally:
        for op, backend in added:
            op.backends.remove(backend)


def check(law: str, case: str, op: str = "grpo_loss") -> Cell:
    (cell,) = run(Request(ops=(op,), backends=("candidate",), laws=(law,), device=CPU, case=case))
    return cell


# Correct ones: a token at a time, so that tokens cannot touch each other, and sums in the order of the page


def ratio_kl(**args: Any) -> tuple[Tensor | None, ...]:
    lead = args["token_ids"].shape
    flat = {n: x.reshape(-1, *x.shape[len(lead) :]) if isinstance(x, Tensor) else x for n, x in args.items()}
    parts = []
    for i in range(lead.numel()):
        own = {n: x[i : i + 1].clone() if isinstance(x, Tensor) else x for n, x in flat.items()}
        parts.append(rows.ratio_kl(**own))
    if not parts:
        return rows.ratio_kl(**args)
    joined: list[Tensor | None] = []
    for some in zip(*parts, strict=True):
        first = some[0]
        whole = None if first is None else torch.cat(some, -1)
        joined.append(None if whole is None else whole.reshape(*whole.shape[:-1], *lead))
    return tuple(joined)


def ratio_kl_bwd(**args: Any) -> Tensor:
    return rows.ratio_kl_bwd(**args)


def in_lanes(x: Tensor, lanes: int) -> Tensor:
    """Of [n, C] lines."""
    total = x.new_zeros(lanes, x.shape[1])
    for part in x.split(lanes):
        total[: len(part)] += part
    while len(total) > 1:
        total = total[0::2] + total[1::2]
    return total[0]


def added(terms: Tensor) -> Tensor:
    """Of [B, T]: its sequences, each in chunks of 4096 and those in 512 lanes."""
    chunks = [in_lanes(part.T, 512) for part in terms.split(4096, 1)]
    return sum(chunks[1:], chunks[0]) if chunks else terms.new_zeros(len(terms))


def token_loss(
    of_tokens: tuple[Tensor | None, ...], args: dict[str, Any], change: Callable[[Any], Any] = lambda x: x
) -> tuple[Any, ...]:
    """As the reference has it, but for the order of the sums."""
    ratio, kl, entropy, slopes = of_tokens
    found = list(reference.token_loss(ratio, kl, entropy, slopes, **args))
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    A = args["advantages"]
    if A is None:
        names = ("rewards", "samples_per_prompt", "group_boundaries", "eps")
        A = reference.group_advantages(**{name: args[name] for name in names}, scale=True)[:, None]
    r, A = ratio.double(), A.double()
    low, high = 1 - args["clip_low"], 1 + args["clip_high"]
    clipped = torch.where((A > 0) & (r > high), high, torch.where((A < 0) & (r < low), low, r))
    term = -(clipped * A)
    term = term if args["rollout_weights"] is None else term * args["rollout_weights"].double()
    terms = [term, torch.zeros_like(term) if kl is None else kl.double(), r]
    policy, penalty, ratios = (added(change(torch.where(live, x, 0.0))).double() for x in terms)
    length, divisor = live.sum(1), torch.tensor(1.0).double()
    if args["reduction"] == "sequence_mean":
        policy, penalty = (x / length.clamp(min=1) for x in (policy, penalty))
        divisor = (length > 0).sum()
    elif args["reduction"] == "token_mean":
        divisor = length.sum()
    if args["normalizer"] is not None:
        divisor = torch.as_tensor(args["normalizer"]).double()
    divisor = torch.where(length.sum() == 0, 1, divisor)
    sums = torch.stack((policy, penalty, ratios), 1)
    total, total_kl, total_ratio = in_lanes(sums, 128)
    found[:3] = ((total + args["beta"] * total_kl) / divisor, total / divisor, total_kl / divisor)
    found[5] = total_ratio / length.sum().clamp(min=1)
    found[:6] = (x.to(ratio.dtype) for x in found[:6])
    return tuple(found)


def forward(
    change: Callable[..., tuple[Any, ...]] | None = None, terms: Callable[..., Any] = token_loss, **args: Any
) -> tuple[Any, ...]:
    """`change(found, ratio, args)` makes something of (*results, slope, scale)."""
    ratio, kl, _, entropy, stats, slopes = ratio_kl(**of_rows(args))
    found = terms((ratio, kl, entropy, slopes), args)
    found = found if change is None else change(found, ratio, args)
    *results, slope, scale = found
    return (*results, stats, slope, scale)


def backward(**args: Any) -> Tensor:
    dlogp = reference.token_loss_bwd(args["slope"], args["scale"], args["dloss"])
    return ratio_kl_bwd(**of_rows_backward(args, dlogp))


def group_advantages(**args: Any) -> Tensor:
    return model.advantages(args)


CORRECT: dict[str, Run] = {
    "ratio_kl": ratio_kl, "ratio_kl_bwd": ratio_kl_bwd, "grpo_loss": forward, "grpo_loss_bwd": backward,
    "group_advantages": group_advantages,
}  # fmt: skip


def test_correct_kernels_pass() -> None:
    with candidates(**CORRECT):
        cells = [check("accuracy", case) for case in (PLAIN, SEQUENCES, SUM, WEIGHTED)]
        cells += [check("gradient", case) for case in (PLAIN, SEQUENCES, SUM, WEIGHTED)]
        cells += [check("invariant", BITS), check("invariant", GROUPS), check("agree", ORDERED)]
        cells += [check(law, ADVANTAGES, "group_advantages") for law in ("invariant", "agree")]
    assert [(c.law, c.case, c.reason) for c in cells if c.status != OK] == []


# Bad ones


def changed(forward_too: bool = True, **changes: Any) -> Run:
    """The reference with other arguments than it was given: all of it, or what the backward scales alone."""

    def run(**args: Any) -> tuple[Any, ...]:
        def change(found: tuple[Any, ...], ratio: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
            other = {name: value(given) if callable(value) else value for name, value in changes.items()}
            _, kl, _, entropy, _, slopes = ratio_kl(**of_rows(given))
            theirs = reference.token_loss(ratio, kl, entropy, slopes, **given | other)
            return theirs if forward_too else (*found[:8], *theirs[8:])

        return forward(change, **args)

    return run


def wrong_side(found: tuple[Any, ...], ratio: Tensor, args: dict[str, Any]) -> tuple[Any, ...]:
    """max where min belongs: a good token is clipped from below and a bad one from above."""
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    A = torch.where(live, args["advantages"].double(), 0.0)
    inside = ratio.double().clamp(1 - args["clip_low"], 1 + args["clip_high"])
    terms = -torch.maximum(ratio.double() * A, inside * A)
    policy = (terms.sum() / live.sum()).float()
    return (policy + args["beta"] * found[2], policy, *found[2:])


def leaking(found: tuple[Any, ...], ratio: Tensor, args: dict[str, Any]) -> tuple[Any, ...]:
    """The gradient of ratio A everywhere: what was clipped has one."""
    clipless = args | {"clip_low": 1.0, "clip_high": float("inf")}
    _, kl, _, entropy, _, slopes = ratio_kl(**of_rows(args))
    slope = reference.token_loss(ratio, kl, entropy, slopes, **clipless)[8]
    return (*found[:8], slope, found[9])


def counts_masked(found: tuple[Any, ...], ratio: Tensor, args: dict[str, Any]) -> tuple[Any, ...]:
    """Divides by all sequences, also by those that do not count."""
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    share = live.any(-1).sum() / len(live)
    return (*(x * share for x in found[:3]), *found[3:])


def no_penalty_behind(found: tuple[Any, ...], ratio: Tensor, args: dict[str, Any]) -> tuple[Any, ...]:
    """A loss with the KL and a gradient without."""
    _, _, _, entropy, _, slopes = ratio_kl(**of_rows(args))
    slope = reference.token_loss(ratio, None, entropy, slopes, **args)[8]
    return (*found[:8], slope, found[9])


def weighs_the_penalty(found: tuple[Any, ...], ratio: Tensor, args: dict[str, Any]) -> tuple[Any, ...]:
    _, kl, _, entropy, _, slopes = ratio_kl(**of_rows(args))
    assert kl is not None
    return reference.token_loss(ratio, kl * args["rollout_weights"], entropy, slopes, **args)


def of_this_batch(found: tuple[Any, ...], ratio: Tensor, args: dict[str, Any]) -> tuple[Any, ...]:
    """A scale that a kernel rounds differently in large batches."""
    scale = found[9]
    return found if scale is None or len(ratio) < 3 else (*found[:9], scale * (1 + 2e-7))


def sample_std(args: dict[str, Any]) -> Tensor:
    n = args["samples_per_prompt"] or 2
    own = reference.group_advantages(args["rewards"], n, None, args["eps"], True)
    return (own * ((n - 1) / n) ** 0.5)[:, None].expand(args["token_ids"].shape)


#: Forward, the law that it breaks and a case on which that shows, and what the reason says.
BAD: dict[str, tuple[Run, str, str, str]] = {
    "clips the wrong side": (partial(forward, wrong_side), "accuracy", PLAIN, "0:loss"),
    "swaps the bounds": (changed(clip_low=0.28, clip_high=0.2), "accuracy", PLAIN, "0:loss"),
    "counts what is masked": (partial(forward, counts_masked), "accuracy", SEQUENCES, "0:loss"),
    "weighs the penalty": (partial(forward, weighs_the_penalty), "accuracy", WEIGHTED, "0:loss"),
    "takes the deviation of a sample": (
        changed(advantages=sample_std, rewards=None), "accuracy", SEQUENCES, "0:loss"),
    "ignores the normalizer": (changed(normalizer=None), "accuracy", SUM, "0:loss"),
    "leaks a gradient through the clip": (partial(forward, leaking), "gradient", PLAIN, "gradient:"),
    "drops the gradient of the penalty": (
        partial(forward, no_penalty_behind), "gradient", PLAIN, "gradient:"),
    "forgets to scale the gradient": (
        changed(forward_too=False, normalizer=1.0), "gradient", SUM, "gradient:"),
    "lets the batch show": (partial(forward, of_this_batch), "invariant", BITS, "gradient:"),
    "lets other groups show": (partial(forward, of_this_batch), "invariant", GROUPS, "gradient:"),
    "adds in fp32": (
        partial(forward, terms=partial(token_loss, change=lambda x: x.float())), "agree", ORDERED,
        "in the order of docs/numerics.md"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_kernel_fails(name: str) -> None:
    bad, law, case, says = BAD[name]
    with candidates(**CORRECT | {"grpo_loss": bad}):
        cell = check(law, case)
        if law != "accuracy":  # which the numbers themselves keep
            assert check("accuracy", case if law == "gradient" else PLAIN).status == OK
    assert cell.status == FAIL and says in cell.reason, cell.reason


def two_passes_in_fp32(**args: Any) -> Tensor:
    return reference.group_advantages(**args | {"rewards": args["rewards"].float()}).to(args["rewards"].dtype)


def without_the_first(**args: Any) -> Tensor:
    """The textbook's fp32: E[x^2] - E[x]^2."""
    r = args["rewards"].float().reshape(-1, args["samples_per_prompt"])
    var = (r.square().mean(1) - r.mean(1).square()).clamp(min=0)
    found = (r - r.mean(1, keepdim=True)) / var.sqrt().clamp(min=args["eps"])[:, None]
    return found.flatten()


def of_a_sample(**args: Any) -> Tensor:
    n = args["samples_per_prompt"]
    return reference.group_advantages(**args) * ((n - 1) / n) ** 0.5


def by_halves(**args: Any) -> Tensor:
    """In fp64, and in another order than the page says."""
    turned = args["rewards"].clone()
    n = args["samples_per_prompt"]
    turned.view(-1, n)[:, 1:] = args["rewards"].view(-1, n)[:, 1:].flip(1)
    return group_advantages(**args | {"rewards": turned}).view(-1, n)[:, [0, *range(n - 1, 0, -1)]].flatten()


def of_all_groups(**args: Any) -> Tensor:
    """One standard deviation for the batch."""
    found = group_advantages(**args | {"scale": False})
    return found / found.square().mean().sqrt().clamp(min=args["eps"])


@pytest.mark.parametrize(
    ("bad", "law", "case"),
    [
        (without_the_first, "accuracy", "B=28 fp32"),
        (of_a_sample, "accuracy", "B=28 fp32"),
        (of_all_groups, "accuracy", "B=28 fp32"),
        (of_all_groups, "invariant", ADVANTAGES),
        (two_passes_in_fp32, "agree", ADVANTAGES),
        (by_halves, "agree", ADVANTAGES),
    ],
)
def test_bad_advantages_fail(bad: Run, law: str, case: str) -> None:
    with candidates(group_advantages=bad):
        cell = check(law, case, "group_advantages")
    assert cell.status == FAIL and "advantages" in cell.reason, cell.reason
