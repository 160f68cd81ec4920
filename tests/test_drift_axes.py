"""Planted faults under the ways of computing that `--vs` names only on request, and with each cache: each is
named, on the settings that show it, and nothing else is."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

import isobit
from isobit.drift.axes import AXES
from isobit.drift.report import Report
from row_by_row import made, nudged, planted, planted_attention, sequences

MODEL = made(num_attention_heads=1)
LAYERS = MODEL.model.layers
ATTENTION = "model.layers.{}.self_attn:attention"

#: All but autocast, which changes nearly all bits by itself.
VS = tuple(axis for axis in AXES if axis != "autocast")


def measured(vs: tuple[str, ...] = VS, model: Any = MODEL) -> Report:
    return isobit.drift.measure(
        model, sequences((6, 4, 5)), vs=vs, batch_sizes=(2, 5), padding=3, chunk=4, micro_batch=3
    )


def columns(x: Tensor) -> int:
    return x.shape[1]


def several_in_a_row(q: Tensor, k: Tensor, mask: Tensor) -> bool:
    """Packed: a query without a cache that does not see the first key, and no padding in front of all."""
    return bool(len(q) == 1 and q.shape[2] > 1 and mask[0, 0, 0, 0] and not mask[0, 0, -1, 0])


def unused_keys(q: Tensor, k: Tensor, mask: Tensor) -> bool:
    """A static cache: the last query does not see the last key, and no prefill of a longer sequence."""
    return bool(len(q) == 1 and q.shape[2] == 1 and not mask[0, 0, -1, -1])


#: Faults of as many settings, each of which shows its own and no other: no other one has 6 + 4 + 5 tokens in
#: a row, or three lines of a micro-batch.
BOTH_SIDES = [f"micro-batch: 3 rows, padded on the {side}" for side in ("left", "right")]
IN_PRODUCTS = {
    "packed: one row": (
        ["model.layers.0.self_attn.k_proj"],
        lambda: planted(LAYERS[0].self_attn.k_proj, lambda x: columns(x) == 15),
    ),
    "decode: static cache": (
        [ATTENTION.format(0), ATTENTION.format(1)], lambda: planted_attention(unused_keys),
    ),
    "decode: 3 rows, padded on the left": (
        ["model.layers.0.mlp.gate_proj"],
        lambda: planted(LAYERS[0].mlp.gate_proj, lambda x: len(x) == 3 and columns(x) == 1),
    ),
    **dict.fromkeys(BOTH_SIDES, (
        ["model.layers.1.self_attn.v_proj"],
        lambda: planted(LAYERS[1].self_attn.v_proj, lambda x: len(x) == 3 and columns(x) > 5),
    )),
}  # fmt: skip
ELSEWHERE = {
    "packed: one row": (
        [ATTENTION.format(0), ATTENTION.format(1)], lambda: planted_attention(several_in_a_row),
    ),
    **dict.fromkeys(BOTH_SIDES, (
        ["model.norm"], lambda: planted(MODEL.model.norm, lambda x: len(x) == 3 and columns(x) > 5),
    )),
    **dict.fromkeys(("decode: dynamic cache", "decode: static cache"), (
        ["model.layers.1.mlp.down_proj"],
        lambda: planted(LAYERS[1].mlp.down_proj, lambda x: len(x) == 1 and columns(x) == 1),
    )),
}  # fmt: skip


@pytest.mark.parametrize("faults", [IN_PRODUCTS, ELSEWHERE])
def test_planted_faults_are_named_and_nothing_else(faults: dict[str, tuple[list[str], Any]]) -> None:
    with ExitStack() as stack:
        for fault in dict.fromkeys(fault for _, fault in faults.values()):
            stack.enter_context(fault())
        report = measured()
    assert not report.skipped and len(report.rows) == 13
    found = {}
    for row in report.rows:
        assert row.where is not None
        if row.differ or row.where.adding:
            found[f"{row.axis}: {row.setting}"] = [each.name for each in row.where.adding]
            assert row.differ and row.where.first is row.where.adding[0]
    assert found == {setting: names for setting, (names, _) in faults.items()}


def test_a_static_cache_that_changes_keys_is_not_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that a static cache returns have other bits: neither attention nor a projection is named."""
    update = StaticLayer.update

    def wrong(self: Any, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, k, v, *args, **kwargs)
        return nudged(keys), values

    monkeypatch.setattr(StaticLayer, "update", wrong)
    report = measured(("decode", "chunk"))
    adding = {row.setting: row.where.adding for row in report.rows if row.where and row.where.adding}
    assert set(adding) == {"static cache"}
    assert {each.kind for each in adding["static cache"]} == {"rope"}


def under_autocast(*given: Any) -> bool:
    return torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.layers.0.input_layernorm", None])
def test_a_fault_under_autocast_is_named(name: str | None) -> None:
    """Of a model in bf16 it changes nothing else: this one has no op that autocast computes in fp32."""
    model = made(num_attention_heads=1).bfloat16()
    assert [row.differ for row in measured(("autocast",), model).rows] == [0]
    attention = planted_attention(under_autocast)
    fault = attention if name is None else planted(model.get_submodule(name), under_autocast)
    with fault:
        (row,) = measured(("autocast",), model).rows
    assert row.differ and row.where is not None
    expected = [ATTENTION.format(0), ATTENTION.format(1)] if name is None else [name]
    assert [each.name for each in row.where.adding] == expected
