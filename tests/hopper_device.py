"""A device in plain PyTorch for the launches of `linear_logp` on Hopper.

It does what each kernel does, on the very memory that the kernel's tensors and TMA descriptors name. What a
kernel writes must not overlap with what it reads, because its programs run in any order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gluon_on_a_cpu import in_order
from isobit.kernels.hopper.lse import COLUMNS
from isobit.kernels.hopper.pipeline import TensorDescriptor, gl
from isobit.kernels.host.token_stream import SEGMENT
from isobit.kernels.host.vocab_shards import Shards

LN2 = math.log(2)
NAN = math.nan
BF16, F16 = torch.bfloat16, torch.float16


# Memory


def span(t: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and one past its last."""
    if t.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def assert_apart(written: Tensor, *read: Tensor) -> None:
    first, end = span(written)
    for t in read:
        its_first, its_end = span(t)
        assert end <= its_first or its_end <= first, f"{list(written.shape)} overlaps {list(t.shape)}"


def strided(t: Tensor, rows: int, columns: int, stride: int, column_stride: int = 1) -> Tensor:
    """The memory that a kernel accesses through a pointer; an error if it is outside the allocation."""
    return torch.as_strided(t, (rows, columns), (stride, column_stride), t.storage_offset())


def described(desc: TensorDescriptor) -> Tensor:
    """The matrix that TMA reads or writes."""
    base, (rows, columns), (stride, column_stride) = desc.base, desc.shape, desc.strides
    assert base.data_ptr() % 16 == 0 and stride * base.element_size() % 16 == 0 and column_stride == 1
    return strided(base, rows, columns, stride)


def operand(desc: TensorDescriptor, by_k: bool) -> Tensor:
    return described(desc) if by_k else described(desc).t()


def loaded(t: Tensor, rows: int, columns: int) -> Tensor:
    """Boxes of a matrix in fp32: TMA fills with zeros outside it."""
    inside = t[:rows, :columns]
    boxes = torch.zeros(rows, columns)
    boxes[: inside.shape[0], : inside.shape[1]] = inside
    return boxes


def stored(t: Tensor, boxes: Tensor) -> None:
    """Boxes to a matrix: TMA writes nothing outside it."""
    t.copy_(boxes[: t.shape[0], : t.shape[1]])


def exp2(x: Tensor) -> Tensor:
    """On x86 that of PyTorch in fp32 depends on the place of an element in its tensor."""
    return x.double().exp2().to(x.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, rounded once: no bit depends on how many rows or columns there are besides an element's own."""
    return (a.double() @ b.double()).float()


def in_words(t: Tensor, stride: int) -> None:
    """What a kernel says of rows that it reads or writes 16 bytes at a time."""
    assert t.data_ptr() % 16 == 0 and stride * t.element_size() % 16 == 0


def biases(t: Tensor, V: int) -> Tensor:
    """The first V of them. A kernel reads words of two."""
    assert t.data_ptr() % (2 * t.element_size()) == 0 and len(t) >= whole(V, 2)
    return t[:V]


def whole(size: int, box: int) -> int:
    return -(-size // box) * box


# What kernels do, each with its arguments by name


def compact_kernel(grid: tuple[int, ...], k: Any) -> None:
    token = k.token_ids.view(-1)
    read = [token]
    live = token != k.ignore_index
    if k.HAS_MASK:
        read.append(k.mask)
        live &= k.mask.view(-1) != 0
    taken = torch.ones_like(live)
    assert grid == (1,) or not (k.PACK or k.LIST), "programs cannot count one another's rows"
    if k.LIST:
        some = torch.nn.functional.pad(live, (0, k.blocks * 128 - k.N)).view(-1, 64).any(1).nonzero()[:, 0]
        assert len(k.listed) == 2 * k.blocks + 2
        k.listed[0] = len(some)
        k.listed[1 : len(some) + 1] = some
        k.listed[len(some) + 1] = 2 * k.blocks
    if k.PACK:
        taken = live & (token >= 0) & (token < k.V)
    scales = torch.full((k.N,), k.scale)
    if k.PER_ROW:
        read.append(k.row_temperature)
        scales /= torch.where(live, k.row_temperature.view(-1), 1.0)
    known = torch.where((token >= 0) & (token < 2**31 - 1), token, -1)
    row = taken.nonzero()[:, 0]
    assert len(token) == k.N <= k.blocks * 128 == len(k.rows) == len(k.ids) == len(k.scales)
    for out, values, hole in (
        (k.rows, row, -1), (k.ids, torch.where(live, known, -2)[row], -2), (k.scales, scales[row], 1.0)
    ):  # fmt: skip
        assert_apart(out, k.count, *read)
        out[: len(row)] = values
        out[len(row) :] = hole
    k.count.fill_(len(row))


def pack_kernel(grid: tuple[int, ...], k: Any) -> None:
    columns = k.columns * k.WORD if k.WHOLE else k.columns
    slots, columns = grid[0] * k.SLOTS, min(grid[1] * k.COLUMNS, columns)
    assert k.WORD * k.out.element_size() == 16
    out = strided(k.out, slots, columns, k.words_out * k.WORD)
    row = k.rows[:slots]
    row_stride = k.stride_row * k.WORD if k.ROW_MAJOR else k.stride_row
    in_words(out, k.words_out * k.WORD)
    if k.ROW_MAJOR:
        assert k.stride_column == 1
        in_words(k.source, row_stride)
    source = strided(k.source, int(row.max()) + 1, columns, row_stride, k.stride_column)
    assert_apart(out, source, row)
    out.zero_()
    out[row >= 0] = source[row[row >= 0].long()]


def weigh_kernel(grid: tuple[int, ...], k: Any) -> None:
    slots = grid[0] * k.BLOCK
    assert slots == k.blocks * 128
    token, row = k.ids[:slots], k.rows[:slots]
    live = (torch.arange(slots) < k.count) & (token >= 0) & (token < k.V)
    none = torch.zeros(slots)

    def of_row(t: Tensor, has: bool = True, first: int = 0, stride: int = 1) -> Tensor:
        if not has:
            return none
        assert_apart(k.weights, t)
        apart = torch.as_strided(t, (first + k.N,), (stride,), t.storage_offset())
        return torch.where(live, apart[torch.where(live, row, 0).long() + first], 0.0)

    scale = torch.where(live, k.scales[:slots], 1.0)
    m = of_row(k.stats) / k.factor
    base = m * scale
    s = torch.where(live, of_row(k.stats, first=k.N), 1.0)
    s *= (m.double() * scale - base).exp2()  # one rounding, as fma
    g = of_row(k.dlogp, k.HAS_LOGP, stride=k.logp_stride)
    b = -of_row(k.dentropy, k.HAS_ENTROPY, stride=k.entropy_stride)
    a = of_row(k.dlse, k.HAS_LSE, stride=k.lse_stride) - g
    a += b * (of_row(k.entropy, k.HAS_ENTROPY) - s.log2() * LN2)
    slope = scale * LN2
    rows_of_weights = (base, a * slope / s, b * LN2 * slope / s, g * slope)
    for out, values in zip(strided(k.weights, 4, slots, slots), rows_of_weights, strict=True):
        out[:] = torch.where(live, values, 0.0)
    assert_apart(k.counts, k.count)
    for i in range(-(-slots // k.height)):
        k.counts[i] = min(max(int(k.count) - i * k.height, 0), k.height)


def forward_kernel(grid: tuple[int, ...], k: Any) -> None:
    count, K = int(k.count), k.steps * k.STEP
    tiles = whole(k.V, COLUMNS) // COLUMNS
    splits = min(k.SPLITS, tiles)
    bounds = [(i * tiles // splits * COLUMNS, (i + 1) * tiles // splits * COLUMNS) for i in range(splits)]
    if k.SHARDED:
        cut = Shards(k.V, 8 * k.shard_columns, 0, k.shards)
        splits, bounds = cut.splits, cut.split_bounds()
    # Every tile has as many parts of 64 rows as consumers: the last may have one too many.
    tall = whole(64 * int(k.listed[0]) if k.LISTED else count, 64 * k.CONSUMERS) // 64
    parts = k.listed[1 : tall + 1].tolist() if k.LISTED else range(tall)
    hidden, weight = described(k.a_desc), loaded(described(k.b_desc), tiles * COLUMNS, K)
    assert grid[0] >= 1 and k.partial.shape == (splits, 3, k.capacity)
    assert not (k.STORE_PROBS and k.LISTED) and (k.STORE_PROBS or not k.QUEUED)
    for part in parts:
        own = slice(64 * part, max(64 * part, min(64 * part + 64, count)))
        z = (loaded(hidden[own], 64, K) @ weight.t())[: own.stop - own.start, : k.V]
        if k.HAS_BIAS:
            z += biases(k.bias, k.V)
        if k.ROUND is not None:
            z = z.to({gl.bfloat16: BF16, gl.float16: F16}[k.ROUND]).float()
        token, scale = k.ids[own, None], k.scales[own, None]
        if k.STORE_PROBS:
            store_probs(k, z, scale, part * 64, tiles)
        for split, (first, end) in enumerate(bounds):
            columns = slice(first, end)
            part = z[:, columns]
            if part.shape[1] == 0:
                if not k.SHARE_SPLITS:
                    k.partial[split, :, own] = torch.tensor([-math.inf, 0.0, 0.0])[:, None]
                continue
            m = part.amax(1, keepdim=True)
            u = (part - m) * scale
            for i, sums in enumerate((m, exp2(u).sum(1), (exp2(u) * u.clamp(min=-1000)).sum(1))):
                k.partial[split, i, own] = sums.view(-1)
            result = (token >= columns.start) & (token < columns.start + part.shape[1])
            at = part.gather(1, torch.where(result, token - columns.start, 0).long())
            k.picked[own] = torch.where(result, at, k.picked[own, None])[:, 0]


def store_probs(k: Any, z: Tensor, scale: Tensor, slot: int, tiles: int) -> None:
    """What 64 slots store: each lane's e in a tile, and the maximum to which it is relative. Rows of the part
    that are not slots are written as well."""
    lanes = torch.nn.functional.pad(z, (0, tiles * COLUMNS - z.shape[1]), value=-math.inf)
    lanes = lanes.view(-1, tiles, 32, 4, 2)
    m = lanes.amax((2, 4))
    m[m == -math.inf] = 0.0
    e = torch.full((64, tiles * COLUMNS), NAN)
    e[: len(z)] = exp2((lanes - m[:, :, None, :, None]) * scale.view(-1, 1, 1, 1, 1)).flatten(1)
    probs = described(k.probs_desc)
    assert k.probs_base.shape[1:] == (tiles, 4) and probs.shape[1] == tiles * COLUMNS
    k.probs_base[slot : slot + len(z)] = m
    row = slot + queued_before(k)
    stored(probs[row : row + 64], e)


def queued_before(k: Any) -> int:
    """Rows in front of a kernel's own."""
    return int(k.queued) if k.QUEUED else 0


def merge_kernel(grid: tuple[int, ...], k: Any) -> None:
    assert grid[0] * k.BLOCK == k.blocks * 128
    slots = int(k.count)
    row, token, scale = k.rows[:slots].long(), k.ids[:slots], k.scales[:slots]
    live = token != -2
    m, s, t = torch.where(live, k.partial[: k.splits, :, :slots], 0.0).transpose(0, 1)
    top = m.amax(0)
    d = (m - top) * scale
    s, t = (exp2(d) * s).sum(0), (exp2(d) * (t + d * s)).sum(0)
    bad = torch.where((token >= 0) & (token < k.V), 0.0, NAN)
    log2_s = s.log2()
    outputs = (
        (k.logp, True, ((k.picked[:slots] - top) * scale - log2_s) * LN2 + bad, 0.0),
        (k.entropy, k.ENTROPY, (log2_s - t / s) * LN2 + bad, 0.0),
        (k.lse, k.LSE, (top * scale + log2_s) * LN2 + bad, 0.0),
        (k.stats.view(-1), k.STATS, top * k.factor, 0.0),
        (k.stats.view(-1)[k.N :], k.STATS, s, 1.0),
    )
    for out, wanted, values, blank in outputs:
        if wanted:
            assert_apart(out, k.partial, k.picked)
            out.view(-1)[row] = torch.where(live, values, blank)
    if k.PACKED:
        blank, value = without_slot(k, k.N)
        for out, wanted in ((k.logp, True), (k.entropy, k.ENTROPY), (k.lse, k.LSE)):
            if wanted:
                out.view(-1)[blank] = value[blank]
        if k.STATS:
            k.stats.view(2, -1)[:, blank] = 0.0


def slab_kernel(grid: tuple[int, ...], k: Any) -> None:
    count, K = int(k.count), k.steps * k.STEP
    rows, columns = whole(count, 128), whole(k.V, COLUMNS)
    hidden, weight, out = map(described, (k.a_desc, k.b_desc, k.out_desc))
    out = out[queued_before(k) :]
    ids, scales = k.ids[:rows, None], k.scales[:rows, None]
    assert len(ids) == rows and grid[0] >= 1
    weights = strided(k.weights, 4, rows, k.capacity)
    assert_apart(out, hidden[:rows, :K], weight[:columns, :K], ids, scales, weights)
    z = product(loaded(hidden, rows, K), loaded(weight, columns, K).t())
    if k.HAS_BIAS:
        assert_apart(out, k.bias)
        z[:, : k.V] += biases(k.bias, k.first + k.V)[k.first :]
    if k.ROUND is not None:
        z = z.to({gl.bfloat16: BF16, gl.float16: F16}[k.ROUND]).float()
    base, a, b, g = weights[:, :, None]
    u = z * scales - base
    dz = exp2(u) * (u.clamp(min=-1000.0) * b + a if k.ENTROPY else a)
    dz = torch.where(torch.arange(columns) + k.first == ids, dz + g, dz)
    dz[count:] = 0.0
    stored(out[:rows], dz)


def from_probs_kernel(grid: tuple[int, ...], k: Any) -> None:
    slots, width = grid[0], min(grid[1] * k.TILES, k.width) * COLUMNS
    there = torch.arange(slots)[:, None] < k.count
    first, own = k.first * COLUMNS, slice(queued_before(k), queued_before(k) + slots)
    for t, stride in ((k.out, k.stride * COLUMNS), (k.probs, k.tiles * COLUMNS), (k.probs_base, 4)):
        in_words(t, stride)
    out = strided(k.out, own.stop, width, k.stride * COLUMNS)[own]
    probs = k.probs.view(-1, k.tiles * COLUMNS)[own, first : first + width]
    of_tiles = k.probs_base.view(-1, k.tiles, 4)[:slots]
    weights = strided(k.weights, 4, slots, k.capacity)
    assert first + width <= k.tiles * COLUMNS == k.probs.shape[1] and len(probs) == len(of_tiles) == slots
    if (out.data_ptr(), out.stride()) != (probs.data_ptr(), probs.stride()):  # unless in place
        assert_apart(out, probs)
    assert_apart(out, of_tiles, k.ids, k.scales, weights)
    column = first + torch.arange(width)
    base, a, _, g = weights[:, :, None]
    moved = exp2(of_tiles[:, column // COLUMNS, column % 8 // 2] * k.scales[:, None] - base)
    e = torch.where(there, probs.float(), 0.0)
    dz = torch.where(e == 0.0, 0.0, e * moved) * a
    out.copy_(torch.where(column == k.ids[:, None], dz + g, dz))


def sum_kernel(grid: tuple[int, ...], k: Any) -> None:
    assert grid[0] >= 1
    assert k.STAGED, "rows of dhidden and dW are multiples of 16 bytes"
    M, K = int(k.M), whole(int(k.K), k.STEP)
    if k.HAS_BLOCKS:
        last = int(k.count) - 1
        K = int(k.first[last]) + 64 * int(k.blocks[last]) if last >= 0 else 0
    rows, columns = whole(M, 64 * k.CONSUMERS), whole(k.N, k.COLUMNS)
    a, b = operand(k.a_desc, k.A_BY_K), operand(k.b_desc, k.B_BY_K)
    out = described(k.out_desc)[:rows]
    assert_apart(out, a[:rows, :K], b[:columns, :K])
    total = torch.zeros(rows, columns)
    if k.HAS_INIT:
        if k.init.data_ptr() != k.out.data_ptr():  # a program may read what it will write itself
            assert_apart(out, k.init)
        if k.STAGED_INIT and k.COUNTED_K and K == 0:
            assert k.init.data_ptr() == k.out.data_ptr(), "what is not written must be there"
            return
        if k.STAGED_INIT:
            assert K > 0, "it is taken after the first segment"
            total = loaded(described(k.init_desc), rows, columns)
        else:
            total[:M, : k.N] = strided(k.init, M, k.N, k.ld)
    left, right = loaded(a, rows, K), loaded(b, columns, K)
    for first in range(0, K, SEGMENT):
        part = slice(first, first + SEGMENT)
        total = total + product(left[:, part], right[:, part].t())
    if k.SCALED:
        assert_apart(out, k.factor)
        assert k.factor.numel() == 1 and k.factor.dtype == torch.float32
        total = total * k.factor
    stored(out, total)


def bias_kernel(grid: tuple[int, ...], k: Any) -> None:
    columns = min(grid[0] * k.BLOCK, k.columns)
    in_words(k.dz, k.stride * COLUMNS)
    strided(k.dz, int(k.count), grid[0] * k.BLOCK, k.stride * COLUMNS)  # what is read, in whole blocks
    dz = strided(k.dz, int(k.count), columns, k.stride * COLUMNS)
    assert_apart(k.dbias, dz)
    total = k.dbias[:columns].clone() if k.ACCUMULATE else torch.zeros(columns)
    for rows in dz.split(16):
        total = total + rows.double().sum(0).float()
    k.dbias[:columns] = total


def take_kernel(grid: tuple[int, ...], k: Any) -> None:
    slots, columns = grid[0] * k.SLOTS, k.words * 8
    assert slots == k.blocks * 128 + 64 and grid[1] * k.COLUMNS >= columns and len(k.rows) == k.blocks * 128
    in_words(k.out, columns)
    in_words(k.source, k.stride_words * 8)
    row = torch.nn.functional.pad(k.rows, (0, 64), value=-1)
    own = slice(int(k.queued), int(k.queued) + slots)
    out, numbers = strided(k.out, own.stop, columns, columns)[own], k.out_rows[own]
    source = strided(k.source, int(row.max()) + 1, columns, k.stride_words * 8)
    assert_apart(out, source, k.rows)
    assert_apart(numbers, k.rows)
    assert len(numbers) == slots
    out.zero_()
    out[row >= 0] = source[row[row >= 0].long()]
    numbers.copy_(torch.where(row >= 0, row + k.first_row, -1))
    assert_apart(k.counts, k.queued, k.count)
    total = int(k.queued) + int(k.count)
    rows_taken = total // k.SEGMENT * k.SEGMENT if k.WAIT else total
    k.counts.copy_(torch.tensor([total, rows_taken, total - rows_taken, 0]))


def move_kernel(grid: tuple[int, ...], k: Any) -> None:
    count, first, columns = int(k.count), int(k.first), k.words * 8
    assert count <= grid[0] * k.ROWS and columns <= grid[1] * k.COLUMNS
    out = strided(k.out, count, columns, k.out_words * 8)
    source = strided(k.source, first + count, columns, k.source_words * 8)[first:]
    for t, words in ((k.out, k.out_words), (k.source, k.source_words)):
        in_words(t, words * 8)
    if out.data_ptr() != source.data_ptr():
        assert_apart(out, source)
    out.copy_(source)
    if k.TABLE:
        assert first == 0 or first >= count
        k.table[:count] = k.table[first : first + count].clone()


def clear_kernel(grid: tuple[int, ...], k: Any) -> None:
    columns, first = k.words * 8, int(k.count)
    assert grid[0] * k.COLUMNS >= columns
    strided(k.out, first + k.ROWS, columns, columns)[first:] = 0.0


def round_kernel(grid: tuple[int, ...], k: Any) -> None:
    size = k.size * (8 if k.WHOLE else 1)
    assert grid[0] * k.BLOCK >= size == k.sums.numel() == k.out.numel()
    assert_apart(k.out, k.sums, k.factor)
    k.out.view(-1).copy_((k.sums.view(-1) * k.factor).to(k.out.dtype))


def unpack_kernel(grid: tuple[int, ...], k: Any) -> None:
    slots, columns = min(grid[0] * k.SLOTS, int(k.count)), min(grid[1] * k.COLUMNS, k.words * 8)
    row, token = k.rows[:slots].long(), k.ids[:slots, None]
    assert len(row) == slots and bool((row >= 0).all())
    for t in (k.source, k.out):
        in_words(t, k.words * 8)
    values = strided(k.source, slots, columns, k.words * 8)
    assert_apart(k.out, values, k.rows, k.ids)
    known = (token >= 0) & (token < k.V)
    values = torch.where(known, values, torch.where(token == -2, 0.0, NAN))
    k.out.view(-1, k.words * 8)[row, :columns] = values.to(k.out.dtype)


def without_slot(k: Any, N: int) -> tuple[Tensor, Tensor]:
    """(which of the first N rows have no slot, what their results are)."""
    token = k.token_ids.view(-1)[:N]
    live = token != k.ignore_index
    if k.HAS_MASK:
        live &= k.mask.view(-1)[:N] != 0
    return ~live | (token < 0) | (token >= k.V), torch.where(live, NAN, 0.0)


def blank_kernel(grid: tuple[int, ...], k: Any) -> None:
    N, columns = min(grid[0] * k.ROWS, k.N), min(grid[1] * k.COLUMNS, k.words * 8)
    in_words(k.out, k.words * 8)
    out = strided(k.out, N, columns, k.words * 8)
    assert_apart(out, k.token_ids)
    blank, value = without_slot(k, N)
    out[blank] = value[blank, None].to(out.dtype)


def zero_kernel(grid: tuple[int, ...], k: Any) -> None:
    assert grid[0] * k.BLOCK >= k.size
    k.out.view(-1)[: k.size] = 0


def here_kernel(grid: tuple[int, ...], k: Any) -> None:
    assert grid[0] * k.BLOCK >= k.size
    assert_apart(k.out, k.ids)
    here = (k.ids >= k.first) & (k.ids < k.first + k.columns)
    k.out[:] = torch.where(here, k.ids - k.first, k.ids.clamp(-2, -1))


def empty_kernel(grid: tuple[int, ...], k: Any) -> None:
    assert grid[0] * k.BLOCK >= k.size == k.states.numel() and k.states.is_contiguous()
    k.states.view(-1, 3, k.capacity)[:] = torch.tensor([-math.inf, 0.0, 0.0])[None, :, None]


def fold_slice(grid: tuple[int, ...], k: Any) -> None:
    """In place, if the first part is the result: an element is read before it is written."""
    assert grid[0] * k.BLOCK >= k.count and k.PARTS == 2 and k.bias is None
    one, other = strided(k.parts, 2, k.count, k.stride)
    k.out.view(-1)[:] = one + other


def ones_kernel(grid: tuple[int, ...], k: Any) -> None:
    assert grid[0] * k.BLOCK >= k.count
    strided(k.out, k.count, 1, k.STEP).fill_(1.0)


MEANINGS: dict[str, Callable[[tuple[int, ...], Any], None]] = {
    meaning.__name__: meaning
    for meaning in (
        compact_kernel, pack_kernel, forward_kernel, merge_kernel, weigh_kernel, slab_kernel,
        from_probs_kernel, sum_kernel, bias_kernel, unpack_kernel, blank_kernel, zero_kernel, ones_kernel,
        take_kernel, move_kernel, clear_kernel, round_kernel, here_kernel, empty_kernel, fold_slice,
    )
}  # fmt: skip


@dataclass
class Device:
    """A `launch` that executes, one launch after the other."""

    launched: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)  # of the last launch of each kernel

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        named = SimpleNamespace(**dict(zip(kernel.arg_names, in_order(kernel, args, options), strict=True)))
        MEANINGS[kernel.__name__](grid, named)
        self.launched.append(kernel.__name__)
        self.arguments[kernel.__name__] = named
