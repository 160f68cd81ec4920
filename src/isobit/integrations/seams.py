"""Which of the supported libraries are installed, and whether isobit is enabled there."""

from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

from isobit.integrations import fla, trl, verl
from isobit.integrations.session import Enabled, Switch, calls


class _Library(NamedTuple):
    distributions: tuple[str, ...]  # names of its distributions; one of them is enough
    install: str
    switch: Switch | None  # None: nothing in the library is replaced as a whole
    enable: Callable[[], Enabled] | None


_LIBRARIES = {
    "trl": _Library(("trl",), trl.INSTALL, trl.SWITCH, trl.enable),
    "verl": _Library(("verl",), verl.INSTALL, verl.SWITCH, verl.enable),
    "fla": _Library(("fla-core", "flash-linear-attention"), fla.INSTALL, fla.SWITCH, fla.enable),
    "hf": _Library(("transformers",), "pip install transformers", None, None),
}


def seams(try_them: bool = False) -> dict[str, str]:
    """By the name of a module of `isobit.integrations`: which version of its library was found, and whether
    isobit is enabled there.

    Args:
        try_them: import each installed library, and enable and disable isobit where it is off. That takes
            seconds, and shows whether isobit supports the installed version.

    Example:
        >>> from isobit.integrations.seams import seams
        >>> list(seams())
        ['trl', 'verl', 'fla', 'hf']
    """
    return {name: _state(name, library, try_them) for name, library in _LIBRARIES.items()}


def _state(name: str, library: _Library, try_it: bool) -> str:
    found = next(filter(None, map(_version, library.distributions)), None)
    if found is None:
        return f"not installed: {library.install}"
    if library.switch is None or library.enable is None:
        return f"{found}; for single models: token_logps and zero_drift of isobit.integrations.{name}"
    session = library.switch.session
    if session is not None:
        return f"{found}; on: {calls(session.served)} served, {sum(session.passed.values())} passed on"
    if not try_it:
        return f"{found}; off: isobit.integrations.{name}.enable() turns it on"
    try:
        with library.enable():
            return f"{found}; off, and can be turned on"
    except Exception as error:  # report whatever a library's import raises
        return f"{found}; cannot be turned on: {type(error).__name__}: {error}"


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return None
