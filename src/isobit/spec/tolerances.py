"""The slack of errors: isobit's table, and an optional file of the user.

A file has the form of `tolerances.json`, with only the figures that differ:

    {"classes": {"logprob": {"forward": {"bf16": 2.0}}},
     "arch": {"sm_90": {"logprob": {"gradient": {"fp32": 0.5}}}}}

A figure is in units in the last place, of 2^-23 (2^-52 for fp64), of the scale of an element. Figures of an
architecture take precedence over general ones, and the user's over isobit's. `sm90` is `sm_90`.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import FORMS, arch_named, is_arch

#: The keys of a figure, besides the op class: direction and dtype.
DIRECTIONS, DTYPES = ("forward", "gradient"), ("bf16", "fp16", "fp32", "fp64")


@dataclass(frozen=True)
class Tolerances:
    """The figures of the user's file; by default there is none."""

    path: str | None = None
    table: dict[str, Any] = field(default_factory=dict)

    def ulps(self, op_class: str, direction: str, dtype: torch.dtype, arch: str) -> float:
        """The slack of an op class and dtype on an architecture; 1 if no table has it."""
        name = dtype_name(dtype)
        for table in (self.table, _own()):
            for classes in (table.get("arch", {}).get(arch, {}), table.get("classes", {})):
                result = classes.get(op_class, {}).get(direction, {}).get(name)
                if result is not None:
                    return float(result)
        return 1.0

    def has(self, op_class: str, direction: str, dtype: torch.dtype, arch: str) -> bool:
        """Whether the user's file has this figure."""
        tables = (self.table.get("arch", {}).get(arch, {}), self.table.get("classes", {}))
        return any(dtype_name(dtype) in t.get(op_class, {}).get(direction, {}) for t in tables)

    def looser(self) -> list[str]:
        """The figures of the file that allow more than isobit's. A report must name them."""
        lines = []
        for arch, classes in (("", self.table.get("classes", {})), *self.table.get("arch", {}).items()):
            for op_class, by_direction in classes.items():
                for direction, by_dtype in by_direction.items():
                    for name, ulps in by_dtype.items() if direction != "about" else ():
                        ours = Tolerances().ulps(op_class, direction, _DTYPES[name], arch)
                        if ulps > ours:
                            where = f"{op_class} {direction} {name}{f' on {arch}' if arch else ''}"
                            lines.append(f"{where}: {ulps:g} units, isobit allows {ours:g}")
        return lines


_DTYPES = {dtype_name(d): d for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


@cache
def _own() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("tolerances.json").read_text()))


def read_tolerances(path: Path) -> Tolerances:
    """The figures of a file; an error that says what is wrong where."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ContractError(f"--tolerances {path}: cannot be read ({error})") from None
    known = list(_own()["classes"])

    def check(part: Any, at: str, keys: tuple[str, ...] | list[str] | None) -> dict[str, Any]:
        if not isinstance(part, dict):
            raise ContractError(f"--tolerances {path}: {at} must be an object, not {part!r}")
        for key in part:
            if keys is not None and key not in keys and key != "about":
                raise ContractError(f"--tolerances {path}: unknown {key!r} in {at}; known: {', '.join(keys)}")
        return {key: value for key, value in part.items() if key != "about"}

    top = check(table, "the file", ("classes", "arch"))
    by_arch: dict[str, Any] = {}
    for key, classes in check(top.get("arch", {}), "arch", None).items():
        if not is_arch(key):
            raise ContractError(f"--tolerances {path}: unknown {key!r} in arch; known: {', '.join(FORMS)}")
        if arch_named(key) in by_arch:
            raise ContractError(f"--tolerances {path}: arch has {arch_named(key)} twice, once as {key!r}")
        by_arch[arch_named(key)] = classes
    top |= {"arch": by_arch} if "arch" in top else {}
    for at, classes in (("classes", top.get("classes", {})), *((f"arch {k}", v) for k, v in by_arch.items())):
        for op_class, by_direction in check(classes, at, known).items():
            for direction, by_dtype in check(by_direction, f"{at} {op_class}", DIRECTIONS).items():
                for name, ulps in check(by_dtype, f"{at} {op_class} {direction}", DTYPES).items():
                    if isinstance(ulps, bool) or not isinstance(ulps, int | float) or not 0 <= ulps < 1e9:
                        what = f"{at} {op_class} {direction} {name} must be units from 0 on"
                        raise ContractError(f"--tolerances {path}: {what}, not {ulps!r}")
    return Tolerances(str(path), top)
