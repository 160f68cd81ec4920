"""`logp` with a vocabulary that ranks share: columns that are missing, the formulas of others, calls that
must be refused on every rank, and sums that the law must notice. `test_parallel.py` has processes."""

from typing import Any

import numpy as np
import pytest
import torch

import isobit
from interpreted import in_interpreter
from isobit import ContractError
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.ops.logp import model_shards
from isobit.ranks import in_turn
from ranks_vocabulary import P, V, logits
from vocab_parallel_rivals import entropy_of_ranks, megatron


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_columns_behind_the_last_token_may_be_missing(ranks: int) -> None:
    args = logits()
    z, ids = args["logits"][:, :V], args["token_ids"]
    options: dict[str, Any] = {"padded_vocab": P, "temperature": 0.7}
    whole = isobit.logp(z, ids, **options)

    def on_a_rank(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = z.split(P // ranks, -1)[group.rank].clone().requires_grad_()
        found = isobit.logp(own, ids, vocab_size=V, group=group, **options)
        return found.detach(), *torch.autograd.grad(found.sum(), own)

    found = in_turn(ranks, on_a_rank)
    assert all(torch.equal(logp, whole) for logp, _ in found)
    assert torch.cat([grad for _, grad in found], -1).shape == z.shape


@pytest.mark.parametrize("ranks", [2, 8])
def test_formulas_of_megatron_and_verl_are_hardly_closer_to_the_truth(ranks: int) -> None:
    """From the same fp32 logits. Errors are of the size of one rounding of the log-sum-exp."""
    args = logits(torch.float32)
    live = args["token_ids"] >= 0
    z, ids = args["logits"][live, :V] / 0.7, args["token_ids"][live]
    logp, entropy = isobit.logp(z, ids, padded_vocab=P, return_entropy=True)
    log_p = z.double().log_softmax(-1)
    exact = log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    shards = [*z.tensor_split(ranks, 1)]
    rounding = torch.finfo(torch.float32).eps * z.double().logsumexp(-1).abs()
    for ours, theirs, truth in (
        (logp, megatron(shards, ids), exact[0]),
        (entropy, entropy_of_ranks(shards), exact[1]),
    ):
        assert ((ours - truth).abs() <= 2 * (theirs - truth).abs().max() + rounding).all()
        assert ((theirs - truth).abs() <= 16 * rounding).all()  # it is the same quantity


# In the interpreter

BAD_IDS = """
import torch, isobit
from isobit.ranks import in_turn
z = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
ids = torch.tensor([3, 128, -1, 2**40, 100])
flags = {"return_entropy": True, "return_lse": True, "validate": False, "backend": "triton-8x1"}
whole = isobit.logp(z, ids, padded_vocab=128, **flags)


def on_a_rank(group):
    own = z.tensor_split(group.size, -1)[group.rank].clone().requires_grad_()
    outputs = isobit.logp(own, ids, group=group, **flags)
    return *outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), own)


for *outputs, grad in in_turn(2, on_a_rank):
    for ours, one in zip(outputs, whole):
        assert ours.isnan().tolist() == [False, True, True, True, False]
        assert torch.equal(ours.nan_to_num(), one.nan_to_num())
    assert grad.isnan().all(1).tolist() == [False, True, True, True, False]
    assert grad[[0, 4]].isfinite().all()
print("NaN")
"""


def test_ids_outside_the_vocabulary_make_their_rows_nan_on_every_rank() -> None:
    """An id of another rank is no such id."""
    assert in_interpreter(BAD_IDS).strip() == "NaN"


# Refused


def refused(message: str, ranks: int = 2, **options: Any) -> None:
    def call(group: Any) -> None:
        args = logits()
        args["logits"] = args["logits"].tensor_split(ranks, -1)[group.rank]
        changed = {name: change(args) if callable(change) else change for name, change in options.items()}
        isobit.logp(**args | {"vocab_size": V, "padded_vocab": P, "group": group} | changed)

    with pytest.raises(ContractError, match=message):
        in_turn(ranks, call)


def test_calls_that_cannot_have_equal_bits_are_refused() -> None:
    def fewer(args: dict[str, Any]) -> Any:
        return args["logits"][:, :-3]

    refused(
        "a rank of 2 has 576 columns of a vocabulary padded to 1152, from column 0 on, not 573", logits=fewer
    )
    refused("padded_vocab=1152 would fit them", padded_vocab=1216)
    refused("multiple of 64", padded_vocab=1160)
    refused("outside", token_ids=lambda args: args["token_ids"] + V)
    refused("numerics class", numerics="lse/triton-1")
    refused("no backend can serve", logits=lambda args: args["logits"].double())
    with pytest.raises(ContractError, match="1, 2, 4 or 8 ranks"):
        in_turn(3, lambda group: isobit.logp(**logits(), group=group))
    with pytest.raises(ContractError, match="must be a ProcessGroup"):
        isobit.logp(**logits(), group="tp")
    with pytest.raises(ContractError, match=r"vocab_size.*belongs to a call with a group"):
        isobit.logp(**logits(), vocab_size=V)


def test_without_a_class_nothing_changes() -> None:
    args = logits()
    assert isobit.explain("logp", **args).numerics == "none"
    assert isobit.explain("logp", **args, padded_vocab=P).backend == "model-8x1"
    assert isobit.explain("logp", **args, numerics="lse/triton-8x1/cpu").backend == "model-8x1"


# Wrong sums over ranks: the law must notice them


def parallel() -> Cell:
    case, cpu = "N=90 V=9000 fp32 random mask=bool temperature=0.7", torch.device("cpu")
    (cell,) = run(Request(ops=("logp",), backends=("model-8x1",), laws=("parallel",), device=cpu, case=case))
    return cell


_fold = model_shards._fold


def _by_ranks(sums: Any, scale: Any) -> Any:
    """Each rank adds up its own shards before the others' are added, one rank after the other."""
    m, s, t = sums
    if s.shape[-1] != 8:
        return _fold(sums, scale)
    top, *moved = m.max(-1, keepdims=True), s, t
    s, t = model_shards._rescaled(m, *moved, top, scale[:, None])
    total = [np.zeros_like(s[:, 0]), np.zeros_like(t[:, 0])]
    for i in range(8):
        total = [total[0] + s[:, i], total[1] + t[:, i]]
    return top[:, 0], *total


def test_a_token_that_another_rank_has_is_not_the_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parallel().status == OK
    whole = model_shards.logp_shard_bwd

    def clamped(**args: Any) -> torch.Tensor:
        """A target in the nearest column that is here."""
        first, columns = args["first_column"], args["logits"].shape[-1]
        ids = args["token_ids"]
        inside = torch.where(ids < 0, ids, ids.clamp(first, first + columns - 1))
        return whole(**args | {"token_ids": inside})

    monkeypatch.setattr(model_shards, "logp_shard_bwd", clamped)
    cell = parallel()
    assert cell.status == FAIL and "gradient:logits" in cell.reason


def test_sums_in_another_order_with_ranks_fail_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model_shards.logp_merged

    def merged(**args: Any) -> Any:
        with monkeypatch.context() as patch:
            if len(args["states"]) > 1:
                patch.setattr(model_shards, "_fold", _by_ranks)
            return whole(**args)

    monkeypatch.setattr(model_shards, "logp_merged", merged)
    cell = parallel()
    assert cell.status == FAIL and "on 2 ranks" in cell.reason
