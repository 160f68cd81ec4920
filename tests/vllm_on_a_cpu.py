"""vLLM on a CPU, with isobit inside: run by `make engines` in an environment of its own.

Tiny models in bf16 with random weights. What must hold:
- names and signatures of this vLLM are those of `golden/vllm_names.json`, which the tests compare isobit with
- the plugin is found by its entry point, and does nothing until isobit is enabled, VLLM_PLUGINS or not
- every module is served, and no call is left to vLLM
- log-probabilities have the same bits in a batch and alone, with prompts in one piece and in chunks, with a
  cold and a warm prefix cache, when requests arrive one after another, and when they are preempted
- they have the bits of a transformers model under `zero_drift`, one forward of one row: of generated tokens
  at the temperature of their request, whatever top-k, top-p and penalties are, and of prompts; also after
  each of three optimizer steps whose weights were copied, copied to new addresses, or reloaded
- so have models with experts, one of each kind that is served; with weights of a token in another dtype they
  do not
- with the rounding of a fused kernel they do not: the comparison can fail
- workers in other processes load the plugin, and have the same bits
- with rounding="vllm" on both sides they have them too, and with it on one side they do not
- a trainer with layers of class tree8 has them too, if the engine was given its map of classes
- an engine that is made before `enable` or after `disable` in the same process has vLLM's own attention, and
  an engine says of each of its workers, in its own process or another, whether isobit computes in it
- engines that cannot have these bits are refused, with the reason
"""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch

import isobit
import vllm_names
import vllm_rollouts as vr
from isobit.integrations.vllm import VLLMError, experts, layers, switch
from vllm_rollouts import say

VOCABULARY, NEW = 300, 6
LENGTHS = (5, 17, 40, 9, 23)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128,
    "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
LLAMA_3_1 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
OF_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {
    "Qwen3Moe": EIGHT | {"moe_intermediate_size": 32, "norm_topk_prob": True, "tie_word_embeddings": False},
    "Qwen2Moe": EIGHT | {
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_attention_heads": 1,
        "use_sliding_window": False,
    },
    "Olmoe": EIGHT | {"num_attention_heads": 1},
    "Mixtral": OF_MIXTRAL,
    "GptOss": OF_MIXTRAL | {"sliding_window": 16},
}  # fmt: skip


def saved(family, folder, **options):
    return vr.saved(family, folder, **SIZES | options)


def engine(folder, **options):
    defaults = {"max_num_batched_tokens": 128, "max_model_len": 64, "max_num_seqs": 8, "block_size": 32}
    return vr.engine(folder, **defaults | options)


def logps(model, ids, temperature):
    """By the definition of `linear_logp`: on a CPU that one multiplies by torch, in no fixed order."""
    hidden = model.model(ids).last_hidden_state[:, :-1]
    logits = isobit.det_linear(hidden, model.lm_head.weight, out_dtype=torch.float32)
    return isobit.logp(logits, ids[:, 1:], temperature=temperature)


def rounded_logps(model, ids, temperature):
    """By the definition of `linear_logp` with logits_dtype of bf16."""
    logits = isobit.det_linear(model.model(ids).last_hidden_state[:, :-1], model.lm_head.weight)
    return isobit.logp(logits, ids[:, 1:], temperature=temperature)


def different(a, b):
    count, total = vr.different(a, b)
    assert total == len(LENGTHS) * NEW
    return count


def refused(*words, folder, **options):
    try:
        engine(folder, **options)
    except VLLMError as error:
        assert all(word in str(error) for word in words), error
        say("refused:", str(error)[:150])
    else:
        raise AssertionError(f"{options} is not refused")


def names_are_those_of_the_file():
    source = vllm_names.Source(Path(find_spec("vllm").origin).parents[1])
    changed = vllm_names.changed(source)
    assert not changed, "\n".join(changed)
    say(f"the names of vLLM {source.version} are those of {vllm_names.FILE.name}")


def the_plugin_is_inert():
    from vllm.plugins import load_plugins_by_group

    os.environ["VLLM_PLUGINS"] = "isobit"
    plugins = load_plugins_by_group("vllm.general_plugins")
    assert list(plugins) == ["isobit"], plugins
    plugins["isobit"]()
    assert switch.SWITCH.patch is None and isobit.integrations.vllm.report().off
    del os.environ["VLLM_PLUGINS"]
    say("the plugin is found, and inert")


def attention_of(llm):
    """Where the classes of its layers of attention are from."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    (place,) = {type(m.impl).__module__ for m in model.modules() if hasattr(m, "impl")}
    return place


def a_plain_engine(folder):
    llm = engine(folder)
    assert attention_of(llm) == "vllm.v1.attention.backends.cpu_attn", attention_of(llm)
    try:
        isobit.integrations.vllm.reports(llm)
    except VLLMError as error:
        say("a plain engine:", str(error)[:120])
    else:
        raise AssertionError("a plain engine reports that it is served")
    del llm
    vr.free()


def with_classes(folder, given):
    """Of a trainer with layers of class tree8, and an engine with its map, and one without."""
    numerics, counts = {"*.down_proj": "tree8", "*.[qkv]_proj": "tree8"}, {}
    model = vr.model_of(folder)
    with isobit.integrations.hf.zero_drift(model, numerics=numerics) as on:
        for name, classes in (("tree8", on.classes), ("control: chain16", None)):
            with isobit.integrations.vllm.enable(numerics=classes):
                llm = engine(folder)
                rows = vr.rollout(llm, given)
                counts[name] = different(rows, vr.trained(model, given, rows, logps))
                assert attention_of(llm) == "isobit.integrations.vllm.cpu_attention"
                isobit.integrations.vllm.reports(llm)
                del llm
                vr.free()
    say("a map of classes:", counts)
    assert counts["tree8"] == 0 < counts["control: chain16"], counts


def with_roundings(folder, given):
    """Of trainers and engines that round where transformers does, or where vLLM's kernels do."""
    model, roundings, counts = vr.model_of(folder), ("hf", "vllm"), {}
    for there in roundings:
        with isobit.integrations.vllm.enable(rounding=there):
            llm = engine(folder)
            rows = vr.rollout(llm, given)
            (report,) = isobit.integrations.vllm.reports(llm)
            assert f"rounding={there!r}" in report.rounding, report
            del llm
            vr.free()
        for here in roundings:
            with isobit.integrations.hf.zero_drift(model, rounding=here):
                counts[here, there] = different(rows, vr.trained(model, given, rows, logps))
    say("roundings of trainer and engine:", counts)
    assert all((count == 0) == (here == there) for (here, there), count in counts.items()), counts


def one_family(folder, given, more=False):
    """Rollouts of one engine against the trainer, and with `more` all the rest."""
    trainer = vr.trainer_of(folder)
    llm = engine(folder)
    greedy, sampled = vr.rollout(llm, given), vr.rollout(llm, given, 0.7)
    alone = [vr.rollout(llm, [p])[0] for p in given]
    wanted = vr.trained(trainer, given, sampled, logps, 0.7)
    counts = {
        "batch against alone": different(greedy, alone),
        "greedy against the trainer": different(greedy, vr.trained(trainer, given, greedy, logps)),
        "sampled against the trainer": different(sampled, wanted),
    }
    assert vr.furthest(wanted, vr.trained(trainer, given, sampled, vr.token_logps, 0.7)) < 1e-4
    if more:
        report = isobit.integrations.vllm.report()
        print(report)
        assert not report.passed and set(report.calls) == {
            "isobit.attention", "isobit.det_linear", "isobit.rms_norm", "isobit.rope", "isobit.swiglu",
            "isobit.logp",
        }  # fmt: skip
        counts |= requests(llm, given, trainer) | controls(llm, given, trainer)
        for name, rows, wanted in vr.optimizer_steps(llm, given, trainer, folder, logps, NEW, lr=0.01):
            counts[name] = different(rows, wanted)
    del llm
    vr.free()
    say(os.path.basename(folder), counts)
    for name, count in counts.items():
        assert (count > 0) == name.startswith("control"), (name, count)
    return greedy


def with_experts(folder, given):
    for family, options in EXPERTS.items():
        one_family(saved(family, folder, **options), given)
    kinds = {key: kind for key, kind in experts.BLOCKS.items() if key[1] == "Qwen3MoeSparseMoeBlock"}
    wide = {key: kind._replace(narrow=False) for key, kind in kinds.items()}
    qwen = os.path.join(folder, "Qwen3Moe")
    with mock.patch.dict(experts.BLOCKS, wide):
        llm = engine(qwen)
    rows = vr.rollout(llm, given)
    count = different(rows, vr.trained(vr.trainer_of(qwen), given, rows, logps))
    assert wide and count, "a control without a difference"
    say("control: weights of a token in fp32,", count)
    del llm
    vr.free()


def requests(llm, given, trainer):
    """Of several temperatures, with filters and penalties, with several log-probabilities, and of prompts."""
    counts, mixed = {}, [0.0, 0.7, 1.0, 0.7, 1.3]
    rows = vr.rollout(llm, given, mixed)
    counts["several temperatures"] = different(rows, vr.trained(trainer, given, rows, logps, mixed))
    filters = {"top_k": 5, "top_p": 0.8, "repetition_penalty": 1.2}
    rows = vr.rollout(llm, given, 0.7, **filters)
    counts["filters and a penalty"] = different(rows, vr.trained(trainer, given, rows, logps, 0.7))
    found = vr.outputs(llm, given, mixed, logprobs=3, prompt_logprobs=2)
    rows = [vr.row_of(output) for output in found]
    counts["the most probable"] = different(rows, vr.trained(trainer, given, rows, logps, mixed))
    for output in found:
        for tokens in output.outputs[0].logprobs:
            most = sorted((of.rank, -of.logprob) for of in tokens.values() if of.rank <= 3)
            assert len(most) == 3 and most == sorted(most, key=lambda of: of[1])
    starts = [(p[:1], (p[1:], [of[t].logprob for of, t in zip(o.prompt_logprobs[1:], p[1:], strict=True)]))
              for p, o in zip(given, found, strict=True)]  # fmt: skip
    rows = [row for _, row in starts]
    wanted = vr.trained(trainer, [start for start, _ in starts], rows, logps)
    counts["prompts"] = vr.different(rows, wanted)[0]
    return counts


def controls(llm, given, trainer):
    """With the rounding of a fused kernel in one function."""
    ours, counts = layers.swiglu, {}

    def fused(gate, up):
        return ours(gate.float(), up.float()).to(gate.dtype)

    layers.swiglu = fused
    try:
        rows = vr.rollout(llm, given)
        counts["control: SwiGLU that rounds once"] = different(rows, vr.trained(trainer, given, rows, logps))
    finally:
        layers.swiglu = ours
    return counts


def main():
    names_are_those_of_the_file()
    the_plugin_is_inert()
    folder, given = tempfile.mkdtemp(), vr.prompts(LENGTHS, VOCABULARY)
    first = saved("Qwen3", folder, tie_word_embeddings=False)
    a_plain_engine(first)
    with_classes(first, given)
    with_roundings(first, given)
    a_plain_engine(first)
    with isobit.integrations.vllm.enable():
        one_family(saved("Qwen3", folder, tie_word_embeddings=False), given, more=True)
        for family, options in (
            ("Llama", {"rope_parameters": LLAMA_3_1}),
            ("Qwen2", {"num_attention_heads": 1, "tie_word_embeddings": True}),
            ("Mistral", {"sliding_window": 16}),
        ):
            one_family(saved(family, folder, **options), given)
        with_experts(folder, given)

        qwen = saved("Qwen3", folder, tie_word_embeddings=False)
        llm = engine(qwen, max_num_batched_tokens=16, enable_chunked_prefill=True, enable_prefix_caching=True)
        cold, warm = vr.rollout(llm, given), vr.rollout(llm, given)
        trainer = vr.trainer_of(qwen)
        greedy = vr.trained(trainer, given, cold, logps)
        assert different(cold, greedy) == different(warm, greedy) == 0
        assert different(vr.arriving(llm, given, 3, NEW), greedy) == 0
        del llm
        vr.free()
        say("chunks of 16 tokens, a cold and a warm prefix cache, one request after another: the same bits")

        llm = engine(qwen, num_gpu_blocks_override=7, logprobs_mode="processed_logprobs")  # TRL's mode
        preempted, rows = vr.preemptions(llm), vr.rollout(llm, given, 0.7, new=20)
        assert vr.different(rows, vr.trained(trainer, given, rows, logps, 0.7)) == (0, 100) and preempted
        del llm
        vr.free()
        say(f"{len(preempted)} preemptions: the same bits")

        llm = engine(qwen, enforce_eager=False)
        assert different(vr.rollout(llm, given), greedy) == 0
        report = isobit.integrations.vllm.report()
        assert report.uncounted == ["compiled code"], report.uncounted
        del llm
        vr.free()
        say("compiled by inductor: the same bits")

        refused("float32", "pass dtype='bfloat16'", folder=qwen, dtype="float32")
        refused("logprobs_mode='raw_logits'", folder=qwen, logprobs_mode="raw_logits")
        gemma = saved("Gemma", folder)
        refused("GemmaForCausalLM", "GeluAndMul", "GemmaRMSNorm", folder=gemma)

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"
        llm = engine(qwen)
        assert different(vr.rollout(llm, given), greedy) == 0
        (theirs,) = isobit.integrations.vllm.reports(llm)
        assert theirs.calls["isobit.attention"] > 0 and theirs.variables[switch.VARIABLE] == "1"
        assert theirs.runner == "V1, since V2 is served on GPUs alone"
        say("a worker in another process has loaded the plugin: the same bits")
        del llm
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    with isobit.integrations.vllm.enable(logprobs="log_softmax"):
        llm = engine(qwen)
        rows = vr.rollout(llm, given, 0.7)
        assert different(rows, vr.trained(trainer, given, rows, vr.log_softmax)) == 0
        say("logprobs='log_softmax': the bits of the model's own logits")
        del llm
        vr.free()
    with isobit.integrations.vllm.enable(logits_dtype=torch.bfloat16):
        llm = engine(qwen)
        rows = vr.rollout(llm, given, 0.7)
        assert different(rows, vr.trained(trainer, given, rows, rounded_logps, 0.7)) == 0
        assert different(rows, vr.trained(trainer, given, rows, logps, 0.7)) > 0
        say("logits_dtype=bf16: the bits of linear_logp with it")
        del llm
    assert switch.VARIABLE not in os.environ and isobit.integrations.vllm.report().off
    say("isobit in vLLM: all passed")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's own threads may wait at the end
