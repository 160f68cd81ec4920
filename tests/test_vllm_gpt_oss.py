"""GPT-OSS in vLLM with isobit inside, against a stub of it: a whole model with sinks, windows in every other
layer, YaRN, and experts. No hidden state has other bits than in a trainer under `zero_drift`."""

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stub_vllm as stub
import stub_vllm_gpt_oss as gpt
from hf_models import made, prompts
from isobit.integrations import vllm
from isobit.integrations.hf import zero_drift
from isobit.integrations.hf.trial import differing
from isobit.integrations.vllm import layers
from stub_vllm import installed, loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

YARN = stub.YaRNScalingRotaryEmbedding
ROPE = {
    "rope_type": "yarn", "rope_theta": YARN.base, "factor": YARN.scaling_factor, "truncate": YARN.truncate,
    "beta_fast": YARN.beta_fast, "beta_slow": YARN.beta_slow,
    "original_max_position_embeddings": YARN.max_position_embeddings,
}  # fmt: skip

#: How many tokens of each of two rows a forward has: a row at a time; in chunks, decoded while another is
#: read, and both decoded.
WHOLE = [[23, 0], [0, 9]]
BATCHED = [[9, 0], [1, 5], [8, 1], [1, 1], [4, 2]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from installed(monkeypatch)


@pytest.fixture(scope="module")
def trainer() -> Any:
    return made(
        "GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=6, rope_parameters=ROPE,
        max_position_embeddings=300, rms_norm_eps=1e-5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[Tensor]:
    return [prompts([n], seed=n)[0][0] for n in (23, 9)]


@pytest.fixture(scope="module")
def wanted(trainer: Any, rows: list[Tensor]) -> Tensor:
    with zero_drift(trainer), torch.no_grad():
        return torch.cat([trainer.model(row[None], use_cache=False).last_hidden_state[0] for row in rows])


def served(trainer: Any) -> Any:
    with vllm.enable():
        return loaded(gpt.GptOssForCausalLM(trainer))


def states(model: Any, rows: list[Tensor], steps: list[list[int]]) -> Tensor:
    return torch.cat(gpt.hidden_states(model, rows, steps))


@pytest.mark.parametrize("steps", [WHOLE, BATCHED], ids=["alone", "batched"])
def test_hidden_states_are_those_of_the_trainer(
    engine: dict[str, ModuleType], trainer: Any, rows: list[Tensor], wanted: Tensor, steps: list[list[int]]
) -> None:
    model = served(trainer)
    assert wanted.isfinite().all() and differing(states(model, rows, steps), wanted) == 0


def test_other_models_have_other_bits(
    engine: dict[str, ModuleType], trainer: Any, rows: list[Tensor], wanted: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Norms that are rounded earlier, cos and sin without the factor of YaRN, no sinks, no window: each is
    seen."""

    def changed(model: Any) -> int:
        return differing(states(model, rows[1:], [[9]]), wanted[23:])

    with monkeypatch.context() as patch:
        patch.setitem(layers.MODELS, "GptOssForCausalLM", "before")
        assert changed(served(trainer)) > 0
    for change in (_without_the_factor, _without_sinks, _without_windows):
        model = served(trainer)
        change(model)
        assert changed(model) > 0, change


def _without_the_factor(model: Any) -> None:
    table = model.layers[0].attn.rotary_emb.look_up.table
    assert table.dtype == torch.bfloat16  # vLLM's own is in fp32
    table.copy_(table.float() / YARN.mscale)


def _without_sinks(model: Any) -> None:
    for layer in model.layers:
        layer.attn.sinks.data.fill_(-torch.inf)


def _without_windows(model: Any) -> None:
    model.layers[0].attn.attn.impl.sliding_window = (-1, -1)


def test_new_sinks_are_read(
    engine: dict[str, ModuleType], trainer: Any, rows: list[Tensor], wanted: Tensor
) -> None:
    """In place, and another parameter."""
    model = served(trainer)
    old = [layer.attn.sinks.data.clone() for layer in model.layers]
    _without_sinks(model)
    without = states(model, rows[1:], [[9]])
    for layer, sinks in zip(model.layers, old, strict=True):
        layer.attn.sinks = nn.Parameter(sinks)
    assert differing(without, wanted[23:]) > 0
    assert differing(states(model, rows[1:], [[9]]), wanted[23:]) == 0


def test_modules_are_named(engine: dict[str, ModuleType], trainer: Any) -> None:
    with vllm.enable():
        loaded(gpt.GptOssForCausalLM(trainer))
        report = vllm.report()
    assert report is not None and not report.passed
    for part in ("2 Attention", "2 MLPBlock", "5 RMSNorm", "2 YaRNScalingRotaryEmbedding"):
        assert part in report.models[0]


def test_sinks_of_another_module_are_refused(engine: dict[str, ModuleType], trainer: Any) -> None:
    model = gpt.GptOssForCausalLM(trainer)
    assert layers.refused(model) == {}
    model = gpt.GptOssForCausalLM(trainer)
    model.layers[1].attn.__class__ = type("OtherAttention", (gpt.OAIAttention,), {})
    assert layers.refused(model) == {
        "layers.1.attn": "OtherAttention is not served",
        "layers.1.attn.attn": "it has attention sinks, which are served in GPT-OSS",
    }


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("mscale", 1.0, "cos and sin are multiplied by 1.0"), ("extrapolation_factor", 0.5, "is 0.5, which")],
)
def test_yarn_that_transformers_does_not_have_is_refused(
    engine: dict[str, ModuleType], trainer: Any, name: str, value: float, reason: str
) -> None:
    model = gpt.GptOssForCausalLM(trainer)
    setattr(model.layers[0].attn.rotary_emb, name, value)
    with vllm.enable(), pytest.raises(vllm.VLLMError, match=reason) as error:
        loaded(model)
    assert "layers.0.attn.rotary_emb: " in str(error.value)


def test_a_window_of_another_group_of_caches_is_refused(
    engine: dict[str, ModuleType], trainer: Any, rows: list[Tensor]
) -> None:
    """vLLM describes batches by groups of layers. Layers with and without a window must not be in one."""
    impl = served(trainer).layers[1].attn.attn.impl
    batch = SimpleNamespace(causal=True, sliding_window=(5, 0))
    with pytest.raises(vllm.VLLMError, match="leave disable_hybrid_kv_cache_manager at its default"):
        impl._check(batch)
