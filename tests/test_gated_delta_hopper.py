"""The forward recurrence's kernel for Hopper run on a CPU: what it computes, and that no partition overtakes
another in the buffers that they share."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attention_on_a_cpu import slowed
from isobit.frame.launch import Recorder
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.numerics import cpu_steps
from isobit.ops.delta_rule import kernels_hopper as backwards
from isobit.ops.delta_rule import kernels_hopper_io
from isobit.ops.delta_rule.kernels_hopper import Buffers
from isobit.ops.gated_delta_rule import (
    kernels_hopper,
    kernels_hopper_outputs,
    kernels_hopper_solve,
    kernels_hopper_states,
    model,
)
from isobit.ops.gated_delta_rule.proof import PROOF
from test_delta_rule_hopper import LENGTHS, MODES, Room, Walked
from test_delta_rule_hopper import made as made_backwards


class Steps:
    """The arithmetic of class gdr/1/cpu."""

    product, fma, exp2 = staticmethod(cpu_steps.product), staticmethod(cpu_steps.fused), staticmethod(np.exp2)


def launch_on(programs: int) -> Any:
    device = Walked(programs, Steps)
    scope = device.scope(
        hopper_pipe, kernels_hopper_io, backwards, kernels_hopper_states,
        kernels_hopper_solve, kernels_hopper_outputs, tma_store=device.store_box,
        tma=SimpleNamespace(store_wait=device.store_wait), reinterpreted=Room.reinterpret,
    )  # fmt: skip

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        constants = (options[name] for name in kernel.arg_names[len(values) :])
        device.run(scope, kernel, (*values, *constants))

    return launch


def on_a_cpu(args: dict[str, Any], programs: int = 2, carry: Any = None) -> tuple[Any, ...]:
    carry = carry or partial(kernels_hopper_states.states, sms=programs)
    return kernels_hopper.fwd_h(launch_on(programs), carry=carry, **args)


def made(mode: str, v_first: bool, K: int = 64) -> dict[str, Any]:
    """The inputs of the recurrence backwards, by their names forwards: t gives an initial state, h asks for
    the final one."""
    args = made_backwards(mode, v_first, LENGTHS, K)
    args |= {"u": args["dv"], "initial_state": args["dht"], "output_final_state": "h" in mode}
    args["save_new_value"] = True
    names = ("k", "w", "u", "g", "gk", "initial_state", "output_final_state", "state_v_first", "chunk_size",
             "save_new_value", "cu_seqlens", "chunk_offsets", "chunk_indices")  # fmt: skip
    return {name: args[name] for name in names}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_has_the_bits_of_the_class(K: int, mode: str, v_first: bool) -> None:
    args = made(mode, v_first, K)
    for found, right in zip(on_a_cpu(args), model.fwd_h(**args), strict=True):
        assert (found is None and right is None) or torch.equal(found, right)


def test_states_may_be_at_the_places_of_tiles() -> None:
    """Without offsets sequence n has the chunks from first // 64 + n on."""
    args = made("ght", False)
    right = model.fwd_h(**args)
    given = [args[n] for n in ("k", "w", "u", "g", "gk", "initial_state", "cu_seqlens")]
    chunks = args["k"].shape[1] // 64 + len(LENGTHS)
    places = [
        first // 64 + n + c
        for n, (first, length) in enumerate(zip(args["cu_seqlens"].tolist(), LENGTHS, strict=False))
        for c in range(-(-length // 64))
    ]
    with_launch = on_a_cpu(
        args, carry=lambda *rest: kernels_hopper_states.states(*given, None, chunks, *rest[9:], 2)
    )
    assert torch.equal(with_launch[0][:, places], right[0])
    assert torch.equal(with_launch[1], right[1]) and torch.equal(with_launch[2], right[2])


def test_tokens_behind_the_last_bound_are_in_no_sequence() -> None:
    """Decoding packs chunks into a place that is large enough for all, and only the device knows how many."""
    args = made("ght", False)
    end = sum(LENGTHS[:4])
    args["cu_seqlens"] = args["cu_seqlens"].clamp(max=end)
    for name in ("k", "w", "u", "g"):
        args[name][:, end:] = float("nan")
    given = [args[n] for n in ("k", "w", "u", "g", "gk", "initial_state", "cu_seqlens")]
    chunks = args["k"].shape[1] // 64 + len(LENGTHS)
    _, new, final = on_a_cpu(
        args, carry=lambda *rest: kernels_hopper_states.states(*given, None, chunks, *rest[9:], 2)
    )
    _, right, last = model.fwd_h(**args)
    assert torch.equal(new[:, :end], right[:, :end]) and torch.equal(final, last)
    assert torch.equal(final[4:], args["initial_state"][4:])


@pytest.mark.parametrize("who", range(5))
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("mode", ["ht", "gkht"])
def test_whoever_is_slow_the_bits_are_the_same(
    mode: str, separate: bool, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program, so that all items share its buffers: consumer, producer, both store warps, producer of
    gates."""
    args = made(mode, False)
    right = on_a_cpu(args)
    slowed(monkeypatch, who, (Walked, "store_wait"))
    monkeypatch.setattr(backwards, "fits_separate_buffers", lambda *sizes: separate)
    for found, expected in zip(on_a_cpu(args, 1), right, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("v_first", [False, True])
def test_no_state_is_stored_before_h_whatever_the_integers_are(v_first: bool) -> None:
    args = made("kht", v_first)
    low, high = -(1 << 63), (1 << 63) - 1
    args["chunk_offsets"] = torch.tensor([low, -1, high, low + 1, -(1 << 31), 1 << 20, 3, 0])
    _, new, final = on_a_cpu(args)  # asserts that no store begins before its tensor
    _, right, last = model.fwd_h(**args)  # which do not depend on it
    assert torch.equal(new, right) and torch.equal(final, last)


def test_its_stages_fit_with_the_states_of_several_items() -> None:
    """Where a program has several items, states have buffers of their own up to K = 128."""
    many, few = backwards.STAGES_OF_MANY_FORWARD, backwards.STAGES_FORWARD
    for gates in ({}, {"has_g": True}, {"has_g": True, "has_gk": True}):
        of = {K: Buffers(K, 2, forward=True, **gates) for K in many}
        fits = [backwards.fits_separate_buffers(of[K], many[K]) for K in (64, 128, 256)]
        assert fits == [True, True, False]
        assert all(of[K].nbytes(few[K], separate=False) <= backwards.SHARED_BYTES for K in few)


# States and outputs in one kernel

#: No gates of features.
OUTPUT_MODES = ("", "h", "t", "ght")


def made_with_q(mode: str, v_first: bool, K: int = 64) -> dict[str, Any]:
    given = made(mode, v_first, K)
    args = {name: given[name] for name in ("k", "w", "u", "cu_seqlens")}
    args |= {
        "q": made_backwards(mode, v_first, LENGTHS, K)["q"],
        "scale": 0.3,
        "v_first": v_first,
    }
    return args | {
        "g2": given["g"],
        "initial": given["initial_state"],
        "want_final": given["output_final_state"],
    }


def outputs_on_a_cpu(args: dict[str, Any], programs: int = 2) -> tuple[Any, ...]:
    return kernels_hopper_outputs.outputs(**args, launch=launch_on(programs), sms=programs)


def outputs_of_the_class(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Steps 5 to 7 by the model, chunk by chunk."""
    u, dtype, bounds = args["u"], args["u"].dtype, args["cu_seqlens"].tolist()
    o, ends = torch.zeros_like(u), []
    with np.errstate(invalid="ignore", over="ignore"):
        for n, (first, end) in enumerate(pairwise(bounds)):
            S = np.zeros((u.shape[2], args["k"].shape[-1], u.shape[-1]), np.float32)
            if args["initial"] is not None:
                given = args["initial"][n]
                S = (given.mT if args["v_first"] else given).numpy()
            for at in range(first, end, 64):
                here = slice(at, min(at + 64, end))
                q, k, w, own = (args[name][0, here].transpose(0, 1).float().numpy() for name in "qkwu")
                g2 = args["g2"]
                g2 = np.zeros(own.shape[:-1], np.float32) if g2 is None else g2[0, here].T.numpy()
                new = model.new_values(own, w, S, model.CPU, dtype)
                result = model.output(q, k, new, g2, S, args["scale"], model.CPU, dtype)
                o[0, here] = torch.from_numpy(result).transpose(0, 1).to(dtype)
                S = model.closed(k, new, g2, S, model.CPU, dtype)
            ends.append(torch.from_numpy(np.ascontiguousarray(S)))
    final = torch.stack(ends)
    final = final.mT if args["v_first"] else final
    return o, final if args["want_final"] else None


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("mode", OUTPUT_MODES)
@pytest.mark.parametrize("K", [64, 128])
def test_outputs_have_the_bits_of_the_class(K: int, mode: str, v_first: bool) -> None:
    args = made_with_q(mode, v_first, K)
    for found, right in zip(outputs_on_a_cpu(args), outputs_of_the_class(args), strict=True):
        assert (found is None and right is None) or torch.equal(found, right)


def divided(q: torch.Tensor) -> torch.Tensor:
    """Rows divided by their norm, by the model."""
    return torch.from_numpy(model.l2norm(q.float().numpy(), q.dtype)).to(q.dtype)


def in_groups(dtype: torch.dtype, K: int, mode: str, v_first: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments with two value heads for each of two rows of q and k, and rows of q of many lengths, one of
    them 0; and those of the class for the same outputs, each value head with its own q, divided, and k."""
    gen, T, S, V = torch.Generator().manual_seed(K), sum(LENGTHS), len(LENGTHS), 64

    def drawn(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=gen)

    state = drawn(S, 4, V, K) if v_first else drawn(S, 4, K, V)
    args: dict[str, Any] = {
        "q": (drawn(1, T, 2, K) * torch.exp2(drawn(1, T, 2, 1) * 20)).to(dtype),
        "k": drawn(1, T, 2, K).to(dtype), "w": drawn(1, T, 4, K).to(dtype), "u": drawn(1, T, 4, V).to(dtype),
        "g2": -drawn(1, T, 4).abs() if "g" in mode else None, "initial": state if "t" in mode else None,
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int(), "scale": 0.3, "v_first": v_first,
        "want_final": "h" in mode,
    }  # fmt: skip
    args["q"][0, 5] = 0.0
    alone = {"q": divided(args["q"]), "k": args["k"]}
    return args, args | {n: x.repeat_interleave(2, 2) for n, x in alone.items()}


@pytest.mark.parametrize(("mode", "v_first"), [("", False), ("ght", True)])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_divide_rows_of_q_by_their_norm(dtype: torch.dtype, K: int, mode: str, v_first: bool) -> None:
    args, alone = in_groups(dtype, K, mode, v_first)
    before = args["q"].clone()
    right = outputs_of_the_class(alone)
    for found, expected in zip(outputs_on_a_cpu(args | {"normed": True}), right, strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
    assert torch.equal(args["q"], before)
    given = args | {"q": divided(args["q"])}  # without `normed` they are taken as they are
    assert torch.equal(outputs_on_a_cpu(given)[0], right[0]) and not torch.equal(divided(before), before)


def test_rows_of_q_of_sequences_that_are_not_packed_are_divided_by_their_norm() -> None:
    """Their last tiles have rows of the next sequence, or of none."""
    args = made_with_q("g", False)
    rows = {n: args[n][:, :140] for n in ("q", "k", "w", "u", "g2")}
    packed = args | rows | {"q": divided(rows["q"]), "cu_seqlens": torch.tensor([0, 70, 140])}
    right, _ = outputs_of_the_class(packed)
    batch = {n: x.reshape(2, 70, *x.shape[2:]) for n, x in rows.items()}
    found, _ = outputs_on_a_cpu(args | batch | {"cu_seqlens": None, "normed": True})
    assert torch.equal(found.flatten(0, 1), right[0])


@pytest.mark.parametrize(("K", "heads", "expected"), [(128, 64, []), (128, 2, ["q"]), (256, 64, ["k", "q"])])
def test_a_kernel_divides_rows_only_where_no_other_one_can(
    K: int, heads: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_hopper, "sm_count", lambda device: 132)

    def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k = (on_meta(1, 128, heads, K) for _ in range(2))
    recorder = Recorder()
    kernels_hopper.gated_delta_rule(
        recorder, q=q, k=k, v=on_meta(1, 128, heads, 128), g=None, scale=0.1, initial_state=None,
        beta=on_meta(1, 128, heads, dtype=torch.float32), cu_seqlens=None, state_v_first=False,
        use_qk_l2norm_in_kernel=True, output_final_state=False, return_inverse=False,
    )  # fmt: skip
    taken = [values[0] for kernel, values, _ in recorder.launches if kernel.__name__ == "norm_kernel"]
    assert ["q" if x is q else "k" for x in taken] == expected


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("who", range(6))
def test_whoever_is_slow_outputs_are_the_same(
    who: int, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program: consumers of chunks, of keys and of states, producer, the warp of initial and final
    states, producer of gates."""
    args = made_with_q("ght", False)
    right = outputs_of_the_class(args | {"q": divided(args["q"])} if normed else args)
    slowed(monkeypatch, who, (Walked, "store_wait"))
    for found, expected in zip(outputs_on_a_cpu(args | {"normed": normed}, 1), right, strict=True):
        assert torch.equal(found, expected)


def test_later_tokens_that_are_not_finite_change_no_earlier_output() -> None:
    args = made_with_q("g", False)
    clean, _ = outputs_of_the_class(args)
    for row, bad in ((30, float("nan")), (90, float("inf")), (197, float("inf"))):
        args["u"][0, row, 0, 3] = bad
    found, _ = outputs_on_a_cpu(args)
    right, _ = outputs_of_the_class(args)
    assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(right))
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found[0, :30], clean[0, :30]) and torch.equal(found[0, 70:90], clean[0, 70:90])
    assert not found[0, 30, 0, 3].isfinite() and not found[0, 90, 0, 3].isfinite()


def test_cases_of_the_proof_take_one_kernel_and_two() -> None:
    """On an H200, which has 132 SMs."""
    for cases in (PROOF.cases, PROOF.bit_cases, PROOF.agree_cases):
        served = [case.dims | case.options for case in cases if case.dims["K"] in (64, 128)]
        items = [
            (d["B"] if "lengths" not in d else d["lengths"].count("+") + 1) * d["HV"] * (d["V"] // 64)
            for d in served
            if d["V"] % 64 == 0
        ]
        assert {kernels_hopper.in_one_kernel(128, n, 132) for n in items} == {True, False}
    assert not kernels_hopper.in_one_kernel(256, 1000, 132)


def test_all_kinds_of_calls_fit_into_shared_memory() -> None:
    for K in kernels_hopper_outputs.MOST_STAGES:
        for ends in range(3):
            assert kernels_hopper_outputs.stages_of(K, ends, True) >= 2
