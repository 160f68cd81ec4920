"""The checker itself: kernels that are known to be bad must fail, each on the law that is there for it, and a
correct one must pass every law."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.check import report
from isobit.check.laws import LAWS, compilation
from isobit.check.laws.system import peak_extra_bytes
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.launch import Recorder
from isobit.frame.op import OPS
from isobit.kernels.host.tokens import live_rows
from isobit.ops.logp import reference
from isobit.spec.compare import failure, passed
from isobit.spec.proof import Kernels
from isobit.spec.proofs import proofs
from isobit.spec.trial import LawBroken, Trial, Unsupported

FORWARD, BACKWARD = OPS["logp"], OPS["logp_bwd"]
CPU = torch.device("cpu")
MASKED, PLAIN, BITS = "N=20 V=257 fp32 mask=bool", "N=20 V=257 bf16 temperature=0.7", "N=17 V=16501 fp32"

WIDE = Request(ops=("logp",), backends=("candidate",), dims={"N": 20, "V": 50257}, dtypes=(torch.float64,))


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(forward: Callable[..., Any], backward: Callable[..., Any] | None = None) -> Iterator[None]:
    """`logp` with a backend named "candidate" that claims a numerics class, so that bit laws apply to it."""
    added = []
    for op, run_backend in ((FORWARD, forward), (BACKWARD, backward or by_rows_backward)):
        backend = Backend("candidate", run_backend, "test/rows", never, False, never)
        op.backends.append(backend)
        added.append((op, backend))
    try:
        yield
    finally:
        for op, backend in added:
            op.backends.remove(backend)


def check(law: str, case: str | None) -> list[Cell]:
    return run(Request(ops=("logp",), backends=("candidate",), laws=(law,), device=CPU, case=case))


def only(law: str, case: str) -> Cell:
    (cell,) = check(law, case)
    return cell


# A correct kernel, one row at a time so that rows cannot touch each other


def by_rows(**args: Any) -> tuple[Any, ...]:
    lead, V = args["token_ids"].shape, args["logits"].shape[-1]
    z, ids = args["logits"].reshape(-1, V), args["token_ids"].reshape(-1)
    mask = None if args["mask"] is None else args["mask"].reshape(-1)
    everything = {"return_entropy": True, "return_lse": True, "return_stats": True}
    rows = []
    for i in range(len(ids)):
        own = {"logits": z[i : i + 1].clone(), "token_ids": ids[i : i + 1]}
        own["mask"] = None if mask is None else mask[i : i + 1]
        rows.append(reference.logp(**args | own | everything))
    if not rows:
        return reference.logp(**args)
    out, entropy, lse = (torch.cat([r[k] for r in rows]).reshape(lead) for k in range(3))
    stats = torch.cat([r[3] for r in rows], 1).reshape(2, *lead)
    return out, entropy if args["return_entropy"] else None, lse if args["return_lse"] else None, stats


def by_rows_backward(**args: Any) -> Tensor:
    return reference.logp_bwd(**args)


def test_a_correct_kernel_passes_every_law() -> None:
    with candidate(by_rows):
        cells = [
            *check("accuracy", MASKED), *check("gradient", MASKED), *check("accuracy", PLAIN),
            *check("repeatable", PLAIN), *check("written", PLAIN), *check("invariant", BITS),
            *check("contract", None),
        ]  # fmt: skip
    assert [(c.law, c.reason) for c in cells if c.status != OK] == []


# Wrong numbers


def zeros(**args: Any) -> tuple[Any, ...]:
    return tuple(o if o is None else torch.zeros_like(o) for o in reference.logp(**args))


def dropped_tail(**args: Any) -> tuple[Any, ...]:
    short = args["logits"].clone()
    short[..., -1] = float("-inf")
    found = reference.logp(**(args | {"logits": short}))
    at = args["logits"].float().gather(-1, args["token_ids"].clamp(min=0).long()[..., None])[..., 0]
    return (at / args["temperature"] - found[2], *found[1:])


def no_max_subtraction(**args: Any) -> tuple[Any, ...]:
    found = reference.logp(**args)
    z = args["logits"].float() / args["temperature"]
    lse = z.exp().sum(-1).log()
    at = z.gather(-1, args["token_ids"].clamp(min=0).long()[..., None])[..., 0]
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    return (torch.where(live, at - lse, 0.0), *found[1:])


def leaks_masked_nan(**args: Any) -> tuple[Any, ...]:
    """Multiplies by the mask instead of selecting: 0 * NaN is NaN."""
    unmasked = reference.logp(**(args | {"mask": None, "ignore_index": -1}))
    if args["mask"] is None:
        return unmasked
    return tuple(o if o is None or i == 3 else o * args["mask"] for i, o in enumerate(unmasked))


@pytest.mark.parametrize("bad", [zeros, dropped_tail, no_max_subtraction, leaks_masked_nan])
def test_wrong_numbers_fail_on_accuracy(bad: Callable[..., Any]) -> None:
    with candidate(bad):
        cell = only("accuracy", MASKED)
    assert cell.status == FAIL
    assert "beyond the bound; worst at [" in cell.reason and "truth" in cell.reason


def test_a_gradient_off_by_a_factor_fails_on_gradient_alone() -> None:
    with candidate(by_rows, lambda **args: reference.logp_bwd(**args) * 1.001):
        assert only("accuracy", MASKED).status == OK
        cell = only("gradient", MASKED)
    assert cell.status == FAIL and cell.reason.startswith("gradient:logits: ")


def test_a_gradient_that_is_read_as_contiguous_fails_on_gradient_alone() -> None:
    def backward(**args: Any) -> Tensor:
        g = args["dlogp"]
        there = g.untyped_storage().nbytes() // g.element_size() - g.storage_offset()
        read = torch.as_strided(g, (min(there, g.numel()),), (1,), g.storage_offset())
        believed = torch.nn.functional.pad(read, (0, g.numel() - read.numel()))
        return reference.logp_bwd(**args | {"dlogp": believed.view(g.shape)})

    with candidate(by_rows, backward):
        assert only("repeatable", PLAIN).status == OK
        cell = only("gradient", PLAIN)
    assert cell.status == FAIL
    assert cell.reason.startswith("expanded gradient:logits: against a contiguous one: ")
    failed = [o["output"] for o in cell.outputs if not o["passed"]]
    assert failed == [f"{layout} gradient:logits" for layout in ("expanded", "transposed", "sliced")]


def test_a_wrong_forward_is_named_before_any_gradient() -> None:
    with candidate(zeros):
        cell = only("gradient", MASKED)
    assert cell.status == FAIL and "the forward is already wrong" in cell.reason


# Wrong bits


def order_depends_on_rows(**args: Any) -> tuple[Any, ...]:
    """Sums backwards when the batch is even: as accurate, and another order."""
    if args["logits"].shape[0] % 2:
        return by_rows(**args)
    V = args["logits"].shape[-1]
    ids = args["token_ids"]
    flipped = torch.where(ids >= 0, V - 1 - ids, ids)
    return by_rows(**(args | {"logits": args["logits"].flip(-1), "token_ids": flipped}))


def test_an_order_that_depends_on_the_batch_fails_on_invariant_alone() -> None:
    with candidate(order_depends_on_rows):
        assert only("accuracy", MASKED).status == OK
        assert only("repeatable", PLAIN).status == OK
        cell = only("invariant", BITS)
    assert cell.status == FAIL and "differ, first at [" in cell.reason


def test_a_law_of_bits_that_cannot_fail_is_noticed() -> None:
    """Results too coarse to distinguish the order of a sum must fail the negative control."""

    def coarse(**args: Any) -> tuple[Any, ...]:
        return tuple(o if o is None else (o * 64).round() / 64 for o in by_rows(**args))

    with candidate(coarse, lambda **args: torch.zeros_like(args["logits"])):
        cell = only("invariant", BITS)
    assert cell.status == FAIL and "cannot show a wrong order" in cell.reason


def test_a_result_that_changes_between_runs_fails_on_repeatable() -> None:
    calls: list[int] = []

    def unsteady(**args: Any) -> tuple[Any, ...]:
        calls.append(1)
        out, *rest = by_rows(**args)
        return (out + 1e-7 * len(calls), *rest)

    with candidate(unsteady):
        assert only("repeatable", PLAIN).status == FAIL


def test_unwritten_rows_fail_on_written() -> None:
    def skips_masked_rows(**args: Any) -> tuple[Any, ...]:
        full = by_rows(**args)
        out = torch.empty(full[0].shape)
        if (
            not torch.utils.deterministic.fill_uninitialized_memory
            or not torch.are_deterministic_algorithms_enabled()
        ):
            out.zero_()  # fresh memory is often zero, which is how such a kernel survives its tests
        out[1:] = full[0][1:]
        return (out, *full[1:])

    with candidate(skips_masked_rows):
        cell = only("written", PLAIN)
    assert cell.status == FAIL and "NaN-filled memory" in cell.reason


def test_fp64_is_judged_as_fp64() -> None:
    """The truth is fp64 too, and has errors; fp32 arithmetic is much further away."""

    def in_fp32(**args: Any) -> tuple[Any, ...]:
        found = by_rows(**args | {"logits": args["logits"].float()})
        return tuple(t.double() if t is not None and t.dtype == torch.float32 else t for t in found)

    wide = replace(WIDE, laws=("accuracy",))
    with candidate(by_rows):
        assert {cell.status for cell in run(wide)} == {OK}
    with candidate(in_fp32):
        assert {cell.status for cell in run(wide)} == {FAIL}


def test_memory_beyond_the_declared_bound_fails_on_memory() -> None:
    with candidate(by_rows):  # plain PyTorch, held to the bound of a fused kernel
        cell = only("memory", "N=8 V=50257 fp32")
    assert cell.status == FAIL and "bytes beyond inputs and outputs, bound" in cell.reason


def test_memory_that_only_a_cycle_holds_is_not_kept() -> None:
    """Triton's interpreter leaves tensors in cycles, which stay until Python looks for them."""

    def cyclic() -> Tensor:
        node: dict[str, Any] = {"extra": torch.empty(1 << 20, dtype=torch.uint8)}
        node["itself"] = node
        return torch.empty(1 << 10, dtype=torch.uint8)

    assert 1 << 20 <= peak_extra_bytes(cyclic, CPU) < 1 << 21
    assert peak_extra_bytes(lambda: torch.empty(1 << 20), CPU) < 1 << 10  # the result is kept alive


# Wrong manners


def clamps_bad_ids(**args: Any) -> tuple[Any, ...]:
    V = args["logits"].shape[-1]
    ids = args["token_ids"]
    return by_rows(
        **(args | {"token_ids": torch.where(ids == args["ignore_index"], ids, ids.clamp(0, V - 1))})
    )


def test_a_bad_id_silently_clamped_fails_on_contract() -> None:
    with candidate(clamps_bad_ids):
        (cell,) = check("contract", None)
    assert cell.status == FAIL and "result is not NaN" in cell.reason


def writes_into_inputs(**args: Any) -> tuple[Any, ...]:
    found = by_rows(**args)
    args["logits"].data[0, 0] += 1
    return found


def raises(**args: Any) -> tuple[Any, ...]:
    raise ZeroDivisionError("boom")


def wrong_count(**args: Any) -> tuple[Any, ...]:
    return by_rows(**args)[:3]


def wrong_shape(**args: Any) -> tuple[Any, ...]:
    out, *rest = by_rows(**args)
    return (out[:-1], *rest)


def wrong_dtype(**args: Any) -> tuple[Any, ...]:
    out, *rest = by_rows(**args)
    return (out.bfloat16(), *rest)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (writes_into_inputs, "wrote into its input logits"),
        (raises, "ZeroDivisionError: boom (test_checker.py:"),
        (wrong_count, "expected 4, got 3"),
        (wrong_shape, "output logp is [19] fp32, should be [20] fp32"),
        (wrong_dtype, "output logp is [20] bf16, should be [20] fp32"),
    ],
)
def test_misbehaving_kernels_are_rows_with_a_reason(bad: Callable[..., Any], reason: str) -> None:
    with candidate(bad):
        cell = only("accuracy", MASKED)
    assert cell.status == FAIL and reason in cell.reason
    assert cell.command.startswith("isobit check --op logp --backend candidate --law accuracy ")
    assert any(cell.command in line for line in report.notes([cell]))


def test_a_missing_gradient_is_a_row_with_a_reason() -> None:
    with candidate(by_rows, lambda **args: None):
        cell = only("gradient", MASKED)
    assert cell.status == FAIL and "no gradient for logits" in cell.reason


def test_one_failure_does_not_stop_the_others() -> None:
    with candidate(raises):
        cells = run(
            Request(ops=("logp",), backends=("candidate", "reference"), laws=("accuracy",), case=PLAIN)
        )
    assert [(c.backend, c.status) for c in cells] == [("candidate", FAIL), ("reference", OK)]
    assert not report.totals(cells)["passed"]


@triton.jit
def compiles(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)


@triton.jit
def does_not_compile(out):  # type: ignore[no-untyped-def]
    tl.store(out, tl.no_such_function(out))


@pytest.mark.compat
def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(launch: Recorder, dtype: torch.dtype) -> None:
        for kernel in (does_not_compile, compiles):
            launch(kernel, (1,), torch.empty(1, dtype=dtype, device="meta"))

    kernels = {"candidate": Kernels(record, targets=[("cuda", 90, 32)])}
    monkeypatch.setitem(proofs(), "logp", replace(proofs()["logp"], kernels=kernels))
    with candidate(by_rows):
        cells = check("compile", None)
    for cell in cells:
        assert cell.status == FAIL and cell.reason.startswith("does_not_compile cuda:90: CompilationError")
        assert [(o["output"], o["passed"]) for o in cell.outputs] == [
            ("does_not_compile cuda:90", False), ("compiles cuda:90", True),
        ]  # fmt: skip
    assert cells


@triton.jit
def adds(out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out, tl.sum(tl.arange(0, N), 0))  # threads meet in shared memory, if there is more than one warp


def record_adds(launch: Recorder, dtype: torch.dtype) -> None:
    for warps in (1, 4, 2):
        launch(adds, (1,), torch.empty(1, dtype=torch.int32, device="meta"), N=256, num_warps=warps)


@pytest.fixture
def code_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls are compiled does not depend on what their code is like, and nvdisasm takes most of the
    time. That it is read: `test_sass`."""
    monkeypatch.setattr(compilation, "faulty", lambda: False)


@pytest.mark.usefixtures("code_is_not_read")
def test_other_targets_get_the_call_with_most_shared_memory_unless_they_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(*targets: str) -> list[tuple[str, str]]:
        with candidate(by_rows):
            cells = run(Request(ops=("logp",), laws=("compile",), targets=targets))
        mine = next(cell for cell in cells if cell.status == OK)
        return [(o["output"], o["message"]) for o in mine.outputs]

    kernels = {"candidate": Kernels(record_adds, targets=[("cuda", 90, 32), ("cuda", 80, 32)])}
    monkeypatch.setitem(proofs(), "logp", replace(proofs()["logp"], kernels=kernels))
    every, once = compiled("cuda:90", "cuda:80"), compiled()
    assert [name for name, _ in every] == ["adds cuda:90"] * 3 + ["adds cuda:80"] * 3
    assert once[:3] == every[:3] and len(once) == 4
    assert once[3] == every[4] and every[4] not in (every[3], every[5])  # that of four warps


@triton.jit
def compiles_too(out):  # type: ignore[no-untyped-def]
    tl.store(out, 2.0)


@pytest.mark.usefixtures("code_is_not_read")
@pytest.mark.parametrize(
    "asked", [{"brief": True}, {}, {"brief": True, "dtypes": (torch.float32, torch.bfloat16)}]
)
def test_a_brief_check_compiles_one_call_of_each_kernel(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Other targets get the call with the most shared memory of all, not the first here nor the last."""

    def record(launch: Recorder, dtype: torch.dtype) -> None:
        launch(compiles, (1,), torch.empty(1, dtype=dtype, device="meta"))
        for warps in (2, 4, 1):
            launch(adds, (1,), torch.empty(1, dtype=torch.int32, device="meta"), N=256, num_warps=warps)
        launch(compiles_too, (1,), torch.empty(1, dtype=dtype, device="meta"))

    def seen(source: Any, target: Any, options: dict[str, Any]) -> Any:
        name = f"{source.fn.__name__} cuda:{target.arch}"
        compiled.append((name, source.signature["out"], options.get("num_warps")))
        return compile_(source, target=target, options=options)

    compiled, compile_ = list[tuple[str, str, int | None]](), triton.compile
    monkeypatch.setattr(triton, "compile", seen)
    kernels = {"candidate": Kernels(record, targets=[("cuda", n, 32) for n in (90, 89, 80)])}
    monkeypatch.setitem(proofs(), "logp", replace(proofs()["logp"], kernels=kernels))
    with candidate(by_rows):
        cells = run(Request(ops=("logp",), backends=("candidate",), laws=("compile",), **asked))
    assert [cell.status for cell in cells] == [OK, OK]
    assert [o["output"] for cell in cells for o in cell.outputs] == [name for name, *_ in compiled]

    def calls(arch: int, dtype: str, *warps: int) -> list[tuple[str, str, int | None]]:
        """One of each kernel, or that of `adds` with several numbers of warps."""
        added = [(f"adds cuda:{arch}", "*i32", n) for n in warps]
        return [(f"compiles cuda:{arch}", dtype, None), *added, (f"compiles_too cuda:{arch}", dtype, None)]

    if "brief" in asked:
        others = [(f"adds cuda:{arch}", "*i32", 2) for arch in (89, 80)]
        both = [*calls(90, "*fp32", 2), *others, *calls(90, "*bf16", 2), *others]
        assert compiled == (both if "dtypes" in asked else both[:-2])
    else:
        assert compiled == [
            call
            for dtype in ("*fp32", "*bf16")
            for call in calls(90, dtype, 2, 4, 1) + calls(89, dtype, 4) + calls(80, dtype, 4)
        ]


def test_tolerances_say_what_they_are_and_only_tighten() -> None:
    """A bound this tight is the promise; to loosen it, change this test and write down the reason."""
    import json
    from pathlib import Path

    import isobit.spec

    table = json.loads((Path(isobit.spec.__file__).parent / "tolerances.json").read_text())
    assert {"logprob", "product", "token_sum"} <= set(table["classes"])
    for entry in table["classes"].values():
        figures = [ulps for name, by_dtype in entry.items() if name != "about" for ulps in by_dtype.values()]
        assert figures and all(ulps <= 1.0 for ulps in figures)


# Controls


def test_a_control_cannot_pass_by_comparing_a_tensor_with_itself() -> None:
    case = proofs()["logp"].bit_cases[0]
    trial = Trial(FORWARD, "reference", torch.device("cpu"), case, "cpu")
    x = torch.arange(4.0)
    with pytest.raises(LawBroken, match="compares a tensor with itself"):
        trial.control("nothing", [x], [x])
    with pytest.raises(LawBroken, match="compares a tensor with itself"):
        trial.control("a view", [x], [x.view(2, 2).view(4)])
    assert not trial.control("a copy", [x], [x.clone()]).passed
    found = trial.control("one element", [x], [x.clone().index_fill_(0, torch.tensor([2]), 9.0)])
    assert found.passed and found.message == "one element changes bits, as it must: 1 elements"


def test_a_control_that_shows_nothing_leaves_a_case_of_ones_own_open_and_hides_no_failure() -> None:
    case = proofs()["logp"].bit_cases[0]
    declared = Trial(FORWARD, "reference", torch.device("cpu"), case, "cpu")
    x, equal = torch.arange(4.0), passed("0:logp")
    for changed in ({"dims": {"N": 1, "V": 2}}, {"dtype": torch.float16}):
        own = dataclasses.replace(declared, case=dataclasses.replace(case, **changed))
        silent, loud = own.control("a copy", [x], [x.clone()]), own.control("more", [x], [x + 1])
        assert own.conclusive([equal, silent, loud]) == [equal, silent, loud]
        for groups in ([equal, silent], []), ([equal, loud], [equal, silent]):
            with pytest.raises(Unsupported, match="equal bits prove nothing"):
                own.conclusive(*groups)
        wrong = failure("0:logp", "differs")
        assert own.conclusive([equal, silent], [wrong]) == [equal, silent, wrong]


def test_every_law_is_one_entry_with_cases_of_its_own() -> None:
    for proof in proofs().values():
        for law in LAWS.values():
            assert LAWS[law.name] is law and law.cases(proof), (proof.op.name, law.name)
