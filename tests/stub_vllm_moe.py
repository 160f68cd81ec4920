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


class UnquantizedFusedMoEMethod(nn.Module):
    unquantized_backend = Backend.TRITON

    def process_weights_after_loading(self, layer: Any) -> None: ...


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    pass


class FusedTopKRouter:
    eplb_state: Any = None
    capture_fn: Any = None

    def __init__(self, top_k: int, renormalize: bool) -> None:
        self.top_k, self.renormalize = top_k, renormalize


class GroupedTopKRouter(FusedTopKRouter):
    pass


class RoutedExperts(nn.Module):
    use_grouped_topk, custom_routing_function, scoring_func = False, None, "softmax"
    routed_scaling_factor, e_score_correction_bias, apply_router_weight_on_input = 1.0, None, False
    swiglu_limit = swiglu_alpha = swiglu_beta = None
    activation = Activation.SILU

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.w13_weight, self.w2_weight = (
            nn.Parameter(t.clone(), requires_grad=False) for t in (gate_up, down)
        )
        self.local_num_experts = self.global_num_experts = len(down)
        self.quant_method = UnquantizedFusedMoEMethod()


class MoERunner(nn.Module):
    shared_experts = routed_input_transform = routed_output_transform = None
    routed_scaling_factor = 1.0

    def __init__(self, experts: RoutedExperts, router: FusedTopKRouter) -> None:
        super().__init__()
        self.routed_experts, self.router = experts, router
        self.moe_config = SimpleNamespace(
            tp_size=1, dp_size=1, pcp_size=1, ep_size=1, is_sequence_parallel=False, has_bias=False
        )

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Weights in fp32, an activation and a sum that are rounded once."""
        experts, router = self.routed_experts, self.router
        weights, chosen = router_logits.softmax(-1, dtype=torch.float32).topk(router.top_k)
        if router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(hidden_states.shape)
        for j in range(router.top_k):
            up = torch.einsum("td,tfd->tf", hidden_states.float(), experts.w13_weight[chosen[:, j]].float())
            gate, up = up.bfloat16().float().chunk(2, -1)
            inner = (F.silu(gate) * up).bfloat16().float()
            y = torch.einsum("tf,tdf->td", inner, experts.w2_weight[chosen[:, j]].float())
            out += weights[:, j, None] * y
        return out.to(hidden_states.dtype)


class Block(nn.Module):
    def __init__(self, gate: nn.Module, gate_up: Tensor, down: Tensor, top_k: int, normalize: bool) -> None:
        super().__init__()
        self.gate = gate
        self.experts = MoERunner(RoutedExperts(gate_up, down), FusedTopKRouter(top_k, normalize))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        out: Tensor = self.experts(x, self.gate(x))
        return out.view(hidden_states.shape)


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
    }
