"""A chart from a results file: isobit's share of a rival's speed over the first size, a line for each shape.

    python -m publish.charts results/h200/det_gemm.json docs/det_gemm.svg

Plain SVG, without a plotting library, and the same bytes from the same file.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from isobit.cli.html.share_chart import chart


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m publish.charts", description="Charts from results.")
    parser.add_argument("results", type=Path, help="a results file of an op with a baseline")
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if the chart is stale")
    options = parser.parse_args(argv)
    try:
        report = json.loads(options.results.read_text())
        if report.get("against") is None:
            raise ValueError("was not timed against one rival")
        made = chart(report)
        stale = not options.svg.is_file() or options.svg.read_text() != made
        if stale and not options.check:
            options.svg.write_text(made)
    except (OSError, ValueError) as error:
        print(f"{options.results}: {error}", file=sys.stderr)
        return 1
    state = ("stale" if options.check else "rewritten") if stale else "up to date"
    print(f"{options.svg}: {state}")
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
