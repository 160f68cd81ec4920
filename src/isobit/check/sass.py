"""Reads the machine code of a compiled kernel for a known fault of NVIDIA's assembler.

ptxas 12.8, the one in Triton 3.6 and 3.7, can lose the instruction that sets a uniform register. With such a
register as the address of an operand, `wgmma` multiplies whatever is in shared memory there: the result
depends on what ran before, and may even be right. Tests of the result are not enough, so this looks for it in
the code: on every path to a read of a uniform register there must be a write. A write under a predicate
counts, so a register that only such a write has set is not found.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

_FUNCTION = re.compile(r"\.text\.(\S+):")
_LABEL = re.compile(r"(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_MATRIX = re.compile(r"gdesc\[UR(\d+)\]")
_TARGET = re.compile(r"\.L_\w+")

#: On Hopper.
_ALL = frozenset(range(64))

#: Instructions that write a uniform register, beside those whose names begin with U.
_WRITERS = {"R2UR", "S2UR", "VOTEU", "REDUX", "CREDUX", "LDCU"}

_BRANCHES = {"BRA", "BRX", "BRXU", "JMX", "EXIT", "RET"}


#: Where it was seen: `wgmma` is Hopper's.
FAULTY_TARGET = "cuda:90"


class Instruction(NamedTuple):
    address: str
    conditional: bool
    name: str
    operands: str

    @property
    def parts(self) -> list[str]:
        return self.name.split(".")

    def written(self) -> Set[int]:
        """Uniform registers: the first operand that is not a predicate. A call may write any."""
        name = self.parts[0]
        if name == "CALL":
            return _ALL
        if not (name.startswith("U") or name in _WRITERS) or name.endswith(("SETP", "PLOP3")):
            return set()
        operands = (o.strip() for o in self.operands.split(","))
        found = re.fullmatch(r"UR(\d+)", next((o for o in operands if not re.fullmatch(r"U?PT?\d*", o)), ""))
        if found is None:
            return set()
        count = 4 if "128" in self.parts else 2 if {"64", "WIDE"} & set(self.parts) else 1
        return set(range(int(found[1]), int(found[1]) + count))

    def read(self) -> set[int]:
        """Uniform registers. Those of a `wgmma` are the descriptors of both operands, two each; if the left
        one is in other registers, its two are unused."""
        operands = self.operands
        if 0 < len(self.written()) < len(_ALL):
            operands = operands[_REGISTER.search(operands).end() :]  # type: ignore[union-attr]
        found = {int(r) for r in _REGISTER.findall(_MATRIX.sub("", operands))}
        for first in map(int, _MATRIX.findall(operands)):
            both = re.match(r"R\d+, gdesc", operands) is not None
            found |= set(range(first if both else first + 2, first + 4))
        return found


def unset_registers(code: str) -> list[str]:
    """Reads of uniform registers that may not have been written before, in the output of `nvdisasm -c`: one
    line per function and register."""
    return [
        f"{name} reads UR{register} at 0x{by.address}, which is not set there: {by.name} {by.operands}"
        for name, lines in _functions(code)
        for register, by in sorted(_unset(lines).items())
    ]


def faulty() -> bool:
    """Whether this Triton's assembler is the one with the fault."""
    from triton import knobs

    return bool(knobs.nvidia.ptxas.version == "12.8")


def disassembled(cubin: bytes) -> str:
    """By the nvdisasm that Triton brings along."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _functions(code: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in code.splitlines():
        found = _FUNCTION.match(line)
        if found is not None:
            if name:
                yield name, lines
            name, lines = found[1], []
        lines.append(line)
    if name:
        yield name, lines


def _blocks(lines: list[str]) -> dict[str, list[Instruction]]:
    """Straight pieces of code in order, by label. Those that begin after a branch have a number."""
    here: list[Instruction] = []
    blocks = {"": here}
    for line in lines:
        label, found = _LABEL.match(line), _INSTRUCTION.search(line)
        if label is not None:
            here = blocks[label[1]] = []
        elif found is not None:
            here.append(Instruction(found[1], found[2] is not None, found[3], found[4]))
            if here[-1].parts[0] in _BRANCHES:
                here = blocks[str(len(blocks))] = []
    return blocks


def _successors(blocks: dict[str, list[Instruction]]) -> dict[str, list[str]]:
    found, names = {}, list(blocks)
    for i, name in enumerate(names):
        found[name] = names[i + 1 : i + 2]
        last = blocks[name][-1] if blocks[name] else None
        if last is not None and last.parts[0] in _BRANCHES:
            goes_on = last.conditional or "UP" in last.operands or ".DIV" in last.name
            targets = [target for target in _TARGET.findall(last.operands) if target in blocks]
            found[name] = targets + (found[name] if goes_on else [])
    return found


def _unset(lines: list[str]) -> dict[int, Instruction]:
    """The first read of each uniform register that a path without a write leads to."""
    blocks = _blocks(lines)
    successors = _successors(blocks)
    own = {name: set[int]().union(*(each.written() for each in block)) for name, block in blocks.items()}
    written: dict[str, set[int]] = {"": set()}  # before each block, on every path to it
    waiting = [""]
    while waiting:
        name = waiting.pop()
        for after in successors[name]:
            before = (written[name] | own[name]) & written.get(after, _ALL)
            if after not in written or before != written[after]:
                written[after] = before
                waiting.append(after)
    found: dict[int, Instruction] = {}
    for name, before in written.items():
        have = set(before)
        for each in blocks[name]:
            for register in each.read() - have:
                found.setdefault(register, each)
            have |= each.written()
    return found
