"""vLLM on a CPU, with isobit inside: run by `make engines` in an environment of its own.

Tiny models in bf16 with random weights. What must hold:
- the plugin is found by its entry point, and does nothing until isobit is enabled, VLLM_PLUGINS or not
- every module is served, and no call is left to vLLM
- log-probabilities have the same bits in a batch and alone, with prompts in one piece and in chunks, with a
  cold and a warm prefix cache
- they have the bits of a transformers model under `zero_drift`, one forward of one row
- with the rounding of a fused kernel they do not: the comparison can fail
- workers in other processes load the plugin, and have the same bits
- engines that cannot have these bits are refused, with the reason
"""

import gc
import os
import struct
import sys
import tempfile
import time

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
)  # fmt: skip

import torch
import transformers

import isobit
from isobit.integrations.vllm import VLLMError, layers, switch

VOCABULARY, NEW = 300, 6
LENGTHS = (5, 17, 40, 9, 23)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128,
    "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
START = time.time()


def say(*words):
    print(f"[{time.time() - START:.0f} s]", *words, flush=True)


def saved(family, folder, **options):
    """A model with random weights in a folder; returns the folder."""
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of 1 and biases of 0 would hide a wrong rounding
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_()
    where = os.path.join(folder, family)
    model.save_pretrained(where)
    return where


def prompts():
    return [[(1 + 37 * i + 11 * j * j + 5 * j) % VOCABULARY for j in range(n)] for i, n in enumerate(LENGTHS)]


def engine(folder, **options):
    from vllm import LLM

    defaults = {
        "enforce_eager": True, "dtype": "bfloat16", "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
    }  # fmt: skip
    return LLM(
        model=folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=8, seed=0, block_size=32,
        **defaults | options,
    )  # fmt: skip


def rollout(llm, given, temperature=0.0):
    """(tokens, log-probabilities) of each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False
    )
    rows = []
    for output in llm.generate([{"prompt_token_ids": p} for p in given], params, use_tqdm=False):
        tokens = list(output.outputs[0].token_ids)
        rows.append((tokens, [d[t].logprob for d, t in zip(output.outputs[0].logprobs, tokens, strict=True)]))
    return rows


def trained(model, given, rows):
    """The log-probabilities of the same tokens, in one forward of each row."""
    result = []
    for prompt, (tokens, _) in zip(given, rows, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        ids = torch.tensor(tokens)[:, None]
        result.append((tokens, logits.log_softmax(-1, dtype=torch.float32).gather(1, ids)[:, 0].tolist()))
    return result


def different(a, b):
    """How many log-probabilities differ in a bit; all tokens of both must be there."""
    pairs = [(x, y) for (_, p), (_, q) in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    assert len(pairs) == len(LENGTHS) * NEW
    return sum(struct.pack("<f", x) != struct.pack("<f", y) for x, y in pairs)


def trainer_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    isobit.integrations.hf.zero_drift(model)
    return model


def refused(*words, folder, **options):
    try:
        engine(folder, **options)
    except VLLMError as error:
        assert all(word in str(error) for word in words), error
        say("refused:", str(error)[:150])
    else:
        raise AssertionError(f"{options} is not refused")


def the_plugin_is_inert():
    from vllm.plugins import load_plugins_by_group

    os.environ["VLLM_PLUGINS"] = "isobit"
    plugins = load_plugins_by_group("vllm.general_plugins")
    assert list(plugins) == ["isobit"], plugins
    plugins["isobit"]()
    assert switch.SWITCH.patch is None and isobit.integrations.vllm.report() is None
    del os.environ["VLLM_PLUGINS"]
    say("the plugin is found, and inert")


def one_family(folder, given, more=False):
    """Rollouts of one engine against the trainer, and with `more` all the rest."""
    trainer = trainer_of(folder)
    llm = engine(folder)
    greedy, sampled = rollout(llm, given), rollout(llm, given, temperature=1.0)
    alone = [rollout(llm, [p])[0] for p in given]
    counts = {
        "batch against alone": different(greedy, alone),
        "greedy against the trainer": different(greedy, trained(trainer, given, greedy)),
        "sampled against the trainer": different(sampled, trained(trainer, given, sampled)),
    }
    if more:
        report = isobit.integrations.vllm.report()
        print(report)
        assert not report.passed and set(report.calls) == {
            "isobit.attention", "isobit.det_linear", "isobit.rms_norm", "isobit.rope",
            "isobit.swiglu",
        }  # fmt: skip
        counts |= controls(llm, given, trainer)
    del llm
    gc.collect()
    say(os.path.basename(folder), counts)
    for name, count in counts.items():
        assert (count > 0) == name.startswith("control"), (name, count)
    return greedy


def controls(llm, given, trainer):
    """With the rounding of a fused kernel in one function."""
    ours, counts = layers.swiglu, {}

    def fused(gate, up):
        return ours(gate.float(), up.float()).to(gate.dtype)

    layers.swiglu = fused
    try:
        rows = rollout(llm, given)
        counts["control: SwiGLU that rounds once"] = different(rows, trained(trainer, given, rows))
    finally:
        layers.swiglu = ours
    return counts


def main():
    the_plugin_is_inert()
    folder, given = tempfile.mkdtemp(), prompts()
    qwen = saved("Qwen3", folder, tie_word_embeddings=False)
    with isobit.integrations.vllm.enable():
        greedy = one_family(qwen, given, more=True)
        for family, options in (
            ("Llama", {}),
            ("Qwen2", {"num_attention_heads": 1, "tie_word_embeddings": True}),
        ):
            one_family(saved(family, folder, **options), given)

        llm = engine(qwen, max_num_batched_tokens=16, enable_chunked_prefill=True, enable_prefix_caching=True)
        cold, warm = rollout(llm, given), rollout(llm, given)
        assert different(cold, greedy) == different(warm, greedy) == 0
        del llm
        gc.collect()
        say("chunks of 16 tokens, and a cold and a warm prefix cache: the same bits")

        refused("enforce_eager=True", folder=qwen, enforce_eager=False)
        refused("float32", folder=qwen, dtype="float32")
        gemma = saved("Gemma", folder)
        refused("GemmaForCausalLM", "GeluAndMul", "GemmaRMSNorm", folder=gemma)

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        llm = engine(qwen)
        assert different(rollout(llm, given), greedy) == 0
        (theirs,) = llm.collective_rpc(isobit.integrations.vllm.report)
        assert theirs.calls["isobit.attention"] > 0 and theirs.variables[switch.VARIABLE] == "1"
        say("a worker in another process has loaded the plugin: the same bits")
        del llm
    assert switch.VARIABLE not in os.environ and isobit.integrations.vllm.report() is None
    say("isobit in vLLM: all passed")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's own threads may wait at the end
