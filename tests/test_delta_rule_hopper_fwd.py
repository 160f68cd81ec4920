"""The forward recurrence's kernel for Hopper run on a CPU: what it computes, and that no partition overtakes
another in the buffers that they share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_on_a_cpu import slowed
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.ops.delta_rule import kernels_hopper, kernels_hopper_fwd, kernels_hopper_io
from isobit.ops.delta_rule.kernels_hopper import Buffers
from test_delta_rule_hopper import LENGTHS, MODES, Room, Walked
from test_delta_rule_hopper import made as made_backwards


def on_a_cpu(args: dict[str, Any], programs: int = 2) -> tuple[Tensor | None, ...]:
    device = Walked(programs)
    scope = device.scope(
        hopper_pipe, kernels_hopper_io, kernels_hopper, kernels_hopper_fwd, tma_store=device.store_box,
        tma=SimpleNamespace(store_wait=device.store_wait), reinterpreted=Room.reinterpret,
    )  # fmt: skip

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        constants = (options[name] for name in kernel.arg_names[len(values) :])
        device.run(scope, kernel, (*values, *constants))

    return kernels_hopper_fwd.fwd_h(launch, programs, **args)


def made(mode: str, v_first: bool, K: int = 64) -> dict[str, Any]:
    """The inputs of the recurrence backwards, by their names forwards: t gives an initial state, h asks for
    the final one."""
    args = made_backwards(mode, v_first, LENGTHS, K)
    args |= {"u": args["dv"], "initial_state": args["dht"], "output_final_state": "h" in mode}
    names = ("k", "w", "u", "g", "gk", "initial_state", "output_final_state", "state_v_first", "chunk_size",
             "cu_seqlens", "chunk_offsets", "chunk_indices")  # fmt: skip
    return {name: args[name] for name in names}


def truth(args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """h, the new values and final states in fp64, states as [chunk or sequence, K, V]; one head."""
    k, w, u = (args[name][0, :, 0].double() for name in ("k", "w", "u"))
    given, states, final, new = args["initial_state"], [], [], torch.zeros_like(u)
    for n, (start, end) in enumerate(zip(args["cu_seqlens"][:-1], args["cu_seqlens"][1:], strict=True)):
        S = torch.zeros(k.shape[1], u.shape[1], dtype=torch.double)
        if given is not None:
            S = given[n, 0].double().T if args["state_v_first"] else given[n, 0].double()
        for first in range(int(start), int(end), 64):
            rows = slice(first, min(first + 64, int(end)))
            states.append(S)
            values = new[rows] = u[rows] - w[rows] @ S
            if args["g"] is not None:
                g = args["g"][0, rows, 0].double()
                values, S = values * torch.exp2(g[-1] - g)[:, None], S * torch.exp2(g[-1])
            if args["gk"] is not None:
                S = S * torch.exp2(args["gk"][0, rows, 0].double()[-1])[:, None]
            S = S + k[rows].T @ values
        final.append(S)
    return torch.stack(states), new, torch.stack(final)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_is_the_recurrence(K: int, mode: str, v_first: bool) -> None:
    args = made(mode, v_first, K)
    h, new, final = on_a_cpu(args)
    assert (final is None) == ("h" not in mode)
    found = [h[0, :, 0], new[0, :, 0]] + ([] if final is None else [final[:, 0]])
    for which, (ours, right) in enumerate(zip(found, truth(args), strict=False)):
        right = right.transpose(-1, -2) if v_first and which != 1 else right
        assert (ours.double() - right).norm() < 0.006 * right.norm()


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
    monkeypatch.setattr(kernels_hopper_fwd, "fits_separate_buffers", lambda *sizes: separate)
    for found, expected in zip(on_a_cpu(args, 1), right, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("v_first", [False, True])
def test_no_state_is_stored_before_h_whatever_the_integers_are(v_first: bool) -> None:
    args = made("kht", v_first)
    low, high = -(1 << 63), (1 << 63) - 1
    args["chunk_offsets"] = torch.tensor([low, -1, high, low + 1, -(1 << 31), 1 << 20, 3, 0])
    _, new, final = on_a_cpu(args)  # asserts that no store begins before its tensor
    _, right, last = truth(args)
    assert (new[0, :, 0].double() - right).norm() < 0.006 * right.norm()
    assert (final[:, 0].double() - (last.transpose(-1, -2) if v_first else last)).norm() < 0.006 * last.norm()


def test_its_stages_fit_with_the_states_of_several_items() -> None:
    """Where a program has several items, states have buffers of their own up to K = 128."""
    many, few = kernels_hopper.STAGES_OF_MANY_FORWARD, kernels_hopper.STAGES_FORWARD
    for gates in ({}, {"has_g": True}, {"has_g": True, "has_gk": True}):
        of = {K: Buffers(K, 2, forward=True, **gates) for K in many}
        fits = [kernels_hopper.fits_separate_buffers(of[K], many[K]) for K in (64, 128, 256)]
        assert fits == [True, True, False]
        assert all(of[K].nbytes(few[K], separate=False) <= kernels_hopper.SHARED_BYTES for K in few)
