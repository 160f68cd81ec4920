"""Options of a case in addition to sizes, dtype and data: `mask=bool`, `temperature=0.7`, `layout=padded`.

The names and types of values are those of an op's declared cases, so there is no second list of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from isobit.frame.contract import DTYPE_NAMES, ContractError, dtype_name
from isobit.frame.op import Op
from isobit.spec.proof import Case
from isobit.spec.proofs import proof_of

Options = Mapping[str, Any]

#: The name for the layout of a case, which is not one of its options.
LAYOUT = "layout"

_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def known_options(op: Op) -> dict[str, list[Any]]:
    """Names with the values that declared cases give them, and all layouts."""
    proof = proof_of(op)
    values_of: dict[str, list[Any]] = {}
    for case in (*proof.cases, *proof.bit_cases, *proof.agree_cases, *proof.memory_cases):
        for name, value in case.options.items():
            values = values_of.setdefault(name, [])
            if value not in values:
                values.append(value)
    return values_of | {LAYOUT: ["dense", *proof.layouts]}


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Parses `NAME=VALUE`; a value is a number, true or false, a dtype by its short name, or a word."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise ContractError(f"--option {text}: write it as NAME=VALUE, for example temperature=0.7")
        if name in options:
            raise ContractError(f"--option {text}: {name} is given twice")
        options[name] = value if name == LAYOUT else _value(value)
    return options


def _value(text: str) -> Any:
    if text in ("true", "false", "True", "False"):
        return text in ("true", "True")
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return _BY_NAME.get(text, text)


def fit(op: Op, options: Options) -> None:
    """Raise ContractError unless the op has options with these names, with values of these types."""
    known = known_options(op)
    for name, value in options.items():
        if name not in known:
            raise ContractError(f"{op.name}: unknown option {name!r}; known: {', '.join(known)}")
        if name == LAYOUT:
            if value not in known[LAYOUT]:
                raise ContractError(f"{op.name}: unknown layout {value!r}; known: {', '.join(known[LAYOUT])}")
        elif not any(_kind(value) == _kind(each) and _is_word(value, each) for each in known[name]):
            examples = ", ".join(text_of(each) for each in known[name])
            raise ContractError(f"{op.name}: {name}={text_of(value)} is no such option; declared: {examples}")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "flag"
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def _is_word(value: Any, declared: Any) -> bool:
    """A word must be a declared one; any number is allowed."""
    return not isinstance(value, str) or value == declared


def varied(case: Case, options: Options) -> Case:
    """The case with these options, which replace its own."""
    rest = {name: value for name, value in options.items() if name != LAYOUT}
    return replace(case, layout=options.get(LAYOUT, case.layout), options={**case.options, **rest})


def options_of(case: Case) -> dict[str, Any]:
    """The options of a case, including its layout if that is not the usual one."""
    return {**case.options, **({LAYOUT: case.layout} if case.layout != "dense" else {})}


def text_of(value: Any) -> str:
    """A value as it is written on the command line and in case names."""
    if isinstance(value, bool):
        return str(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def words(options: Options) -> dict[str, Any]:
    """Options for JSON: dtypes by name, infinity too, which JSON does not have, the rest unchanged."""
    by_name = {k for k, v in options.items() if isinstance(v, torch.dtype) or v in (math.inf, -math.inf)}
    return {k: text_of(v) if k in by_name else v for k, v in options.items()}
