"""Every op x backend x law, against the matrix of what is expected: an unexpected UNSUPPORTED fails too."""

import json

import pytest

from isobit.arch import default_device
from isobit.check import report
from isobit.check.runner import FAIL, LAWS, OK, UNSUPPORTED, Cell, Request, run
from isobit.op import OPS

#: What does not hold or apply, with the reason it must give. Everything else must be ok.
EXPECTED_UNSUPPORTED = {
    ("logp", "reference", "invariant"): "promises accuracy, not bits",
    ("logp", "reference", "compile"): "nothing to compile",
}

PUBLIC = [(name, b.name) for name, op in OPS.items() if op.proof is not None for b in op.backends]


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """The whole check, as `isobit check` runs it."""
    found = run(Request(device=default_device()))
    return [c for c in found if not c.reason.startswith("needs a GPU with")]  # the huge cases, on a small GPU


def test_no_law_fails(cells: list[Cell]) -> None:
    failures = [
        f"{c.op} {c.backend} {c.law} [{c.case}]: {c.reason}\n{c.command}" for c in cells if c.status == FAIL
    ]
    assert not failures, "\n".join(failures)


def test_the_matrix_is_the_expected_one(cells: list[Cell]) -> None:
    expected = {(op, backend, law): OK for op, backend in PUBLIC for law in LAWS}
    expected |= dict.fromkeys(EXPECTED_UNSUPPORTED, UNSUPPORTED)
    assert report.matrix(cells) == expected


def test_unsupported_cells_say_why(cells: list[Cell]) -> None:
    for cell in cells:
        if cell.status == UNSUPPORTED:
            assert EXPECTED_UNSUPPORTED[cell.op, cell.backend, cell.law] in cell.reason


def test_every_ok_cell_compared_something(cells: list[Cell]) -> None:
    assert all(cell.outputs for cell in cells if cell.status == OK)


def test_the_report_is_json_with_totals(cells: list[Cell]) -> None:
    found = json.loads(json.dumps(report.to_json(cells, default_device()), allow_nan=False))
    assert found["passed"] and found["fail"] == 0 and found["pass_rate"] == 1.0
    assert found["total"] == len(cells) == sum(c["total"] for c in found["candidates"])
    assert {c["candidate"] for c in found["candidates"]} == {backend for _, backend in PUBLIC}
