"""Rollouts of vLLM against a trainer, for `vllm_on_a_cpu.py` and `vllm_on_a_gpu.py`: models with random
weights, engines, and comparisons of log-probabilities in bits. Import it before vLLM."""

import gc
import os
import struct
import time

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
)  # fmt: skip

import torch
import transformers

import isobit

START = time.time()

#: Of each token of a rollout: its id, and its log-probability.
Row = tuple[list[int], list[float]]


def seconds():
    return time.time() - START


def say(*words):
    print(f"[{seconds():.0f} s]", *words, flush=True)


# Models


def saved(family, folder, device="cpu", **options):
    """A model with random weights in a folder; returns the folder."""
    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of 1 and biases of 0 would hide a wrong rounding
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_()
    where = os.path.join(folder, family)
    model.save_pretrained(where)
    return where


def trainer_of(folder, device="cpu"):
    """The model in transformers under zero_drift."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    isobit.integrations.hf.zero_drift(model)
    return model


def prompts(lengths, vocabulary):
    def ids(i, n):
        return [(1 + 7919 * (i + 1) + 37 * i + 104729 * j + 31 * j * j) % vocabulary for j in range(n)]

    return [ids(i, n) for i, n in enumerate(lengths)]


# Engines


def engine(folder, **options):
    from vllm import LLM

    defaults = {"enforce_eager": True, "dtype": "bfloat16", "enable_prefix_caching": False}
    return LLM(model=folder, skip_tokenizer_init=True, seed=0, **defaults | options)


def free():
    """Give back the memory of engines that nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def outputs(llm, given, temperatures=0.0, new=6, **options):
    """vLLM's outputs, one for each prompt, at one temperature or one for each."""
    from vllm import SamplingParams

    each = temperatures if isinstance(temperatures, list) else [temperatures] * len(given)
    params = [
        SamplingParams(
            temperature=t, seed=i, max_tokens=new, ignore_eos=True, detokenize=False,
            **{"logprobs": 0} | options,
        )
        for i, t in enumerate(each)
    ]  # fmt: skip
    return llm.generate([{"prompt_token_ids": p} for p in given], params, use_tqdm=False)


def row_of(output):
    """Tokens and log-probabilities of an output of vLLM."""
    tokens = list(output.outputs[0].token_ids)
    return tokens, [of[t].logprob for of, t in zip(output.outputs[0].logprobs, tokens, strict=True)]


def rollout(llm, given, temperatures=0.0, new=6, **options):
    return [row_of(output) for output in outputs(llm, given, temperatures, new, **options)]


def load(llm, model):
    """Copy the weights of a trainer into the engine's parameters, in place."""
    pairs = [(name, p.detach()) for name, p in model.named_parameters()]
    llm.apply_model(lambda engine_model: len(engine_model.load_weights(iter(pairs))))
    llm.reset_prefix_cache()


def move_parameters(llm):
    """Put the parameters of an engine at other addresses."""

    def move(model):
        kept = []
        for parameter in model.parameters():
            kept.append(parameter.data)  # or the next one would get this memory
            parameter.data = parameter.data.clone()
        return len(kept)

    llm.apply_model(move)


# Trainers


def trained(model, given, rows, logps, temperatures=0.0):
    """The log-probabilities of the same tokens, in one forward of each row: logps(model, ids [1, T],
    temperature) gives those of all tokens after the first. Greedy requests have temperature 1."""
    each = temperatures if isinstance(temperatures, list) else [temperatures] * len(given)
    result = []
    for prompt, (tokens, _), temperature in zip(given, rows, each, strict=True):
        ids = torch.tensor([prompt + tokens], device=model.device)
        with torch.no_grad():
            values = logps(model, ids, temperature or 1.0)
        result.append((tokens, values[0, len(prompt) - 1 :].tolist()))
    return result


def log_softmax(model, ids, temperature):
    """Of the model's own logits, rounded to its dtype."""
    logits = model(ids).logits[:, :-1].log_softmax(-1, dtype=torch.float32)
    return logits.gather(-1, ids[:, 1:, None])[..., 0]


def token_logps(model, ids, temperature):
    return isobit.integrations.hf.token_logps(model, ids, temperature=temperature)


def different(a, b):
    """(how many log-probabilities differ in a bit, of how many); all tokens of both must be there."""
    pairs = [(x, y) for (_, p), (_, q) in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return sum(struct.pack("<f", x) != struct.pack("<f", y) for x, y in pairs), len(pairs)


def furthest(a, b):
    """The largest difference of two log-probabilities."""
    return max(abs(x - y) for (_, p), (_, q) in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
