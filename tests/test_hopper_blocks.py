"""What Hopper launchers decide on the host: which tile, what TMA can read, which kernel is known already."""

import itertools
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from gluon_on_a_cpu import in_order
from hopper_device import Device
from isobit.frame import launch
from isobit.kernels.hopper import descriptors
from isobit.kernels.hopper import logits as hopper_logits
from isobit.kernels.hopper import lse as hopper_lse
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.kernels.hopper import product as hopper_product
from isobit.kernels.hopper.lse import COLUMNS, SPLITS, Slots, splits_of
from isobit.kernels.host import token_stream as tokens
from isobit.kernels.host.token_stream import SEGMENT
from isobit.ops.det_gemm import kernels_hopper as products
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from isobit.ops.linear_logp.slabs import block_slots, default_slab_bytes, slabs
from isobit.ops.linear_policy_loss import kernels_hopper as chunk
from isobit.ops.linear_policy_loss.chunk_buffers import ChunkBuffers
from isobit.ops.logp import kernels_hopper as logp
from isobit.ops.ratio_kl import kernels_hopper as ratio_kl
from isobit.spec.proofs import proofs

pytestmark = pytest.mark.compat

BF16 = torch.bfloat16
SMS = 132  # of an H200


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Descriptors


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "stride"), [(64, 128, 128), (64, 128, 256), (1, 100, 100)])
def test_a_descriptor_like_an_earlier_one_holds_what_triton_would(
    rows: int, columns: int, stride: int, dtype: torch.dtype
) -> None:
    descriptors._descriptors.clear()
    one, other = (torch.zeros(rows, stride, dtype=dtype)[:, :columns] for _ in range(2))
    first, second = (descriptors.descriptor(descriptors.matrix(t), 64, 64) for t in (one, other))
    assert type(second) is type(first) and first.base is one and second.base is other
    # By Triton's own constructor, which the first went through.
    built = hopper_pipe.TensorDescriptor(
        other, second.shape, second.strides, second.block_shape, second.layout
    )
    assert {**vars(built), "maps": second.maps} == vars(second)
    assert vars(second) | {"base": one} == vars(first) and second.maps is first.maps


def test_a_descriptor_of_another_matrix_is_another() -> None:
    descriptors._descriptors.clear()
    t = torch.zeros(64, 128, dtype=BF16)
    made = [descriptors.descriptor(descriptors.matrix(u), 64, box)
            for u, box in ((t, 64), (t, 32), (t[:32], 64), (t[:, :64], 64), (t.half(), 64))]  # fmt: skip
    assert len(descriptors._descriptors) == len(made) == 5
    assert [d.shape for d in made] == [[64, 128], [64, 128], [32, 128], [64, 64], [64, 128]]


def test_a_descriptor_keeps_no_memory_and_checks_every_address() -> None:
    descriptors._descriptors.clear()
    t = torch.zeros(64, 128, dtype=BF16)
    descriptors.descriptor(descriptors.matrix(t), 64, 64)
    assert not any(
        isinstance(v, torch.Tensor) for known in descriptors._descriptors.values() for v in known.values()
    )
    inside = torch.zeros(64 * 128 + 1, dtype=BF16)[1:].view(64, 128)
    with pytest.raises(AssertionError, match="16 bytes"):
        descriptors.descriptor(descriptors.matrix(inside), 64, 64)


# Which program takes which tiles


class Int32(int):
    """A number of a kernel: what does not fit 32 bits is an error here, and would be another number there."""

    def _new(self, value: int) -> "Int32":
        assert -(2**31) <= value < 2**31, "32 bits do not hold it"
        return Int32(value)

    def __add__(self, other: int) -> "Int32":
        return self._new(int(self) + int(other))

    def __sub__(self, other: int) -> "Int32":
        return self._new(int(self) - int(other))

    def __mul__(self, other: int) -> "Int32":
        return self._new(int(self) * int(other))

    def __floordiv__(self, other: int) -> "Int32":
        return self._new(int(self) // int(other))

    def __mod__(self, other: int) -> "Int32":
        return self._new(int(self) % int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Int32":
        return self._new(-int(self))


def item_of(
    tiles_m: int, tiles_n: int, spans: int, group: int = 16, by_columns: bool = False
) -> Callable[[int], tuple[int, ...]]:
    """What the kernels' own functions answer for an item, with Python's numbers."""
    numbers: dict[str, Any] = {"gl": SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min)}
    for name in ("tile_at", "_by_length"):
        numbers[name] = FunctionType(getattr(hopper_pipe, name).fn.__code__, numbers)
    item = FunctionType(hopper_pipe.Pipe.item.fn.__code__, numbers)
    used = Int32(min(spans, tiles_n) if spans else tiles_n)
    pipe = SimpleNamespace(
        tiles_m=Int32(tiles_m),
        tiles_n=Int32(tiles_n),
        spans=used,
        GROUP=Int32(group),
        SPANS=spans,
        BY_COLUMNS=by_columns,
        SHARDED=False,
    )
    return lambda t: item(pipe, Int32(t))


def items(tiles_m: int, tiles_n: int) -> list[tuple[int, ...]]:
    """Every item of a forward."""
    item = item_of(tiles_m, tiles_n, SPLITS)
    return [item(t) for t in range(tiles_m * min(SPLITS, tiles_n))]


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("tiles_m", "tiles_n"), [(1, 1), (5, 3), (64, 2), (3, 40), (70, 17), (40, 3)])
def test_neighbouring_programs_read_the_same_columns_or_rows(
    tiles_m: int, tiles_n: int, by_columns: bool
) -> None:
    """Every tile is one item; of 16 rows of tiles, or columns, those that share an operand come together."""
    item = item_of(tiles_m, tiles_n, 0, by_columns=by_columns)
    order = [item(t)[:2] for t in range(tiles_m * tiles_n)]
    assert sorted(order) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    shared = [m if by_columns else n for m, n in order]
    runs = 1 + sum(a != b for a, b in itertools.pairwise(shared))
    bands = -(-(tiles_n if by_columns else tiles_m) // 16)
    assert runs <= bands * (tiles_m if by_columns else tiles_n)


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 72, 1001])
def test_the_last_rows_begin_where_tma_can(size: int) -> None:
    numbers: dict[str, Any] = {"gl": SimpleNamespace(cdiv=lambda a, b: -(-a // b), maximum=max)}
    start = FunctionType(hopper_pipe.last_start.fn.__code__, numbers)
    assert start(size, 64, True) == max(size - 64, 0)
    contiguous = start(size, 64, False)
    assert contiguous % 8 == 0 and max(size - 64, 0) <= contiguous < max(size - 64, 0) + 8


@pytest.mark.parametrize("tiles_n", [1, 5, 46340, 46341, 1 << 20])
def test_a_span_of_one_tile_is_the_tile(tiles_n: int) -> None:
    """Its number times that of all tiles, once a step of finding it, does not fit 32 bits from 46341 on."""
    item = item_of(3, tiles_n, 0)
    for t in {0, 1, tiles_n, 3 * tiles_n - 1}:
        m, first, end, span = item(t)
        assert (m, first) == (t % 3, t // 3) and end == first + 1 == span + 1


@pytest.mark.parametrize("tiles_n", [1 << 20, 1 << 23])
def test_splits_of_the_largest_vocabularies_fit_32_bits(tiles_n: int) -> None:
    item = item_of(17, tiles_n, SPLITS)
    ends = [item(t)[1:3] for t in range(17 * SPLITS)]
    assert min(ends)[0] == 0 and max(end for _, end in ends) == tiles_n


@pytest.mark.parametrize("tiles_m", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("tiles_n", [1, 2, 32, 33, 34, 65, 66, 128, 197, 512, 594])
def test_items_are_every_split_of_every_row_once(tiles_m: int, tiles_n: int) -> None:
    spans = min(SPLITS, tiles_n)
    bounds = [(s, s * tiles_n // spans, (s + 1) * tiles_n // spans) for s in range(spans)]
    wanted = [(m, first, end, s) for m in range(tiles_m) for s, first, end in bounds]
    assert sorted(items(tiles_m, tiles_n)) == sorted(wanted)


@pytest.mark.parametrize(
    ("N", "V", "most"), [(4096, 131072, 1.01), (16384, 128256, 1.01), (4096, 32768, 1.04)]
)
def test_programs_get_about_as_many_tiles(N: int, V: int, most: float) -> None:
    loads = [0] * SMS
    for i, (_, first, end, _) in enumerate(items(N // 128, -(-V // COLUMNS))):
        loads[i % SMS] += end - first
    assert max(loads) <= most * sum(loads) / SMS


# Slabs of d-logits

CALLS = [  # slots, D, V, rows of dW that there are
    (4096, 2048, 50257, 50257), (8192, 4096, 151936, 152064), (16384, 4096, 128256, 128256),
    (512, 896, 151936, 151936), (128, 8, 1, 1), (128, 4096, 3000, 3000), (65536, 64, 700, 700),
]  # fmt: skip


@pytest.mark.parametrize("slab_bytes", [0, 1 << 20, 1 << 26, 1 << 40])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("slots", "D", "V", "rows"), CALLS)
def test_slabs_cover_the_vocabulary_in_the_memory_that_there_is(
    slots: int, D: int, V: int, rows: int, frozen: bool, slab_bytes: int
) -> None:
    plan = slabs(V, slots, D, slab_bytes, 0 if frozen else rows, D, SMS)
    assert [s.first for s in plan] == [0, *(s.end for s in plan[:-1])] and plan[-1].end == V
    assert all(s.first % SEGMENT == 0 for s in plan)
    for slab in plan:
        assert slab.stride >= slab.end - slab.first
        if slab.lent:  # behind the slab's own rows of dW, which are written while it is read
            assert not frozen and slab.end * D + slots * slab.stride <= rows * D
        else:
            assert slots * slab.stride * 2 <= max(slab_bytes, slots * SEGMENT * 2)


def test_memory_of_the_gradient_makes_slabs_wider() -> None:
    lent, own = (slabs(128256, 16384, 4096, 1 << 26, rows, 4096, SMS) for rows in (128256, 0))
    assert lent[0].lent and lent[0].end > 10 * own[0].end and len(lent) < len(own) / 3


def test_memory_for_slabs_grows_with_the_rows_as_far_as_the_weight() -> None:
    weight = 128256 * 2048 * 2
    megabytes = [default_slab_bytes(slots, weight) >> 20 for slots in (128, 4096, 4224, 24576, 65536)]
    assert megabytes == [64, 64, 66, 384, weight >> 20]
    assert default_slab_bytes(65536, 1 << 20) == 1 << 26  # whatever the weight takes


def test_blocks_are_equally_tall() -> None:
    assert [block_slots(n) for n in (128, 4096, 4224, 16384, 16512)] == [128, 4096, 2176, 4096, 3328]


def test_blocks_share_the_slots_that_are_taken() -> None:
    slots = Slots(torch.zeros(300, dtype=torch.int64), None, None, -100, 1.0, 7, True, lambda *a, **k: None)
    counts = torch.tensor([128, 2, 0])
    blocks = backward.blocks_of(torch.empty(300, 8), slots, torch.empty(4, 384), counts, None, None, 128)
    assert [b.count.item() for b in blocks] == [128, 2, 0]
    assert [len(b.hidden) for b in blocks] == [128, 128, 44]
    assert [b.rows.data_ptr() - slots.rows.data_ptr() for b in blocks] == [0, 512, 1024]
    assert all(b.weights.shape == (4, 128) and b.weights.stride(0) == 384 for b in blocks)


def test_splits_are_a_function_of_the_vocabulary() -> None:
    assert splits_of(1) == 1 and splits_of(COLUMNS) == 1 and splits_of(COLUMNS + 1) == 2
    assert splits_of(151936) == SPLITS


# Matrices


@pytest.mark.parametrize(
    ("tensor", "readable"),
    [
        (empty(64, 64), True),
        (empty(64, 64).t(), True),
        (empty(64, 72)[:, :64], True),
        (empty(64, 65)[:, :64], False),  # rows begin between two words
        (empty(64, 128)[:, ::2], False),
        (empty(1, 65), True),  # a lone row begins anywhere
        (empty(64, 65)[:1], True),
        (empty(65, 1), True),
        (empty(1, 64).expand(64, 64), False),
    ],
)
def test_what_tma_can_read(tensor: torch.Tensor, readable: bool) -> None:
    assert descriptors.aligned_for_tma(descriptors.matrix(tensor)) is readable


def test_a_single_row_gets_a_valid_tma_stride() -> None:
    desc, by_k = descriptors.operand_descriptor(descriptors.matrix(empty(3, 70)[:1]), 64, 64)
    assert by_k and desc.strides[0] * 2 % 16 == 0 and desc.strides[0] >= 70


# Launching


HELPERS = [
    hopper_lse.compact_kernel, hopper_lse.blank_kernel, hopper_lse.merge_kernel, hopper_product.pack_kernel,
    backward.weigh_kernel, backward.from_probs_kernel, backward.bias_kernel, backward.unpack_kernel,
    forward.zero_kernel, ratio_kl.ratio_kernel, chunk.take_kernel, chunk.move_kernel, chunk.clear_kernel,
    chunk.round_kernel,
]  # fmt: skip
KERNELS = [
    products.product_kernel, hopper_product.sum_kernel, forward.forward_kernel, backward.slab_kernel,
    hopper_logits.fold_kernel, *HELPERS,
]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.__name__)
def test_hopper_kernels_are_specialised_on_constants_alone(kernel: object) -> None:
    roles = launch._learn(kernel)
    assert roles.known and all(roles.free)


@pytest.mark.parametrize(
    "op", ["logp", "ratio_kl", "linear_logp", "linear_policy_loss", "det_gemm", "det_linear", "det_gemm_dw"]
)
def test_contraction_is_never_left_to_a_default(op: str) -> None:
    """Triton's own default is to contract, until it is not: 3.9 announces another for 3.10."""
    recorder = launch.Recorder()
    proofs()[op].kernels["hopper"].record(recorder, BF16)
    assert recorder.launches
    assert all(options["enable_fp_fusion"] is False for _, _, options in recorder.launches)


@triton.jit
def specialised_kernel(out, n):
    tl.store(out, n)


@pytest.mark.parametrize("nvidia", [False, True])
def test_what_a_kernel_is_specialised_on_is_known_of_nvidia_alone(
    nvidia: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_roles_of", {})
    monkeypatch.setattr(launch, "on_nvidia", lambda: nvidia)
    roles = launch._learn(specialised_kernel)
    assert roles.free == (False, False) and roles.known is nvidia


def of(value: Any, free: bool = True) -> list[Any]:
    return launch._identities([value], [free])


def key(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """What finds a compiled kernel."""
    roles, args = launch._learn(kernel), in_order(kernel, args, options)
    assert len(args) == roles.all
    free, constants = args[: roles.constants], args[roles.constants :]
    return (kernel.__name__, *constants, *launch._identities(free, roles.free))


def helper_launches(N: int, D: int = 64, V: int = 1100) -> launch.Recorder:
    """Launches of every helper kernel for a batch of N rows: of a forward and a backward of `linear_logp`,
    with and without all options and with stored probabilities, of `logp`, of `ratio_kl`, and of a sum over
    some tokens."""
    recorder = launch.Recorder()
    ids, floats = empty(N, dtype=torch.int64), empty(N, dtype=torch.float32)
    optional = ("bias", "mask", "logit_scale", "logits_dtype", "vocab_size")
    none = dict.fromkeys((*optional, "workspace_bytes", "entropy", "dentropy", "dlse", "kept", "kept_base"))
    few = none | {
        "hidden": empty(N, D), "weight": empty(V, D), "token_ids": ids, "ignore_index": -100,
        "temperature": 0.7, "stats": empty(2, N, dtype=torch.float32), "dlogp": floats, "keep": False,
    }  # fmt: skip
    all_ = few | {
        "bias": empty(V), "mask": empty(N, dtype=torch.bool), "temperature": floats,
        "entropy": floats, "dentropy": floats, "dlse": floats,
    }  # fmt: skip
    for args, full in ((few, False), (all_, True), (few | {"keep": True}, False)):
        flags = dict.fromkeys(("return_entropy", "return_lse", "return_stats", "want_bias"), full)
        *_, kept, kept_base = forward.linear_logp(launch=recorder, **args | flags)
        theirs = args | flags | {"kept": kept, "kept_base": kept_base}
        for weight in (True, False):
            wanted = {"want_hidden": True, "want_weight": weight, "want_bias": full and weight}
            wanted["vocab_size"] = V - 3 if weight else None
            backward.linear_logp_bwd(launch=recorder, **theirs | wanted)
        chunk_launches(recorder, args, full)
    flags = dict.fromkeys(("return_entropy", "return_lse", "return_stats"), True)
    logp.logp(recorder, **few | flags | {"logits": empty(N, V)})
    both = {"policy_logits": empty(N, V), "ref_logits": empty(N, V), "old_logp": floats, "ref_logp": None}
    ratio_kl.ratio_kl(recorder, **few | flags | both, return_kl=True, return_logp=False)
    stream = tokens.Stream(empty(-(-N // 64) * 64, dtype=torch.int32), *[empty(1, dtype=torch.int32)] * 3)
    products.token_product(empty(1, N, D), empty(1, N, D), stream, None, launch=recorder)
    return recorder


def chunk_launches(recorder: launch.Recorder, args: dict[str, Any], full: bool) -> None:
    """Of a chunk in the middle of others, and of the last of them."""
    (N, D), V = args["hidden"].shape, len(args["weight"])
    memory = ChunkBuffers.of("hopper", args["hidden"], V, N, 0, True, 0)._asdict()
    own = args | memory | {"queued": empty(1, dtype=torch.int32), "first_row": 0, "kept": True}
    chunk.linear_logp_chunk(recorder, **own, return_entropy=full)
    own |= {"dhidden": empty(N, D, dtype=torch.float32), "dweight": empty(V, D, dtype=torch.float32)}
    own |= {"dbias": empty(V, dtype=torch.float32) if full else None, "first": False, "postpone": False}
    for last in (False, True):
        chunk.linear_logp_chunk_bwd(recorder, **own | {"last": last})
    chunk.linear_logp_chunk_rounded(recorder, sums=own["dhidden"], factor=own["stats"][0, 0], dtype=BF16)


def compile_keys(recorder: launch.Recorder) -> dict[str, set[str]]:
    """What decides whether Triton compiles again, by kernel."""
    result: dict[str, set[str]] = {}
    helpers = {kernel.__name__ for kernel in HELPERS}
    for name, source, options in recorder.sources():
        if name in helpers:
            key = (source.signature, {str(k): v for k, v in source.constants.items()}, source.attrs, options)
            result.setdefault(name, set()).add(str(key))
    return result


def test_no_number_of_rows_compiles_a_helper_kernel_anew() -> None:
    known = compile_keys(helper_launches(64))
    assert set(known) == {kernel.__name__ for kernel in HELPERS}
    for N in (1, 33, 4096, 65537):
        assert compile_keys(helper_launches(N)) == known


def test_the_fast_way_to_a_compiled_helper_kernel_knows_any_number_of_rows() -> None:
    def keys(N: int) -> set[tuple[Any, ...]]:
        recorded = helper_launches(N).launches
        return {key(*made) for made in recorded if made[0] in HELPERS}

    assert keys(33) == keys(64) == keys(65537)
    assert of(0.7) == of(0.5)  # a temperature is no constant


def test_a_number_that_needs_64_bits_makes_another_kernel() -> None:
    """Triton types numbers by their value, and its launcher would cut one that does not fit."""
    assert of(2**31) != of(2**31 - 1) == of(1)
    assert len({tuple(of(n, free=False)) for n in (1, 2, 16, 2**31, 2**31 + 1)}) == 5
    assert of(32, free=False) == of(16, free=False)


def test_packed_rows_have_a_stride_that_tma_can_read() -> None:
    seen = []
    x, dy = empty(1, 128, 12).mT.contiguous().mT, empty(1, 128, 24)[:, :, :20]
    rows, ints = empty(128, dtype=torch.int32), empty(2, dtype=torch.int32)
    stream = products.Stream(rows, ints, ints, ints[:1])
    assert products.why_not_token_product(x, dy) is None
    products.token_product(x, dy, stream, None, launch=lambda *args, **options: seen.append(args))
    (product,) = (args for args in seen if args[0] is hopper_product.sum_kernel)
    boxes = [a for a in product if isinstance(a, hopper_pipe.TensorDescriptor)]
    assert boxes and all(box.strides[0] * box.base.element_size() % 16 == 0 for box in boxes)
    assert all(box.strides[0] >= box.shape[1] for box in boxes)


@pytest.mark.parametrize("counted", [None, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_sum_over_tokens_is_rounded_once_by_its_store(dtype: torch.dtype, counted: float | None) -> None:
    gen = torch.Generator().manual_seed(0)
    x, dy = torch.randn(1, 700, 64, generator=gen).to(BF16), torch.randn(1, 700, 48, generator=gen).to(BF16)
    mask = torch.rand(700, generator=gen) < (1.0 if counted is None else counted)
    stream = None if counted is None else tokens.build(700, mask, None, x.device)
    init = torch.randn(1, 48, 64, generator=gen)
    device = Device()
    wide = products.token_product(x, dy, stream, init, device)
    exact = init + (dy[0] * mask[:, None]).float().t() @ x[0].float()
    torch.testing.assert_close(wide, exact, rtol=1e-4, atol=1e-4)
    result = products.token_product(x, dy, stream, init, device, out_dtype=dtype)
    assert result.dtype == dtype and torch.equal(result, wide.to(dtype))
    assert device.launched.count("sum_kernel") == 2  # and nothing after it


def test_a_descriptor_does_not_guess_the_stride_of_several_rows() -> None:
    with pytest.raises(AssertionError, match="12 elements apart"):
        descriptors.descriptor(descriptors.matrix(empty(128, 12)), 64, 64)


def test_sizes_do_not_make_another_kernel_but_dtypes_boxes_and_constants_do() -> None:
    seen = []

    def record(kernel: object, grid: object, *args: object, **options: object) -> None:
        seen.append(key(kernel, args, options))

    def call(M: int, dtype: torch.dtype = BF16, out: torch.dtype = BF16) -> None:
        a, b = empty(1, M, 520, dtype=dtype), empty(1, 4096, 520, dtype=dtype).mT
        products.product(a, b, None, out, launch=record)

    call(4096)
    call(4095)
    call(4096, torch.float16)
    call(4096, out=torch.float32)
    call(16)
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4
