"""Shared memory of kernels whose products run while other work goes on: nothing is written into an operand
before the wait for the product.

Triton's allocator frees a buffer after its last use. A product that is under way is no use to it: without the
operand among the `deps` of the wait, scratch of a conversion between the two may lie in the operand. The sums
are then wrong now and then. With `warp_specialize` all buffers are captured, and live as long as it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

import to_ptx
from isobit.frame.launch import Recorder
from isobit.frame.op import OPS
from isobit.spec.proofs import proof_of, proofs

pytestmark = pytest.mark.compat

_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
_SHAPE = re.compile(r"(?:tensor|memdesc)<((?:\d+x)+)(\w+)")


@dataclass
class Block:
    """Instructions one after another, and the blocks that may follow."""

    lines: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def with_places(ttgir: str, file: Path) -> str:
    """The same code with the place of everything in shared memory, as Triton's next stage computes it."""
    from triton._C.libtriton import ir, nvidia, passes

    file.write_text(ttgir)
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    module = ir.parse_mlir_module(str(file), context)
    manager = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 86)
    manager.run(module, "places")
    return str(module)


def blocks_of(code: str) -> dict[str, Block]:
    """Of the kernel. What a reduction does with two elements has labels of its own, and no shared memory."""
    blocks, name, inside = {"": Block()}, "", 0
    for line in map(str.strip, code[code.index("tt.func public") :].splitlines()):
        inside += line.count("({") - line.startswith("})")
        label = None if inside else re.match(r"\^(bb\d+)", line)
        if label:
            name = label[1]
            blocks[name] = Block()
        else:
            blocks[name].lines.append(line)
            if line.startswith("cf."):
                blocks[name].after = re.findall(r"\^(bb\d+)", line)
    return blocks


def size_of(line: str) -> int:
    given = re.search(r"allocation\.size = (\d+)", line)
    shape = _SHAPE.findall(line)
    if given or not shape:
        return int(given[1]) if given else 1
    dims, dtype = shape[-1]
    size = _BYTES[dtype]
    for n in dims.split("x")[:-1]:
        size *= int(n)
    return size


@dataclass
class Places:
    """What lies where: `ranges` of allocations by name, and the allocation that each view is of."""

    ranges: dict[str, range]
    allocation: dict[str, str]

    @classmethod
    def of(cls, blocks: dict[str, Block]) -> "Places":
        found = cls({}, {})
        for line in (line for block in blocks.values() for line in block.lines):
            result = re.match(r"(%\w+)(?::\d+)? = (\S+)", line)
            if result is None:
                continue
            name, op = result[1], result[2]
            if op == "ttg.local_alloc":
                first = int(re.search(r"allocation\.offset = (\d+)", line)[1])  # type: ignore[index]
                found.ranges[name], found.allocation[name] = range(first, first + size_of(line)), name
            elif op.startswith("ttg.memdesc_"):
                whole = re.findall(r"%\w+", line)[1]
                if whole in found.allocation:  # else a loop passes it on, which operands are not: see below
                    found.allocation[name] = found.allocation[whole]
        return found

    def touched(self, line: str) -> Iterator[range]:
        """Its own scratch, and the allocations that it names."""
        scratch = re.search(r"allocation\.offset = (\d+)", line)
        if scratch and "ttg.local_alloc" not in line:
            yield range(int(scratch[1]), int(scratch[1]) + size_of(line))
        if not re.search(r"= ttg\.memdesc_|= ttg\.local_alloc|warp_group_dot", line):
            for name in {self.allocation[n] for n in re.findall(r"%\w+", line) if n in self.allocation}:
                yield self.ranges[name]


def overwritten(code: str) -> tuple[int, list[str]]:
    """(products that do not wait, instructions that may write into operands of one that is under way)."""
    blocks = blocks_of(code)
    places = Places.of(blocks)
    products, found = 0, []
    for name, block in blocks.items():
        for i, line in enumerate(block.lines):
            if "warp_group_dot " in line and "isAsync = true" in line:
                products += 1
                operands = re.findall(r"%\w+", line.split("warp_group_dot ")[1])[:2]
                own = {places.allocation[n] for n in operands if n in places.allocation}
                assert own, f"operands of unknown place: {line}"
                found += _during(blocks, places, name, i + 1, [places.ranges[n] for n in own])
    return products, found


def _during(blocks: dict[str, Block], places: Places, name: str, at: int, own: list[range]) -> Iterator[str]:
    """Instructions from here on until the product has ended, on all paths. Products end in their order."""
    left, seen = [(name, at, 0)], set()
    while left:
        name, at, later = left.pop()
        for line in blocks[name].lines[at:]:
            if wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
                if int(wait[1]) <= later:
                    break
            elif "warp_group_dot " in line:
                later = min(later + 1, 4)
            for place in places.touched(line):
                if any(place not in own and max(place[0], r[0]) <= min(place[-1], r[-1]) for r in own):
                    yield line
        else:
            for after in blocks[name].after:
                if (after, later) not in seen:
                    seen.add((after, later))
                    left.append((after, 0, later))


def without_specialised_warps() -> dict[str, tuple[Any, dict[str, Any]]]:
    """One call of each Gluon kernel whose warps all do the same."""
    found = {}
    for name in proofs():
        for kernels in proof_of(OPS[name]).kernels.values():
            recorder = Recorder()
            kernels.record(recorder, torch.bfloat16)
            wanted = [
                isinstance(kernel, GluonJITFunction) and "warp_specialize" not in kernel.src
                for kernel, _, _ in recorder.launches
            ]
            for kernel, source, options in recorder.sources() if any(wanted) else ():
                if isinstance(source.fn, GluonJITFunction) and "warp_specialize" not in source.fn.src:
                    found.setdefault(kernel, (source, options))
    return found


def test_no_operand_is_overwritten(tmp_path: Path) -> None:
    products = 0
    for name, (source, options) in without_specialised_warps().items():
        count, wrong = overwritten(
            with_places(to_ptx.compiled(source, options).asm["ttgir"], tmp_path / "code")
        )
        products += count
        assert not wrong, f"{name}: {wrong[0]}"
    assert products >= 6  # of systems and of decode steps
