"""Parses values of the command line, with errors before anything runs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from isobit.frame.contract import ContractError
from isobit.frame.device import default_device
from isobit.spec.proof import DTYPES, InputOptions


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


def dtypes_of(names: Sequence[str]) -> tuple[torch.dtype, ...]:
    return tuple(DTYPES[name] for name in known("dtype", names, list(DTYPES)))


def dims_of(pairs: Sequence[str]) -> dict[str, int] | None:
    """Sizes by name. An error if one is given twice, since one of them would be ignored."""
    dims: dict[str, int] = {}
    for pair in pairs:
        match = re.fullmatch(r"(\w+)=(-?[0-9]+)", pair)
        if match is None:
            raise ContractError(f"--dim {pair}: write it as NAME=SIZE, for example V=50257")
        if match[1] in dims:
            raise ContractError(f"--dim {pair}: {match[1]} is given twice")
        dims[match[1]] = int(match[2])
    return dims or None


@dataclass(frozen=True)
class Data:
    """What `--data` says: the kind of inputs, how to fill them, and the cotangents. `flags` are those of its
    parts that were given, as `isobit.check.request.SETS` names them."""

    kind: str = "edge"
    inputs: InputOptions = field(default_factory=InputOptions)
    cotangents: str = "random"
    flags: tuple[str, ...] = ()


KINDS, COTANGENTS = ("edge", "random", "constant"), ("random", "ones", "none")
DATA_HELP = (
    "edge, random, constant or constant=VALUE; seed=N; token=ID, of every row, modulo V; "
    "cotangents=random, ones, or none for no gradients; repeatable"
)


def data_of(texts: Sequence[str]) -> Data:
    """Parses `random`, `constant=0.5`, `seed=7`, `token=3` and `cotangents=ones`."""
    data = Data()
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        flag = "--data" if name in KINDS else f"--data {name}"
        if flag in data.flags:
            what = "the kind of data" if name in KINDS else name
            raise ContractError(f"--data {text}: {what} is given twice")
        data = replace(data, flags=(*data.flags, flag))
        try:
            if name == "constant" and equals:
                data = replace(data, kind=name, inputs=replace(data.inputs, constant=float(value)))
            elif name in KINDS and not equals:
                data = replace(data, kind=name)
            elif name == "seed" and 0 <= int(value) < 2**63:
                data = replace(data, inputs=replace(data.inputs, seed=int(value)))
            elif name == "token":
                data = replace(data, inputs=replace(data.inputs, token=int(value)))
            elif name == "cotangents" and value in COTANGENTS:
                data = replace(data, cotangents=value)
            else:
                raise ValueError
        except ValueError:
            raise ContractError(f"--data {text}: unknown; known: {DATA_HELP}") from None
    return data


def laws_of(texts: Sequence[str], laws: Sequence[str], targets: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The laws, and the targets of compilation: `--law compile=cuda:90`."""
    known("law", [text for text in texts if not text.startswith("compile=")], laws)
    chosen = [text.partition("=")[2] for text in texts if text.startswith("compile=")]
    names = dict.fromkeys("compile" if text.startswith("compile=") else text for text in texts)
    return tuple(names), known("target", chosen, targets)


def known(kind: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names, if all of them are known and none is given twice."""
    for i, name in enumerate(names):
        if name not in known:
            raise ContractError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
        if name in names[:i]:
            raise ContractError(f"{kind} {name!r} is given twice")
    return tuple(names)
