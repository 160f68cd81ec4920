"""Reads the machine code of a compiled kernel for a known fault of NVIDIA's assembler.

ptxas 12.8, the one in Triton 3.6 and 3.7, can lose the instruction that sets a uniform register. With such a
register as the address of an operand, `wgmma` multiplies whatever is in shared memory there: the result
depends on what ran before, and may even be right. Tests of the result are not enough, so this looks for it in
the code: on every path to a read of a uniform register there must be a write. That write may be under a
predicate. But what `wgmma` takes as an address must be made of registers that were written whatever the
predicates were: where ptxas lost a write, what another purpose left in the register under a predicate is
added to an offset.
"""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property

_FUNCTION = re.compile(r"\.text\.(\S+):")
_LABEL = re.compile(r"(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(\S+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_MATRIX = re.compile(r"gdesc\[UR(\d+)\]")
_TARGET = re.compile(r"\.L_\w+")
_PREDICATE = re.compile(r"!?UP\d")

#: P0 = PT and PT and UP0.
_COPY = re.compile(r"(U?P\d), U?PT, U?PT, U?PT, (!?U?P\d), 0x80, 0x0")

#: On Hopper.
_ALL = frozenset(range(64))

#: Instructions that write a uniform register, besides those whose names begin with U.
_WRITERS = {"R2UR", "S2UR", "VOTEU", "ELECT", "REDUX", "CREDUX", "LDCU"}

_BRANCHES = {"BRA", "BRX", "BRXU", "JMX", "EXIT", "RET"}


#: What is known of a uniform register: it and the predicate under which it was written. Under ALWAYS it holds
#: a value whatever the predicates were; under SOMETIMES it was written, but may hold something else. Of a
#: predicate: the one that it is a copy of.
Fact = tuple[int | str, str]
ALWAYS, SOMETIMES = "", "?"

#: Where it was seen: `wgmma` is Hopper's.
FAULTY_TARGET = "cuda:90"


@dataclass(frozen=True)
class Instruction:
    address: str
    predicate: str  # P0, !P0, UP0, or ALWAYS
    name: str
    operands: str

    @cached_property
    def parts(self) -> list[str]:
        return self.name.split(".")

    @cached_property
    def written(self) -> Set[int]:
        """Uniform registers: the first operand that is not a predicate. A call may write any."""
        name = self.parts[0]
        if name == "CALL":
            return _ALL
        if not (name.startswith("U") or name in _WRITERS) or name.endswith(("SETP", "PLOP3")):
            return set()
        operands = (o.strip() for o in self.operands.split(","))
        match = re.fullmatch(r"UR(\d+)", next((o for o in operands if not re.fullmatch(r"U?PT?\d*", o)), ""))
        if match is None:
            return set()
        count = 4 if "128" in self.parts else 2 if {"64", "WIDE"} & set(self.parts) else 1
        return set(range(int(match[1]), int(match[1]) + count))

    @cached_property
    def read(self) -> Set[int]:
        """Uniform registers. Those of a `wgmma` are the descriptors of both operands, two each; if the left
        one is in other registers, its two are unused."""
        operands = self.operands
        if 0 < len(self.written) < len(_ALL):
            operands = operands[_REGISTER.search(operands).end() :]  # type: ignore[union-attr]
        result = {int(r) for r in _REGISTER.findall(_MATRIX.sub("", operands))}
        for first in map(int, _MATRIX.findall(operands)):
            both = re.match(r"R\d+, gdesc", operands) is not None
            result |= set(range(first if both else first + 2, first + 4))
        return result

    @cached_property
    def decided(self) -> Set[str]:
        """Predicates that it writes. They come first, or after the register that it writes."""
        return {o.strip() for o in self.operands.split(",")[:2] if re.fullmatch(r"\s*U?P\d", o)}

    @cached_property
    def copied(self) -> set[Fact]:
        """The predicate that is written and the one that it is a copy of, if that is what it does."""
        match = None if self.predicate else _COPY.fullmatch(self.operands)
        return {(match[1], match[2])} if match and self.parts[0].endswith("PLOP3") else set()


def unset_registers(code: str) -> list[str]:
    """Reads of uniform registers that may not have been written before, in the output of `nvdisasm -c`: one
    line per function and register."""
    return [
        f"{name} reads UR{register} at 0x{by.address}, which is not set there: {by.name} {by.operands}"
        for name, lines in _functions(code)
        for register, by in sorted(_unset(_blocks(lines)).items())
    ]


def faulty() -> bool:
    """Whether this Triton's assembler is the one with the fault."""
    from triton import knobs

    return bool(knobs.nvidia.ptxas.version == "12.8")


def _functions(code: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in code.splitlines():
        match = _FUNCTION.match(line)
        if match is not None:
            if name:
                yield name, lines
            name, lines = match[1], []
        lines.append(line)
    if name:
        yield name, lines


def _blocks(lines: list[str]) -> dict[str, list[Instruction]]:
    """Straight pieces of code in order, by label. Those that begin after a branch have a number."""
    here: list[Instruction] = []
    blocks = {"": here}
    for line in lines:
        label, instruction = _LABEL.match(line), _INSTRUCTION.search(line)
        if label is not None:
            here = blocks[label[1]] = []
        elif instruction is not None:
            here.append(Instruction(instruction[1], instruction[2] or ALWAYS, instruction[3], instruction[4]))
            if here[-1].parts[0] in _BRANCHES:
                here = blocks[str(len(blocks))] = []
    return blocks


def _successors(blocks: dict[str, list[Instruction]]) -> dict[str, list[tuple[str, str]]]:
    """The blocks that follow each one, with the predicate that holds there because of the branch."""
    result, names = {}, list(blocks)
    for i, name in enumerate(names):
        below = names[i + 1 : i + 2]
        last = blocks[name][-1] if blocks[name] else None
        if last is None or last.parts[0] not in _BRANCHES:
            result[name] = [(after, ALWAYS) for after in below]
            continue
        uniform = _PREDICATE.search(last.operands)
        taken = last.predicate or (uniform[0] if uniform else ALWAYS)
        there = [(target, taken) for target in _TARGET.findall(last.operands) if target in blocks]
        goes_on = taken or ".DIV" in last.name
        result[name] = there + ([(after, _opposite(taken)) for after in below] if goes_on else [])
    return result


def _opposite(predicate: str) -> str:
    return predicate and (predicate[1:] if predicate.startswith("!") else f"!{predicate}")


def _unset(blocks: dict[str, list[Instruction]]) -> dict[int, Instruction]:
    """The first read of each uniform register that a path without a write leads to; for `wgmma` one without a
    write whatever the predicates are."""
    successors = _successors(blocks)
    known: dict[str, set[Fact]] = {"": set()}  # before each block, on every path to it
    waiting = [""]
    while waiting:
        name = waiting.pop()
        facts = set(known[name])
        for each in blocks[name]:
            _step(facts, each)
        for after, holds in successors[name]:
            there = _with_weaker(facts | {(r, ALWAYS) for r, under in facts if under in _same(facts, holds)})
            before = there & known.get(after, there)
            if after not in known or before != known[after]:
                known[after] = before
                waiting.append(after)
    result: dict[int, Instruction] = {}
    for name, before in known.items():
        facts = set(before)
        for each in blocks[name]:
            enough = ALWAYS if each.parts[0].endswith("GMMA") else SOMETIMES
            for register in each.read:
                if (register, enough) not in facts and not _written(facts, register, each.predicate):
                    result.setdefault(register, each)
            _step(facts, each)
    return result


def _same(facts: set[Fact], predicate: str) -> set[str]:
    """A predicate, and those that are known to have the same value."""
    if not predicate:
        return set()
    pairs = {pair for to, of in facts if isinstance(to, str) for pair in _equal(to, of)}
    return {predicate} | {b for a, b in pairs if a == predicate}


def _equal(to: str, of: str) -> set[tuple[str, str]]:
    """All that follows from a copy."""
    return {(to, of), (of, to), (_opposite(to), _opposite(of)), (_opposite(of), _opposite(to))}


def _written(facts: set[Fact], register: int, under: str) -> bool:
    """Whether it holds a value where this predicate does."""
    return any((register, each) in facts for each in (ALWAYS, *_same(facts, under)))


def _with_weaker(facts: set[Fact]) -> set[Fact]:
    """What was written under some predicate was written sometimes."""
    return facts | {(register, SOMETIMES) for register, _ in facts if isinstance(register, int)}


def _step(facts: set[Fact], by: Instruction) -> None:
    """Change the facts before an instruction to those after it. A value made of doubtful ones is doubtful."""
    under = by.predicate
    sound = all(_written(facts, register, under) for register in by.read)
    for register in by.written:
        always = _written(facts, register, _opposite(under))
        if not under or not sound:
            facts -= {fact for fact in facts if fact[0] == register}
        facts.add((register, SOMETIMES))
        if sound:
            facts.add((register, under))
            if under and always:
                facts.add((register, ALWAYS))
    for predicate in by.decided:
        facts -= {fact for fact in facts if predicate in (fact[0], fact[1].removeprefix("!"))}
    facts |= by.copied
