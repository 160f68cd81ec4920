"""LoRA adapters of PEFT in models without drift, on a CPU: a program for the environment `.parity`.

    PYTHONPATH=src .parity/bin/python tests/lora_on_a_cpu.py

It prints JSON: by case, what `test_lora.py` expects.
"""

import contextlib
import io
import json
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

# Before the imports, which read them: no network, no telemetry.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CI="1")

import peft
import torch
import transformers

import isobit
from hf_models import Drift, Run, forward_logits, made, prompts
from isobit.integrations.hf import token_logps, zero_drift

#: Sampled, so that rows differ; with and without a cache that is read in chunks.
RUN = Run(3, True, "dynamic", 4)
IDS = prompts([9])[0]
SHAPE: dict[str, Any] = {"r": 8, "lora_alpha": 32, "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def lora(model: Any, targets: Any = "all-linear", *, fp32: bool = True, **options: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=targets, **SHAPE | options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=fp32)


def message(function: Any, *args: Any, **options: Any) -> str:
    """Of the error that this call must raise."""
    try:
        function(*args, **options)
    except isobit.ContractError as error:
        return str(error)
    return "no error"


def first(fp32: bool) -> dict[str, Any]:
    """Adapters, then one call of `zero_drift`: drift, and how far the logits are from PEFT's own."""
    model = lora(made("Qwen3"), fp32=fp32)
    plain = forward_logits(model, IDS[0])
    with model.disable_adapter():
        unadapted = forward_logits(model, IDS[0])
    on = zero_drift(model)
    ours = forward_logits(model, IDS[0])
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = forward_logits(model, IDS[0])
    kinds = {str(p.dtype) for name, p in model.named_parameters() if "lora_" in name}
    scale = plain.square().mean().sqrt()
    found = {
        "dtypes": sorted(kinds), "linears": len(on.changed["isobit.det_linear"]),
        "drift": Drift(model).of(RUN), "autocast": torch.equal(ours, under_autocast),
        "distance": float((ours - plain).square().mean().sqrt() / scale),
        "effect": float((unadapted - plain).square().mean().sqrt() / scale), "text": str(on),
    }  # fmt: skip
    on.disable()
    return found | {"restored": torch.equal(forward_logits(model, IDS[0]), plain)}


def of_classes() -> dict[str, Any]:
    """A map of the model, for the model with adapters: no drift, and adapters are no part of it."""
    model = made("Llama", num_hidden_layers=1)
    with zero_drift(model, numerics={"*.o_proj": "tree8", "*.mlp.*": "tree8"}) as on:
        plain = on.classes
    policy = lora(model)
    on = zero_drift(policy, numerics=plain)
    adapted, drift = on.classes, Drift(policy).of(RUN)
    zero_drift(policy.merge_and_unload())
    kinds = {name: m.numerics for name, m in model.named_modules() if isinstance(m, isobit.nn.DetLinear)}
    return {
        "drift": drift, "plain": plain, "adapted": adapted, "merged": on.classes, "numerics": kinds,
        "unknown": message(zero_drift, lora(made("Llama")), numerics={"*.lora_A.*": "tree8"}),
    }  # fmt: skip


def gradients() -> dict[str, Any]:
    """Of fp32 adapters, next to those that PEFT computes itself."""
    model = lora(made("Llama"))
    wanted = [name for name, p in model.named_parameters() if p.requires_grad]

    def of(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        isobit.logp(model(IDS).logits[:, :-1].float(), IDS[:, 1:]).sum().backward()
        return [model.get_parameter(name).grad.float().flatten() for name in wanted]

    theirs = torch.cat(of(model))
    zero_drift(model)
    parts = of(model)
    ours = torch.cat(parts)
    return {
        "count": len(wanted), "all": all(bool(part.any()) for part in parts),
        "dtype": str(model.get_parameter(wanted[0]).grad.dtype),
        "distance": float((ours - theirs).norm() / theirs.norm()),
    }  # fmt: skip


def afterwards() -> dict[str, Any]:
    """Adapters on a model that is enabled already."""
    model = made("Llama")
    on = zero_drift(model)
    forward_logits(model, IDS[0])
    adapted = lora(model)
    noticed = [message(adapted, IDS), message(adapted.generate, input_ids=IDS, max_new_tokens=1)]
    stale = str(on)
    zero_drift(adapted)
    found: dict[str, Any] = {"noticed": noticed, "stale": stale, "text": str(on)}
    found["drift"] = Drift(adapted).of(RUN)
    own = made("Llama")
    zero_drift(own)
    own.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=4))  # by transformers itself
    return found | {
        "by transformers": message(own, IDS),
        "linears": len(zero_drift(own).changed["isobit.det_linear"]),
    }


def switching() -> dict[str, Any]:
    """What PEFT can do to adapters: it keeps bits, or is noticed."""
    model = lora(made("Llama"))
    on = zero_drift(model)
    drift = Drift(model)
    found: dict[str, Any] = {}

    def seen(what: str) -> None:
        drift.known.clear()
        found[what] = [*drift.of(RUN), len(on.changed["isobit.det_linear"]), on.report.since]

    one = forward_logits(model, IDS[0])
    with model.disable_adapter():
        seen("disabled")
    model.add_adapter("two", peft.LoraConfig(target_modules=["q_proj", "v_proj"], **SHAPE | {"r": 4}))
    found["added"] = message(model, IDS)
    zero_drift(model)
    found["unchanged"] = torch.equal(forward_logits(model, IDS[0]), one)
    model.set_adapter("two")
    found["another"] = not torch.equal(forward_logits(model, IDS[0]), one)
    seen("switched")
    model.base_model.set_adapter(["default", "two"])
    seen("both")
    model.set_adapter("default")
    model.merge_adapter()
    seen("merged")
    model.unmerge_adapter()
    model.delete_adapter("two")
    seen("deleted")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.load_adapter(folder, "three")
        found["loaded"] = message(model, IDS)
        zero_drift(model)
        model.set_adapter("three")
        seen("from a file")
    model = model.merge_and_unload()
    drift.model = model
    seen("unloaded")
    on.disable()
    found["left"] = sorted(
        {type(m).__name__ for m in model.modules() if type(m).__module__.startswith("isobit")}
    )
    return found


def refusals() -> dict[str, str]:
    """Adapters that are not plain LoRA of linear layers."""

    def of(config: Any) -> str:
        return message(zero_drift, peft.get_peft_model(made("Llama", tie_word_embeddings=False), config))

    task = {"task_type": "CAUSAL_LM"}
    found = {
        "dora": of(peft.LoraConfig(target_modules=["q_proj"], use_dora=True, **task)),
        "dropout": of(peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1, **task)),
        "embedding": of(peft.LoraConfig(target_modules=["embed_tokens"], **task)),
        "ia3": of(peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], **task)),
        "vera": of(peft.VeraConfig(target_modules=["q_proj"], r=4, **task)),
        "prompt": of(peft.PromptTuningConfig(num_virtual_tokens=2, **task)),
    }
    compiled = torch.compile(lora(made("Llama"), ["q_proj"]))
    return found | {"compiled": message(zero_drift, compiled)}


def log_probabilities() -> dict[str, Any]:
    """`token_logps` of a model of PEFT, in fp32 so that it can be compared closely."""
    model = lora(made("Llama").float(), ["q_proj", "up_proj"])
    logp = token_logps(model, IDS)
    theirs = model(IDS).logits[:, :-1].double().log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    logp.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    bf16 = lora(made("Llama"))
    zero_drift(bf16)
    rows, mask = prompts([9, 4])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = token_logps(bf16, rows, mask, model_inputs={"position_ids": positions})
    alone = token_logps(bf16, rows[1:, 5:])
    tokens = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    return {
        "distance": float((logp - theirs).abs().max()), "largest": float(theirs.abs().max()),
        "gradients": all(g is not None and bool(g.any()) for g in gradients),
        "row": torch.equal(whole[1, 5:], alone[0]),
        "prompt": message(token_logps, peft.get_peft_model(made("Llama"), tokens), IDS),
        "head": message(token_logps, lora(made("Llama", tie_word_embeddings=False), ["lm_head"]), IDS),
    }  # fmt: skip


def in_trl() -> dict[str, Any]:
    """A trainer that adds adapters to a model that is enabled."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"a": 0, "<pad>": 1}, unk_token="a"))
    model = made("Llama")
    zero_drift(model)
    with tempfile.TemporaryDirectory() as folder:
        options = trl.GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=2,
            num_generations=2, max_completion_length=2, max_steps=1, disable_tqdm=True,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, args=options,
            reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 2}),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"
            ),
            peft_config=peft.LoraConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM"),
        )  # fmt: skip
        noticed = message(trainer.train)
        zero_drift(trainer.model)
        trainer.train()
    return {"noticed": noticed, "steps": trainer.state.global_step}


def page() -> list[list[str]]:
    """What each example of the page prints, and what the page says that it prints."""
    text = (Path(__file__).parent.parent / "docs" / "lora.md").read_text()
    scope, outputs = dict[str, Any](), []
    for code, output in re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```\n)?", text, re.S):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        outputs.append([printed.getvalue(), output])
    return outputs


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({
        "fp32": first(True), "bf16": first(False), "classes": of_classes(), "gradients": gradients(),
        "afterwards": afterwards(), "switching": switching(), "refusals": refusals(),
        "logps": log_probabilities(), "trl": in_trl(), "page": page(), "version": peft.__version__,
    }))  # fmt: skip
