"""The suite of training steps, on a CPU with tiny models of the same kinds."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suites import train_step
from isobit import ContractError
from isobit.bench.cases import Subject, suite_of
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import summary
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.nn import DetLinear
from isobit.ops.det_gemm import kernels_hopper
from isobit.spec.series import NotHere, Pool
from publish import tables

CPU = torch.device("cpu")

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _without_mkldnn() -> Iterator[None]:
    """It tries bf16 and gives up at every product, with a warning, on CPUs that have none."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def suite_with(*names: str) -> Subject:
    suite = suite_of("train_step")
    return replace(suite, series=[one for one in suite.series if one.name in names])


def timed(of: Subject, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    return run(of, **(defaults | options))


@pytest.fixture(scope="module")
def args() -> dict[str, Any]:
    (found,) = suite_of("train_step").series[0].make(train_step.SMALL[0], Pool(CPU))
    return found


def test_three_ways_are_timed_with_the_same_sizes_and_with_new_ones(tmp_path: Path) -> None:
    suite = suite_with("llama-3-8b-4-layers")
    report = timed(suite, cases=[train_step.SMALL[1]], out_dir=tmp_path)
    assert json.loads((tmp_path / "cpu" / "train_step.json").read_text()) == report
    assert [row["impl"] for row in report["rows"]] == [
        "isobit", "isobit:head", "plain", "isobit:new", "isobit:head:new", "plain:new",
    ]  # fmt: skip
    for row in report["rows"]:
        new = row["impl"].endswith(":new")
        assert tuple(row) == ROW and (row["op"], row["case"]) == ("llama-3-8b-4-layers", "B=1 T=64 bf16")
        assert (row["max_abs"] is None) == new and (new or row["max_abs"] < 5e-3)
        assert row["vs_baseline"] == (1.0 if "plain" in row["impl"] else row["vs_baseline"])
    assert report["against"] == "plain" and set(report["stamp"]["kernels"]) == {"linear_logp", "det_gemm"}


def test_the_models_share_their_parameters_and_only_one_has_swapped_layers(args: dict[str, Any]) -> None:
    models = args["models"]
    pairs = zip(models.plain.parameters(), models.swapped.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    swapped, linear = ([m for m in model.modules() if isinstance(m, torch.nn.Linear)]
                       for model in (models.swapped, models.plain))  # fmt: skip
    assert len(swapped) == len(linear) == 2 * 7 + 1  # seven a layer, and the head
    assert all(type(m) is DetLinear for m in swapped) and not any(isinstance(m, DetLinear) for m in linear)
    assert models.plain.config._attn_implementation == "sdpa" and models.plain.training


def test_experts_are_swapped_too() -> None:
    series = next(one for one in suite_of("train_step").series if one.name == train_step.MOE_NAME)
    (args,) = series.make(train_step.SMALL[0], Pool(CPU))
    models = args["models"]
    assert models.swapped.config._experts_implementation == "isobit"
    assert models.plain.config._experts_implementation in ("grouped_mm", "eager")
    error = train_step.agreement(args).error("fwd_bwd", train_step.whole(args))
    assert 0 < error < train_step.LOSS * 10
    assert {"route", "spread", "det_grouped_linear", "swiglu_packed", "combine"} < set(series.needs)


@pytest.mark.parametrize("name", [train_step.QWEN_NEXT_NAME, train_step.QWEN_35_NAME])
def test_linear_layers_of_gated_delta_nets_are_swapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    series = next(one for one in suite_of("train_step").series if one.name == name)
    (args,) = series.make(train_step.SMALL[0], Pool(CPU))
    net = args["models"].swapped.model.layers[0].linear_attn
    assert type(net.out_proj) is DetLinear and type(net).__name__.endswith("GatedDeltaNet")
    error = train_step.agreement(args).error("fwd_bwd", train_step.whole(args))
    assert 0 <= error < train_step.LOSS * 10

    def refuses(args: Any) -> Any:
        raise RuntimeError("this Triton produces incorrect results")

    monkeypatch.setattr(train_step, "plain", refuses)
    with pytest.raises(NotHere, match="the model as it is does not train: this Triton"):
        train_step.agreement(args)


def test_a_model_without_gated_delta_nets_must_train(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(args: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(train_step, "plain", refuses)
    with pytest.raises(RuntimeError, match="out of order"):
        train_step.agreement(args)


@pytest.mark.parametrize("config", [train_step.QWEN_NEXT, train_step.QWEN_35])
def test_weights_of_gated_delta_nets_are_counted(config: train_step.Config) -> None:
    """All matrices but the embeddings, which no token is multiplied by."""
    model = config.build(torch.device("meta"), torch.bfloat16, 0)
    skipped = ("embed_tokens", "conv1d")
    matrices = {n: p for n, p in model.named_parameters() if p.ndim > 1 and not any(s in n for s in skipped)}
    each, read = config.products(10**6)  # all experts are read
    assert read == sum(p.numel() for p in matrices.values())
    of_experts = sum(p.numel() for n, p in matrices.items() if ".experts." in n)
    count, of_a_token, _ = config.experts
    assert each == read - of_experts * (count - of_a_token) // count
    kinds = [type(layer).__name__ for layer in model.model.layers]
    assert len(kinds) == 4 and [hasattr(x, "self_attn") for x in model.model.layers] == [False] * 3 + [True]


def test_costs_count_the_experts_of_a_token_and_the_weights_that_are_read() -> None:
    one, many = (train_step.cost(train_step.QWEN_MOE, {"B": 1, "T": T}, torch.bfloat16) for T in (1, 4096))
    expert, rest = 3 * 2048 * 768, 2048 * (2 * 4096 + 2 * 512 + 128)
    read = 4 * (8 * expert + rest) + 2048 * 151936
    assert one.flops("fwd") == 2 * read + 4 * 2 * 4096
    assert one.fwd_bytes == pytest.approx(2 * read, rel=0.02)  # random experts: hardly one twice
    assert many.fwd_bytes == pytest.approx(2 * (4 * (128 * expert + rest) + 2048 * 151936), rel=1e-6)


@pytest.mark.parametrize("step", [train_step.plain, train_step.head, train_step.whole])
def test_a_step_leaves_no_gradients_on_parameters(args: dict[str, Any], step: Any) -> None:
    loss, *gradients = step(args)
    assert not loss.requires_grad and len(gradients) == len(args["models"].parameters)
    assert all(p.grad is None for p in args["models"].parameters)
    error = train_step.agreement(args).error("fwd_bwd", (loss, *gradients))
    assert error < train_step.LOSS * float(loss)


def test_a_step_that_is_wrong_is_not_timed(args: dict[str, Any]) -> None:
    right, (loss, *gradients) = train_step.agreement(args), train_step.plain(args)
    assert right.error("fwd_bwd", (loss, *gradients)) == 0.0
    where = args["models"].names.index("model.layers.1.mlp.up_proj.weight")

    def judged(factor: float, at: int) -> float:
        return right.error(
            "fwd_bwd", (loss, *(g * factor if i == at else g for i, g in enumerate(gradients)))
        )

    with pytest.raises(CheckFailed, match=r"loss is .* and not that of plain, .*, up to 0.001 of it"):
        right.error("fwd_bwd", (loss * 1.002, *gradients))
    with pytest.raises(CheckFailed, match="loss is nan"):
        right.error("fwd_bwd", (loss * float("nan"), *gradients))
    with pytest.raises(CheckFailed, match="norm of all gradients"):
        judged(2.0, 0)
    with pytest.raises(CheckFailed, match=r"gradient of model\.layers\.1\.mlp\.up_proj\.weight"):
        judged(0.8, where)
    assert judged(1.05, where) == 0.0
    with pytest.raises(CheckFailed, match=r"no gradient of model\.norm\.weight"):
        right.error("fwd_bwd", (loss, *gradients[:-1], None))  # type: ignore[arg-type]


def test_a_wrong_contender_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suite_with("qwen2.5-0.5b")
    (series,) = suite.series

    def wrong(args: dict[str, Any]) -> Any:
        loss, *rest = train_step.head(args)
        return (loss + 1.0, *rest)

    broken = replace(suite, series=[replace(series, variants={"head": wrong})])
    with pytest.raises(CheckFailed, match="train_step: loss is"):
        timed(broken, cases=[train_step.SMALL[0]])


def test_without_transformers_nothing_runs_and_the_message_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ContractError, match=r"bench train_step: needs transformers: .*\[bench\]"):
        timed(suite_of("train_step"))


def test_the_models_are_those_that_their_names_say() -> None:
    """By the number of parameters that is published for the one, and for the other with 28 layers more."""
    meta = torch.device("meta")

    def parameters(config: train_step.Config) -> int:
        return sum(p.numel() for p in config.build(meta, torch.bfloat16, 0).parameters())

    assert parameters(train_step.QWEN) == 494_032_768
    assert parameters(train_step.LLAMA) + 28 * 218_112_000 == 8_030_261_248
    assert parameters(train_step.QWEN_MOE) + 44 * 623_120_640 == 30_532_122_624


def test_numbers_of_tokens_come_once_and_the_longest_first() -> None:
    found = train_step.lengths(4096, 123)
    assert len(set(found)) == len(found) == 3 * train_step.NEW_STEPS and 4096 not in found
    for own in (found[0::3], found[1::3], found[2::3]):  # of an implementation
        assert own[0] == max(own) <= 4608 and own[1] == min(own) >= 3584
    assert found == train_step.lengths(4096, 123) != train_step.lengths(4096, 124)
    assert sum(n % 16 == 0 for n in found) < 12


def test_new_numbers_of_tokens_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them have a tile, and so a kernel, that neither the usual sizes nor the warm-up steps have."""
    found = train_step.lengths(4096, 123)
    usual = [1 * 512, 8 * 512, 8 * 2048, *found[:6]]
    up = {M: kernels_hopper.choose_tile(M, 4864, 896, 132)[0] for M in (*usual, *found)}
    assert {up[M] for M in found} - {up[M] for M in usual}

    seen: list[int] = []
    monkeypatch.setattr(train_step, "whole", lambda args: seen.append(args["ids"].numel()))
    (rehearse,) = suite_of("train_step").series[0].rehearse
    rehearse(Pool(CPU))
    assert seen == train_step.lengths(64, 123)


def test_costs_are_three_times_the_forward() -> None:
    cost = train_step.cost(train_step.LLAMA, {"B": 8, "T": 512}, torch.bfloat16)
    assert cost.flops("fwd_bwd") == 3 * cost.flops("fwd")
    multiplied = 1_923_125_248 - 128256 * 4096 - 9 * 4096  # all but the embeddings and the norms
    assert cost.flops("fwd") == 2 * 8 * 512 * multiplied + 4 * 2 * 8 * 512 * 512 * 4096


# Goals and the table


def rows(op: str, B: int, T: int, **ms: float) -> list[dict[str, Any]]:
    kind = {"op": op, "case": f"B={B} T={T} bf16", "direction": "fwd_bwd", "method": "sync", "floor_ms": 1.0}
    figures = {"peak_mb": 100.0, "extra_mb": 1.0, "host_us": 5e2}
    return [
        dict.fromkeys(ROW) | kind | figures | {"impl": name.replace("_", ":"), "ms": each}
        for name, each in ms.items()
    ]


QWEN, LLAMA = "qwen2.5-0.5b", "llama-3-8b-4-layers"
ROWS = [
    *rows(QWEN, 1, 512, isobit=11.4, isobit_head=10.0, plain=10.0),
    *rows(QWEN, 8, 512, isobit=10.4, plain=10.0),
    *rows(QWEN, 1, 4096, isobit=10.4, plain=10.0, isobit_new=10.9, plain_new=10.0),
    *rows(LLAMA, 1, 512, isobit=11.6, plain=10.0),
    *rows(LLAMA, 8, 2048, isobit=10.55, plain=10.0),
]


def test_the_goals_of_a_step() -> None:
    goals = suite_of("train_step").goals
    found = {e["what"]: (e["met"], e["cells"], e["against"]) for e in summary(ROWS, "plain", goals)}
    assert found == {
        "1 x 512 tokens": (False, 2, "plain"),
        "4096 tokens and more": (True, 2, "plain"),
        "8 x 2048 tokens, Llama": (True, 1, "plain"),
        "4096 tokens and more, experts": (None, 0, "plain"),
        "another number of tokens every step": (True, 1, "plain:new"),
    }


def test_the_table_has_a_line_a_case_and_plain_as_a_rival(tmp_path: Path) -> None:
    words = ("gpu", "driver", "torch", "triton", "python", "commit", "source_sha", "date")
    stamp = dict.fromkeys(words, "x") | dict.fromkeys(("copy_tbps", "best_tflops"), 1.0)
    report = {"stamp": stamp, "against": "plain", "rows": ROWS, "summary": []}
    (tmp_path / "train_step.json").write_text(json.dumps(report))
    page = f"<!-- results:train_step {QWEN} -->\n<!-- /results -->\n"
    found = tables.updated(page, tmp_path).splitlines()
    first = found.index(f"`{QWEN}`")  # behind the goals
    assert found[first : first + 7] == [
        f"`{QWEN}`",
        "",
        "| case | isobit ms | times plain | peak MB | isobit:head ms | plain ms "
        "| host us: isobit / isobit:head / plain |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| B=1 T=512 bf16 | 11.4 | 1.14 | 100 | 10 (0.88x, 100 MB) | 10 (0.88x, 100 MB) | 500 / 500 / 500 |",
        "| B=8 T=512 bf16 | 10.4 | 1.04 | 100 | - | 10 (0.96x, 100 MB) | 500 / - / 500 |",
        "| B=1 T=4096 bf16 | 10.4 | 1.04 | 100 | - | 10 (0.96x, 100 MB) | 500 / - / 500 |",
    ]
    assert found[first + 7].startswith("| B=1 T=4096 bf16, new sizes | 10.9 | 1.09 | 100 |")
