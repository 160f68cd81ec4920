"""The forward recurrence's kernel for Hopper run on a CPU: what it computes, and that no partition overtakes
another in the buffers that they share."""

from functools import partial
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
from isobit.ops.gated_delta_rule import kernels_hopper, model
from test_delta_rule_hopper import LENGTHS, MODES, Room, Walked
from test_delta_rule_hopper import made as made_backwards


class Steps:
    """The arithmetic of class gdr/1/cpu."""

    product, fma, exp2 = staticmethod(cpu_steps.product), staticmethod(cpu_steps.fused), staticmethod(np.exp2)


def on_a_cpu(args: dict[str, Any], programs: int = 2, carry: Any = None) -> tuple[Any, ...]:
    device = Walked(programs, Steps)
    scope = device.scope(
        hopper_pipe, kernels_hopper_io, backwards, kernels_hopper, tma_store=device.store_box,
        tma=SimpleNamespace(store_wait=device.store_wait), reinterpreted=Room.reinterpret,
    )  # fmt: skip

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        constants = (options[name] for name in kernel.arg_names[len(values) :])
        device.run(scope, kernel, (*values, *constants))

    return kernels_hopper.fwd_h(launch, carry=carry or partial(kernels_hopper.states, sms=programs), **args)


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
        args, carry=lambda *rest: kernels_hopper.states(*given, None, chunks, *rest[9:], 2)
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
        args, carry=lambda *rest: kernels_hopper.states(*given, None, chunks, *rest[9:], 2)
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
