"""Guards rows of logits that hold infinities: what `logp` and `linear_logp` say of them on every backend that
runs on a CPU, against the formula. A row with +inf has an lse, +inf, and no distribution."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from interpreted import in_interpreter
from isobit import linear_logp, logp
from isobit.kernels.host.logprob import formula

INF, NAN = float("inf"), float("nan")

#: Beginnings of rows; numbers follow. The token of every row is column 1.
STARTS = {
    "numbers": [0.5, -1.0],
    "+inf": [INF, 0.0],
    "+inf at the token": [0.0, INF],
    "+inf twice": [INF, INF],
    "+inf and -inf": [INF, -INF],
    "+inf and NaN": [INF, 0.0, NAN],
    "NaN": [NAN, 0.0],
    "-inf": [-INF, 0.0],
    "-inf at the token": [0.0, -INF],
}

#: One step, one split, several splits.
SIZES = (5, 1500, 17000)


def row(start: str, V: int) -> Tensor:
    """+inf and NaN also come last and again, in other lanes and another split than the first."""
    z = torch.linspace(-3, 3, V)
    z[: len(STARTS[start])] = torch.tensor(STARTS[start])
    if start in ("+inf twice", "+inf and NaN"):
        z[-1] = STARTS[start][-1]
    return z


def evaluate(backend: str) -> dict[str, list[Tensor]]:
    """logp, entropy and lse of every row, from logits and from a head whose bias they are; and gradients."""
    wanted = {"return_entropy": True, "return_lse": True, "temperature": 0.7, "backend": backend}
    found = {}
    for V in SIZES:
        z = torch.stack([row(start, V) for start in STARTS]).requires_grad_()
        outputs = logp(z, torch.ones(len(z), dtype=torch.int64), **wanted)
        (grad,) = torch.autograd.grad(outputs[0].sum(), z)
        found[f"logp {V}"] = [*(o.detach() for o in outputs), grad]
    for V in SIZES[:2]:
        rows = []
        for start in STARTS:
            bias = row(start, V).requires_grad_()
            outputs = linear_logp(
                torch.zeros(1, 4), torch.zeros(V, 4), torch.tensor([1]), bias=bias, **wanted
            )
            (grad,) = torch.autograd.grad(outputs[0].sum(), bias)
            rows.append((*(o.detach() for o in outputs), grad[None]))
        found[f"linear_logp {V}"] = [torch.cat(column) for column in zip(*rows, strict=True)]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Tensor]]]:
    path: Path = tmp_path_factory.mktemp("interpreted") / "results"
    in_interpreter(Path(__file__), path)
    return {"reference": evaluate("reference"), "triton": torch.load(path)}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("call", [f"logp {V}" for V in SIZES] + [f"linear_logp {V}" for V in SIZES[:2]])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_results_are_those_of_the_formula(
    found: dict[str, dict[str, list[Tensor]]], backend: str, call: str, start: str
) -> None:
    V, i = int(call.split()[1]), list(STARTS).index(start)
    z = row(start, V).double()[None] / 0.7
    expected = formula(z, torch.tensor([1]), torch.tensor([True]))
    ours = [o[i] for o in found[backend][call]]
    for one, exact in zip(ours, expected, strict=False):
        torch.testing.assert_close(one.double(), exact[0], equal_nan=True, rtol=1e-5, atol=1e-5)
    assert ours[3].isnan().all() == ours[0].isnan()  # a row without a distribution has no gradient


if __name__ == "__main__":
    torch.save(evaluate("triton"), sys.argv[1])
