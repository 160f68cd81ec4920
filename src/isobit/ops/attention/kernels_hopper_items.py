"""Items of attention on Hopper: 128 queries of a head with the keys that they see, or 128 keys of a head with
the queries that see them; and which blocks of these 64 rows need.

A producer warp writes an item's metadata to shared memory, and the consumer warpgroups read it there.
"""

from isobit.kernels.hopper.pipeline import ROWS, gl, gluon, record

#: Consumer warpgroups of a program; each has 64 rows of an item.
CONSUMERS = gl.constexpr(2)

#: One number, or a vector, in shared memory; and how a producer warp and a consumer warpgroup hold it.
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PRODUCER_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
CONSUMER_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def like(x, value):
    """`value` with the type, shape and layout of x. A variable that a loop or a branch changes must keep
    them, and neither a constant nor a scalar has those of a vector. The compiler folds the product."""
    return x * 0 + value


# Queries, and the keys that they see


@gluon.jit
def clamped(at, low, high):
    """The integer at this address, clamped to [low, high]: unchecked input."""
    return gl.minimum(gl.maximum(gl.load(at), low), high).to(gl.int32)


@gluon.jit
def packed_piece(cu, tile, length, sequences):
    """(sequence, where it begins, first of its rows or keys in this tile of 128) for packed sequences with
    borders `cu`. Sequence s starts at tile cu[s] // 128 + s. That leaves enough tiles for all sequences
    before it, and some are empty."""
    PER: gl.constexpr = CONSUMERS * ROWS
    sequence = gl.to_tensor(0)
    beyond = sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        begun = clamped(cu + middle, 0, length) // PER + middle <= tile
        sequence = gl.where(begun, middle, sequence)
        beyond = gl.where(begun, beyond, middle)
    first = clamped(cu + sequence, 0, length)
    return sequence, first, gl.maximum(tile - (first // PER + sequence), 0) * PER


@gluon.jit
def write_fields(items, slot, fields):
    """Item metadata, by the producer: eight integers, which `read_field` reads by their place."""
    for i in gl.static_range(8):
        items.index(slot * 8 + i).store(gl.full((1,), 0, gl.int32, PRODUCER_LAYOUT) + fields[i])


@gluon.jit
def read_field(items, slot, WHICH: gl.constexpr):
    return gl.max(items.index(slot * 8 + WHICH).load(CONSUMER_LAYOUT), 0)


@record
class Item:
    """Metadata of 128 queries of a head, and of the keys that some of them see: `blocks` blocks from `begin`
    on, counted from the sequence's first key."""

    blocks: gl.tensor  # -1: there is no more work
    begin: gl.tensor
    keys: gl.tensor  # of the sequence
    position: gl.tensor  # of the first query, among the keys
    live: gl.tensor  # queries from the first to the sequence's last
    row: gl.tensor  # of the first query, in q
    batch: gl.tensor
    head: gl.tensor

    @gluon.jit
    def write(self, items, slot):
        fields = (
            self.blocks, self.begin, self.keys, self.position, self.live, self.row, self.batch, self.head
        )  # fmt: skip
        write_fields(items, slot, fields)


@gluon.jit
def read_item(items, slot):
    """The item in this slot. Fields that a caller does not use are not loaded. So a caller that needs some
    much later reads the item again then: until then they would take registers."""
    return Item(
        read_field(items, slot, 0), read_field(items, slot, 1), read_field(items, slot, 2),
        read_field(items, slot, 3), read_field(items, slot, 4), read_field(items, slot, 5),
        read_field(items, slot, 6), read_field(items, slot, 7),
    )  # fmt: skip


@record
class Problem:
    """A call: where its sequences are, and how it is cut into items."""

    key_start: gl.tensor
    key_end: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    T: gl.tensor
    S: gl.tensor
    sequences: gl.tensor
    window: gl.tensor
    tiles: gl.tensor  # of 128 rows, for all sequences together: queries, or keys in the kernel of dk and dv
    heads: gl.tensor  # of these rows: H, or KV in the kernel of dk and dv
    G: gl.tensor  # query heads that share a head of k and v
    BLOCK: gl.constexpr
    PACKED: gl.constexpr
    STARTS: gl.constexpr
    ENDS: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOWED: gl.constexpr

    @gluon.jit
    def items(self):
        return self.tiles * self.heads

    @gluon.jit
    def key_range(self, sequence):
        """(first, one past the last) of a sequence's keys in k; the second may be smaller."""
        first = gl.to_tensor(0)
        last = self.S
        if self.PACKED:
            first = clamped(self.cu_k + sequence, 0, self.S)
            last = clamped(self.cu_k + sequence + 1, first, self.S)
        if self.STARTS:
            first = clamped(self.key_start + sequence, 0, self.S)
        if self.ENDS:
            last = clamped(self.key_end + sequence, first, self.S)
        return first, last

    @gluon.jit
    def _tile(self, tile):
        """(sequence, its first row in q, its number of rows, first of them in this tile)."""
        if self.PACKED:
            sequence, row, start = packed_piece(self.cu_q, tile, self.T, self.sequences)
            rows = clamped(self.cu_q + sequence + 1, row, self.T) - row
        else:
            # The last queries see most keys: they come first, those of all sequences.
            sequence = tile % self.sequences
            start = (tile // self.sequences) * (CONSUMERS * ROWS)
            row = gl.to_tensor(0)
            rows = self.T
        return sequence, row, rows, start

    @gluon.jit
    def query_item(self, t):
        """(item t, where its sequence's keys begin in k)."""
        head = t % self.heads
        sequence, row, rows, start = self._tile(self.tiles - 1 - t // self.heads)
        first, last = self.key_range(sequence)
        keys = gl.maximum(last - first, 0)
        batch = sequence
        if self.PACKED:
            batch = gl.to_tensor(0)
        position = keys - rows + start
        begin = gl.to_tensor(0)
        end = keys
        if self.CAUSAL:
            newest = keys - rows + gl.minimum(start + CONSUMERS * ROWS, rows)
            end = gl.minimum(gl.maximum(newest, 0), keys)
        if self.WINDOWED:
            begin = gl.maximum(position - self.window + 1, 0) // self.BLOCK * self.BLOCK
        blocks = gl.maximum(gl.cdiv(end - begin, self.BLOCK), 0)
        return Item(blocks, begin, keys, position, rows - start, row + start, batch, head), first


@gluon.jit
def blocks_of_keys(problem, item, here, end):
    """(lo, inner, outer, hi) for 64 queries from position `here` on: they see keys in the blocks from lo to
    hi, and in those from inner to outer all of them see all keys. `end` is where the item's blocks end."""
    BLOCK: gl.constexpr = problem.BLOCK
    lo, hi, outer = item.begin, end, item.keys
    if problem.CAUSAL:
        hi = gl.minimum(end, gl.cdiv(gl.maximum(here + ROWS, 0), BLOCK) * BLOCK)
        outer = gl.minimum(item.keys, gl.maximum(here + 1, 0))
    inner = lo
    if problem.WINDOWED:
        lo = gl.maximum(item.begin, gl.maximum(here - problem.window + 1, 0) // BLOCK * BLOCK)
        lo = gl.minimum(lo, end)
        hi = gl.maximum(hi, lo)
        youngest = gl.maximum(here + ROWS - problem.window, 0)  # the oldest key of the last query
        inner = gl.minimum(gl.maximum(lo, gl.cdiv(youngest, BLOCK) * BLOCK), hi)
    hi = gl.maximum(hi, lo)
    return lo, inner, gl.maximum(inner, gl.minimum(hi, outer // BLOCK * BLOCK)), hi


# Keys, and the queries that see them


@record
class KeyItem:
    """Metadata of 128 keys of a head, and of the queries that see some of them: for each head of the group
    `blocks` blocks of queries, by their positions among the keys, from position `low` on."""

    blocks: gl.tensor  # -1: there is no more work
    low: gl.tensor
    keys: gl.tensor  # of the sequence
    before: gl.tensor  # the position of query 0
    start: gl.tensor  # the first of these keys, counted from the sequence's first
    first: gl.tensor  # the sequence's first key, in k
    batch: gl.tensor
    kv: gl.tensor

    @gluon.jit
    def write(self, items, slot):
        fields = (
            self.blocks, self.low, self.keys, self.before, self.start, self.first, self.batch, self.kv
        )  # fmt: skip
        write_fields(items, slot, fields)


@gluon.jit
def read_key_item(items, slot, WHICH: gl.constexpr):
    """The item in this slot, with the `start` of this consumer's keys; see `read_item`. Fields are read in
    the order in which they are used."""
    blocks, low = read_field(items, slot, 0), read_field(items, slot, 1)
    keys, before = read_field(items, slot, 2), read_field(items, slot, 3)
    start, first = read_field(items, slot, 4) + WHICH * ROWS, read_field(items, slot, 5)
    kv, batch = read_field(items, slot, 7), read_field(items, slot, 6)
    return KeyItem(blocks, low, keys, before, start, first, batch, kv)


@gluon.jit
def key_tile(problem, tile):
    """(sequence, first of its keys in this tile)."""
    if problem.PACKED:
        sequence, _, start = packed_piece(problem.cu_k, tile, problem.S, problem.sequences)
    else:
        # Most queries see the first keys: they come first, those of all sequences. Heads and sequences are
        # neighbours, so that items that read the same queries run at about the same time.
        sequence = tile % problem.sequences
        start = (tile // problem.sequences) * (CONSUMERS * ROWS)
    return sequence, start


@gluon.jit
def key_item(problem, t):
    """(item t, the row of its sequence's query 0 in q)."""
    kv = t % problem.heads
    sequence, start = key_tile(problem, t // problem.heads)
    first, last = problem.key_range(sequence)
    row = gl.to_tensor(0)
    rows = problem.T
    batch = sequence
    if problem.PACKED:
        row = clamped(problem.cu_q + sequence, 0, problem.T)
        rows = clamped(problem.cu_q + sequence + 1, row, problem.T) - row
        batch = gl.to_tensor(0)
    keys = gl.maximum(last - first, 0)
    before = keys - rows
    low, high = before, keys
    if problem.CAUSAL:
        low = gl.maximum(low, start)
    if problem.WINDOWED:
        high = gl.minimum(high, start + CONSUMERS * ROWS - 1 + problem.window)
    low = low & (0 - problem.BLOCK)  # a multiple, also below 0
    blocks = gl.cdiv(gl.maximum(high - low, 0), problem.BLOCK)
    blocks = gl.where((start < keys) & (rows > 0), blocks, 0)
    return KeyItem(blocks, low, keys, before, start, first, batch, kv), row


@gluon.jit
def blocks_of_queries(problem, item, high):
    """(lo, inner, outer, hi) for 64 keys: they are seen by queries in the blocks from lo to hi, and in those
    from inner to outer by all of them. `high` is where the item's blocks end."""
    BLOCK: gl.constexpr = problem.BLOCK
    low, keys, own = item.low, item.keys, item.start
    lo, hi, inner, outer = low, high, item.before, keys
    if problem.CAUSAL:
        lo = gl.maximum(low, own & (0 - BLOCK))
        inner = gl.maximum(item.before, own + ROWS - 1)
    if problem.WINDOWED:
        hi = gl.minimum(hi, (own + ROWS - 1 + problem.window + BLOCK - 1) & (0 - BLOCK))
        outer = gl.minimum(keys, own + problem.window)
    hi = gl.where(own < keys, gl.maximum(hi, lo), lo)
    lo = gl.minimum(lo, high)
    hi = gl.minimum(hi, high)
    inner = gl.minimum(gl.maximum((inner + BLOCK - 1) & (0 - BLOCK), lo), hi)
    return lo, inner, gl.minimum(gl.maximum(outer & (0 - BLOCK), inner), hi), hi


@gluon.jit
def seen_from(problem, own, keys, before, LAYOUT: gl.constexpr):
    """(first, last): the positions of the queries that see each of 64 keys from `own` on, from first to
    before last."""
    key = own + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    first = like(key, before)
    last = like(key, keys)
    if problem.CAUSAL:
        first = gl.maximum(first, key)
    if problem.WINDOWED:
        last = gl.minimum(last, key + problem.window)
    return first, last
