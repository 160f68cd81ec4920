"""Loads a candidate by name: `my_pkg.my_mod:my_fn`. Nothing else of the user's is imported."""

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from isobit.check.candidate import Candidate, candidate_of
from isobit.check.torch_state import preserved
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.op import known_op
from isobit.spec.proofs import proof_of


def load_candidate(
    op_name: str, target: str, device: torch.device, adapter: str | None, output_dtype: torch.dtype | None
) -> Candidate:
    """The function with this name as a candidate for an op, through the adapter with that name."""
    with preserved() as changed:
        function = object_named(target, "--candidate")
        adapt = None if adapter is None else object_named(adapter, "--adapter")
    if adapt is not None and not callable(adapt):
        raise ContractError(f"--adapter {adapter}: is not a function adapt(fn) -> fn")
    flags = [f"--candidate {shlex.quote(target)}"]
    flags += [f"--adapter {shlex.quote(adapter)}"] if adapter is not None else []
    flags += [f"--output-dtype {dtype_name(output_dtype)}"] if output_dtype is not None else []
    op = known_op(op_name)
    candidate = candidate_of(
        op, proof_of(op), function, device,
        name=target, flags=" ".join(flags), adapter=adapt, output_dtype=output_dtype,
    )  # fmt: skip
    candidate.imported = changed
    return candidate


def object_named(text: str, option: str) -> Any:
    """The object that `module:name` names; the current folder is searched for modules too."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ContractError(f"{option} {text}: write it as MODULE:NAME, for example my_pkg.my_mod:my_fn")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        named = import_module(module)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise ContractError(f"{option} {text}: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(named, part):
            raise ContractError(f"{option} {text}: {module} has no {name}")
        named = getattr(named, part)
    return named
