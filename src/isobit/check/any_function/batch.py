"""What a function returned for all of its rows, and the comparison of any other call with that."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.check.any_function.function import Function, RowFunction, Run
from isobit.spec.compare import OutputCheck, differing, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Unsupported

#: Rows that a message names.
NAMED = 4


@dataclass(frozen=True)
class Batch:
    """A function of rows, its call with all of them, and the cotangents of that call. `reduction` is the
    user's function that adds in another order, if there is one."""

    mine: RowFunction
    whole: Run
    cotangents: Mapping[str, Tensor]
    reduction: Function | None = None
    reduction_name: str = ""

    def compare(
        self, what: str, index: Tensor, args: Args | None = None, take: Tensor | None = None
    ) -> list[OutputCheck]:
        """Rows `index` of the whole batch in a call of their own, or at the places `take` of a call with
        these arguments; all other rows of it are padding. Outputs and gradients of rows are compared."""
        mine = self.mine
        args = mine.select(index) if args is None else args
        given = {name: g.index_select(0, index) for name, g in self.cotangents.items()}
        if take is not None:
            total = len(args[mine.rows[0]])
            given = {n: put_rows(g.new_ones(total, *g.shape[1:]), take, g) for n, g in given.items()}
        run = mine.backward(args, given)
        return self.same(what, run, index, mine.graded_rows, take)

    def same(
        self, what: str, run: Run, index: Tensor, graded: tuple[str, ...], take: Tensor | None = None
    ) -> list[OutputCheck]:
        """Rows of a run against those of the whole batch."""

        def of(t: Tensor) -> Tensor:
            return t if take is None else t.index_select(0, take)

        pairs = [(n, of(o), self.whole.outputs[n].index_select(0, index)) for n, o in run.outputs.items()]
        checks = [_rows_alike(f"output {name}", ours, other, what, index) for name, ours, other in pairs]
        for name in graded if run.grads else ():
            ours, other = run.grads[name], self.whole.grads[name]
            if name in self.mine.rows:
                checks.append(
                    _rows_alike(f"gradient:{name}", of(ours), other.index_select(0, index), what, index)
                )
            else:
                checks.append(same_bits(f"gradient:{name}", ours, other, what))
        return checks

    def again(self, what: str, run: Run) -> list[OutputCheck]:
        """The same call once more: everything is compared, gradients that are sums over rows too."""
        return self.same(what, run, self.mine.everyone(), self.mine.graded)


def batch_of(mine: RowFunction, reduction: Function | None, reduction_name: str) -> Batch:
    cotangents = mine.cotangents(mine.forward(mine.inputs).outputs)
    run = mine.backward(mine.inputs, cotangents)
    # Copies: a later call may overwrite what this one returned, and would then be compared with itself.
    whole = Run({n: o.clone() for n, o in run.outputs.items()}, {n: g.clone() for n, g in run.grads.items()})
    return Batch(mine, whole, cotangents, reduction, reduction_name)


def put_rows(t: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """A copy of a tensor with these rows at these places: as integers, since PyTorch does not copy rows of
    all dtypes."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.view(whole).index_copy(0, places, rows.view(whole)).view(t.dtype)


def needs_gpu(batch: Batch) -> None:
    if batch.mine.device.type != "cuda":
        raise Unsupported(f"needs a GPU: these inputs are on {batch.mine.device}")


def _rows_alike(name: str, ours: Tensor, other: Tensor, what: str, index: Tensor) -> OutputCheck:
    """Equal bits; or which rows of the whole batch differ, and by how much."""
    check = same_bits(name, ours, other, what)
    if check.worst_index:
        differ = differing(ours, other).reshape(len(index), -1).any(1)
        rows = torch.sort(index[differ]).values.tolist()
        named = ", ".join(map(str, rows[:NAMED])) + (f" and {len(rows) - NAMED} more" * (len(rows) > NAMED))
        which = f"row{'s' if len(rows) > 1 else ''} {named} of the batch"
        check.message += f"; largest difference {check.max_abs:.3g}, in {which}"
    return check
