"""`linear_logp` with a vocabulary that ranks share: the model against the page, portable kernels of ranks in
turn, and calls that must be refused on every rank. `test_parallel.py` has processes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isobit
from interpreted import in_interpreter
from isobit import ContractError
from isobit.kernels.host import lse_model
from isobit.kernels.host.vocab_shards import Shards
from isobit.ranks import in_turn
from ranks_vocabulary import OF_HEAD, P, V, same, tensors
from vocab_parallel_rivals import megatron

PAGE = Path(__file__).parents[1] / "docs" / "numerics" / "lse_8x4.md"


def assert_same(found: list[list[torch.Tensor]], whole: list[torch.Tensor]) -> None:
    ranks = len(found)
    assert all(same(each, whole, OF_HEAD, rank, ranks) for rank, each in enumerate(found))


# The class


def test_the_model_has_the_bits_that_the_page_prints() -> None:
    (text,) = (
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "def split_bounds" in b
    )
    page: dict[str, Any] = {}
    exec(text, page)
    z = torch.randn(3, V, generator=torch.Generator().manual_seed(0)).numpy() * 4
    c = np.full(3, 1.25, np.float32)
    sums = lse_model.merge(lse_model.split_states(z, c, Shards(V, P)), c)
    with np.errstate(all="ignore"):
        exact = np.array([page["row_sums"](row, c[0], P, lse_model.CPU.fma, np.exp2) for row in z])
    for ours, theirs in zip((sums.m, sums.s, sums.t), exact.T, strict=True):
        assert (ours.view(np.int32) == theirs.astype(np.float32).view(np.int32)).all()
    other = lse_model.merge(lse_model.split_states(z, c, Shards(V, P + 256)), c)
    assert (sums.s != other.s).any()


def test_bounds_of_splits_cover_the_tokens_once() -> None:
    for size, padded in ((1, 64), (500, 640), (2304, 2304), (50257, 50304), (151936, 152576)):
        whole = Shards(size, padded)
        columns = [c for first, end in whole.split_bounds() for c in (first, end) if first < end]
        assert columns[0] == 0 and columns[-1] == size and columns[1:-1:2] == columns[2:-1:2]
        assert len(whole.split_bounds()) == 32
        for ranks in (2, 4, 8):
            own = [Shards(size, padded, r * 8 // ranks, 8 // ranks) for r in range(ranks)]
            moved = [(a + o.column, b + o.column) for o in own for a, b in o.split_bounds() if a < b]
            assert moved == [(a, b) for a, b in whole.split_bounds() if a < b]


MEMORY = """
import torch
import isobit
from isobit.check.laws.system import peak_extra_bytes
from isobit.ranks import Group

class OneOf(Group):
    # A rank whose others send what it sends: the bits are wrong, and the bytes are right.
    rank = 0
    def __init__(self, size): self.size = size
    def all_gather(self, t): return torch.stack([t] * self.size)
    def all_to_all(self, t): return t.clone()
    def __hash__(self): return id(self)
    def __eq__(self, other): return self is other

torch.set_num_threads(1)
N, D, COLUMNS = 32, 1024, 256
for ranks in (2, 8):
    V = ranks * COLUMNS
    gen = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=gen).bfloat16().requires_grad_()
    weight = torch.randn(COLUMNS, D, generator=gen).bfloat16().requires_grad_()
    group, ids = OneOf(ranks), torch.arange(N)

    def call():
        logp = isobit.linear_logp(hidden, weight, ids, vocab_size=V, group=group, backend="triton-8x4")
        return torch.autograd.grad(logp.sum(), (hidden, weight))

    print(peak_extra_bytes(call, torch.device("cpu")))
"""


def test_a_rank_has_memory_for_its_own_shard_only() -> None:
    """Beyond results: sums of dhidden in fp32 that wait in the tree, as many as its shards need, one more and
    what is sent of it in 16 bits while they are exchanged; the states of all ranks; some small things.
    Nothing is as large as the weight of all ranks, or as their logits."""
    N, D, columns, states = 32, 1024, 256, 4 * (96 + 8) * 128
    found = map(int, in_interpreter(MEMORY).split())
    for ranks, bytes_ in zip((2, 8), found, strict=True):
        waiting = (8 // ranks).bit_length()
        allowed = 4 * N * D * (waiting + 1.75) + 2 * states + 16 * 1024
        assert 4 * N * D * waiting < bytes_ < allowed
    assert allowed < 2 * ranks * columns * D / 4  # of the last: the whole weight would be beyond it


def test_megatrons_formula_is_hardly_closer_to_the_truth() -> None:
    """From the same fp32 logits, on 2 and 8 ranks. In fp32, errors are of the size of one rounding."""
    args = tensors()
    live = args["token_ids"] >= 0
    ids = args["token_ids"][live]
    ours = isobit.linear_logp(**args, vocab_size=V, padded_vocab=P)[live]
    z = args["hidden"][live].double() @ args["weight"][:V].double().t() + args["bias"][:V]
    exact = z.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    for ranks in (2, 8):
        theirs = megatron([*z.float().tensor_split(ranks, 1)], ids)
        rounding = torch.finfo(torch.float32).eps * exact.abs()
        assert ((ours - exact).abs() <= 2 * (theirs - exact).abs().max() + rounding).all()
        assert ((theirs - exact).abs() <= 8 * rounding).all()  # it is the same quantity


# Ranks


IN_TURN = """
import sys; import torch
from isobit.ranks import in_turn
from ranks_vocabulary import of_head
from test_linear_logp_ranks import assert_same
torch.set_num_threads(1)
whole = of_head(0, 1, backend="triton-8x4")
assert_same(in_turn(4, lambda g: of_head(g.rank, 4, group=g, backend="triton-8x4")), whole)
print("equal")
"""


def test_portable_kernels_have_the_same_bits_on_ranks() -> None:
    """In the interpreter, whose products are numpy's: of equal tiles, in an equal order."""
    assert in_interpreter(IN_TURN).strip() == "equal"


# Refused


def refused(message: str, ranks: int = 2, **options: Any) -> None:
    def call(group: Any) -> None:
        args = tensors()
        rows = slice(group.rank * P // ranks, (group.rank + 1) * P // ranks)
        args |= {name: args[name][rows] for name in ("weight", "bias")}
        given = {"vocab_size": V, "padded_vocab": P, "group": group}
        changed = {name: change(args) if callable(change) else change for name, change in options.items()}
        isobit.linear_logp(**args | given | changed)

    with pytest.raises(ContractError, match=message):
        in_turn(ranks, call)


def test_rows_that_are_not_whole_shards_are_refused() -> None:
    def fewer(name: str) -> Any:
        return lambda args: args[name][:-3]

    refused(
        "a rank of 2 has 576 rows of a vocabulary padded to 1152", weight=fewer("weight"), bias=fewer("bias")
    )
    # As DTensor cuts a vocabulary of 50257 among two ranks.
    part = torch.zeros(25129, 4).bfloat16()
    ids = torch.zeros(2, dtype=torch.long)

    def uneven(group: Any) -> None:
        given = {"vocab_size": 50257, "group": group}
        isobit.linear_logp(torch.zeros(2, 4).bfloat16(), part[: 25129 - group.rank], ids, **given)

    with pytest.raises(ContractError, match="padded to 50304"):
        in_turn(2, uneven)


def test_other_calls_that_are_refused() -> None:
    refused("multiple of 64", padded_vocab=1160)
    refused("outside", token_ids=lambda args: args["token_ids"] + V)
    refused("numerics class", numerics="lse/1")
    refused("its own part|must be", weight=lambda args: args["weight"].float())
    with pytest.raises(ContractError, match="1, 2, 4 or 8 ranks"):
        in_turn(3, lambda group: isobit.linear_logp(**tensors(), group=group))
    with pytest.raises(ContractError, match="must be a ProcessGroup"):
        isobit.linear_logp(**tensors(), group="tp")


def test_without_a_class_nothing_changes() -> None:
    """Neither the padded vocabulary nor the class was named: the class is that of before."""
    args = tensors() | {"vocab_size": V}
    assert isobit.explain("linear_logp", **args).numerics == "none"
    assert isobit.explain("linear_logp", **args, padded_vocab=P).numerics == "lse/8x4/cpu"
    assert isobit.explain("linear_logp", **args, numerics="lse/8x4/cpu").backend == "model-8x4"
    of_loss = {name: args[name] for name in ("hidden", "weight", "token_ids")} | {"loss_fn": len}
    assert isobit.explain("linear_policy_loss", **of_loss).numerics == "none"
    assert isobit.explain("linear_policy_loss", **of_loss, padded_vocab=P).numerics == "lse/8x4/cpu"


# Wrong sums over ranks: the law must notice them


def test_a_ring_over_ranks_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.check.runner import FAIL, Request, run
    from isobit.ops.linear_logp import sharded
    from isobit.ops.linear_logp.proof import shards

    def ring(group: Any, partial: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        total, *rest = group.all_gather(partial).to(out_dtype)
        for each in rest:
            total = total + each
        return total

    monkeypatch.setattr(sharded, "ordered_sum", ring)
    case = shards.CASES[0].name
    device = torch.device("cpu")
    (cell,) = run(
        Request(ops=("linear_logp",), backends=("model-8x4",), laws=("parallel",), device=device, case=case)
    )
    assert cell.status == FAIL and "gradient:hidden" in cell.reason
