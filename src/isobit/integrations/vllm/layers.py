"""Which modules of a model in vLLM isobit serves, how, and which are refused.

Modules are replaced one by one after the model is loaded, and stay as they are as long as the engine lives.
`disable` changes no engine that exists: a rollout does not change its numbers halfway.

A class that is not in `_KINDS` and that computes something (it has weights, or is an op or layer of vLLM) is
named and refused. Classes that only call others are left.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from isobit.integrations.rounding import Rounding, cast_of
from isobit.integrations.vllm import attention as paged
from isobit.integrations.vllm import classes, experts, rotary
from isobit.integrations.vllm import versions as v
from isobit.ops.det_gemm import det_linear
from isobit.ops.rms_norm import rms_norm
from isobit.ops.swiglu import swiglu

#: Models whose roundings in transformers are those of rope, swiglu and rms_norm, with `cast` of their norms.
MODELS: dict[str, Literal["before", "after"]] = {
    "LlamaForCausalLM": "before", "MistralForCausalLM": "before", "Qwen2ForCausalLM": "before",
    "Qwen3ForCausalLM": "before", "Qwen2MoeForCausalLM": "before", "Qwen3MoeForCausalLM": "before",
    "MixtralForCausalLM": "before", "OlmoeForCausalLM": "before", "GptOssForCausalLM": "after",
}  # fmt: skip

#: vLLM's base class of layers with a recurrent state. By its name: it has been in several modules.
RECURRENT = "MambaBase"

#: Counts a call, by the name of what served it.
Count = Callable[[str], None]


@dataclass(frozen=True)
class How:
    """What serving a module takes, besides the module."""

    count: Count
    cast: Literal["before", "after"]  # of norms
    rounding: Rounding  # of rotary embeddings
    of: Callable[[str], str | None]  # the numerics class of a linear layer; "" is the module itself


class Kind(NamedTuple):
    why_not: Callable[[Any], str | None]
    serve: Callable[[Any, How], None]
    exact: bool  # subclasses compute something else
    parts: bool = False  # its parts are modules that are served by themselves


# Why a module cannot be served


def _tensor_parallel(layer: Any) -> str | None:
    ranks = getattr(layer, "tp_size", 1)
    return f"it is split over {ranks} ranks" if ranks != 1 else None


def _linear(layer: Any) -> str | None:
    method = type(layer.quant_method)
    if method not in (v.find(v.LINEAR, "UnquantizedLinearMethod"), v.find(v.EMBEDDING, _EMBEDDING_METHOD)):
        return f"its weights are those of {method.__name__}: quantised, or of another kind"
    if layer.weight.dtype not in (torch.bfloat16, torch.float16):
        return f"its weights are {layer.weight.dtype}: bits are kept in bf16 and fp16"
    return _tensor_parallel(layer)


def _norm(norm: Any) -> str | None:
    if not norm.has_weight:
        return "it has no weight"
    if norm.variance_size_override is not None:
        return f"its variance is that of {norm.variance_size_override} elements"
    return None


def _experts(block: Any) -> str | None:
    return experts.why_not(block, _part)


def _part(layer: Any) -> str | None:
    """Of a linear layer in a block, to be put behind its name."""
    if not isinstance(layer, v.find(v.LINEAR, "LinearBase")):
        return f" is a {type(layer).__name__}"
    reason = _linear(layer)
    return None if reason is None else f": {reason}"


def _logits(processor: Any) -> str | None:
    if processor.soft_cap is not None or processor.scale != 1.0:
        return f"logits have soft_cap={processor.soft_cap}, scale={processor.scale}"
    if processor.head_dtype not in (None, torch.bfloat16, torch.float16):
        return f"the LM head is computed in {processor.head_dtype} by torch: leave head_dtype at its default"
    return None


# How a module is served


def _serve_linear(layer: Any, how: How) -> None:
    numerics = how.of("")

    def apply(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        how.count("isobit.det_linear")
        own = None if bias is None else _plain(bias)
        return det_linear(x, _plain(layer.weight), own, numerics=numerics)

    layer.quant_method.apply = apply


def _plain(parameter: Tensor) -> Tensor:
    """vLLM's parameters are of a subclass, which calls take the long way through the dispatcher for: it would
    cost a layer with a long prompt more time on the host than on the GPU. Compilers read the parameter."""
    return parameter if torch.compiler.is_compiling() else parameter.data


def _serve_norm(norm: Any, how: How) -> None:
    eps, cast = norm.variance_epsilon, how.cast

    def forward(x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        how.count("isobit.rms_norm")
        if residual is None:
            return rms_norm(x, norm.weight, eps=eps, cast=cast)
        return rms_norm(x, norm.weight, residual=residual, eps=eps, cast=cast)

    norm.forward = forward


def _serve_swiglu(module: Any, how: How) -> None:
    def forward(x: Tensor) -> Tensor:
        how.count("isobit.swiglu")
        return swiglu(*x.chunk(2, dim=-1))

    module.forward = forward


def _serve_rotary(module: Any, how: How) -> None:
    rotary.serve(module, how.count, how.rounding)


def _serve_experts(block: Any, how: How) -> None:
    experts.serve(block, how.count, _plain, how.of)


def _serve_attention(layer: Any, how: How) -> None:
    layer.impl.count = how.count


def _nothing(module: Any, how: How) -> None:
    """It calls modules that are served."""


def _always(module: Any) -> None:
    return None


_EMBEDDING_METHOD = "UnquantizedEmbeddingMethod"

#: By the module and name of a class in vLLM.
_KINDS: dict[tuple[str, str], Kind] = {
    (v.LINEAR, "LinearBase"): Kind(_linear, _serve_linear, False),
    (v.EMBEDDING, "VocabParallelEmbedding"): Kind(_linear, _serve_linear, False),
    (v.NORM, "RMSNorm"): Kind(_norm, _serve_norm, True),
    (v.ACTIVATION, "SiluAndMul"): Kind(_always, _serve_swiglu, True),
    (v.ROTARY, "RotaryEmbedding"): Kind(rotary.why_not, _serve_rotary, True),
    (v.ROTARY_LLAMA3, "Llama3RotaryEmbedding"): Kind(rotary.why_not, _serve_rotary, True),
    (v.ROTARY_YARN, "YaRNScalingRotaryEmbedding"): Kind(rotary.why_not, _serve_rotary, True),
    (v.ROTARY_COMMON, "ApplyRotaryEmb"): Kind(_always, _nothing, True),
    (v.LOGITS, "LogitsProcessor"): Kind(_logits, _nothing, True),
    (v.ATTENTION, "Attention"): Kind(paged.why_not, _serve_attention, False),
}

#: The blocks of `experts.BLOCKS`.
_BLOCK = Kind(_experts, _serve_experts, True)

#: `attention.has_sinks`: its attention reads them.
_SINKS = Kind(_always, _nothing, True, parts=True)


def _kind_of(module: nn.Module) -> Kind | None:
    if experts.block_of(module) is not None:
        return _BLOCK
    if paged.has_sinks(module):
        return _SINKS
    for (place, name), kind in _KINDS.items():
        theirs = v.find(place, name)
        if type(module) is theirs or (not kind.exact and isinstance(module, theirs)):
            return kind
    return None


def _computes(module: nn.Module) -> bool:
    """Whether a module that is not served has weights, or is an op or layer of vLLM."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(own) or isinstance(
        module, (v.find(v.CUSTOM_OP, "CustomOp"), v.find(v.CUSTOM_OP, "PluggableLayer"))
    )


def _unknown(module: nn.Module) -> str | None:
    """Why a module of a class that isobit does not know is refused, if it computes something."""
    kind = type(module)
    if any(base.__name__ == RECURRENT for base in kind.__mro__):
        return (
            f"{kind.__name__} is linear attention, which vLLM decodes by a recurrence and training computes "
            "in chunks: roll out with transformers under isobit.integrations.hf.zero_drift, which serves the "
            "gated delta nets of Qwen3-Next and Qwen3.5"
        )
    return f"{kind.__name__} is not served" if _computes(module) else None


def _inside(name: str, owners: set[str]) -> bool:
    """Whether a module is a part of one of these."""
    return any(name.startswith(f"{owner}.") for owner in owners)


def refused(model: nn.Module, rounding: Rounding = "hf") -> dict[str, str]:
    """Reasons by the name of a module: those that isobit does not serve, or not with this rounding. Parts of
    a module of unknown class are looked at too, so that one error names all."""
    reasons: dict[str, str] = {}
    known: set[str] = set()
    for name, module in model.named_modules():
        if _inside(name, known):
            continue
        kind = _kind_of(module)
        if kind is _SINKS:
            paged.show_sinks(module)
        if kind is not None:
            if not kind.parts:
                known.add(name)
            reason = kind.why_not(module)
            if reason is None and kind is _BLOCK and rounding != "hf":
                reason = f"layers of experts are served with rounding='hf' alone, and not {rounding!r}"
        else:
            reason = _unknown(module)
        if reason is not None:
            reasons[name] = reason
    return reasons


def serve(
    model: nn.Module,
    refused: dict[str, str],
    count: Count,
    given: dict[str, str] | None = None,
    rounding: Rounding = "hf",
) -> Counter[str]:
    """Replace all modules but those that are refused; returns how many there are of each class. `given` are
    the numerics classes of linear layers, by their names in transformers."""
    linear, left = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
    for name, module, kind in _known(model):
        if name in refused:
            left += [(name, module)] if kind.serve is _serve_linear else []
        elif kind.serve in (_serve_linear, _serve_experts):
            linear.append((name, module))
    of_layers = classes.of_model(given or {}, linear, left)
    rotary.separate(model, _turns)
    cast = cast_of(rounding, MODELS.get(type(model).__name__, "before"))
    served = Counter[str]()
    for name, module, kind in _known(model):
        if name not in refused and kind.serve is not _nothing:
            kind.serve(module, How(count, cast, rounding, partial(classes.of_part, of_layers, name)))
            served[type(module).__name__] += 1
    return served


def _known(model: nn.Module) -> list[tuple[str, nn.Module, Kind]]:
    """Modules of a known kind, without those inside them."""
    known: dict[str, tuple[nn.Module, Kind]] = {}
    for name, module in model.named_modules():
        kind = _kind_of(module)
        if kind is not None and not kind.parts and not _inside(name, set(known)):
            known[name] = module, kind
    return [(name, *each) for name, each in known.items()]


def _turns(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding that is served."""
    kind = _kind_of(module)
    return kind is not None and kind.serve is _serve_rotary and kind.why_not(module) is None


# The configuration of an engine


def wrong_settings(
    config: Any, logprobs: str, logits_dtype: str = "float32", why_v1: str | None = None
) -> Iterator[str]:
    """What in the configuration of an engine isobit cannot serve, with these log-probabilities. `why_v1`: why
    it should not have the V2 model runner."""
    ranks = config.parallel_config.tensor_parallel_size
    if ranks != 1:
        yield f"tensor_parallel_size={ranks}: sums are split over ranks"
    if config.parallel_config.pipeline_parallel_size != 1:
        yield "pipeline_parallel_size is not 1, which was not tried"
    if config.lora_config is not None:
        yield "enable_lora=True: adapters are computed by vLLM's own kernels"
    if config.speculative_config is not None:
        yield "speculative decoding has its own log-probabilities"
    if _is_compiled(config) and not isinstance(config.additional_config, dict):
        yield "additional_config is no dictionary, and compiled code is kept by it: pass enforce_eager=True"
    if getattr(config, "use_v2_model_runner", False):
        if why_v1 is not None:
            yield f"it has the V2 model runner, and should have V1, since {why_v1}"
        elif logprobs != "linear_logp":
            yield f"the V2 model runner has no logprobs={logprobs!r}: set VLLM_USE_V2_MODEL_RUNNER=0"
    if not getattr(config.model_config, "disable_cascade_attn", True):
        yield "cascade attention merges two sums: pass disable_cascade_attn=True"
    if config.model_config.dtype not in (torch.bfloat16, torch.float16):
        yield f"dtype={config.model_config.dtype}: bits are kept in bf16 and fp16; pass dtype='bfloat16'"
    for unlike in (experts.unlike_the_config, rotary.unlike_the_config):
        yield from unlike(getattr(config.model_config, "hf_config", None))
    mode = getattr(config.model_config, "logprobs_mode", "raw_logprobs")
    if logprobs == "linear_logp" and "logits" in mode:
        yield f"logprobs_mode={mode!r} returns logits: leave it, or enable(logprobs='log_softmax')"
    if logits_dtype != "float32" and getattr(torch, logits_dtype) != config.model_config.dtype:
        yield f"logits_dtype={logits_dtype} is not that of the model, {config.model_config.dtype}"


def _is_compiled(config: Any) -> bool:
    return int(config.compilation_config.mode or 0) != 0


def without_python(config: Any) -> Iterator[str]:
    """Where an engine makes calls that Python does not see."""
    if _is_compiled(config):
        yield "compiled code"
    if getattr(config.compilation_config, "cudagraph_mode", None):
        yield "replays of CUDA graphs"


def separate_caches(config: Any, options: str) -> None:
    """vLLM keeps compiled code on disk, by a hash of the configuration. The modules that it was traced from
    are not in it: without this, an engine would run code that was compiled without isobit, or with other
    numerics classes. `options` are those of `enable`."""
    if isinstance(config.additional_config, dict):
        files = sorted(Path(__file__).parent.glob("*.py"))
        text = b"".join([*(path.read_bytes() for path in files), options.encode()])
        config.additional_config = {**config.additional_config, "isobit": hashlib.sha256(text).hexdigest()}
