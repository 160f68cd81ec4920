"""`linear_policy_loss` with a vocabulary that ranks share: what is refused, on every rank; no rows; and a bad
sum over ranks, which its law must notice. `test_parallel.py` has processes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from isobit import ContractError
from isobit.check.runner import FAIL, Request, run
from isobit.ops.linear_logp import sharded
from isobit.ranks import Group, in_turn

N, D, V, P = 6, 16, 60, 64


def total(logp: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    return (weights * logp).sum()


def call(group: Group | None, rows: int = N, **changed: Any) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=gen).bfloat16(), torch.randn(P, D, generator=gen).bfloat16()
    if group is not None:
        weight = weight.chunk(group.size)[group.rank]
        changed = {"group": group, "vocab_size": V, **changed}
    else:
        weight = weight[:V]
    given: dict[str, Any] = {"hidden": hidden[:rows], "weight": weight, "token_ids": torch.arange(rows) * 9}
    given |= {"loss_fn": total, "inputs": {"weights": torch.arange(rows) - 2.5}, "padded_vocab": P} | changed
    leaves = [given[name].requires_grad_() for name in ("hidden", "weight")]
    loss, _ = isobit.linear_policy_loss(**given)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def refused(message: str, ranks: int = 2, **changed: Any) -> None:
    def on_a_rank(group: Group) -> None:
        call(
            group, **{n: change(group.rank) if callable(change) else change for n, change in changed.items()}
        )

    with pytest.raises(ContractError, match=message):
        in_turn(ranks, on_a_rank)


def test_calls_that_are_refused_on_every_rank() -> None:
    other = {0: {"weights": torch.ones(N)}, 1: {"weights": torch.ones(N), "more": 1.0}}
    refused("the ranks of the group do not make the same call: rank 0: linear_policy_loss", inputs=other.get)
    refused("must be a function of", loss_fn=lambda rank: 3 if rank else total)
    refused("'weights' must be \\[6\\] as the rows", inputs={"weights": torch.ones(N - 1)})
    refused("numerics class", numerics="lse/1")
    refused("a rank of 2 has 64 rows of a vocabulary padded to 128", padded_vocab=128)
    refused("outside", token_ids=torch.full((N,), V))
    refused("detach", temperature=torch.ones(N).requires_grad_())
    with pytest.raises(ContractError, match="without a group pass weight"):
        call(None, vocab_size=V - 1)


def test_a_share_that_does_not_add_up_is_refused_with_a_group_too() -> None:
    refused(
        "is not the sum of the shares of two parts", loss_fn=lambda rank: lambda logp, *_, **__: logp.mean()
    )


@pytest.mark.parametrize("rows", [0, N])
def test_ranks_have_the_loss_of_one(rows: int) -> None:
    loss, dhidden, dweight = call(None, rows)
    found = in_turn(4, lambda group: call(group, rows))
    for rank in found:
        assert torch.equal(rank[0], loss) and torch.equal(rank[1], dhidden)
    joined = torch.cat([rank[2] for rank in found])
    assert torch.equal(joined[:V], dweight) and not joined[V:].any()


def test_without_gradients_ranks_have_the_same_loss() -> None:
    loss, *_ = call(None)
    with torch.no_grad():
        found = in_turn(2, lambda group: isobit.linear_policy_loss(**_plain(group))[0])
    assert all(torch.equal(each, loss) for each in found)


def _plain(group: Group) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=gen).bfloat16(), torch.randn(P, D, generator=gen).bfloat16()
    own = {"weight": weight.chunk(group.size)[group.rank], "vocab_size": V, "group": group}
    inputs = {"weights": torch.arange(N) - 2.5}
    return {"hidden": hidden, "token_ids": torch.arange(N) * 9, "loss_fn": total, "inputs": inputs} | own


def test_a_ring_in_16_bits_fails_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def ring(group: Any, partial: Tensor, out_dtype: torch.dtype) -> Tensor:
        added, *rest = group.all_gather(partial).to(out_dtype)
        for each in rest:
            added = added + each
        return added

    monkeypatch.setattr(sharded, "ordered_sum", ring)
    case, device = (
        "B=4 T=11 D=16 V=130 fp16 random entropy=True each=True workspace_bytes=1",
        torch.device("cpu"),
    )
    request = Request(
        ops=("linear_policy_loss",), backends=("model-8x4",), laws=("parallel",), device=device, case=case
    )
    (cell,) = run(request)
    assert cell.status == FAIL and "gradient:hidden" in cell.reason
