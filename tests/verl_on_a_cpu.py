"""verl's fused kernels on a CPU, plain and with isobit inside: a program for the environment `.parity`.

    PYTHONPATH=src .parity/bin/python tests/verl_on_a_cpu.py PAGE

It prints JSON: by case, how far results and gradients are from those of verl's own torch implementation, what
isobit has counted, and which function stands where. PAGE is a page of the documentation whose example it
runs too. verl's kernels in Triton need a GPU, so what isobit does in their place is held to the torch
implementation, and what goes on to them ends in a stand-in. Megatron, which some modules of verl import, is a
stand-in as well.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import math
import os
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

# Before the imports, which read them: no network, no telemetry.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CI="1")

import torch
import verl
from omegaconf import OmegaConf
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from verl.models.transformers import monkey_patch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.utils.experimental import torch_functional
from verl.utils.import_utils import import_external_libs
from verl.utils.kernel import linear_cross_entropy as kernel
from verl.workers.config import ActorConfig, PolicyLossConfig

import isobit

inside = isobit.integrations.verl
IMPORTERS = ("verl.models.mcore.model_forward_fused", "verl.models.mcore.model_forward_1f1b_overlap")
TORCH, TRITON = torch_functional.FusedLinearForPPO.forward, kernel.linear_cross_entropy


class Megatron(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Fake modules of Megatron that have any attribute."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        ours = name.partition(".")[0] == "megatron"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: Any) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.__name__, module.__path__ = spec.name, []
        return module

    def exec_module(self, module: Any) -> None: ...


# Calls of the two functions that are replaced


def inputs(rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(*rows, 16, generator=gen), torch.randn(50, 16, generator=gen)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 50, rows, generator=gen)


def by_torch(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    fused = torch_functional.FusedLinearForPPO(chunk_size=4)
    return fused(hidden_states=hidden, vocab_weights=weight, input_ids=ids, temperature=temperature)


def by_triton(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    found = sys.modules[kernel.__name__].linear_cross_entropy(hidden, weight, ids, temperature, "none")
    assert [x.shape for x in found] == [(ids.numel(),)] * 2
    return tuple(x.view(ids.shape) for x in found)


def outcome(
    seam: Any, rows: tuple[int, ...] = (2, 9), temperature: float = 0.7, wants: str = "logp entropy",
    frozen: bool = False, autocast: bool = False, ids: torch.dtype = torch.int64,
) -> list[Tensor]:  # fmt: skip
    """Log-probabilities, entropies and gradients."""
    hidden, weight, chosen = inputs(rows)
    weight.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp, entropy = seam(hidden, weight, chosen.to(ids), temperature)
    factor = torch.linspace(-1, 1, chosen.numel()).view(chosen.shape)  # a gradient that differs by rows
    total = (factor * logp).sum() if "logp" in wants else 0.0
    total = total + 0.3 * entropy.float().sum() if "entropy" in wants else total
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    return [logp.detach(), entropy.detach().float(), *torch.autograd.grad(total, leaves)]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative to the largest value of each."""
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
    assert len(ours) > 2 and all(bool(x.any()) for x in theirs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


CASES: dict[str, dict[str, Any]] = {
    "both": {}, "logp alone": {"wants": "logp"}, "entropy alone": {"wants": "entropy"},
    "packed": {"rows": (11,)}, "temperature 1": {"temperature": 1.0}, "temperature 3": {"temperature": 3},
    "frozen head": {"frozen": True}, "int32": {"ids": torch.int32}, "autocast": {"autocast": True},
}  # fmt: skip


def calls() -> dict[str, float]:
    found = {}
    for name, options in CASES.items():
        theirs = outcome(by_torch, **options)
        with inside.enable() as on:
            for seam in (by_torch, by_triton):
                found[f"{seam.__name__} {name}"] = distance(outcome(seam, **options), theirs)
        assert on.served == 2 and not on.passed
    return found


# A model as verl's workers patch it


def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        made.lm_head.weight.mul_(20)  # far from uniform
    return made


def forward(impl: str, **labels: Any) -> list[Tensor]:
    """Results and gradients of a model after verl's monkey patch."""
    model, before = tiny(), LlamaForCausalLM.forward
    try:
        # verl looks for a class that TRL, which happens to be in this environment, had in older versions.
        without_trl = mock.patch.object(monkey_patch, "is_trl_available", lambda: False)
        with contextlib.redirect_stdout(io.StringIO()), without_trl:
            monkey_patch.apply_monkey_patch(
                model, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend=impl
            )
        assert LlamaForCausalLM.forward is not before
        ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
        output = model(ids, temperature=0.7, return_dict=True, **labels)
        logp, entropy = output.log_probs.view(2, 9), output.entropy.view(2, 9)
        (logp.sum() + 0.3 * entropy.sum()).backward()
        return [logp.detach(), entropy.detach(), *(p.grad for p in model.parameters())]
    finally:
        LlamaForCausalLM.forward = before


def models() -> dict[str, float]:
    shifted = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    theirs, at_labels = forward("torch"), forward("torch", shift_labels=shifted)
    with inside.enable() as on:
        found = {impl: distance(forward(impl), theirs) for impl in ("torch", "triton", "liger")}
        found["shifted labels"] = distance(forward("triton", shift_labels=shifted), at_labels)
    assert on.served == 4 and not on.passed
    found["after it"] = distance(forward("torch"), theirs)
    return found


# Which functions are in place


def replaced() -> list[bool]:
    """Whether verl's own functions are in place: in the class, the module, and the modules that import from
    it."""
    now = [vars(torch_functional.FusedLinearForPPO)["forward"] is TORCH]
    names = [kernel.__name__, *(name for name in IMPORTERS if name in sys.modules)]
    return now + [vars(sys.modules[name])["linear_cross_entropy"] is TRITON for name in names]


def switching() -> dict[str, Any]:
    """On, off, modules that are imported before and meanwhile, and a graph that outlives it."""
    found: dict[str, Any] = {"before": replaced()}
    fused = import_module(IMPORTERS[0])
    first = inside.enable()
    overlap = import_module(IMPORTERS[1])
    found["on"] = replaced()
    assert overlap.linear_cross_entropy is fused.linear_cross_entropy
    with inside.enable() as second:
        pass
    found["after the inner block"] = replaced()
    hidden, weight, ids = inputs((2, 9))
    layer = mock.Mock(weight=weight)
    with (
        mock.patch.object(fused, "has_config_logger_enabled", lambda config: False),
        mock.patch.object(fused.parallel_state, "get_tensor_model_parallel_group", lambda: None),
    ):
        output = fused.fused_output_processor(
            hidden_states=hidden, output_layer=layer, output_weight=None, labels=ids,
            context=fused.FusedOutputProcessorContext(0.7), config=mock.Mock(sequence_parallel=False),
        )  # fmt: skip
    found["shared"] = [first.served, second.served]
    found["another backend"] = told(lambda: inside.enable("triton"))
    inside.disable()
    inside.disable()
    found["off"] = replaced()
    output.log_probs.sum().backward()
    with inside.enable():
        found["on again"] = replaced()
    found["off again"] = replaced()
    theirs = by_torch(*(x.detach() for x in (hidden, weight, ids)), 0.7)
    ours = [output.log_probs.detach(), output.entropy.detach(), weight.grad]
    found["megatron"] = distance(ours, [*(x.flatten() for x in theirs), weight.grad])
    return found


def told(call: Any) -> str:
    try:
        call()
    except (ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def passing() -> dict[str, Any]:
    """Calls that are passed on to verl's own functions; the one in Triton is replaced by sevens."""
    hidden, weight, ids = (x.detach() for x in inputs((3,)))
    sevens = staticmethod(lambda ctx, hidden, weight, labels, *rest: (torch.full(labels.shape, 7.0),) * 2)
    plain = by_torch(hidden, weight, ids, torch.tensor(0.7))
    with inside.enable() as on, mock.patch.object(kernel.LinearCrossEntropy, "forward", sevens):
        both = [kernel.linear_cross_entropy(hidden, weight, ids, 0.7, "mean")[0]]
        with mock.patch("torch.distributed.get_world_size", lambda group: 2):
            both += [kernel.linear_cross_entropy(hidden, weight, ids, 0.7, "none", "a group")[0]]
        with mock.patch("torch.distributed.get_world_size", lambda group: 1):
            alone = kernel.linear_cross_entropy(hidden, weight, ids, 0.7, "none", "a group")[0]
        tensor = by_torch(hidden, weight, ids, torch.tensor(0.7))
    with inside.enable("hopper") as named:
        by_torch(hidden, weight, ids, 0.7)
    return {
        "sevens": [bool((x == 7).all()) for x in both], "alone": bool((alone < 0).all()),
        "tensor": all(torch.equal(a, b) for a, b in zip(tensor, plain, strict=True)),
        "counts": [on.served, on.passed], "named": [named.served, named.passed],
    }  # fmt: skip


def refusals() -> dict[str, str]:
    """The error for another verl. Nothing of it is touched."""
    found = {}

    def other(self: Any, hidden: Any, weight: Any, labels: Any) -> None: ...

    changes: dict[str, tuple[Any, str, Any]] = {
        "class": (torch_functional.FusedLinearForPPO, "forward", other),
        "function": (kernel.LinearCrossEntropy, "forward", staticmethod(other)),
        "replaced": (kernel, "linear_cross_entropy", other),
        "gone": (torch_functional, "FusedLinearForPPO", None),
    }
    for name, (owner, attribute, value) in changes.items():
        with mock.patch.object(owner, attribute, value):
            found[name] = told(inside.enable)
            now = vars(owner)[attribute]
            assert now is value and inside.SWITCH.patch is None
    assert all(replaced())
    return found


def external() -> list[list[bool]]:
    """By verl's own way to import what its configuration names."""
    before = replaced()
    import_external_libs("isobit.integrations.verl_on")
    during = replaced()
    inside.disable()
    return [before, during, replaced()]


# The entry point


def registered() -> dict[str, Any]:
    others = {name: f.__module__ for name, f in POLICY_LOSS_REGISTRY.items() if name != "isobit_clip"}
    return {
        "ours": POLICY_LOSS_REGISTRY["isobit_clip"].__module__,
        "others": sorted(set(others.values())), "vanilla": "vanilla" in others,
        "patch": inside.SWITCH.patch is None, "replaced": replaced(),
    }  # fmt: skip


def losses() -> dict[str, Any]:
    """By verl's aggregation: the differences of loss, gradient and metrics from those of its own vanilla
    loss."""
    gen = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    logp = (torch.randn(4, 6, generator=gen, dtype=torch.float64) - 2).requires_grad_()
    given = {
        "old_log_prob": logp.detach() - torch.randn(4, 6, generator=gen, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.5, 0.8, 2.0])[:, None].expand(4, 6).double(),
        "response_mask": (torch.arange(6) < torch.tensor([6, 4, 1, 0])[:, None]).long(),
    }
    given["old_log_prob"][1, 0] = logp[1, 0].detach() - 1.5  # beyond the second clip
    weights = torch.rand(4, 6, generator=gen, dtype=torch.float64)
    batch = {"dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 8, "loss_scale_factor": 9}
    for mode in POLICY_LOSS_REGISTRY["isobit_clip"].__globals__["LOSSES"]:
        for info, is_weights in ((batch, weights), ({}, None)):
            config = ActorConfig(
                strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1,
                clip_ratio_high=0.3, policy_loss=PolicyLossConfig(loss_mode="isobit_clip"),
            )  # fmt: skip
            config.global_batch_info.update(info)
            results = []
            for name in ("isobit_clip", "vanilla"):
                loss, metrics = get_policy_loss_fn(name)(
                    **given, log_prob=logp, loss_agg_mode=mode, config=config, rollout_is_weights=is_weights
                )
                assert abs(loss) > 1e-3 and all(metrics.values())  # zeros would agree as well
                results.append((loss, torch.autograd.grad(loss, logp)[0], metrics))
            (ours, dours, m), (theirs, dtheirs, n) = results
            found[f"{mode} {'of two ranks' if info else ''}"] = [
                float(abs(ours / theirs - 1)), float((dours - dtheirs).abs().max() / dtheirs.abs().max()),
                max(abs(m[key] - n[key]) for key in n),
            ]  # fmt: skip
    unread = {"old_log_prob": given["old_log_prob"].masked_fill(given["response_mask"] == 0, math.nan)}
    loss, _ = POLICY_LOSS_REGISTRY["isobit_clip"](**given | unread, log_prob=logp, config=config)
    found["NaN at masked tokens"] = [0.0 if loss.isfinite() else 1.0]
    found["refusal"] = told(
        lambda: POLICY_LOSS_REGISTRY["isobit_clip"](**given, log_prob=logp, loss_agg_mode="mean")
    )
    return found


def page(path: str) -> list[str]:
    """What the example of a page prints, and what the page says that it prints."""
    ((code, expected),) = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", Path(path).read_text(), re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    return [printed.getvalue(), expected]


def settings(path: str) -> dict[str, bool]:
    """By setting of verl's that a page names: whether the configuration of its trainer has it."""
    (generated,) = Path(str(verl.__file__)).parent.glob("trainer/config/_generated_ppo_trainer.yaml")
    config: Any = OmegaConf.to_container(OmegaConf.load(generated), resolve=False)
    named = re.findall(r"^    (actor_rollout_ref\.[\w.]+)=", Path(path).read_text(), re.M)

    def has(keys: list[str], part: Any) -> bool:
        return not keys or (isinstance(part, dict) and keys[0] in part and has(keys[1:], part[keys[0]]))

    return {name: has(name.split("."), config) for name in named}


def main(documentation: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"version": verl.__version__, "registered": registered()}
    found |= {"calls": calls(), "models": models(), "passing": passing(), "refusals": refusals()}
    found |= {"external": external(), "losses": losses(), "page": page(documentation)}
    found["settings"] = settings(documentation)
    sys.meta_path.insert(0, Megatron())
    found["switching"] = switching()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
