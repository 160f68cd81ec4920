"""Mixtures of experts of transformers: their experts through `isobit.nn.DetExperts`, and their routers.

Modules are known by their classes: no attribute says how a router computes its weights. Logits are a product
of `det_linear`, probabilities torch's softmax in fp32. Of equal probabilities the lower expert comes first,
which `torch.topk` does not say. The weights of a token are added in their order where they are normalised.
"""

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobit.integrations.hf.errors import HFError
from isobit.layers.experts import DetExperts, experts_forward
from isobit.ops.det_gemm import det_linear

#: In transformers' ExpertsInterface.
NAME = "isobit"

#: Classes of experts with gates first and no bias: those of transformers that are served.
EXPERTS = (
    "Qwen3MoeExperts", "Qwen3NextExperts", "Qwen3_5MoeExperts", "MixtralExperts", "OlmoeExperts",
)  # fmt: skip

#: The parameters that experts have.
PARAMETERS = {"gate_up_proj", "down_proj"}


class Routing(NamedTuple):
    """How weights become those of a token: divided by their sum or not, if None as `norm_topk_prob` of the
    module says; `narrow`: rounded to the dtype of the logits."""

    normalize: bool | None
    narrow: bool


ROUTERS = {
    "Qwen3MoeTopKRouter": Routing(None, True),
    "Qwen3NextTopKRouter": Routing(None, True),
    "Qwen3_5MoeTopKRouter": Routing(True, True),
    "OlmoeTopKRouter": Routing(None, True),
    "MixtralTopKRouter": Routing(True, False),
}


class DetRouter(nn.Module):
    """A swapped router: the same object with the same weight, and another class."""

    weight: Tensor
    top_k: int
    routing: Routing

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, weights, experts) of [tokens, D]."""
        rows = hidden_states.reshape(-1, self.weight.shape[1])
        logits = det_linear(rows, self.weight)
        weights, experts = top_k(torch.softmax(logits, -1, dtype=torch.float32), self.top_k)
        normalize = self.routing.normalize
        if self.norm_topk_prob if normalize is None else normalize:
            weights = weights / in_order(weights)[:, None]
        return logits, weights.to(logits.dtype) if self.routing.narrow else weights, experts


def top_k(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of every row, the lower index first where two are equal."""
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], index[:, :count]


def in_order(weights: Tensor) -> Tensor:
    """The sum of every row, from the first on."""
    total = weights[:, 0]
    for each in weights.unbind(1)[1:]:
        total = total + each
    return total


def register_experts() -> str:
    """Register isobit's experts with transformers' ExpertsInterface, and return their name: a model whose
    `config._experts_implementation` has it computes its experts with `det_grouped_linear`. Routers stay as
    they are; `zero_drift` replaces both.

    Example:
        >>> import isobit
        >>> isobit.integrations.hf.register_experts()
        'isobit'
    """
    import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As the interface calls it: `self` is the module of experts."""
    reason = _unlike(self)
    if reason is not None:
        raise HFError(f"isobit's experts(self: {type(self).__name__}): {reason}")
    return experts_forward(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, self._apply_gate
    )


def _unlike(module: Any) -> str | None:
    """Why a module of experts is not one that `experts_forward` computes, or None."""
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are on several devices (expert parallelism)"
    given = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    other = [name for name, wanted in given.items() if getattr(module, name, wanted) is not wanted]
    return f"{', '.join(other)} of it is not as in Mixtral or Qwen3-MoE" if other else None


def is_router(module: nn.Module) -> bool:
    return type(module).__name__ in ROUTERS


def is_experts(module: nn.Module) -> bool:
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return type(module).__name__ in EXPERTS and own == PARAMETERS


def swapped_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that serves a module, if it is one of a mixture of experts."""
    return DetExperts if is_experts(module) else DetRouter if is_router(module) else None


def routing_of(module: nn.Module) -> Routing:
    return ROUTERS[type(module).__name__]


def why_not(model: Any) -> str | None:
    """Why a mixture of experts cannot be served as a whole."""
    config = model.config
    mixtures = [module for module in model.modules() if swapped_class(module) is not None]
    if not mixtures:
        return None
    if reason := next(filter(None, map(_unlike, mixtures)), None):
        return reason
    if getattr(config, "output_router_logits", False):
        return "output_router_logits=True adds a loss that is a function of the batch; set it to False"
    if getattr(config, "router_jitter_noise", 0.0):
        return f"router_jitter_noise={config.router_jitter_noise} is random in training; set it to 0"
    return None
