"""Markdown tables from result files, and a check that a page still shows what the files say.

    python -m isobit.bench.tables README.md             rewrites the tables of a page
    python -m isobit.bench.tables --check README.md     exits 1 if one of them is stale

A table goes between `<!-- results:logp -->` and `<!-- /results -->`, from `logp.json` in the results folder.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from isobit.bench.report import CPU_WARNING, Report, Row, format_stamp

RESULTS = Path("results/h200")

_MARKED = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)

#: Directions that are shown. A backward alone is in the files; what users pay for is both together.
_SHOWN = {"fwd": "fwd", "fwd_bwd": "fwd+bwd"}


def render_op(path: Path) -> str:
    """The table of one results file, with the stamp under it."""
    report: Report = json.loads(path.read_text())
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report["rows"]:
        if row["direction"] in _SHOWN:
            groups.setdefault((row["case"], row["direction"]), {})[row["impl"]] = row
    impls = dict.fromkeys(row["impl"] for row in report["rows"])
    rivals = [name for name in impls if name not in ("isobit", "copy")]
    head = ["case", "direction", "isobit ms", "% of copy speed", *(f"{r} ms" for r in rivals), "extra MB"]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for (case, direction), group in groups.items():
        lines.append([case, _SHOWN[direction], *_figures(group, rivals)])
    stamp = format_stamp(report["stamp"])
    if any(row["method"] == "wall" for row in report["rows"]):
        stamp += f". {CPU_WARNING}"
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n<sub>{stamp}</sub>\n"


def _figures(group: dict[str, Row], rivals: Sequence[str]) -> list[str]:
    """isobit's ms and share of the copy's speed, each rival's ms and how many times longer that is, MB."""
    ours, copy = group.get("isobit"), group.get("copy")
    if ours is None:
        return ["-"] * (len(rivals) + 3)
    found = [f"{ours['ms']:.3g}", f"{100 * copy['ms'] / ours['ms']:.0f} %" if copy else "-"]
    for rival in rivals:
        row = group.get(rival)
        found.append(f"{row['ms']:.3g} ({row['ms'] / ours['ms']:.2f}x)" if row else "-")
    return [*found, "-" if ours["extra_mb"] is None else f"{ours['extra_mb']:.2f}"]


def updated(text: str, results_dir: Path) -> str:
    """The page with every marked table rendered anew."""
    if not _MARKED.search(text):
        raise ValueError("no '<!-- results:<op> -->' line with a '<!-- /results -->' after it")
    return _MARKED.sub(lambda m: f"{m[1]}{render_op(results_dir / f'{m[2]}.json')}{m[3]}", text)


def update(path: Path, results_dir: Path = RESULTS) -> bool:
    """Rewrite the tables of a page. True if that changed it."""
    old = path.read_text()
    new = updated(old, results_dir)
    if new != old:
        path.write_text(new)
    return new != old


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m isobit.bench.tables", description="Tables from results.")
    parser.add_argument("pages", nargs="+", type=Path, help="Markdown files with marked tables")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if a table is stale")
    options = parser.parse_args(argv)
    stale = False
    for page in options.pages:
        try:
            if options.check:
                changed = updated(page.read_text(), options.results) != page.read_text()
            else:
                changed = update(page, options.results)
        except (OSError, ValueError) as error:
            print(f"{page}: {error}", file=sys.stderr)
            return 1
        state = ("stale" if options.check else "rewritten") if changed else "up to date"
        print(f"{page}: {state}")
        stale |= changed
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
