"""A short path to a compiled kernel: call Triton's own C function directly, as Triton calls it.

Between `kernel[grid](...)` and that function Triton inspects every argument, encodes a tensor map for every
TMA descriptor and looks up hooks. That takes longer than many matrix products run. For a kernel that is
already compiled only addresses and numbers can change. So one call is observed on its way to the C function,
and later calls pass their arguments in the same form.

Nothing is assumed about that form. If the observed call is not understood (another launcher, scratch memory,
arguments in another order) there is no `Entry`, and Triton's own path is used.
"""

import copy
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import ref

from torch import Tensor
from triton import knobs
from triton.runtime import driver

from isobit.frame.context import attach

#: Number of tensor maps that are cached, of all forms together. Each takes some 700 bytes, and a step of a
#: large model needs a thousand or more for every number of rows that occurs.
MAPS = 1 << 16


_knobs = knobs.runtime


def unhooked() -> bool:
    """Whether no launch hooks are set. Triton's own path calls those of a profiler, this one does not."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def on_nvidia() -> bool:
    return bool(driver.active.get_current_target().backend == "cuda")


def stream_function() -> Callable[[int | None], int]:
    """A function from a device's index to its current stream."""
    current: Callable[[int | None], int] = driver.active.get_current_stream
    return current


class _Kept:
    """The tensor maps of all forms. An object with attributes: to set one of a class makes whatever is looked
    up in that class slow for once, which takes as long as to encode a map."""

    __slots__ = ("forms", "made", "swept")

    def __init__(self) -> None:
        #: All forms in use. Plain references: a `WeakValueDictionary` takes longer than to encode a map.
        self.forms: dict[Any, ref[Maps]] = {}
        self.swept = 0  # forms that were in use when the others were dropped
        self.made = 0  # maps since all were cleared


_kept = _Kept()


class _Boxes:
    """What forms share that differ in sizes and strides only."""

    __slots__ = ("_kind", "_meta", "_rest", "fill", "key")

    def __init__(self, descriptor: Any, meta: Any, key: Any) -> None:
        self._kind, self._meta, self.key = type(descriptor), meta, key
        # Without references to the tensor and to the list that holds this: they would be kept alive.
        self._rest = {**descriptor.__dict__, "base": None, "maps": None}
        self.fill: Any = None  # a `Fill`, if other sizes have been asked for; False if there is none

    def find_fill(self, shape: list[int], strides: list[int]) -> None:
        """A shorter way to maps of other sizes than these."""
        self.fill = _filling(self._descriptor(shape, strides), self._meta) or False

    def encoded(self, address: int, shape: list[int], strides: list[int]) -> Any:
        """By Triton's own code, from a descriptor whose tensor is replaced by an address."""
        made = self._descriptor(shape, strides)
        made.__dict__["base"] = _At(address)
        return _encode()(made, self._meta)

    def _descriptor(self, shape: list[int], strides: list[int]) -> Any:
        made = object.__new__(self._kind)
        made.__dict__.update(self._rest, shape=shape, strides=strides)
        return made


class Maps(dict[int, Any]):
    """Tensor maps of one form (sizes, strides, box, swizzle), by base address."""

    __slots__ = ("__weakref__", "_boxes", "_shape", "_strides")

    def __init__(self, boxes: _Boxes, shape: list[int], strides: list[int]) -> None:
        self._boxes, self._shape, self._strides = boxes, shape, strides

    @classmethod
    def of(cls, descriptor: Any, meta: Any) -> "Maps":
        """Those of a descriptor's form. Plans for other sizes have them too (`resized`), so that a tensor
        that several calls read has one map."""
        box = (descriptor.base.dtype, id(descriptor.layout), *descriptor.block_shape)
        shape, strides = list(descriptor.shape), list(descriptor.strides)
        known = _kept.forms.get((box, *shape, *strides))
        found = None if known is None else known()
        return _keep(cls(_Boxes(descriptor, meta, box), shape, strides)) if found is None else found

    def resized(self, shape: list[int], strides: list[int]) -> "Maps":
        """Those of the same boxes in a matrix of another size."""
        boxes = self._boxes
        known = _kept.forms.get((boxes.key, *shape, *strides))
        found = None if known is None else known()
        if found is None:
            if boxes.fill is None:
                boxes.find_fill(self._shape, self._strides)
            found = _keep(Maps(boxes, shape, strides))
        return found

    def __missing__(self, address: int) -> Any:
        if _kept.made >= MAPS:
            _kept.made = 0
            for each in list(_kept.forms.values()):
                form = each()
                if form is not None:
                    form.clear()
        _kept.made += 1
        attach()
        boxes = self._boxes
        encode = boxes.fill or boxes.encoded
        self[address] = made = encode(address, self._shape, self._strides)
        return made


def _keep(made: Maps) -> Maps:
    """Another form that is in use."""
    forms = _kept.forms
    if len(forms) > 2 * _kept.swept + 1024:
        _kept.forms = forms = {k: each for k, each in list(forms.items()) if each() is not None}
        _kept.swept = len(forms)
    key = (made._boxes.key, *made._shape, *made._strides)
    forms[key] = ref(made)
    return made


class _At:
    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@cache
def _encode() -> Callable[[Any, Any], Any]:
    """A function from a descriptor and its compiler metadata to a tensor map."""
    from triton.backends.nvidia import driver as nvidia

    return _encode_by(nvidia.make_tensordesc_arg)


def _encode_by(make: Any) -> Callable[[Any, Any], Any]:
    if make.__code__.co_argcount == 3:  # from Triton 3.9 on; the third is not read
        return lambda descriptor, meta: make(descriptor, meta, None)[0]
    return lambda descriptor, meta: make(descriptor, meta)[0]


#: From an address, a shape and strides to a tensor map.
Fill = Callable[[int, list[int], list[int]], Any]


def _filling(descriptor: Any, meta: Any) -> Fill | None:
    """The C function that Triton's code calls to encode a map, with its other arguments; found by observing
    one call, as in `entry_of`. None if that call is not understood."""
    from triton.backends.nvidia import driver as nvidia

    make, utils = nvidia.make_tensordesc_arg, driver.active.utils
    names = [name for name in make.__code__.co_names if callable(getattr(utils, name, None))]
    if len(names) != 1:
        return None
    seen: list[tuple[Any, ...]] = []
    observed: Any = types.SimpleNamespace(**{names[0]: lambda *args: seen.append(args)})
    for name in ("utils", "active", "driver", "runtime"):  # as the code finds it from `triton` on
        observed = types.SimpleNamespace(**{name: observed})
    address, shape, strides = 1 << 20, list(descriptor.shape), list(descriptor.strides)
    descriptor.base, descriptor.shape, descriptor.strides = _At(address), shape, strides
    try:
        _encode_by(types.FunctionType(make.__code__, {**make.__globals__, "triton": observed}))(
            descriptor, meta
        )
    except (AttributeError, LookupError, TypeError):  # another version of Triton
        return None
    if len(seen) != 1 or seen[0][0] != address or seen[0][-3] is not shape or seen[0][-2] is not strides:
        return None
    fill, given, last = getattr(utils, names[0]), seen[0][1:-3], seen[0][-1]
    return lambda address, shape, strides: fill(address, *given, shape, strides, last)


class Entry:
    """The C function of a compiled kernel, and how its arguments follow from those of a launch.

    `pointers` and `maps` are positions of tensors and TMA descriptors among the arguments of a launch. For C
    a descriptor becomes a tensor map, followed by the matrix' sizes and strides.

    C takes the grid, the stream, the `fixed` values, and the kernel's arguments: one by one if `flat`, else
    in one list.
    """

    __slots__ = ("_compiled", "_meta", "c", "fixed", "flat", "maps", "pointers")

    def __init__(
        self, compiled: Any, c: Callable[..., None], fixed: tuple[Any, ...], flat: bool, args: Sequence[Any]
    ) -> None:
        self.c, self.fixed, self.flat = c, fixed, flat
        self._compiled = compiled  # kept alive: its code is unloaded with it
        self.pointers = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.maps = [i for i, a in enumerate(args) if _is_descriptor(a)]
        self._meta = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())

    def __call__(self, grid: tuple[int, int, int], stream: int, args: Sequence[Any]) -> None:
        """Launch with the same arguments that a launcher passes."""
        final = list(args)
        for i in self.pointers:
            final[i] = args[i].data_ptr()
        for k in range(len(self.maps) - 1, -1, -1):  # the last first: what comes before stays in its place
            i = self.maps[k]
            d = args[i]
            final[i : i + 1] = (self.form(k, d)[d.base.data_ptr()], *d.shape, *d.strides)
        if self.flat:
            self.c(*grid, stream, *self.fixed, *final)
        else:
            self.c(*grid, stream, *self.fixed, final)

    def form(self, which: int, descriptor: Any) -> Maps:
        """The tensor maps for the form of a descriptor, which is the kernel's descriptor number `which`. All
        descriptors of a form share one list of them."""
        maps: list[Maps] = descriptor.maps
        if not maps:
            maps.append(Maps.of(descriptor, self._meta[which]))
        return maps[0]


def entry_of(compiled: Any, grid: tuple[int, int, int], args: Sequence[Any]) -> Entry | None:
    """The entry of a kernel that has just been launched with these arguments, or None."""
    run = compiled.run
    function = _c_function(getattr(run, "launch", None)) if on_nvidia() else None
    scratch = any(getattr(run, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
    if function is None or scratch or getattr(run, "gsan_enabled", False):
        return None
    c, with_ = function
    seen: list[tuple[Any, ...]] = []
    probe = copy.copy(run)
    probe.launch = with_(lambda *final: seen.append(final))
    probe(*grid, 0, compiled.function, compiled.packed_metadata, None, None, None, *args)
    if len(seen) != 1 or seen[0][:4] != (*grid, 0):
        return None
    (final,) = seen
    wanted = [x for a in args for x in ((None, *a.shape, *a.strides) if _is_descriptor(a) else (a,))]
    flat = not isinstance(final[-1], list | tuple)
    values = list(final[len(final) - len(wanted) :]) if flat else list(final[-1])
    fixed = final[4 : len(final) - len(wanted)] if flat else final[4:-1]
    if not _is_form(values, wanted):
        return None
    made = Entry(compiled, c, fixed, flat, args)
    return made if len(made._meta) == len(made.maps) and None not in made._meta else None


def _is_form(values: list[Any], wanted: list[Any]) -> bool:
    """Whether C got the arguments that we would have passed; a None in `wanted` stands for a tensor map."""
    if len(values) != len(wanted):
        return False
    for value, want in zip(values, wanted, strict=True):
        if want is None:
            if value is not None and isinstance(value, Tensor | int | float):
                return False
        elif value is not want and (isinstance(value, Tensor) or value != want):
            return False
    return True


def _c_function(launch: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """(the C function behind a launcher's `launch`, a function that replaces it), or None. For kernels with
    descriptors `launch` is a Python function that encodes them and holds the C function."""
    if isinstance(launch, types.BuiltinFunctionType):
        return launch, lambda other: other
    if not isinstance(launch, types.FunctionType):
        return None
    names, cells = launch.__code__.co_freevars, launch.__closure__ or ()
    held = [
        n for n, c in zip(names, cells, strict=True) if isinstance(c.cell_contents, types.BuiltinFunctionType)
    ]
    if len(held) != 1:
        return None

    def with_(other: Any) -> Any:
        closure = tuple(
            types.CellType(other) if n == held[0] else c for n, c in zip(names, cells, strict=True)
        )
        return types.FunctionType(
            launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, closure
        )

    return cells[names.index(held[0])].cell_contents, with_


def _is_descriptor(value: Any) -> bool:
    return hasattr(value, "block_shape")
