"""Many new tokens at once: prompts of sequences that have begun, at different places, by whole chunks."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import in_interpreter
from isobit import DeltaState
from isobit.frame.device import arch_key
from isobit.frame.op import OPS
from isobit.ops.gated_delta_rule_step import chunks
from isobit.ops.gated_delta_rule_step.op import rows
from isobit.ops.gated_delta_rule_step.proof.bits import long_prompts, same_slots
from isobit.ops.gated_delta_rule_step.state import CHUNK
from isobit.spec.proof import Case
from isobit.spec.trial import Trial
from no_waiting import NoWaiting
from test_gated_delta_step import HV, K, V, made, step, tokens

CPU = torch.device("cpu")

#: Tokens that sequences have, their slots, of which one is outside the state, and new tokens.
PLACES, SLOTS = [0, 5, 64, 63, 128, 1], [6, 0, 3, -1, 2, 1]


def begun(drafts: bool = False) -> DeltaState:
    return _begun(drafts).clone()


@lru_cache
def _begun(drafts: bool) -> DeltaState:
    """Seven slots, of which number 4 and 5 are not used, and 3 began with a given state."""
    state = made(7, drafts=drafts)
    state.reset([3], torch.randn(1, HV, K, V, generator=torch.Generator().manual_seed(1)))
    step(state, tokens(6, 128, seed=3), lengths=torch.tensor(PLACES), slots=torch.tensor(SLOTS))
    return state


@pytest.mark.parametrize("drafts", [False, True])
def test_any_pieces_of_a_prompt_leave_the_same_bits(drafts: bool) -> None:
    """Up to one that needs no whole chunk, one that gets one token and one that gets none."""
    N = CHUNK + chunks.kept(begun(drafts)) + 6
    given, slots = tokens(6, N), torch.tensor(SLOTS)
    counts = torch.tensor([N, N - 3, N - 64, N, 1, 0])
    whole = begun(drafts)
    expected = step(whole, given, slots=slots, lengths=counts)
    assert expected[0].any() and not expected[3].any() and not expected[4, 1:].any()
    for cuts in ([*range(0, N, CHUNK), N], [0, 3, N]):
        state, outs = begun(drafts), []
        for first, end in pairwise(cuts):
            own = (counts - first).clamp(0, end - first)
            outs.append(step(state, given, first, end, slots=slots, lengths=own))
        assert torch.equal(torch.cat(outs, 1), expected)
        assert torch.equal(state.place, whole.place)
        assert all(check.passed for check in same_slots("pieces", state, whole, list(range(7))))


@pytest.mark.parametrize("at_once", [False, True])
def test_the_last_64_rows_can_be_taken_back_after_a_prompt(at_once: bool) -> None:
    """With drafts, whichever kernels computed them."""
    N = 3 * CHUNK + 5
    given, state, other = tokens(1, N), made(1, drafts=True), made(1)
    expected = step(other, given)
    assert torch.equal(step(state, given, from_empty=at_once), expected)
    state.crop(64)
    assert torch.equal(step(state, given, N - 64), expected[:, N - 64 :])


def test_prompts_of_different_lengths_are_the_first_of_their_sequences() -> None:
    given, lengths = tokens(3, 130), torch.tensor([130, 3, 64])
    one, two = made(3), made(3)
    assert torch.equal(step(one, given, lengths=lengths), step(two, given, lengths=lengths, from_empty=True))
    assert torch.equal(one.place, two.place)
    assert all(check.passed for check in same_slots("from empty", one, two, [0, 1, 2]))


def test_counts_that_are_garbage_stay_in_their_slot() -> None:
    garbage, given = torch.tensor([-(2**31), 2**31 - 1, 77, -1, 3], dtype=torch.int32), tokens(2, 130)
    for n in (0, 1):
        state = made(3)
        for t in state.tensors().values():
            t.zero_()
        state.place[1] = garbage.roll(n)
        before = state.clone()
        numbers = {"slots": torch.tensor([1, 2**40]), "lengths": torch.tensor([2**40, -5])}
        step(state, given, **numbers, validate=False)
        for name, t in state.tensors().items():
            assert torch.equal(t[::2], getattr(before, name)[::2])
        assert 0 <= int(state.place[1, 0]) <= CHUNK


# Nothing waits for the device


def test_a_prompt_makes_the_host_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the ops: each is tested for itself."""
    state, given, slots = begun(), tokens(6, 130), torch.tensor(SLOTS)
    expected_state = begun()
    expected = step(expected_state, given, slots=slots)
    watch = NoWaiting()
    monkeypatch.setattr(chunks, "gated_delta_rule", watch.outside(chunks.gated_delta_rule))
    args = dict(zip(("q", "k", "v", "g", "beta"), given, strict=True)) | {"slots": slots, "lengths": None}
    args |= {"scale": K**-0.5, "use_qk_l2norm_in_kernel": False} | state.tensors()
    with watch:
        out = chunks.continued(state, args, watch.outside(rows), "model", False)
    assert torch.equal(out, expected) and torch.equal(state.place, expected_state.place)


@pytest.mark.parametrize("wait", [
    lambda t: t.sum().item(), lambda t: t.tolist(), lambda t: bool((t > 0).any()), lambda t: t.nonzero(),
    lambda t: torch.tensor([1], device=t.device), lambda t: torch.arange(3).to(t.device), lambda t: t[t > 0],
    lambda t: t.repeat_interleave(t), lambda t: t.cpu().numpy(),
])  # fmt: skip
def test_waiting_is_noticed(wait: Callable[[Tensor], Any]) -> None:
    numbers = torch.tensor([1, 2])
    with pytest.raises((AssertionError, NotImplementedError)), NoWaiting():
        wait(numbers)


# What must fail


def without_the_row_that_closes(share: Any) -> Any:
    return share._replace(opened=torch.zeros_like(share.opened))


def one_chunk_too_many(share: Any) -> Any:
    return share._replace(whole=torch.where(share.whole > 0, share.whole + CHUNK, 0))


def from_the_first_token(share: Any) -> Any:
    """Chunks that begin with the call."""
    return share._replace(before=torch.zeros_like(share.before))


@pytest.mark.parametrize("wrong", [without_the_row_that_closes, one_chunk_too_many, from_the_first_token])
def test_wrong_shares_fail_the_law(wrong: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case({"B": 2, "T": 1, "H": 1, "HV": 1, "K": 64, "V": 64}, torch.bfloat16,
                options={"prompts": "3+63"})  # fmt: skip
    trial = Trial(OPS["gated_delta_rule_step"], "model", CPU, case, arch_key(CPU))
    args, of = trial.args(), chunks.Shares.of
    assert [check.message for check in long_prompts(trial, args) if not check.passed] == []
    monkeypatch.setattr(chunks.Shares, "of", lambda *given: wrong(of(*given)))
    found = [check.message for check in long_prompts(trial, args) if not check.passed]
    assert any("the forward of" in message for message in found), found


# Kernels, in Triton's interpreter


def test_kernels_have_the_bits_of_the_model() -> None:
    """Of which one sequence has no whole chunk. NaN where no token is."""
    printed = in_interpreter(
        """
import torch
from isobit import DeltaState
from isobit.ops.gated_delta_rule_step.proof.bits import same_slots
from test_gated_delta_step import step, tokens

given, before = ([t[:, :, :1] for t in tokens(2, n, seed=n)] for n in (130, 64))
lengths, slots = torch.tensor([129, 60]), torch.tensor([2, 0])
for b, n in enumerate(lengths.tolist()):
    for t in given:
        t[b, n:] = float("nan")
results = []
for backend in ("triton", "model"):
    state = DeltaState(3, 1, K=64, V=64)
    step(state, before, lengths=torch.tensor([64, 3]), slots=slots, backend="model")
    results.append((step(state, given, lengths=lengths, slots=slots, backend=backend), state))
(ours, mine), (model, its) = results
assert torch.equal(ours, model) and bool(model.isfinite().all()) and torch.equal(mine.place, its.place)
assert all(check.passed for check in same_slots("kernels", mine, its, [0, 1, 2]))
print("done")
"""
    )
    assert printed.strip() == "done"
