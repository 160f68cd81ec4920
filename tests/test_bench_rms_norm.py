"""The benchmark of `rms_norm`: bytes, rivals that do the same work, and goals."""

from typing import Any

import pytest
import torch

from isobit.bench.cases import series_of
from isobit.bench.goals import summary
from isobit.bench.implementations import calls_of
from isobit.bench.report import ROW
from isobit.bench.suites import goals_of
from isobit.frame.op import known_op
from isobit.ops.rms_norm import rivals
from isobit.spec.proof import Args, Case
from isobit.spec.series import Pool

CPU = torch.device("cpu")
SERIES = {one.name: one for one in series_of(known_op("rms_norm"))}


def test_what_is_declared() -> None:
    assert list(SERIES) == ["rms_norm", "rms_norm_heads", "rms_norm_residual"]
    sizes = {(case.dims["N"], case.dims["D"]) for case in SERIES["rms_norm"].cases}
    assert sizes >= {(N, D) for N in (1, 32768) for D in (1024, 2048, 4096, 8192)}
    assert set(SERIES["rms_norm"].rivals) == {"native", "eager", "torch.compile", "liger"}
    assert "liger" not in SERIES["rms_norm_residual"].rivals


def test_bytes_are_those_that_must_move() -> None:
    dims, rows = {"N": 1000, "D": 4096}, 1000 * 4096 * 2
    plain, residual = (SERIES[name].cost(dims, torch.bfloat16) for name in ("rms_norm", "rms_norm_residual"))
    assert plain.fwd_bytes == pytest.approx(2 * rows, rel=1e-3)
    assert plain.bwd_bytes == pytest.approx(3 * rows, rel=1e-3)
    assert residual.fwd_bytes == pytest.approx(4 * rows, rel=1e-3)
    assert residual.bwd_bytes == pytest.approx(4 * rows, rel=1e-3)


@pytest.mark.parametrize("name", ["native", "eager"])
@pytest.mark.parametrize("series", ["rms_norm", "rms_norm_residual"])
def test_rivals_do_the_same_work(series: str, name: str) -> None:
    case = Case({"N": 9, "D": 33}, torch.float32, data="random", options=dict(SERIES[series].options))
    args = SERIES[series].make(case, Pool(CPU))[0]
    judge = SERIES[series].judge(args)
    assert judge is not None and set(SERIES[series].directions) >= {"fwd", "fwd_bwd"}

    def without_sum(args: Args) -> Any:
        """Nothing of the gradient of the sum reaches x."""
        out = rivals.RIVALS[name].function(args)
        return (out[0], out[1].detach() + 0 * args["x"]) if isinstance(out, tuple) else 2 * out

    for function, right in ((rivals.RIVALS[name].function, True), (without_sum, False)):
        (call,) = calls_of(function, [args], SERIES[series].inputs, "fwd_bwd")
        found = judge.error("fwd_bwd", call())
        assert found is not None and (found < 1e-5 if right else found > 0.1)


def met(direction: str, D: int, N: int = 32768, floor_ms: float = 1.0, **ms: float) -> dict[str, bool]:
    """Which goals are met at these times, where bytes alone take this long."""
    common: dict[str, Any] = dict.fromkeys(ROW) | {"op": "rms_norm", "case": f"N={N} D={D} bf16"}
    common |= {"direction": direction, "method": "graph", "floor_ms": floor_ms}
    rows = [common | {"impl": impl.replace("_", "."), "ms": time} for impl, time in ms.items()]
    found = summary(rows, None, goals_of("rms_norm"))
    return {goal["what"].partition(":")[0]: goal["met"] for goal in found if goal["cells"]}


def test_goals() -> None:
    assert met("fwd", 2048, isobit=1.086) == {"forward, N >= 32768": True}
    assert met("fwd", 2048, isobit=1.088) == {"forward, N >= 32768": False}
    assert met("fwd_bwd", 4096, isobit=1.149) == {"forward and backward, N >= 32768": True}
    assert met("fwd_bwd", 4096, isobit=1.151) == {"forward and backward, N >= 32768": False}
    few = "N < 32768, plus launches"
    assert met("fwd", 2048, 16, 0.001, isobit=0.0040) == {f"forward, {few}": True}
    assert met("fwd", 2048, 16, 0.001, isobit=0.0042) == {f"forward, {few}": False}
    assert met("fwd_bwd", 2048, 16, 0.001, isobit=0.0111) == {f"forward and backward, {few}": True}
    assert met("fwd", 1024, isobit=9.0) == {}
    assert not met("fwd", 2048, isobit=1.0, native=0.9)["fwd, next to native"]
