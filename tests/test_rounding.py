"""Where trainer and engine round: `zero_drift(rounding=)` and `isobit.integrations.vllm.enable(rounding=)`.
A stub of vLLM has the engine's layers; `make engines` runs the real one."""

import copy
import os
import pickle
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import isobit
import stub_vllm as stub
import stub_vllm_dense as dense
import test_vllm_experts as with_experts
from hf_models import SIZES, Drift, Run, made, prompts
from isobit import ContractError
from isobit.integrations import vllm
from isobit.integrations.hf import HFError, rotary, token_logps, zero_drift
from isobit.integrations.hf.swaps import ROUNDING
from isobit.integrations.hf.trial import differing
from isobit.integrations.rounding import DENSE, ROUNDINGS, Rounding
from isobit.integrations.vllm import layers, options
from isobit.integrations.vllm.layers import MODELS
from stub_vllm import loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

FAMILIES = [name.removesuffix("ForCausalLM") for name in DENSE]
ROWS = [prompts([n], seed=n)[0][0] for n in (14, 9, 21)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from stub.installed(monkeypatch)


def of_trainer(model: Any, rounding: Rounding) -> Tensor:
    with zero_drift(model, rounding=rounding), torch.no_grad():
        return torch.cat([token_logps(model, ids[None])[0] for ids in ROWS])


def of_engine(model: Any, rounding: Rounding) -> Tensor:
    with vllm.enable(rounding=rounding):
        served = loaded(dense.of(model))
    return torch.cat([served.token_logps(ids) for ids in ROWS])


# Trainer and engine


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_engine_have_the_same_bits_with_either(
    engine: dict[str, ModuleType], family: str
) -> None:
    model = made(family)
    trained = {rounding: of_trainer(model, rounding) for rounding in ROUNDINGS}
    rolled = {rounding: of_engine(model, rounding) for rounding in ROUNDINGS}
    for rounding in ROUNDINGS:
        assert differing(rolled[rounding], trained[rounding]) == 0
    count = len(trained["hf"])
    assert differing(trained["hf"], trained["vllm"]) > count // 2  # so equal bits say something
    assert differing(rolled["vllm"], trained["hf"]) > count // 2
    assert (trained["hf"] - trained["vllm"]).abs().mean() < 0.1  # of the same function


@pytest.mark.parametrize("other", ["norms", "rotary embeddings"])
def test_each_of_the_roundings_shows(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """An engine that has one of them from transformers has other bits."""
    model, serve = made("Qwen3"), layers.rotary.serve
    wanted = of_trainer(model, "vllm")
    if other == "norms":
        monkeypatch.setattr(layers, "cast_of", lambda rounding, own: own)
    else:
        monkeypatch.setattr(
            layers.rotary, "serve", lambda rotary, count, rounding: serve(rotary, count, "hf")
        )
    assert differing(of_engine(model, "vllm"), wanted) > len(wanted) // 2


def test_the_layers_of_an_engine_round_as_the_text_of_vllms_kernels(engine: dict[str, ModuleType]) -> None:
    """layernorm_kernels.cu and pos_encoding_kernels.cu of vLLM 0.26.0 and 0.32.0, in PyTorch. A norm may
    differ where the last bit of a sum decides."""
    with vllm.enable(rounding="vllm"):
        model = loaded(stub.Qwen3ForCausalLM())
    x, residual = torch.randn(2, 200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = model.norm.weight

    def normalised(h: Tensor) -> Tensor:
        scale = torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6)
        return (h.float() * scale * weight.float()).bfloat16()

    out, summed = model.norm(x, residual)
    assert torch.equal(summed, x + residual)
    assert float((out != normalised(x + residual)).float().mean()) < 1e-3
    assert float((model.norm(x) != normalised(x)).float().mean()) < 1e-3
    # Its text in PyTorch normalises the sum before it is rounded, and rounds before the weight too.
    h = x.float() + residual.float()
    scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    assert float((out != (h * scale).bfloat16() * weight).float().mean()) > 0.05

    turned, _ = model.rotary(torch.arange(200), x)
    cos, sin = (t.float() for t in model.rotary.look_up(torch.arange(200), True))
    x1, x2 = x.float().chunk(2, -1)
    c, s = cos[:, :32], sin[:, :32]
    assert torch.equal(turned, torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).bfloat16())


# The trainer


def test_a_trainer_is_restored_and_says_where_it_rounds() -> None:
    model = made("Qwen3")
    kinds = [type(m) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    plain = of_trainer(model, "hf")
    with zero_drift(model, rounding="vllm") as on:
        assert on.rounding == "vllm" and on.report.rounding == "vllm"
        assert on.changed["isobit.rope"] == on.changed["isobit.attention"]
        assert {m.options.cast for m in model.modules() if hasattr(m, "options")} == {"after"}
        assert str(on).endswith("\n  rounded as vLLM's CUDA kernels do (rounding='vllm')")
        with zero_drift(model) as inner:  # on already, and stays as it is
            assert inner.rounding == "vllm"
        on.check()
    assert kinds == [type(m) for m in model.modules()]
    assert attributes == [sorted(vars(m)) for m in model.modules()]
    assert torch.equal(of_trainer(model, "hf"), plain)
    with zero_drift(model) as on:
        assert on.rounding == "hf" and "isobit.rope" not in on.changed and "rounded" not in str(on)


@pytest.mark.parametrize("family", ["Mistral", "Qwen3"])
def test_it_has_no_drift_and_gradients_of_a_sequence_are_its_own(family: str) -> None:
    model = made(family)
    ids = prompts([12, 12, 12])[0]

    def gradient(rows: Any) -> Tensor:
        embeds = model.get_input_embeddings()(ids[rows]).detach().requires_grad_()
        model(inputs_embeds=embeds, use_cache=False).logits.float().square().sum().backward()
        assert embeds.grad is not None
        return embeds.grad

    with zero_drift(model, rounding="vllm"):
        assert Drift(model).of(Run(3, False, "dynamic", None)) == (0, 0)
        alone = gradient(slice(1, 2))
        assert torch.equal(gradient(slice(0, 3))[1:2], alone)
    with zero_drift(model):
        assert not torch.equal(gradient(slice(1, 2)), alone)


def test_copies_round_alike() -> None:
    model = made("Qwen2")
    with zero_drift(model, rounding="vllm"), torch.no_grad():
        wanted = token_logps(model, ROWS[0][None])
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(token_logps(twin, ROWS[0][None]), wanted)
            with pytest.raises(HFError, match=r"it has rounding='vllm' already, not 'hf'; call disable\(\)"):
                zero_drift(twin, rounding="hf")
            on = zero_drift(twin)
            assert on.rounding == "vllm"
            on.disable()
            assert ROUNDING not in vars(twin)


def test_attention_that_comes_back_is_noticed_and_served_again() -> None:
    model = made("Llama")
    on, wanted = zero_drift(model, rounding="vllm"), of_copy(made("Llama"))
    other = made("Llama").model.layers[0].self_attn
    other.config = model.config
    model.model.layers[0].self_attn = other
    with pytest.raises(HFError, match="LlamaAttention, which was not tested"), torch.no_grad():
        token_logps(model, ROWS[0][None])
    zero_drift(model)
    assert isinstance(other, rotary.DetAttention) and on.rounding == "vllm"
    with torch.no_grad():
        assert torch.equal(token_logps(model, ROWS[0][None]), wanted)


def of_copy(model: Any) -> Tensor:
    with zero_drift(model, rounding="vllm"), torch.no_grad():
        return token_logps(model, ROWS[0][None])


def hooked(model: Any) -> Any:
    """As accelerate moves inputs around a forward."""
    attn = model.model.layers[1].self_attn
    attn.forward = attn.forward
    return model


class OtherAttention(nn.Module):
    """Which rotates by a method of its own."""

    layer_idx, is_causal = 0, True

    def forward(self, **given: Any) -> Any: ...


def with_another_attention(model: Any) -> Any:
    model.model.layers[1].self_attn.__class__ = OtherAttention
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: made("Gemma2"),
            "where vLLM rounds in Gemma2ForCausalLM was not compared; it was in LlamaFor",
        ),
        (
            lambda: made("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
            "where vLLM rounds in Qwen3MoeForCausalLM was not compared",
        ),
        (lambda: hooked(made("Qwen3")), "model.layers.1.self_attn: rounding='vllm': its forward is not one"),
        (
            lambda: with_another_attention(made("Qwen3")),
            "model.layers.1.self_attn: rounding='vllm': its forward is not one that calls apply_rotary_pos",
        ),
    ],
    ids=["Gemma", "experts", "a replaced forward", "another attention"],
)
def test_models_that_are_refused_stay_as_they_were(make: Any, reason: str) -> None:
    model = make()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(HFError, match=re.escape(reason)):
        zero_drift(model, rounding="vllm")
    assert kinds == [type(m) for m in model.modules()] and ROUNDING not in vars(model)


def test_norms_in_fp32_are_refused() -> None:
    """Under autocast they stay torch's, which rounds as transformers does."""
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(HFError, match="does not compute, such as one in"),
    ):
        zero_drift(model, rounding="vllm")


def test_ranks_are_refused() -> None:
    """Before anything is asked of them."""
    model = made("Qwen3")
    model.model.layers[0].self_attn.q_proj.of_ranks = True
    with pytest.raises(HFError, match="rounding='vllm': its layers are shared by ranks"):
        zero_drift(model, rounding="vllm")


@pytest.mark.parametrize(
    "call", [lambda given: zero_drift(made("Llama"), **given), lambda given: vllm.enable(**given)]
)
def test_an_unknown_rounding_is_refused(engine: dict[str, ModuleType], call: Any) -> None:
    with pytest.raises(ContractError, match=r"'sglang'.*'hf'.*'vllm'"):
        call({"rounding": "sglang"})
    assert options.VARIABLE not in os.environ


# The engine


def test_an_engine_says_where_it_rounds_and_workers_are_told(engine: dict[str, ModuleType]) -> None:
    with vllm.enable():
        assert os.environ[options.VARIABLE] == "1"
        assert "\n  rounded as transformers does (rounding='hf')\n" in f"{vllm.report()}\n"
    with vllm.enable(rounding="vllm"):
        text = os.environ[options.VARIABLE]
        assert text == "1,rounding=vllm" and "ISOBIT_VLLM=1,rounding=vllm" in str(vllm.report())
        assert options.Options.read(text) == options.Options(rounding="vllm")
        assert "\n  rounded as vLLM's CUDA kernels do (rounding='vllm')\n" in f"{vllm.report()}\n"
        with pytest.raises(isobit.UnsupportedError, match=r"already enabled .*\(ISOBIT_VLLM=1,rounding=vllm"):
            vllm.enable()
    for wrong in ("1,rounding", "1,rounding=once"):
        with pytest.raises(vllm.VLLMError, match="is not what enable"):
            options.Options.read(wrong)


def test_a_worker_has_the_rounding_of_the_process_that_started_it(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("Qwen3")
    wanted = of_trainer(model, "vllm")
    monkeypatch.setenv(options.VARIABLE, "1,rounding=vllm")
    vllm.load_plugin()
    llm = stub.LLM(dense.of(model))
    served = llm.worker.model_runner.model
    assert differing(torch.cat([served.token_logps(ids) for ids in ROWS]), wanted) == 0
    (report,) = vllm.reports(llm)
    assert report.rounding == "as vLLM's CUDA kernels do (rounding='vllm')"
    with pytest.raises(isobit.UnsupportedError, match="already enabled with other options"):
        vllm.enable()


def test_experts_are_refused_by_name(engine: dict[str, ModuleType]) -> None:
    reason = "layers.0: layers of experts are served with rounding='hf' alone, and not 'vllm'"
    with vllm.enable(rounding="vllm"), pytest.raises(vllm.VLLMError, match=re.escape(reason)):
        loaded(with_experts.Qwen3MoeForCausalLM(with_experts.a_block()))
    with vllm.enable(rounding="vllm", allow_others=True), pytest.warns(UserWarning, match="rounding='hf' al"):
        loaded(with_experts.Qwen3MoeForCausalLM(with_experts.a_block()))


def test_trainers_and_engines_serve_the_same_dense_models() -> None:
    assert set(DENSE) == set(MODELS) - {each.__name__ for each in with_experts.ENGINES.values()}


def test_compiled_code_is_kept_by_the_rounding_too(engine: dict[str, ModuleType]) -> None:
    marks = set()
    for rounding in ROUNDINGS:
        with vllm.enable(rounding=rounding):
            runner = stub.runner_of(stub.Qwen3ForCausalLM())
            marks.add(runner.vllm_config.additional_config["isobit"])
    assert len(marks) == 2
