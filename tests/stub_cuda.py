"""Triton's real launch path on a machine without a GPU, above a libcuda that only records.

`run(function, *args)` calls a function in a child process where Triton's driver is that of a Hopper GPU:
kernels are compiled for sm_90 with its own ptxas, and launched by its own launcher. What would have reached
the GPU is in `launches()`: which code, how many programs, on which stream, and the bytes of every parameter.
Tensors of the CPU are taken for those of device 0.

So two ways to make the same call can be compared launch by launch, and nothing is computed.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

SOURCE = Path(__file__).with_suffix(".c")
SMS = 132  # of an H100
STREAM = 7
ARENA = 1 << 26  # bytes for the tensors of a call


@dataclass(frozen=True)
class Launch:
    """What a launch gave to the driver. `code` is a hash of the cubin; `attributes` are (id, three words)."""

    name: str
    code: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: tuple[tuple[int, ...], ...]
    params: tuple[bytes, ...]


@dataclass(frozen=True)
class Counts:
    """What a launch asks of the driver besides: tensor maps, and whether a pointer is one of the device."""

    maps: int
    pointers: int


@dataclass(frozen=True)
class Memory:
    """Tensors that were made in a block of `same_memory`, in order: (address, bytes)."""

    made: list[tuple[int, int]] = field(default_factory=list)

    def at(self, address: int) -> int | None:
        """Which of them contains an address."""
        inside = (i for i, (start, size) in enumerate(self.made) if start <= address < start + size)
        return next(inside, None)


def differences(one: Sequence[Launch], other: Sequence[Launch]) -> dict[str, tuple[Any, Any]]:
    """Everything that is not the same in two logs, by place: {"0.params[3]": (b"...", b"...")}."""
    found: dict[str, tuple[Any, Any]] = {}
    for i, (a, b) in enumerate(zip_longest(one, other)):
        if a is None or b is None:
            found[str(i)] = (a, b)
            continue
        for each in fields(Launch):
            x, y = getattr(a, each.name), getattr(b, each.name)
            if each.name != "params" and x != y:
                found[f"{i}.{each.name}"] = (x, y)
        for j, (x, y) in enumerate(zip_longest(a.params, b.params)):
            if x != y:
                found[f"{i}.params[{j}]"] = (x, y)
    return found


def differences_but_for_places(
    one: Sequence[Launch], memory: Memory, other: Sequence[Launch], room: Memory
) -> dict[str, tuple[Any, Any]]:
    """The same for a call that allocates elsewhere: each tensor of `memory` has its own place in `room` that
    shares no byte with another's. "made[2]" is the third tensor of `memory`."""
    places: dict[int, int] = {}

    def back(x: bytes, y: bytes) -> bytes:
        """A parameter of the other call, with the address that it would have had in the one."""
        at, there = (int.from_bytes(p[:8], "little") for p in (x, y))
        which = memory.at(at) if len(x) == len(y) and len(x) in (8, 128) else None
        if which is None:
            return y
        if room.at(there) is None:  # also if it is the same: nothing of this call is there any more
            return b"outside of all memory: " + y
        offset = at - memory.made[which][0]
        return x[:8] + y[8:] if places.setdefault(which, there - offset) == there - offset else y

    moved = list(other)
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        own = tuple(map(back, a.params, b.params))
        moved[i] = replace(b, params=own + b.params[len(own) :])
    found = differences(one, moved)
    taken = sorted((start, start + memory.made[which][1], which) for which, start in places.items())
    for (_, end, which), (start, _, after) in pairwise(taken):
        if start < end:
            found[f"made[{after}]"] = (f"made[{which}] ends at {end}", start)
    for start, end, which in taken:
        if room.at(start) is None or room.at(start) != room.at(end - 1):
            found[f"made[{which}]"] = ("outside of all memory", (start, end))
    return found


# In the process of a test


def why_not() -> str | None:
    """Why this machine cannot have the stub, or None."""
    if sys.platform != "linux":
        return "Triton's launcher is built on Linux"
    if _compiler() is None:
        return "Triton's launcher is built by a C compiler, and there is none"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton's launcher is built with Python.h, and it is not installed"
    return None


def run(function: Callable[..., Result], *args: Any) -> Result:
    """What a function of a module returns in the child, where the log is empty and the stream is `STREAM`.
    The function, what it takes and what it returns travel by pickle."""
    try:
        return _child().submit(_call, function, *args).result()
    except BrokenProcessPool as error:
        _child.cache_clear()  # the next test has a new one
        raise AssertionError(f"{function.__name__} killed the process that it ran in") from error


@cache
def _child() -> ProcessPoolExecutor:
    """One process for all tests: what it has imported and compiled is reused by the next."""
    return ProcessPoolExecutor(1, get_context("spawn"), _install, (str(build()),))


def _compiler() -> str | None:
    return os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build() -> Path:
    """The folder of libcuda.so.1, made where Triton keeps what it compiles."""
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    text = SOURCE.read_bytes() + Path(__file__).read_bytes() + (include / "cuda.h").read_bytes()
    key = hashlib.sha256(text + sysconfig.get_platform().encode()).hexdigest()[:16]
    folder = Path(triton.knobs.cache.dir) / f"isobit-stub-{key}"
    library = folder / "libcuda.so.1"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{os.getpid()}.so"
        # Anything that opens libcuda.so.1 gets the library already loaded under that name, wherever it is.
        options = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-fvisibility=hidden"]
        options += ["-shared", "-fPIC", "-pthread"]
        command = [_compiler() or "cc", *options, "-Wl,-soname,libcuda.so.1", f"-I{include}"]
        done = subprocess.run([*command, "-o", made, SOURCE], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made.replace(library)  # atomically, so that nobody loads half of it
    return folder


# In the child


class _Launch(ctypes.Structure):
    """As in stub_cuda.c."""

    _fields_ = (
        ("code", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32), ("attributes", ctypes.c_uint32),
        ("params", ctypes.c_uint32), ("attribute", ctypes.c_uint32 * 4 * 8), ("name", ctypes.c_char_p),
        ("sizes", ctypes.POINTER(ctypes.c_uint32)), ("bytes", ctypes.POINTER(ctypes.c_char)),
    )  # fmt: skip


@dataclass
class _State:
    library: Any = None
    stream: int = STREAM
    rooms: list[Any] = field(default_factory=list)


_state = _State()


def launches() -> list[Launch]:
    """All since `clear`, in order."""
    return [_launch(_state.library.stub_launch(i)[0]) for i in range(_state.library.stub_launches())]


def _launch(made: _Launch) -> Launch:
    params, at = [], 0
    for size in made.sizes[: made.params]:
        params.append(made.bytes[at : at + size])
        at += size
    attributes = tuple(tuple(a) for a in made.attribute[: made.attributes])
    return Launch(
        made.name.decode(), made.code, tuple(made.grid), tuple(made.block), made.shared, made.stream,
        attributes, tuple(params),
    )  # fmt: skip


def counts() -> Counts:
    """All since `clear`."""
    return Counts(_state.library.stub_encoded(), _state.library.stub_pointers_asked())


def clear() -> None:
    _state.library.stub_clear()


def set_stream(stream: int) -> None:
    """What Triton, and who asks its driver, takes for the current stream."""
    _state.stream = stream


def ordinary(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """To be passed as `launch`: Triton's own way, from the beginning."""
    kernel[grid](*args, **options)


@contextmanager
def same_memory(which: int = 0) -> Iterator[Memory]:
    """Tensors made in here are consecutive, from an address that is the same in each such block with one
    number. So calls that make the same tensors in the same order pass the same pointers. The next block with
    that number overwrites them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    memory, next_ = Memory(), _arena(which)
    end = next_ + ARENA

    class Placed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            known = {t.untyped_storage().data_ptr() for t in given}
            return tree_map(lambda made: place(made, known), func(*args, **(kwargs or {})))

    def place(made: Any, known: set[int]) -> Any:
        """A copy of a tensor in its own storage."""
        nonlocal next_
        if not isinstance(made, torch.Tensor) or made.untyped_storage().data_ptr() in known:
            return made
        nbytes = made.untyped_storage().nbytes()
        assert next_ + nbytes <= end, "the memory is too small for what was made in it"
        if nbytes == 0:
            return made
        buffer = (ctypes.c_char * nbytes).from_address(next_)
        memory.made.append((next_, nbytes))
        next_ += -(-nbytes // 512) * 512  # as CUDA's allocator does
        own = torch.frombuffer(buffer, dtype=made.dtype)
        return own.as_strided(made.shape, made.stride(), made.storage_offset()).copy_(made)

    with Placed():
        yield memory


@cache
def _arena(which: int) -> int:
    """The address of memory that is never given back."""
    room = ctypes.create_string_buffer(ARENA + 512)
    _state.rooms.append(room)
    return -(-ctypes.addressof(room) // 512) * 512


def replace_everywhere(module: Any, name: str, value: Any) -> None:
    """Another value for a name of a module, also where it was imported by that name."""
    old = getattr(module, name)
    for each in list(sys.modules.values()):
        if getattr(each, name, None) is old:
            setattr(each, name, value)


def without_bodies(code: str) -> str:
    """A module of Triton or Gluon whose kernel returns at once, and that has no other functions. The rest of
    a compilation, two thirds of its time, is about instructions that nobody executes. What a launch needs
    stays: a kernel's name, its parameters and their attributes.

    That Triton, LLVM and ptxas take the whole kernels is what the law `compile` is for."""
    alone = re.sub(r"^  tt\.func private .*?^  \}\n", "", code, flags=re.M | re.S)
    hollow, count = re.subn(
        r"^(  tt\.func public @[^\n]*\{)\n.*?^  \}$", r"\1\n    tt.return\n  }", alone, flags=re.M | re.S
    )
    assert count == 1 and hollow.count("tt.func") == 1, "one kernel was expected in this code"
    return hollow


def _hollow_kernels(backend: Any) -> None:
    """Compile kernels without their bodies. The shared memory that these would have needed is made up from a
    hash of them and of the options, and the hash is a part of the code. So kernels that differ still have
    code and memory that differ, and a launcher cannot guess either. Warps are those of the body."""
    from triton._C.libtriton import ir

    def emptied(module: Any, metadata: dict[str, Any], options: Any) -> Any:
        code = module.str_nodebug()
        deciding = replace(options, launch_pdl=False)  # which is about a launch
        metadata["body"] = hashlib.sha256(f"{code}{deciding}".encode()).digest()
        # Warps of the other partitions, where a kernel is specialised by warps.
        metadata["others"] = sum(map(int, re.findall(r"\) num_warps\((\d+)\)", code)))
        # Tensor maps that a kernel makes itself lie in memory that its launch must bring.
        metadata["scratch"] = 128 * len(re.findall("make_tensor_descriptor|tensormap_create", code))
        with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
            file.write(without_bodies(code))
            file.flush()
            hollow = ir.parse_mlir_module(file.name, module.context)
        hollow.context = module.context
        return hollow

    to_ttgir, gluon_to_ttgir = backend.make_ttgir, backend.gluon_to_ttgir
    to_llir = backend.make_llir

    def make_llir(self: Any, module: Any, metadata: dict[str, Any], *rest: Any) -> str:
        llir = to_llir(self, module, metadata, *rest)
        body = metadata.pop("body")
        metadata["num_warps"] += metadata.pop("others")
        metadata["shared"] = 128 * (1 + body[0])  # up to what every launch may have
        metadata["global_scratch_size"] = metadata.pop("scratch")
        values = ", ".join(f"i8 {byte}" for byte in body)
        return f"{llir}\n@hash_of_body = addrspace(1) constant [{len(body)} x i8] [{values}]\n"

    backend.make_ttgir = staticmethod(
        lambda module, metadata, options, *rest: to_ttgir(
            emptied(module, metadata, options), metadata, options, *rest
        )
    )
    backend.gluon_to_ttgir = lambda self, module, metadata, options, *rest: gluon_to_ttgir(
        self, emptied(module, metadata, options), metadata, options, *rest
    )
    backend.make_llir = make_llir


def _install(folder: str) -> None:
    """Make this process one with a Hopper GPU, as far as Triton can see. Before Triton is imported."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")  # apart from what GPUs use
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # or code would differ with the names of temporary files
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real one, if there is one, is left alone
    library = ctypes.CDLL(str(Path(folder) / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    library.stub_launch.restype = ctypes.POINTER(_Launch)
    library.stub_launch.argtypes = [ctypes.c_uint64]
    for name in ("stub_launches", "stub_encoded", "stub_pointers_asked"):
        getattr(library, name).restype = ctypes.c_uint64
    _state.library = library

    import torch
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    import isobit.frame.device

    _hollow_kernels(CUDABackend)

    cuda = CudaDriver()
    cuda.get_current_device = lambda: 0
    cuda.set_current_device = lambda device: None
    cuda.get_current_stream = lambda device: _state.stream
    cuda.get_device_capability = lambda *device: (9, 0)
    driver.set_active(cuda)
    # The index of torch.device("cpu").
    torch.accelerator.current_device_index = lambda: None  # type: ignore[assignment,return-value]
    replace_everywhere(isobit.frame.device, "sm_count", lambda device: SMS)


def _call(function: Callable[..., Result], *args: Any) -> Result:
    clear()
    set_stream(STREAM)
    return function(*args)
