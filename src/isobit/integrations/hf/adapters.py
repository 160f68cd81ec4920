"""Adapters of PEFT in a model: which are served, and in which dtype.

A LoRA layer is `base_layer(x) + lora_B(lora_A(x)) * scaling`, and all three are linear layers, called as
modules. So it keeps bits if they do. PEFT stores adapters in fp32 even if the model is bf16 or fp16. Their
products then have operands rounded to the model's dtype, as under autocast, and results in fp32:

    lora_A(x)   x and the weight in bf16, sums and result in fp32
    lora_B(a)   a and the weight rounded to bf16, sums and result in fp32

Autocast changes nothing in them, so a rollout without it has the bits of a training step with it.

PEFT need not be installed: if a model has its layers, its modules are loaded.
"""

import sys
from typing import Any

import torch
from torch import nn

_HALF = (torch.bfloat16, torch.float16)


def base_of(model: Any) -> Any:
    """The model of transformers in a model of PEFT, or the model itself."""
    return model.get_base_model() if _is_of_peft(model) and not adds_tokens(model) else model


def _is_of_peft(model: Any) -> bool:
    places = (("peft.peft_model", "PeftModel"), ("peft.mixed_model", "PeftMixedModel"))
    return any(
        module in sys.modules and isinstance(model, getattr(sys.modules[module], name))
        for module, name in places
    )


def adds_tokens(model: Any) -> bool:
    """Whether a model of PEFT adapts the inputs of a model and not its layers, by a prompt or a prefix."""
    config = getattr(model, "active_peft_config", None) if _is_of_peft(model) else None
    return bool(getattr(config, "is_prompt_learning", False))


def is_lora(module: nn.Module) -> bool:
    """Whether this is a LoRA layer around a linear layer."""
    lora = sys.modules.get("peft.tuners.lora.layer")
    return lora is not None and type(module) is lora.Linear


def why_not(module: nn.Module) -> str | None:
    """Why a layer of PEFT cannot be served, or None; None for all other modules."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or not isinstance(module, peft.BaseTunerLayer):
        return None
    if not is_lora(module):
        kind = type(module)
        return (
            f"it is a {kind.__module__}.{kind.__qualname__}; of PEFT only LoRA around linear layers is served"
        )
    layer: Any = module
    variants = {name: type(each).__name__ for name, each in getattr(layer, "lora_variant", {}).items()}
    if variants:
        shown = ", ".join(f"{name!r} is {kind}" for name, kind in variants.items())
        return f"its adapter {shown}; only plain LoRA is served"
    return None


def operand_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The names of fp32 layers of adapters, and the dtype of the 16-bit layer that they adapt."""
    narrow: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if not is_lora(module):
            continue
        adapted: Any = module
        dtype = adapted.get_base_layer().weight.dtype
        for inside, layer in module.named_modules(prefix=name):
            fp32 = isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32
            if fp32 and dtype in _HALF:
                narrow[inside] = dtype
    return narrow
