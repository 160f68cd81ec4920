"""What users would use instead of an op. It is timed, and never used as the truth."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from isobit.spec.proof import Args, Case

DIRECTIONS = ("fwd", "bwd", "fwd_bwd")


def _unchanged(args: Args) -> Args:
    return args


def _always(case: Case, device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Rival:
    """One rival of an op.

    `function(args)` returns the op's first output, or a tuple of several; for a step, (output, *gradients).
    `prepare` converts the op's arguments for the rival, before anything is timed; gradients are taken with
    respect to the converted ones. `directions` in which it can be timed; None is all. `available` returns
    None, or the reason why the rival cannot be timed on this case and device. A `compiled` rival is compiled
    by `torch.compile` again for each case, so that no case pays for the shapes of another. With `anew`, what
    its author may have compiled is compiled again for each case too. A rival without
    `graph` waits for the device inside a call, so no CUDA graph can capture it. `takes` names the options
    of a case that it supports or that do not affect it; None is all. With others it would not do the same
    work, so it is not timed. A rival without `jit` runs kernels that PyTorch or a library has compiled. One
    that is not `judged` does the work of the op, or less, without its results: they have no errors.
    """

    name: str
    function: Callable[[Args], Any]
    directions: tuple[str, ...] | None = DIRECTIONS
    prepare: Callable[[Args], Args] = _unchanged
    available: Callable[[Case, torch.device], str | None] = _always
    compiled: bool = False
    anew: bool = False
    graph: bool = True
    jit: bool = True
    takes: tuple[str, ...] | None = ()
    judged: bool = True

    def why_not(self, case: Case, device: torch.device, direction: str, options: Iterable[str]) -> str | None:
        """The reason not to time it here, or None."""
        lacks = [name for name in options if self.takes is not None and name not in self.takes]
        if lacks:
            return f"does not take {', '.join(lacks)}"
        reason = self.available(case, device)
        if reason is None and self.directions is not None and direction not in self.directions:
            reason = f"not timed for {direction}"
        return reason


def cannot_import(module: str, load: Callable[[str], object] = importlib.import_module) -> str | None:
    """None if the module can be imported (or loaded in another way), else the reason: an error at import must
    not stop the bench."""
    try:
        load(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        return "not installed" if error.name == package else f"{package} cannot be imported: {error}"
    except Exception as error:  # packages probe devices at import, and may raise anything
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None
