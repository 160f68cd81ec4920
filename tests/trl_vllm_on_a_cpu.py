"""A GRPO trainer of TRL that generates by vLLM in its own process, on a CPU: a program for the environment
`.parity`, which has no vLLM.

    PYTHONPATH=src .parity/bin/python tests/trl_vllm_on_a_cpu.py

TRL's own code makes an engine, gives it weights, and compares log-probabilities. The engine is a stand-in: a
transformers model under `zero_drift` with the attributes of vLLM that TRL and isobit use. What is printed is
JSON: what is logged about rollouts, how TRL makes the engine, and what is refused.
"""

import json
import tempfile
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from trl.generation import vllm_generation

import isobit
import trl_rollouts_on_a_cpu as rollouts
from head_by_rows import head_by_rows
from isobit.integrations.hf import token_logps, zero_drift
from isobit.integrations.trl.rollouts import ON
from isobit.integrations.vllm.options import Options, quoted
from isobit.integrations.vllm.workers import SERVED

MADE: list["LLM"] = []


class LLM:
    """The most probable token or the one after it, in turn, and its log-probability, of a model with the
    weights that it was given."""

    def __init__(self, **options: Any) -> None:
        MADE.append(self)
        self.options, self.loaded, self.resets, self.answers = options, list[str](), 0, 0
        made = rollouts.Qwen2ForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()
        for parameter in made.parameters():
            parameter.data.zero_()  # what it computes with must come from the trainer
        zero_drift(made)
        setattr(made, SERVED, Options())
        self.parameters, made.load_weights = dict(made.named_parameters()), self.load_weights
        self.model = made
        runner = SimpleNamespace(model=made, get_model=lambda: made)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        config = SimpleNamespace(max_model_len=64, dtype=torch.bfloat16)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=config)

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, weight in pairs:
            self.parameters[name].data.copy_(weight)
            self.loaded.append(name)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    @torch.no_grad()
    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        return [self.answer(each["prompt_token_ids"], sampling_params) for each in prompts]

    def answer(self, prompt: list[int], params: Any) -> Any:
        ids, of = list(prompt), []
        self.answers += 1
        for i in range(params.max_tokens):
            turn = (self.answers + i) % 2
            token = int(self.model(torch.tensor([ids])).logits[0, -1].topk(2).indices[turn])
            ids.append(token)
            logp = token_logps(self.model, torch.tensor([ids]), temperature=params.temperature)[0, -1].item()
            of.append({token: SimpleNamespace(logprob=logp, rank=1)})
        output = SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=of)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output])


def trainer(folder: str, **options: Any) -> Any:
    given = {"use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None}
    return rollouts.trainer(folder, **given | {"use_vllm": True, "vllm_mode": "colocate"} | options)


def logged(on: bool = True, **options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trained = trainer(folder, **{"max_steps": 2} | options)
        if on:
            with isobit.integrations.trl.zero_drift(trained):
                trained.train()
        else:
            trained.train()
    steps = [entry for entry in trained.state.log_history if "loss" in entry]
    names = sorted({name for entry in steps for name in entry if name.startswith("sampling/")})
    llm = MADE[-1]
    return {
        "values": {name: [entry[name] for entry in steps] for name in names},
        "parameters": len(llm.parameters), "loaded": len(llm.loaded), "resets": llm.resets,
        "norms": [entry["grad_norm"] for entry in steps],
        "options": {name: x for name, x in llm.options.items() if name != "model"},
        "restored": ON not in vars(trained) and isobit.integrations.trl.SWITCH.patch is None,
    }  # fmt: skip


def refused() -> dict[str, str]:
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(folder)
        engine = made.vllm_generation.llm

        def refuse(name: str, owner: Any, attribute: str, value: Any) -> None:
            with mock.patch.object(owner, attribute, value, create=True):
                try:
                    isobit.integrations.trl.zero_drift(made)
                except isobit.integrations.trl.TRLError as error:
                    told[name] = str(error)

        refuse("server", made, "vllm_mode", "server")
        refuse("adapter", made.model, "peft_config", {"default": 1})
        refuse("without isobit", engine.model, SERVED, None)
        refuse("log_softmax", engine.model, SERVED, Options(logprobs="log_softmax"))
        refuse("classes", engine.model, SERVED, Options(numerics=quoted("", {"*.down_proj": "tree8"})))
        refuse("rounding", engine.model, SERVED, Options(rounding="vllm"))
        refuse("dtype", engine.llm_engine.model_config, "dtype", torch.float16)
        with isobit.integrations.trl.zero_drift(made):
            refuse("twice", made, "max_steps", 1)
    return told


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given = {"LLM": LLM, "SamplingParams": SimpleNamespace, "is_vllm_available": lambda: True}
    with head_by_rows(), mock.patch.multiple(vllm_generation, create=True, **given):
        found = {
            "zero drift": logged(),
            "not corrected": logged(max_steps=1, vllm_importance_sampling_correction=False),
            "control": logged(on=False, max_steps=1),
            "refused": refused(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
