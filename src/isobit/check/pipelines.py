"""Reads Triton's code of a compiled kernel for a known fault of its software pipelines.

A loop loads the operands of the next products while those of this iteration are computed. On Hopper products
(`wgmma`) read operands from shared memory, and may still be in flight when the next iteration begins: then
each operand needs one buffer more than there are loads ahead. Triton 3.6 to 3.9 make that buffer, but not for
a tile that is also read into registers. So in

    for column in range(0, V, 64):
        h_c = tl.load(..)
        z = tl.dot(x, tl.trans(h_c), z)     in flight at the end of the iteration
        total += tl.sum(h_c * y, 1)         reads h_c into registers

the next h_c is written over the one that a product may still be reading. Results are wrong now and then: the
gradient of k in `gated_delta_rule` had 396 of 460800 elements that differed from run to run on an H200. Load
such a tile twice, in two loops.
"""

import re
from collections.abc import Iterator

_NAME = r"(%[\w#]+)"
_ALLOCATED = re.compile(rf"{_NAME} = ttg\.local_alloc\b.*!ttg\.memdesc<(\d+)x\d+x\d+")
_VIEWED = re.compile(rf"{_NAME} = ttg\.memdesc_\w+ {_NAME}")
_LOADED = re.compile(rf"async_copy_global_to_local %[\w#]+, {_NAME}")
_MULTIPLIED = re.compile(rf"warp_group_dot {_NAME}, {_NAME},")
_IN_FLIGHT = re.compile(r"warp_group_dot_wait .*pendings = [1-9]")


def overwritten_operands(ttgir: str) -> list[str]:
    """What may be written while a product reads it, by the names of Triton's values."""
    lines = ttgir.splitlines()
    buffers = {m[1]: int(m[2]) for m in map(_ALLOCATED.search, lines) if m}
    whole: dict[str, str] = {}  # the allocation that a value is a view of
    for line in lines:
        if found := _VIEWED.search(line):
            whole[found[1]] = whole.get(found[2], found[2])

    def allocations(pattern: re.Pattern[str], part: list[str]) -> Iterator[str]:
        for found in filter(None, map(pattern.search, part)):
            yield from (whole.get(name, name) for name in found.groups())

    faults = []
    for start, end in _loops(lines):
        body = lines[start:end]
        if not any(map(_IN_FLIGHT.search, body)):
            continue
        ahead = [*allocations(_LOADED, lines[:start])]
        for name in sorted({*allocations(_LOADED, body)} & {*allocations(_MULTIPLIED, body)}):
            if buffers.get(name, 0) <= ahead.count(name):
                faults.append(
                    f"{name} has {buffers.get(name, 0)} buffers for {ahead.count(name)} loads ahead"
                )
    return faults


def _loops(lines: list[str]) -> Iterator[tuple[int, int]]:
    """First and last line of every loop without another loop inside."""
    open_loops: list[tuple[int, int]] = []  # line, indentation
    inner = False
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line:
            open_loops.append((i, indent))
            inner = True
        elif open_loops and indent == open_loops[-1][1] and line.lstrip().startswith("}"):
            start, _ = open_loops.pop()
            if inner:
                yield start, i
            inner = False
