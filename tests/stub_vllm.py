"""A stub of vLLM: the modules, classes and functions that isobit uses, with their signatures.

`make engines` runs the real one. This is for what needs no engine: names, switching on and off, refusals.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stub_vllm_moe
import stub_vllm_v2
from isobit.integrations.vllm import disable, options, switch, workers
from isobit.integrations.vllm import versions as v
from stub_vllm_v2 import Gathered

BACKEND = "vllm.v1.attention.backend"
FLASH = "vllm.v1.attention.backends.flash_attn"


class CustomOp(nn.Module):
    pass


class PluggableLayer(nn.Module):
    pass


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().apply(layer, x, bias)


class Fp8LinearMethod(UnquantizedLinearMethod):
    pass


class LinearBase(PluggableLayer):
    tp_size = 1

    def __init__(self, inputs: int, outputs: int, method: Any = UnquantizedLinearMethod) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs).bfloat16(), requires_grad=False)
        self.bias: nn.Parameter | None = None
        self.quant_method = method()

    @classmethod
    def of(cls, *layers: Any) -> "LinearBase":
        """With the weights and biases of linear layers, one behind another."""
        made = cls(*reversed(layers[0].weight.shape))
        for name in ("weight", "bias"):
            if getattr(layers[0], name, None) is not None:
                joined = torch.cat([getattr(layer, name).data for layer in layers])
                setattr(made, name, nn.Parameter(joined, requires_grad=False))
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class VocabParallelEmbedding(LinearBase):
    pass


class RMSNorm(CustomOp):
    has_weight, variance_size_override, variance_epsilon = True, None, 1e-6

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size).bfloat16() + 0.5, requires_grad=False)

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any: ...


class SiluAndMul(CustomOp):
    def forward_cuda(self, x: Tensor) -> Any: ...


class RotaryEmbedding(CustomOp):
    head_size, rotary_dim, max_position_embeddings, base, is_neox_style = 64, 64, 300, 10000.0, True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.zeros(300, 64).bfloat16(), persistent=False)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return "vLLM's own"

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any: ...


class Llama3RotaryEmbedding(RotaryEmbedding):
    scaling_factor, low_freq_factor, high_freq_factor, orig_max_position = 8.0, 1.0, 4.0, 64


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """As GPT-OSS makes it: with a table in fp32, of more positions than `max_position_embeddings`."""

    scaling_factor, beta_fast, beta_slow, truncate = 4.0, 32.0, 1.0, False
    max_position_embeddings, base, extrapolation_factor = 75, 150000.0, 1
    mscale = 0.1 * math.log(4.0) + 1.0

    def __init__(self) -> None:
        super().__init__()
        self.cos_sin_cache = self.cos_sin_cache.float()


class ApplyRotaryEmb(CustomOp):
    pass


class LogitsProcessor(PluggableLayer):
    soft_cap, scale, head_dtype, org_vocab_size = None, 1.0, None, 37

    def forward(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Any:
        return lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)[..., :37]


class Attention(nn.Module):
    def __init__(self, impl: Any) -> None:
        super().__init__()
        self.impl = impl


class FlashAttentionImpl:
    head_size, scale, sliding_window, logits_soft_cap = 64, 0.125, (-1, -1), 0
    attn_type, alibi_slopes, sinks, kv_cache_dtype = "decoder", None, None, "auto"
    kv_sharing_target_layer_name = None

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> Any: ...  # fmt: skip

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None: ...


class FlashAttentionBackend:
    pass


class FlashAttentionMetadataBuilder:
    aot_schedule = True

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """All of it, as far as attention needs it."""
        return SimpleNamespace(**vars(common_attn_metadata), schedule=self.aot_schedule)


class AttentionCGSupport(Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class FusedMoE(PluggableLayer):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(2, 4, 4))


class MambaBase:
    """Of layers with a recurrent state."""


class GatedDeltaNetAttention(PluggableLayer, MambaBase):
    pass


class _Member:
    def __init__(self) -> None:
        self.path = f"{FLASH}.FlashAttentionBackend"
        self.override: str | None = None

    def is_overridden(self) -> bool:
        return self.override is not None

    def get_path(self) -> str:
        return self.override or self.path

    def clear_override(self) -> None:
        self.override = None


def register_backend(backend: _Member, class_path: str | None = None, is_mamba: bool = False) -> Any:
    backend.override = class_path


def _cached_get_attn_backend(backend: str) -> type:
    """The class that the registry has for a name at the first call."""
    registry = import_module(v.REGISTRY)
    place, _, name = registry.AttentionBackendEnum[backend].get_path().rpartition(".")
    return getattr(import_module(place), name)  # type: ignore[no-any-return]


class WorkerBase:
    """With a model runner. Others call its methods by name."""

    def __init__(self, model_runner: Any) -> None:
        self.model_runner = model_runner


class LLM:
    """An engine that has loaded a model."""

    def __init__(self, model: Any) -> None:
        self.worker = import_module(v.WORKER).WorkerBase(runner_of(model))

    def collective_rpc(self, method: str) -> list[Any]:
        """As vLLM's engine: what other processes raise comes back in words."""
        if not hasattr(self.worker, method):
            raise Exception(f"Call to collective_rpc method failed: Method {method!r} is not implemented.")
        return [getattr(self.worker, method)()]


@dataclass
class Metadata:
    """What a sampler is given."""

    temperature: list[float]
    max_num_logprobs: int | None = 0
    logprob_token_ids: dict[int, list[int]] | None = None
    allowed_token_ids_mask: Tensor | None = None
    bad_words_token_ids: dict[int, Any] | None = None
    no_penalties: bool = True
    processors: tuple[Any, ...] = ()

    @property
    def logitsprocs(self) -> Any:
        return SimpleNamespace(non_argmax_invariant=self.processors)


class MinTokensLogitsProcessor:
    """One of vLLM's own, which is there for requests that do not use it too."""

    def __init__(self, min_toks: dict[int, int]) -> None:
        self.min_toks = min_toks


class Sampler(nn.Module):
    """Takes the most probable token but two. Penalties change logits in place, and so does the temperature,
    and filters after it."""

    written = (0, 0)  # the addresses of logits that processors and filters may have changed

    def __init__(self) -> None:
        super().__init__()
        self.topk_topp_sampler = SimpleNamespace(logprobs_mode="processed_logprobs")

    def forward(
        self, logits: Tensor, sampling_metadata: Metadata, predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:  # fmt: skip
        logits = logits.float()  # of fp32 this is no copy
        logits = self.apply_logits_processors(logits, sampling_metadata, predict_bonus_token)
        sampled = logits.topk(3).indices[:, 2]
        processed = logits.data_ptr()
        logits = self.apply_temperature(logits, torch.tensor(sampling_metadata.temperature), False)
        self.written = processed, logits.data_ptr()
        logits.fill_(-torch.inf)
        return SimpleNamespace(sampled_token_ids=sampled.int()[:, None], logprobs_tensors=None)

    def apply_logits_processors(
        self, logits: Tensor, sampling_metadata: Metadata, predict_bonus_token: bool
    ) -> Tensor:
        if sampling_metadata.allowed_token_ids_mask is not None:
            logits.masked_fill_(sampling_metadata.allowed_token_ids_mask, -torch.inf)
        used = any(getattr(each, "min_toks", True) for each in sampling_metadata.processors)
        if used or sampling_metadata.bad_words_token_ids or not sampling_metadata.no_penalties:
            logits[:, 5:9] = -torch.inf
        return logits

    @staticmethod
    def apply_temperature(logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
        return logits.div_(torch.where(temp < 1e-5, 1.0, temp)[:, None])

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Gathered:
        ids = torch.cat((token_ids[:, None], logprobs.topk(num_logprobs).indices), 1)
        values = logprobs.gather(1, ids)
        return Gathered(ids.int(), values, (logprobs > values[:, :1]).sum(1) + 1)

    def gather_specific_token_logprobs(
        self, logprobs: Tensor, logprob_token_ids: dict[int, list[int]], sampled: Tensor
    ) -> Gathered:
        chosen = torch.tensor([logprob_token_ids[i] for i in range(len(sampled))])
        ids = torch.cat((sampled[:, None], chosen), 1)
        return Gathered(ids.int(), logprobs.gather(1, ids), sampled)


class _Platform:
    device_name = "stub"

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return True


class Graph:
    """In front of a model: replays the kernels of its forward."""

    def __init__(self, runnable: Any) -> None:
        self.runnable = runnable


def runner_class() -> type:
    """A fresh one for each test: isobit replaces its load_model."""

    class GPUModelRunner:
        def __init__(self, vllm_config: Any, model: Any) -> None:
            self.vllm_config, self.given, self.sampler = vllm_config, model, Sampler()

        def load_model(self, load_dummy_weights: bool = False) -> None:
            self.model = Graph(self.given) if self.vllm_config.graphs else self.given

        def profile_run(self) -> None:
            self.profiled = getattr(self, "profiled", 0) + 1

        def get_model(self) -> Any:
            return self.model.runnable if isinstance(self.model, Graph) else self.model

        def step(self, hidden: Tensor, metadata: Metadata, grammar: str | None = None) -> Gathered:
            """Of requests with these temperatures."""
            of = {str(i): SimpleNamespace(temperature=t) for i, t in enumerate(metadata.temperature)}
            self.requests = {i: SimpleNamespace(sampling_params=params) for i, params in of.items()}
            self.input_batch = SimpleNamespace(req_ids=list(of))
            self.logits, self.metadata = self.model.logits(self.model.lm_head, hidden), metadata
            return self.sample_tokens(grammar).logprobs_tensors

        def sample_tokens(self, grammar_output: str | None) -> Any:
            if grammar_output is not None:
                self.logits[:, ::2] = -torch.inf
            return self.sampler(logits=self.logits, sampling_metadata=self.metadata)

    return GPUModelRunner


def modules(version: str = "0.26.0") -> dict[str, ModuleType]:
    """By name, for sys.modules."""
    enum = {"FLASH_ATTN": _Member()}
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": _Platform()},
        v.CUSTOM_OP: {"CustomOp": CustomOp, "PluggableLayer": PluggableLayer},
        v.LINEAR: {"LinearBase": LinearBase, "UnquantizedLinearMethod": UnquantizedLinearMethod},
        v.EMBEDDING: {
            "VocabParallelEmbedding": VocabParallelEmbedding,
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
        },
        v.NORM: {"RMSNorm": RMSNorm},
        v.ACTIVATION: {"SiluAndMul": SiluAndMul},
        v.ROTARY: {"RotaryEmbedding": RotaryEmbedding},
        v.ROTARY_LLAMA3: {"Llama3RotaryEmbedding": Llama3RotaryEmbedding},
        v.ROTARY_YARN: {"YaRNScalingRotaryEmbedding": YaRNScalingRotaryEmbedding},
        v.ROTARY_COMMON: {"ApplyRotaryEmb": ApplyRotaryEmb},
        v.LOGITS: {"LogitsProcessor": LogitsProcessor},
        v.ATTENTION: {"Attention": Attention},
        v.REGISTRY: {"register_backend": register_backend, "AttentionBackendEnum": enum},
        v.SELECTOR: {"_cached_get_attn_backend": cache(_cached_get_attn_backend)},
        v.WORKER: {"WorkerBase": type("WorkerBase", (WorkerBase,), {})},
        v.SAMPLER: {"Sampler": Sampler},
        v.GPU_RUNNER: {"GPUModelRunner": runner_class()},
        BACKEND: {"AttentionCGSupport": AttentionCGSupport},
        FLASH: {
            "FlashAttentionImpl": FlashAttentionImpl,
            "FlashAttentionBackend": FlashAttentionBackend,
            "FlashAttentionMetadataBuilder": FlashAttentionMetadataBuilder,
        },
    }
    made: dict[str, ModuleType] = {}
    for name, content in (contents | stub_vllm_v2.contents() | stub_vllm_moe.contents()).items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):  # packages above it
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(made[name]).update(content)
    for name, module in made.items():
        module.__path__ = []  # type: ignore[attr-defined]  # a package, so that its parts can be missing
        above, _, own = name.rpartition(".")
        if above:
            setattr(made[above], own, module)
    return made


def remove() -> None:
    """Take the stub out of sys.modules, and what was imported with it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.pop("isobit.integrations.vllm.flash_attention", None)


VARIABLES = (options.VARIABLE, switch.RUNNER, workers.RAY)


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Its modules, importable until a fixture ends."""
    for name in (*VARIABLES, workers.PLUGINS, workers.PROCESSES):
        monkeypatch.delenv(name, raising=False)
    made = modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield made
    disable()
    remove()


# Models in it


def settings(**other: Any) -> Any:
    """The configuration of an engine."""
    model = {"enforce_eager": True, "dtype": torch.bfloat16} | other.pop("model", {})
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | other.pop("parallel", {})
    values = {
        "model_config": SimpleNamespace(**model), "parallel_config": SimpleNamespace(**parallel),
        "compilation_config": SimpleNamespace(mode=0), "lora_config": None, "speculative_config": None,
        "use_v2_model_runner": False, "graphs": False, "additional_config": {},
    }  # fmt: skip
    return SimpleNamespace(**values | other)


class Qwen3ForCausalLM(nn.Module):
    """With one module of each kind, and others."""

    def __init__(self, **others: nn.Module) -> None:
        super().__init__()
        backend = import_module("isobit.integrations.vllm.flash_attention")
        self.proj, self.norm = LinearBase(64, 32), RMSNorm(64)
        self.act, self.rotary = SiluAndMul(), RotaryEmbedding()
        self.attn = Attention(backend.Impl())
        self.lm_head, self.logits = VocabParallelEmbedding(64, 40), LogitsProcessor()
        for name, module in others.items():
            setattr(self, name, module)


def runner_of(model: Any, /, v2: bool = False, **other: Any) -> Any:
    """A model runner that has loaded a model."""
    place = v.GPU_RUNNER_V2 if v2 else v.GPU_RUNNER
    runner = import_module(place).GPUModelRunner(settings(**{"use_v2_model_runner": v2} | other), model)
    runner.load_model()
    return runner


def loaded(model: Any, /, **other: Any) -> Any:
    """A model after vLLM has loaded it."""
    return runner_of(model, **other).model
