"""A function of rows before it is checked: its inputs are made, and a first call shows what it returns.

What could not be judged is an error here, never a check that passes: fewer than two rows, outputs without
rows, results that are no tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.check.any_function.function import RowFunction, shape_of, where_raised
from isobit.check.torch_state import preserved
from isobit.frame.contract import ContractError
from isobit.frame.device import triton_is_interpreted
from isobit.spec.compare import differing
from isobit.spec.proof import Args
from isobit.spec.trial import LawBroken, Unsupported, cloned


def row_function(
    function: Any,
    make_inputs: Any,
    rows: Sequence[str],
    *,
    name: str,
    inputs_name: str,
    seed: int,
    gradients: bool,
    device: torch.device | None,
) -> RowFunction:
    """The function with its inputs, after a first call. ContractError if nothing could be judged."""
    if isinstance(function, type) or not callable(function):
        kind = "a class: give an object of it" if isinstance(function, type) else type(function).__name__
        raise ContractError(f"{name} is {kind}, not a function of rows")
    inputs = _made(make_inputs, inputs_name, seed, device)
    _check_rows(inputs, rows, inputs_name)
    mine = RowFunction(name, function, inputs, tuple(rows), seed)
    with preserved() as changed:
        found, graded, forward_only = _first_call(mine, gradients)
    return RowFunction(
        name, function, inputs, tuple(rows), seed, tuple(found), graded, forward_only, tuple(changed)
    )


def _made(make_inputs: Any, name: str, seed: int, device: torch.device | None) -> Args:
    """What `make_inputs()` returns after `torch.manual_seed(seed)`, without gradients, on the device."""
    if not callable(make_inputs):
        raise ContractError(f"{name} is {type(make_inputs).__name__}, not a function that makes inputs")
    with preserved():
        torch.manual_seed(seed)
        try:
            made = make_inputs()
        except (Exception, SystemExit) as error:  # it is the caller's own code
            raise ContractError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
        raise ContractError(f"{name} returned {type(made).__name__}, not a dictionary of arguments by name")
    return {key: _plain(value, key, name, device) for key, value in made.items()}


def _plain(value: Any, key: str, name: str, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.layout != torch.strided or value.is_complex() or value.is_quantized:
        raise ContractError(f"{name}({key}: {shape_of(value)}): a plain tensor of real numbers is expected")
    value = value.detach().resolve_neg()
    value = value if device is None else value.to(device)
    if value.device.type == "meta":
        raise ContractError(f"{name}({key}: {shape_of(value)}): a tensor on meta holds no values to check")
    # Copies are written to: elements that share memory would be written twice.
    return value.clone(memory_format=torch.contiguous_format) if 0 in value.stride() else value


def _check_rows(inputs: Args, rows: Sequence[str], name: str) -> None:
    if isinstance(rows, str) or not rows:
        raise ContractError(f"row_args={rows!r}: a sequence of the arguments that have rows, ('x',)")
    for row in rows:
        if row not in inputs:
            raise ContractError(f"rows: {name} makes no {row!r}; it makes {', '.join(inputs)}")
        if list(rows).count(row) > 1:
            raise ContractError(f"rows: {row!r} is given twice")
        value = inputs[row]
        if not isinstance(value, Tensor) or value.ndim == 0:
            what = f"[] {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise ContractError(f"{name}({row}: {what}): a row argument is a tensor with a row per entry")
    counts = {row: inputs[row].shape[0] for row in rows}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{row} has {count}" for row, count in counts.items())
        raise ContractError(f"{name}: all row arguments have as many rows: {said}")
    if counts[rows[0]] < 2:
        few = "no rows" if counts[rows[0]] == 0 else "one row"
        raise ContractError(f"{name}({rows[0]}: {shape_of(inputs[rows[0]])}): {few}; bits of a row can only "
                            "depend on others if there are some: make 2 rows or more")  # fmt: skip
    places = {inputs[row].device for row in rows}
    if len(places) > 1:
        raise ContractError(f"{name}: row arguments are on {' and '.join(sorted(map(str, places)))}")
    if not any(bool(differing(inputs[row], inputs[row].roll(1, 0)).any()) for row in rows):
        raise ContractError(f"{name}: all rows are equal: one that is computed from another would not show")


def _first_call(mine: RowFunction, gradients: bool) -> tuple[dict[str, Tensor], tuple[str, ...], str]:
    """(outputs, arguments that get a gradient, why there are none)."""
    args = cloned(mine.inputs)
    leaves = [
        name for name, t in args.items() if gradients and isinstance(t, Tensor) and t.is_floating_point()
    ]
    for name in leaves:
        args[name].requires_grad_()
    try:
        with torch.enable_grad():
            outputs = mine.call(args)
    except Unsupported as why:
        raise ContractError(f"nothing of {mine.name} was checked: {why}") from why
    except LawBroken as why:
        raise ContractError(f"{mine.name}: {why}") from why
    except (Exception, SystemExit) as error:
        hint = ". If it takes no tensors that require a gradient, check it without" if leaves else ""
        if "active drivers" in str(error) and not triton_is_interpreted():
            hint = ". On a CPU Triton's kernels need TRITON_INTERPRET=1 in the environment"
        said = f"{mine.name} raised {type(error).__name__}: {error} ({where_raised(error, mine)}){hint}"
        raise ContractError(said) from error
    _check_outputs(mine, outputs)
    if not gradients:
        return outputs, (), "gradients were switched off"
    graded = [o for o in outputs.values() if o.requires_grad]
    if not graded:
        return outputs, (), "forward only: no output requires a gradient"
    wanted = [args[name] for name in leaves]
    try:
        grads = torch.autograd.grad(graded, wanted, [torch.ones_like(o) for o in graded], allow_unused=True)
    except (Exception, SystemExit) as error:
        if isinstance(error, NotImplementedError) or "no autograd formula was registered" in str(error):
            return outputs, (), "forward only: it has no backward"
        said = f"the backward of {mine.name} raised {type(error).__name__}: {error}"
        raise ContractError(f"{said} ({where_raised(error, mine)})") from error
    having = tuple(name for name, grad in zip(leaves, grads, strict=True) if grad is not None)
    return outputs, having, "" if having else "forward only: no argument has a gradient"


def _check_outputs(mine: RowFunction, outputs: Mapping[str, Tensor]) -> None:
    if not outputs:
        raise ContractError(f"{mine.name} returned no tensor")
    for name, output in outputs.items():
        if output.is_complex() or output.layout != torch.strided:
            raise ContractError(f"{mine.name}: output {name} is {shape_of(output)}, not one of real numbers")
        if output.ndim == 0 or output.shape[0] != mine.count:
            raise ContractError(f"{mine.name}: output {name} is {shape_of(output)}: its first dimension is "
                                f"not that of the {mine.count} rows")  # fmt: skip
        if output.device.type != mine.device.type:
            raise ContractError(f"{mine.name}: output {name} is on {output.device}, rows on {mine.device}")
    if not any(output.numel() for output in outputs.values()):
        raise ContractError(f"{mine.name}: its outputs have no elements")
