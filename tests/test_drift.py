"""`isobit.drift`: a model without drift has none on any axis, and a planted fault is named, and nothing
else."""

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.llama import modeling_llama

import hf_models
import isobit
from isobit.drift.axes import AXES
from isobit.drift.measure import located, made_up
from isobit.drift.record import kind_of
from isobit.drift.remedies import remedy
from isobit.drift.report import Report
from isobit.frame.contract import ContractError
from row_by_row import V, by_rows, made, nudged, planted, planted_attention, sequences

MODEL = made()
ALL = tuple(AXES)


def measured(vs: tuple[str, ...], lengths: tuple[int, ...] = (20, 12), model: Any = MODEL) -> Report:
    return isobit.drift.measure(model, sequences(lengths), vs=vs, batch_sizes=(2, 5), padding=3, chunk=7)


def named(report: Report) -> dict[str, list[str]]:
    """The modules that add a difference, by axis and setting."""
    return {
        f"{row.axis}: {row.setting}": [found.name for found in row.where.adding]
        for row in report.rows
        if row.where is not None and (row.differ or row.where.adding)
    }


def test_a_model_without_drift_has_none() -> None:
    report = measured(tuple(axis for axis in ALL if axis != "autocast"), (20, 12, 20))
    assert not report.skipped and len(report.rows) == 13
    for row in report.rows:
        assert row.differ == 0 and row.where is not None and not row.where.adding, row.setting
        assert all(found.inputs_equal == found.outputs_equal == found.tokens for found in row.where.found)
        # Half of each sequence is prefilled before it is decoded, and a first token has no log-probability.
        assert row.metrics["tokens"] == (26 - 3 if row.axis == "decode" else 52 - 3)
    assert report.differ == 0 and "equal bits of so few say little" in str(report)


def in_batches(x: Tensor) -> bool:
    return x.shape[0] > 4


def has_padding(q: Tensor, k: Tensor, mask: Tensor) -> bool:
    """In front: the last query does not see the first key."""
    return not bool(mask[0, 0, -1, 0])


LAYERS = MODEL.model.layers
FOUR = made(layers=4)
ATTENTION = "model.layers.0.self_attn:attention"


@pytest.mark.parametrize(
    ("fault", "named_at", "kind", "name"),
    [
        (lambda: planted(LAYERS[0].self_attn.k_proj, in_batches),
         {"batch: 5 rows", "batch: 5 rows, other places"}, "linear", "model.layers.0.self_attn.k_proj"),
        (lambda: planted(LAYERS[1].input_layernorm, lambda x: x.shape[1] == 1),
         {"decode: dynamic cache", "decode: static cache", "decode: 4 rows, padded on the left"}, "norm",
         "model.layers.1.input_layernorm"),
        (lambda: planted(LAYERS[0].mlp.act_fn, lambda x: x.shape[1] == 7), {"chunk: 7 tokens"}, "activation",
         "model.layers.0.mlp.act_fn"),
        (lambda: planted(MODEL.lm_head, lambda x: x.shape[1] > 30), {"length: twice as long"}, "linear",
         "lm_head"),
        (lambda: planted_attention(has_padding), {"padding: 3 on the left"}, "attention", ATTENTION),
        (lambda: planted_attention(lambda q, k, mask: k.shape[2] > 30), {"length: twice as long"},
         "attention", ATTENTION),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named_and_nothing_else(
    fault: Any, named_at: set[str], kind: str, name: str
) -> None:
    with fault():
        report = measured(("batch", "padding", "chunk", "decode", "length"), (17,))
    assert set(named(report)) == named_at
    for row in report.rows:
        assert row.where is not None
        if f"{row.axis}: {row.setting}" not in named_at:
            assert row.differ == 0 and not row.where.adding
            continue
        assert row.where.first is not None
        assert (row.where.first.name, row.where.first.kind) == (name, kind) and row.differ
        others = {found.name for found in row.where.adding} - {name}
        assert others <= ({"model.layers.1.self_attn:attention"} if kind == "attention" else set())
    assert name in str(report) and set(report.remedies) == {kind}
    assert "so few say little" in str(report)  # of those that are equal


def test_a_fault_in_one_layer_of_four_is_named() -> None:
    with planted(FOUR.model.layers[3].mlp.down_proj, in_batches):
        report = measured(("batch", "length"), (9,), FOUR)
    assert named(report) == {
        f"batch: 5 rows{more}": ["model.layers.3.mlp.down_proj"] for more in ("", ", other places")
    }
    first = report.rows[1].where
    assert first is not None and [set(line) for line in first.heat] == [{0}, {0}, {0}, {2}]


def test_a_fault_beyond_1024_keys_is_named() -> None:
    model = made(layers=1, num_attention_heads=1)
    with planted_attention(lambda q, k, mask: k.shape[2] > 1024):
        report = isobit.drift.measure(model, sequences((520,)), vs=["length"])
    assert named(report) == {"length: twice as long": [ATTENTION]}
    assert report.differ and report.rows[0].metrics["tokens"] == 519 and "so few" not in str(report)


def test_only_equal_bits_can_be_of_too_few_tokens() -> None:
    with planted(LAYERS[0].mlp.up_proj, lambda x: x.shape[1] > 9):
        report = isobit.drift.measure(MODEL, sequences((8,)), vs=["length"], locate=False)
    assert report.differ > 0 and "so few" not in str(report)


def test_a_place_in_a_batch_is_a_setting_of_its_own() -> None:
    """An op that treats the last line of a batch differently. The one sequence is in the first line at first,
    then in another one."""
    forward = LAYERS[0].mlp.up_proj.forward

    def wrong(x: Tensor) -> Tensor:
        y = forward(x)
        return torch.cat((y[:2], nudged(y[2:]))) if len(x) == 5 else y

    LAYERS[0].mlp.up_proj.forward = wrong
    try:
        report = measured(("batch",), (12,))
    finally:
        del LAYERS[0].mlp.up_proj.forward
    assert named(report) == {"batch: 5 rows, other places": ["model.layers.0.mlp.up_proj"]}


def test_decoding_in_a_batch_finds_a_fault_of_padding_in_a_cache() -> None:
    """One that no sequence alone has, and no forward without a cache."""

    def when(q: Tensor, k: Tensor, mask: Tensor) -> bool:
        return bool(len(q) > 1 and q.shape[2] == 1 and not mask[1, 0, -1, 0])

    with planted_attention(when):
        report = measured(("padding", "decode", "micro-batch"), (20, 12))
    assert set(named(report)) == {"decode: 4 rows, padded on the left"}
    (row,) = (row for row in report.rows if row.differ)
    assert row.where is not None and row.where.first is not None and row.where.first.name == ATTENTION
    assert row.metrics["tokens"] == 16 - 2  # half of each sequence, and none after the last token


def test_what_is_inherited_is_not_called_added() -> None:
    """A fault in keys reaches the outputs of attention, and everything behind it."""
    with planted(LAYERS[0].self_attn.k_proj, in_batches):
        (row,) = isobit.drift.measure(MODEL, sequences((12,)), vs=["batch"], batch_sizes=[5]).rows[:1]
    assert row.where is not None
    by_name = {found.name: found for found in row.where.found}
    attention = by_name["model.layers.0.self_attn:attention"]
    # All keys of token 0 differ. With one key the softmax is 1, so that token's output does not.
    assert attention.inputs_equal == 0 and attention.outputs_equal == 1
    assert attention.added == 0 and attention.differs and not attention.adds_replayed
    k_proj = by_name["model.layers.0.self_attn.k_proj"]
    assert k_proj.added and k_proj.added == k_proj.differs and k_proj.adds_replayed == k_proj.adds
    assert by_name["model.layers.0.self_attn.v_proj"].outputs_equal == 12
    # A second fault behind the first is seen by a replay, where inputs are never equal.
    with planted(LAYERS[0].self_attn.k_proj, in_batches), planted(LAYERS[1].mlp.up_proj, in_batches):
        (row,) = isobit.drift.measure(MODEL, sequences((12,)), vs=["batch"], batch_sizes=[5]).rows[:1]
    assert row.where is not None
    both = [found.name for found in row.where.found if found.adds_replayed]
    assert both == ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"]


def test_own_code_of_a_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = modeling_llama.apply_rotary_pos_emb

    def wrong(q: Tensor, k: Tensor, *args: Any) -> Any:
        q, k = rotate(q, k, *args)
        return (nudged(q) if in_batches(q) else q), k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", wrong)
    (row,) = isobit.drift.measure(MODEL, sequences((12,)), vs=["batch"], batch_sizes=[5]).rows[:1]
    assert row.where is not None and row.where.first is not None
    assert row.where.first.name == "model.layers.0.self_attn, its own code before attention"
    assert {(found.kind, found.name[:15]) for found in row.where.adding} == {
        ("rope", "model.layers.0."), ("rope", "model.layers.1.")
    }  # fmt: skip
    assert row.where.heat[0] == [2] * 12  # layer 0 adds, for every token


def test_a_cache_that_changes_keys_is_not_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention reads from the cache is its input."""
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update

    def wrong(self: Any, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, k, v, *args, **kwargs)
        return (nudged(keys) if k.shape[2] == 1 else keys), values

    monkeypatch.setattr(DynamicLayer, "update", wrong)
    row = isobit.drift.measure(MODEL, sequences((12,)), vs=["decode"]).rows[0]
    assert row.where is not None and [found.kind for found in row.where.adding][:1] == ["rope"]
    assert "attention" not in {found.kind for found in row.where.adding}


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_windows_heads_in_front_and_caches_that_drop_keys(family: str) -> None:
    """Norms of Gemma's heads get [B, H, T, D]; in chunks of 2, with 2 heads, that looks like [B, T, H, D]."""
    model = hf_models.made(family, hidden_size=16, head_dim=8, intermediate_size=16).float()
    by_rows(model)
    for fault in (None, "q_norm" if family == "Gemma3" else "q_proj"):
        layer = model.model.layers[1].self_attn
        when = (lambda x: x.shape[-2] == 1 or x.shape[1] == 1) if fault else (lambda x: False)
        with planted(getattr(layer, fault or "q_proj"), when):
            report = isobit.drift.measure(model, sequences((15,)), vs=["chunk", "decode"], chunk=2)
        assert not report.skipped and [row.setting for row in report.rows][1:4] == [
            "dynamic cache", "sliding cache", "static cache"
        ]  # fmt: skip
        assert len(report.rows) == 5 and "window" not in str(report)  # 15 tokens are more than the window
        for row in report.rows:
            assert row.where is not None and len(row.where.found) >= 26
            adding = [found.name for found in row.where.adding]  # also in chunks: the last one has one token
            assert adding == ([f"model.layers.1.self_attn.{fault}"] if fault else []), row.setting
            assert fault or all(f.inputs_equal == f.outputs_equal == 15 for f in row.where.found)


def test_the_model_is_left_as_it_was() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = made(layers=1).train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    measured(("batch",), (6,), model)
    assert model.training and all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(a or b for a, b in hooks) and "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)


def test_little_memory_gives_the_same_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.drift import axes, replay
    from isobit.drift.calls import Run

    rows = sequences((8,))
    run, plans = Run(MODEL, torch.device("cpu")), axes._batches(rows, 5)
    found = []
    with planted(LAYERS[0].mlp.up_proj, in_batches):
        for memory in (1 << 30, 1):
            monkeypatch.setattr(replay.replay, "__defaults__", (memory,))
            where = located(run, axes.alone(rows)[0], plans, 0, 8)
            found.append([(f.name, f.added, f.adds_replayed) for f in where.found])
    assert found[0] == found[1] and sum(added or 0 for _, added, _ in found[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1]]}, "1 tokens: a log-probability needs 2"),
        ({"prompts": [[1, V]]}, f"id {V} is outside the vocabulary of {V}"),
        ({"prompts": [[1, -1]]}, "id -1 is outside"),
        ({"prompts": [[1.0, 2.0]]}, "integers"),
        ({"prompts": []}, "no sequence"),
        ({"vs": ["sideways"]}, "unknown; known: batch, padding"),
        ({"vs": "batch"}, "a list of axes"),
        ({"vs": ["batch", "batch"]}, "given twice"),
        ({"prompts": [["a", "b"]]}, "token ids, integers"),
        ({"batch_sizes": [0]}, "an integer from 1 on"),
        ({"batch_sizes": []}, "batch_sizes.: none"),
        ({"chunk": 1.5}, "chunk: 1.5.: an integer"),
        ({"model": torch.nn.Linear(2, 2)}, "not a causal LM"),
    ],
)
def test_bad_input_is_a_clear_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        isobit.drift.measure(**{"model": MODEL, "prompts": [[1, 2]], **arguments})


def test_made_up_sequences_and_a_limit_of_tokens() -> None:
    assert [len(ids) for ids in made_up(V, 100, 40)] == [40, 20, 30, 10]
    report = isobit.drift.measure(MODEL, sequences((8, 8, 8)), vs=["length"], tokens=12, locate=False)
    assert (report.sequences, report.tokens) == (2, 12) and report.rows[0].metrics["tokens"] == 10


@pytest.mark.parametrize("name", ["measure", "verl_metrics"])
def test_the_example_runs(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(isobit.drift, name), name)
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_kinds_of_modules() -> None:
    kinds = {name.rpartition(".")[2]: kind_of(m) for name, m in MODEL.named_modules() if not [*m.children()]}
    assert kinds == {
        "embed_tokens": "embedding", "q_proj": "linear", "k_proj": "linear", "v_proj": "linear",
        "o_proj": "linear", "gate_proj": "linear", "up_proj": "linear", "down_proj": "linear",
        "act_fn": "activation", "input_layernorm": "norm", "post_attention_layernorm": "norm", "norm": "norm",
        "rotary_emb": "rope", "lm_head": "linear",
    }  # fmt: skip


def test_routers_and_code_of_experts_have_a_remedy() -> None:
    config = Qwen3MoeConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = Qwen3MoeForCausalLM(config)
    assert kind_of(model.model.layers[0].mlp.gate) == "router"
    assert "zero_drift" in remedy("router").call and "zero_drift" in remedy("own code").call
    assert "nothing of isobit" in remedy("other").call


def test_a_layer_that_isobit_does_not_serve_is_said() -> None:
    """A quantised layer, and a LayerNorm: nothing of isobit removes what they add."""

    class Int8Linear(torch.nn.Linear):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__(linear.in_features, linear.out_features, bias=False)
            del self.weight
            self.register_buffer("weight", (linear.weight * 50).round().to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            rows = [torch.nn.functional.linear(row[None], self.weight / 50) for row in x.flatten(0, -2)]
            return torch.cat(rows).reshape(*x.shape[:-1], -1)

    model = made(layers=1)
    model.model.layers[0].mlp.up_proj = Int8Linear(model.model.layers[0].mlp.up_proj)
    model.model.norm = torch.nn.LayerNorm(16)
    with planted(model.model.layers[0].mlp.up_proj, in_batches), planted(model.model.norm, in_batches):
        report = measured(("batch",), (9,), model)
    assert report.rows[1].where is not None and report.rows[1].where.first is not None
    assert report.rows[1].where.first.kind == "quantised"
    assert {kind: each["call"].partition(";")[0] for kind, each in report.remedies.items()} == {
        "quantised": "nothing of isobit: a quantised layer",
        "layer norm": "nothing of isobit: it has RMSNorm, no LayerNorm",
    }


def test_what_does_not_fit_into_memory_is_skipped_and_the_rest_is_kept() -> None:
    def full(x: Tensor) -> bool:
        if len(x) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return False

    with planted(LAYERS[0].mlp.up_proj, full):
        report = measured(("padding", "batch", "length"), (9,))
    assert [row.axis for row in report.rows] == ["padding", "padding", "batch", "length"]
    assert "batch, 5 rows, did not run: it does not fit into the memory of the GPU" in str(report)
    short = isobit.drift.measure(MODEL, [[1, 2]], vs=["decode", "length"], locate=False)
    assert [row.axis for row in short.rows] == ["length"]
    assert "decode, dynamic cache, did not run: no sequence is long enough" in str(short)
