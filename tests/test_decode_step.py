"""The suite of the products of a decoding step, on a CPU with a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.suites import decode_step as suite
from isobit.bench.cases import suite_of
from isobit.bench.goals import summary
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.spec.series import Pool
from publish import tables

QWEN2, QWEN3 = suite.MODELS

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


@pytest.fixture(scope="module")
def args() -> dict[str, Any]:
    made = suite_of("decode_step").series[0].make(suite.SMALL[0], Pool(torch.device("cpu")))
    assert len(made) == suite.STEPS and all(one is made[0] for one in made)
    return made[0]


def test_both_models_are_timed_next_to_pytorch(tmp_path: Path) -> None:
    report = run(
        suite_of("decode_step"), device="cpu", repetitions=2, skip_check=True, say=lambda t: None,
        out_dir=tmp_path,
    )  # fmt: skip
    assert json.loads((tmp_path / "cpu" / "decode_step.json").read_text()) == report
    timed = {QWEN2: ("isobit", "isobit:mixed", "native"), QWEN3: ("isobit", "native")}
    assert [(row["op"], row["impl"]) for row in report["rows"]] == [
        (name, impl) for name, impls in timed.items() for impl in impls
    ]
    for row in report["rows"]:
        assert tuple(row) == ROW and row["case"] == "B=3 bf16" and 0 < row["max_abs"] < 0.03
    assert report["against"] == "native" and set(report["stamp"]["kernels"]) == {"det_gemm"}


def test_the_models_are_those_that_their_names_say() -> None:
    """By the number of parameters that is published. Their embeddings are tied to the head."""

    def parameters(model: suite.Model, norms: int) -> int:
        biases = model.layers * sum(N for name, (N, _) in model.shapes.items() if model.has_bias(name))
        return sum(N * K for _, N, K in model.products) + biases + norms

    qwen2, qwen3 = suite.MODELS.values()
    assert parameters(qwen2, (2 * 24 + 1) * 896) == 494_032_768
    assert parameters(qwen3, (2 * 36 + 1) * 2560 + 36 * 2 * 128) == 4_022_468_096
    assert qwen2.bias and not qwen3.bias
    assert [case.dims["B"] for case in suite.CASES] == [8, 40, 72, 144]
    cost = suite.cost(qwen3, {"B": 8}, torch.bfloat16)
    assert cost.fwd_flops == 2 * 8 * sum(N * K for _, N, K in qwen3.products)
    assert 0 < cost.fwd_bytes - 2 * sum(N * K for _, N, K in qwen3.products) < 0.005 * cost.fwd_bytes


def test_every_weight_is_read_once_and_every_product_reads_what_another_wrote(args: dict[str, Any]) -> None:
    weights = [weight for _, weight, _ in args["parameters"]]
    assert len({weight.data_ptr() for weight in weights}) == len(weights) == 2 * 7 + 1
    seen: list[tuple[str, Tensor]] = []
    wrote = {"down": args["x"]}

    def linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if name == "q":
            wrote["x"] = wrote["down"]
        assert x is wrote[suite.READS[name]] and (bias is not None) == (name in "qkv")
        seen.append((name, weight))
        wrote[name] = torch.nn.functional.linear(x, weight, bias)
        return wrote[name]

    result = suite.step(linear, args)
    assert [name for name, _ in seen] == [*(list(suite.READS)[:-1] * 2), "head"]
    assert all(weight is own for (_, weight), own in zip(seen, weights, strict=True))
    assert [tuple(y.shape) for y in result] == [
        (3, n) for n in (32, 64, 16, 16, 32, 48, 48, 32, 80)
    ]  # x, then a layer in order, then the logits
    assert 0.1 < float(result[-1].float().std()) < 10  # sizes neither grow nor vanish


def test_a_class_is_one_of_a_layer_and_of_those_that_engines_merge_with_it(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None, numerics: Any) -> Tensor:
        seen.append(numerics)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(suite, "det_linear", recorded)
    suite.isobit({"o": "tree8", "head": "chain16"}, args)
    assert seen == [*([None, None, None, "tree8", None, None, None] * 2), "chain16"]
    for model in suite.MODELS.values():
        of = [model.classes.get(name) for name in suite.READS]
        assert of[0] == of[1] == of[2] and of[4] == of[5] and model.classes.keys() <= suite.READS.keys()


def test_a_wrong_product_has_an_error_in_its_row(args: dict[str, Any]) -> None:
    judge, right = suite.Judge(args["parameters"]), suite.native(args)
    usual = judge.error("fwd", right)
    assert 0 < usual < 0.03
    for i in range(1, len(right)):  # the first is an input
        wrong = right[i].clone()
        wrong[-1, -1] += 1.0
        assert judge.error("fwd", (*right[:i], wrong, *right[i + 1 :])) > 0.1, i
    assert judge.error("fwd", suite.isobit({}, args)) == pytest.approx(usual, rel=0.5)


# Goals and the table


def rows(op: str, B: int, **ms: float) -> list[dict[str, Any]]:
    kind = {"op": op, "case": f"B={B} bf16", "direction": "fwd", "method": "graph", "floor_ms": 1.0}
    figures = {"peak_mb": 100.0, "extra_mb": 1.0, "host_us": 5e2, "max_abs": 0.01}
    return [
        dict.fromkeys(ROW) | kind | figures | {"impl": name.replace("_", ":"), "ms": each}
        for name, each in ms.items()
    ]


ROWS = [
    *rows(QWEN2, 8, isobit=1.02, native=1.0, isobit_mixed=0.9),
    *rows(QWEN2, 144, isobit=1.04, native=1.0, isobit_mixed=1.02),
    *rows(QWEN3, 8, isobit=1.02, native=1.0, isobit_mixed=1.05),
]


def test_the_goals_of_a_decoding_step() -> None:
    def met(goals: Any) -> dict[str, tuple[Any, ...]]:
        return {e["what"]: (e["met"], e["cells"], e["against"]) for e in summary(ROWS, "native", goals)}

    declared = met(suite_of("decode_step").goals)
    assert (declared[QWEN2], declared[QWEN3]) == ((False, 2, "native"), (True, 1, "native"))
    mixed = met([suite._goal(name, "isobit:mixed") for name in (QWEN2, QWEN3)])
    assert mixed == {
        f"{QWEN2}, isobit:mixed": (True, 2, "native"),
        f"{QWEN3}, isobit:mixed": (False, 1, "native"),
    }


def test_the_table_has_a_line_a_case_with_the_times_of_all(tmp_path: Path) -> None:
    words = ("gpu", "driver", "torch", "triton", "python", "commit", "source_sha", "date")
    stamp = dict.fromkeys(words, "x") | dict.fromkeys(("copy_tbps", "best_tflops"), 1.0)
    report = {"stamp": stamp, "against": "native", "rows": ROWS, "summary": []}
    (tmp_path / "decode_step.json").write_text(json.dumps(report))
    shown = tables.render_op(tmp_path / "decode_step.json", [QWEN2]).splitlines()
    assert shown[:6] == [
        f"`{QWEN2}`",
        "",
        "| case | isobit ms | times native | peak MB | native ms | isobit:mixed ms "
        "| host us: isobit / native / isobit:mixed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| B=8 bf16 | 1.02 | 1.02 | 100 | 1 (0.98x, 100 MB) | 0.9 (0.88x, 100 MB) | 500 / 500 / 500 |",
        "| B=144 bf16 | 1.04 | 1.04 | 100 | 1 (0.96x, 100 MB) | 1.02 (0.98x, 100 MB) | 500 / 500 / 500 |",
    ]
