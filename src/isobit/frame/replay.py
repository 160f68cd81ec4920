"""Records the launches of a call once and repeats them with other addresses.

For two calls with the same cache key (shapes, strides, dtypes, options) a launcher makes the same launches:
the same kernels, grids and numbers. Only addresses differ, and each of them is one of

    an input's, plus an offset
    an output's, plus an offset
    an intermediate's; all of these are in one workspace

A `Tape` records the launches of a launcher. A `Plan` is made from it: it allocates the outputs and the
workspace and makes the launches, without the launcher. That is exact as long as there are only allocations
and views between launches. A dispatch mode watches this while a tape records. A call in which anything else
happens has no plan, and its launcher runs every time.

The workspace lives until the last launch is made. After that PyTorch's allocator may reuse it on the same
stream, as with every freed tensor. Nothing here waits for the device, so a plan can be captured into a CUDA
graph.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from isobit.frame.entry import Entry, Maps, stream_function, unhooked
from isobit.frame.launch import Launched, launched, roles_of, whole_grid
from isobit.frame.traced import Allocations, Made, Memory, ShapeOf, Size, Trace, Traced, UntraceableError

_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))

#: The alignment of PyTorch's allocator, and so of every tensor in a workspace.
_ALIGNMENT = 512

_current_device = torch.accelerator.current_device_index


class Tape(TorchDispatchMode):
    """Makes launches and records them. While it is entered it watches PyTorch's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Launched] = []
        self.new: dict[int, torch.UntypedStorage] = {}  # by address; kept alive, so that addresses are unique
        self.reason: str | None = None  # why there can be no plan

    def __enter__(self) -> "Tape":
        """Enters on this thread only. The normal entry of a mode also sets process-wide flags. Threads
        that enter and leave concurrently would restore them in the wrong order, and a flag that stays set
        changes what `torch.compile` does."""
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise the first tape would import all of `torch._dynamo` in the middle of a call: that takes a
        second or two, and leaves garbage that holds the tensors of the call."""
        return False

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if 0 in grid:
            return
        made = launched(kernel, grid, args, options)
        if made is None or made.entry is None:
            self._refuse(f"{kernel.__name__} has no short path")
        elif self.reason is None:
            self.made.append(made)

    def _refuse(self, reason: str) -> None:
        """There will be no plan, so do not keep memory alive that the call frees."""
        self.reason = self.reason or reason
        self.made.clear()
        self.new.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = (out,) if isinstance(out, Tensor) else out
        if self.reason is not None:
            return out
        if func.overloadpacket.__name__ in _ALLOCATIONS:
            storage = out.untyped_storage()
            self.new[storage.data_ptr()] = storage
        elif func._schema.is_mutable or not _are_views(results, args):
            self._refuse(f"{func} runs between launches")
        return out


def _are_views(results: Any, args: Sequence[Any]) -> bool:
    """Whether everything that an operator returns is a view of its first argument."""
    if not (isinstance(results, tuple | list) and results and args and isinstance(args[0], Tensor)):
        return False
    base = _base(args[0])
    return all(isinstance(t, Tensor) and _base(t) == base for t in results)


class _Output(NamedTuple):
    """A tensor with its own storage, as it is to be allocated."""

    shape: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    offset: int
    size: int  # elements of the storage, or 0 if the tensor covers all of it


class _Launch(NamedTuple):
    """One launch: all arguments of the C function, and the positions where addresses have to be filled in."""

    c: Callable[..., None]
    flat: bool
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]  # after the grid and the stream, before the kernel's arguments
    args: list[Any]  # of the kernel; all of them, with the stream at index _STREAM, if they are flat
    pointers: list[tuple[int, int]]  # (position, index of the address)
    maps: list[tuple[int, int, Maps]]


_STREAM = 3


class Parts(NamedTuple):
    """A recorded call: its allocations, how its addresses are computed, and its launches."""

    outputs: list[_Output | None]
    bytes: int  # of the workspace
    places: list[tuple[int, int]]  # of every address: (what it is relative to, byte offset)
    launches: list[_Launch]


def _with_places(parts: Parts) -> list[Any]:
    """All of it, with addresses in place of their indices."""
    outputs, total, places, launches = parts
    found: list[Any] = [outputs, total]
    for *rest, pointers, maps in launches:
        found.append((*rest, [(i, places[k]) for i, k in pointers]))
        found.append([(i, places[k], id(form)) for i, k, form in maps])
    return found


class Where(NamedTuple):
    """How to find out about tensors, which are those of a call or without memory (`isobit.frame.traced`)."""

    memory: Callable[[Any], int]  # an identification of the memory that a tensor is in
    offset: Callable[[Any], Any]  # bytes from its beginning
    size: Callable[[Any], Any]  # all of its bytes
    form: Callable[[Entry, int, Any, Any], Any]  # (entry, which descriptor, the descriptor, that of the tape)


_REAL = Where(
    lambda t: t.untyped_storage().data_ptr(),
    lambda t: t.data_ptr() - t.untyped_storage().data_ptr(),
    lambda t: t.untyped_storage().nbytes(),
    lambda entry, which, descriptor, _: entry.form(which, descriptor),
)


def parts_of(
    made: Sequence[Launched], launches: Sequence[tuple[Any, Any]], new: dict[int, Any],
    inputs: Sequence[Any], results: Sequence[Any], where: Where = _REAL,
) -> Parts:  # fmt: skip
    """The parts of a call with these (grid, arguments) of its launches, which were `made` so; `new` is the
    number of bytes of every allocation, by memory."""
    # Addresses are relative to an input, to the storage of an output, or to the workspace.
    begin: dict[int, Any] = {where.memory(t): where.offset(t) for t in inputs}
    begin |= {where.memory(t): 0 for t in results if t is not None}
    which = {memory: k for k, memory in enumerate(begin)}
    total: Any = 0
    starts: dict[int, Any] = {}
    for memory, nbytes in new.items():
        if memory not in begin:
            starts[memory] = total
            total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    places: dict[tuple[int, str], tuple[int, Any]] = {}

    def place(t: Any) -> int:
        """The index of an address."""
        memory, offset = where.memory(t), where.offset(t)
        at = (
            (len(begin), starts[memory] + offset)
            if memory in starts
            else (which[memory], offset - begin[memory])
        )
        key = at[0], str(at[1])
        places.setdefault(key, at)
        return list(places).index(key)

    def launch(tape: Launched, grid: Any, args: Sequence[Any]) -> _Launch:
        entry = tape.entry
        assert entry is not None
        first = [*grid, None, *entry.fixed] if entry.flat else []
        launch = _Launch(entry.c, entry.flat, grid, entry.fixed, first, [], [])
        for i, value in enumerate(args):
            at = len(launch.args)
            if i in entry.maps:
                form = where.form(entry, entry.maps.index(i), value, tape.args[i])
                launch.maps.append((at, place(value.base), form))
                launch.args.extend((None, *value.shape, *value.strides))
            elif i in entry.pointers:
                launch.pointers.append((at, place(value)))
                launch.args.append(None)
            else:
                launch.args.append(value)
        return launch

    def output(t: Any) -> _Output:
        each = t.element_size()
        size, offset = where.size(t) // each, where.offset(t) // each
        return _Output(tuple(t.shape), tuple(t.stride()), t.dtype, offset, 0 if size == t.numel() else size)

    outputs = [None if t is None else output(t) for t in results]
    done = [launch(tape, *each) for tape, each in zip(made, launches, strict=True)]
    return Parts(outputs, total, list(places.values()), done)


class Plan:
    """A recorded call, to be made again."""

    def __init__(
        self, device: torch.device, several: bool, stream_of: Callable[[int | None], int], parts: Parts
    ) -> None:
        self._device, self._several, self._stream_of, self.parts = device, several, stream_of, parts
        self._outputs, self._bytes, self._places, self._launches = parts
        #: From the sizes of another call to its plan, or to None if that has other launches.
        self.resized: Callable[..., Plan | None] | None = None
        self.untraceable = ""  # the reason, if a trace was tried and there is no such function

    #: Not while launch hooks are set: they need Triton's own path.
    can_run = staticmethod(unhooked)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        """The outputs of a call with these inputs, which must match the recorded call."""
        device = self._device
        if device.index is not None and device.index != _current_device():
            with torch.cuda.device(device):
                return self(inputs)
        begin = [t.data_ptr() for t in inputs]
        outputs: list[Tensor | None] = []
        for output in self._outputs:
            if output is None:
                outputs.append(None)
                continue
            shape, stride, dtype, offset, size = output
            if size:
                whole = torch.empty(size, dtype=dtype, device=device)
                begin.append(whole.data_ptr())
                outputs.append(whole.as_strided(shape, stride, offset))
            else:
                made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                begin.append(made.data_ptr())
                outputs.append(made)
        if self._bytes:
            workspace = torch.empty(self._bytes, dtype=torch.uint8, device=device)  # lives until the return
            begin.append(workspace.data_ptr())
        at = [begin[k] + offset for k, offset in self._places]
        stream = self._stream_of(device.index)
        for c, flat, grid, fixed, args, pointers, maps in self._launches:
            final = args.copy()
            for i, k in pointers:
                final[i] = at[k]
            for i, k, form in maps:
                final[i] = form[at[k]]
            if flat:
                final[_STREAM] = stream
                c(*final)
            else:
                c(*grid, stream, *fixed, final)
        return tuple(outputs) if self._several else outputs[0]


def recordable(inputs: Sequence[Tensor]) -> bool:
    """Whether a call can be recorded now. If two inputs begin at one address, it could belong to either."""
    return inputs[0].is_cuda and len({t.data_ptr() for t in inputs}) == len(inputs) and unhooked()


def record(
    run: Callable[..., Any],
    args: dict[str, Any],
    inputs: Sequence[Tensor],
    sizes: Sequence[int] = (),
    shape_of: ShapeOf | None = None,
) -> tuple[Any, Plan | None]:
    """(what a backend's run returns, a plan for calls like it, or None if there can be none). `inputs` are
    the tensors among `args`. If other calls have other `sizes`, `shape_of` gives the shape and the strides of
    an argument by them, and the plan can be made for other sizes, unless the run cannot be traced."""
    args, inputs = _apart(args, inputs)
    with Tape() as tape:
        outputs = run(**args, launch=tape)
    results = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
    of_results, known = {_base(t) for t in results}, {*tape.new, *(_base(t) for t in inputs)}
    if tape.reason is None and not (len(of_results) == len(results) and of_results <= tape.new.keys()):
        tape.reason = "results lie in inputs, in each other, or nowhere"
    if tape.reason is None and not {_base(t) for made in tape.made for t in _tensors(made)} <= known:
        tape.reason = "a kernel reads or writes what is neither given nor allocated"
    if tape.reason is not None:
        return outputs, None
    several = isinstance(outputs, tuple)
    new = {base: storage.nbytes() for base, storage in tape.new.items()}
    launches = [(made.grid, made.args) for made in tape.made]
    all_results = outputs if several else (outputs,)
    parts = parts_of(tape.made, launches, new, inputs, all_results)
    plan = Plan(inputs[0].device, several, stream_function(), parts)
    if shape_of is not None:
        try:
            plan.resized = _traced(plan, tape, run, args, sizes, shape_of)
        except Exception as error:  # anything that a launcher may do, and a trace cannot
            plan.untraceable = str(error)
    return outputs, plan


def _apart(args: dict[str, Any], inputs: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """The same with inputs of which no two share a storage, so that the storage of a view tells which of them
    it is a view of. Of parts of one tensor, such as the keys and values of a cache, each gets a storage that
    begins at its own address, in the same memory."""
    bases = [_base(t) for t in inputs]
    own = {
        id(t): _with_own_storage(t) for t, base in zip(inputs, bases, strict=True) if bases.count(base) > 1
    }
    return {name: own.get(id(t), t) for name, t in args.items()}, [own.get(id(t), t) for t in inputs]


def _with_own_storage(t: Tensor) -> Tensor:
    storage = t.untyped_storage()[t.storage_offset() * t.element_size() :]
    with torch.no_grad():
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


# Plans for other sizes


class _Launches:
    """Collects the launches of a trace, and the conditions under which they need the same compiled kernel."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, Any]] = []

    def __call__(self, kernel: Any, grid: tuple[Any, ...], *args: Any, **options: Any) -> None:
        if 0 in grid:
            return
        roles = roles_of(kernel)
        bound = roles.bound(args, options)
        if any(isinstance(value, Size) for value in (*bound[roles.constants :], *options.values())):
            raise UntraceableError("a constant of the kernel depends on a size")
        for value, loose in zip(bound[: roles.constants], roles.free, strict=True):
            if isinstance(value, Size):
                _ = (value >= -(2**31), value < 2**31)
                if not loose:
                    _ = (value == 1, value % 16 == 0)
            elif isinstance(value, Traced) and not loose:
                _ = (value.data_ptr() % 16 == 0, True)
        self.made.append((whole_grid(grid), bound))


def _form(entry: Entry, which: int, descriptor: Any, recorded: Any) -> Any:
    """Tensor maps of a traced descriptor: of the recorded one, or of the same boxes in another matrix."""
    known = entry.form(which, recorded)
    if not any(isinstance(n, Size) for n in (*descriptor.shape, *descriptor.strides)):
        return known
    return Made(known.resized, list(descriptor.shape), list(descriptor.strides))


_TRACED = Where(lambda t: id(t.memory), lambda t: t.offset, lambda t: t.memory.nbytes, _form)


def traced_args(
    args: dict[str, Any], sizes: Sequence[Any], shape_of: ShapeOf
) -> tuple[dict[str, Any], list[Traced]]:
    """(arguments of a call with these sizes, whose tensors have no memory; these tensors)."""
    given, inputs = dict(args), []
    for name, t in args.items():
        if isinstance(t, Tensor):
            shape, stride = shape_of(name, args, sizes)
            memory = Memory(0, t.data_ptr() % 16)
            given[name] = Traced(shape, stride, t.dtype, t.device, memory, [])
            inputs.append(given[name])
    for t in inputs:
        t.made = inputs[0].made
    return given, inputs


def _traced(
    plan: Plan,
    tape: Tape,
    run: Callable[..., Any],
    args: dict[str, Any],
    sizes: Sequence[int],
    shape_of: ShapeOf,
) -> Callable[..., Plan | None]:
    """The function from sizes to plans, of a launcher that can be traced. For the recorded sizes it must give
    the recorded plan."""
    trace, launch = Trace(sizes), _Launches()
    given, inputs = traced_args(args, trace.sizes, shape_of)
    with Allocations(inputs[0].made, trace):
        outputs = run(**given, launch=launch)
    several = isinstance(outputs, tuple)
    new = {id(memory): memory.nbytes for memory in inputs[0].made}
    results = outputs if several else (outputs,)
    parts = parts_of(tape.made, launch.made, new, inputs, results, _TRACED)
    function = trace.function(Made(partial(Plan, plan._device, several, plan._stream_of), parts))
    same = function(*sizes)
    if same is None or _with_places(same.parts) != _with_places(plan.parts):
        raise UntraceableError("a trace gives other launches than were made")
    return function


def _tensors(made: Launched) -> list[Tensor]:
    assert made.entry is not None
    return [made.args[i] for i in made.entry.pointers] + [made.args[i].base for i in made.entry.maps]


def _base(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
