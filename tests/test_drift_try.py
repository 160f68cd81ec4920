"""`--try`: the remedy of each kind of finding removes what the modules of that kind add, and nothing else;
the model is restored."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen3 import modeling_qwen3

import hf_models
import isobit
from isobit.cli.html.drift import section
from isobit.drift.remedies import remedy
from isobit.frame.contract import ContractError
from row_by_row import NAME, nudged, planted, planted_attention, row_by_row, sequences

LAYER, NAMES = "model.layers.0", {None: "zero_drift"}
linear = nn.functional.linear


def in_batches(x: Tensor) -> bool:
    """Not the rows by which a norm is recognised."""
    return x.ndim > 2 and len(x) > 4


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of the classes that a checkpoint has, without drift on any CPU: products and activations row by row."""

    def by_rows(self: nn.Linear, x: Tensor) -> Tensor:
        rows = [linear(row[None], self.weight, self.bias) for row in x.flatten(0, -2)]
        return torch.cat(rows).reshape(*x.shape[:-1], -1)

    silu = SiLUActivation.forward
    monkeypatch.setattr(nn.Linear, "forward", by_rows)
    monkeypatch.setattr(SiLUActivation, "forward", lambda self, x: row_by_row(lambda r: silu(self, r), x))
    made = hf_models.made("Qwen3", num_hidden_layers=1)
    made.set_attn_implementation(NAME)
    return made


def faulty(monkeypatch: pytest.MonkeyPatch, of: Any, name: str, when: Callable[..., bool]) -> None:
    """The result of a function, or the first of several, has other bits if its arguments are such."""
    theirs = getattr(of, name)

    def wrong(*args: Any) -> Any:
        y = theirs(*args)
        if not when(*args):
            return y
        return nudged(y) if isinstance(y, Tensor) else (nudged(y[0]), *y[1:])

    monkeypatch.setattr(of, name, wrong)


def attempts(model: Any, **options: Any) -> dict[str | None, Any]:
    report = isobit.drift.measure(
        model, sequences((6,)), vs=["batch"], batch_sizes=[5], try_remedies=True, **options
    )
    assert [each["in_words"] for each in report.to_json()["tried"]] == [str(each) for each in report.tried]
    assert all(str(each) in str(report) for each in report.tried)
    on_page = [[line["what"], line["refused"], line["differ"]] for line in section(report.to_json())["tried"]]
    assert on_page == [[NAMES.get(t.kind, f"{t.kind}, 1 module"), t.refused, t.differ] for t in report.tried]
    return {each.kind: each for each in report.tried}


def test_each_kind_of_finding_is_tried_by_itself(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five faults at once: in a product, in the last norm, in an activation, in the rotation of queries,
    and in attention. Each remedy removes what is of its kind, and the others are still there."""
    up = model.model.layers[0].mlp.up_proj
    faulty(monkeypatch, nn.Linear, "forward", lambda layer, x: layer is up and in_batches(x))
    faulty(
        monkeypatch, modeling_qwen3.Qwen3RMSNorm, "forward",
        lambda norm, x: norm is model.model.norm and in_batches(x),
    )  # fmt: skip
    faulty(monkeypatch, SiLUActivation, "forward", lambda act, x: in_batches(x))
    faulty(monkeypatch, modeling_qwen3, "apply_rotary_pos_emb", lambda q, *rest: in_batches(q))
    rotates = modeling_qwen3.apply_rotary_pos_emb
    before = {name: type(module) for name, module in model.named_modules()}
    with planted_attention(lambda q, k, mask: in_batches(q)):
        found = attempts(model)
    kinds = ["rope", "attention", "activation", "linear", "norm"]
    assert sorted(found, key=str) == sorted([None, *kinds], key=str)
    for kind in kinds:
        tried = found[kind]
        assert tried.refused is None and not tried.still and tried.after_ms, (kind, str(tried))
        assert len(tried.rows) == 2 and tried.before_differ
        others = {each.kind for row in tried.rows for each in row.where.adding}
        assert others == {*kinds} - {kind}, kind
        assert "none of them adds a difference any more in 2 comparisons" in str(tried)
        assert "since other modules add, too" in str(tried)
    assert found["linear"].modules == [f"{LAYER}.mlp.up_proj"] and found["norm"].modules == ["model.norm"]
    assert found["attention"].modules == found["rope"].modules == [f"{LAYER}.self_attn"]
    # zero_drift leaves activations and rotations to torch, and its trial has batches of three.
    assert found[None].differ and "other bits in 2 of 2 comparisons" in str(found[None])
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert modeling_qwen3.apply_rotary_pos_emb is rotates and model.config._attn_implementation == NAME
    assert "forward" not in vars(model.model.layers[0].mlp) and not vars(model.model.norm).get("options")


def test_a_remedy_that_does_not_help_says_so(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in keys behind their rotation: `isobit.rope` is not what removes it."""
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update

    def wrong(self: Any, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, k, v, *args, **kwargs)
        return (nudged(keys) if k.shape[2] == 1 else keys), values

    monkeypatch.setattr(DynamicLayer, "update", wrong)
    report = isobit.drift.measure(model, sequences((6,)), vs=["decode"], try_remedies=True)
    rope, whole = report.tried
    assert rope.kind == "rope" and rope.still == [f"{LAYER}.self_attn, its own code before attention"]
    assert f"{rope.still[0]} still adds a difference" in str(rope) and rope.differ == rope.before_differ
    assert whole.kind is None and whole.refused


def test_what_nothing_removes_is_not_tried(model: Any) -> None:
    model.model.norm = nn.LayerNorm(64).bfloat16()
    with planted(model.model.norm, in_batches):
        (whole,) = attempts(model).values()
    assert whole.kind is None and whole.differ == whole.before_differ > 0
    assert "other bits in 2 of 2 comparisons" in str(whole)


@pytest.mark.parametrize(
    ("kind", "family", "name", "message"),
    [
        ("activation", "Gemma3", f"{LAYER}.mlp.act_fn", "not the SiLU of a gate_proj"),
        ("norm", "Qwen3", f"{LAYER}.mlp", "not an RMSNorm in bf16 or fp16"),
        ("rope", "Qwen3", f"{LAYER}.mlp", "not rotated as in Llama"),
        ("linear", "Qwen3", f"{LAYER}.mlp.act_fn", "no linear layer"),
    ],
)
def test_a_module_that_a_remedy_is_not_for_is_refused(
    kind: str, family: str, name: str, message: str
) -> None:
    model, applied = hf_models.made(family, num_hidden_layers=2), remedy(kind).applied
    assert applied is not None
    with pytest.raises(ContractError, match=message), applied(model, [name]):
        pass


@contextmanager
def decoding_with_other_bits() -> Iterator[None]:
    theirs = AttentionInterface()["sdpa"]

    def wrong(module: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = theirs(module, q, *args, **kwargs)
        return (nudged(out) if q.shape[2] == 1 else out), weights

    AttentionInterface.register("sdpa", wrong)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", theirs)


def test_zero_drift_is_tried_and_undone() -> None:
    model = hf_models.made("Qwen3", num_hidden_layers=1)
    prompts, options = sequences((5,)), {"vs": ["decode"], "try_remedies": True}
    with decoding_with_other_bits():
        report = isobit.drift.measure(model, prompts, **options)
    decoding = report.rows[0]
    assert decoding.differ and decoding.where is not None and decoding.where.first is not None
    assert decoding.where.first.kind == "attention"
    tried = report.tried[-1]
    assert tried.kind is None and tried.refused is None and tried.differ == 0
    assert len(tried.rows) == 3 and tried.after_ms
    before = sum(row.differ for row in report.rows)
    assert f"the same bits in all 3 comparisons; 0 tokens differ instead of {before};" in str(report)
    assert type(model.lm_head) is torch.nn.Linear  # the model is restored
    # A module that depends on the batch and that isobit does not compute is a reason to refuse the model.
    with planted(model.model.norm, lambda x: x.shape[1] == 1):
        (refused,) = isobit.drift.measure(model, prompts, **options | {"locate": False}).tried
    assert "Qwen3RMSNorm" in str(refused) and not refused.rows


def test_a_model_in_fp32_says_what_is_missing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    up = model.float().model.layers[0].mlp.up_proj
    faulty(monkeypatch, nn.Linear, "forward", lambda layer, x: layer is up and in_batches(x))
    found = attempts(model)
    assert found["linear"].refused.startswith("DetLinear(weight: [64, 64] fp32): parameters must be bf16")
    assert "its weight is torch.float32; cast the model to bf16" in found[None].refused
    assert type(up) is nn.Linear
