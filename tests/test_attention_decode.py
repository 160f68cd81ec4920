"""Decoding by the Hopper kernel: bits, boundaries, and compiled code."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import to_ptx
from attention_calls import BF16, NOTHING, ints, made
from interpreted import in_interpreter
from isobit.frame.launch import Recorder
from isobit.ops.attention import kernels_hopper, kernels_hopper_decode, op
from isobit.ops.attention.calls import call_of, decodes

pytestmark = pytest.mark.compat

CALLS = Path(__file__).with_name("attention_decode_calls.py")


@pytest.mark.parametrize("what", ["bits", "splits", "controls", "folds"])
def test_kernels(what: str) -> None:
    """See the functions of these names."""
    in_interpreter(CALLS, what)


def compiled(B: int, T: int, S: int, G: int, D: int, ends: bool = False) -> dict[str, Any]:
    """Its kernels, by name; with `ends`, those that read lengths on the device."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device="meta")

    args = {"q": empty(B, T, 2 * G, D), "k": empty(B, S, 2, D), "v": empty(B, S, 2, D), **NOTHING}
    if ends:
        args["key_end"] = torch.empty(B, dtype=torch.int32, device="meta")
    recorder = Recorder()
    kernels_hopper_decode.attention(recorder, **args, causal=True, return_lse=False)
    return {name: to_ptx.compiled(source, options) for name, source, options in recorder.sources()}


def test_memory_is_accessed_only_after_the_previous_kernel_has_ended() -> None:
    """Both kernels are started before that, and let the next one start. A row's fold reads what the last
    program of the other wrote."""
    for name, kernel in compiled(2, 1, 3000, 4, 128, ends=True).items():
        text = kernel.asm["ptx"]
        assert kernel.metadata.launch_pdl, name
        waits = text.index("griddepcontrol.wait")
        touches = [touch.start() for touch in re.finditer(r"(ld|st)\.global|cp\.async\.bulk\.tensor", text)]
        assert touches and waits < min(touches), name
        assert "griddepcontrol.launch_dependents" in text, name


@pytest.mark.parametrize(("T", "G", "D"), [(1, 4, 128), (1, 1, 64), (1, 8, 256)])
def test_two_programs_share_an_sm(T: int, G: int, D: int) -> None:
    """Registers and shared memory of 228 KB, of which each program costs 1 KB more."""
    kernel = compiled(64, T, 3000, G, D)["decode_kernel"]
    assert 2 * (kernel.metadata.shared + 1024) <= 228 * 1024
    assert "wgmma" in kernel.asm["ptx"]


def test_the_largest_tile_fits() -> None:
    assert compiled(64, 8, 3000, 8, 256)["decode_kernel"].metadata.shared <= 227 * 1024


def test_few_programs_have_longer_rings() -> None:
    def stages(B: int, T: int, D: int) -> int:
        call = call_of(made(B, T, 2048, 2, 1, D))
        return kernels_hopper_decode._stages(call, 16, 128 if D < 256 else 64, B * 2, sms=132)

    assert [stages(1, 1, 128), stages(67, 1, 128)] == [6, 3]
    assert [stages(1, 1, 64), stages(67, 1, 64)] == [8, 6]


def paged(page: int, **more: Any) -> dict[str, Any]:
    table = torch.zeros(2, 2048 // page, dtype=torch.int32)
    return made(2, 1, page, 2, 1, 64) | {
        "block_table": table,
        "q": torch.empty(2, 1, 2, 64, dtype=BF16),
        **more,
    }


def test_which_calls_the_decode_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobit.frame.device.arch_key", lambda device: "sm_90")
    monkeypatch.setattr("isobit.frame.device.triton_cannot_run", lambda device: None)
    few = made(2, 4, 2000, 2, 1, 64)
    wastes, bwd_wastes = (o.backend_named("hopper").not_by_default for o in (op.forward, op.backward))
    assert decodes(call_of(few)) and wastes(few) is None
    assert "4 a sequence" in (bwd_wastes(few) or "")  # it has no such tiles
    assert "4 a sequence" in (wastes(made(2, 4, 1000, 2, 1, 64)) or "")
    assert not decodes(call_of(made(2, 4, 1024, 2, 1, 64)))  # one segment
    assert not decodes(call_of(made(2, 33, 2000, 2, 1, 64)))  # 66 rows
    for page in (64, 128, 192):
        assert kernels_hopper.why_not(paged(page)) is None, page
    assert "pages of 16" in (kernels_hopper.why_not(paged(16)) or "")
    assert "pages of 96" in (kernels_hopper.why_not(paged(96)) or "")
    assert "key_start" in (kernels_hopper.why_not(paged(64, key_start=ints(0, 0))) or "")
    assert "many queries" in (
        kernels_hopper.why_not(paged(64, q=torch.empty(2, 70, 2, 64, dtype=BF16))) or ""
    )
