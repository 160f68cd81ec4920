"""Mixtures of experts of transformers: their experts through `isobit.nn.DetExperts`, and their routers.

Modules are known by their classes: no attribute says how a router computes its weights. Logits are a product
of `det_linear`, experts and weights are those of `route`: of equal scores the lower expert comes first, which
`torch.topk` does not say, and sums have one order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobit.integrations.hf.errors import HFError, needed
from isobit.layers.experts import DetExperts, experts_forward, gated_by
from isobit.ops.det_gemm import det_linear
from isobit.ops.route import choose_experts
from isobit.ops.swiglu import swiglu_packed

#: In transformers' ExpertsInterface.
NAME = "isobit"

#: Classes of experts with gates first and no bias: those of transformers that are served.
EXPERTS = (
    "Qwen2MoeExperts", "Qwen3MoeExperts", "Qwen3NextExperts", "Qwen3_5MoeExperts", "MixtralExperts",
    "OlmoeExperts",
)  # fmt: skip

#: With weights [E, K, N], gate and up as every other column, biases, and a clamped activation.
CLAMPED = ("GptOssExperts",)

#: The parameters that experts have.
PARAMETERS = {"gate_up_proj", "down_proj"}
BIASES = {"gate_up_proj_bias", "down_proj_bias"}

#: What else decides how experts compute: what Mixtral has, and what GPT-OSS has.
PLAIN_FORM = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
CLAMPED_FORM = PLAIN_FORM | {"has_bias": True, "is_transposed": True, "is_concatenated": False}


#: Said of a module that transformers has marked, and of a config: 5.10 marks no module.
ON_SEVERAL = "its experts are on several devices (expert parallelism)"


class Routing(NamedTuple):
    """How weights become those of a token: divided by their sum or not, if None as `norm_topk_prob` of the
    module says; `narrow`: rounded to the dtype of the logits; `order` as in `isobit.route`."""

    normalize: bool | None
    narrow: bool
    order: str = "softmax_topk"


ROUTERS = {
    "Qwen2MoeTopKRouter": Routing(None, True),
    "Qwen3MoeTopKRouter": Routing(None, True),
    "Qwen3NextTopKRouter": Routing(None, True),
    "Qwen3_5MoeTopKRouter": Routing(True, True),
    "OlmoeTopKRouter": Routing(None, True),
    "MixtralTopKRouter": Routing(True, False),
    "GptOssTopKRouter": Routing(False, True, "topk_softmax"),
}


class DetRouter(nn.Module):
    """A swapped router: the same object with the same parameters, and another class."""

    weight: Tensor
    top_k: int
    routing: Routing

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, weights, experts) of [tokens, D]."""
        rows = hidden_states.reshape(-1, self.weight.shape[1])
        logits = det_linear(rows, self.weight, getattr(self, "bias", None))
        normalize, narrow, order = self.routing
        if normalize is None:
            normalize = bool(self.norm_topk_prob)
        dtype = None if narrow else torch.float32
        weights, experts = choose_experts(logits, self.top_k, order=order, normalize=normalize, dtype=dtype)
        return logits, weights, experts


class DetClampedExperts(DetExperts):
    """Swapped experts of GPT-OSS: the same object with the same parameters, and another class. Its weights
    are read in place."""

    gate_up_proj_bias: Tensor
    down_proj_bias: Tensor
    limit: float
    alpha: float

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, D] of [tokens, D], and the experts of each token and their weights, [tokens, k]."""
        return _clamped_forward(self, hidden_states, top_k_index, top_k_weights)

    def extra_repr(self) -> str:
        E, F, D = self.down_proj.shape
        return f"{E}, hidden_size={D}, intermediate_size={F}, limit={self.limit}"


def _clamped_forward(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    def gated(gate_up: Tensor) -> Tensor:
        return swiglu_packed(gate_up, interleaved=True, limit=experts.limit, alpha=experts.alpha)

    return experts_forward(
        x, chosen, weights, experts.gate_up_proj.mT, experts.down_proj.mT, gated, experts.gate_up_proj_bias,
        experts.down_proj_bias,
    )  # fmt: skip


def register_experts() -> str:
    """Register isobit's experts with transformers' ExpertsInterface, and return their name: a model whose
    `config._experts_implementation` has it computes its experts with `det_grouped_linear`. Routers stay as
    they are; `zero_drift` replaces both.

    Example:
        >>> import isobit
        >>> isobit.integrations.hf.register_experts()
        'isobit'
    """
    moe = needed("transformers.integrations.moe", "register_experts")
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As the interface calls it: `self` is the module of experts."""
    reason = _unlike(self)
    if reason is not None:
        raise HFError(f"isobit's experts(self: {type(self).__name__}): {reason}")
    if type(self).__name__ in CLAMPED:
        return _clamped_forward(self, hidden_states, top_k_index, top_k_weights)
    return experts_forward(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, gated_by(self.act_fn)
    )


def _unlike(module: Any) -> str | None:
    """Why a module of experts is not one that `experts_forward` computes, or None."""
    if getattr(module, "_is_expert_parallel", False):
        return ON_SEVERAL
    clamped = type(module).__name__ in CLAMPED or isinstance(module, DetClampedExperts)
    form, models = (CLAMPED_FORM, "GPT-OSS") if clamped else (PLAIN_FORM, "Mixtral or Qwen3-MoE")
    other = [name for name, wanted in form.items() if getattr(module, name, wanted) is not wanted]
    return f"{', '.join(other)} of it is not as in {models}" if other else None


def is_router(module: nn.Module) -> bool:
    return type(module).__name__ in ROUTERS


def swapped_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that serves a module, if it is one of a mixture of experts."""
    name, own = type(module).__name__, {name for name, _ in module.named_parameters(recurse=False)}
    if name in EXPERTS and own == PARAMETERS:
        return DetExperts
    if name in CLAMPED and own == PARAMETERS | BIASES:
        return DetClampedExperts
    return DetRouter if is_router(module) else None


def routing_of(module: nn.Module) -> Routing:
    return ROUTERS[type(module).__name__]


def quantised(module: nn.Module) -> str | None:
    """Its parameter that holds codes and not numbers, with its kind, or None. Some quantisers change the
    dtype, others the class of the parameter: its dtype may then be that of the numbers."""
    for name, parameter in module.named_parameters(recurse=False):
        kind = type(parameter)
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            return f"{name} is {parameter.dtype}"
        if kind.__module__.partition(".")[0] != "torch":  # DTensor is of torch
            return f"{name} is a {kind.__module__}.{kind.__qualname__}"
    return None


def _limit(module: nn.Module) -> str | None:
    """The attribute by which a router, or its experts, takes a limited number of tokens."""
    for name, value in vars(module).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if "capacity" in name and number and value > 0:
            return f"{name}={value}"
    return None


def of_capacity(model: nn.Module) -> str | None:
    """Why a mixture that drops tokens cannot be served, or None. Its modules need not be of a known class:
    experts that are plain linear layers would otherwise be served, and a trial with a few tokens drops
    none."""
    for name, module in model.named_modules():
        if (limit := _limit(module)) is not None:
            return (
                f"its experts have a limited capacity ({name}: {type(module).__name__} with {limit}), so "
                "which tokens are dropped depends on the batch"
            )
    return None


def why_not(model: Any) -> str | None:
    """Why a mixture of experts cannot be served as a whole."""
    config = model.config
    mixtures = [module for module in model.modules() if swapped_class(module) is not None]
    if not mixtures:
        return None
    if reason := next(filter(None, map(_unlike, mixtures)), None):
        return reason
    if getattr(getattr(config, "distributed_config", None), "enable_expert_parallel", False):
        return ON_SEVERAL
    if getattr(config, "output_router_logits", False):
        return "output_router_logits=True adds a loss that is a function of the batch; set it to False"
    if getattr(config, "router_jitter_noise", 0.0):
        return f"router_jitter_noise={config.router_jitter_noise} is random in training; set it to 0"
    return None
