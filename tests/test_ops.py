"""Every op x backend x law, against the matrix of what is expected: an unexpected UNSUPPORTED fails too."""

import dis
import inspect
import json

import pytest

import whole_check
from isobit.check import report
from isobit.check.runner import FAIL, OK, UNSUPPORTED, Cell
from isobit.frame.backend import NONE, resolve
from isobit.frame.composed import Composed
from isobit.frame.device import arch_key, default_device
from isobit.frame.op import OPS, public_ops
from isobit.spec.proofs import proofs

DEVICE = default_device()
PRODUCTS = ("det_gemm", "det_linear", "det_gemm_dw")
PUBLIC = [(name, b.name) for name, op in public_ops().items() for b in op.backends]


def expected_unsupported() -> dict[tuple[str, str, str], str]:
    """Laws that do not apply, with the reason they must give. Everything else must be ok. By rule, so that a
    new op needs no entry here: what a backend promises and what it is made of decide."""
    found = {}
    for proof in proofs().values():
        classes = [b.numerics_on(DEVICE) for b in proof.op.backends]
        for backend, numerics in zip(proof.op.backends, classes, strict=True):
            own = proof.of(backend.name)
            # On a CPU kernels run in the interpreter, in a process of its own: their cell compares the two.
            others = [
                b for b, kept in zip(proof.op.backends, classes, strict=True)
                if kept == numerics and b is not backend and not (b.interpreted and DEVICE.type == "cpu")
            ]  # fmt: skip
            lone = own.exact is None and not others
            reasons = {
                "gradient": None if proof.op.differentiable else "no argument has a gradient",
                "agree": "nothing else here keeps numerics class" if lone and own.also is None else None,
                "traceable": "a function over ops" if isinstance(proof.op, Composed) else None,
                "parallel": None if own.shards else "no group of ranks computes it together",
            }
            if numerics == NONE:
                reasons |= dict.fromkeys(("invariant", "agree"), "it promises accuracy, not bits")
                reasons["parallel"] = reasons["parallel"] or "it promises accuracy, not bits"
            if backend.name.startswith("hopper") and arch_key(DEVICE) != "sm_90":
                reasons = dict.fromkeys(whole_check.HERE, "need an NVIDIA Hopper GPU")
            found |= {(proof.op.name, backend.name, law): why for law, why in reasons.items() if why}
    return found


@pytest.mark.parametrize("name", OPS)
def test_every_path_of_a_declaration_leads_to_a_function(name: str) -> None:
    for backend in OPS[name].backends:
        for path in backend.paths:
            assert callable(resolve(path)), path


@pytest.mark.parametrize("name", public_ops())
def test_a_public_function_passes_every_argument_on(name: str) -> None:
    """An argument that it forgot would have its default, whatever the caller gives. Written out, because
    `torch.compile` traces `locals()` only from torch 2.12 on."""
    function = inspect.unwrap(public_ops()[name].function or test_no_law_fails)
    code = function.__code__
    read = {i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")}
    read = {each for loaded in read for each in (loaded if isinstance(loaded, tuple) else (loaded,))}
    assert not {*inspect.signature(function).parameters} - read - set(code.co_cellvars)
    assert "locals" not in code.co_names


@pytest.mark.parametrize("tree", ["", "_tree"])
@pytest.mark.parametrize("module", ["kernels_hopper", "kernels_triton", "model"])
def test_every_module_of_products_has_their_functions(module: str, tree: str) -> None:
    """They are named one by one when they are called, not in the declaration."""
    for function in ("product", "token_product", "ones", "why_not_product", "why_not_token_product"):
        assert callable(resolve(f"isobit.ops.det_gemm.{module}{tree}:{function}"))


EXPECTED_UNSUPPORTED = expected_unsupported()

#: Single cases of a law that a backend leaves to another one of its class, or cannot serve.
EXPECTED_CASES = {(op, "hopper"): "TMA cannot read" for op in PRODUCTS}
EXPECTED_CASES |= {
    (op, "hopper"): f"{op}(backend='hopper'): "
    for op in ("logp", "ratio_kl", "grpo_loss", "linear_logp", "linear_policy_loss")
}
EXPECTED_CASES |= {
    (op, f"{backend}-tree8"): "cuts k into 8 equal leaves"
    for op in PRODUCTS[:2]
    for backend in ("triton", "model")
}


def of_a_dtype_that_is_refused(cell: Cell) -> bool:
    """A class of 16-bit operands, or a kernel without fp64, refuses wider dtypes, and says so."""
    return any(f" {dtype} " in f"{cell.case} " and f" {dtype}" in cell.reason for dtype in ("fp32", "fp64"))


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """All laws but `compile`, as `isobit check` runs them."""
    found = whole_check.cells()
    return [c for c in found if not c.reason.startswith("needs a GPU with")]  # the huge cases, on a small GPU


def test_no_law_fails(cells: list[Cell]) -> None:
    failures = [
        f"{c.op} {c.backend} {c.law} [{c.case}]: {c.reason}\n{c.command}" for c in cells if c.status == FAIL
    ]
    assert not failures, "\n".join(failures)


def test_the_matrix_is_the_expected_one(cells: list[Cell]) -> None:
    expected = {(op, backend, law): OK for op, backend in PUBLIC for law in whole_check.HERE}
    expected |= dict.fromkeys(EXPECTED_UNSUPPORTED, UNSUPPORTED)
    assert report.matrix(cells) == expected


def test_unsupported_cells_say_why(cells: list[Cell]) -> None:
    for cell in (cell for cell in cells if cell.status == UNSUPPORTED):
        law, case = (cell.op, cell.backend, cell.law), (cell.op, cell.backend)
        expected = [EXPECTED_UNSUPPORTED.get(law), EXPECTED_CASES.get(case)]
        known = any(reason is not None and reason in cell.reason for reason in expected)
        assert known or of_a_dtype_that_is_refused(cell), cell


def test_every_ok_cell_compared_something(cells: list[Cell]) -> None:
    assert all(cell.outputs for cell in cells if cell.status == OK)


def test_the_report_is_json_with_totals(cells: list[Cell]) -> None:
    found = json.loads(json.dumps(report.to_json(cells, DEVICE), allow_nan=False))
    assert found["passed"] and found["fail"] == 0 and found["pass_rate"] == 1.0
    assert found["total"] == len(cells) == sum(c["total"] for c in found["candidates"])
    assert {c["candidate"] for c in found["candidates"]} == {backend for _, backend in PUBLIC}
    classes = {(c["op"], c["candidate"]): c["numerics"] for c in found["candidates"]}
    assert classes["det_linear", "model"] == "chain16" and classes["det_gemm_dw", "model"] == "seg16/512"
    assert classes["logp", "reference"] == "none" and classes["logp", "triton"] == "lse/triton-1"
    assert classes["linear_logp", "reference"] == "none"
