"""Figures in sentences about speed are those of the result files: what a page says of a goal that is missed,
and of its limit."""

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.goals.delta_rule import GOALS as DELTA_GOALS
from benchmarks.goals.det_gemm import GOALS, TREE, _in_its_class
from isobit.bench.goals import Cell, cells, sizes_of, summary
from isobit.ops.delta_rule.rivals import _cost

ROOT = Path(__file__).parent.parent


@cache
def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "results" / "h200" / f"{name}.json").read_text())["rows"]
    return found


def section(page: str, title: str) -> str:
    """A section of a page as one line."""
    text = (ROOT / "docs" / page).read_text()
    return " ".join(text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].split())


def not_said(text: str, said: Iterable[str]) -> list[str]:
    return [one for one in said if one not in text]


def mean(shares: Iterable[float]) -> float:
    logs = [math.log(share) for share in shares]
    return math.exp(sum(logs) / len(logs))


# Products


def cold(impl: Any = "isobit", op: str = "det_gemm_cold") -> list[Cell]:
    return cells([row for row in rows("det_gemm") if row["op"] == op], "torch.mm", impl)


def of_sizes(some: Iterable[Cell], chooses: Callable[[dict[str, int]], bool]) -> list[float]:
    return [cell.share for cell in some if chooses(cell.sizes)]


def at(some: Iterable[Cell], M: int, K: int, N: int) -> float:
    (share,) = of_sizes(some, lambda size: size == {"M": M, "K": K, "N": N})
    return share


def test_what_limits_products() -> None:
    text = section("det_gemm.md", "What limits it")
    met = {e["what"]: e for e in summary(rows("det_gemm"), "torch.mm", GOALS)}
    goals = {
        "rollouts, dX": "dX:",
        "rollouts, dW": "dW:",
        "rollouts in class tree8, M <= 512, N <= 5120": "`tree8` up to 512 rows and 5120 columns:",
        "rollouts in class tree8, M > 1300, K >= 4096": "`tree8` with more than 1300 rows and K >= 4096:",
    }
    titles = [f"{title} {met[what]['geomean']:.2f} (goal {met[what]['goal_geomean']:.2f})"
              for what, title in goals.items()]  # fmt: skip
    either = met["rollouts, M <= 512, each layer in the class that is proposed for it"]
    titles += [
        f"Each layer in its proposed class, up to 512 rows: {either['geomean']:.2f} "
        f"(goal {either['goal_geomean']:.2f})",
        f"but the slowest {either['least']:.2f} (goal {either['goal_least']:.2f})",
    ]
    assert not_said(text, titles) == []
    # Every goal about rollouts that is missed is among them, or one of its parts is.
    missed = {what for what, e in met.items() if what.startswith("rollouts") and e["met"] is False}
    parts = {f"rollouts, M <= 512, layers for which {c} is proposed" for c in ("chain16", "tree8")}
    assert missed - parts == {*goals, either["what"]}


def test_what_limits_products_case_by_case() -> None:
    text, chains, trees = section("det_gemm.md", "What limits it"), cold(), cold(TREE)
    dx, dw = cold(op="det_gemm_cold_dx"), cold(op="det_gemm_cold_dw")
    slowest = [at(dx, 1300, *layer) for layer in ((2560, 9728), (1280, 5120), (4096, 4096))]
    assert sorted(cell.share for cell in dx)[:3] == slowest
    of_dw = [cell.share for cell in dw]

    def narrow(least: int, most: int, *, long: bool) -> float:
        def chooses(n: dict[str, int]) -> bool:
            return least <= n["M"] <= most and n["N"] <= 5120 and (n["K"] >= 4096) == long

        return mean(of_sizes(trees, chooses))

    slow = [
        cell for cell in chains if cell.sizes["M"] <= 512 and cell.sizes["N"] <= 5120 and cell.share < 0.9
    ]
    in_trees = [at(trees, *(cell.sizes[name] for name in "MKN")) for cell in slow]
    assert not_said(text, [
        f"{slowest[0]:.2f} at K = 2560, N = 9728, {slowest[1]:.2f} at K = 1280, N = 5120 and",
        f"N = 5120 and {slowest[2]:.2f} at K = 4096, N = 4096",
        "220 and 352 tiles of 128 x 128, 0.83 of the two rounds and 0.89 of the three that 132 SMs",
        f"From {min(of_dw):.2f} to {max(of_dw):.2f}",
        f"{narrow(1, 512, long=True):.2f} over the layers with K >= 4096:",
        f"{narrow(1, 32, long=True):.2f} up to 32 rows, {narrow(33, 128, long=True):.2f} up to 128,",
        f"up to 128, {narrow(129, 512, long=True):.2f} above",
        f"With K = 896 and 1280 it is {narrow(1, 512, long=False):.2f}",
        f"`tree8` has {min(in_trees):.2f} and more",
    ]) == []  # fmt: skip
    tiles = [-(-1300 // 128) * (K // 128) for K in (2560, 4096)]
    assert tiles == [220, 352] and [round(n / 132 / -(-n // 132), 2) for n in tiles] == [0.83, 0.89]


def test_the_slowest_products_are_all_named() -> None:
    text = section("det_gemm.md", "What limits it")
    every = [cell for cell in cold(_in_its_class) if cell.sizes["M"] <= 512]
    low = {tuple(cell.sizes.values()): cell.share for cell in every if cell.share < 0.88}
    assert {(M, N) for M, _, N in low} == {(200, 14336), (200, 8192), (200, 27648)}
    assert not_said(text, [
        f"{len(low)} of {len(every)} cases are below 0.88. All have 200 rows and at least 8192 columns",
        f"({min(low.values()):.2f} to {max(low.values()):.2f})",
    ]) == []  # fmt: skip


# The delta rule


def states_and_chunks(case: str) -> tuple[float, float]:
    """Bytes of the states of all sequences, and of chunks that lengths leave incomplete, as shares of the
    declared bytes."""
    n = sizes_of(case)
    lengths = re.search(r"lengths=([\d+]+)", case)
    each = [int(text) for text in lengths[1].split("+")] if lengths else [n["T"]] * n["B"]
    declared = _cost(n, torch.bfloat16).bwd_bytes
    one = n["HV"] * n["K"] * n["V"]
    more = sum(-(-T // 64) for T in each) - -(-n["B"] * n["T"] // 64)
    return 2 * 4 * len(each) * one / declared, 2 * more * one / declared


def test_what_limits_the_delta_rule() -> None:
    text = " ".join((ROOT / "docs" / "delta_rule.md").read_text().split())
    found = {cell.case: cell for cell in cells(rows("delta_rule"), "copy")}
    heads = [cell for cell in found.values() if cell.op == "dhu_packed" and cell.sizes["H"] == 64]
    *short, long = sorted(heads, key=lambda cell: cell.sizes["T"])
    extra = {cell.case: states_and_chunks(cell.case) for cell in heads}
    whole = {cell.case: cell.share * (1 + sum(extra[cell.case])) for cell in heads}
    for cell in short:
        assert f"{extra[cell.case][0]:.0%}" == "16%" and f"{cell.share:.2f}" == "0.76"
        assert f"{whole[cell.case]:.2f}" == "0.90"
    assert not_said(text, [
        "another 16 % of the bytes", "0.76 of the copy's speed are 0.90",
        f"the {long.share:.2f} of longer sequences are {whole[long.case]:.2f}",
    ]) == []  # fmt: skip
    goal = next(goal for goal in DELTA_GOALS if goal.what == "bandwidth, B H >= 32, no gate")
    streams = [cell for cell in found.values() if goal.chooses(cell)]
    low = [cell for cell in streams if cell.share < 0.92]
    in_ht = [cell for cell in low if cell.case.endswith("mode=ht")]
    assert {cell.sizes["T"] for cell in low} == {2048, 4096}
    assert {f"{states_and_chunks(cell.case)[0]:.0%}" for cell in in_ht if cell.sizes["T"] == 2048} == {"3%"}
    said = f"in {len(low)} of {len(streams)} cases**, all with 2048 or 4096 tokens and {len(in_ht)} of them"
    assert not_said(text, [said, "another 3 % of the bytes"]) == []


# Counts


def test_counts_of_instructions_and_products() -> None:
    """Of a block of attention's scores on an SM: 4096 FLOP of tensor cores, 128 lanes and 16 exponentials a
    cycle, nine operations and an `exp2` for a tanh. And of the three products of `linear_policy_loss`, at the
    speeds that its page names."""
    scores = 128 * 128
    products, softmax, tanh, exp2 = 2 * 2 * scores * 128 // 4096, 5, 9, scores // 16
    text = section("attention.md", "Speed")
    assert not_said(text, [
        f"block of 128 x 128 scores need {products} cycles",
        f"softmax needs {softmax * scores // 128} of its 128 lanes, and {exp2} of the 16 units for",
        f"of the tanh make that {(softmax + tanh) * scores // 128} and {2 * exp2}:",
    ]) == []  # fmt: skip
    text = section("linear_policy_loss.md", "Numbers")
    dw = next(e for e in summary(rows("det_gemm"), "torch.mm", GOALS) if e["what"].startswith("dW"))
    dh = [float(x) for x in re.findall(r"for dH has ([\d.]+) to ([\d.]+) of it", text)[0]]
    (of_dw,) = re.findall(r"the sum over tokens for dW has \[([\d.]+)\]", text)
    assert abs(float(of_dw) - dw["geomean"]) < 0.03  # of one shape, among those of the mean
    most, least = (1 + 1 / float(of_dw) + 1 / share for share in dh)
    assert f"they take {least:.1f} to {most:.1f} times" in text


def test_a_figure_that_was_not_measured_is_found() -> None:
    text = section("det_gemm.md", "What limits it")
    assert not_said(text, ["(goal 0.95)", "From 0.90 to", "From 0.88"]) == ["From 0.88"]


# Decoding with the gated delta rule


def test_what_one_sequence_loses_in_decoding() -> None:
    """In microseconds of a call, next to FLA's recurrence."""
    ms = {
        (row["op"], row["impl"]): row["ms"]
        for row in rows("gated_delta_rule_step")
        if sizes_of(row["case"])["B"] == 1
    }
    tokens = {op: 64 if op.endswith("_chunk") else 1 for op, _ in ms}
    lost = [1e3 * (ms[op, "isobit"] - ms[op, "fla"]) / count for op, count in tokens.items()]
    text = section("gated_delta_step.md", "Backends")
    assert len(lost) == 4
    assert not not_said(text, [f"a loss of {min(lost):.1f} to {max(lost):.1f} microseconds a layer"])
    shares = {op: ms[op, "fla"] / ms[op, "isobit"] for op in tokens}
    (of_chunk,) = (share for op, share in shares.items() if op.endswith("_chunk"))
    said = [f"decodes at {mean(shares.values()):.2f} of FLA's", f"one sequence has {of_chunk:.2f}."]
    assert not_said(text, said) == []
