"""Gluon kernels on a CPU: their own functions, with numpy in the place of the language.

Gluon has no interpreter. But a kernel is Python, and what it does with tiles, barriers and shared memory can
be done by threads and arrays: each partition of `warp_specialize` is a thread, a copy by TMA happens as soon
as it is asked for, and a product as late as it may, when it is waited for. So memory that is given away too
early is overwritten before it is read, and a barrier that nobody completes is noticed. Programs run one after
another, or side by side if they wait for one another. Arithmetic is that of the numpy model, layouts are
nothing.
"""

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

PATIENCE_S = 20.0
F32 = np.float32

_BITS_OF = {torch.float16: np.float16}
_WORDS: dict[Any, torch.dtype] = {np.int32: torch.int32, "int64": torch.int64}


class Array(np.ndarray):
    """A tile, or a number. What a kernel has computed does not change, so results may share memory."""

    def __array_wrap__(self, result: Any, context: Any = None, return_scalar: bool = False) -> "Array":
        return np.asarray(result).view(Array)

    def __getitem__(self, at: Any) -> "Array":
        return np.asarray(super().__getitem__(at)).view(Array)

    def __iadd__(self, other: Any) -> "Array":
        return self + other

    def __isub__(self, other: Any) -> "Array":
        return self - other

    def __imul__(self, other: Any) -> "Array":
        return self * other

    def __itruediv__(self, other: Any) -> "Array":
        return self / other

    def to(self, kind: Any, bitcast: bool = False) -> "Array":
        if isinstance(kind, torch.dtype):
            if bitcast and self.dtype == np.int16:
                return array(self.view(_BITS_OF[kind]).astype(F32))
            return self if bitcast else rounded(self, kind)
        return self.view(kind) if bitcast else self.astype(kind)


def array(x: Any, dtype: Any = None) -> Array:
    """A copy: what is in memory may change."""
    return np.array(x, dtype=dtype).view(Array)


def result(x: Any, dtype: Any = None) -> Array:
    """Of values that a kernel has computed, which do not change."""
    return np.asarray(x, dtype=dtype).view(Array)


def rounded(x: np.ndarray, dtype: torch.dtype) -> Array:
    return array(torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy())


def approximate_reciprocal(x: np.ndarray) -> Array:
    """Depending on the last bits of x: one ulp too small, correctly rounded, or one ulp too large."""
    bits = np.asarray(1 / x, F32).view(np.int32) + (x.view(np.int32) % 3 - 1)
    return array(bits.astype(np.int32).view(F32))


def in_order(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a launch in the kernel's order: constants may be given by keyword."""
    return (*args, *(options[name] for name in kernel.arg_names[len(args) :]))


class Pointer:
    def __init__(self, base: Tensor, at: Any = 0) -> None:
        self.base, self.at = base, at

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.base, self.at + np.asarray(more, dtype=np.int64))

    @property
    def dtype(self) -> Any:
        kind = self.base.dtype
        return SimpleNamespace(element_ty=F32 if kind == torch.float32 else kind)

    def to(self, kind: torch.dtype) -> "Pointer":
        """To larger words: whole ones from here on. PyTorch refuses what is not aligned to them."""
        rest = self.base.view(-1)[int(self.at) :]
        return Pointer(rest[: rest.nbytes // kind.itemsize * kind.itemsize // rest.itemsize].view(kind))


class Barrier:
    """As many arrivals as `count` and all expected bytes complete a phase."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.left = int(count)

    def update(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes += nbytes
            assert self.left >= 0, "more arrive than there are"
            if self.left == self.bytes == 0:
                self.left, self.done = self.count, self.done + 1
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.done % 2 != int(parity), PATIENCE_S), "nobody comes"


class Shared:
    """A piece of shared memory: its parts by number, or what was stored last, under whatever name."""

    def __init__(self, dtype: Any, shape: Any) -> None:
        self.dtype, self.shape = dtype, [int(n) for n in shape]
        self.whole = self.shape
        self.parts: dict[int, Any] = {}
        self.stored: Any = None

    @property
    def value(self) -> Any:
        """What was stored, or what was stored in parts: pieces of some rows, panel by panel."""
        if self.parts:
            pieces = [self.parts[i].value for i in range(len(self.parts))]
            each = self.whole[0] // len(pieces[0])
            panels = [np.concatenate(pieces[i : i + each]) for i in range(0, len(pieces), each)]
            self.store(np.concatenate(panels, 1))
        return self.stored

    @value.setter
    def value(self, x: Any) -> None:
        self.stored, self.parts = x, {}  # what lay there in parts is overwritten

    def index(self, i: Any) -> Any:
        assert 0 <= int(i) < self.shape[0], f"part {i} of {self.shape[0]}"
        # In one step: two threads that look for a part at the same time must find the same.
        return self.parts.setdefault(int(i), Shared(self.dtype, self.shape[1:]))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> "Shared":
        self.shape = [int(n) for n in shape]
        return self

    def slice(self, start: int, length: int, dim: int = 0) -> Any:
        here = (slice(None),) * dim + (slice(start, start + length),)

        def store(x: Any) -> None:
            self.value[here] = x

        return SimpleNamespace(load=lambda layout: self.value[here].copy(), store=store)

    def permute(self, order: Any) -> Any:
        return SimpleNamespace(
            read=lambda: self.value.T,
            load=lambda layout: array(self.value.T).copy(),
            store=lambda x: self.store(np.transpose(x)),
        )

    def read(self) -> Any:
        return self.value

    def store(self, x: Any) -> None:
        self.value = array(x).copy()

    def load(self, layout: Any) -> Any:
        return array(self.value).copy()


class Pending:
    """A product in flight."""

    def __init__(self, a: Any, b: Any, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Any = None


class Device:
    """Programs of a kernel, with `product` and `fma` as an arithmetic has them."""

    def __init__(self, do: Any, programs: int) -> None:
        self.do, self.programs = do, programs
        self.mine = threading.local()  # places: of the program that the thread belongs to
        self.released = threading.Condition()  # memory was changed for programs that wait

    # Language

    def language(self) -> Any:
        def where(c: Any, a: Any, b: Any) -> Array:
            floats = [x for x in (a, b) if isinstance(x, np.ndarray)]
            found = np.where(c, a, b)
            return result(found, floats[0].dtype if floats else None)

        def load(p: Pointer, mask: Any = True, other: Any = 0) -> Array:
            at, mask = _together(np.asarray(p.at, dtype=np.int64), np.asarray(mask))
            inside = at[mask]
            assert _lie_inside(inside, p.base), "read outside"
            held = p.base.view(-1)[torch.from_numpy(inside)]
            values = (held.float() if held.is_floating_point() else held).numpy()
            whole = np.full(at.shape, other, values.dtype)
            whole[mask] = values
            return result(whole)

        def store(p: Pointer, x: Any, mask: Any = True) -> None:
            at, mask, x = _together(np.asarray(p.at, dtype=np.int64), np.asarray(mask), np.asarray(x))
            inside = at[mask]
            assert _lie_inside(inside, p.base), "written outside"
            p.base.view(-1)[torch.from_numpy(inside)] = torch.from_numpy(x[mask]).to(p.base.dtype)

        def atomic_add(p: Pointer, x: Any, mask: Any = True, *, sem: str) -> Array:
            at, mask, x = np.broadcast_arrays(np.asarray(p.at), np.asarray(mask), np.asarray(x))
            assert _lie_inside(at[mask], p.base), "added outside"
            whole = np.zeros(at.shape, np.int32)
            with self.released:
                held = p.base.view(-1).numpy()
                for i in zip(*np.nonzero(mask), strict=True) if mask.ndim else [()] * int(mask):
                    whole[i] = held[at[i]]
                    held[at[i]] = np.int32(held[at[i]]) + np.int32(x[i])  # as hardware does, it wraps
            return result(whole)

        def atomic_xchg(p: Pointer, x: Any, sem: str) -> Array:
            with self.released:
                found = load(p)
                store(p, x)
                self.released.notify_all()
            return found

        def assembly(text: str, constraints: str, args: Any, *rest: Any) -> Any:
            if text.startswith("mov.b32"):
                return result(args[0].real), result(args[0].imag)
            if text == "rcp.approx.ftz.f32 $0, $1;":
                return approximate_reciprocal(args[0])
            if "ld.acquire.gpu.global.s32 found, [$1];" in text:
                with self.released:
                    there = self.released.wait_for(lambda: load(args[0]) >= args[1], PATIENCE_S)
                assert there, "nobody hands on"
                return load(args[0])
            assert text.startswith("cvt.rn.") and text.endswith("$0, $2, $1;"), text
            kind = torch.bfloat16 if "bf16x2" in text else torch.float16
            word = np.empty(args[0].shape, np.complex64)
            word.real, word.imag = rounded(args[0], kind), rounded(args[1], kind)
            return result(word)

        def split(x: Any) -> Any:
            assert x.shape[-1] == 2
            both = np.asarray(x)
            return result(both[..., 0]), result(both[..., 1])

        def allocate(dtype: Any, shape: Any, layout: Any) -> Any:
            made = Shared(dtype, shape)
            if dtype == "int64":
                made.parts = {i: Barrier() for i in range(int(shape[0]))}
            return made

        return SimpleNamespace(
            to_tensor=lambda x: result(F32(x) if isinstance(x, float) else x),
            num_programs=lambda axis: result(self.programs),
            program_id=lambda axis: result(self.mine.places[axis], np.int32),
            static_range=range, constexpr=None,
            minimum=lambda a, b: result(np.minimum(a, b)), maximum=lambda a, b: result(np.fmax(a, b)),
            cdiv=lambda a, b: -(-a // b), where=where, load=load, store=store, split=split,
            atomic_add=atomic_add, atomic_xchg=atomic_xchg,
            arange=lambda a, b, layout: result(np.arange(int(a), int(b), dtype=np.int32)),
            expand_dims=lambda x, axis: result(np.asarray(x)[(slice(None),) * axis + (None,)]),
            full=lambda shape, x, dtype, layout=None: result(np.full([int(n) for n in shape], x), dtype),
            zeros=lambda shape, dtype, layout: result(
                np.zeros([int(n) for n in shape]), F32 if isinstance(dtype, torch.dtype) else dtype
            ),
            zeros_like=lambda x: result(np.zeros_like(x)), full_like=lambda x, y: result(np.full_like(x, y)),
            reshape=lambda x, shape: result(np.reshape(x, [int(n) for n in shape])),
            permute=lambda x, order: result(np.transpose(x, order)),
            join=lambda a, b: result(np.stack((a, b), -1)), sum=lambda x, axis: result(np.sum(x, axis)),
            max=lambda x, axis: result(np.fmax.reduce(x, axis)), min=lambda x, axis: result(np.min(x, axis)),
            abs=lambda x: result(np.abs(x)), multiple_of=lambda x, n: x,
            exp2=lambda x: result(self.do.exp2(np.asarray(x))),
            log2=lambda x: result(self.do.log2(np.asarray(x))),
            div_rn=lambda a, b: result(a / b), sqrt_rn=lambda x: result(np.sqrt(x)),
            convert_layout=lambda x, *rest, **more: x,
            fma=lambda a, b, c: result(self.do.fma(np.asarray(a), np.asarray(b), np.asarray(c))),
            inline_asm_elementwise=assembly, allocate_shared_memory=allocate,
            warp_specialize=self.specialize, SliceLayout=lambda *rest: None,
            DotOperandLayout=lambda *rest: None, BlockedLayout=lambda *rest: None,
            SwizzledSharedLayout=lambda *rest: None,
            NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *rest: None),
            float32=F32, int32=np.int32, uint32=np.uint32,
            int16=np.int16, int64="int64", bfloat16=torch.bfloat16, float16=torch.float16,
            pointer_type=lambda kind: _WORDS[kind],
        )  # fmt: skip

    # Units next to the threads

    def load_box(self, desc: Any, where: list[Any], bar: Barrier, buffer: Shared) -> None:
        """Outside the tensor the result is zero."""
        box, source = desc.block_type.shape, desc.tensor
        result = torch.zeros(box)
        where = [int(i) for i in where]
        first = [max(i, 0) for i in where]
        ends = [min(i + n, size) for i, n, size in zip(where, box, source.shape, strict=True)]
        if all(end > i for i, end in zip(first, ends, strict=True)):
            part = source[tuple(slice(i, end) for i, end in zip(first, ends, strict=True))].float()
            inner = (slice(i - j, i - j + n) for i, j, n in zip(first, where, part.shape, strict=True))
            result[tuple(inner)] = part
        buffer.store(result.numpy().reshape(box[-2:]))
        bar.update(0, -desc.block_type.nbytes)

    def multiply(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Pending:
        made = Pending(a, b, acc, use_acc)
        self.mine.__dict__.setdefault("pending", []).append(made)
        return made

    def multiply_wait(self, left: int, deps: Any) -> Any:
        pending = self.mine.pending
        while len(pending) > left:
            one = pending.pop(0)
            a, b = (x.read() if hasattr(x, "read") else x for x in (one.a, one.b))
            acc = one.acc.result if isinstance(one.acc, Pending) else one.acc  # products end in their order
            acc = np.asarray(acc if one.use_acc else np.zeros_like(acc))
            one.result = array(self.do.product(np.asarray(a), np.asarray(b), acc, None))
        result = tuple(d.result if isinstance(d, Pending) and d.result is not None else d for d in deps)
        return result[0] if len(result) == 1 else result

    def specialize(self, work: Any, warps: Any, registers: Any) -> None:
        places = self.mine.places

        def placed(fn: Any, args: Any) -> None:
            self.mine.places = places
            fn(*args)

        self._together([(placed, each) for each in work])

    def _together(self, work: Any) -> None:
        """Each of these (function, arguments) in a thread."""
        errors: list[BaseException] = []

        def guarded(fn: Any, args: Any) -> None:
            try:
                with np.errstate(all="ignore"):
                    fn(*args)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE_S)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a partition does not end"

    # Kernels

    def scope(self, *modules: ModuleType, **other: Any) -> dict[str, Any]:
        """Globals of the functions of these modules."""
        scope: dict[str, Any] = {
            "gl": self.language(), "fence_async_shared": lambda: None, "barrier": lambda: None,
            "tma_load": self.load_box,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiply_wait,
            "reinterpreted": Shared.reinterpret,
            "mbarrier": SimpleNamespace(
                wait=lambda bar, parity: bar.wait(parity),
                arrive=lambda bar, pred=True: bar.update(1, 0) if pred else None,
                expect=lambda bar, nbytes: bar.update(1, nbytes), init=lambda bar, count: bar.init(count),
                MBarrierLayout=lambda: None,
            ),
        }  # fmt: skip
        for module in modules:
            for name, result in vars(module).items():
                if name in scope:
                    continue
                if hasattr(result, "fn") and inspect.isfunction(result.fn):
                    scope[name] = FunctionType(result.fn.__code__, scope, name, result.fn.__defaults__)
                elif inspect.isclass(result) and hasattr(result, "__triton_aggregate__"):
                    scope[name] = _record(result, scope)
                elif type(result).__name__ == "constexpr":
                    scope[name] = result.value
        scope.update(other)  # functions hold this very dict
        return scope

    def run(
        self, scope: dict[str, Any], kernel: Any, args: Any, rows: int = 1, together: bool = False
    ) -> None:
        """All programs, in `rows` rows of them; one after another unless `together`."""
        fn = FunctionType(kernel.fn.__code__, scope)

        def program(x: int, y: int) -> None:
            self.mine.places = (x, y)
            fn(*map(_argument, args))

        places = [(x, y) for y in range(rows) for x in range(self.programs)]
        if together:
            self._together([(program, place) for place in places])
            return
        with np.errstate(all="ignore"):
            for place in places:
                program(*place)


def _together(*arrays: np.ndarray) -> Sequence[np.ndarray]:
    """Of one shape. Most are: finding that out is faster than making them so."""
    return arrays if len({x.shape for x in arrays}) == 1 else np.broadcast_arrays(*arrays)


def _lie_inside(places: np.ndarray, base: Tensor) -> bool:
    return places.size == 0 or bool(places.min() >= 0 and places.max() < base.numel())


def _record(cls: Any, scope: dict[str, Any]) -> Callable[..., Any]:
    # The class that was written is what functions of Triton's own still hold.
    names = list(inspect.getclosurevars(cls.__setattr__).nonlocals["cls"].__annotations__)
    methods = {n: f.fn for n, f in vars(cls).items() if hasattr(f, "fn") and inspect.isfunction(f.fn)}

    def make(*values: Any) -> Any:
        made = SimpleNamespace(**dict(zip(names, values, strict=True)))
        for name, fn in methods.items():
            bound = FunctionType(fn.__code__, scope, name, fn.__defaults__)
            setattr(made, name, lambda *args, bound=bound, **more: bound(made, *args, **more))
        return made

    for name, fn in methods.items():  # those that make one
        setattr(make, name, FunctionType(fn.__code__, scope, name, fn.__defaults__))
    return make


def _argument(value: Any) -> Any:
    """As a kernel has it."""
    if hasattr(value, "block_shape"):
        shape, strides = value.shape, value.strides
        size = math.prod(value.block_shape) * value.base.element_size()
        box = SimpleNamespace(shape=list(value.block_shape), nbytes=size)
        tensor = value.base.as_strided(shape, strides, value.base.storage_offset())
        return SimpleNamespace(block_type=box, dtype=value.base.dtype, layout=None, tensor=tensor)
    if isinstance(value, Tensor):
        return Pointer(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return array(value, np.int32)
    return array(value, F32) if isinstance(value, float) else value
