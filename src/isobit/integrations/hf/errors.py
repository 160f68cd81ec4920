"""Errors for models that isobit cannot serve."""

from isobit.frame.backend import UnsupportedError

#: How many reasons a message has, and how many names of modules for each.
REASONS, NAMES = 4, 3


class HFError(UnsupportedError):
    """isobit cannot serve this model, or this call of it. The message says what and why."""


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
