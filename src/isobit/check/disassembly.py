"""The machine code of compiled kernels as text, by the nvdisasm that Triton brings along.

Each run of nvdisasm takes half a second before it reads anything, and it takes one file. So the code of many
kernels is put into one file, without what is around it in a cubin. What that costs is restored here: the name
of each kernel, and labels where branches lead. Where an indirect branch leads is in another part of the
cubin, so a kernel that has one is given to nvdisasm whole, in a run of its own.
"""

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

#: What Triton compiles for Hopper.
_TARGET = "SM90a"

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)")
_BRANCH = re.compile(r"(\bBRA\b.*?)(0x[0-9a-f]+)(\s*;)")
_INDIRECT = re.compile(r"\b(?:BRX|BRXU|JMX|JMXU)\b")


def disassembled(cubins: Sequence[bytes]) -> list[str]:
    """The code of each, in the form of `nvdisasm -c`."""
    parts = [(which, name, code) for which, cubin in enumerate(cubins) for name, code in _sections(cubin)]
    if not parts:
        return ["" for _ in cubins]
    lines = _ran(["-b", _TARGET], b"".join(code for _, _, code in parts)).splitlines()
    texts: list[list[str]] = [[] for _ in cubins]
    start, at = 0, 0
    for which, name, code in parts:
        end, own = start + len(code), list[tuple[int, str]]()
        while at < len(lines):
            match = _LINE.match(lines[at])
            if match is not None and (address := int(match[1], 16)) >= end:
                break
            if match is not None:
                own.append((address - start, lines[at]))
            at += 1
        texts[which] += [f"{name}:", *_labelled(own, start)]
        start = end
    whole = ["\n".join(each) for each in texts]
    return [
        _ran(["-c"], cubin) if _INDIRECT.search(text) else text
        for cubin, text in zip(cubins, whole, strict=True)
    ]


def _labelled(lines: list[tuple[int, str]], start: int) -> Iterator[str]:
    """The lines of a kernel, whose addresses are counted from its start, with labels in place of the
    addresses that branches lead to."""
    branches = [_BRANCH.search(line) for _, line in lines]
    targets = {int(branch[2], 16) - start for branch in branches if branch is not None}
    for (address, line), branch in zip(lines, branches, strict=True):
        if address in targets:
            yield f".L_{address:x}:"
        if branch is not None:
            line = f"{line[: branch.start()]}{branch[1]}`(.L_{int(branch[2], 16) - start:x}){branch[3]}"
        yield re.sub(r"/\*[0-9a-f]+\*/", f"/*{address:04x}*/", line, count=1)


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """The sections with code of an ELF file of 64 bits: name and content."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + 64 * i) for i in range(count)]
    text = sections[names][4]
    for name_at, _, _, _, offset, size in sections:
        name = cubin[text + name_at : cubin.index(b"\0", text + name_at)].decode()
        if name.startswith(".text."):
            yield name, cubin[offset : offset + size]


def _ran(options: list[str], content: bytes) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(content)
        command = [knobs.nvidia.nvdisasm.path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
