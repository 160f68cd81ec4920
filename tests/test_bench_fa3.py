"""FlashAttention-3 as a rival of `attention`: it gets the same work, and is left out where it is missing."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from isobit.ops.attention import rivals
from isobit.spec.proof import Case
from test_bench_attention import SERIES, arguments

GPU, CPU = torch.device("cuda"), torch.device("cpu")
CASE: Case = SERIES["attention"].cases[0]


def stand_in(monkeypatch: pytest.MonkeyPatch, supported: bool = True) -> list[int]:
    """vLLM's module, computed by the reference. Returns the numbers of splits that it is asked for."""
    asked: list[int] = []

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
        *, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, block_table: Tensor | None,
        softmax_scale: float | None, causal: bool, window_size: list[int] | None, softcap: float,
        num_splits: int, fa_version: int,
    ) -> Tensor:  # fmt: skip
        assert fa_version == 3 and cu_seqlens_q.dtype == torch.int32
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        if cu_seqlens_k is not None:
            assert max_seqlen_k == int(cu_seqlens_k.diff().max()) and seqused_k is None
        else:
            assert block_table is not None and seqused_k is not None and max_seqlen_k >= int(seqused_k.max())
        asked.append(num_splits)
        assert window_size is None or window_size[1] == 0
        return isobit.attention(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table,
            key_end=seqused_k, scale=softmax_scale, causal=causal, softcap=softcap or None,
            window=None if window_size is None else window_size[0] + 1, backend="reference",
        )  # fmt: skip

    whole, part = ModuleType("vllm"), ModuleType("vllm.vllm_flash_attn")
    made: dict[str, Any] = {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "is_fa_version_supported": lambda version: supported,
        "fa_version_unsupported_reason": lambda version: "FA3 is not for this GPU",
    }
    for name, value in made.items():
        setattr(part, name, value)
    monkeypatch.setitem(sys.modules, "vllm", whole)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", part)
    return asked


CHANGES = {
    "dense": None, "packed": rivals.packed, "window": rivals.windowed, "softcap": rivals.capped,
    "paged": rivals.paged,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_it_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    args = arguments(*{"packed": (1600, 1600), "paged": (1, 40)}.get(name, (30, 30)))
    if name == "packed":
        args = {k: v[:1] if isinstance(v, Tensor) else v for k, v in args.items()}
    change = CHANGES[name]
    args = args if change is None else change(args)
    wanted = isobit.attention(**args, backend="reference")
    for rival, splits in ((rivals.FA3, 0), (rivals.FA3_ONE, 1)):
        found = rival.function(rival.prepare(args))
        assert found.shape == wanted.shape and torch.equal(found, wanted)
        assert asked.pop() == splits


def test_it_is_left_out_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device: torch.device, direction: str = "fwd") -> str | None:
        return rivals.FA3.why_not(CASE, device, direction, ())

    assert reason(CPU) == "its kernels need a GPU"
    with monkeypatch.context() as without:
        of = {"vllm.vllm_flash_attn": "not installed"}
        without.setattr(rivals, "cannot_import", of.__getitem__)
        assert reason(GPU) == "not installed"
    stand_in(monkeypatch)
    assert reason(GPU) is None
    assert reason(GPU, "bwd") == "not timed for bwd"
    stand_in(monkeypatch, supported=False)
    assert reason(GPU) == "FA3 is not for this GPU"
