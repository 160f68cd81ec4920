"""Decoding of gated delta-rule layers: the state and its methods, calls that violate the contract, and
kernels that are known to be bad."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit import ContractError, DeltaState, gated_delta_rule_step
from isobit.check.laws import bits
from isobit.frame.backend import Backend
from isobit.frame.device import arch_key
from isobit.frame.launch import Recorder
from isobit.frame.op import OPS
from isobit.ops.gated_delta_rule.model import CPU as ON_CPU
from isobit.ops.gated_delta_rule_step import model
from isobit.ops.gated_delta_rule_step.kernels_triton import rows
from isobit.ops.gated_delta_rule_step.proof import PROOF
from isobit.ops.gated_delta_rule_step.proof.bits import carried_border
from isobit.ops.gated_delta_rule_step.proof.inputs import backend_for
from isobit.spec.proof import Case
from isobit.spec.trial import Trial

CPU = torch.device("cpu")
H, HV, K, V = 1, 2, 64, 64


def made(slots: int = 2, **rest: Any) -> DeltaState:
    return DeltaState(slots, H, HV, K=K, V=V, **rest)


def tokens(B: int, T: int, seed: int = 0) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, generator=gen), dim=-1) for _ in range(2))
    v, g = torch.randn(B, T, HV, V, generator=gen), torch.rand(B, T, HV, generator=gen) / -8
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, torch.rand(B, T, HV, generator=gen)]


def step(
    state: DeltaState, given: list[Tensor], first: int = 0, end: int | None = None, **rest: Any
) -> Tensor:
    return gated_delta_rule_step(state, *(t[:, first:end] for t in given), **rest)


# The state


def test_bytes_are_those_of_the_formula() -> None:
    for drafts in (False, True):
        P = 2 if drafts else 1
        a_slot = P * (HV * (6 * K * V + 64 * (4 * V + 64 * 4 + 8)) + 128 * H * K) + 20
        assert made(3, drafts=drafts).nbytes == 3 * a_slot


def test_rows_are_taken_back_over_the_end_of_a_chunk() -> None:
    given = tokens(1, 68)
    whole = made(1)
    expected = step(whole, given)
    state = made(1, drafts=True)
    step(state, given, 0, 62)
    others = [t[:, :6].flip(1) for t in given]
    step(state, others)  # two rows of this chunk and four of the next one
    assert state.place[0].tolist() == [4, 1, 0, 0, 0]
    state.crop(6)
    assert state.tokens.tolist() == [62]
    assert torch.equal(step(state, given, 62), expected[:, 62:])
    assert torch.equal(state.start[0, 1], whole.start[0, 0])


def test_without_drafts_rows_of_the_present_chunk_are_taken_back() -> None:
    given, state = tokens(1, 70), made(1)
    step(state, given)
    with pytest.raises(ContractError, match="slot 0 has 6 rows that can be taken back, not 7"):
        state.crop(7)
    state.crop(torch.tensor([6]), [0])
    assert state.tokens.tolist() == [64] and state.place[0].tolist() == [0, 1, 1, 0, 0]
    state.crop(1000, validate=False)  # as many as there are
    assert state.tokens.tolist() == [64]


def test_a_state_gets_drafts_in_the_middle_of_a_chunk() -> None:
    """Slots after one, two and three chunks, which are stored in different halves; from then on rows are
    taken back over the end of a chunk, and before that not."""
    given, lengths, state = tokens(4, 200), torch.tensor([0, 70, 128, 190]), made(4)
    step(state, given, lengths=lengths)
    grown = state.with_drafts()
    assert grown.drafts and torch.equal(grown.tokens, lengths) and not state.drafts
    with pytest.raises(ContractError, match="slot 1 has 6 rows that can be taken back, not 7"):
        grown.crop(7, [1])
    for back in (0, 6):
        step(grown, [t.flip(1) for t in given], end=back)
        grown.crop(back)
        for slot, first in enumerate(lengths.tolist()):
            alone = [t[slot : slot + 1, : first + 5] for t in given]
            found = step(grown.select([slot]), alone, first)
            assert torch.equal(found, step(made(1), alone)[:, first:])
    assert torch.equal(grown.with_drafts().place, grown.place)


def test_slots_are_reset_copied_and_reordered() -> None:
    given, state = tokens(3, 5), made(3)
    out = step(state, given, lengths=torch.tensor([5, 3, 0]))
    assert state.tokens.tolist() == [5, 3, 0] and not out[1, 3:].any()
    copy = state.select([1, 7])
    assert copy.tokens.tolist() == [3, 0]
    again = step(copy, [t[1:2] for t in given], 3, slots=torch.tensor([0]))
    expected = made(1)
    assert torch.equal(step(expected, [t[1:2] for t in given])[:, 3:], again)
    apart = state.clone()
    state.reorder([2, 0, -1])  # slot 2 keeps its own
    assert state.tokens.tolist() == [0, 5, 0]
    state.reset([1, 99, -3])
    assert state.tokens.tolist() == [0, 0, 0] and apart.tokens.tolist() == [5, 3, 0]
    assert "slots=3" in repr(state)


def test_a_sequence_begins_with_a_given_state() -> None:
    given, first = tokens(2, 3), torch.randn(2, HV, K, V)
    state = made(3)
    state.reset([2, -1], first)
    out = step(state, given, slots=torch.tensor([2, 0]))
    for b, begun in ((0, first[:1]), (1, None)):
        alone = [t[b : b + 1] for t in given]
        o, _ = isobit.gated_delta_rule(*alone, initial_state=begun)
        assert torch.equal(out[b : b + 1], o)


def test_a_begin_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy waits for a GPU, and a CUDA graph cannot hold one."""

    def copied(*_: Any, **__: Any) -> None:
        raise AssertionError("a copy from the host")

    state, index, given = made(3), torch.tensor([2]), torch.ones(1, HV, K, V)
    monkeypatch.setattr(torch, "tensor", copied)
    state.begin(index, given, 5)
    assert state.place.tolist() == [[0] * 5, [0] * 5, [0, 5, 5, 0, 0]]


@pytest.mark.parametrize(("sizes", "rule"), [
    ({"slots": -1}, "slots: -1"), ({"heads": 0}, "heads: 0"), ({"heads": 2, "value_heads": 3}, "multiple"),
    ({"K": 100}, "K: 100"), ({"V": 32}, "V: 32"), ({"dtype": torch.float32}, "dtype"),
    ({"drafts": 1}, "drafts"),
])  # fmt: skip
def test_sizes_that_a_state_cannot_have(sizes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        DeltaState(**{"slots": 1, "heads": 1, "K": 64, "V": 64} | sizes)


@pytest.mark.parametrize(("call", "rule"), [
    (lambda s: s.crop(-1), "0 or more"), (lambda s: s.crop(torch.zeros(3)), "one number"),
    (lambda s: s.reset(["a"]), "whole numbers"), (lambda s: s.reset(torch.zeros(1)), "int32 or int64"),
    (lambda s: s.reset([0], torch.zeros(2, HV, K, V)), r"initial_state.*\[1, 2, 64, 64\]"),
    (lambda s: s.reorder([0]), "one number a slot"),
])  # fmt: skip
def test_methods_say_what_is_wrong(call: Callable[[DeltaState], None], rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        call(made())


# Calls


def test_calls_that_violate_the_contract() -> None:
    given, state = tokens(2, 2), made()
    with pytest.raises(ContractError, match="slot 1 occurs twice"):
        step(state, given, slots=torch.tensor([1, 1]))
    with pytest.raises(ContractError, match="must be from 0 to T=2; sequence 1 has 3"):
        step(state, given, lengths=torch.tensor([0, 3]))
    with pytest.raises(ContractError, match="B=2 sequences, but the state has 1 slots"):
        step(made(1), given)
    step(state, given)
    with pytest.raises(ContractError, match="slot 0 has 2 tokens; reset it"):
        step(state, given, from_empty=True)
    assert state.tokens.tolist() == [2, 2]


def test_a_prompt_by_whole_chunks_leaves_the_same_state() -> None:
    given, one, two = tokens(2, 130), made(3), made(3)
    slots = torch.tensor([2, -1])
    assert torch.equal(step(one, given, slots=slots), step(two, given, slots=slots, from_empty=True))
    assert one.tokens.tolist() == two.tokens.tolist() == [0, 0, 130]
    after = tokens(1, 1, seed=1)
    last = [step(state, after, slots=slots[:1]) for state in (one, two)]
    assert torch.equal(*last)


# The host


def test_calls_that_differ_in_values_only_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    declared, checked = OPS["gated_delta_rule_step"], []
    check = declared.contract.check
    monkeypatch.setattr(declared.contract, "check", lambda values: checked.append(1) or check(values))

    def checks(state: DeltaState, *given: Tensor, **rest: Any) -> int:
        checked.clear()
        gated_delta_rule_step(state, *given, **{"validate": False} | rest)
        return len(checked)

    given, state = tokens(2, 2), made()
    declared.forget()
    assert [checks(state, *given) for _ in range(3)] == [1, 0, 0]
    assert (
        checks(state, *tokens(2, 2, seed=1)) == checks(made(), *given) == 0
    )  # other values, at other places
    assert checks(state, *tokens(1, 2)) == checks(made(3), *given) == checks(state, *given, scale=0.5) == 1
    state.bv_rows = torch.zeros(state.bv_rows.numel() + 1).bfloat16()[1:].view(state.bv_rows.shape)
    assert checks(state, *given) == 1  # another alignment
    assert checks(state, *given, validate=True) == checks(state, *given, validate=True) == 1
    with torch.no_grad():
        assert checks(made(), *given) == 1


def test_a_known_call_is_refused_if_its_state_no_longer_fits() -> None:
    given, state = tokens(2, 2), made()
    for _ in range(2):
        step(state, given, validate=False)
    state.place = state.place[:1]
    with pytest.raises(ContractError, match="B=2 sequences, but the state has 1 slots"):
        step(state, given, validate=False)
    with pytest.raises(ContractError, match="must be an isobit"):
        step(given[0], given, validate=False)  # type: ignore[arg-type]


def test_a_known_call_finds_its_plan_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    given, state, expected = tokens(1, 6), made(1), made(1)
    right = step(expected, given)
    # Gates of every other token begin at a multiple of 16 bytes: two keys.
    found = [step(state, given, t, t + 1, validate=False) for t in range(4)]
    monkeypatch.setattr("isobit.frame.op.cache_key_of", lambda *_: pytest.fail("a key was computed"))
    found += [step(state, given, t, t + 1, validate=False) for t in (4, 5)]
    assert torch.equal(torch.cat(found, 1), right)


# Known-bad kernels. Each must fail, on what is there for it.


@contextmanager
def candidate(run: Callable[..., Tensor]) -> Iterator[Trial]:
    """The op with a backend "candidate" of another class, on two sequences of which one crosses a border."""
    added = Backend("candidate", run, "test/rows", lambda args: None, False, lambda args: None)
    ops = [OPS["gated_delta_rule_step"], OPS["gated_delta_rule_step_rows"]]
    case = Case({"B": 2, "T": 2, "H": 1, "HV": 1, "K": 64, "V": 64}, torch.bfloat16,
                options={"prompts": "3+63", "drafts": True})  # fmt: skip
    for op in ops:
        op.backends.append(added)
    try:
        yield Trial(ops[0], "candidate", CPU, case, arch_key(CPU))
    finally:
        for op in ops:
            op.backends.remove(added)


def by_place(**args: Any) -> Tensor:
    """Another order of sums if there are several sequences."""

    def product(left: np.ndarray, right: np.ndarray, acc: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        return (acc + left.astype(np.float64) @ right).astype(np.float32)

    several = args["q"].shape[0] > 1
    return model.rows(do=ON_CPU._replace(product=product) if several else ON_CPU, **args)


def slots_clamped(**args: Any) -> Tensor:
    slots = args["slots"]
    return model.rows(**args | {"slots": None if slots is None else slots.clamp(0, len(args["place"]) - 1)})


def lengths_ignored(**args: Any) -> Tensor:
    return model.rows(**args | {"lengths": None})


def inverse_rounded(**args: Any) -> Tensor:
    """Rows of T are stored in 16 bits."""
    out = model.rows(**args)
    args["inverse"].copy_(args["inverse"].to(out.dtype))
    return out


def recurrent(**args: Any) -> Tensor:
    """Every row is a chunk of its own: the recurrence."""
    outs = [args["v"][:, :0]]
    for t in range(args["q"].shape[1]):
        now = {n: args[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}
        for slot in range(len(args["place"])):
            here = model.Slot({n: args[n] for n in model.TENSORS}, slot)
            if here.rows:
                n = here.rows
                here.k, here.vn, here.gate = here.k[:, :n], here.vn[:, :n], here.gate[:, :n]
                here.store = lambda: None  # type: ignore[method-assign]
                here.close(ON_CPU)
                args["place"][slot] = torch.tensor([0, *here.place[1:]], dtype=torch.int32)
        lengths = None if args["lengths"] is None else args["lengths"] - t
        outs.append(model.rows(**args | now | {"lengths": lengths}))
    return torch.cat(outs, 1)


def zero_times_later(**args: Any) -> Tensor:
    """Later tokens of a sequence are multiplied by 0, and not left out."""
    v = args["v"].float()
    counts = torch.full((len(v),), v.shape[1]) if args["lengths"] is None else args["lengths"]
    slots = torch.arange(len(v)) if args["slots"] is None else args["slots"]
    counts = torch.where((slots >= 0) & (slots < len(args["place"])), counts, 0)
    v = torch.where(torch.arange(v.shape[1])[:, None, None] < counts[:, None, None, None], v, 0.0)
    later = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).flip(1)[:, 1:]
    return (model.rows(**args).float() + 0.0 * later).to(args["v"].dtype)


def test_a_correct_one_passes() -> None:
    with candidate(model.rows) as trial:
        assert [c.message for c in bits.invariant(trial) if not c.passed] == []


@pytest.mark.parametrize(("run", "message"), [
    (by_place, "sequence 0 alone"), (slots_clamped, "among sequences without slots"),
    (lengths_ignored, "among sequences without slots"), (inverse_rounded, "other slots next to"),
    (recurrent, "the forward of"), (zero_times_later, "inf in all tokens from 1 on"),
])  # fmt: skip
def test_known_bad_ones_fail(run: Callable[..., Tensor], message: str) -> None:
    with candidate(run) as trial:
        found = [c.message for c in bits.invariant(trial) if not c.passed]
    assert any(message in each for each in found), found
    if run is zero_times_later:
        assert all("in all tokens from" in each for each in found)


# Kernels, in Triton's interpreter


def test_a_state_in_16_bits_shows_only_behind_a_later_border() -> None:
    """Rows of its own chunk read it rounded in any case. So the control needs a border after it."""
    borders = {(64, 65): 0, (100, 108): 0, (127, 130): 64, (128, 129): 64, (200, 201): 128, (0, 200): 0}
    assert {place: carried_border(*place) for place in borders} == borders


def test_the_model_goes_on_from_its_own_arithmetic_on_a_gpu() -> None:
    """And is compared with it: the kernels there are of another class."""
    gpu = torch.device("cuda")
    assert [backend_for(name, gpu) for name in ("model", "triton")] == ["model", None]
    assert [backend_for(name, CPU) for name in ("model", "triton")] == ["model", "model"]
    assert PROOF.of("model").make is not PROOF.make


def test_kernels_with_garbage_and_with_infinite_rows() -> None:
    printed = in_interpreter(
        """
import torch, isobit
from test_gated_delta_step import made, step, tokens

given = tokens(1, 5)
for name, value in ((1, float("inf")), (2, float("inf")), (3, float("nan"))):
    bad = [t.clone() for t in given]
    bad[name][:, 3] = value
    ours, model = (step(made(1), bad, backend=b) for b in ("triton", "model"))
    assert torch.equal(ours[:, :3], model[:, :3]) and bool(model[:, :3].isfinite().all())
    assert torch.equal(ours.isnan(), model.isnan())
    assert torch.equal(ours.nan_to_num(), model.nan_to_num())
garbage = torch.tensor([-(2**31), 2**31 - 1, 77, -1, 3])
for n in (0, 2):
    state = made(3)
    for t in state.tensors().values():
        t.fill_(0)
    state.place[1] = garbage.roll(n)
    before = state.clone()
    two = [torch.cat((t[:, :2], t[:, 2:4])) for t in given]
    slots, lengths = torch.tensor([1, 2**40]), torch.tensor([2**40, -5])
    step(state, two, slots=slots, lengths=lengths, validate=False, backend="triton")
    for slot in (0, 2):
        for a, b in zip(state.tensors().values(), before.tensors().values()):
            assert torch.equal(a[slot], b[slot])
    assert 0 <= int(state.place[1, 0]) <= 64
print("done")
"""
    )
    assert printed.strip() == "done"


@pytest.mark.parametrize(("odd", "word"), [(0, 8), (4, 4), (3, 1)])
def test_rows_are_read_in_the_widest_words_that_all_strides_allow(odd: int, word: int) -> None:
    """The compiler then knows what rows are aligned to, and another stride does not recompile."""
    state, recorder = DeltaState(2, H, HV, K=K, V=V, device="meta"), Recorder()
    q, k, v = (torch.empty(2, 3, n, 64 + odd, device="meta").bfloat16()[..., :64] for n in (H, H, HV))
    g, beta = (torch.empty(2, 3, HV, device="meta") for _ in range(2))
    args = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "slots": None, "lengths": None, "scale": 1.0}
    rows(recorder, **args, **state.tensors(), use_qk_l2norm_in_kernel=False)
    for kernel, values, options in recorder.launches:
        at = kernel.arg_names.index("q_sb")
        assert options["WORD"] == word and values[at + 1] * word == q.stride(1)
