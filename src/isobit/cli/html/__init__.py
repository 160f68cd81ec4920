"""Reports of `isobit check`, `memcheck`, `bench`, `drift` and `demo` as one self-contained HTML page: no
network, and no script but for the buttons that copy commands.

A page shows any number of reports, one section each: what was proven, errors with their bounds, which bits
were compared, what compute-sanitizer found, times next to rivals, where a difference begins, and what a demo
learned. It is made from the JSON that these commands write, so a saved file gives the same page as the run
that made it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobit.bench.report import format_stamp
from isobit.cli.html import bench, check, demo, drift, memcheck
from isobit.frame.contract import ContractError


def page(reports: Sequence[dict[str, Any]], title: str = "isobit") -> str:
    """The page of these reports, in their order."""
    sections = [_section(report) for report in reports]
    style = Path(__file__).with_name("page.css").read_text()
    return str(_template().render(title=title, sections=sections, style=style))


def _section(report: dict[str, Any]) -> dict[str, Any]:
    stamp = report["stamp"]
    head = {
        "command": report.get("command", "unknown: the file is older than the commands in them"),
        "stamp": format_stamp(stamp),
        "environment": [(name, str(value)) for name, value in stamp.items()],
    }
    if "candidates" in report:
        return {"kind": "check", **head, **check.section(report)}
    if "runs" in report:
        return {"kind": "memcheck", **head, **memcheck.section(report)}
    if "rows" in report:
        return {"kind": "bench", **head, **bench.section(report)}
    if "steps" in report:
        return {"kind": "demo", **head, **demo.section(report)}
    if "axes" in report:
        return {"kind": "drift", **head, **drift.section(report)}
    raise ContractError(
        f"a page shows reports of drift, check, memcheck and bench, not of {report.get('suite')!r}"
    )


def _template() -> Any:
    try:
        import jinja2
    except ModuleNotFoundError:
        raise ContractError("a page needs jinja2: in a checkout of isobit, pip install '.[cli]'") from None
    loader = jinja2.PackageLoader("isobit.cli.html", ".")
    return jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html")
