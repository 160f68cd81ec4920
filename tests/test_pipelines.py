"""A tile that a product in flight reads, and that is loaded again: Triton's code is read for it."""

import pytest
import triton
import triton.language as tl
from triton.compiler import ASTSource

import to_ptx
from isobit.check.pipelines import overwritten_operands

pytestmark = pytest.mark.compat

_SIZES = {"x": "*bf16", "h": "*bf16", "out": "*fp32", "sums": "*fp32", "V": "i32"}


@triton.jit
def _tiles(x, h, column):
    i = tl.arange(0, 64)
    at = i[:, None] * 256 + (column + i)[None, :]
    return tl.load(x + at), tl.load(h + at)


@triton.jit
def reads_the_tile_too(x, h, out, sums, V):
    """`dk_kernel` of the gated delta rule had such a loop."""
    i = tl.arange(0, 64)
    z, total = tl.zeros([64, 64], tl.float32), tl.zeros([64], tl.float32)
    for column in range(0, V, 64):
        x_c, h_c = _tiles(x, h, column)
        z = tl.dot(x_c, tl.trans(h_c), z)
        total += tl.sum(h_c.to(tl.float32), 1)
    tl.store(out + i[:, None] * 64 + i[None, :], z)
    tl.store(sums + i, total)


@triton.jit
def reads_it_in_a_loop_of_its_own(x, h, out, sums, V):
    i = tl.arange(0, 64)
    z, total = tl.zeros([64, 64], tl.float32), tl.zeros([64], tl.float32)
    for column in range(0, V, 64):
        x_c, h_c = _tiles(x, h, column)
        z = tl.dot(x_c, tl.trans(h_c), z)
    for column in range(0, V, 64):
        _, h_c = _tiles(x, h, column)
        total += tl.sum(h_c.to(tl.float32), 1)
    tl.store(out + i[:, None] * 64 + i[None, :], z)
    tl.store(sums + i, total)


def faults(kernel: "triton.JITFunction[..., None]", stages: int) -> list[str]:
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(len(_SIZES))}
    source = ASTSource(kernel, _SIZES, {}, aligned)
    ttgir = to_ptx.compiled(source, {"num_warps": 4, "num_stages": stages}).asm["ttgir"]
    assert "warp_group_dot" in ttgir and ("async_copy" in ttgir) == (stages > 1)
    return overwritten_operands(ttgir)


@pytest.mark.parametrize("stages", [2, 3])
def test_finds_a_tile_that_is_loaded_while_a_product_reads_it(stages: int) -> None:
    (fault,) = faults(reads_the_tile_too, stages)
    assert f"has {stages - 1} buffers for {stages - 1} loads ahead" in fault


@pytest.mark.parametrize("stages", [2, 3])
def test_finds_nothing_where_only_products_read_it(stages: int) -> None:
    assert faults(reads_it_in_a_loop_of_its_own, stages) == []


def test_finds_nothing_without_loads_ahead() -> None:
    assert faults(reads_the_tile_too, 1) == []
