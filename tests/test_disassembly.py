"""Code of several kernels that nvdisasm read together is the code that it reads of each alone."""

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from isobit.check import disassembly, sass
from isobit.check.disassembly import disassembled
from isobit.frame.launch import Recorder
from isobit.spec.proofs import proofs

pytestmark = pytest.mark.compat


@triton.jit
def divides(x, out, n, BLOCK: tl.constexpr):
    """Loops, branches, and a division of 64 bits, which is a function that is called."""
    total = tl.zeros((BLOCK,), tl.int64)
    for step in range(n):
        total += tl.load(x + step * BLOCK + tl.arange(0, BLOCK)) // (total + 3)
        if step % 7 == 5:
            total = -total
    tl.store(out + tl.arange(0, BLOCK), total)


def sources() -> Iterator[tuple[str, object, dict[str, object]]]:
    """A kernel twice, with other constants, and between them one of warps with tasks of their own."""
    numbers = torch.empty(64, dtype=torch.int64, device="meta")
    for block in (32, 128):
        recorder = Recorder()
        recorder(divides, (1,), numbers, numbers, 5, BLOCK=block)
        if block == 128:
            proofs()["det_gemm"].kernels["hopper"].record(recorder, torch.bfloat16)
        yield from reversed(recorder.sources()[:2])


@pytest.fixture(scope="module")
def cubins() -> list[bytes]:
    target = GPUTarget("cuda", 90, 32)
    done = [triton.compile(source, target=target, options=options) for _, source, options in sources()]
    return [each.asm["cubin"] for each in done]


@pytest.fixture(scope="module")
def alone(cubins: list[bytes]) -> list[str]:
    return [disassembly._ran(["-c"], cubin) for cubin in cubins]


def blocks(code: str) -> list[tuple[str, list[list[sass.Instruction]], list[tuple[str, str, str]]]]:
    """Of each function: its name, its instructions without targets, and where its branches lead, by
    addresses."""
    found = []
    for name, lines in sass._functions(code):
        parts = sass._blocks(lines)
        names = [label for label in parts if parts[label]]
        first = {label: parts[label][0].address for label in names}
        below = [*parts]

        def at(label: str, below: list[str] = below, first: dict[str, str] = first) -> str:
            return next((first[each] for each in below[below.index(label) :] if each in first), "the end")

        leads = [
            (parts[label][-1].address, at(after), holds)
            for label, afters in sass._successors(parts).items()
            if label in first and parts[label][-1].parts[0] in sass._BRANCHES
            for after, holds in afters
        ]
        plain = [
            (each.address, each.predicate, each.name, each.read, each.written, each.decided)
            for label in names
            for each in parts[label]
        ]
        found.append((name, plain, leads))
    return found  # type: ignore[return-value]


def test_together_they_are_as_each_is_alone(cubins: list[bytes], alone: list[str]) -> None:
    together = disassembled(cubins)
    assert [*map(blocks, together)] == [*map(blocks, alone)]
    assert [*map(sass.unset_registers, together)] == [*map(sass.unset_registers, alone)]


def test_these_kernels_have_what_is_to_be_restored(cubins: list[bytes], alone: list[str]) -> None:
    assert len({*cubins}) == 3
    indirect = [bool(disassembly._INDIRECT.search(code)) for code in alone]
    assert indirect == [False, True, False]
    for code in (alone[0], alone[2]):
        ((_, _, leads),) = blocks(code)
        assert len(leads) > 3 and "CALL" in code
    assert disassembled(cubins)[1] == alone[1]


def test_a_branch_that_leads_elsewhere_shows(cubins: list[bytes], alone: list[str]) -> None:
    one = disassembled(cubins[:1])[0]
    label = next(line for line in one.splitlines() if line.startswith(".L_"))
    assert blocks(one.replace(f"{label}\n", "", 1)) != blocks(alone[0])


def test_nothing_is_read_of_nothing() -> None:
    assert disassembled([]) == []
