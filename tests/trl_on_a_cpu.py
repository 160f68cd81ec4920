"""Trainers of TRL on a CPU, plain and with isobit inside: a program for the environment `.parity`.

    PYTHONPATH=src .parity/bin/python tests/trl_on_a_cpu.py

It prints JSON: by case, what is logged at each step without and with isobit, and what isobit has counted.
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

# Before the imports, which read them: no network, no telemetry.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CI="1")

import peft
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import isobit

inside = isobit.integrations.trl
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
LETTERS = "abcdefghijklmnop"
SEAM = "_ChunkedLogProbFunction"


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({c: i for i, c in enumerate([*LETTERS, "<pad>", "<eos>"])}, unk_token="a"))
    words.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def common(folder: str, steps: int = 3) -> dict[str, Any]:
    return {
        "output_dir": folder, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "per_device_train_batch_size": 4, "max_steps": steps, "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-2, "seed": 0,
    }  # fmt: skip


def model(folder: str) -> str:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=18, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=16, eos_token_id=17, bos_token_id=17,
    )  # fmt: skip
    made = Qwen2ForCausalLM(config)
    with torch.no_grad():
        made.lm_head.weight.mul_(20)  # far from uniform
    made.save_pretrained(folder)
    return folder


def grpo(folder: str, **options: Any) -> Any:
    config = trl.GRPOConfig(
        **common(folder), num_generations=4, max_completion_length=6, temperature=0.8, **options
    )
    return trl.GRPOTrainer(
        model=model(folder), args=config, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cdefg", "hi", "j"] * 4}),
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 17) for text in completions],
    )  # fmt: skip


def sft(folder: str) -> Any:
    config = trl.SFTConfig(**common(folder, 2), max_length=16)
    data = Dataset.from_dict({"text": ["abcdef", "ghij"] * 4})
    return trl.SFTTrainer(model=model(folder), args=config, processing_class=tokenizer(), train_dataset=data)


def dpo(folder: str, evaluated: bool = False, **options: Any) -> Any:
    """With `evaluated`, also after each of its two steps: calls of the policy without gradients."""
    config = trl.DPOConfig(
        **common(folder, 2), max_length=16, eval_strategy="steps" if evaluated else "no", eval_steps=1
    )
    rows = {"prompt": ["ab", "cd"] * 4, "chosen": ["ef", "gh"] * 4, "rejected": ["ij", "klm"] * 4}
    data = Dataset.from_dict(rows)
    return trl.DPOTrainer(
        model=model(folder), args=config, processing_class=tokenizer(), train_dataset=data,
        eval_dataset=data.select(range(4)) if evaluated else None, **options,
    )  # fmt: skip


def lora() -> Any:
    """An adapter of the attention, which is not 0 at the start: its model is not its own reference."""
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def kto(folder: str, **options: Any) -> Any:
    config = trl.KTOConfig(**common(folder, 2), max_length=16)
    rows = {"prompt": ["ab", "cd"] * 4, "completion": ["ef", "klm"] * 4, "label": [True, False] * 4}
    return trl.KTOTrainer(
        model=model(folder), args=config, processing_class=tokenizer(), train_dataset=Dataset.from_dict(rows),
        **options,
    )  # fmt: skip


def logged(make: Any, **options: Any) -> list[list[float]]:
    """(loss, norm of the gradient, entropy) of every step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(folder, **options)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [[entry["loss"], entry["grad_norm"], entry.get("entropy", 0.0)] for entry in steps]
    judged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    metrics = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    return [*losses, *([entry[name] for name in metrics] for entry in judged)]


def compared(make: Any, **options: Any) -> dict[str, Any]:
    plain = logged(make, **options)
    with inside.enable() as on:
        ours = logged(make, **options)
    return {"plain": plain, "isobit": ours, "served": on.served, "passed": on.passed}


def call(dtype: torch.dtype, outputs: tuple[str, ...], rows: int = 9, **options: Any) -> list[torch.Tensor]:
    """One call of the seam, in fp32 under autocast if `dtype` is another, and its gradients."""
    gen = torch.Generator().manual_seed(0)
    shapes = ((rows, 16), (50, 16), (50,))
    leaves = [torch.randn(*shape, generator=gen).requires_grad_() for shape in shapes]
    ids = torch.randint(0, 50, (rows,), generator=gen)
    given = {"final_logit_softcapping": None, "logit_scale": 1.0} | options
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = getattr(sys.modules["trl.trainer.utils"], SEAM).apply(
            *leaves, ids, 0.7, 32, given["final_logit_softcapping"], given["logit_scale"], outputs
        )
    results = [x for x in found if x is not None]
    total = results[0].sum() + (0.3 * results[1].sum() if "entropy" in outputs else 0.0)
    return [*(x.detach().float() for x in results), *torch.autograd.grad(total, leaves)]


def calls() -> dict[str, float]:
    """By case: the distance of results and gradients from TRL's, relative to their largest."""
    both, cap = ("log_probs", "entropy"), {"final_logit_softcapping": 5.0, "logit_scale": 0.5}
    cases: dict[str, Any] = {
        "plain": (torch.float32, both, {}), "logp alone": (torch.float32, ("log_probs",), {}),
        "softcap": (torch.float32, both, cap), "autocast": (torch.bfloat16, both, {}),
        "no rows": (torch.float32, both, {"rows": 0}),
    }  # fmt: skip
    found = {}
    for name, (dtype, outputs, options) in cases.items():
        theirs = call(dtype, outputs, **options)
        with inside.enable() as on:
            ours = call(dtype, outputs, **options)
        assert on.served == 1 and [x.shape for x in ours] == [x.shape for x in theirs]
        assert all(a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel()]
        found[name] = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs)
    return found


def gathers() -> list[list[list[int]]]:
    """The shapes of what a call gathers in its backward. Its forward is inside TRL's own gathering."""
    utils, seen = sys.modules["trl.trainer.utils"], []

    def gather(*parameters: torch.Tensor) -> Any:
        seen.append([list(p.shape) for p in parameters])
        return contextlib.nullcontext()

    with mock.patch.object(utils, "maybe_gather_lm_head_ctx", gather), inside.enable():
        call(torch.float32, ("log_probs",))
    return seen


def warned() -> list[str]:
    """What the first call that needs more says, and the second one does not."""
    with inside.enable(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            call(torch.float32, ("log_probs", "is_top1"))
    return [str(each.message) for each in said]


def unrounded() -> bool:
    """Whether gradients of fp32 weights under autocast have more digits than bf16 has."""
    with inside.enable():
        _, _, dweight, _ = call(torch.bfloat16, ("log_probs",))
    return not torch.equal(dweight, dweight.bfloat16().float())


def importers() -> list[str]:
    """Modules of TRL that have imported the function by name."""
    root = Path(str(trl.__file__)).parent
    lines = (p for p in root.rglob("*.py") if "import ChunkedLogProbFunction" in p.read_text())
    return sorted(str(p.relative_to(root)) for p in lines)


def adapters() -> list[bool]:
    """Whether the name is TRL's own before, inside and after, in a trainer that is imported inside, too."""
    utils, early = sys.modules["trl.trainer.utils"], sys.modules["trl.trainer.dpo_trainer"]
    theirs = utils.use_adapter
    late = "trl.trainer.rloo_trainer"
    sys.modules.pop(late, None)
    seen = [early.use_adapter is theirs]
    with inside.enable():
        module = importlib.import_module(late)
        seen += [each.use_adapter is theirs for each in (utils, early, module)]
    return [*seen, *(each.use_adapter is theirs for each in (utils, early, module))]


def switching() -> dict[str, Any]:
    """On, off, and refusals."""
    utils = sys.modules["trl.trainer.utils"]
    theirs = getattr(utils, SEAM)
    first = inside.enable()
    with inside.enable() as second:
        inner = getattr(utils, SEAM) is not theirs
    after_block = getattr(utils, SEAM) is not theirs
    try:
        inside.enable("triton")
        told = ""
    except isobit.ContractError as error:
        told = str(error)
    call(torch.float32, ("log_probs",))
    shared = first.served == second.served == 1
    inside.disable()
    inside.disable()
    restored = getattr(utils, SEAM) is theirs
    with inside.enable("hopper") as named:
        call(torch.float32, ("log_probs",))

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, targets: Any) -> None: ...

    setattr(utils, SEAM, Other)
    try:
        inside.enable()
        refusal = ""
    except inside.TRLError as error:
        refusal = str(error)
    untouched = getattr(utils, SEAM) is Other
    setattr(utils, SEAM, theirs)
    return {"inner": inner, "after_block": after_block, "told": told, "shared": shared, "restored": restored,
            "named": [named.served, named.passed], "refusal": refusal, "untouched": untouched}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {name: compared(grpo, loss_type=name) for name in LOSSES}
    found["kl and entropy"] = compared(grpo, loss_type="grpo", beta=0.1, entropy_coef=0.05, num_iterations=2)
    found |= {"sft": compared(sft), "dpo": compared(dpo)}
    found["dpo with lora"] = compared(dpo, evaluated=True, peft_config=lora())
    found["kto with lora"] = compared(kto, peft_config=lora())
    found |= {
        "calls": calls(),
        "gathers": gathers(),
        "unrounded": unrounded(),
        "warned": warned(),
        "importers": importers(),
        "switching": switching(),
        "adapters": adapters(),
    }
    print(json.dumps({"version": trl.__version__, **found}))


if __name__ == "__main__":
    main()
