"""The proof of `linear_policy_loss` can fail: known-bad versions, each on the law that is there for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check.laws import LAWS
from isobit.check.runner import OK, UNSUPPORTED, Cell, Request, run
from isobit.frame.op import OPS
from isobit.ops.linear_policy_loss import autograd, chunked, reference_chunk
from isobit.ops.linear_policy_loss.batch import Batch, Chunk
from isobit.spec.proof import Case
from isobit.spec.trial import LawBroken, Trial

CPU = torch.device("cpu")
CASE = Case(
    {"B": 6, "T": 4, "D": 16, "V": 40}, torch.float32, options={"workspace_bytes": 4 * 40 * 9, "bias": "own"}
)


def failing(law: str, case: Case = CASE) -> list[str]:
    """What a law finds wrong."""
    trial = Trial(OPS["linear_policy_loss"], "reference", CPU, case, "cpu")
    return [check.output for check in LAWS[law].run(trial) if not check.passed]


def test_a_correct_implementation_passes() -> None:
    assert failing("accuracy") == failing("gradient") == failing("memory") == []


def changed(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The backward of a chunk with other arguments than it is given."""
    backend = OPS["linear_logp_chunk_bwd"].backend_named("reference")

    def wrong(**args: Any) -> Tensor:
        return reference_chunk.linear_logp_chunk_bwd(**args | changes)

    monkeypatch.setattr(OPS["linear_logp_chunk_bwd"], "backends", [replace(backend, run=wrong)])


SUMS = ["gradient:weight", "gradient:bias"]


def of_both(wrong: list[str]) -> list[str]:
    """With a random gradient of the loss, and with that of `loss.sum()`."""
    return [*wrong, *(f"expanded {name}" for name in wrong)]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"first": True}, SUMS),
        ({"first_row": 0}, ["gradient:hidden"]),
        ({"dlogp": None}, ["gradient:hidden", *SUMS]),
    ],
)
def test_chunks_that_do_not_accumulate_fail(
    changes: dict[str, Any], wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, **changes)
    assert failing("gradient") == of_both(wrong)


def test_a_factor_that_is_left_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = autograd.rounded
    monkeypatch.setattr(
        autograd, "rounded", lambda factor, **others: right(factor=torch.ones_like(factor), **others)
    )
    assert failing("gradient") == ["gradient:hidden", *SUMS]


def last_share(self: Any, *args: Any) -> Any:
    """A loss that is the last chunk's alone."""
    self._chunks = 0
    return ADD(self, *args)


ADD = chunked.Sums.add


def test_a_loss_that_is_the_last_chunks_alone_fails_on_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked.Sums, "add", last_share)
    assert failing("accuracy") == ["0:loss"]


def test_rows_of_another_chunk_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Batch.of_rows

    def others(self: Batch, t: Any, chunk: Chunk) -> Any:
        """Hidden states of the chunk before, where there is one as long."""
        start = max(0, chunk.begin - 2)
        before = replace(chunk, begin=start, stop=start + chunk.stop - chunk.begin)
        return right(self, t, before if isinstance(t, Tensor) and t.ndim == 3 else chunk)

    monkeypatch.setattr(Batch, "of_rows", others)
    with pytest.raises(LawBroken, match="the forward is already wrong"):
        failing("gradient")


def test_a_batch_that_is_kept_whole_fails_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case({"N": 4000, "D": 8, "V": 300}, torch.float32, options={"workspace_bytes": 4 * 300 * 100})
    assert failing("memory", case) == []
    monkeypatch.setattr(chunked, "capacity", lambda *sizes: 4000)
    assert failing("memory", case) == ["fwd_bwd"]


def test_an_unvalidated_loss_fails_on_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, options={})
    assert failing("contract", case) == []
    monkeypatch.setattr("isobit.ops.linear_policy_loss.loss_call.Loss.together", lambda *shares: None)
    assert failing("contract", case) == ["a mean", "a constant for every chunk"]


def cells(**request: Any) -> list[Cell]:
    return run(Request(ops=("linear_policy_loss",), backends=("reference",), device=CPU, **request))


def test_the_traceable_law_is_unsupported_with_a_reason() -> None:
    traced, checked = sorted(cells(laws=("traceable", "contract")), key=lambda cell: cell.law, reverse=True)
    assert (traced.status, checked.status) == (UNSUPPORTED, OK)
    assert "a function over ops: it runs the caller's own code" in traced.reason
