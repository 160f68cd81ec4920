"""One block of a compiled kernel on a CPU: PTX, executed instruction by instruction.

Gluon has no interpreter, and what Triton's interpreter runs is the text of a kernel: in which order a
compiler adds is in the PTX alone. This executes it, all threads of a block side by side, bit for bit as PTX
defines it, but for the approximate functions: there `2^x` and `log2 x` are numpy's, rounded to fp32, and a
division is rounded to nearest. It knows the instructions that these kernels are made of, and no others:
tensor cores and TMA are not among them.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import to_ptx
from isobit.frame.launch import Recorder

f32, f64, u8, u32, u64 = np.float32, np.float64, np.uint8, np.uint32, np.uint64
Bits = np.ndarray  # of a register: one u64 a thread, or one bool


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c in fp32 with one rounding. The product is exact in fp64; what the sum loses there makes its
    last bit odd, so that the rounding to fp32 cannot be misled by the first."""
    product, c = a.astype(f64) * b.astype(f64), c.astype(f64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = (np.array(total).view(u64) & u64(1)) == 0
    moved = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where(even & (lost != 0) & np.isfinite(total), moved, total).astype(f32)


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zeros."""
    return np.where(np.abs(x) < np.finfo(f32).tiny, np.copysign(f32(0), x), x)


def exp2(x: np.ndarray) -> np.ndarray:
    return flushed(np.exp2(flushed(np.asarray(x, f32)).astype(f64)).astype(f32))


_FLOAT: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": fma,
    "div": lambda a, b: a / b, "neg": lambda a: -a, "abs": np.abs, "max": np.fmax, "min": np.fmin,
    "sqrt": np.sqrt, "ex2": exp2, "lg2": lambda x: np.log2(x.astype(f64)).astype(f32),
}  # fmt: skip

_COMPARE: dict[str, Callable[..., np.ndarray]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _split(text: str) -> list[str]:
    """Operands; those in braces or brackets are one each."""
    return [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


def _parse(ptx: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    """(instructions as (predicate, opcode, operands), where each label points) of the one entry."""
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
    code: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    for line in body[: body.index("\n}")].splitlines():
        for part in re.sub(r"//.*", "", line).split(";"):
            text = part.strip()
            if text.startswith("$") and ":" in text:
                name, text = (half.strip() for half in text.split(":", 1))
                labels[name] = len(code)
            if not text or text[0] in ".{}" or text.startswith("$"):
                continue
            found = re.fullmatch(r"(?:@(!?%\w+)\s+)?([\w.:]+)\s*(.*)", text)
            assert found, f"not PTX: {text}"
            code.append((found[1] or "", found[2], _split(found[3])))
    return code, labels


class Block:
    """The threads of one block, their registers, and the memory that they reach."""

    def __init__(self, threads: int, place: dict[str, int], params: list[int], memory: np.ndarray) -> None:
        self.threads, self.memory, self.shared = threads, memory, np.zeros(1 << 18, u8)
        self.params = params
        self.registers: dict[str, Bits] = {"%tid.x": np.arange(threads, dtype=u64)}
        self.registers |= {name: np.full(threads, at, u64) for name, at in place.items()}

    def run(self, ptx: str) -> None:
        """All threads at the earliest instruction execute it, until none is left. So threads that are ahead
        wait for the others where their paths join, as barriers and exchanges require."""
        code, labels = _parse(ptx)
        done = len(code)
        at = np.zeros(self.threads, np.int64)
        with np.errstate(all="ignore"):
            while (here := int(at.min())) < done:
                predicate, opcode, operands = code[here]
                where = at == here
                at[where] += 1
                if predicate:
                    where &= self.registers[predicate.lstrip("!")] ^ predicate.startswith("!")
                name = opcode.split(".")[0]
                if name in ("ret", "exit"):
                    at[where] = done
                elif name == "bra":
                    at[where] = labels[operands[0]]
                elif opcode == "griddepcontrol.wait":
                    self.waited()
                elif name not in ("bar", "barrier", "griddepcontrol"):
                    self._execute(opcode, operands, where)

    def waited(self) -> None:
        """For the launch before this one. Here it is done long since; a test may let it be done only now."""

    # Operands

    def _read(self, operand: str) -> Bits:
        if operand in self.registers:
            return self.registers[operand]
        if "_param_" in operand:
            return np.full(self.threads, _index(operand), u64)
        if operand.startswith(("0f", "0d")):
            return np.full(self.threads, int(operand[2:], 16), u64)
        if operand.startswith("%"):
            assert not operand[1].isdigit(), operand
            return np.zeros(self.threads, u64)  # a register that is written in part, or a special one of 0
        if re.match(r"-?\d", operand):
            return np.full(self.threads, int(operand, 0) & (2**64 - 1), u64)
        return np.zeros(self.threads, u64)  # the one array in shared memory

    def _write(self, operand: str, value: np.ndarray, where: np.ndarray) -> None:
        if operand == "_":
            return
        old = self.registers.get(operand, np.zeros_like(value))
        self.registers[operand] = np.where(where, value, old)

    def _number(self, operand: str, kind: str) -> np.ndarray:
        """An operand as what an instruction's type says: signed ones extended, floats as floats."""
        bits, size = self._read(operand), int(re.sub(r"\D", "", kind) or 32)
        if bits.dtype == bool:
            return bits
        if kind == "f32":
            return bits.astype(u32).view(f32)
        if kind == "f64":
            return bits.view(f64)
        assert kind[0] in "bus", kind
        if kind[0] == "s":
            return (bits << u64(64 - size)).view(np.int64) >> np.int64(64 - size)
        return bits & u64(2**size - 1)

    @staticmethod
    def _bits(value: np.ndarray, kind: str) -> Bits:
        if value.dtype == bool or kind == "pred":
            return value.astype(bool)
        if value.dtype == f32:
            return value.view(u32).astype(u64)
        if value.dtype == f64:
            return value.view(u64)
        return value.astype(np.int64).view(u64) & u64(2 ** int(re.sub(r"\D", "", kind)) - 1)

    def _address(self, operand: str) -> np.ndarray:
        total = np.zeros(self.threads, np.int64)
        for part in operand.strip("[] ").split("+"):
            total += self._read(part.strip()).view(np.int64)
        return total

    @staticmethod
    def _names(operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{} ").split(",")]

    # Instructions

    def _execute(self, opcode: str, operands: list[str], where: np.ndarray) -> None:
        name, *suffix = opcode.split(".")
        kind = suffix[-1] if suffix else ""
        if name in ("ld", "st"):
            self._move(name, suffix, operands, where)
        elif name == "ldmatrix":
            self._load_matrices("trans" in suffix, operands, where)
        elif name in ("shfl", "redux"):
            self._exchange(name, suffix, operands, where)
        elif name == "mov" and "{" in "".join(operands):
            self._repack(operands, where, int(kind[1:]))
        elif name == "setp":
            kind, test = suffix[-1], suffix[0]
            a, b = (self._number(o, kind) for o in operands[1:])
            ordered = test in _COMPARE  # else true where one of them is NaN
            found = _COMPARE[test if ordered else test[:-1]](a, b)
            if not ordered:
                found = found | (a != a) | (b != b)
            self._write(operands[0], found, where)
        elif name == "cvt":
            self._convert(suffix, operands, where)
        else:
            into = "u64" if "wide" in suffix else kind
            self._write(operands[0], self._bits(self._compute(name, suffix, operands[1:]), into), where)

    def _compute(self, name: str, suffix: list[str], operands: list[str]) -> np.ndarray:
        kind = suffix[-1]
        if name in ("mov", "cvta"):
            return self._read(operands[0])
        if name == "selp":
            a, b, p = (self._read(o) for o in operands)
            return np.where(p, a, b)
        if kind == "f32":
            values = [self._number(o, kind) for o in operands]
            if "ftz" in suffix:
                return flushed(_FLOAT[name](*map(flushed, values)))
            return _FLOAT[name](*values)
        if kind == "f64":
            assert name != "fma"  # which is one rounding, and numpy has none
            return _FLOAT[name](*(self._number(o, kind) for o in operands))
        if name == "bfe":
            a, at, size = (self._number(o, k) for o, k in zip(operands, (kind, "u8", "u8"), strict=True))
            field = (a.astype(np.int64) >> at.astype(np.int64)) & ((1 << size.astype(np.int64)) - 1)
            high = 64 - size.astype(np.int64)
            return (field << high) >> high if kind[0] == "s" else field
        a, *rest = (self._number(o, kind) for o in operands)
        if name in ("shl", "shr"):
            by = self._number(operands[1], "u32").astype(a.dtype)
            return a << by if name == "shl" else a >> by
        if name in ("mad", "mul"):
            wide = {"s": "s64", "u": "u64", "b": "u64"}[kind[0]]
            product = a * rest[0]  # of 64 bits: whole for wide, and cut where lo is stored
            if name == "mul":
                assert "hi" not in suffix
                return product
            return product + self._number(operands[2], wide if "wide" in suffix else kind)
        if name in ("div", "rem"):
            whole = np.abs(a) // np.abs(rest[0]) * np.sign(a) * np.sign(rest[0])  # toward 0
            return whole if name == "div" else a - whole * rest[0]
        integer: dict[str, Callable[..., np.ndarray]] = {
            "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "neg": lambda a: -a, "not": np.invert,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "max": np.maximum,
            "min": np.minimum, "abs": np.abs, "popc": np.bitwise_count,
        }  # fmt: skip
        return integer[name](a, *rest)

    def _convert(self, suffix: list[str], operands: list[str], where: np.ndarray) -> None:
        into, kind = suffix[-2:]
        if kind == "bf16":
            value = (self._number(operands[1], "u16") << u64(16)).astype(u32).view(f32)
        elif kind == "f16":
            value = self._number(operands[1], "u16").astype(np.uint16).view(np.float16).astype(f32)
        else:
            value = self._number(operands[1], kind)
        if "rmi" in suffix:
            value = np.floor(value)
        if into in ("f32", "f64"):
            bits = self._bits(value.astype({"f32": f32, "f64": f64}[into]), into)
        elif value.dtype in (f32, f64):
            assert into == "s32" and "rzi" in suffix, "other roundings are not modelled"
            bits = self._bits(np.trunc(value).astype(np.int64), into)
        else:
            bits = self._bits(value, into)
        self._write(operands[0], bits, where)

    def _repack(self, operands: list[str], where: np.ndarray, size: int) -> None:
        """mov between one register and several parts of it."""
        into, source = (self._names(o) for o in operands)
        part = size // max(len(into), len(source))
        if len(source) == 1:
            for i, name in enumerate(into):
                value = (self._read(source[0]) >> u64(i * part)) & u64(2**part - 1)
                self._write(name, value, where)
        else:
            whole = np.zeros(self.threads, u64)
            for i, name in enumerate(source):
                whole |= (self._read(name) & u64(2**part - 1)) << u64(i * part)
            self._write(into[0], whole, where)

    def _move(self, name: str, suffix: list[str], operands: list[str], where: np.ndarray) -> None:
        if suffix[0] == "param":
            which = self._address(operands[1])  # its index stands for the address of a parameter
            self._write(operands[0], np.array(self.params, u64)[which], where)
            return
        memory = self.shared if suffix[0].startswith("shared") else self.memory
        size = int(suffix[-1][1:]) // 8
        values, address = operands if name == "ld" else operands[::-1]
        first = self._address(address)
        for i, value in enumerate(self._names(values)):
            at = first[where] + i * size
            assert (at >= 0).all() and (at + size <= len(memory)).all(), "outside of all memory"
            bytes_ = at[:, None] + np.arange(size)
            if name == "st":
                memory[bytes_] = self._read(value).view(u8).reshape(-1, 8)[where, :size]
            else:
                found = np.zeros((self.threads, 8), u8)
                found[where, :size] = memory[bytes_]
                self._write(value, found.view(u64)[:, 0], where)

    def _load_matrices(self, turned: bool, operands: list[str], where: np.ndarray) -> None:
        """8 x 8 matrices of 16 bits: thread t of a warp gets two neighbours of row t / 4 of each (of column t
        / 4 if transposed), and threads 8 j to 8 j + 7 hold the addresses of the rows of matrix j."""
        assert where.all()
        first, thread = self._address(operands[1]), np.arange(self.threads)
        for j, name in enumerate(self._names(operands[0])):
            bits = np.zeros(self.threads, u64)
            for half in range(2):
                row, column = thread % 32 // 4, thread % 4 * 2 + half
                if turned:
                    row, column = column, row
                at = first[thread // 32 * 32 + 8 * j + row] + 2 * column
                bits |= self.shared[at[:, None] + np.arange(2)].view(np.uint16)[:, 0].astype(u64) << u64(
                    16 * half
                )
            self._write(name, bits, where)

    def _exchange(self, name: str, suffix: list[str], operands: list[str], where: np.ndarray) -> None:
        """Between the threads of a warp."""
        assert where.all()
        thread = np.arange(self.threads)
        if name == "redux":
            value = self._number(operands[1], suffix[-1]).reshape(-1, 32)
            each = {"max": value.max(1), "min": value.min(1), "add": value.sum(1)}[suffix[1]]
            self._write(operands[0], self._bits(np.repeat(each, 32), suffix[-1]), where)
            return
        by = self._read(operands[2]).astype(np.int64)
        up = np.where(thread % 32 >= by, thread - by, thread)  # the first threads keep their own
        source = {"bfly": thread ^ by, "idx": thread // 32 * 32 + by, "up": up}[suffix[1]]
        self._write(operands[0], self._read(operands[1])[source], where)


def _index(param: str) -> int:
    found = re.search(r"_param_(\d+)", param)
    assert found
    return int(found[1])


def execute(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> str:
    """A launch on tensors of the CPU; the PTX that was executed. To be passed as `launch`."""
    recorder = Recorder()
    recorder(kernel, grid, *args, **options)
    ((_, source, compile_options),) = recorder.sources()
    done = to_ptx.compiled(source, compile_options)
    ptx: str = done.asm["ptx"]
    tensors: list[Tensor] = []
    memory = np.zeros(64, u8)  # address 0 is never valid
    at: dict[int, int] = {}
    params = []
    for name, value in zip(kernel.arg_names, args, strict=False):
        if source.signature[name] == "constexpr":
            continue
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in at:
                at[storage.data_ptr()] = len(memory)
                tensors.append(value)
                room = np.zeros(-(-storage.nbytes() // 64) * 64 + 64, u8)
                room[: storage.nbytes()] = _bytes(value)
                memory = np.concatenate((memory, room))
            params.append(at[storage.data_ptr()] + value.storage_offset() * value.element_size())
        elif isinstance(value, float):
            params.append(int(np.array(value, f32).view(u32)))
        else:
            params.append(int(value) & (2**64 - 1))
    params += [0, 0]  # unexpected scratch memory
    threads = int(done.metadata.num_warps) * 32
    places = np.ndindex(*(*grid, 1, 1)[:3])
    sizes = {f"%nctaid.{x}": n for x, n in zip("xyz", (*grid, 1, 1)[:3], strict=True)}
    for place in places:
        here = {f"%ctaid.{x}": i for x, i in zip("xyz", place, strict=True)}
        Block(threads, sizes | here, params, memory).run(ptx)
    for value in tensors:
        storage = value.untyped_storage()
        first = at[storage.data_ptr()]
        _bytes(value)[:] = memory[first : first + storage.nbytes()]
    return ptx


def _bytes(t: Tensor) -> np.ndarray:
    """All memory behind a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy()  # type: ignore[no-any-return]
