"""Layers of experts in vLLM with isobit inside, against a stub of it: log-probabilities of a trainer under
`zero_drift` in bits, what is refused, and new weights. `vllm_on_a_gpu.py` runs the real one."""

import re
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import isobit
import stub_vllm as stub
import stub_vllm_moe as moe
from hf_models import forward_logits, made, prompts
from isobit.integrations import vllm
from isobit.integrations.hf import zero_drift
from isobit.integrations.hf.trial import differing
from isobit.integrations.vllm import experts, layers
from stub_vllm import installed, loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

#: Families of transformers: the block of vLLM, what their config has, and whether weights are normalised.
FAMILIES: dict[str, tuple[type[moe.Block], dict[str, Any], bool]] = {
    "Qwen2Moe": (
        moe.Qwen2MoeSparseMoeBlock,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
        False,
    ),
    "Qwen3Moe": (
        moe.Qwen3MoeSparseMoeBlock,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
        True,
    ),
    "Mixtral": (moe.MixtralMoE, {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
    "Olmoe": (moe.OlmoeMoE, {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}, False),
    "GptOss": (moe.MLPBlock, {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
}  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from installed(monkeypatch)


class Qwen3MoeForCausalLM(stub.Qwen3ForCausalLM):
    """With the block of each layer."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(layers=nn.ModuleList(blocks))


class MixtralForCausalLM(Qwen3MoeForCausalLM):
    pass


class OlmoeForCausalLM(Qwen3MoeForCausalLM):
    pass


class Qwen2MoeForCausalLM(Qwen3MoeForCausalLM):
    pass


class GptOssForCausalLM(Qwen3MoeForCausalLM):
    pass


ENGINES = {
    "Qwen2Moe": Qwen2MoeForCausalLM, "Qwen3Moe": Qwen3MoeForCausalLM, "Mixtral": MixtralForCausalLM,
    "Olmoe": OlmoeForCausalLM, "GptOss": GptOssForCausalLM,
}  # fmt: skip


def block_of(kind: type[moe.Block], theirs: Any, normalize: bool) -> moe.Block:
    """A block of vLLM with the weights of one of transformers."""
    router, own, shared = getattr(theirs, kind.name), theirs.experts, None
    weights = (own.gate_up_proj.data, own.down_proj.data)
    if kind is moe.MLPBlock:  # vLLM has them transposed
        weights = (*(w.mT.contiguous() for w in weights), own.gate_up_proj_bias, own.down_proj_bias)
    if kind is moe.Qwen2MoeSparseMoeBlock:
        mlp, linear = theirs.shared_expert, stub.LinearBase.of
        shared = moe.Qwen2MoeMLP(
            linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj), stub.SiluAndMul(),
            linear(theirs.shared_expert_gate),
        )  # fmt: skip
    return kind(stub.LinearBase.of(router), weights, router.top_k, normalize, shared)


def a_block(kind: type[moe.Block] = moe.Qwen3MoeSparseMoeBlock) -> moe.Block:
    torch.manual_seed(3)
    sizes = [(4, 64, 48), (4, 48, 32)] + ([(4, 64), (4, 48)] if kind is moe.MLPBlock else [])
    weights, shared = tuple(torch.randn(size).bfloat16() for size in sizes), None
    if kind is moe.Qwen2MoeSparseMoeBlock:
        gate_up, down, gate = (stub.LinearBase(*size) for size in ((48, 64), (32, 48), (48, 1)))
        shared = moe.Qwen2MoeMLP(gate_up, down, stub.SiluAndMul(), gate)
    return kind(stub.LinearBase(48, 4), weights, 2, True, shared)


# Bits


def in_pieces(block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As an engine computes a prompt in chunks, and then a token at a time."""
    return lambda x: torch.cat([block(part) for part in (x[:5], x[5:6], x[6:7], x[7:])])


def logps(model: Any, ids: Tensor, blocks: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Of the tokens of a row, in a model whose layers of experts these blocks compute."""

    def instead(own: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def hook(module: nn.Module, given: Any, out: Any) -> Any:
            ours = own(given[0][0])[None]
            return (ours, out[1]) if isinstance(out, tuple) else ours

        return hook

    hooks = [
        layer.mlp.register_forward_hook(instead(own))
        for layer, own in zip(model.model.layers, blocks, strict=False)
    ]
    try:
        return isobit.logp(forward_logits(model, ids)[:-1], ids[1:])
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_trainer(engine: dict[str, ModuleType], family: str) -> None:
    kind, options, normalize = FAMILIES[family]
    model = made(family, **options)
    rows = [row for n in (14, 9, 21) for row in prompts([n], seed=n)[0]]
    blocks = [block_of(kind, layer.mlp, normalize) for layer in model.model.layers]
    with zero_drift(model):
        wanted = torch.cat([logps(model, ids, []) for ids in rows])
        control = torch.cat([logps(model, ids, list(blocks)) for ids in rows])
        with vllm.enable() as on:
            loaded(ENGINES[family](*blocks))
        served = torch.cat([logps(model, ids, [in_pieces(b) for b in blocks]) for ids in rows])
    assert differing(served, wanted) == 0 and on.served == 2 * 4 * len(rows)
    assert differing(control, wanted) > len(wanted) // 2  # vLLM's own roundings
    assert (control - wanted).abs().mean() < 0.3  # of the same function


@pytest.mark.parametrize("family", FAMILIES)
def test_another_rounding_of_the_weights_has_other_bits(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Mixtral keeps them in fp32, others round them: the class of a block decides. A row alone has its bits,
    and so has a row among others in another order."""
    kind = FAMILIES[family][0]
    x = torch.randn(40, 48).bfloat16()
    with vllm.enable():
        served = loaded(ENGINES[family](a_block(kind))).layers[0]
    ours, order = served(x), torch.randperm(40)
    assert torch.equal(ours[7:8], served(x[7:8])) and torch.equal(ours[order], served(x[order]))
    key = (kind.__module__, kind.__name__)
    own = experts.BLOCKS[key]
    monkeypatch.setitem(experts.BLOCKS, key, own._replace(narrow=not own.narrow))
    with vllm.enable():
        other = loaded(ENGINES[family](a_block(kind))).layers[0]
    assert not torch.equal(ours, other(x))


def test_a_shared_expert_that_is_rounded_once_has_other_bits(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler would write the three operations."""

    def joined(routed: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
        return (routed.float() + torch.sigmoid(gate.float()) * shared.float()).to(routed.dtype)

    with vllm.enable():
        block = loaded(Qwen2MoeForCausalLM(a_block(moe.Qwen2MoeSparseMoeBlock))).layers[0]
    x = torch.randn(40, 48).bfloat16()
    ours = block(x)
    monkeypatch.setattr(experts, "add_shared_expert", joined)
    assert not torch.equal(block(x), ours)


def test_a_block_computes_with_the_weights_of_now(engine: dict[str, ModuleType]) -> None:
    with vllm.enable():
        block = loaded(Qwen3MoeForCausalLM(a_block())).layers[0]
    x = torch.randn(3, 48).bfloat16()
    before, routed = block(x), block.experts.routed_experts
    routed.w2_weight.data.mul_(2)  # in place: exact in bf16
    assert torch.equal(block(x), 2 * before)
    routed.w2_weight = nn.Parameter(routed.w2_weight.data / 2, requires_grad=False)  # at another address
    assert torch.equal(block(x), before)


@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe", "GptOss"])
def test_compiled_code_has_the_bits(engine: dict[str, ModuleType], family: str) -> None:
    """Nothing is left between isobit's ops that a compiler could join and round once."""
    seen: set[str] = set()

    def run(graph: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with vllm.enable() as on:
        block = loaded(ENGINES[family](a_block(FAMILIES[family][0]))).layers[0]
    x = torch.randn(5, 48).bfloat16()
    wanted = block(x)
    traced = torch.compile(block.forward, backend=aot_autograd(fw_compiler=run), fullgraph=True)
    with torch.no_grad():
        assert torch.equal(traced(x), wanted) and on.served == 1
    moved = (
        "getitem",
        "view",
        "slice",
        "split",
        "detach",
        "empty",
        "clone",
        "select",
        "unsqueeze",
        "permute",
    )
    others = [name for name in seen if "isobit" not in name and not any(part in name for part in moved)]
    assert not others and any("det_grouped_linear" in name for name in seen)


def test_an_engine_that_returns_experts_gets_them(engine: dict[str, ModuleType]) -> None:
    with vllm.enable():
        block = loaded(Qwen3MoeForCausalLM(a_block())).layers[0]
    seen: list[Tensor] = []
    block.experts.router.capture_fn = seen.append
    x = torch.randn(6, 48).bfloat16()
    block(x)
    logits = isobit.det_linear(x, block.gate.weight)
    assert torch.equal(seen[0], isobit.route(logits, 2, normalize=True).experts)


# What is refused


def quantised(block: Any) -> None:
    block.experts.routed_experts.quant_method = moe.Fp8MoEMethod()


def another_runner(block: Any) -> None:
    block.experts = nn.Sequential()


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(block: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            block = getattr(block, owner)
        object.__setattr__(block, name, value)

    return change


def cpu_router(**other: Any) -> Any:
    made = moe.CPURouter(2, True)
    vars(made).update(other)
    return made


ROUTED = "experts.routed_experts"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (quantised, "those of Fp8MoEMethod: quantised"),
        (another_runner, "its experts are run by Sequential"),
        (_set(f"{ROUTED}.quant_method.unquantized_backend", moe.Backend.FLASHINFER_CUTLASS),
         "FLASHINFER_CUTLASS has the weights of experts in another order: pass moe_backend='triton'"),
        (_set("experts.moe_config.tp_size", 2), "shared by ranks: tp_size=2"),
        (_set("experts.moe_config.ep_size", 4), "shared by ranks: ep_size=4"),
        (_set("experts.moe_config.is_sequence_parallel", True), "expert or sequence parallelism"),
        (_set(f"{ROUTED}.local_num_experts", 2), "expert or sequence parallelism"),
        (_set("experts.router", moe.GroupedTopKRouter(2, True)), "its router is GroupedTopKRouter"),
        (_set("experts.router", cpu_router(use_grouped_topk=True)), "use_grouped_topk is True"),
        (_set("experts.router", cpu_router(scoring_func="sqrtsoftplus")), "scoring_func is 'sqrtsoftplus'"),
        (_set("experts.router", cpu_router(_hash_indices_table=torch.zeros(2))), "_hash_indices_table is Te"),
        (_set("experts.router.eplb_state", object()), "load balancing"),
        (_set("experts.shared_experts", nn.Identity()), "shared_experts is Identity, and in transformers"),
        (_set("experts.routed_scaling_factor", 2.5), "routed_scaling_factor is 2.5"),
        (_set(f"{ROUTED}.scoring_func", "sigmoid"), "scoring_func is 'sigmoid'"),
        (_set(f"{ROUTED}.e_score_correction_bias", torch.zeros(4)), "e_score_correction_bias is Tensor"),
        (_set(f"{ROUTED}.apply_router_weight_on_input", True), "apply_router_weight_on_input is True"),
        (_set(f"{ROUTED}.swiglu_limit", 7.0), "swiglu_limit is 7.0"),
        (_set(f"{ROUTED}.activation", moe.Activation.GELU), "its activation is gelu"),
        (_set("experts.moe_config.has_bias", True), "experts have biases"),
        (_set(f"{ROUTED}.w13_weight", torch.zeros(4, 64, 64).bfloat16()), "padded, or in another order"),
        (_set(f"{ROUTED}.w13_weight", torch.zeros(4, 64, 48)), "experts are torch.float32"),
        (_set("gate.tp_size", 2), "its gate: it is split over 2 ranks"),
        (_set("gate", nn.Linear(48, 4)), "its gate is a Linear"),
        (_set("experts.moe_config", object()), "not the layer of experts of vLLM 0.26: 'object'"),
    ],
)  # fmt: skip
def test_what_cannot_have_the_bits_is_refused_by_name(
    engine: dict[str, ModuleType], change: Callable[[Any], None], reason: str
) -> None:
    block = a_block()
    change(block)
    with vllm.enable(), pytest.raises(vllm.VLLMError, match=re.escape(reason)) as error:
        loaded(Qwen3MoeForCausalLM(block))
    assert "layers.0: " in str(error.value)


GPT, SHARED = moe.MLPBlock, moe.Qwen2MoeSparseMoeBlock


def in_mxfp4(block: Any) -> None:
    block.experts.routed_experts.quant_method = moe.GptOssMxfp4MoEMethod()


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (GPT, in_mxfp4, "those of GptOssMxfp4MoEMethod: quantised, or of another kind; load a checkpoint "
         "whose experts are in bf16 or fp16: transformers writes one of GPT-OSS, by from_pretrained with "
         "Mxfp4Config(dequantize=True)"),
        (GPT, _set("experts.moe_config.ep_size", 2), "ep_size=2; run the engine on one GPU"),
        (GPT, _set("experts.router.eplb_state", object()), "(load balancing): pass enable_eplb=False"),
        (GPT, _set("experts.router", moe.GroupedTopKRouter(2, True)), "without groups"),
        (GPT, _set("experts.router.renormalize", False), "its router does not normalise weights"),
        (GPT, _set("experts.moe_config.has_bias", False), "its experts have no biases"),
        (GPT, _set(f"{ROUTED}.activation", moe.Activation.SILU), "its activation is silu, and not swigluoai"),
        (GPT, _set(f"{ROUTED}.swiglu_limit", 5.0), "swiglu_limit is 5.0"),
        (GPT, _set(f"{ROUTED}.w2_bias", torch.zeros(4, 64).bfloat16()), "padded, or in another order"),
        (GPT, _set(f"{ROUTED}.w13_bias", torch.zeros(4, 64)), "experts are torch.float32"),
        (GPT, _set("router", nn.Linear(48, 4)), "its router is a Linear"),
        (SHARED, _set("shared_expert", None), "its shared_expert is None, and not Qwen2MoeMLP"),
        (SHARED, _set("experts.shared_experts", None), "of its runner are not its shared_expert"),
        (SHARED, _set("shared_expert.expert_gate", None), "is not its shared_expert_gate"),
        (SHARED, _set("shared_expert.act_fn", nn.Identity()), "of its shared_expert is Identity"),
        (SHARED, _set("shared_expert.down_proj.tp_size", 2), "shared_expert.down_proj: it is split over 2"),
        (SHARED, _set("shared_expert.gate_up_proj.quant_method", stub.Fp8LinearMethod()), "of Fp8Linear"),
    ],
)  # fmt: skip
def test_what_these_blocks_cannot_be_is_refused_by_name(
    engine: dict[str, ModuleType], kind: type[moe.Block], change: Callable[[Any], None], reason: str
) -> None:
    block = a_block(kind)
    change(block)
    model = GptOssForCausalLM if kind is GPT else Qwen2MoeForCausalLM
    with vllm.enable(), pytest.raises(vllm.VLLMError, match=re.escape(reason)) as error:
        loaded(model(block))
    assert "layers.0: " in str(error.value)


def test_a_config_that_vllm_does_not_read_is_refused(engine: dict[str, ModuleType]) -> None:
    plain = {"model_type": "olmoe", "rms_norm_eps": 1e-5, "norm_topk_prob": False, "clip_qkv": None}
    with vllm.enable():
        loaded(OlmoeForCausalLM(a_block()), model={"hf_config": SimpleNamespace(**plain)})
        for other, reason in (
            ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06, and vLLM computes it with 1e-05"),
            ({"norm_topk_prob": True}, "norm_topk_prob=True"),
            ({"clip_qkv": 8.0}, "clip_qkv=8.0, and vLLM computes it with None"),
        ):
            with pytest.raises(vllm.VLLMError, match=re.escape(reason)):
                loaded(OlmoeForCausalLM(a_block()), model={"hf_config": SimpleNamespace(**plain | other)})


@pytest.mark.parametrize("family", ["GptOss", "Qwen2Moe"])
def test_configs_of_other_models_than_vllm_computes_are_refused(
    engine: dict[str, ModuleType], family: str
) -> None:
    config, block = getattr(transformers, f"{family}Config"), a_block(FAMILIES[family][0])
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    others: dict[str, list[tuple[dict[str, Any], str]]] = {
        "GptOss": [
            ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
            ({"swiglu_limit": 5.0}, "swiglu_limit=5.0, and vLLM computes it with 7.0"),
            ({"attention_bias": False}, "attention_bias=False"),
            ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "vLLM repeats ['sliding_att"),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "computes it with 'yarn'"),
            ({"rope_parameters": yarn | {"attention_factor": 2.0}}, "attention_factor=2.0 in rope"),
        ],
        "Qwen2Moe": [
            ({"qkv_bias": False}, "qkv_bias=False, and vLLM computes it with True"),
            ({"use_sliding_window": True, "num_hidden_layers": 2}, "use_sliding_window=True"),
            ({"rope_parameters": yarn | {"mscale": 2.0}}, "mscale=2.0 in rope_parameters"),
        ],
    }  # fmt: skip
    with vllm.enable():
        loaded(ENGINES[family](block), model={"hf_config": config()})
        for other, reason in others[family]:
            with pytest.raises(vllm.VLLMError, match=re.escape(reason)):
                loaded(ENGINES[family](block), model={"hf_config": config(**other)})


def test_a_block_of_another_model_is_refused(engine: dict[str, ModuleType]) -> None:
    """Its class says how weights are rounded, and nothing says that of an unknown one."""
    block = a_block()
    block.__class__ = moe.Block
    model = Qwen3MoeForCausalLM(block)
    assert list(layers.refused(model)) == ["layers.0.experts.routed_experts"]
    assert layers.refused(Qwen3MoeForCausalLM(a_block())) == {}


def test_the_report_names_what_is_served(engine: dict[str, ModuleType]) -> None:
    with vllm.enable():
        model = loaded(Qwen3MoeForCausalLM(a_block(), a_block()))
        model.layers[0](torch.randn(2, 48).bfloat16())
        report = vllm.report()
    assert report is not None and "2 Qwen3MoeSparseMoeBlock" in report.models[0]
    assert report.calls == {"isobit.det_grouped_linear": 1} and not report.passed
