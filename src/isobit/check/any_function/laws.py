"""What is changed about a call, and what must stay the same: laws that need to know nothing about a function
but which of its arguments have rows.

Whether its numbers are right is not judged here: there is no formula to compare them with.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.check.any_function.batch import Batch, needs_gpu, put_rows
from isobit.check.any_function.controls import another_order, depends_on_its_rows, how_far
from isobit.check.any_function.function import Run
from isobit.check.any_function.traced import captured, compiled
from isobit.check.laws import bits
from isobit.spec.compare import OutputCheck, differing, failure, passed, same_bits
from isobit.spec.inputs import INF, NAN, laid_out
from isobit.spec.proof import Args
from isobit.spec.trial import LawBroken, Unsupported, cloned

#: Strides and alignments of row arguments.
LAYOUTS = ("padded", "offset", "inside", "strided", "transposed")

#: So many rows are each computed alone.
ALONE = 16


# The same call


def repeated(batch: Batch) -> list[OutputCheck]:
    """The same call gives the same bits, with autograd and without, and no two calls return the same
    memory: the later one would overwrite what the earlier one returned."""
    mine = batch.mine
    # Copies, because a backward may return what it was given.
    again = [mine.backward(mine.inputs, cloned(dict(batch.cotangents))) for _ in range(3)]
    plain = [mine.forward(mine.inputs) for _ in range(3)]
    runs = [*again, *plain]
    tensors = {f"output {name}": [run.outputs[name] for run in runs] for name in mine.outputs}
    tensors |= {f"gradient of {name}": [run.grads[name] for run in again] for name in mine.graded}
    for name, each in tensors.items():
        places = [t.untyped_storage().data_ptr() for t in each if t.numel()]
        if len(set(places)) < len(places):
            raise LawBroken(
                f"{name} of two calls is the same memory: the later call overwrites what the earlier returned"
            )
    named = [("another call", run) for run in again] + [("without autograd", run) for run in plain]
    return [check for what, run in named for check in batch.again(what, run)]


def other_contents(batch: Batch) -> list[OutputCheck]:
    """A call reads what its tensors hold now, and leaves alone what an earlier call returned. The rows are
    moved by one in place, and the function is called with the same tensors again, four times: a buffer may
    be one of several."""
    mine, held = batch.mine, cloned(batch.mine.inputs)
    moved = mine.select(mine.everyone().roll(1))
    with torch.no_grad():
        before = mine.call(held)
        kept = {name: o.clone() for name, o in before.items()}
        memory = {v.untyped_storage().data_ptr() for v in held.values() if isinstance(v, Tensor)}
        for name in mine.rows:
            held[name].copy_(moved[name])
        after, *_ = [mine.call(held) for _ in range(4)]
    fresh, what = mine.forward(moved).outputs, "in tensors that held other rows before"
    checks = [same_bits(f"output {name}", o, fresh[name], what) for name, o in after.items()]
    for name, output in before.items():
        if output.untyped_storage().data_ptr() not in memory:  # a view of its input changes with that
            said = "an earlier result after another call"
            checks.append(same_bits(f"output {name}", output, kept[name], said))
    return checks


def own_thread(batch: Batch) -> list[OutputCheck]:
    """The first call of another thread. On a CPU it gets as many threads as this one, because sums of PyTorch
    depend on their number."""
    args = cloned(batch.mine.inputs)
    with ThreadPoolExecutor(
        1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as thread:
        outputs = thread.submit(batch.mine.call, args).result()
    return batch.again("in a thread of its own", Run({n: o.detach() for n, o in outputs.items()}))


def two_streams(batch: Batch) -> list[OutputCheck]:
    """Many calls on two streams at once have the bits of one alone."""
    mine = batch.mine
    needs_gpu(batch)
    if bits.CALLS * sum(o.nbytes for o in batch.whole.outputs.values()) > bits.HELD_BYTES:
        raise Unsupported(f"{bits.CALLS} results would take more than {bits.HELD_BYTES >> 20} MB")
    with torch.no_grad():
        runs = bits.calls_on_two_streams(lambda: mine.call(mine.inputs), mine.device)
    wrong = [run for run in runs if any(_differ(o, batch.whole.outputs[n]) for n, o in run.items())]
    what = f"{len(wrong)} of {bits.CALLS} calls on two streams"
    return batch.again(what, Run((wrong or runs)[-1]))


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or bool(differing(one, other).any())


def filled_memory(batch: Batch) -> list[OutputCheck]:
    """Every element is written: memory that is pre-filled with NaN changes nothing. The other run is in
    PyTorch's deterministic mode too, which may choose other kernels."""
    mine = batch.mine
    deterministic: Any = torch.utils.deterministic
    with bits.poisoned_memory():
        filled = mine.backward(mine.inputs, batch.cotangents)
        deterministic.fill_uninitialized_memory = False
        clean = mine.backward(mine.inputs, batch.cotangents)
    what = "with NaN-filled memory"
    checks = [same_bits(f"output {name}", o, clean.outputs[name], what) for name, o in filled.outputs.items()]
    return checks + [same_bits(f"gradient:{n}", g, clean.grads[n], what) for n, g in filled.grads.items()]


# Other rows next to a row


def rows_alone(batch: Batch) -> list[OutputCheck]:
    """Each row in a call of its own; of many rows some, the first and the last among them."""
    N = batch.mine.count
    chosen = sorted({round(i * (N - 1) / (min(N, ALONE) - 1)) for i in range(min(N, ALONE))})
    everyone = batch.mine.everyone()
    return [check for i in chosen for check in batch.compare(f"row {i} alone", everyone[i : i + 1])]


def some_rows(batch: Batch) -> list[OutputCheck]:
    """Some of the rows, chosen at random: other numbers of rows, as a kernel may choose its tiles by them."""
    N, gen = batch.mine.count, torch.Generator().manual_seed(7)
    sizes = {2, 3, 7, N // 2, N - 1, *(2**k for k in range(4, N.bit_length()))}
    checks = []
    for size in sorted(n for n in sizes if 1 < n < N):
        index = torch.randperm(N, generator=gen)[:size].to(batch.mine.device)
        checks += batch.compare(f"{size} of {N} rows", index)
    if not checks:
        raise Unsupported("of two rows there are none between one and all")
    return checks


def permuted(batch: Batch) -> list[OutputCheck]:
    """All rows in other places."""
    N = batch.mine.count
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(7)).to(batch.mine.device)
    orders = {"rows reversed": batch.mine.everyone().flip(0), "rows permuted": shuffled}
    return [check for what, index in orders.items() for check in batch.compare(what, index)]


def chunked(batch: Batch) -> list[OutputCheck]:
    """The batch in several calls, as in chunked prefill or micro-batches."""
    N, everyone = batch.mine.count, batch.mine.everyone()
    cuts = sorted({0, max(1, N // 3), N // 2 + 1, N})
    return [
        check
        for first, end in pairwise(cuts)
        for check in batch.compare(f"chunk [{first}, {end})", everyone[first:end])
    ]


def padded_around(batch: Batch) -> list[OutputCheck]:
    """Rows of NaN and infinities before and behind. Integers, which have none, are those of other rows."""
    mine = batch.mine
    N, everyone = mine.count, mine.everyone()
    checks = []
    for front, behind in ((2, 1), (0, N + 1)):
        index = torch.cat([everyone[:1].expand(front), everyone, everyone[:1].expand(behind)])
        take = everyone + front
        args = _with_nan(batch, mine.select(index), keep=take)
        checks += batch.compare(f"{front} NaN rows before, {behind} behind", everyone, args, take)
    return checks


def padded_among(batch: Batch) -> list[OutputCheck]:
    """Every other row becomes NaN or infinite, first those with odd numbers, then the others."""
    mine, checks = batch.mine, []
    if not any(mine.inputs[name].is_floating_point() for name in mine.rows):
        raise Unsupported("no row argument is floating point: a row cannot be NaN")
    for first in (0, 1):
        keep = mine.everyone()[first::2]
        args = _with_nan(batch, mine.inputs, keep)
        checks += batch.compare("NaN in place of every other row", keep, args, take=keep)
    return checks


def _with_nan(batch: Batch, args: Args, keep: Tensor) -> Args:
    """NaN, infinity and minus infinity in turn, everywhere but in the rows to keep."""
    result = dict(args)
    for name in batch.mine.rows:
        t: Tensor = args[name]
        if t.is_floating_point():
            other = t.new_full(t.shape, NAN)
            other[1::3], other[2::3] = INF, -INF
            result[name] = put_rows(other, keep, t.index_select(0, keep))
    return result


# Other memory


def strides(batch: Batch, layout: str) -> list[OutputCheck]:
    """The same rows with other strides or another alignment. A function may refuse them by any exception:
    that is no wrong result, and the report says so. Its backward may not."""
    mine = batch.mine
    args = mine.inputs | _laid_out({name: mine.inputs[name] for name in mine.rows}, layout)
    if all(args[name] is mine.inputs[name] for name in mine.rows):
        raise Unsupported("no row argument has a second dimension")
    try:
        mine.forward(args)
    except (LawBroken, Unsupported):
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or "no message"
        raise Unsupported(f"it refuses these strides: {type(error).__name__}: {said}") from error
    return batch.compare(f"layout {layout}", mine.everyone(), args)


def incoming_gradients(batch: Batch) -> list[OutputCheck]:
    """Gradients that arrive expanded, as from `output.sum().backward()`, or with gaps, give the same bits.
    Transposed ones give nearly the same numbers: PyTorch's own backwards add in another order there."""
    mine = batch.mine
    if not mine.graded_rows:
        raise Unsupported(mine.forward_only or "no row argument has a gradient")
    ones = {name: torch.ones_like(g) for name, g in batch.cotangents.items()}
    expanded = {name: g.new_ones(()).expand(g.shape) for name, g in ones.items()}
    tried = [("expanded", expanded, mine.backward(mine.inputs, ones))]
    for layout in ("padded", "strided", "transposed"):
        tried.append((layout, _laid_out(dict(batch.cotangents), layout), batch.whole))
    checks = []
    for layout, given, expected in tried:
        grads = mine.backward(mine.inputs, given).grads
        for name in mine.graded_rows:
            what, alike = f"gradient:{name}", (grads[name], expected.grads[name])
            if layout == "transposed":
                far = how_far(*alike)
                checks.append(failure(what, f"incoming gradient {layout}: {far}") if far else passed(what))
            else:
                checks.append(same_bits(what, *alike, f"incoming gradient {layout}"))
    return checks


def _laid_out(tensors: Args, layout: str) -> Args:
    """Those with enough dimensions in another layout."""
    return {n: laid_out(t, layout) if t.ndim > (layout == "transposed") else t for n, t in tensors.items()}


# All of them


@dataclass(frozen=True)
class Change:
    """One cell: a law of the checker, and what is changed about the call."""

    law: str
    case: str
    run: Callable[[Batch], list[OutputCheck]]


def _changes() -> Iterator[tuple[str, str, Any]]:
    yield "repeatable", "repeated calls", repeated
    yield "repeatable", "other contents", other_contents
    yield "repeatable", "another thread", own_thread
    yield "repeatable", "two streams", two_streams
    yield "written", "NaN-filled memory", filled_memory
    yield "invariant", "depends on its rows", depends_on_its_rows
    yield "invariant", "another order", another_order
    yield "invariant", "rows alone", rows_alone
    yield "invariant", "some rows", some_rows
    yield "invariant", "rows permuted", permuted
    yield "invariant", "chunks", chunked
    yield "invariant", "NaN rows around", padded_around
    yield "invariant", "NaN rows among", padded_among
    for layout in LAYOUTS:
        yield "invariant", f"strides {layout}", partial(strides, layout=layout)
    yield "invariant", "incoming gradients", incoming_gradients
    yield "traceable", "torch.compile", compiled
    yield "traceable", "CUDA graph", captured  # last: a capture that fails may leave the GPU unusable


#: In the order in which they run.
CHANGES = tuple(Change(*each) for each in _changes())

#: Cases with another number of rows.
OTHER_BATCHES = ("rows alone", "some rows", "chunks", "NaN rows around")
