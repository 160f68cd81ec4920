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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from isobit.frame.entry import Maps, stream_function, unhooked
from isobit.frame.launch import Launched, launched

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

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    size: int  # elements of the storage, or 0 if the tensor covers all of it


def _output(t: Tensor) -> _Output:
    size = t.untyped_storage().nbytes() // t.element_size()
    return _Output(t.shape, t.stride(), t.dtype, int(t.storage_offset()), 0 if size == t.numel() else size)


class _Launch(NamedTuple):
    """One launch: all arguments of the C function, and the positions where addresses have to be filled in."""

    c: Callable[..., None]
    flat: bool
    head: tuple[Any, ...]  # before the kernel's arguments; the stream goes to index _STREAM
    args: list[Any]  # of the kernel; after the head if they are flat
    pointers: list[tuple[int, int]]  # (position, index of the address)
    maps: list[tuple[int, int, Maps]]


_STREAM = 3


def _launch(made: Launched, place: Callable[[Tensor], int]) -> _Launch:
    entry = made.entry
    assert entry is not None
    head = (*made.grid, None, *entry.fixed)
    launch = _Launch(entry.c, entry.flat, head, list(head) if entry.flat else [], [], [])
    for i, value in enumerate(made.args):
        at = len(launch.args)
        if i in entry.maps:
            form = entry.form(entry.maps.index(i), value)
            launch.maps.append((at, place(value.base), form))
            launch.args.extend((None, *value.shape, *value.strides))
        elif i in entry.pointers:
            launch.pointers.append((at, place(value)))
            launch.args.append(None)
        else:
            launch.args.append(value)
    return launch


class Plan:
    """A recorded call: its allocations, how its addresses are computed, and its launches."""

    def __init__(self, tape: Tape, inputs: Sequence[Tensor], outputs: Any) -> None:
        self._device = inputs[0].device
        self._several = isinstance(outputs, tuple)
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        self._outputs = [None if t is None else _output(t) for t in results]
        # Addresses are relative to an input, to the storage of an output, or to the workspace.
        begin = {_base(t): t.data_ptr() for t in inputs}
        begin |= {_base(t): _base(t) for t in results if t is not None}
        which = {base: k for k, base in enumerate(begin)}
        self._bytes = 0
        starts: dict[int, int] = {}
        for base, storage in tape.new.items():
            if base not in begin:
                starts[base] = self._bytes
                self._bytes += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        places: dict[tuple[int, int], int] = {}

        def place(t: Tensor) -> int:
            """The index of an address, which is stored as (base, byte offset)."""
            address, base = t.data_ptr(), _base(t)
            if base in starts:
                at = len(begin), starts[base] + address - base
            else:
                at = which[base], address - begin[base]
            return places.setdefault(at, len(places))

        self._launches = [_launch(made, place) for made in tape.made]
        self._places = list(places)
        self._stream_of = stream_function()

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
        for c, flat, head, args, pointers, maps in self._launches:
            final = args.copy()
            for i, k in pointers:
                final[i] = at[k]
            for i, k, form in maps:
                final[i] = form[at[k]]
            if flat:
                final[_STREAM] = stream
                c(*final)
            else:
                c(*head[:_STREAM], stream, *head[_STREAM + 1 :], final)
        return tuple(outputs) if self._several else outputs[0]


def recordable(inputs: Sequence[Tensor]) -> bool:
    """Whether a call can be recorded now. If two inputs share a storage, an address could belong to
    either."""
    return inputs[0].is_cuda and len({_base(t) for t in inputs}) == len(inputs) and unhooked()


def record(
    run: Callable[..., Any], args: dict[str, Any], inputs: Sequence[Tensor]
) -> tuple[Any, Plan | None]:
    """(what a backend's run returns, a plan for calls like it, or None if there can be none). `inputs` are
    the tensors among `args`."""
    with Tape() as tape:
        outputs = run(**args, launch=tape)
    results = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
    of_results, known = {_base(t) for t in results}, {*tape.new, *(_base(t) for t in inputs)}
    if tape.reason is None and not (len(of_results) == len(results) and of_results <= tape.new.keys()):
        tape.reason = "results lie in inputs, in each other, or nowhere"
    if tape.reason is None and not {_base(t) for made in tape.made for t in _tensors(made)} <= known:
        tape.reason = "a kernel reads or writes what is neither given nor allocated"
    return outputs, Plan(tape, inputs, outputs) if tape.reason is None else None


def _tensors(made: Launched) -> list[Tensor]:
    assert made.entry is not None
    return [made.args[i] for i in made.entry.pointers] + [made.args[i].base for i in made.entry.maps]


def _base(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()
