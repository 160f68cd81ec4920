"""The declaration of an op, as a page shows it: its arguments, its backends, and the laws that held last.

`<!-- op:logp -->` and `<!-- /op -->` in a page enclose it (`tables`). Arguments and backends come from the
declaration in the op's `op.py`, laws from the result files of `isobit check` on a GPU.
"""

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

from isobit.check.stamp import why_stale
from isobit.frame.contract import Param, dtype_name
from isobit.frame.op import Op, public_ops
from publish.checked import checked

#: Every op has these; the README explains them.
_COMMON = ("validate", "numerics", "backend")


def render_declared(name: str, results_dir: Path) -> str:
    ops = public_ops()
    if name not in ops:
        raise ValueError(f"op:{name}: no such op; known: {', '.join(sorted(ops))}")
    op = ops[name]
    checks = [(mine, stamp) for mine, stamp in checked(results_dir, op.folder) if mine["op"] == name]
    parts = [_table(_arguments(op)), _table(_backends(op, [mine for mine, _ in checks]))]
    if checks:
        runs = dict.fromkeys(f"commit {stamp['commit']}, {stamp['date'][:10]}" for _, stamp in checks)
        where = f"`isobit check` on {checks[0][1]['gpu']}, {'; '.join(runs)}"
        age = " The kernels have changed since." if any(why_stale(stamp) for _, stamp in checks) else ""
        parts.append(
            f"<sub>{where}.{age} Cells are cases of a law; `make check` runs them on your machine.</sub>"
        )
    else:
        parts.append(f"<sub>No check of it on a GPU is published yet: `isobit check --op {name}`.</sub>")
    return "\n\n".join(parts) + "\n"


def _arguments(op: Op) -> list[list[str]]:
    assert op.function is not None
    signature = inspect.signature(op.function).parameters
    lines = [["argument", "shape", "dtype", "default"]]
    declared = {param.name: param for param in op.contract.params}
    for name, given in signature.items():
        if name not in _COMMON:
            required = given.default is inspect.Parameter.empty
            default = "" if required else f"`{given.default!r}`"
            lines.append([f"`{name}`", *_kind(declared.get(name)), default])
    return lines


def _kind(param: Param | None) -> tuple[str, str]:
    """Shape and dtypes of a tensor; otherwise the type."""
    if param is None:  # the public function converts it to something else
        return "", ""
    scalar = "" if param.scalar is None else param.scalar.__name__
    if param.spec is None:
        return "", scalar
    shape = f"[{', '.join(param.spec.dims)}]".replace("*", "\\*")
    dtypes = ", ".join(dtype_name(dtype) for dtype in param.spec.dtypes)
    return f"{shape} or a number" if scalar else shape, dtypes


def _backends(op: Op, checks: list[dict[str, Any]]) -> list[list[str]]:
    """As declared, fastest first. If the class depends on the GPU, that of the GPU that was checked."""
    checked = {candidate["candidate"]: candidate for candidate in checks}
    lines = [["backend", "numerics class", "laws that held, with the number of cells", "failed"]]
    for backend in op.backends:
        mine = checked.get(backend.name)
        known = backend.numerics if isinstance(backend.numerics, str) else "depends on the GPU"
        if mine is None:
            lines.append([f"`{backend.name}`", f"`{known}`" if " " not in known else known, "-", "-"])
            continue
        held = Counter(case["law"] for case in mine["cases"] if case["status"] == "ok")
        laws = ", ".join(f"{law} {count}" for law, count in held.items())
        lines.append([f"`{backend.name}`", f"`{mine['numerics']}`", laws or "-", str(mine["fail"])])
    return lines


def _table(lines: list[list[str]]) -> str:
    head, *rest = ([cell or " " for cell in line] for line in lines)
    rows = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
