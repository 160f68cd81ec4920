"""How a launcher starts its kernel, and how the same launcher compiles it without a GPU.

A launcher takes `launch`, by default `run`. `isobit check` passes a `Recorder` instead, with tensors on the
meta device: it records the launches, to be compiled for any target. So ahead-of-time signatures come from
real calls and are not written down a second time.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.frame import rehearsed
from isobit.frame.compile_hooks import let_hooks_read_layouts
from isobit.frame.context import attach
from isobit.frame.contract import dtype_name
from isobit.frame.entry import Entry, entry_of, on_nvidia, stream_function, unhooked

Launch = Callable[..., None]


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch on the device of the first argument, on that device's current stream. An empty grid launches
    nothing."""
    if 0 in grid:
        return
    if args[0].device.type == "cpu" and rehearsed.take is None:
        kernel[grid](*args, **options)
    else:
        launched(kernel, grid, args, options)


def unused(like: Any) -> Any:
    """A placeholder for a pointer that the kernel does not read."""
    return like


class Launched(NamedTuple):
    """A launch that was made."""

    compiled: Any
    entry: Entry | None  # the short path to it, if there is one
    grid: tuple[int, int, int]
    args: Sequence[Any]  # of the kernel, constants included, in its order


#: Compiled kernels, and the short paths to them, by what they were compiled for.
_compiled: dict[tuple[Any, ...], tuple[Any, Entry | None]] = {}


def compiled_count() -> int:
    """How many kernels have been compiled since the process began, each for its constants and dtypes."""
    return len(_compiled)


def launched(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> Launched | None:
    """Launch on the device of the first argument, and return what was launched; None if there is no record of
    it."""
    device = args[0].device
    if _is_current(device):
        return _launched(kernel, grid, args, options)
    with torch.get_device_module(device.type).device(device):
        return _launched(kernel, grid, args, options)


def _is_current(device: torch.device) -> bool:
    return device.index is None or device.index == torch.accelerator.current_device_index()


def _launched(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
) -> Launched | None:
    """On the current device.

    On every call Triton's own path inspects every argument and compares every global. For a kernel with TMA
    descriptors that takes longer than many products. A compiled kernel depends on its constants, dtypes and
    boxes, and on the divisibility of numbers and addresses: these are the cache key here.
    """
    roles = roles_of(kernel)
    index, bound = args[0].device.index, roles.bound(args, options)
    if not roles.known:
        kernel[grid](*args, **options)
        return None
    key = _key(roles, index, bound, options)
    if rehearsed.take is not None:
        rehearsed.take(key, kernel, args, options)
        return None
    whole = whole_grid(grid)
    known = _compiled.get(key)
    if known is None:
        attach()
        compiled = kernel[grid](*args, **options)
        known = _compiled[key] = compiled, entry_of(compiled, whole, bound)
    elif known[1] is None or not unhooked():
        attach()
        known[0][whole](*bound)
    else:
        known[1](whole, stream_function()(index), bound)
    return Launched(*known, whole, bound)


def prepare(kernel: Any, *args: Any, **options: Any) -> None:
    """Compile what a launch with these arguments would need, and launch nothing."""
    if not _is_current(device := args[0].device):
        with torch.get_device_module(device.type).device(device):
            return prepare(kernel, *args, **options)
    grid = (1, 1, 1)
    roles = roles_of(kernel)
    bound = roles.bound(args, options)
    key = _key(roles, args[0].device.index, bound, options) if roles.known else None
    if rehearsed.take is not None and key is not None:
        rehearsed.take(key, kernel, args, options)
        return
    if key in _compiled:
        return
    attach()
    compiled = kernel.run(*args, grid=grid, warmup=True, **options)
    if key is not None:
        _compiled[key] = compiled, entry_of(compiled, grid, bound)


def is_compiled(key: Any) -> bool:
    return key in _compiled


def stand_in(value: Any) -> Any:
    """In place of a tensor, also one without memory, a small one that a kernel is compiled for in the same
    way: of its dtype, and as far from a multiple of 16 bytes. Nothing reads it."""
    if hasattr(value, "data_ptr"):
        shift = value.data_ptr() % 16
        memory = torch.empty(64, dtype=torch.uint8, device=value.device)
        return memory[shift : shift + 16].view(value.dtype)
    if hasattr(value, "block_shape"):  # a TMA descriptor
        made = copy.copy(value)
        made.base = stand_in(value.base)
        return made
    return value


def whole_grid(grid: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    x, y, z, *_ = (*grid, 1, 1)
    return x, y, z


def _key(roles: "Roles", index: int | None, bound: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return (
        id(roles.kernel),
        index,
        # Constants that are given by keyword are in `bound`: a layout takes microseconds to hash, once.
        *(value for name, value in options.items() if name not in roles.names),
        *bound[roles.constants :],
        *_identities(bound[: roles.constants], roles.free),
    )


class Roles(NamedTuple):
    """The parameters of a kernel. Those that are part of the cache key as they are (constants) come last."""

    kernel: Any  # kept alive, so that its id stays unique
    all: int  # how many there are
    constants: int  # index of the first of them
    free: tuple[bool, ...]  # for each one before: whether the kernel is not specialised on its divisibility
    known: bool  # whether its specialisation rules are known; other hardware has others
    names: frozenset[str]

    def bound(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments of a launch in the kernel's order, those given by keyword too."""
        if len(args) == self.all:
            return args
        return (*args, *map(options.__getitem__, self.kernel.arg_names[len(args) :]))


_roles_of: dict[int, Roles] = {}


def roles_of(kernel: Any) -> Roles:
    return _roles_of.get(id(kernel)) or _learn(kernel)


def _learn(kernel: Any) -> Roles:
    let_hooks_read_layouts(kernel)
    constant = [p.is_constexpr for p in kernel.params]
    first = constant.index(True) if True in constant else len(constant)
    free = tuple(p.do_not_specialize for p in kernel.params[:first])
    known = all(constant[first:]) and (all(free) or on_nvidia())
    names = frozenset(kernel.arg_names)
    roles = _roles_of[id(kernel)] = Roles(kernel, len(constant), first, free, known, names)
    return roles


def _identities(args: Sequence[Any], free: Sequence[bool]) -> list[Any]:
    """The cache key of arguments that are not constants: of an integer only whether it fits in 32 bits, of a
    float nothing; where the kernel is specialised also whether 16 divides it, and whether it is 1. Layouts of
    boxes live as long as the process, so their ids are unique."""
    identities: list[Any] = []
    for value, loose in zip(args, free, strict=True):
        what = type(value)
        if what is int:
            identities.append(-(2**31) <= value < 2**31)
            if not loose:
                identities.append("one" if value == 1 else value % 16 == 0)
        elif what is float:
            identities.append(float)
        elif isinstance(value, Tensor):
            identities.append(value.dtype)
            if not loose:
                identities.append(value.data_ptr() % 16 == 0)
        elif value is None or what is bool:  # None is a constant too
            identities.append(value)
        else:  # a TMA descriptor; its layout identifies box and dtype
            identities.append(id(value.layout))
    return identities


@dataclass
class Recorder:
    """Records launches instead of making them."""

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.launches.append((kernel, args, options))

    def sources(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """(kernel name, source to compile, compile options) of every recorded launch."""
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        def source_of(kernel: Any) -> Any:
            return GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource

        sources = []
        for kernel, args, options in self.launches:
            names = kernel.arg_names
            values = dict(zip(names, args, strict=False))
            values |= {k: v for k, v in options.items() if k in names}
            signature, constants, attrs = {}, {}, {}
            for i, name in enumerate(names):
                kind, param = _triton_type(values[name]), kernel.params[i]
                free = param.do_not_specialize
                # A launch also turns the number 1 into a constant: a stride of 1 makes vector loads possible.
                one = kind.startswith("i") and values[name] == 1 and not free
                if kind == "constexpr" or param.is_constexpr or one:
                    signature[name], constants[name] = "constexpr", values[name]
                    continue
                signature[name] = kind
                if not free and (kind.startswith("*") or (kind.startswith("i") and values[name] % 16 == 0)):
                    attrs[(i,)] = [["tt.divisibility", 16]]
            source = source_of(kernel)(kernel, signature, constants, attrs)
            sources.append((kernel.__name__, source, {k: v for k, v in options.items() if k not in names}))
        return sources


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
