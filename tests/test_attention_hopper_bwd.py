"""The backward of attention on Hopper without one: run on a CPU its kernels have the bits of the numpy model,
their stages are released in time, and nothing outside a sequence takes part."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_calls import BF16, ints, made
from attention_on_a_cpu import CASES, SHARES, nan_behind_the_keys, of_attention, slowed
from gluon_on_a_cpu import Device, in_order
from isobit.kernels.hopper import division, heads, pipeline, softmax
from isobit.ops.attention import kernels_hopper, kernels_hopper_bwd, model
from isobit.ops.attention.proof.bits import cancelling


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, counters: Tensor) -> None:
    """What the kernel of that name leaves: its order is the model's."""
    wide = 1 << (out.shape[-1] - 1).bit_length()
    products = model._filled((out.float() * dout.float()).numpy(), 3, wide)
    sums = model._halves(products.reshape(-1, wide), 1).reshape(out.shape[:-1]).swapaxes(1, 2)
    delta.copy_(torch.from_numpy(sums.copy()))
    counters.zero_()
    if dlse is not None:
        delta -= dlse


def on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], programs: int = 3, **changes: Any
) -> tuple[Tensor | None, ...]:
    device = of_attention(Device(model.CPU, programs))
    modules = (pipeline, heads, division, softmax, kernels_hopper, kernels_hopper_bwd)
    scope = device.scope(*modules, **changes)
    monkeypatch.setattr(kernels_hopper_bwd, "sm_count", lambda device: programs)

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        if kernel.__name__ == "delta_kernel":
            return delta_of(*values[:5])
        device.programs = grid[0]
        device.run(scope, kernel, in_order(kernel, values, options))
        given = dict(zip(kernel.arg_names, values, strict=False))
        of_keys = kernel.__name__ == "dkv_kernel"
        items = given["tiles"] * given["KV" if of_keys else "H"]
        assert int(given["counters"][int(of_keys)]) == items  # each once, and each program once found none

    return kernels_hopper_bwd.attention_bwd(launch, **args)


def backward(args: dict[str, Any]) -> dict[str, Any]:
    """The call of the backward that belongs to one of the forward, with sums that all but cancel, so that
    another order shows."""
    args["k"][..., 0] = 4.0
    out, lse = model.attention(**args)
    assert lse is not None
    gen = torch.Generator().manual_seed(1)
    args, (dout, dlse) = cancelling(
        args, [torch.randn(t.shape, generator=gen).to(t.dtype) for t in (out, lse)]
    )
    out, lse = model.attention(**args)
    given = {n: v for n, v in args.items() if n != "return_lse"}
    wanted = dict.fromkeys(("want_q", "want_k", "want_v"), True)
    return given | {"out": out, "lse": lse, "dout": dout, "dlse": dlse} | wanted


def same(what: str, ours: Any, other: Any) -> None:
    for name, a, b in zip("qkv", ours, other, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), (what, name, int((a != b).sum()))


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = backward(CASES[name]())
    wanted = model.attention_bwd(**args)
    nan_behind_the_keys(args)
    same(name, on_a_cpu(monkeypatch, args), wanted)


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("name", SHARES)
def test_whatever_a_program_has_to_do_it_ends(name: str, who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with the same bits, whoever is slow."""
    programs, make = SHARES[name]
    args = backward(make())
    wanted = model.attention_bwd(**args)
    slowed(monkeypatch, who)
    same(name, on_a_cpu(monkeypatch, args, programs=programs), wanted)


def test_packed_neighbours_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sequences in front and behind hold."""
    args = backward(CASES["packed"]())
    wanted = model.attention_bwd(**args)
    for name in ("q", "k", "v", "out", "dout"):
        args[name][:, :3], args[name][:, 140:] = torch.nan, torch.nan
    ours = on_a_cpu(monkeypatch, args)
    same("packed", [t[:, 3:140] for t in ours], [t[:, 3:140] for t in wanted])


def test_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all comparisons here: steps of 8 give other bits."""
    args = backward(CASES["dense"]())
    ours = on_a_cpu(monkeypatch, args)
    monkeypatch.setattr(model, "GROUP", 8)
    other = model.attention_bwd(**args)
    assert all(bool((a != b).any()) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize("given", ["shared", "registers"])
def test_a_stage_that_is_released_too_early_is_noticed(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ours = on_a_cpu(monkeypatch, args)
    assert all(bool((a != b).any()) for a, b in zip(ours, wanted, strict=True))


def test_integers_that_nobody_has_looked_at_reach_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device notices what is read or written outside a tensor."""
    values = (-(2**31), 2**31 - 1, 7, -5)
    args = backward(made(4, 70, 140, 2, 1, 64))
    args |= {"key_start": ints(*values), "key_end": ints(*reversed(values))}
    args["key_start"][0], args["key_end"][0] = 3, 130
    good = args | {"key_start": ints(3, 0, 0, 0), "key_end": ints(130, 9, 9, 9)}
    ours, wanted = on_a_cpu(monkeypatch, args), model.attention_bwd(**good)
    same("sequence 0", [t[:1] for t in ours], [t[:1] for t in wanted])
    for cuts in (ints(*values), ints(150, 140, 30, 20, 1)):
        on_a_cpu(monkeypatch, backward(made(1, 150, 150, 2, 1, 64)) | {"cu_seqlens_q": cuts})
        more = {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts.flip(0)}
        on_a_cpu(monkeypatch, backward(made(1, 80, 150, 2, 1, 64)) | more)


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


def test_a_gradient_of_any_strides_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    args = backward(made(1, 70, 70, 2, 1, 64))
    args["dout"] = args["dout"][:, :1, :1, :1].expand(args["dout"].shape)
    same("expanded", on_a_cpu(monkeypatch, args), model.attention_bwd(**args))
    unaligned = torch.zeros(args["out"].numel() + 1, dtype=BF16)[1:].view(args["out"].shape)
    args["dout"] = unaligned.copy_(args["out"])
    same("begins anywhere", on_a_cpu(monkeypatch, args), model.attention_bwd(**args))


def test_an_lse_of_any_strides_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    args = backward(made(1, 70, 70, 2, 1, 64))
    args["lse"] = args["lse"].mT.contiguous().mT
    same("transposed", on_a_cpu(monkeypatch, args), model.attention_bwd(**args))


@pytest.mark.parametrize(
    ("shape", "reason"), [((1, 70, 70, 2, 1, 256), "128 columns"), ((1, 0, 70, 2, 1, 64), "no queries")]
)
def test_what_it_cannot_serve_is_left_to_others(shape: tuple[int, ...], reason: str) -> None:
    assert kernels_hopper_bwd.why_not(made(1, 70, 70, 2, 1, 128)) is None
    assert reason in (kernels_hopper_bwd.why_not(made(*shape)) or "")
    assert "pages" in (kernels_hopper_bwd.why_not(made(1, 70, 70, 2, 1, 64) | {"block_table": ints(1)}) or "")
