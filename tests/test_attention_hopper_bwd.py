"""The backward of attention on Hopper without one: run on a CPU its kernels have the bits of the numpy model,
their stages are released in time, and nothing outside a sequence takes part."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import BF16, ints, made
from attention_on_a_cpu import (
    CASES,
    SHARES,
    backward,
    gradients_on_a_cpu,
    nan_behind_the_keys,
    same_gradients,
    slowed,
)
from gluon_on_a_cpu import Device
from isobit.numerics import cpu_steps
from isobit.ops.attention import kernels_hopper_bwd, kernels_hopper_wide, model

#: Up to D = 128, and beyond. Nothing in the second but the launcher of the op knows its D: small ones do.
KERNELS = {"narrow": kernels_hopper_bwd, "wide": kernels_hopper_wide}
Run = Callable[..., tuple[Tensor | None, ...]]


@pytest.fixture(params=KERNELS)
def on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    return partial(gradients_on_a_cpu, KERNELS[request.param], monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_model(name: str, on_a_cpu: Run) -> None:
    args = backward(CASES[name]())
    wanted = model.attention_bwd(**args)
    nan_behind_the_keys(args)
    same_gradients(name, on_a_cpu(args), wanted)


def test_bits_at_256_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that ends inside a block, and NaN behind the keys."""
    args = backward(made(2, 70, 140, 2, 1, 256, window=90, key_end=ints(140, 133)))
    wanted = model.attention_bwd(**args)
    nan_behind_the_keys(args)
    same_gradients("256", gradients_on_a_cpu(kernels_hopper_wide, monkeypatch, args), wanted)


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("name", SHARES)
def test_whatever_a_program_has_to_do_it_ends(
    name: str, who: int, on_a_cpu: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with the same bits, whoever is slow."""
    programs, make = SHARES[name]
    args = backward(make())
    wanted = model.attention_bwd(**args)
    slowed(monkeypatch, who)
    same_gradients(name, on_a_cpu(args, programs=programs), wanted)


def test_packed_neighbours_take_no_part(on_a_cpu: Run) -> None:
    """Whatever the sequences in front and behind hold."""
    args = backward(CASES["packed"]())
    wanted = model.attention_bwd(**args)
    for name in ("q", "k", "v", "out", "dout"):
        args[name][:, :3], args[name][:, 140:] = torch.nan, torch.nan
    ours = on_a_cpu(args)
    same_gradients("packed", [t[:, 3:140] for t in ours], [t[:, 3:140] for t in wanted])


def test_another_order_is_noticed(on_a_cpu: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all comparisons here: steps of 8 give other bits."""
    args = backward(CASES["dense"]())
    ours = on_a_cpu(args)
    monkeypatch.setattr(cpu_steps, "GROUP", 8)
    other = model.attention_bwd(**args)
    assert all(bool((a != b).any()) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize("given", ["shared", "registers"])
def test_a_stage_that_is_released_too_early_is_noticed(
    given: str, on_a_cpu: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is free when it has been multiplied with, not when that has begun: by either kind of product,
    with the left operand in shared memory (scores) or in registers (sums)."""
    args = backward(made(1, 200, 200, 1, 1, 64))
    wanted = model.attention_bwd(**args)
    original = Device.multiply

    def early(self: Device, a: Any, b: Any, *rest: Any, **more: Any) -> Any:
        product = original(self, a, b, *rest, **more)
        if hasattr(a, "read") == (given == "shared"):  # somebody else writes there from now on
            b.read()[...] = 0.0
        return product

    monkeypatch.setattr(Device, "multiply", early)
    ours = on_a_cpu(args)
    assert all(bool((a != b).any()) for a, b in zip(ours, wanted, strict=True))


def test_integers_that_nobody_has_looked_at_reach_nothing_outside(on_a_cpu: Run) -> None:
    """The device notices what is read or written outside a tensor."""
    values = (-(2**31), 2**31 - 1, 7, -5)
    args = backward(made(4, 70, 140, 2, 1, 64))
    args |= {"key_start": ints(*values), "key_end": ints(*reversed(values))}
    args["key_start"][0], args["key_end"][0] = 3, 130
    good = args | {"key_start": ints(3, 0, 0, 0), "key_end": ints(130, 9, 9, 9)}
    ours, wanted = on_a_cpu(args), model.attention_bwd(**good)
    same_gradients("sequence 0", [t[:1] for t in ours], [t[:1] for t in wanted])
    for cuts in (ints(*values), ints(150, 140, 30, 20, 1)):
        on_a_cpu(backward(made(1, 150, 150, 2, 1, 64)) | {"cu_seqlens_q": cuts})
        more = {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts.flip(0)}
        on_a_cpu(backward(made(1, 80, 150, 2, 1, 64)) | more)


def test_what_is_not_wanted_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = backward(made(1, 70, 70, 1, 1, 64))
    launched: list[str] = []

    def launch(kernel: Any, *rest: Any, **options: Any) -> None:
        launched.append(kernel.__name__)

    monkeypatch.setattr(kernels_hopper_bwd, "sm_count", lambda device: 3)
    ours = kernels_hopper_bwd.attention_bwd(launch, **args | {"want_k": False, "want_v": False})
    assert launched == ["delta_kernel", "dq_kernel"] and ours[1] is ours[2] is None
    launched.clear()
    ours = kernels_hopper_bwd.attention_bwd(launch, **args | {"want_q": False, "want_v": False})
    assert launched == ["delta_kernel", "dkv_kernel"] and ours[0] is ours[2] is None
    monkeypatch.setattr(kernels_hopper_wide, "sm_count", lambda device: 3)
    for i, name in enumerate("qkv"):
        launched.clear()
        only = {f"want_{n}": n == name for n in "qkv"}
        ours = kernels_hopper_wide.attention_bwd(launch, **args | only)
        assert launched == ["delta_kernel", "wide_kernel"]
        assert [t is not None for t in ours] == [i == j for j in range(3)]


def test_a_gradient_of_any_strides_is_taken(on_a_cpu: Run) -> None:
    args = backward(made(1, 70, 70, 2, 1, 64))
    args["dout"] = args["dout"][:, :1, :1, :1].expand(args["dout"].shape)
    same_gradients("expanded", on_a_cpu(args), model.attention_bwd(**args))
    unaligned = torch.zeros(args["out"].numel() + 1, dtype=BF16)[1:].view(args["out"].shape)
    args["dout"] = unaligned.copy_(args["out"])
    same_gradients("begins anywhere", on_a_cpu(args), model.attention_bwd(**args))


def test_an_lse_of_any_strides_is_taken(on_a_cpu: Run) -> None:
    args = backward(made(1, 70, 70, 2, 1, 64))
    args["lse"] = args["lse"].mT.contiguous().mT
    same_gradients("transposed", on_a_cpu(args), model.attention_bwd(**args))


def test_what_it_cannot_serve_is_left_to_others() -> None:
    for D in (64, 128, 256):
        assert kernels_hopper_bwd.why_not(made(1, 70, 70, 2, 1, D)) is None
    assert "no queries" in (kernels_hopper_bwd.why_not(made(1, 0, 70, 2, 1, 64)) or "")
    assert "pages" in (kernels_hopper_bwd.why_not(made(1, 70, 70, 2, 1, 64) | {"block_table": ints(1)}) or "")
