"""Kernels in the interpreter access nothing beside their tensors: every input is in the middle of a larger
allocation, and every address is checked. Like compute-sanitizer, without a GPU."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interpreted import in_interpreter
from isobit import chunk_gated_delta_rule_bwd_dhu, logp, ratio_kl, rms_norm

#: Bytes around every guarded tensor.
ROOM = 1 << 12


class Guard:
    """Tensors with guard memory around them, and the addresses in it that were accessed."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.bounds: list[tuple[int, int]] = []
        self.touched: list[str] = []

    def around(self, t: Tensor) -> Tensor:
        """The same tensor, strides and all, on the start of a word of 16 bytes."""
        span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
        size = t.element_size()
        whole = torch.zeros(2 * ROOM + span * size + 16, dtype=torch.uint8)
        first = ROOM - whole.data_ptr() % 16
        middle = whole[first : first + span * size].view(t.dtype)
        self.kept.append(whole)
        self.bounds.append((middle.data_ptr(), middle.data_ptr() + span * size))
        return middle.as_strided(t.shape, t.stride()).copy_(t)

    def look(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        live = addresses[mask.astype(bool)]
        for begin, end in self.bounds:
            near = live[(live + size > begin - ROOM // 2) & (live < end + ROOM // 2)]
            wrong = near[(near < begin) | (near + size > end)]
            if len(wrong):
                past = int(wrong.max()) - end
                self.touched.append(f"{what} of {size} bytes {past} bytes from the end of a tensor")

    @contextmanager
    def watching(self) -> Iterator[None]:
        from triton.runtime import interpreter

        real = interpreter._interpreter
        guard = self

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
                guard.look("load", addresses, mask, np.dtype(dtype).itemsize)
                return real.load(addresses, mask, other, dtype)

            def store(self, addresses: Any, value: Any, mask: Any) -> Any:
                guard.look("store", addresses, mask, value.dtype.itemsize)
                return real.store(addresses, value, mask)

        interpreter._interpreter = Watched()
        try:
            yield
        finally:
            interpreter._interpreter = real


def rows(N: int, V: int, stride: int, dtype: torch.dtype) -> Tensor:
    """Rows that end where the tensor ends."""
    flat = torch.linspace(-3, 3, (N - 1) * stride + V).to(dtype)
    return flat.as_strided((N, V), (stride, 1))


def touched(N: int, V: int, stride: int, dtype: torch.dtype) -> list[str]:
    """Forward and backward of these ops."""
    guard = Guard()
    z, ref = (guard.around(rows(N, V, stride, dtype)).requires_grad_() for _ in "zr")
    ids = guard.around(torch.arange(N) * 7 % V)
    weight, dout = guard.around(torch.ones(V, dtype=dtype)).requires_grad_(), guard.around(ref.detach())
    with guard.watching():
        logp(z, ids, backend="triton").sum().backward()
        ratio, kl = ratio_kl(z, ref.detach(), ids, backend="triton")
        (ratio + kl).sum().backward()
        out, summed = rms_norm(z, weight, residual=ref, backend="triton")
        torch.autograd.backward((out, summed), (dout, dout))
    return guard.touched


def touched_by_chunks(bounds: list[int], offsets: list[int] | None) -> list[str]:
    """Packed sequences of 70 tokens in two chunks, with bounds and offsets that may be wrong."""
    from isobit.ops.delta_rule import kernels_triton

    guard, allocate = Guard(), kernels_triton.outputs
    args = {name: guard.around(torch.ones(1, 70, 1, 16)) for name in ("q", "k", "w", "do", "dv")}
    args |= {"g": guard.around(-torch.ones(1, 70, 1)), "dht": guard.around(torch.ones(2, 1, 16, 16))}
    args |= {"h0": args["dht"], "cu_seqlens": guard.around(torch.tensor(bounds))}
    if offsets is not None:
        args["chunk_offsets"] = guard.around(torch.tensor(offsets))

    def outputs(args: dict[str, Any]) -> tuple[Any, ...]:
        *tensors, sequences = allocate(args)
        return (*map(guard.around, tensors), sequences)

    kernels_triton.outputs = outputs  # type: ignore[assignment]
    try:
        with guard.watching():
            chunk_gated_delta_rule_bwd_dhu(
                **args, chunk_indices=torch.tensor([[0, 0], [1, 0]]), validate=False, backend="triton"
            )
    finally:
        kernels_triton.outputs = allocate
    return guard.touched


def beyond() -> list[str]:
    """A kernel that reads one element too far: the guard must see it."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, out, N: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(out + at, tl.load(x + at), mask=at < N - 1)

    guard = Guard()
    x, out = guard.around(torch.zeros(7)), guard.around(torch.zeros(7))
    with guard.watching():
        kernel[(1,)](x, out, 8)
    return guard.touched


#: Rows that end inside of a 16-byte word in all dtypes; a row that is whole steps long, and begins inside of
#: one; rows without such ends; a row that ends in the word behind its last whole step; rows that are loaded
#: ahead, the last of which no row follows.
CASES = [
    (3, 5, 5), (2, 259, 259), (3, 1027, 1027), (2, 1024, 1025), (2, 4096, 4099), (2, 264, 264),
    (2, 2049, 2049), (7, 5130, 5130),
]  # fmt: skip


#: Bounds and offsets of packed sequences, right ones first. The last offsets are so far out that a store
#: there ends the process.
CHUNKS = [
    ([0, 30, 70], None), ([0, 30, 70], [0, 1]), ([0, 30, 70], [-1, 2]), ([0, 30, 70], [-2, 3]),
    ([0, 70, 70], [1, 1]), ([-5, 99, 40], None), ([40, 0, 70], [0, -1]), ([0, 30, 70], [-(10**8), 10**8]),
    ([-(2**63), 2**63 - 1, 3], [-(2**63), 2**63 - 1]),
]  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return dict(json.loads(in_interpreter(Path(__file__)).splitlines()[-1]))


def test_the_guard_sees_an_element_too_far(found: dict[str, list[str]]) -> None:
    assert found["beyond"] == ["load of 4 bytes 0 bytes from the end of a tensor"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_are_read_to_their_end_and_no_further(
    found: dict[str, list[str]], dtype: str, case: tuple[int, int, int]
) -> None:
    assert found[f"{dtype} {case}"] == []


@pytest.mark.parametrize("case", CHUNKS)
def test_wrong_bounds_and_offsets_of_chunks_lead_nowhere_else(
    found: dict[str, list[str]], case: tuple[list[int], list[int] | None]
) -> None:
    assert found[f"chunks {case}"] == []


if __name__ == "__main__":
    answers = {f"{name} {case}": touched(*case, getattr(torch, name)) for case in CASES for name in
               ("float16", "float32")}  # fmt: skip
    answers |= {f"chunks {case}": touched_by_chunks(*case) for case in CHUNKS}
    json.dump({**answers, "beyond": beyond()}, sys.stdout)
