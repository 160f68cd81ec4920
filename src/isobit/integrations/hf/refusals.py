"""Which models and modules `zero_drift` cannot serve, and why. Nothing here changes a model or runs it."""

from typing import Any

import torch
from torch import nn

from isobit.integrations.hf import adapters, delta_nets, experts
from isobit.integrations.hf.errors import HFError, needed
from isobit.ops.attention.op import HEAD_SIZES

#: Kinds of layers that read keys and values.
_ATTENTION = {"full_attention", "sliding_attention"}

#: The method of a model by which `generate` decides whether to compile its steps.
COMPILES = "_valid_auto_compile_criteria"

NARROW = (torch.bfloat16, torch.float16)

_EAGER = "compiled code rounds in other places than eager code, so run it without torch.compile"


def refusal(model: Any, reason: str) -> HFError:
    return HFError(f"isobit.integrations.hf.zero_drift(model: {type(model).__name__}): {reason}")


def of_model(model: Any) -> str | None:
    """Why a model as a whole cannot be served, or None."""
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        return f"it is compiled; pass the model that was given to torch.compile, model._orig_mod: {_EAGER}"
    if adapters.adds_tokens(model):
        return "its adapter puts tokens or keys in front of a prompt; of PEFT only LoRA is served"
    if not isinstance(model, needed("transformers", "zero_drift").PreTrainedModel):
        hint = "; pass model.get_base_model()" if hasattr(model, "get_base_model") else ""
        return f"it is not a transformers.PreTrainedModel{hint}"
    config = model.config
    if (dropping := experts.of_capacity(model)) is not None:
        return dropping
    if config.is_encoder_decoder:
        return "it has an encoder in addition to its decoder"
    if config.get_text_config(decoder=True) is not config:
        return (
            "it contains more than a language model; make one that has its text_config, its layers and "
            "its LM head, as in docs/zero_drift.md, and pass that"
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        return "it is not a causal language model: it has no LM head"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION - {delta_nets.KIND})
    if others:
        return f"it has layers of {', '.join(others)}"
    if (recurrent := delta_nets.why_not(model)) is not None:
        return recurrent
    if not model._can_set_attn_implementation():
        return "its attention does not use transformers' AttentionInterface"
    if getattr(config, "attention_dropout", 0.0):
        return f"attention_dropout={config.attention_dropout} in its config; set it to 0"
    if (mixture := experts.why_not(model)) is not None:
        return mixture
    sharded = next((name for name, p in model.named_parameters() if is_cut_otherwise(model, name, p)), None)
    if sharded is not None:
        return (
            f"{sharded} is sharded (a DTensor); call zero_drift before fully_shard, and cut layers over "
            "ranks with tp=mesh, or with DetColwise and DetRowwise of isobit.parallel"
        )
    compiled = next((name for name, m in model.named_modules() if is_compiled(m)), None)
    if compiled is not None:
        return f"{compiled or 'it'} is compiled: {_EAGER}"
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size > max(HEAD_SIZES):
        return f"heads of {size} elements; isobit.attention takes up to {max(HEAD_SIZES)} (head_dim)"
    if not hasattr(model, COMPILES):
        return f"it has no {COMPILES}: this version of transformers is not supported"
    return None


def is_cut_otherwise(model: nn.Module, name: str, parameter: Any) -> bool:
    """Whether a parameter is a DTensor for another reason than that ranks share its layer."""
    if not hasattr(parameter, "full_tensor"):
        return False
    module = model.get_submodule(name.rpartition(".")[0])
    shared = getattr(module, "of_ranks", False) or getattr(module, "heads_at", None) is not None
    return not shared or parameter.device_mesh.ndim != 1


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def of_modules(model: nn.Module) -> dict[str, str]:
    """Modules that cannot be served, and why."""
    narrow, uncalled = adapters.operand_dtypes(model), delta_nets.convolutions(model)
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if module in uncalled:
            continue
        reason = of_module(module)
        if reason is None and name not in narrow:
            reason = _of_dtype(module)
        if reason is not None:
            reasons[name] = reason
    return reasons


def of_module(module: nn.Module) -> str | None:
    """Why a module cannot be served, whatever its dtype, or None."""
    if isinstance(module, nn.Dropout) and module.p > 0:
        return f"Dropout(p={module.p}) is random in training"
    if (adapter := adapters.why_not(module)) is not None:
        return adapter
    if (moving := _moving_frequencies(module)) is not None:
        return (
            f"its rope_type {moving!r} makes frequencies from the longest position in the batch, once "
            "that exceeds a limit of the config"
        )
    if (sizes := _unequal_heads(module)) is not None:
        return (
            f"{type(module).__name__} has heads of {sizes[0]} elements for queries and {sizes[1]} for "
            "values; isobit.attention takes equal ones"
        )
    if (codes := experts.quantised(module)) is not None:
        return f"{type(module).__name__} is quantised ({codes}); load the model with weights in bf16"
    served = nn.Linear | nn.Embedding | experts.DetExperts | experts.DetRouter
    if not isinstance(module, served) and experts.swapped_class(module) is None:
        own = [key for key, p in module.named_parameters(recurse=False) if p.ndim > 1]
        if own:
            return f"{type(module).__name__} multiplies by its {', '.join(own)} in a way of its own"
    return None


def _of_dtype(module: nn.Module) -> str | None:
    """Outside autocast the operands of a product must have 16 bits."""
    if isinstance(module, experts.DetExperts | experts.DetRouter) or experts.swapped_class(module):
        wide = [p.dtype for p in module.parameters(recurse=False) if p.dtype not in NARROW]
        return f"its weight is {wide[0]}; cast the model to bf16" if wide else None
    if not isinstance(module, nn.Linear) or module.weight.dtype in NARROW:
        return None
    kind = module.weight.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return None
    return (
        f"its weight is {module.weight.dtype}; cast the model to bf16, or call zero_drift under "
        "torch.autocast, as the model will be called"
    )


def _moving_frequencies(module: nn.Module) -> str | None:
    """The type of a rotary embedding whose frequencies are functions of the batch. The trial run cannot
    detect these: its sequences are too short for the frequencies to change."""
    given = getattr(module, "rope_type", None)
    kinds = given.values() if isinstance(given, dict) else (given,)  # Gemma 3 has one per kind of layer
    return next((k for k in kinds if isinstance(k, str) and ("dynamic" in k or k == "longrope")), None)


def _unequal_heads(module: nn.Module) -> tuple[int, int] | None:
    """Elements of a query and of a value in multi-head latent attention, if they differ."""
    sizes = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
    return sizes if None not in sizes and sizes[0] != sizes[1] else None  # type: ignore[return-value]
