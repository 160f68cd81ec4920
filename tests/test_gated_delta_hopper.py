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
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.numerics import cpu_steps
from isobit.ops.delta_rule import kernels_hopper as backwards
from isobit.ops.delta_rule import kernels_hopper_io
from isobit.ops.delta_rule.kernels_hopper import Buffers
from isobit.ops.gated_delta_rule import (
    kernels_hopper,
    kernels_hopper_outputs,
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
        kernels_hopper_outputs, tma_store=device.store_box,
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
            S = np.zeros((1, args["k"].shape[-1], u.shape[-1]), np.float32)
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


@pytest.mark.parametrize("who", range(6))
def test_whoever_is_slow_outputs_are_the_same(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program: consumers of chunks, of keys and of states, producer, the warp of initial and final
    states, producer of gates."""
    args = made_with_q("ght", False)
    right = outputs_of_the_class(args)
    slowed(monkeypatch, who, (Walked, "store_wait"))
    for found, expected in zip(outputs_on_a_cpu(args, 1), right, strict=True):
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
