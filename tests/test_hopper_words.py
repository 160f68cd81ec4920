"""Helper kernels of the Hopper backends, compiled without a GPU: free of specialisation, they must still move
whole words of 16 bytes where those are known, and be right where they are not."""

import pytest
import torch
from torch import Tensor

import ptx
import to_ptx
from isobit.frame.launch import Recorder
from isobit.kernels.hopper.lse import Slots
from isobit.kernels.hopper.product import pack
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from isobit.ops.linear_policy_loss import kernels_hopper as chunk

pytestmark = pytest.mark.compat

BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """PTX of each kernel for a usual call: D = 4096, bf16, and a number of rows that is odd."""
    N, D, V, recorder = 4099, 4096, 1024, Recorder()
    floats = empty(N, dtype=torch.float32)
    slots = Slots(empty(N, dtype=torch.int64), None, None, -100, LOG2E, V, True, recorder)
    grads = {"entropy": None, "dlogp": floats, "dentropy": None, "dlse": None, "stats": floats}
    weights, counts = backward.weigh(slots, slots.capacity, grads, N, V, 1.0, recorder)
    pack(empty(N, D), slots.rows, recorder)
    slots.blank(empty(N, D), recorder)
    dz, base = empty(slots.capacity, 1024), empty(slots.capacity, 4, 4, dtype=torch.float32)
    (block,) = backward.blocks_of(dz, slots, weights, counts, dz, base, slots.capacity)
    backward.from_probs(dz[:, :1000], block, 0, recorder)
    backward.sum_bias(empty(1000, dtype=torch.float32), dz, block.count, True, recorder)
    dh = empty(slots.capacity, D, dtype=torch.float32)
    launch = (empty(slots.capacity, D), dh, block.rows, block.ids, block.count, V, D // 8, 64, 256)
    recorder(backward.unpack_kernel, (1, 1), *launch, enable_fp_fusion=False)
    queue, table = empty(slots.capacity + 576, D), empty(slots.capacity + 576, dtype=torch.int32)
    four = empty(4, dtype=torch.int32)
    chunk._take(queue, table, four, empty(N, D), slots, slots.count, 0, True, recorder)
    chunk._move(queue, queue, slots.count, slots.count, recorder, table)
    chunk._clear(queue, slots.count, recorder)
    sums, one = empty(V, D, dtype=torch.float32), empty(dtype=torch.float32)
    chunk.linear_logp_chunk_rounded(recorder, sums=sums, factor=one, dtype=BF16)
    Slots(empty(N, dtype=torch.int64), None, None, -100, LOG2E, V, False, recorder)
    return {
        name: to_ptx.compiled(source, options).asm["ptx"] for name, source, options in recorder.sources()
    }  # the last one of each name


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        ("pack_kernel", 16, 16), ("unpack_kernel", 32, 16), ("blank_kernel", 0, 16),
        ("from_probs_kernel", 4, 2),
        ("bias_kernel", 16, 0), ("compact_kernel", 0, 6), ("take_kernel", 16, 16), ("move_kernel", 8, 8),
        ("clear_kernel", 0, 16), ("round_kernel", 4, 2),
    ],
)  # fmt: skip
def test_whole_words_are_moved(compiled: dict[str, str], kernel: str, loads: int, stores: int) -> None:
    text = compiled[kernel]
    assert (text.count("ld.global.v4"), text.count("st.global.v4")) == (loads, stores)
    assert "st.global.b16" not in text and "ld.global.b16" not in text


def numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int16).view(BF16)


SOURCES = {
    "words": numbers(12 * 40).view(12, 40),
    "words, apart": numbers(12 * 48).view(12, 48)[:, :40],
    "half words": numbers(12 * 24).view(12, 24)[:, :20],
    "half words, close": numbers(12 * 20).view(12, 20),
    "by columns": numbers(12 * 40).view(40, 12).t(),
    "a lone row": numbers(2 * 20).view(2, 20)[:1],
    "inside a word": numbers(12 * 40 + 1)[1:].view(12, 40),
}


@pytest.mark.parametrize("name", SOURCES)
def test_rows_are_packed_wherever_they_lie(name: str) -> None:
    source = SOURCES[name]
    rows = torch.full((64,), -1, dtype=torch.int32)
    rows[:9] = torch.tensor([3, 0, 11, 7, 2, 1, 5, 9, 10]) % len(source)
    result = pack(source, rows, ptx.execute)
    expected = torch.where((rows >= 0)[:, None], source[rows.clamp(min=0).long()], 0.0)
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


# Chunks


@pytest.mark.parametrize(("waiting", "wait"), [(0, False), (1, True), (5, False), (505, True)])
def test_rows_of_a_chunk_are_put_behind_those_that_wait(waiting: int, wait: bool) -> None:
    """At any row of memory that begins at a word, with zeros behind; and which of all rows they are, and how
    many of them are whole segments."""
    source, slots = SOURCES["words, apart"], Slots.__new__(Slots)
    slots.capacity, slots.rows = 128, torch.full((128,), -1, dtype=torch.int32)
    slots.rows[:9] = torch.tensor([3, 0, 11, 7, 2, 1, 5, 9, 10])
    slots.count = torch.tensor([9], dtype=torch.int32)
    queue, table = torch.full((700, 40), 7.0, dtype=BF16), torch.full((700,), 99, dtype=torch.int32)
    before, counts = queue.clone(), torch.full((4,), -1, dtype=torch.int32)
    queued = torch.tensor([waiting], dtype=torch.int32)
    chunk._take(queue, table, counts, source, slots, queued, 1000, wait, ptx.execute)
    whole = (waiting + 9) // 512 * 512 if wait else waiting + 9
    assert counts.tolist() == [waiting + 9, whole, waiting + 9 - whole, 0]
    own = slice(waiting, waiting + 9)
    assert torch.equal(queue[own].view(torch.int16), source[slots.rows[:9].long()].view(torch.int16))
    assert not queue[own.stop : waiting + 192].any() and torch.equal(queue[:waiting], before[:waiting])
    assert table[own].tolist() == [1000 + row for row in slots.rows[:9].tolist()]
    assert (
        table[own.stop : waiting + 192].unique().tolist() == [-1]
        and table[:waiting].tolist() == [99] * waiting
    )


@pytest.mark.parametrize(("first", "count"), [(512, 5), (0, 3), (512, 0), (512, 511)])
def test_rows_that_wait_are_moved_to_the_front(first: int, count: int) -> None:
    whole = torch.arange(1100 * 24, dtype=torch.int32).to(torch.int16).view(BF16).view(1100, 24)
    result = whole.clone()
    at = (torch.tensor([n], dtype=torch.int32) for n in (first, count))
    table = torch.arange(1100, dtype=torch.int32)
    chunk._move(result, result, *at, ptx.execute, table)
    expected = whole.clone()
    expected[:count] = whole[first : first + count]
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
    assert table.tolist() == [*range(first, first + count), *range(count, 1100)]


def test_columns_of_rows_that_wait_are_put_in_front_of_a_slab() -> None:
    whole = torch.arange(512 * 64, dtype=torch.int32).to(torch.int16).view(BF16).view(512, 64)
    slab = torch.zeros(600, 32, dtype=BF16)
    none, count = torch.zeros(1, dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    chunk._move(slab, whole[:, 40:], none, count, ptx.execute)  # as far as both have columns
    assert torch.equal(slab[:7, :24].view(torch.int16), whole[:7, 40:].view(torch.int16))
    assert not slab[:, 24:].any() and not slab[7:].any()


def test_zeros_lie_behind_the_last_row() -> None:
    memory = torch.full((100, 24), 7.0, dtype=BF16)
    chunk._clear(memory, torch.tensor([30], dtype=torch.int32), ptx.execute)
    assert not memory[30:94].any() and bool((memory[:30] == 7).all() and (memory[94:] == 7).all())
