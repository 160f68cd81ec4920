"""How a launcher reaches its kernel, and how the same launcher compiles without a GPU.

A launcher takes `launch`, by default `run`. `isobit check` passes a `Recorder` instead, with tensors
on the meta device: it keeps what would have been launched, ready to be compiled for any target. So
the ahead-of-time signatures are those of real calls and are written nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from isobit.contract import dtype_name

Launch = Callable[..., None]


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch on the device of the first argument, on that device's current stream. No programs, no launch."""
    device = args[0].device
    if 0 in grid:
        return
    if device.type == "cpu":
        kernel[grid](*args, **options)
    elif device.index == torch.accelerator.current_device_index():
        _launch(kernel, grid, args, options)
    else:
        with torch.get_device_module(device.type).device(device):
            _launch(kernel, grid, args, options)


#: Compiled kernels by what they were compiled for.
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Triton's own way to a compiled kernel looks at every argument and compares every global on every call,
    which for a kernel with TMA descriptors takes longer than many a product. A kernel that is specialised on
    constants, dtypes and boxes alone is found by those."""
    constant = _constants(kernel)
    if constant is None:
        kernel[grid](*args, **options)
        return
    key = (id(kernel), args[0].device.index, *options.values(), *map(_identity, args, constant))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, **options)
    else:
        compiled[(*grid, 1, 1)[:3]](*args)


@cache
def _constants(kernel: Any) -> tuple[bool, ...] | None:
    """Which parameters are constants, if the others are all free of specialisation."""
    if any(not (p.is_constexpr or p.do_not_specialize) for p in kernel.params):
        return None
    return tuple(p.is_constexpr for p in kernel.params)


def _identity(value: Any, constant: bool) -> Any:
    """What of an argument a compiled kernel depends on: of a number only whether 32 bits hold it, of a float
    nothing. Layouts live as long as the process, so their ids do."""
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, int):
        return value if constant else -(2**31) <= value < 2**31
    if isinstance(value, float):
        return value if constant else None
    if hasattr(value, "block_shape"):  # a TMA descriptor
        return value.base.dtype, *value.block_shape
    return id(value)


@dataclass
class Recorder:
    """Keeps launches instead of making them."""

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.launches.append((kernel, args, options))

    def sources(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """(kernel name, source to compile, compile options) of every recorded launch."""
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        def source_of(kernel: Any) -> Any:
            return GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource

        found = []
        for kernel, args, options in self.launches:
            names = kernel.arg_names
            values = dict(zip(names, args, strict=False))
            values |= {k: v for k, v in options.items() if k in names}
            signature, constants, attrs = {}, {}, {}
            for i, name in enumerate(names):
                kind, param = _triton_type(values[name]), kernel.params[i]
                free = param.do_not_specialize
                # A launch makes a constant of the number 1 too: a stride of 1 is what vectors are read by.
                one = kind.startswith("i") and values[name] == 1 and not free
                if kind == "constexpr" or param.is_constexpr or one:
                    signature[name], constants[name] = "constexpr", values[name]
                    continue
                signature[name] = kind
                if not free and (kind.startswith("*") or (kind.startswith("i") and values[name] % 16 == 0)):
                    attrs[(i,)] = [["tt.divisibility", 16]]
            source = source_of(kernel)(kernel, signature, constants, attrs)
            found.append((kernel.__name__, source, {k: v for k, v in options.items() if k not in names}))
        return found


def _triton_type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "constexpr"
    if hasattr(value, "block_shape"):  # a TMA descriptor
        return f"tensordesc<{dtype_name(value.base.dtype)}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, Tensor):
        name = dtype_name(value.dtype)
        return "*" + name.replace("uint", "u").replace("int", "i")
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"
