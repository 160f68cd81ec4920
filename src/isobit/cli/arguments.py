"""Parses values of the command line, with errors before anything runs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isobit.frame.contract import ContractError
from isobit.frame.device import default_device
from isobit.spec.proof import DTYPES


def device_of(text: str) -> torch.device:
    if text == "auto":
        return default_device()
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].split(". ")[0]  # torch's messages continue for paragraphs
        raise ContractError(
            f"device {text!r} is not usable here: {why}; this machine has {_devices()}"
        ) from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _devices() -> str:
    return " and ".join(dict.fromkeys(("cpu", default_device().type)))


def dtypes_of(names: list[str]) -> tuple[torch.dtype, ...]:
    return tuple(DTYPES[name] for name in known("dtype", names, list(DTYPES)))


def dims_of(pairs: list[str], batch: int | None, seq: int | None, vocab: int | None) -> dict[str, int] | None:
    """Sizes by name. An error if one is given twice, since one of them would be ignored."""
    short = {"B": batch, "T": seq, "V": vocab}
    dims = {name: size for name, size in short.items() if size is not None}
    for pair in pairs:
        found = re.fullmatch(r"(\w+)=(-?[0-9]+)", pair)
        if found is None:
            raise ContractError(f"--dim {pair}: write it as NAME=SIZE, for example V=50257")
        if found[1] in dims:
            raise ContractError(f"--dim {pair}: {found[1]} is given twice")
        dims[found[1]] = int(found[2])
    return dims or None


def known(kind: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names, if all of them are known and none is given twice."""
    for i, name in enumerate(names):
        if name not in known:
            raise ContractError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
        if name in names[:i]:
            raise ContractError(f"{kind} {name!r} is given twice")
    return tuple(names)


def given(ctx: Any, also: Mapping[str, str]) -> dict[str, str]:
    """The flags that were given, as they were written; `also` has those that stand for another."""
    said = {}
    for name in ctx.params:
        if ctx.get_parameter_source(name).name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            said[also.get(flag, flag)] = flag if flag != "--gradient" else "--no-gradient"
    return said


def check_commit(commit: str | None, *files: Path | None) -> None:
    """A commit is only used in the stamp of a file."""
    if commit is not None and all(path is None for path in files):
        raise ContractError(f"--commit {commit} has no effect without a file: say where the report goes")
