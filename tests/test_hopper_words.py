"""Helper kernels of the Hopper backends, compiled without a GPU: free of specialisation, they must still move
whole words of 16 bytes where those are known, and be right where they are not."""

import pytest
import torch
import triton
from torch import Tensor

import ptx
from isobit.blocks.hopper_lse import Slots
from isobit.blocks.hopper_product import pack
from isobit.blocks.launch import Recorder
from isobit.blocks.temperature import LOG2E
from isobit.ops.linear_logp import kernels_hopper_bwd as backward

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
    weights, counts = backward._weigh(slots, slots.capacity, grads, N, V, 1.0, recorder)
    pack(empty(N, D), slots.rows, recorder)
    slots.blank(empty(N, D), recorder)
    dz, base = empty(slots.capacity, 1024), empty(slots.capacity, 4, 4, dtype=torch.float32)
    (block,) = backward._blocks(dz, slots, weights, counts, dz, base, slots.capacity)
    backward._from_kept(dz[:, :1000], block, 0, recorder)
    backward._sum_bias(empty(1000, dtype=torch.float32), dz, block, recorder)
    dh = empty(slots.capacity, D, dtype=torch.float32)
    launch = (empty(slots.capacity, D), dh, block.rows, block.ids, block.count, V, D // 8, 64, 256)
    recorder(backward.unpack_kernel, (1, 1), *launch, enable_fp_fusion=False)
    Slots(empty(N, dtype=torch.int64), None, None, -100, LOG2E, V, False, recorder)
    return {
        name: triton.compile(source, target=ptx.TARGET, options=options).asm["ptx"]
        for name, source, options in recorder.sources()
    }  # the last one of each name


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        ("pack_kernel", 16, 16), ("unpack_kernel", 32, 16), ("blank_kernel", 0, 16), ("kept_kernel", 4, 2),
        ("bias_kernel", 2, 0), ("compact_kernel", 0, 6),
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
    "inside of a word": numbers(12 * 40 + 1)[1:].view(12, 40),
}


@pytest.mark.parametrize("name", SOURCES)
def test_rows_are_packed_wherever_they_lie(name: str) -> None:
    source = SOURCES[name]
    rows = torch.full((64,), -1, dtype=torch.int32)
    rows[:9] = torch.tensor([3, 0, 11, 7, 2, 1, 5, 9, 10]) % len(source)
    found = pack(source, rows, ptx.execute)
    expected = torch.where((rows >= 0)[:, None], source[rows.clamp(min=0).long()], 0.0)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
