"""One table over all results files: what a page shows between `<!-- results:every -->` and its end.

One line per kind of call and direction, with the geometric mean over the cases of the file of two ratios:
isobit's time over the baseline's, and the best rival's time over isobit's. The baseline is the implementation
that the file names (`against`); or a copy of as many bytes; or, where operations decide and not bytes, the
floor, which is what the bytes and the operations of a call take at the speed of a copy and of a large
product. A rival does the same work as isobit; the best is the one with the smallest mean, on the cases where
both ran. Variants of the baseline (`torch.mm_nosplit`) and of isobit (`isobit:triton`) are not rivals.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from isobit.bench.cases import Subject
from isobit.bench.goals import tally
from isobit.bench.report import NEW, Report, Row
from isobit.check.stamp import why_stale
from publish.judged import judged

#: Directions that get a line; a backward alone only if nothing else was timed. Those with a name of their own
#: (dx, dw) are kinds of calls already.
_TITLES = {"fwd": "forward", "fwd_bwd": "forward and backward", "bwd": "backward", "dx": "", "dw": ""}
#: Marks results that were measured with older kernels.
OLDER = " †"
HEAD = ["call", "cases", "isobit's time", "best rival's time", "goals met"]

#: How to read the table.
LEGEND = """\
Times are geometric means over the cases of a call. isobit's is a multiple of its baseline's; the best
rival's is a multiple of isobit's: above 1 the rival is slower. Goals are counted once per op, in its first
row. Averages include small, latency-bound sizes. The baselines:

- `torch.mm`: cuBLAS. `bare_gemm`: one cuBLAS product of hidden states and weight.
- `copy`: a copy of as many bytes as the call must move. `floor`: the time of its bytes or of its operations,
  whichever is longer, at the speed of a large copy and of a large product.
- `fla`: flash-linear-attention's kernel. `plain`, `sdpa`: a step of a Hugging Face model without isobit.
  `native`: the same products by PyTorch.

The calls:
"""


def shown_of(directions: Iterable[str]) -> set[str]:
    """The directions of one kind of call that are shown: a backward alone only if there is nothing else."""
    known = set(directions)
    return known - {"bwd"} or known


def limit_of(rows: Sequence[Row]) -> str:
    """What calls without a baseline are compared with: a copy of their bytes; or the floor, if the copy is
    much faster than that in all cases: then the operations decide."""
    copies = {(row["case"], row["direction"]): row["ms"] for row in rows if row["impl"] == "copy"}
    ours = [row for row in rows if row["impl"] == "isobit"]
    fast = (copies.get((row["case"], row["direction"]), math.inf) < 0.9 * row["floor_ms"] for row in ours)
    return "floor" if all(fast) else "copy"


def overview(results_dir: Path, names: Iterable[str]) -> tuple[list[list[str]], list[str]]:
    """The lines of the table, the head first, and the names without a file."""
    lines, missing = [HEAD], []
    for name in names:
        path = results_dir / f"{name}.json"
        if path.is_file():
            lines += _of_file(judged(path))
        else:
            missing.append(name)
    return lines, missing


def _of_file(report: Report) -> list[list[str]]:
    if report.get("figure", "ms") != "ms":  # host times have no baseline of their own
        return []
    rows = [row for row in report["rows"] if not row["impl"].endswith(NEW) and row["direction"] in _TITLES]
    lines: list[list[str]] = []
    age = OLDER if why_stale(report["stamp"], report["rows"]) else ""
    for op, direction in dict.fromkeys((row["op"], row["direction"]) for row in rows):
        if direction not in shown_of(row["direction"] for row in rows if row["op"] == op):
            continue
        mine = [row for row in rows if (row["op"], row["direction"]) == (op, direction)]
        baseline = report.get("against") or limit_of(mine)
        if ratios := _over_ours(mine, baseline):
            whole_step = any(row["method"] == "sync" for row in mine)
            title = f"`{op}`" + (f", {_TITLES[direction]}" if _TITLES[direction] and not whole_step else "")
            ours = f"{1 / _mean(ratios):.2f}x {baseline}"
            lines.append([title + age, str(len(ratios)), ours, _best_rival(mine, baseline), ""])
    if lines and (summary := report.get("summary")):
        lines[0][-1] = tally(summary)
    return lines


def _over_ours(rows: Sequence[Row], name: str) -> list[float]:
    """Times of one implementation divided by isobit's, for each case in which both ran."""
    if name == "floor":
        return [row["floor_ms"] / row["ms"] for row in rows if row["impl"] == "isobit"]
    ours = {row["case"]: row["ms"] for row in rows if row["impl"] == "isobit"}
    return [row["ms"] / ours[row["case"]] for row in rows if row["impl"] == name and row["case"] in ours]


def _best_rival(rows: Sequence[Row], baseline: str) -> str:
    """The best rival's time divided by isobit's, its name, and in how many cases it ran."""
    rivals = {}
    for name in dict.fromkeys(row["impl"] for row in rows):
        variant = name in (baseline, "copy") or name.startswith(f"{baseline}_")
        variant = variant or name.partition(":")[0] == "isobit"
        if not variant and (ratios := _over_ours(rows, name)):
            rivals[name] = ratios
    if not rivals:
        return "-"
    best = min(rivals, key=lambda name: _mean(rivals[name]))
    cases = f"{len(rivals[best])} case{'s' * (len(rivals[best]) > 1)}"
    return f"{_mean(rivals[best]):.2f}x isobit ({best}, {cases})"


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def legend(results_dir: Path, subjects: Iterable[Subject]) -> str:
    """How to read the table, and what each kind of call is."""
    lines = []
    for subject in subjects:
        if (results_dir / f"{subject.file}.json").is_file():
            abouts: dict[str, list[str]] = {}
            for series in subject.series:
                if series.about and series.about not in abouts.setdefault(series.name, []):
                    abouts[series.name].append(series.about)
            lines += [f"- `{name}`: {'; '.join(about)}" for name, about in abouts.items() if about]
    return "\n".join([LEGEND, *lines])
