"""Layers of experts in vLLM: router and experts as a transformers model under `zero_drift` computes them.

The whole block of a model is served, from the router's product to the sum of what the experts return: its
class says how transformers rounds the weights of a token, which no module inside it knows. vLLM keeps them in
fp32, rounds the activation once, and adds what experts return before it rounds.

Served are unquantised experts on one rank, whose weights lie as they were loaded, gates before ups. Anything
else that vLLM's runner of such a layer can do is refused by name.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.integrations.vllm import versions as v
from isobit.layers.experts import experts_forward
from isobit.ops.det_gemm import det_linear
from isobit.ops.route import choose_experts
from isobit.ops.swiglu import swiglu_packed


class Block(NamedTuple):
    """How transformers computes the weights of a token: rounded to the model's dtype, or left in fp32."""

    narrow: bool


#: Blocks of models by module and name of their class in vLLM.
BLOCKS = {
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeSparseMoeBlock"): Block(narrow=True),
    ("vllm.model_executor.models.mixtral", "MixtralMoE"): Block(narrow=False),
    ("vllm.model_executor.models.olmoe", "OlmoeMoE"): Block(narrow=True),
}

#: What vLLM's models have whatever their config says, by the kind of model, and transformers reads from it.
FIXED = {"olmoe": {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "clip_qkv": None}}

#: Backends of vLLM's unquantised experts that leave the weights as they are. On a CPU `enable` sees to it.
AS_LOADED = ("TRITON", "BATCHED_TRITON", "CPU")

#: What a layer of experts may have and these do not, by attribute of what holds it, with the value that
#: changes nothing.
OF_RUNNER = {"shared_experts": None, "routed_input_transform": None, "routed_output_transform": None,
             "routed_scaling_factor": 1.0}  # fmt: skip
OF_EXPERTS = {
    "use_grouped_topk": False, "custom_routing_function": None, "scoring_func": "softmax",
    "routed_scaling_factor": 1.0, "e_score_correction_bias": None, "apply_router_weight_on_input": False,
    "swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None,
}  # fmt: skip
RANKS = ("tp_size", "dp_size", "pcp_size", "ep_size")


def unlike_the_config(config: Any) -> Iterator[str]:
    """Where vLLM computes another model than transformers does of this config of a model, or None."""
    for name, fixed in FIXED.get(getattr(config, "model_type", ""), {}).items():
        if (value := getattr(config, name, fixed)) != fixed:
            yield f"the model has {name}={value}, and vLLM computes it with {fixed}"


def block_of(module: Any) -> Block | None:
    """By name: the modules of models are imported only by those who have such a model."""
    own = type(module)
    return BLOCKS.get((own.__module__, own.__qualname__))


def why_not(block: Any) -> str | None:
    """Why a block cannot be served, or None. Its gate is a linear layer, which is asked for elsewhere."""
    try:
        return next(_reasons(block), None)
    except AttributeError as error:
        return f"it is not the layer of experts of vLLM 0.26: {error}"


def _reasons(block: Any) -> Iterator[str]:
    runner = block.experts
    if type(runner) is not v.find(v.MOE_RUNNER, "MoERunner"):
        yield f"its experts are run by {type(runner).__name__}"
        return
    experts, router = runner.routed_experts, runner.router
    method = type(experts.quant_method)
    if method is not v.find(v.EXPERTS, "UnquantizedFusedMoEMethod"):
        yield f"the weights of its experts are those of {method.__name__}: quantised, or of another kind"
        return
    backend = experts.quant_method.unquantized_backend.name
    if backend not in AS_LOADED:
        yield f"{backend} has the weights of experts in another order: pass moe_backend='triton'"
    ranks = {name: getattr(runner.moe_config, name) for name in RANKS}
    if split := [f"{name}={count}" for name, count in ranks.items() if count != 1]:
        yield f"its experts are shared by ranks: {', '.join(split)}"
    if experts.local_num_experts != experts.global_num_experts or runner.moe_config.is_sequence_parallel:
        yield "its experts are on several ranks (expert or sequence parallelism)"
    if type(router) is not v.find(v.MOE_ROUTER, "FusedTopKRouter") or router.eplb_state is not None:
        yield f"its router is {type(router).__name__}, or experts are there twice (load balancing)"
    for owner, plain in ((runner, OF_RUNNER), (experts, OF_EXPERTS)):
        for name, wanted in plain.items():
            if (value := getattr(owner, name)) != wanted:
                shown = type(value).__name__ if isinstance(value, torch.nn.Module | Tensor) else repr(value)
                yield f"{name} is {shown}, and not {wanted!r}"
    if experts.activation.value != "silu" or runner.moe_config.has_bias:
        yield f"its activation is {experts.activation.value}, or experts have biases"
    yield from _weights(block, experts)


def _weights(block: Any, experts: Any) -> Iterator[str]:
    gate_up, down, D = experts.w13_weight, experts.w2_weight, block.gate.weight.shape[1]
    if gate_up.dtype not in (torch.bfloat16, torch.float16) or gate_up.dtype != down.dtype:
        yield f"the weights of its experts are {gate_up.dtype}: bits are kept in bf16 and fp16"
    E, F = down.shape[0], down.shape[-1]
    if gate_up.shape != (E, 2 * F, D) or down.shape != (E, D, F):
        shapes = f"{list(gate_up.shape)} and {list(down.shape)}"
        yield f"the weights of its experts are {shapes}: padded, or in another order"


def serve(block: Any, count: Callable[[str], None], plain: Callable[[Tensor], Tensor]) -> None:
    """`plain(parameter)` is the tensor of a parameter of vLLM."""
    kind, gate = block_of(block), block.gate
    experts, router = block.experts.routed_experts, block.experts.router
    assert kind is not None

    def forward(hidden_states: Tensor) -> Tensor:
        count("isobit.det_grouped_linear")
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        bias = getattr(gate, "bias", None)
        logits = det_linear(x, plain(gate.weight), None if bias is None else plain(bias))
        weights, chosen = choose_experts(
            logits, router.top_k, order="softmax_topk", normalize=router.renormalize,
            dtype=None if kind.narrow else torch.float32,
        )  # fmt: skip
        if router.capture_fn is not None:  # an engine that returns the experts of its tokens
            router.capture_fn(chosen)
        out = experts_forward(
            x, chosen, weights, plain(experts.w13_weight), plain(experts.w2_weight), swiglu_packed
        )
        return out.reshape(hidden_states.shape)

    block.forward = forward
