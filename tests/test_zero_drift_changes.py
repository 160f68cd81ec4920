"""Models that are changed after `zero_drift`: the next forward notices it, the report says it, and `check`
and another `zero_drift` look at the model as it is then. Adapters of PEFT are in `test_lora.py`."""

import copy
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import isobit
from hf_models import V, forward_logits, made, prompts
from isobit.integrations.hf import HFError, ZeroDrift, guard, register_attention, zero_drift
from isobit.integrations.hf.norms import DetRMSNorm
from isobit.nn import DetLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

IDS = prompts([6])[0]


class Adapter(nn.Module):
    """What an adapter library puts in place of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Doubled(DetLinear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def replaced(parent: Any, name: str, other: Any) -> Callable[[], None]:
    """Set an attribute; returns what undoes it."""
    own = parent.get_submodule(name) if isinstance(parent, nn.Module) else getattr(parent, name)
    setattr(parent, name, other)
    return lambda: setattr(parent, name, own)


def with_adapters(model: Any) -> Callable[[], None]:
    first, second = (
        replaced(layer.mlp, "up_proj", Adapter(layer.mlp.up_proj)) for layer in model.model.layers
    )
    return lambda: first() or second()


def with_sdpa(model: Any) -> Callable[[], None]:
    model.set_attn_implementation("sdpa")
    return lambda: model.set_attn_implementation("isobit")


def with_another_head(model: Any) -> Callable[[], None]:
    own, embed = model.lm_head, model.model.embed_tokens
    model.resize_token_embeddings(V + 8, mean_resizing=False)
    assert type(model.lm_head) is nn.Linear

    def undo() -> None:
        model.lm_head, model.model.embed_tokens, model.config.vocab_size = own, embed, V

    return undo


def with_another_backbone(model: Any) -> Callable[[], None]:
    return replaced(model, "model", made("Llama").model)


def with_a_forward_of_its_own(model: Any) -> Callable[[], None]:
    layer = model.model.layers[1].mlp.gate_proj
    layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    return lambda: vars(layer).pop("forward")


def with_another_class(model: Any) -> Callable[[], None]:
    layer = model.model.layers[0].self_attn.o_proj
    layer.__class__ = Doubled
    return lambda: setattr(layer, "__class__", DetLinear)


def with_a_norm_of_torch(model: Any) -> Callable[[], None]:
    model.model.norm.__class__ = transformers.models.llama.modeling_llama.LlamaRMSNorm
    return lambda: setattr(model.model.norm, "__class__", DetRMSNorm)


def with_an_activation(model: Any) -> Callable[[], None]:
    return replaced(model.model.layers[1].mlp, "act_fn", nn.GELU())


CHANGES: dict[Callable[[Any], Callable[[], None]], str] = {
    with_adapters: r"layers\.0\.mlp\.up_proj\.down, model\.layers\.0\.mlp\.up_proj\.up, [\w.]+down and 1 more"
    r": a Linear that torch computes",
    with_sdpa: "attention: computed by 'sdpa'",
    with_another_head: "lm_head: a Linear that torch computes",
    with_another_backbone: r"layers\.0\.self_attn\.q_proj, .* and 11 more: a Linear that torch computes"
    r"; .*LlamaRMSNorm, which was not tested",
    with_a_forward_of_its_own: r"model\.layers\.1\.mlp\.gate_proj: its forward was replaced on the object",
    with_another_class: r"model\.layers\.0\.self_attn\.o_proj: its class is Doubled now",
    with_a_norm_of_torch: r"model\.norm: a [\w.]+\.LlamaRMSNorm, which was not tested",
    with_an_activation: r"model\.layers\.1\.mlp\.act_fn: a torch\.nn\.modules\.activation\.GELU, which was",
}


@pytest.fixture(scope="module")
def enabled() -> tuple[Any, ZeroDrift, Tensor]:
    model = made("Llama", tie_word_embeddings=False)
    on = zero_drift(model)
    return model, on, forward_logits(model, IDS[0])


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_forward_notices_a_change(
    enabled: tuple[Any, ZeroDrift, Tensor], change: Callable[[Any], Callable[[], None]]
) -> None:
    (model, on, before), message = enabled, CHANGES[change]
    report = str(on)
    undo = change(model)
    calls: list[Callable[[], Any]] = [
        lambda: model(IDS),
        lambda: model.generate(IDS, max_new_tokens=1),
        lambda: copy.deepcopy(model)(IDS),
        on.check,
    ]
    if change is not with_another_backbone:  # its hook is gone with it
        calls += [lambda: model.forward(IDS), lambda: model.model(IDS)]  # PEFT has called the first
    for call in calls:
        with pytest.raises(
            HFError, match=rf"was changed afterwards.*: .*{message}.*[Cc]all zero_drift again"
        ):
            call()
    assert "CHANGED, may depend on the batch: " in str(on) and on.report.since
    undo()
    assert torch.equal(forward_logits(model, IDS[0]), before) and str(on) == report


def test_another_zero_drift_serves_what_was_added() -> None:
    model = made("Llama", tie_word_embeddings=False)
    with zero_drift(model) as on:
        plain = forward_logits(model, IDS[0])
        with_adapters(model)
        assert on.report.new == {"Linear": 4} and "Linear" in str(on)
        again = zero_drift(model)
        assert (
            len(again.changed["isobit.det_linear"]) == 19 and on.report is again.report and not on.report.new
        )
        adapted = forward_logits(model, IDS[0])
        assert not torch.equal(adapted, plain)
        model.set_attn_implementation("sdpa")
        assert "isobit.attention" not in on.changed
        zero_drift(model)
        assert torch.equal(forward_logits(model, IDS[0]), adapted) and on.check() is on.report
    assert not [m for m in model.modules() if isinstance(m, DetLinear | DetRMSNorm)]
    assert str(on).startswith("LlamaForCausalLM, restored; until then:\n")
    with pytest.raises(HFError, match="it is not enabled; call zero_drift again"):
        on.check()
    model(IDS)  # nobody looks any more


def test_check_runs_the_model_again() -> None:
    """A fault that no comparison of modules can see."""
    model = made("Qwen3")
    on = zero_drift(model)
    on.check()
    kind = type(model.model.layers[0])
    own = kind.forward

    def leaky(self: Any, hidden_states: Tensor, *args: Any, **more: Any) -> Any:
        return own(self, hidden_states, *args, **more) * (1.0 + 0.01 * (len(hidden_states) - 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", leaky)
        model(IDS)
        with pytest.raises(HFError, match="logits have other bits alone"):
            on.check()
    on.check()


def test_changes_without_drift_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Llama")
    on = zero_drift(model)
    before = forward_logits(model, IDS[0])
    # Around a layer's own forward, as accelerate moves inputs.
    layer = model.model.layers[0].mlp.up_proj
    layer._old_forward = layer.forward
    layer.forward = lambda x: layer._old_forward(x)
    # Into a list, a container, and a module of a class that was tested.
    model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, nn.Identity())
    model.model.layers[1].spare = copy.deepcopy(layer)
    assert torch.equal(forward_logits(model, IDS[0]), before)
    assert len(on.changed["isobit.det_linear"]) == 16 and not on.report.since
    # All modules were looked at once.
    monkeypatch.setattr(guard.Guard, "changes", lambda *args: pytest.fail("looked at again"))
    assert torch.equal(forward_logits(model, IDS[0]), before)


def test_a_model_that_is_sharded_afterwards_needs_nothing(tmp_path: Path) -> None:
    model = made("Llama", tie_word_embeddings=False)
    on = zero_drift(model)
    before, report = forward_logits(model, IDS[0]), str(on)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model.lm_head, model):
            fully_shard(part, mesh=mesh)
        assert torch.equal(forward_logits(model, IDS[0]), before) and str(on) == report
        model.lm_head = nn.Linear(64, V, bias=False, dtype=torch.bfloat16)
        with pytest.raises(HFError, match="lm_head: a Linear that torch computes"):
            model(IDS)
    finally:
        distributed.destroy_process_group()


def test_a_model_from_a_file_is_watched() -> None:
    model = made("Llama", tie_word_embeddings=False)
    zero_drift(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(forward_logits(again, IDS[0]), forward_logits(model, IDS[0]))
    alone = copy.deepcopy(model.model)
    alone(IDS)
    for changed, call in ((again, again), (alone, alone)):
        with_another = changed.model if changed is again else changed
        with_another.norm = nn.LayerNorm(64, dtype=torch.bfloat16)
        with pytest.raises(HFError, match=r"norm: a torch\.nn\.modules\.normalization\.LayerNorm"):
            call(IDS)
    forward_logits(model, IDS[0])


def test_what_a_forward_compares_is_cheap_and_covers_a_large_model_in_turn() -> None:
    """38 us for 36 layers on a busy core (Neoverse N1)."""
    register_attention()
    with torch.device("meta"):
        config = transformers.Qwen3Config(vocab_size=8, hidden_size=8, head_dim=8, num_hidden_layers=36)
        model = transformers.Qwen3ForCausalLM(config)
    model.set_attn_implementation("isobit")
    isobit.nn.swap_linear(model)
    guard.put_on(model)
    watch = guard.of(model)
    assert watch is not None and len([*model.modules()]) == 547

    def forward() -> None:
        watch.at_model(model, ())
        watch.at_backbone(model.model, ())

    fastest = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        forward()
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 75e-6
    layers = model.model.layers
    for changed in ([layers[7].mlp], [layer.self_attn.q_norm for layer in layers]):
        for module in changed:
            module.forward = nn.functional.silu
        assert not guard.is_unchanged(model)
        with pytest.raises(HFError, match=r"(layers\.7\.mlp|33 more): its forward was replaced"):
            for _ in range(3 if len(changed) == 1 else 1):
                forward()
        for module in changed:
            del module.forward
    with_sdpa(model)
    with pytest.raises(HFError, match="computed by 'sdpa'"):
        forward()


# Compiled models


class Small(nn.Module):
    """What a guard needs of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.base_model_prefix = nn.ReLU(), "base_model"

    def forward(self, x: Tensor) -> Tensor:
        return self.base_model(x) + 1


def test_tracing_warns_once() -> None:
    torch._dynamo.reset()
    model = Small()
    guard.put_on(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(
        UserWarning, match="the model is compiled. Compiled code rounds in other places"
    ) as told:
        compiled(torch.zeros(2, 4))
        compiled(torch.zeros(3, 4, 5))  # traced again
    assert len(told) == 1
    torch._dynamo.reset()


def test_compiled_models_are_refused_with_advice() -> None:
    model = made("Llama")
    with pytest.raises(
        HFError, match=r"it is compiled; pass .* model\._orig_mod: .* run it without torch\.compile"
    ):
        zero_drift(torch.compile(model))
    compiled: Any = torch.compile(model.model.layers[1])
    own, model.model.layers[1] = model.model.layers[1], compiled
    with pytest.raises(HFError, match=r"model\.layers\.1 is compiled: .* without torch\.compile"):
        zero_drift(model)
    model.model.layers[1] = own
    on = zero_drift(model)
    model.model.layers[1].compile(backend="eager")
    model.model.layers[1]._compiled_call_impl = model.model.layers[1]._call_impl  # as if it were traced
    with pytest.warns(UserWarning, match="the model is compiled"):
        model(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(IDS)
    model.model.layers[1]._compiled_call_impl = None
    on.disable()
