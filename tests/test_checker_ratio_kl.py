"""Kernels of `ratio_kl` that are known to be bad must fail, each on the law that is there for it, and a
correct one must pass every law. `test_checker` has those of `logp`, and of what both have in common."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.kernels.host import logits as stored
from isobit.ops.logp import reference as logp_reference
from isobit.ops.ratio_kl import reference

CPU = torch.device("cpu")
MASKED = "N=4 V=33 fp32 mask=bool"
WIDE = "N=10 V=257 bf16 every other temperature=0.7 ref_dtype=fp32"
GIVEN = "N=7 V=1025 fp32 offset ref=logp mask=int64"
BITS = "N=16 V=16501 bf16 sharp ref_dtype=fp32 mask=0.025"
AS_LOGP = "B=2 T=2 V=3001 fp32 sharp shifted each=True"

Run = Callable[..., Any]


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(forward: Run, backward: Run | None = None) -> Iterator[None]:
    """`ratio_kl` with a backend named "candidate" that claims a numerics class, and `logp` of that class."""
    runs = {"ratio_kl": forward, "ratio_kl_bwd": backward or reference.ratio_kl_bwd}
    runs |= {"logp": logp_by_rows, "logp_bwd": logp_reference.logp_bwd}
    with ExitStack() as stack:
        for name, run_backend in runs.items():
            backend = Backend("candidate", run_backend, "test/rows", never, False, never)
            OPS[name].backends.append(backend)
            stack.callback(OPS[name].backends.remove, backend)
        yield


def check(law: str, case: str | None) -> list[Cell]:
    return run(Request(ops=("ratio_kl",), backends=("candidate",), laws=(law,), device=CPU, case=case))


def only(law: str, case: str) -> Cell:
    (cell,) = check(law, case)
    return cell


# A correct kernel, one row at a time so that rows cannot touch each other


def row_by_row(run_reference: Run, by_rows: tuple[str, ...], args: dict[str, Any]) -> tuple[Any, ...]:
    lead, everything = args["token_ids"].shape, dict.fromkeys(args, True)
    flags = {name: True for name in everything if name.startswith("return_") and name != "return_kl"}
    given = [name for name in by_rows if isinstance(args[name], Tensor)]
    flat = {name: args[name].reshape(-1, *args[name].shape[len(lead) :]) for name in given}
    rows = [
        run_reference(**args | flags | {name: t[i : i + 1].clone() for name, t in flat.items()})
        for i in range(lead.numel())
    ]
    if not rows:
        return tuple(run_reference(**args))
    found = [None if each[0] is None else torch.cat(each, -1) for each in zip(*rows, strict=True)]
    return tuple(t if t is None else t.reshape(*t.shape[:-1], *lead) for t in found)


def asked(args: dict[str, Any], outputs: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    """None for what was not asked for."""
    return tuple(o if n is None or args[f"return_{n}"] else None for o, n in zip(outputs, names, strict=True))


ROWS = ("token_ids", "mask", "temperature")


def logp_by_rows(**args: Any) -> tuple[Any, ...]:
    found = row_by_row(logp_reference.logp, ("logits", *ROWS), args)
    return asked(args, found, (None, "entropy", "lse", "stats"))


def by_rows(**args: Any) -> tuple[Any, ...]:
    names = ("policy_logits", "ref_logits", "old_logp", "ref_logp", *ROWS)
    found = row_by_row(reference.ratio_kl, names, args)
    return asked(args, found, (None, "kl", "logp", "entropy", "stats", "stats"))


def test_a_correct_kernel_passes_every_law() -> None:
    with candidate(by_rows):
        cells = [
            *check("accuracy", MASKED), *check("gradient", MASKED), *check("accuracy", WIDE),
            *check("accuracy", GIVEN), *check("repeatable", MASKED), *check("written", MASKED),
            *check("invariant", BITS), *check("agree", AS_LOGP), *check("contract", None),
        ]  # fmt: skip
    assert [(c.law, c.reason) for c in cells if c.status != OK] == []


# Wrong numbers


def zeros(**args: Any) -> tuple[Any, ...]:
    return tuple(o if o is None else torch.zeros_like(o) for o in by_rows(**args))


def short(logits: Tensor | None) -> Tensor | None:
    """Without the last column, where edge rows have their mass."""
    if logits is None:
        return None
    cut = logits.clone()
    cut[..., -1] = torch.finfo(cut.dtype).min
    return cut


def dropped_tail(**args: Any) -> tuple[Any, ...]:
    return by_rows(**args | {"policy_logits": short(args["policy_logits"])})


def dropped_tail_of_the_reference(**args: Any) -> tuple[Any, ...]:
    return by_rows(**args | {"ref_logits": short(args["ref_logits"])})


def with_ref(args: dict[str, Any], ref: Callable[[Tensor], Tensor], k3: Run) -> tuple[Any, ...]:
    """kl made anew of the reference's log-probabilities."""
    ratio, kl, logp, *rest = by_rows(**args | {"return_logp": True})
    if kl is None:
        return ratio, kl, logp if args["return_logp"] else None, *rest
    given = args["ref_logp"]
    if given is None:
        tokens = (args[name] for name in ("token_ids", "mask", "ignore_index", "temperature"))
        given = stored.formula(args["ref_logits"], *tokens)[0]
    live = logp != 0
    kl = torch.where(live, k3(torch.where(live, ref(given), 0.0) - logp), 0.0)
    return ratio, kl, logp if args["return_logp"] else None, *rest


def cancelled_kl(**args: Any) -> tuple[Any, ...]:
    """Right by the formula, and without the digits of a small d."""
    return with_ref(args, lambda ref: ref, lambda d: d.exp() - 1 - d)


def kl_the_other_way(**args: Any) -> tuple[Any, ...]:
    """The estimator of KL(reference || policy)."""
    return with_ref(args, lambda ref: ref, lambda d: torch.expm1(-d) + d)


def log_ratio(**args: Any) -> tuple[Any, ...]:
    ratio, *rest = by_rows(**args)
    return (ratio.log(), *rest)


def masked_ratio_is_zero(**args: Any) -> tuple[Any, ...]:
    """Another convention, in which a mean over all tokens is one over those that count."""
    ratio, *rest = by_rows(**args)
    return (ratio if args["mask"] is None else ratio * args["mask"], *rest)


def masks_afterwards(**args: Any) -> tuple[Any, ...]:
    """Multiplies by the mask instead of selecting: 0 * NaN is NaN."""
    found = by_rows(**args | {"mask": None, "ignore_index": -1})
    if args["mask"] is None:
        return found
    return tuple(o if o is None else o * args["mask"] for o in found)


def one_temperature(**args: Any) -> tuple[Any, ...]:
    """Divides the policy's logits and forgets the reference's."""
    if args["ref_logits"] is None:
        return by_rows(**args)
    return by_rows(**args | {"ref_logits": args["ref_logits"] * args["temperature"]})


@pytest.mark.parametrize(
    ("bad", "output"),
    [(zeros, "0:ratio"), (dropped_tail, "0:ratio"), (log_ratio, "0:ratio"),
     (dropped_tail_of_the_reference, "1:kl"), (cancelled_kl, "1:kl"), (kl_the_other_way, "1:kl"),
     (one_temperature, "1:kl")],
)  # fmt: skip
def test_wrong_numbers_fail_on_accuracy(bad: Run, output: str) -> None:
    with candidate(bad):
        cell = only("accuracy", WIDE)
    assert cell.status == FAIL
    assert cell.reason.startswith(f"{output}: ") and "beyond the bound; worst at [" in cell.reason


@pytest.mark.parametrize("bad", [masked_ratio_is_zero, masks_afterwards])
def test_rows_that_do_not_count_and_are_not_1_and_0_fail_on_accuracy(bad: Run) -> None:
    with candidate(bad):
        cell = only("accuracy", MASKED)
    assert cell.status == FAIL and cell.reason.startswith("0:ratio: ")


def test_a_kl_from_log_probabilities_must_keep_its_digits_too() -> None:
    with candidate(cancelled_kl):
        assert only("accuracy", GIVEN).reason.startswith("1:kl: ")


@pytest.mark.parametrize("forgotten", ["dratio", "dkl", "dlogp", "dentropy"])
def test_a_gradient_that_forgets_an_output_fails_on_gradient_alone(forgotten: str) -> None:
    with candidate(by_rows, lambda **args: reference.ratio_kl_bwd(**args | {forgotten: None})):
        assert only("accuracy", WIDE).status == OK
        cell = only("gradient", WIDE)
    assert cell.status == FAIL and cell.reason.startswith("gradient:policy_logits: ")


def test_a_slope_of_the_wrong_sign_fails_on_gradient_alone() -> None:
    def wrong(**args: Any) -> Tensor:
        slopes = args["slopes"] * torch.tensor([1.0, -1.0]).view(2, *[1] * (args["slopes"].ndim - 1))
        return reference.ratio_kl_bwd(**args | {"slopes": slopes})

    with candidate(by_rows, wrong):
        assert only("accuracy", WIDE).status == OK
        assert only("gradient", WIDE).status == FAIL


# Wrong bits


def flipped(args: dict[str, Any]) -> dict[str, Any]:
    """The same call with the vocabulary from its end: as accurate, and another order of the sums."""
    ids, V = args["token_ids"], args["policy_logits"].shape[-1]
    names = [name for name in ("policy_logits", "ref_logits") if args[name] is not None]
    turned = {name: args[name].flip(-1) for name in names}
    return args | turned | {"token_ids": torch.where((ids >= 0) & (ids < V), V - 1 - ids, ids)}


def another_order(**args: Any) -> tuple[Any, ...]:
    return by_rows(**flipped(args))


def order_depends_on_rows(**args: Any) -> tuple[Any, ...]:
    return by_rows(**args if args["policy_logits"].shape[0] % 2 else flipped(args))


def test_an_order_that_is_not_that_of_logp_fails_on_agree_alone() -> None:
    """A ratio that is not exactly 1 where it should be: nothing else is wrong with it."""
    with candidate(another_order):
        assert [only(law, case).status for law, case in (("accuracy", WIDE), ("invariant", BITS))] == [OK] * 2
        cell = only("agree", AS_LOGP)
    assert cell.status == FAIL and cell.reason.startswith("0:ratio: old_logp of logp: exactly 1: ")


def test_another_order_of_the_reference_alone_fails_on_agree() -> None:
    def bad(**args: Any) -> tuple[Any, ...]:
        if args["ref_logits"] is None:
            return by_rows(**args)
        kl = by_rows(**flipped(args))[1]
        first, _, *rest = by_rows(**args)
        return (first, kl, *rest)

    with candidate(bad):
        cell = only("agree", AS_LOGP)
    assert cell.status == FAIL and cell.reason.startswith("1:kl: from logp of the reference")


def test_an_order_that_depends_on_the_batch_fails_on_invariant() -> None:
    with candidate(order_depends_on_rows):
        assert only("accuracy", MASKED).status == OK
        cell = only("invariant", BITS)
    assert cell.status == FAIL and "differ, first at [" in cell.reason


def test_a_law_of_ratios_that_cannot_fail_is_noticed() -> None:
    """A ratio too coarse to show an order is 1 for every old_logp, and trips the control."""

    def coarse(**args: Any) -> tuple[Any, ...]:
        ratio, *rest = by_rows(**args)
        return ((ratio * 64).round() / 64, *rest)

    with candidate(coarse):
        cell = only("agree", AS_LOGP)
    assert cell.status == FAIL and "another order changed no bit" in cell.reason


# Wrong manners


def test_a_bad_id_silently_clamped_fails_on_contract() -> None:
    def clamps(**args: Any) -> tuple[Any, ...]:
        ids, V = args["token_ids"], args["policy_logits"].shape[-1]
        clamped = torch.where(ids == args["ignore_index"], ids, ids.clamp(0, V - 1))
        return by_rows(**args | {"token_ids": clamped})

    with candidate(clamps):
        (cell,) = check("contract", None)
    assert cell.status == FAIL and "result is not NaN" in cell.reason
