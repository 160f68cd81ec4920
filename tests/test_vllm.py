"""isobit inside vLLM, as far as it needs no engine: names, switching on and off, refusals, rotary embeddings.
`tests/vllm_on_a_cpu.py` runs engines (`make engines`)."""

import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as hf

import isobit
import stub_vllm as stub
from isobit.integrations import vllm
from isobit.integrations.hf import warmup
from isobit.integrations.vllm import layers, options, rotary, switch, versions, workers
from stub_vllm import Qwen3ForCausalLM, loaded, runner_of

ROOT = Path(__file__).parent.parent


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """A vLLM that has everything that isobit uses, and no engine."""
    yield from stub.installed(monkeypatch)


# Versions and names


def test_what_was_run_is_said_for_every_version(engine: dict[str, ModuleType]) -> None:
    for version, said in versions.PROVEN.items():
        engine["vllm"].__version__ = f"{version}+cpu"  # type: ignore[attr-defined]
        with vllm.enable():
            assert str(vllm.report()).startswith(f"isobit in vLLM {version} ({said})\n  ISOBIT_VLLM=1\n")
            assert "log-probabilities of isobit.linear_logp" in str(vllm.report())
    assert "H200" in versions.PROVEN["0.26.0"] and "on a CPU" in versions.PROVEN["0.32.0"]


def test_another_version_is_refused_unless_it_is_allowed(engine: dict[str, ModuleType]) -> None:
    engine["vllm"].__version__ = "0.99.0"  # type: ignore[attr-defined]
    with pytest.raises(vllm.VLLMError, match=r"found vLLM 0\.99\.0, which isobit has not been tried with"):
        vllm.enable()
    assert vllm.report().off and options.VARIABLE not in os.environ
    with vllm.enable(allow_untested=True):
        assert str(vllm.report()).startswith("isobit in vLLM 0.99.0 (not tried)")


def test_names_that_are_missing_or_changed_are_listed(engine: dict[str, ModuleType]) -> None:
    vars(engine[versions.SAMPLER]).clear()
    engine[versions.REGISTRY].register_backend = lambda name: None  # type: ignore[attr-defined]
    with pytest.raises(vllm.VLLMError) as error:
        vllm.enable()
    for part in (
        f"{versions.SAMPLER} has no Sampler.compute_logprobs",
        f"{versions.REGISTRY} has register_backend(name), but isobit needs register_backend(backend, cl",
    ):
        assert part in str(error.value)
    assert options.VARIABLE not in os.environ


def test_arguments_that_a_newer_version_adds_do_no_harm(engine: dict[str, ModuleType]) -> None:
    class GPUModelRunner:
        def load_model(self, load_dummy_weights: bool = False, *, model: Any = None) -> None: ...

        def get_model(self) -> None: ...

        def profile_run(self) -> None: ...

        def sample_tokens(self, grammar_output: Any, more: Any = None) -> None: ...

    engine[versions.GPU_RUNNER].GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    with vllm.enable():
        pass


def test_without_vllm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(versions.INSTALL)):
        vllm.enable()


# On and off


def state(engine: dict[str, ModuleType]) -> list[Any]:
    """What isobit changes in vLLM and in the environment."""
    flash = engine[versions.REGISTRY].AttentionBackendEnum["FLASH_ATTN"]
    functions = [
        engine[versions.GPU_RUNNER].GPUModelRunner.load_model,
        stub.UnquantizedLinearMethod.process_weights_after_loading,
    ]
    return [flash.get_path(), *functions, *map(os.environ.get, stub.VARIABLES)]


def test_on_and_off(engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch.RUNNER, "0")
    before = state(engine)
    with vllm.enable() as on:
        enabled = state(engine)
        assert enabled[0] == switch.BACKENDS["cuda"][1] and enabled[-3:] == ["1", "0", "ISOBIT_VLLM"]
        assert enabled[1] is not before[1]
        with vllm.enable():
            vllm.load_plugin()  # vLLM loads it in this process, too
        assert state(engine) == enabled  # an inner block changes nothing
        assert repr(on) == "<isobit.integrations.vllm: 0 calls served, 0 passed on>"
        with pytest.raises(
            isobit.UnsupportedError,
            match=r"already enabled with other options \(ISOBIT_VLLM=1.*\); call disable",
        ):
            vllm.enable(allow_others=True)
    assert state(engine) == before and vllm.report().off
    vllm.enable()
    vllm.disable()
    vllm.disable()
    assert state(engine) == before


def test_the_plugin_does_nothing_unless_it_is_enabled(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    ((module, name),) = re.findall(
        r'^\[project\.entry-points\."vllm\.general_plugins"\]\nisobit = "(.*):(.*)"$', pyproject, re.M
    )
    plugin = getattr(import_module(module), name)
    before = state(engine)
    for variable, value in (("VLLM_PLUGINS", "isobit"), (options.VARIABLE, ""), (options.VARIABLE, "0")):
        monkeypatch.setenv(variable, value)
        plugin()
        assert vllm.report().off and state(engine)[:-3] == before[:-3]
    given = options.Options(allow_others=True, logprobs="log_softmax")
    monkeypatch.setenv(options.VARIABLE, given.text())  # of the process that started this one
    with monkeypatch.context() as there:  # where vLLM looks at the class of a model, no engine is made
        there.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name=versions.MODEL_REGISTRY))
        plugin()
        assert vllm.report().off
    plugin()
    plugin()
    patch = switch.SWITCH.patch
    assert isinstance(patch, switch._Patch) and patch.options == given
    assert given.text() == "1,allow_others,logprobs=log_softmax" and options.Options().text() == "1"
    vllm.disable()
    for wrong in ("yes", "1,logprobs", "1,logprobs=raw", "1,logits_dtype=int8", "1,allow_others=1", "1,more"):
        monkeypatch.setenv(options.VARIABLE, wrong)
        with pytest.raises(vllm.VLLMError, match=f"ISOBIT_VLLM='{wrong}' is not what enable"):
            plugin()


def test_another_plugin_is_not_replaced(engine: dict[str, ModuleType]) -> None:
    flash = engine[versions.REGISTRY].AttentionBackendEnum["FLASH_ATTN"]
    flash.override = "another.Backend"
    before = state(engine)
    with pytest.raises(vllm.VLLMError, match=r"another plugin .* FLASH_ATTN: another\.Backend"):
        vllm.enable()
    assert state(engine) == before  # what was done before the error is undone


# Models


def test_every_module_is_served_and_counted(engine: dict[str, ModuleType]) -> None:
    with vllm.enable() as on:
        model = loaded(Qwen3ForCausalLM())
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(model.proj(x), isobit.det_linear(x, model.proj.weight))
    assert torch.equal(model.lm_head(x), isobit.det_linear(x, model.lm_head.weight))
    assert torch.equal(model.norm(x), isobit.rms_norm(x, model.norm.weight))
    out, summed = model.norm(x, x)
    assert torch.equal(summed, x + x) and torch.equal(out, isobit.rms_norm(x + x, model.norm.weight))
    assert torch.equal(model.act(x), nn.functional.silu(x[:, :32]) * x[:, 32:])
    assert model.rotary(torch.arange(3), x)[1] is None
    assert on.served == 6  # the engine keeps what it was made with, and counts
    patch = on._patch
    assert isinstance(patch, switch._Patch)
    assert patch.calls == {"isobit.det_linear": 2, "isobit.rms_norm": 2, "isobit.swiglu": 1, "isobit.rope": 1}
    assert loaded(Qwen3ForCausalLM()).proj(x).dtype == x.dtype and on.served == 6  # a new one is vLLM's own


@pytest.mark.parametrize("v2", [False, True])
def test_an_engine_says_how_it_is_served(engine: dict[str, ModuleType], v2: bool) -> None:
    def of(runner: Any) -> Any:
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        return workers.options_of(SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor)))

    with vllm.enable(logits_dtype=torch.bfloat16):
        served = runner_of(Qwen3ForCausalLM(), v2=v2)
    assert of(served) == options.Options(logits_dtype="bfloat16")  # after disable, too
    assert of(runner_of(Qwen3ForCausalLM(), v2=v2)) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            lambda: stub.LinearBase(64, 8, stub.Fp8LinearMethod),
            "other: its weights are those of Fp8LinearMethod",
        ),
        (stub.FusedMoE, "other: FusedMoE is not served"),
        (
            stub.GatedDeltaNetAttention,
            "other: GatedDeltaNetAttention is linear attention, which vLLM decodes by a recurrence and "
            "training computes in chunks: roll out with transformers under isobit.integrations.hf.zero_drift",
        ),
        (lambda: stub.Attention(stub.FlashAttentionImpl()), "other: its backend is FlashAttentionImpl"),
        (lambda: nn.LayerNorm(8), "other: LayerNorm is not served"),
    ],
    ids=["quantised", "experts", "linear attention", "attention", "another norm"],
)
def test_a_module_that_is_not_served_is_named(engine: dict[str, ModuleType], other: Any, reason: str) -> None:
    with vllm.enable(), pytest.raises(vllm.VLLMError, match=re.escape(reason)):
        loaded(Qwen3ForCausalLM(other=other()))
    with vllm.enable(allow_others=True) as on, pytest.warns(UserWarning, match="vLLM's own code serves"):
        loaded(Qwen3ForCausalLM(other=other()))
        assert sum(on.passed.values()) == 1
        assert "LEFT TO vLLM" in str(vllm.report()) and reason in str(vllm.report())


def test_parameters_of_a_subclass_are_passed_on_as_tensors(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with a tensor of another class has no plan: it is checked and chosen anew every time."""

    class Weight(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]

    seen: list[type] = []
    monkeypatch.setattr(layers, "det_linear", lambda x, *given, **options: seen.extend(map(type, given)) or x)
    layer = SimpleNamespace(quant_method=SimpleNamespace(), weight=Weight(torch.ones(2, 2)))
    layers._serve_linear(layer, layers.How(lambda name: None, "before", "hf", lambda part: None))
    layer.quant_method.apply(layer, torch.ones(1, 2), Weight(torch.ones(2)))
    assert seen == [torch.Tensor, torch.Tensor]


def test_a_model_that_is_captured_into_graphs_is_served(engine: dict[str, ModuleType]) -> None:
    """vLLM then has a wrapper in its place, which is no module."""
    with vllm.enable() as on:
        model = loaded(Qwen3ForCausalLM(), model={"enforce_eager": False}, graphs=True).runnable
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(model.proj(x), isobit.det_linear(x, model.proj.weight)) and on.served == 1


def test_compiled_code_has_the_bits_and_its_calls_are_not_counted(engine: dict[str, ModuleType]) -> None:
    """Traced once, a count would set all counts at every call to what they were then."""
    compiled = SimpleNamespace(mode=3, cudagraph_mode=2)
    with vllm.enable() as on:
        model = loaded(Qwen3ForCausalLM(), compilation_config=compiled, additional_config={"own": 1})
        assert "not counted: calls in compiled code and replays of CUDA graphs" in str(vllm.report())

    def forward(x: torch.Tensor) -> torch.Tensor:
        y, residual = model.norm(model.proj(x).repeat(1, 2), x)
        q, _ = model.rotary(positions, y)
        return model.act(q + residual)

    x, positions = torch.randn(3, 64).bfloat16(), torch.tensor([3, 1, 2])
    wanted = forward(x)
    assert on.served == 4
    traced = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(traced(x), wanted) and on.served == 4
    model.norm(x)
    assert torch.equal(traced(x), wanted) and on.served == 5


def test_compiled_code_is_not_that_of_an_engine_without_isobit(engine: dict[str, ModuleType]) -> None:
    """vLLM finds it by a hash of the configuration."""
    with vllm.enable():
        runner = runner_of(Qwen3ForCausalLM(), additional_config={"own": 1})
    mark = runner.vllm_config.additional_config
    assert mark["own"] == 1 and len(mark["isobit"]) == 64
    runner = runner_of(Qwen3ForCausalLM(), additional_config={"own": 1})
    assert runner.vllm_config.additional_config == {"own": 1}


def test_attributes_that_change_the_result_are_refused(engine: dict[str, ModuleType]) -> None:
    for place, name, value in (
        ("proj", "tp_size", 2), ("norm", "has_weight", False), ("norm", "variance_size_override", 8),
        ("rotary", "is_neox_style", False), ("logits", "soft_cap", 30.0), ("logits", "scale", 0.5),
        ("logits", "head_dtype", torch.float32), ("attn.impl", "sinks", torch.zeros(2)),
        ("attn.impl", "attn_type", "encoder"), ("attn.impl", "head_size", 72),
        ("attn.impl", "kv_cache_dtype", "fp8"), ("attn.impl", "alibi_slopes", torch.zeros(2)),
        ("attn.impl", "kv_sharing_target_layer_name", "0"),
    ):  # fmt: skip
        model = Qwen3ForCausalLM()
        owner: Any = model
        for part in place.split("."):
            owner = getattr(owner, part)
        assert layers.refused(model) == {}
        object.__setattr__(owner, name, value)
        assert list(layers.refused(model)) == [place.split(".")[0]], name


def test_a_model_with_unknown_roundings_is_refused(engine: dict[str, ModuleType]) -> None:
    """And everything in it that is not served is named, inside of a module that is not served, too."""

    class GemmaForCausalLM(Qwen3ForCausalLM):
        def __init__(self) -> None:
            super().__init__(other=nn.Sequential(nn.LayerNorm(8), stub.LinearBase(64, 8)))
            self.other.register_buffer("factor", torch.ones(1))

    with vllm.enable(), pytest.raises(vllm.VLLMError) as error:
        loaded(GemmaForCausalLM())
    for part in (
        "GemmaForCausalLM cannot be served. GemmaForCausalLM: its roundings in transformers are not known",
        "other: Sequential",
        "other.0: LayerNorm",
    ):
        assert part in str(error.value)
    with vllm.enable(allow_others=True), pytest.warns(UserWarning, match="vLLM's own code serves"):
        model = loaded(GemmaForCausalLM())
        assert set(vllm.report().passed) == {"GemmaForCausalLM", "other", "other.0"}
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(
        model.other[1](x), isobit.det_linear(x, model.other[1].weight)
    )  # what can be served is


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"parallel": {"tensor_parallel_size": 2}}, "tensor_parallel_size=2"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size"),
        ({"lora_config": object()}, "enable_lora=True"),
        ({"speculative_config": object()}, "speculative decoding"),
        (
            {"compilation_config": SimpleNamespace(mode=3), "additional_config": object()},
            "additional_config is no dictionary",
        ),
        ({"model": {"dtype": torch.float32}}, "dtype=torch.float32"),
        ({"model": {"disable_cascade_attn": False}}, "pass disable_cascade_attn=True"),
        ({"model": {"logprobs_mode": "processed_logits"}}, "logprobs_mode='processed_logits' returns logits"),
    ],
)
def test_settings_that_are_refused(engine: dict[str, ModuleType], wrong: Any, reason: str) -> None:
    with vllm.enable(allow_others=True), pytest.raises(vllm.VLLMError, match=re.escape(reason)):
        loaded(Qwen3ForCausalLM(), **wrong)


# Rotary embeddings


class Layer(nn.Module):
    """With a rotary module that it may share with others."""

    def __init__(self, rotary_emb: nn.Module) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb


def rotated(kind: type, parameters: dict[str, Any]) -> tuple[Any, Any]:
    """(ours, transformers') of queries and keys that are parts of one tensor."""
    layer = loaded(Qwen3ForCausalLM(layer=Layer(kind()))).layer
    positions = torch.tensor([0, 1, 2, 7, 250, 299])
    both = torch.randn(6, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours = layer.rotary_emb(positions, *both.split((128, 64), -1))
    q, k = both.view(6, 3, 64).split((2, 1), 1)
    config = Qwen3Config(head_dim=64, max_position_embeddings=300, rope_parameters=parameters)
    cos, sin = hf.Qwen3RotaryEmbedding(config)(q, positions[None])
    theirs = hf.apply_rotary_pos_emb(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
    return ours, [t[0].transpose(0, 1).flatten(1) for t in theirs]


def test_rotary_embeddings_are_those_of_transformers(engine: dict[str, ModuleType]) -> None:
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    scaled = plain | {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    yarn = {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 75,
    }  # fmt: skip
    with vllm.enable():
        found = [
            rotated(stub.RotaryEmbedding, plain), rotated(stub.Llama3RotaryEmbedding, scaled),
            rotated(stub.YaRNScalingRotaryEmbedding, yarn),
        ]  # fmt: skip
    for mine, theirs in found:
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    assert not torch.equal(found[0][0][0], found[1][0][0])


def test_a_rotary_module_that_models_share_stays_vllms_own(engine: dict[str, ModuleType]) -> None:
    """vLLM keeps one for all models of a process. Layers of one model share a look-up."""
    shared = stub.RotaryEmbedding()
    with vllm.enable():
        model = loaded(Qwen3ForCausalLM(first=Layer(shared), second=Layer(shared)))
    x, positions = torch.randn(3, 64).bfloat16(), torch.tensor([4, 5, 6])
    assert shared(positions, x) == "vLLM's own"
    first, second = model.first.rotary_emb, model.second.rotary_emb
    assert first is not shared and dict(shared.named_buffers()).keys() == {"cos_sin_cache"}
    table = dict(model.named_buffers())[f"first.rotary_emb.{rotary.BUFFER}"]  # vLLM saves buffers
    assert table.data_ptr() == second.isobit_rotary_table.data_ptr()
    before = first(positions, x)[0]
    assert torch.equal(second(positions, x)[0], before)
    positions += 7  # the next forward, in the same memory
    after = first(positions, x)[0]
    assert not torch.equal(after, before) and torch.equal(second(positions, x)[0], after)
    assert torch.equal(second(positions - 7, x)[0], before)  # other positions are looked up
    table.zero_()  # what vLLM restores after a sleep is what is read
    assert not first(positions, x)[0].any()


def test_the_first_run_of_an_engine_is_rehearsed_if_that_is_wanted(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[Any] = []

    def rehearse(call: Any) -> None:
        rehearsed.append((call(), runner.profiled))

    monkeypatch.setattr(warmup, "warmup", rehearse)
    with vllm.enable(warm_up=True):
        assert os.environ[options.VARIABLE] == "1,warm_up"
        assert options.Options.read("1,warm_up").warm_up
        runner = engine[versions.GPU_RUNNER].GPUModelRunner(None, None)
        runner.profile_run()
        assert rehearsed == [(None, 1)] and runner.profiled == 2
    runner.profile_run()
    assert len(rehearsed) == 1 and runner.profiled == 3
