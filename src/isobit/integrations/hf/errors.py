"""Errors for models that isobit cannot serve."""

from importlib import import_module
from typing import Any

from isobit.frame.backend import UnsupportedError

#: How many reasons a message has, and how many names of modules for each.
REASONS, NAMES = 4, 3


class HFError(UnsupportedError):
    """isobit cannot serve this model, or this call of it. The message says what and why."""


def needed(module: str, by: str) -> Any:
    """A module of transformers that a function of this package cannot do without."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            missing = "transformers is not installed: pip install transformers"
            raise ModuleNotFoundError(f"isobit.integrations.hf.{by}: {missing}", name=error.name) from error
        if error.name == module:
            lacking = f"transformers {import_module('transformers').__version__} has no {module}"
            raise HFError(f"isobit.integrations.hf.{by}: {lacking}; 5.10 and 5.22 are tested") from error
        raise


def by_reason(reasons: dict[str, str]) -> str:
    """Reasons by the name of a module, as text: each reason once, with the first of its modules."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    shown = [f"{_listed(each)}: {reason}" for reason, each in list(names.items())[:REASONS]]
    left = sum(map(len, list(names.values())[REASONS:]))
    return "; ".join([*shown, *([f"and {left} modules for other reasons"] if left else [])])


def _listed(names: list[str]) -> str:
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {more} more" if more > 0 else "")
