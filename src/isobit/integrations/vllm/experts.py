"""Layers of experts in vLLM: router and experts as a transformers model under `zero_drift` computes them.

The whole block of a model is served, from the router's product to the sum of what the experts return: its
class says how transformers rounds the weights of a token, which no module inside it knows. vLLM keeps them in
fp32, rounds the activation once, and adds what experts return before it rounds. A shared expert, which all
tokens go to, belongs to the block too.

Served are unquantised experts on one rank, whose weights lie as they were loaded: gates before ups, or every
other row in GPT-OSS. Anything else that vLLM's runner of such a layer can do is refused by name.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.integrations.vllm import versions as v
from isobit.layers.experts import experts_forward
from isobit.ops.det_gemm import det_linear
from isobit.ops.route import choose_experts
from isobit.ops.swiglu import swiglu, swiglu_packed


class Block(NamedTuple):
    """How transformers computes a block."""

    narrow: bool  # the weights of a token are rounded to the model's dtype, and not left in fp32
    order: str = "softmax_topk"  # of softmax and choice, as in `isobit.route`
    gate: str = "gate"  # the name of the router's linear layer in vLLM
    shared: bool = False  # a shared expert, with a gate of its own
    clamped: bool = False  # GPT-OSS: biases, gate and up in every other row, and a clamped activation


_QWEN2 = "vllm.model_executor.models.qwen2_moe"

#: Blocks of models by module and name of their class in vLLM.
BLOCKS = {
    (_QWEN2, "Qwen2MoeSparseMoeBlock"): Block(narrow=True, shared=True),
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeSparseMoeBlock"): Block(narrow=True),
    ("vllm.model_executor.models.mixtral", "MixtralMoE"): Block(narrow=False),
    ("vllm.model_executor.models.olmoe", "OlmoeMoE"): Block(narrow=True),
    (v.GPT_OSS, "MLPBlock"): Block(narrow=True, order="topk_softmax", gate="router", clamped=True),
}

#: Of the clamped activation. vLLM's kernel has these numbers inside.
LIMIT, ALPHA = 7.0, 1.702

#: What vLLM's models have whatever their config says, by the kind of model, and transformers reads from it.
FIXED: dict[str, dict[str, Any]] = {
    "olmoe": {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "clip_qkv": None},
    "qwen2_moe": {"qkv_bias": True, "use_sliding_window": False},
    "gpt_oss": {
        "rms_norm_eps": 1e-5, "swiglu_limit": LIMIT, "swiglu_alpha": ALPHA, "attention_bias": True,
        "tie_word_embeddings": False,
    },
}  # fmt: skip

#: The kinds of their layers, which repeat.
LAYER_TYPES = {"qwen2_moe": ("full_attention",), "gpt_oss": ("sliding_attention", "full_attention")}

#: Backends of vLLM's unquantised experts that leave the weights as they are. On a CPU `enable` sees to it.
AS_LOADED = ("TRITON", "BATCHED_TRITON", "CPU")

#: What a layer of experts may have and these do not, by attribute of what holds it, with the value that
#: changes nothing.
OF_RUNNER = {"routed_input_transform": None, "routed_output_transform": None, "routed_scaling_factor": 1.0}
OF_EXPERTS = {
    "use_grouped_topk": False, "custom_routing_function": None, "scoring_func": "softmax",
    "routed_scaling_factor": 1.0, "e_score_correction_bias": None, "apply_router_weight_on_input": False,
    "swiglu_limit": None, "swiglu_alpha": None, "swiglu_beta": None,
}  # fmt: skip
#: Of the router for CPUs, which newer versions of vLLM have for all kinds of routing.
OF_CPU_ROUTER = {
    "use_grouped_topk": False, "custom_routing_function": None, "scoring_func": "softmax",
    "routed_scaling_factor": 1.0, "e_score_correction_bias": None, "_hash_indices_table": None,
}  # fmt: skip
RANKS = ("tp_size", "dp_size", "pcp_size", "ep_size")

_ONE_RANK = "run the engine on one GPU, without tensor, data or expert parallelism"
_UNQUANTISED = "load a checkpoint whose experts are in bf16 or fp16"
_MXFP4 = (
    f"{_UNQUANTISED}: transformers writes one of GPT-OSS, by from_pretrained with "
    "Mxfp4Config(dequantize=True) and save_pretrained"
)


def unlike_the_config(config: Any) -> Iterator[str]:
    """Where vLLM computes another model than transformers does of this config of a model, or None."""
    kind = getattr(config, "model_type", "")
    for name, fixed in FIXED.get(kind, {}).items():
        if (value := getattr(config, name, fixed)) != fixed:
            yield f"the model has {name}={value}, and vLLM computes it with {fixed}"
    types = getattr(config, "layer_types", None) or ()
    if kind in LAYER_TYPES and any(a != b for a, b in zip(types, cycle(LAYER_TYPES[kind]), strict=False)):
        yield f"the model has layer_types={list(types)}, and vLLM repeats {list(LAYER_TYPES[kind])}"


def block_of(module: Any) -> Block | None:
    """By name: the modules of models are imported only by those who have such a model."""
    own = type(module)
    return BLOCKS.get((own.__module__, own.__qualname__))


def why_not(block: Any, of_linear: Callable[[Any], str | None]) -> str | None:
    """Why a block cannot be served, or None. `of_linear(layer)` says it of a linear layer."""
    try:
        return next(_reasons(block, of_linear), None)
    except AttributeError as error:
        return f"it is not the layer of experts of vLLM 0.26: {error}"


def _reasons(block: Any, of_linear: Callable[[Any], str | None]) -> Iterator[str]:
    runner, kind = block.experts, block_of(block)
    assert kind is not None
    if (reason := of_linear(getattr(block, kind.gate))) is not None:
        yield f"its {kind.gate}{reason}"
    if type(runner) is not v.find(v.MOE_RUNNER, "MoERunner"):
        yield f"its experts are run by {type(runner).__name__}"
        return
    experts, router = runner.routed_experts, runner.router
    method = type(experts.quant_method)
    if method is not v.find(v.EXPERTS, "UnquantizedFusedMoEMethod"):
        what = _MXFP4 if "mxfp4" in method.__name__.lower() else _UNQUANTISED
        kept = f"those of {method.__name__}: quantised, or of another kind"
        yield f"the weights of its experts are {kept}; {what}"
        return
    backend = experts.quant_method.unquantized_backend.name
    if backend not in AS_LOADED:
        yield f"{backend} has the weights of experts in another order: pass moe_backend='triton'"
    ranks = {name: getattr(runner.moe_config, name) for name in RANKS}
    if split := [f"{name}={count}" for name, count in ranks.items() if count != 1]:
        yield f"its experts are shared by ranks: {', '.join(split)}; {_ONE_RANK}"
    if experts.local_num_experts != experts.global_num_experts or runner.moe_config.is_sequence_parallel:
        yield f"its experts are on several ranks (expert or sequence parallelism); {_ONE_RANK}"
    if router.eplb_state is not None:
        yield "its experts may be there twice (load balancing): pass enable_eplb=False"
    on_cpu = type(router) is v.find(v.MOE_CPU_ROUTER, "CPURouter")
    if not on_cpu and type(router) is not v.find(v.MOE_ROUTER, "FusedTopKRouter"):
        yield (
            f"its router is {type(router).__name__}; served is a softmax over all experts, without groups, "
            "a correction bias or a function of its own"
        )
    if kind.order == "topk_softmax" and not router.renormalize:
        yield "its router does not normalise weights, and in transformers they are a softmax of the chosen"
    of_router = OF_CPU_ROUTER if on_cpu else {}
    for owner, plain in ((runner, OF_RUNNER), (experts, OF_EXPERTS), (router, of_router)):
        for name, wanted in plain.items():
            if (value := getattr(owner, name)) != wanted:
                yield f"{name} is {_shown(value)}, and not {wanted!r}"
    activation = "swigluoai" if kind.clamped else "silu"
    if experts.activation.value != activation:
        yield f"its activation is {experts.activation.value}, and not {activation}"
    if runner.moe_config.has_bias != kind.clamped:
        yield f"its experts have {'no ' if kind.clamped else ''}biases, unlike those of transformers"
    yield from _shared(block, kind, runner, of_linear)
    yield from _weights(experts, kind.clamped, getattr(block, kind.gate).weight.shape[1])


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, torch.nn.Module | Tensor) else repr(value)


def _shared(block: Any, kind: Block, runner: Any, of_linear: Callable[[Any], str | None]) -> Iterator[str]:
    """Of a shared expert, or that there is one."""
    if not kind.shared:
        if runner.shared_experts is not None:
            yield f"shared_experts is {_shown(runner.shared_experts)}, and in transformers there are none"
        return
    shared = block.shared_expert
    own = type(shared)
    if (own.__module__, own.__qualname__) != (_QWEN2, "Qwen2MoeMLP"):
        yield f"its shared_expert is {_shown(shared)}, and not Qwen2MoeMLP"
        return
    if runner.shared_experts is None or runner.shared_experts._layer is not shared:
        yield "the shared experts of its runner are not its shared_expert"
    if shared.expert_gate is None or shared.expert_gate is not block.shared_expert_gate:
        yield "the gate of its shared_expert is not its shared_expert_gate"
        return
    for name in ("gate_up_proj", "down_proj", "expert_gate"):
        if (reason := of_linear(getattr(shared, name))) is not None:
            yield f"its shared_expert.{name}{reason}"
    if type(shared.act_fn) is not v.find(v.ACTIVATION, "SiluAndMul"):
        yield f"the activation of its shared_expert is {type(shared.act_fn).__name__}"


def _weights(experts: Any, biases: bool, D: int) -> Iterator[str]:
    gate_up, down = experts.w13_weight, experts.w2_weight
    E, F = down.shape[0], down.shape[-1]
    given, wanted = [gate_up, down], [[E, 2 * F, D], [E, D, F]]
    if biases:
        given += [experts.w13_bias, experts.w2_bias]
        wanted += [[E, 2 * F], [E, D]]
    if other := next((t.dtype for t in given if t.dtype not in (torch.bfloat16, torch.float16)), None):
        yield f"the weights of its experts are {other}: bits are kept in bf16 and fp16"
    elif any(t.dtype != gate_up.dtype for t in given):
        yield "the weights of its experts have several dtypes"
    if (found := [list(t.shape) for t in given]) != wanted:
        shapes = " and ".join(map(str, found))
        yield f"the weights of its experts are {shapes}: padded, or in another order"


@torch.library.custom_op("isobit_vllm::add_shared_expert", mutates_args=())
def add_shared_expert(routed: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
    """routed + sigmoid(gate) shared, rounded after each of the three, as in transformers. An op, so that a
    compiler does not join them and round once."""
    return routed + torch.sigmoid(gate) * shared


@add_shared_expert.register_fake
def _(routed: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
    return torch.empty_like(routed)


def _clamped(gate_up: Tensor) -> Tensor:
    return swiglu_packed(gate_up, interleaved=True, limit=LIMIT, alpha=ALPHA)


def linear_layers(block: Any) -> dict[str, Any]:
    """The linear layers of a block, by their names in it: those that are such in transformers, too. The
    router is not: there it is a module of its own, always of class chain16."""
    kind = block_of(block)
    if kind is None or not kind.shared:
        return {}
    own = {
        f"shared_expert.{name}": getattr(block.shared_expert, name) for name in ("gate_up_proj", "down_proj")
    }
    return own | {"shared_expert_gate": block.shared_expert_gate}


def serve(
    block: Any,
    count: Callable[[str], None],
    plain: Callable[[Tensor], Tensor],
    of: Callable[[str], str | None],
) -> None:
    """`plain(parameter)` is the tensor of a parameter of vLLM, `of(name)` the class of a linear layer of the
    block."""
    kind = block_of(block)
    assert kind is not None
    gate, experts, router = getattr(block, kind.gate), block.experts.routed_experts, block.experts.router
    dtype = None if kind.narrow else torch.float32
    gated = _clamped if kind.clamped else swiglu_packed

    parts = {id(layer): of(name) for name, layer in linear_layers(block).items()}

    def product(x: Tensor, layer: Any) -> Tensor:
        bias = getattr(layer, "bias", None)
        own = None if bias is None else plain(bias)
        return det_linear(x, plain(layer.weight), own, numerics=parts.get(id(layer)))

    def forward(hidden_states: Tensor) -> Tensor:
        count("isobit.det_grouped_linear")
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        normalize = router.renormalize and kind.order == "softmax_topk"
        weights, chosen = choose_experts(
            product(x, gate), router.top_k, order=kind.order, normalize=normalize, dtype=dtype
        )
        if router.capture_fn is not None:  # an engine that returns the experts of its tokens
            router.capture_fn(chosen)
        biases = (plain(experts.w13_bias), plain(experts.w2_bias)) if kind.clamped else (None, None)
        out = experts_forward(
            x, chosen, weights, plain(experts.w13_weight), plain(experts.w2_weight), gated, *biases
        )
        if kind.shared:
            own = block.shared_expert
            shared = product(swiglu(*product(x, own.gate_up_proj).chunk(2, dim=-1)), own.down_proj)
            out = add_shared_expert(out, product(x, own.expert_gate), shared)
        return out.reshape(hidden_states.shape)

    block.forward = forward
