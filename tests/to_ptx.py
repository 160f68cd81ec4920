"""Kernels compiled as far as PTX, which is what tests of compiled code read. ptxas would take a third of the
time again, for code that nobody runs. That it takes the PTX is what the law `compile` is for."""

from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

TARGET = GPUTarget("cuda", 90, 32)


def compiled(source: Any, options: dict[str, Any]) -> Any:
    """What `triton.compile` returns for Hopper. Its `asm` has everything but the cubin."""
    with triton.knobs.cache.scope(), mock.patch.object(CUDABackend, "make_cubin", lambda *stage: b"none"):
        # Apart from what others compile: they would take this for the whole.
        triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / "isobit-ptx")
        return triton.compile(source, target=TARGET, options=options)
