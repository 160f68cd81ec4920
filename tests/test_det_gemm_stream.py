"""Guards the token stream of `det_gemm_dw`: its tables against a plain loop, and which changes of the batch
leave the bits of a sum alone."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit import ContractError, det_gemm_dw
from isobit.kernels.host.token_stream import BLOCK, SEGMENT, Stream, build, capacity
from isobit.numerics import cut, segments
from isobit.ops.det_gemm import model

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(T: int, K: int = 6, N: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = generator(seed)
    return torch.randn(T, K, generator=gen).to(BF16), torch.randn(T, N, generator=gen).to(BF16)


# Tables


def plain_loop(T: int, mask: Sequence[bool], bounds: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """(rows by slot, [first slot, blocks] of every segment), written down row by row."""
    rows: list[int] = []
    table = []
    for start, end in itertools.pairwise(bounds):
        live = [t for t in range(start, end) if mask[t]]
        for i in range(0, len(live), SEGMENT):
            table.append([len(rows) + i, -(-min(SEGMENT, len(live) - i) // BLOCK)])
        rows += live + [-1] * (-len(live) % BLOCK)
    return rows, table


def check_tables(stream: Stream, rows: list[int], table: list[list[int]]) -> None:
    count = int(stream.count)
    assert count == len(table) and {t.dtype for t in vars(stream).values()} == {torch.int32}
    result = torch.stack((stream.first, stream.blocks), 1).tolist()
    assert result[:count] == table and result[count:] == [[0, 0]] * (len(result) - count)
    # Kernels walk segments as one stretch of slots, which ends where the last of them does.
    ends = [first + BLOCK * blocks for first, blocks in table]
    assert [first for first, _ in table] == [0, *ends][: len(table)]
    slots = stream.rows.tolist()
    assert slots[: len(rows)] == rows and set(slots[len(rows) :]) <= {-1} and len(slots) % BLOCK == 0


@pytest.mark.parametrize("seed", range(12))
def test_tables_are_those_of_a_plain_loop(seed: int) -> None:
    gen = generator(seed)
    T = int(torch.randint(1, 2500, (), generator=gen))
    S = int(torch.randint(0, 9, (), generator=gen))
    inner = sorted(torch.randint(0, T + 1, (S,), generator=gen).tolist())
    bounds = [0, *inner, T]
    density = float(torch.rand((), generator=gen))
    mask = torch.rand(T, generator=gen) < (density if seed % 3 else 1.0)
    as_given = (mask, mask.int() * 7, mask.to(torch.uint8) * 255)[seed % 3]
    cu = torch.tensor(bounds, dtype=torch.int32 if seed % 2 else torch.int64)
    check_tables(build(T, as_given, cu, CPU), *plain_loop(T, mask.tolist(), bounds))
    check_tables(build(T, as_given, None, CPU), *plain_loop(T, mask.tolist(), [0, T]))
    check_tables(build(T, None, cu, CPU), *plain_loop(T, [True] * T, bounds))


@pytest.mark.parametrize("T", [1, 63, 64, 65, 512, 513, 1024])
def test_sequences_of_one_row_take_a_block_each_and_fill_the_tables(T: int) -> None:
    stream = build(T, None, torch.arange(T + 1), CPU)
    slots, segments = capacity(T, T)
    assert (
        (len(stream.rows), len(stream.first))
        == (slots, segments)
        == (64 * T, T)
        == (64 * T, int(stream.count))
    )


@pytest.mark.parametrize(
    "bad", [[5, 3, 900], [0, 700, 200, 700], [-9, -1, 10**9, 4], [2**31 - 1, -(2**31), 0], [0], [7], [9, 9]]
)
def test_tables_of_bad_bounds_stay_inside(bad: list[int]) -> None:
    """Values are not read on a GPU, so whatever they are, every row is there once and nothing else is."""
    for mask in (None, torch.rand(700, generator=generator()) < 0.5):
        stream = build(700, mask, torch.tensor(bad), CPU)
        live = list(range(700)) if mask is None else mask.nonzero()[:, 0].tolist()
        assert [t for t in stream.rows.tolist() if t >= 0] == live
        ends = stream.first + stream.blocks * BLOCK
        assert int(stream.count) <= len(stream.first) and int(ends.max()) <= len(stream.rows)
        assert int(stream.blocks.sum()) * BLOCK <= len(stream.rows)


# Bits


def test_without_a_table_it_is_segments_of_512() -> None:
    x, dy = batch(1300)
    assert torch.equal(det_gemm_dw(x, dy), segments(dy.t(), x, cut([1300], 512)))
    init = torch.randn(5, 6, generator=generator())
    assert torch.equal(det_gemm_dw(x, dy, init=init), segments(dy.t(), x, cut([1300], 512), init))
    assert torch.equal(det_gemm_dw(x, dy, mask=torch.ones(1300).bool()), det_gemm_dw(x, dy))
    assert torch.equal(det_gemm_dw(x, dy, cu_seqlens=torch.tensor([0, 1300])), det_gemm_dw(x, dy))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_sum_is_rounded_once_to_what_is_asked_for(dtype: torch.dtype) -> None:
    x, dy = batch(700)
    dy[0, 0], x[0, 0] = float("nan"), 3e38
    init = torch.randn(1, 5, 6, generator=generator())
    wide = model.token_product(x[None], dy[None], None, init)
    result = model.token_product(x[None], dy[None], None, init, out_dtype=dtype)
    assert result.dtype == dtype and torch.equal(result[:, 1:], wide[:, 1:].to(dtype))
    assert set(result[0, 0].view(torch.int16).tolist()) == {0x7FFF}  # as the GPU rounds NaN


def padded(x: Tensor, dy: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same rows in the same order among masked rows that hold NaN."""
    T = len(x)
    live = torch.randperm(2 * T, generator=generator(seed))[:T].sort().values
    mask = torch.zeros(2 * T, dtype=torch.bool)
    mask[live] = True
    wide = [t.new_full((2 * T, t.shape[1]), float("nan")) for t in (x, dy)]
    for w, t in zip(wide, (x, dy), strict=True):
        w[live] = t
    return wide[0], wide[1], mask


def test_rows_that_do_not_count_change_nothing() -> None:
    x, dy = batch(1100)
    packed = det_gemm_dw(x, dy)
    for seed in range(3):
        wide_x, wide_dy, mask = padded(x, dy, seed)
        assert torch.equal(det_gemm_dw(wide_x, wide_dy, mask=mask), packed)
        lead = (2, 11, 100)  # any leading shape
        wide_x, wide_dy, mask = wide_x.reshape(*lead, -1), wide_dy.reshape(*lead, -1), mask.reshape(lead)
        assert torch.equal(det_gemm_dw(wide_x, wide_dy, mask=mask.long()), packed)
    shifted = torch.cat((x[8:], x[:8])), torch.cat((dy[8:], dy[:8]))
    assert not torch.equal(det_gemm_dw(*shifted), packed)  # the control: the same rows in other groups


def test_padded_and_packed_sequences_agree() -> None:
    lengths, longest = [700, 1, 0, 513, 300], 720
    x, dy = batch(sum(lengths))
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed = det_gemm_dw(x, dy, cu_seqlens=bounds)
    shape = (len(lengths), longest)
    wide_x, wide_dy = x.new_full((*shape, 6), float("nan")), dy.new_full((*shape, 5), float("nan"))
    mask = torch.zeros(shape, dtype=torch.bool)
    for i, (first, n) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        wide_x[i, :n], wide_dy[i, :n], mask[i, :n] = x[first : first + n], dy[first : first + n], True
    every = torch.arange(0, len(lengths) * longest + 1, longest, dtype=torch.int32)
    assert torch.equal(det_gemm_dw(wide_x, wide_dy, mask=mask, cu_seqlens=every), packed)
    assert torch.equal(packed, segments(dy.t(), x, cut(lengths, 512)))
    assert not torch.equal(det_gemm_dw(x, dy), packed)  # the control: segments that do not begin anew


def test_cuts_between_sequences_agree_with_one_call() -> None:
    lengths = [700, 1, 513, 300]
    x, dy = batch(sum(lengths))
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    start = torch.randn(5, 6, generator=generator(1))
    whole = det_gemm_dw(x, dy, cu_seqlens=torch.tensor(bounds), init=start)
    for at in (1, 2, 3):
        total = start
        for part in (bounds[: at + 1], bounds[at:]):
            rows = slice(part[0], part[-1])
            cu = torch.tensor(part) - part[0]
            total = det_gemm_dw(x[rows], dy[rows], cu_seqlens=cu, init=total)
        assert torch.equal(total, whole)


def test_cuts_at_multiples_of_512_rows_that_count_agree_with_one_call() -> None:
    x, dy = batch(1300)
    wide_x, wide_dy, mask = padded(x, dy, 0)
    whole = det_gemm_dw(x, dy)
    live = mask.nonzero()[:, 0].tolist()
    for rows, agree in ((512, True), (1024, True), (504, False), (512 + 16, False)):
        at = live[rows]
        first = det_gemm_dw(wide_x[:at], wide_dy[:at], mask=mask[:at])
        both = det_gemm_dw(wide_x[at:], wide_dy[at:], mask=mask[at:], init=first)
        assert torch.equal(both, whole) is agree, rows


def test_an_empty_stream_returns_the_initial_value() -> None:
    x, dy = batch(70)
    nothing, start = torch.zeros(70).int(), torch.full((5, 6), -0.0)
    assert not det_gemm_dw(x, dy, mask=nothing).any()
    for result in (det_gemm_dw(x, dy, mask=nothing, init=start), det_gemm_dw(x[:0], dy[:0], init=start)):
        assert torch.equal(result.view(torch.int32), start.view(torch.int32))
        assert result.data_ptr() != start.data_ptr()


# Errors


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mask": torch.ones(8)}, "(mask: [8] fp32): dtype must be bool or integer"),
        ({"mask": torch.ones(7).bool()}, "(mask: [7] bool): leading shape=[7] but leading shape=[8] from x"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "(cu_seqlens: [2] fp32): dtype must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, "(cu_seqlens: [1, 2] int64): needs 1 dimension(s) [S+1]"),
        ({"cu_seqlens": torch.empty(0).int()}, "(cu_seqlens: [0] int32): needs at least one element"),
        ({"cu_seqlens": torch.tensor([1, 8])}, "(cu_seqlens: [2] int64): must begin with 0"),
        ({"cu_seqlens": torch.tensor([0, 7])},
         "(cu_seqlens: [2] int64): must end with the number of rows, 8, not 7"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])},
         "(cu_seqlens: [4] int64): must not descend: [1]=5, [2]=3"),
        ({"cu_seqlens": torch.tensor([0])}, "(cu_seqlens: [1] int64): must end with the number of rows, 8"),
        ({"init": torch.zeros(5, 6, dtype=BF16)}, "(init: [5, 6] bf16): dtype must be fp32"),
        ({"init": torch.zeros(5, 6).double()}, "(init: [5, 6] fp64): dtype must be fp32"),
        ({"init": torch.zeros(6, 5)}, "(init: [6, 5] fp32): N=6 but N=5 from dy"),
        ({"dy": torch.zeros(7, 5, dtype=BF16)}, "(dy: [7, 5] bf16): leading shape=[7]"),
        ({"dy": torch.zeros(8, 5, dtype=torch.float16)}, "(dy: [8, 5] fp16): dtype must be that of x, bf16"),
    ],
)  # fmt: skip
def test_wrong_calls(change: dict[str, Any], expected: str) -> None:
    x, dy = batch(8)
    with pytest.raises(ContractError) as error:
        det_gemm_dw(**({"x": x, "dy": dy} | change))
    assert str(error.value).startswith("det_gemm_dw" + expected)


def test_bounds_are_read_only_where_that_is_allowed() -> None:
    x, dy = batch(8)
    result = det_gemm_dw(x, dy, cu_seqlens=torch.tensor([0, 5, 3, 8]), validate=False)
    assert bool(result.isfinite().all())
    with pytest.raises(ContractError, match="must not descend"):
        det_gemm_dw(x, dy, cu_seqlens=torch.tensor([0, 5, 3, 8]), validate=True)
