"""Layers of experts in vLLM with isobit inside, against a stub of it: log-probabilities of a trainer under
`zero_drift` in bits, what is refused, and new weights. `vllm_on_a_gpu.py` runs the real one."""

import re
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    "Qwen3Moe": (
        moe.Qwen3MoeSparseMoeBlock,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
        True,
    ),
    "Mixtral": (moe.MixtralMoE, {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
    "Olmoe": (moe.OlmoeMoE, {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}, False),
}


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


ENGINES = {"Qwen3Moe": Qwen3MoeForCausalLM, "Mixtral": MixtralForCausalLM, "Olmoe": OlmoeForCausalLM}


def block_of(kind: type[moe.Block], theirs: Any, normalize: bool) -> moe.Block:
    """A block of vLLM with the weights of one of transformers."""
    gate = stub.LinearBase(*reversed(theirs.gate.weight.shape))
    gate.weight.data.copy_(theirs.gate.weight)
    own = theirs.experts
    return kind(gate, own.gate_up_proj.data, own.down_proj.data, theirs.gate.top_k, normalize)


def a_block() -> moe.Block:
    torch.manual_seed(3)
    gate_up, down = (torch.randn(shape).bfloat16() for shape in ((4, 64, 48), (4, 48, 32)))
    return moe.Qwen3MoeSparseMoeBlock(stub.LinearBase(48, 4), gate_up, down, 2, True)


# Bits


def in_pieces(block: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """As an engine computes a prompt in chunks, and then a token at a time."""
    return lambda x: torch.cat([block(part) for part in (x[:5], x[5:6], x[6:7], x[7:])])


def logps(model: Any, ids: Tensor, blocks: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Of the tokens of a row, in a model whose layers of experts these blocks compute."""
    hooks = [
        layer.mlp.register_forward_hook(lambda module, given, out, own=own: own(given[0][0])[None])
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


def test_another_rounding_of_the_weights_has_other_bits(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral keeps them in fp32, Qwen 3 rounds them: the class of a block decides."""
    plain, x = a_block(), torch.randn(40, 48).bfloat16()
    with vllm.enable():
        served = loaded(Qwen3MoeForCausalLM(plain)).layers[0]
    ours = served(x)
    key = ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeSparseMoeBlock")
    monkeypatch.setitem(experts.BLOCKS, key, experts.Block(narrow=False))
    with vllm.enable():
        other = loaded(Qwen3MoeForCausalLM(a_block())).layers[0]
    assert torch.equal(ours[7:8], served(x[7:8])) and not torch.equal(ours, other(x))


def test_a_block_computes_with_the_weights_of_now(engine: dict[str, ModuleType]) -> None:
    with vllm.enable():
        block = loaded(Qwen3MoeForCausalLM(a_block())).layers[0]
    x = torch.randn(3, 48).bfloat16()
    before, routed = block(x), block.experts.routed_experts
    routed.w2_weight.data.mul_(2)  # in place: exact in bf16
    assert torch.equal(block(x), 2 * before)
    routed.w2_weight = nn.Parameter(routed.w2_weight.data / 2, requires_grad=False)  # at another address
    assert torch.equal(block(x), before)


def test_compiled_code_has_the_bits(engine: dict[str, ModuleType]) -> None:
    with vllm.enable() as on:
        block = loaded(Qwen3MoeForCausalLM(a_block())).layers[0]
    x = torch.randn(5, 48).bfloat16()
    wanted = block(x)
    traced = torch.compile(lambda x: block(x) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(x), 2 * wanted) and on.served == 1


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
        (_set("experts.router.eplb_state", object()), "load balancing"),
        (_set("experts.shared_experts", nn.Identity()), "shared_experts is Identity, and not None"),
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
