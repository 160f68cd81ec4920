"""Rollouts of vLLM against a trainer, for `vllm_on_a_cpu.py` and `vllm_on_a_gpu.py`: models with random
weights, engines, and comparisons of log-probabilities in bits. Import it before vLLM."""

import gc
import os
import struct
import time
import traceback
from contextlib import contextmanager

# One process, no network, and none of the packages that vLLM could use instead of its own kernels.
os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    } | dict(os.environ)
)  # fmt: skip

import torch
import transformers

import isobit

START = time.time()


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


def model_of(folder, device="cpu"):
    """The model in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()


def trainer_of(folder, device="cpu"):
    """The same under zero_drift."""
    model = model_of(folder, device)
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
    if getattr(llm, "broken", False):  # it would wait for requests that nobody computes
        raise RuntimeError("this engine has raised an error before")
    params = [
        SamplingParams(
            temperature=t, seed=i, max_tokens=new, ignore_eos=True, detokenize=False,
            **{"logprobs": 0} | options,
        )
        for i, t in enumerate(each)
    ]  # fmt: skip
    llm.broken = True
    result = llm.generate([{"prompt_token_ids": p} for p in given], params, use_tqdm=False)
    llm.broken = False
    return result


def row_of(output):
    """Tokens and log-probabilities of an output of vLLM."""
    tokens = list(output.outputs[0].token_ids)
    return tokens, [of[t].logprob for of, t in zip(output.outputs[0].logprobs, tokens, strict=True)]


def rollout(llm, given, temperatures=0.0, new=6, **options):
    return [row_of(output) for output in outputs(llm, given, temperatures, new, **options)]


def arriving(llm, given, every, new):
    """Greedy, with one more request after every few steps of the engine, from the last to the first."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    waiting, done, steps = list(range(len(given))), {}, 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        if waiting and steps % every == 0:
            params = SamplingParams(
                temperature=0.0, max_tokens=new, logprobs=0, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            i = waiting.pop()
            llm.llm_engine.add_request(f"arriving-{i:03}", {"prompt_token_ids": given[i]}, params)
        done |= {output.request_id: row_of(output) for output in llm.llm_engine.step() if output.finished}
        steps += 1
    return [done[name] for name in sorted(done)]


def preemptions(llm):
    """A list that gets an element whenever a request has to give up its cache; or None."""
    core = getattr(getattr(llm.llm_engine, "engine_core", None), "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    theirs, seen = getattr(scheduler, "_preempt_request", None), []
    if theirs is None:
        return None

    def preempt(*args, **kwargs):
        seen.append(1)
        return theirs(*args, **kwargs)

    scheduler._preempt_request = preempt
    return seen


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


def optimizer_steps(llm, given, trainer, folder, logps, new, lr):
    """Three times a rollout, a loss, a step, and the new weights in the engine: in place, at other addresses,
    and from a file. Yields (name, rows, the trainer's): a control before the engine has the new weights, and
    what must be equal afterwards."""
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr)
    for way in ("in place", "at other addresses", "reloaded"):
        rows = rollout(llm, given, 1.0, new)
        for prompt, (tokens, _) in zip(given, rows, strict=True):
            ids = torch.tensor([prompt + tokens], device=trainer.device)
            logp = token_logps(trainer, ids, 1.0)[0, len(prompt) - 1 :]
            advantage = 1.0 if sum(tokens) % 2 else -1.0
            (-advantage * (logp - logp.detach()).exp().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        old = trained(trainer, given, rows, logps, 1.0)
        yield f"control: the old weights, before a step {way}", rows, old
        if way == "at other addresses":
            move_parameters(llm)
        if way == "reloaded":
            trainer.save_pretrained(folder)
            llm.collective_rpc("reload_weights")
        else:
            load(llm, trainer)
        rows = rollout(llm, given, 1.0, new)
        yield f"a step, weights {way}", rows, trained(trainer, given, rows, logps, 1.0)


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


# Reports


class Cases:
    """What was compared, one line each. A case that fails does not stop those after it."""

    def __init__(self):
        self.all = []

    def record(self, name, ok, text, **numbers):
        self.all.append({"name": name, "ok": ok} | numbers)
        say("ok    " if ok else "FAILED", f"{name}: {text}")

    def same(self, name, rows, wanted, control=False):
        """All log-probabilities must have the same bits; or, of a control, some must not."""
        count, total = different(rows, wanted)
        ok = total > 0 and (count > 0) == control
        most = furthest(rows, wanted) if total else 0.0
        text = f"{count} of {total} log-probs differ" + (f", by up to {most:.3g}" if count else "")
        self.record(name, ok, text, differ=count, of=total, most=most)

    @contextmanager
    def attempt(self, name):
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.record(name, False, f"{type(error).__name__}: {str(error)[:300]}", error=str(error)[:1000])

    @property
    def passed(self):
        return bool(self.all) and all(case["ok"] for case in self.all)
