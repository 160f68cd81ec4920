"""Mixtures of experts without drift, tiny ones on a CPU: decoding against one forward, a token alone against
one among others, ties, and what is refused."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import isobit
from hf_models import Drift, Run, forward_logits, made, prompts
from isobit import ContractError
from isobit.integrations.hf import HFError, register_experts, zero_drift
from isobit.integrations.hf.experts import DetClampedExperts, DetRouter, Routing, of_capacity
from isobit.layers.experts import experts_forward, gated_by
from isobit.ops.route import expert_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

BF16 = torch.bfloat16
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "Qwen2Moe": {  # and a shared expert, with a gate of its own
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # sinks; a window in one of two layers
}  # fmt: skip
RUNS = [Run(3, True, "dynamic", 4), Run(8, False, "static", None)]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Any]]:
    yield {family: made(family, **options) for family, options in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_decoded_with_other_bits(models: dict[str, Any], family: str) -> None:
    model, tokens = models[family], prompts([12])[0][0]
    plain, before = forward_logits(model, tokens), type(model.model.layers[0].mlp.experts)
    with zero_drift(model) as on:
        ours, drift = forward_logits(model, tokens), Drift(model)
        assert [drift.of(run) for run in RUNS] == [(0, 0)] * 2
        assert len(on.changed["isobit.nn.DetExperts"]) == len(on.changed["isobit router"]) == 2
        assert on.check() is not None
    assert type(model.model.layers[0].mlp.experts) is before
    assert torch.equal(forward_logits(model, tokens), plain)
    assert (ours - plain).square().mean().sqrt() < 0.05 * plain.square().mean().sqrt()


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, use_cache=False).logits.float().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_experts_and_routers_get_gradients(models: dict[str, Any]) -> None:
    """Close to those of transformers, and the same in every run."""
    model, ids = models["Qwen3Moe"], prompts([9, 9])[0]
    theirs = gradients(model, ids)
    with zero_drift(model):
        ours, again = gradients(model, ids), gradients(model, ids)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], again[name])
        if "mlp" in name:
            far = (ours[name] - theirs[name]).float().norm()
            assert far < 0.1 * theirs[name].float().norm(), name
    model.zero_grad()


# The layer


def a_layer(tokens: int = 40, E: int = 6, k: int = 3) -> tuple[isobit.nn.DetExperts, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    layer = isobit.nn.DetExperts(E, hidden_size=48, intermediate_size=32).to(BF16)
    x = torch.randn(tokens, 48).to(BF16)
    found = isobit.route(torch.randn(tokens, E), k, dtype=BF16)
    return layer, x, found.experts, found.weights


def run(layer: Any, x: Tensor, experts: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, dx, dweights)."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = layer(x, experts, weights)
    return (out.detach(), *torch.autograd.grad(out, (x, weights), dy))


def test_a_token_keeps_its_bits() -> None:
    """Alone, in another order, next to tokens of NaN, and with experts numbered in another way."""
    layer, x, experts, weights = a_layer()
    dy = torch.randn(x.shape).to(BF16)
    whole = run(layer, x, experts, weights, dy)
    for index in (torch.tensor([5]), torch.randperm(40), torch.arange(11, 30)):
        some = run(layer, *(t[index] for t in (x, experts, weights, dy)))
        assert all(torch.equal(a, b[index]) for a, b in zip(some, whole, strict=True))
    broken = x.clone()
    broken[::2] = float("nan")
    other = run(layer, broken, experts, weights, dy)
    assert all(torch.equal(a[1::2], b[1::2]) for a, b in zip(other, whole, strict=True))
    order = torch.randperm(6)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(layer, name).copy_(getattr(layer, name)[order].clone())
    renamed = run(layer, x, order.argsort()[experts], weights, dy)
    assert all(torch.equal(a, b) for a, b in zip(renamed, whole, strict=True))


def formula(layer: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """In fp64, token by token."""
    rows = []
    for token, own, w in zip(x, experts, weights, strict=True):
        inner = [(layer.gate_up_proj[e].double() @ token) for e in own]
        gated = [torch.nn.functional.silu(t.chunk(2)[0]) * t.chunk(2)[1] for t in inner]
        parts = [w[j] * (layer.down_proj[e].double() @ gated[j]) for j, e in enumerate(own)]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def test_numbers_and_gradients_are_those_of_the_formula() -> None:
    layer, x, experts, weights = a_layer(12)
    dy = torch.randn(x.shape).to(BF16)
    out, dx, dw = run(layer, x, experts, weights, dy)
    wide, w = x.double().requires_grad_(), weights.double().requires_grad_()
    truth = formula(layer, wide, experts, w)
    dx_true, dw_true = torch.autograd.grad(truth, (wide, w), dy.double())
    for ours, true in ((out, truth.detach()), (dx, dx_true), (dw, dw_true)):
        assert (ours.double() - true).norm() < 0.01 * true.norm()


def test_another_combination_has_other_bits() -> None:
    """Partial sums in bf16, as transformers' loop over experts has them: the tests above would notice."""
    layer, x, experts, weights = a_layer(200)
    ours = layer(x, experts, weights).detach()
    alone = [layer(x, experts[:, j : j + 1], weights[:, j : j + 1]).detach() for j in range(3)]
    assert torch.equal(ours, (alone[0].float() + alone[1].float() + alone[2].float()).to(BF16))
    assert not torch.equal(ours, alone[0] + alone[1] + alone[2])


def test_tokens_of_no_expert_get_nothing() -> None:
    """As transformers marks experts that are elsewhere: with their number."""
    layer, x, experts, weights = a_layer(5)
    experts[2] = 6
    assert not layer(x, experts, weights)[2].any()


@pytest.mark.parametrize("wrong", [-1, 7])
def test_numbers_that_are_no_experts_are_refused(wrong: int) -> None:
    """And without the check such a row adds nothing, here as on a GPU."""
    layer, x, experts, weights = a_layer(5)
    experts[2, 1] = wrong
    rule = rf"top_k_index: \[5, 3\] int32\): must be in \[0, 6\], .* for none: \[2, 1\] is {wrong}"
    with pytest.raises(ContractError, match=rule):
        layer(x, experts, weights)
    place, offsets = expert_rows(experts, 6)
    assert int(offsets[-1]) == 14 and int(place[2, 1]) == 14


def test_the_entry_in_the_interface_has_the_bits_of_the_layer(models: dict[str, Any]) -> None:
    model = models["Mixtral"]
    module, (_, x, experts, weights) = model.model.layers[0].mlp.experts, a_layer(9, 4, 2)
    x = torch.randn(9, 64).to(BF16)
    before = model.config._experts_implementation
    model.config._experts_implementation = register_experts()
    try:
        through = module(x, experts, weights)
    finally:
        model.config._experts_implementation = before
    ours = experts_forward(
        x, experts, weights, module.gate_up_proj, module.down_proj, gated_by(module.act_fn)
    )
    assert torch.equal(through, ours)


# What is refused


def refused(model: Any, reason: str) -> None:
    with pytest.raises(HFError, match=reason):
        zero_drift(model)


def test_what_depends_on_the_batch_is_refused() -> None:
    options = FAMILIES["Mixtral"] | {"num_hidden_layers": 1}
    refused(made("Mixtral", **options, router_jitter_noise=0.1), "router_jitter_noise=0.1 is random")
    refused(made("Mixtral", **options, output_router_logits=True), "a loss that is a function of the batch")
    model = made("Mixtral", **options)
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    refused(model, "expert parallelism")
    model = made("Mixtral", **options)
    model.config.distributed_config = SimpleNamespace(enable_expert_parallel=True)
    refused(model, "expert parallelism")
    model = made("Mixtral", **options)
    model.model.layers[0].mlp.experts.float()
    refused(model, "mlp.experts: its weight is torch.float32; cast the model to bf16")


def test_experts_of_a_limited_capacity_are_refused() -> None:
    """A router of Switch Transformers, whose experts are linear layers that would be served, and a whole
    model of them; one without a limit is not refused for it."""
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 32, "num_heads": 2, "num_experts": 4, "vocab_size": 50}
    layers = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = transformers.SwitchTransformersConfig(**sizes, **layers, expert_capacity=3)
    model = made("Llama", num_hidden_layers=1)
    model.model.layers[0].mlp = switch.SwitchTransformersSparseMLP(config).bfloat16()
    reason = r"limited capacity .*layers.0.mlp.router: SwitchTransformersTop1Router with expert_capacity=3"
    refused(model, reason)
    refused(switch.SwitchTransformersForConditionalGeneration(config), "limited capacity")
    model = made("Llama", num_hidden_layers=1)
    model.model.layers[0].mlp.capacity_factor = 0.0
    assert of_capacity(model) is None


@pytest.mark.parametrize("kind", ["FP8Experts", "Mxfp4GptOssExperts", "a dtype", "a class"])
def test_quantised_experts_are_refused_as_such(kind: str) -> None:
    """By the classes that transformers puts in their place, and by what other quantisers do to parameters."""
    from transformers.integrations import finegrained_fp8, mxfp4

    family = "GptOss" if kind.startswith("Mxfp4") else "Qwen3Moe"
    model = made(family, **FAMILIES[family] | {"num_hidden_layers": 1})
    mlp, config, given = model.model.layers[0].mlp, model.config, kind
    if kind == "FP8Experts":
        mlp.experts = finegrained_fp8.FP8Experts(config, block_size=(32, 32))
        given = r"FP8Experts is quantised .gate_up_proj is torch.float8_e4m3fn."
    elif kind == "Mxfp4GptOssExperts":
        mlp.experts = mxfp4.Mxfp4GptOssExperts(config)
        given = r"Mxfp4GptOssExperts is quantised .gate_up_proj is torch.uint8."
    elif kind == "a dtype":
        codes = torch.zeros(8, 64, 64, dtype=torch.int8)
        mlp.experts.gate_up_proj = torch.nn.Parameter(codes, requires_grad=False)
        given = "Qwen3MoeExperts is quantised .gate_up_proj is torch.int8."
    else:
        mlp.experts.down_proj = Coded(mlp.experts.down_proj.data)  # which says that it is bf16
        given = r"Qwen3MoeExperts is quantised .down_proj is a \S*\.Coded."
    refused(model, f"mlp.experts: {given}; load the model with weights in bf16")


class Coded(torch.nn.Parameter):
    """As quantisers have them that keep a layer's class."""


def test_experts_of_another_form_are_refused_by_name() -> None:
    model = made("Mixtral", **FAMILIES["Mixtral"] | {"num_hidden_layers": 1})
    model.model.layers[0].mlp.experts.__class__ = type("OtherExperts", (torch.nn.Module,), {})
    refused(model, "mlp.experts: OtherExperts multiplies by its gate_up_proj")


def test_experts_and_router_of_gpt_oss_are_served() -> None:
    """Weights [E, K, N] with biases, gate and up interleaved, four experts and then a softmax. A token alone
    has its bits, and all are close to transformers'."""
    block = made("GptOss", **FAMILIES["GptOss"] | {"num_hidden_layers": 1}).model.layers[0].mlp
    x = 3 * torch.randn(12, 64).to(BF16)
    _, weights, experts = block.router(x)
    theirs = block.experts(x, experts, weights)
    before = block.experts.config._experts_implementation
    block.experts.config._experts_implementation = register_experts()
    try:
        through = block.experts(x, experts, weights)
    finally:
        block.experts.config._experts_implementation = before
    block.router.routing = Routing(False, True, "topk_softmax")
    block.router.__class__, block.experts.__class__ = DetRouter, DetClampedExperts
    _, own_weights, own = block.router(x)
    assert torch.equal(own, experts) and torch.equal(own_weights, weights)
    ours = block.experts(x, own, own_weights)
    assert torch.equal(ours, through)
    assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()
    _, w, e = block.router(x[5:6])
    assert torch.equal(block.experts(x[5:6], e, w), ours[5:6])
    ours.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())
