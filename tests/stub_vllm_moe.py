"""A stub of the layers of experts of vLLM 0.26: the classes and attributes that isobit looks at, and a
forward with the roundings of its fused kernel, which are not those of transformers."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobit.integrations.vllm import versions as v


class Backend(Enum):
    TRITON = "TRITON"
    FLASHINFER_CUTLASS = "FlashInfer CUTLASS"


class Activation(Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"


class UnquantizedFusedMoEMethod(nn.Module):
    unquantized_backend = Backend.TRITON

    def process_weights_after_loading(self, layer: Any) -> None: ...


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    pass


class GptOssMxfp4MoEMethod(UnquantizedFusedMoEMethod):
    pass


class FusedTopKRouter:
    eplb_state: Any = None
    capture_fn: Any = None

    def __init__(self, top_k: int, renormalize: bool) -> None:
        self.top_k, self.renormalize = top_k, renormalize


class GroupedTopKRouter(FusedTopKRouter):
    pass


class CPURouter(FusedTopKRouter):
    """Of newer versions, on a CPU: for all kinds of routing."""

    use_grouped_topk, custom_routing_function, scoring_func = False, None, "softmax"
    routed_scaling_factor, e_score_correction_bias, _hash_indices_table = 1.0, None, None


class RoutedExperts(nn.Module):
    use_grouped_topk, custom_routing_function, scoring_func = False, None, "softmax"
    routed_scaling_factor, e_score_correction_bias, apply_router_weight_on_input = 1.0, None, False
    swiglu_limit = swiglu_alpha = swiglu_beta = None
    activation = Activation.SILU

    def __init__(self, gate_up: Tensor, down: Tensor, *biases: Tensor) -> None:
        super().__init__()
        names = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
        for name, given in zip(names, (gate_up, down, *biases), strict=False):
            setattr(self, name, nn.Parameter(given.clone(), requires_grad=False))
        if biases:
            self.activation = Activation.SWIGLUOAI
        self.local_num_experts = self.global_num_experts = len(down)
        self.quant_method = UnquantizedFusedMoEMethod()


class SharedExperts(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer


class MoERunner(nn.Module):
    routed_input_transform = routed_output_transform = None
    routed_scaling_factor = 1.0

    def __init__(
        self, experts: RoutedExperts, router: FusedTopKRouter, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.routed_experts, self.router = experts, router
        self.shared_experts = None if shared is None else SharedExperts(shared)
        self.moe_config = SimpleNamespace(
            tp_size=1, dp_size=1, pcp_size=1, ep_size=1, is_sequence_parallel=False,
            has_bias=experts.activation is Activation.SWIGLUOAI,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Weights in fp32, an activation and a sum that are rounded once."""
        experts, router = self.routed_experts, self.router
        weights, chosen = router_logits.softmax(-1, dtype=torch.float32).topk(router.top_k)
        if router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(hidden_states.shape)
        for j in range(router.top_k):
            own = {name: p[chosen[:, j]].float() for name, p in experts.named_parameters(recurse=False)}
            up = torch.einsum("td,tfd->tf", hidden_states.float(), own["w13_weight"])
            up = (up + own.get("w13_bias", 0.0)).bfloat16().float()
            if experts.activation is Activation.SWIGLUOAI:
                gate, up = up[:, ::2].clamp(max=7.0), up[:, 1::2].clamp(-7.0, 7.0)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = up.chunk(2, -1)
                inner = F.silu(gate) * up
            y = torch.einsum("tf,tdf->td", inner.bfloat16().float(), own["w2_weight"])
            out += weights[:, j, None] * (y + own.get("w2_bias", 0.0))
        out = out.to(hidden_states.dtype)
        return out if self.shared_experts is None else self.shared_experts._layer(hidden_states) + out


class Block(nn.Module):
    name = "gate"

    def __init__(
        self, gate: nn.Module, weights: tuple[Tensor, ...], top_k: int, normalize: bool,
        shared: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        setattr(self, self.name, gate)
        if shared is not None:
            self.shared_expert, self.shared_expert_gate = shared, shared.expert_gate
        self.experts = MoERunner(RoutedExperts(*weights), FusedTopKRouter(top_k, normalize), shared)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        out: Tensor = self.experts(x, getattr(self, self.name)(x))
        return out.view(hidden_states.shape)


class Qwen2MoeMLP(nn.Module):
    __module__ = "vllm.model_executor.models.qwen2_moe"

    def __init__(self, gate_up: nn.Module, down: nn.Module, act_fn: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn, self.expert_gate = gate_up, down, act_fn, gate

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).float().chunk(2, -1)
        out: Tensor = self.down_proj((F.silu(gate) * up).to(x.dtype))
        return torch.sigmoid(self.expert_gate(x)) * out


class Qwen2MoeSparseMoeBlock(Block):
    __module__ = "vllm.model_executor.models.qwen2_moe"


class MLPBlock(Block):
    """Of GPT-OSS."""

    __module__ = v.GPT_OSS
    name = "router"


class Qwen3MoeSparseMoeBlock(Block):
    __module__ = "vllm.model_executor.models.qwen3_moe"


class MixtralMoE(Block):
    __module__ = "vllm.model_executor.models.mixtral"


class OlmoeMoE(Block):
    __module__ = "vllm.model_executor.models.olmoe"


def contents() -> dict[str, dict[str, Any]]:
    """By module."""
    return {
        v.EXPERTS: {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        v.MOE_RUNNER: {"MoERunner": MoERunner},
        v.MOE_ROUTER: {"FusedTopKRouter": FusedTopKRouter},
        v.MOE_CPU_ROUTER: {"CPURouter": CPURouter},
    }
