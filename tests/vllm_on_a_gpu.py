"""vLLM on a Hopper GPU, with isobit inside, against trainers under `zero_drift`: log-probabilities in bits.

    python tests/vllm_on_a_gpu.py [--json FILE] [--seconds 190] [stage ...]

Models of the width of Qwen 3 0.6B with random weights; 64 requests of 7 to 535 prompt tokens, 32 new tokens.
A line for each case, and JSON at the end. A case that fails does not stop the next one; stages that would
begin after the time limit are left out, and named.

rollouts     eager: greedy, sampled, several temperatures, filters, prompts; in a batch, alone, one by one
graphs       CUDA graphs of decoding, without compilation; new weights in place
pieces       prompts in chunks, a cold and a warm prefix cache, a cache so small that requests are preempted
llama        rotary embeddings of Llama 3.1
mistral      a window
qwen2        biases, and a head that is the embedding
experts      Qwen3-MoE, Mixtral, OLMoE; Qwen3-MoE with graphs, compiled, and without isobit: a control
qwen2_moe    a shared expert; with graphs, compiled, and without isobit: a control
gpt_oss      sinks, a window in every other layer, YaRN, biases of experts; in the same ways
steps        three optimizer steps, whose weights are copied, copied to new addresses, and reloaded
roundings    those of vLLM on both sides, eager, with graphs, compiled; on one side: a control
log_softmax  log-probabilities of rounded logits, enable(logprobs="log_softmax")
compiled     vLLM's default: compiled pieces, and graphs of them
plain        vLLM without isobit, after all of these: a control that must differ
sleep        sleep level 1 and 2; needs vLLM's cumem allocator
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time

import torch

import isobit
import vllm_rollouts as vr
from isobit.integrations.vllm import layers
from vllm_rollouts import say, token_logps, trained

DEVICE, NEW, VOCABULARY = "cuda", 32, 32000
LENGTHS = [(7, 64, 131, 16, 300, 33, 512, 90)[i % 8] + i % 24 for i in range(64)]
WIDTH = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "initializer_range": 0.04,
    "tie_word_embeddings": False, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
LLAMA_3_1 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
ENGINE = {
    "max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 16384, "block_size": 64,
    "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.2,
}  # fmt: skip
#: Pages of 16 tokens for the stage that has too few of them: the longest request needs 36, all need 800.
PAGES = 250

EXPERTS = {
    "Qwen3Moe": {
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True
    },
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "Olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 512, "head_dim": 64},
    "Qwen2Moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 1024, "head_dim": 64,
    },
    "GptOss": {  # sinks, YaRN, and a window in one of two layers that is shorter than most prompts
        "num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 512, "head_dim": 64,
        "sliding_window": 128,
    },
}  # fmt: skip

GRAPHS = "FULL_DECODE_ONLY"

CASES, FOLDER = vr.Cases(), tempfile.mkdtemp()


def saved(family, number_of_layers, **options):
    name = os.path.join(FOLDER, f"{family}-{number_of_layers}")
    if os.path.exists(name):
        return os.path.join(name, family)
    sizes = WIDTH | {"num_hidden_layers": number_of_layers} | options
    return vr.saved(family, name, DEVICE, **sizes)


def engine(folder, **options):
    start = time.time()
    llm = vr.engine(folder, **ENGINE | options)
    say(f"an engine after {time.time() - start:.0f} s")
    return llm


def prompts():
    return vr.prompts(LENGTHS, VOCABULARY)


def logps_of_hidden(model, ids, temperature):
    """`linear_logp` of the trainer's hidden states."""
    hidden = model.model(ids).last_hidden_state[:, :-1]
    return isobit.linear_logp(hidden, model.lm_head.weight, ids[:, 1:], temperature=temperature)


# Stages


def rollouts():
    given, folder = prompts(), saved("Qwen3", 8)
    llm, trainer = engine(folder), vr.trainer_of(folder, DEVICE)
    vr.rollout(llm, given[:2], new=4)
    say("the first tokens")
    start = time.time()
    greedy = vr.rollout(llm, given, new=NEW)
    say(f"{len(given)} requests with compilation: {time.time() - start:.1f} s")
    with CASES.attempt("greedy"):
        CASES.same("greedy", greedy, trained(trainer, given, greedy, token_logps))
    with CASES.attempt("sampled at 0.7"):
        rows = vr.rollout(llm, given, 0.7, NEW)
        CASES.same("sampled at 0.7", rows, trained(trainer, given, rows, token_logps, 0.7))
        rows, some = rows[:16], given[:16]
        CASES.same("sampled at 0.7, hidden", rows, trained(trainer, some, rows, logps_of_hidden, 0.7))
        wanted = trained(trainer, some, rows, token_logps)
        CASES.same("control: another temperature", rows, wanted, control=True)
    with CASES.attempt("several temperatures"):
        each = [(0.0, 0.7, 1.0, 1.3)[i % 4] for i in range(len(given))]
        rows = vr.rollout(llm, given, each, NEW)
        CASES.same("several temperatures", rows, trained(trainer, given, rows, token_logps, each))
    with CASES.attempt("filters and a penalty"):
        some = given[:24]
        rows = vr.rollout(llm, some, 1.0, NEW, top_k=20, top_p=0.9, repetition_penalty=1.1)
        CASES.same("filters and a penalty", rows, trained(trainer, some, rows, token_logps, 1.0))
    with CASES.attempt("alone"):
        alone = [vr.rollout(llm, [p], new=NEW)[0] for p in given[:6]]
        CASES.same("alone against 64", alone, greedy[:6])
    with CASES.attempt("in reverse order"):
        CASES.same("in reverse order", vr.rollout(llm, given[::-1], new=NEW)[::-1], greedy)
    with CASES.attempt("arriving one by one"):
        CASES.same("arriving one by one", vr.arriving(llm, given[:24], 3, NEW), greedy[:24])
    with CASES.attempt("the most probable, and prompts"):
        some = vr.outputs(llm, given[:16], 0.7, 4, logprobs=3, prompt_logprobs=0)
        rows = [vr.row_of(output) for output in some]
        CASES.same("the most probable", rows, trained(trainer, given[:16], rows, token_logps, 0.7))
        of_prompts = [
            (p[1:], [of[t].logprob for of, t in zip(o.prompt_logprobs[1:], p[1:], strict=True)])
            for p, o in zip(given, some, strict=False)
        ]
        wanted = trained(trainer, [p[:1] for p in given[:16]], of_prompts, token_logps)
        CASES.same("prompts", of_prompts, wanted)
    with CASES.attempt("control: SwiGLU that rounds once"):
        ours = layers.swiglu
        layers.swiglu = lambda gate, up: ours(gate.float(), up.float()).to(gate.dtype)
        try:
            rows = vr.rollout(llm, given[:8], new=4)
        finally:
            layers.swiglu = ours
        wanted = trained(trainer, given[:8], rows, token_logps)
        CASES.same("control: SwiGLU that rounds once", rows, wanted, control=True)
    vr.rollout(llm, given, new=NEW)
    start = time.time()
    vr.rollout(llm, given, new=NEW)
    say(f"{len(given) * NEW / (time.time() - start):.0f} tokens/s, eager, with log-probs")
    print(isobit.integrations.vllm.report())


def graphs():
    """Batches of 64, 21 and 1, so that graphs of several sizes are replayed, with padding."""
    given, folder = prompts(), saved("Qwen3", 8)
    llm = engine(folder, enforce_eager=False, compilation_config={"mode": 0, "cudagraph_mode": GRAPHS})
    trainer = vr.trainer_of(folder, DEVICE)
    for count, temperature in ((64, 0.0), (21, 0.7), (1, 0.7)):
        with CASES.attempt(f"graphs, {count} requests"):
            rows = vr.rollout(llm, given[:count], temperature, NEW)
            wanted = trained(trainer, given[:count], rows, token_logps, temperature)
            CASES.same(f"graphs, {count} requests at {temperature}", rows, wanted)
    with CASES.attempt("graphs, new weights"):
        for parameter in trainer.parameters():
            parameter.data.mul_(1.01)
        vr.load(llm, trainer)
        rows = vr.rollout(llm, given[:21], 0.7, NEW)
        CASES.same("graphs, new weights", rows, trained(trainer, given[:21], rows, token_logps, 0.7))
    start = time.time()
    vr.rollout(llm, given, new=NEW)
    say(f"{len(given) * NEW / (time.time() - start):.0f} tokens/s, graphs, with log-probs")


def compiled():
    given, folder = prompts()[:21], saved("Qwen3", 2)
    llm, trainer = engine(folder, enforce_eager=False), vr.trainer_of(folder, DEVICE)
    rows = vr.rollout(llm, given, 0.7, NEW)
    CASES.same("compiled", rows, trained(trainer, given, rows, token_logps, 0.7))
    print(isobit.integrations.vllm.report())


def pieces():
    given, folder = prompts(), saved("Qwen3", 8)
    trainer = vr.trainer_of(folder, DEVICE)
    llm = engine(
        folder, max_num_batched_tokens=256, enable_chunked_prefill=True, enable_prefix_caching=True,
        block_size=16, num_gpu_blocks_override=PAGES,
    )  # fmt: skip
    preempted = vr.preemptions(llm)
    for name, some in (("cold", given[:12]), ("warm", given[:12]), ("with preemption", given)):
        with CASES.attempt(name):
            rows = vr.rollout(llm, some, 0.7, NEW)
            CASES.same(f"chunks of 256, {name}", rows, trained(trainer, some, rows, token_logps, 0.7))
    count = -1 if preempted is None else len(preempted)
    CASES.record("requests were preempted", count > 0, f"{count} times", count=count)


def a_family(family, **options):
    given, folder = prompts()[:24], saved(family, 2, **options)
    llm, trainer = engine(folder), vr.trainer_of(folder, DEVICE)
    for temperature in (0.0, 0.7):
        with CASES.attempt(f"{family} at {temperature}"):
            rows = vr.rollout(llm, given, temperature, NEW)
            wanted = trained(trainer, given, rows, token_logps, temperature)
            CASES.same(f"{family} at {temperature}", rows, wanted)


def experts(*families):
    """The first of these also with graphs, compiled, and without isobit."""
    for family in families:
        a_family(family, **EXPERTS[family])
    family, given = families[0], prompts()[:24]
    folder = saved(family, 2, **EXPERTS[family])
    trainer = vr.trainer_of(folder, DEVICE)
    graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": GRAPHS}}
    for name, settings in (("graphs", graphs), ("compiled", {})):
        with CASES.attempt(f"{family}, {name}"):
            llm = engine(folder, enforce_eager=False, **settings)
            for count in (24, 1):
                rows = vr.rollout(llm, given[:count], 0.7, NEW)
                wanted = trained(trainer, given[:count], rows, token_logps, 0.7)
                CASES.same(f"{family}, {name}, {count} requests", rows, wanted)
            print(isobit.integrations.vllm.report())
            del llm
            vr.free()
    isobit.integrations.vllm.disable()
    try:
        with CASES.attempt(f"control: {family} without isobit"):
            rows = vr.rollout(engine(folder), given, 0.0, NEW)
            wanted = trained(trainer, given, rows, token_logps)
            CASES.same(f"control: {family} without isobit", rows, wanted, control=True)
    finally:
        isobit.integrations.vllm.enable()


def steps():
    given, folder = prompts()[:8], saved("Qwen3", 2)
    llm, trainer = engine(folder), vr.trainer_of(folder, DEVICE)
    for name, rows, wanted in vr.optimizer_steps(llm, given, trainer, folder, token_logps, NEW, lr=1e-3):
        CASES.same(name, rows, wanted, control=name.startswith("control"))


def roundings():
    """The roundings of vLLM's own kernels on both sides; on one side alone: a control."""
    isobit.integrations.vllm.disable()
    graphs = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": GRAPHS}}
    runs = [
        ("Qwen3", "eager", {}),
        ("Qwen3", "graphs", graphs),
        ("Qwen3", "compiled", {"enforce_eager": False}),
    ]
    for family, how, settings in (*runs, ("Llama", "eager", {})):
        given, folder, name = prompts()[:24], saved(family, 2), f"roundings of vLLM, {family}, {how}"
        with CASES.attempt(name), isobit.integrations.vllm.enable(rounding="vllm"):
            rows, model = vr.rollout(engine(folder, **settings), given, 0.7, NEW), vr.model_of(folder, DEVICE)
            with isobit.integrations.hf.zero_drift(model, rounding="vllm"):
                CASES.same(name, rows, trained(model, given, rows, token_logps, 0.7))
            with isobit.integrations.hf.zero_drift(model):
                wanted = trained(model, given, rows, token_logps, 0.7)
                CASES.same(f"control: {name}, and others in the trainer", rows, wanted, control=True)
        vr.free()
    isobit.integrations.vllm.enable()


def log_softmax():
    given, folder = prompts()[:24], saved("Llama", 2, rope_parameters=LLAMA_3_1)
    isobit.integrations.vllm.disable()
    with isobit.integrations.vllm.enable(logprobs="log_softmax"):
        llm, trainer = engine(folder), vr.trainer_of(folder, DEVICE)
        rows = vr.rollout(llm, given, 0.7, NEW)
        CASES.same("log_softmax", rows, trained(trainer, given, rows, vr.log_softmax))
    isobit.integrations.vllm.enable()


def plain():
    given, folder = prompts()[:24], saved("Llama", 2, rope_parameters=LLAMA_3_1)
    isobit.integrations.vllm.disable()
    try:
        llm, trainer = engine(folder), vr.trainer_of(folder, DEVICE)
        rows = vr.rollout(llm, given, 0.0, NEW)
        wanted = trained(trainer, given, rows, token_logps)
        CASES.same("control: vLLM without isobit", rows, wanted, control=True)
    finally:
        isobit.integrations.vllm.enable()


def sleep():
    given, folder = prompts()[:8], saved("Mistral", 2, sliding_window=128)
    llm, trainer = engine(folder, enable_sleep_mode=True), vr.trainer_of(folder, DEVICE)
    vr.rollout(llm, given, 0.7, NEW)
    for level, way in ((1, "copied"), (2, "copied"), (2, "reloaded")):  # level 2 drops the weights
        with CASES.attempt(f"sleep level {level}, weights {way}"):
            llm.sleep(level)
            llm.wake_up(tags=["weights"])
            for parameter in trainer.parameters():
                parameter.data.mul_(1.01)
            if way == "reloaded":
                trainer.save_pretrained(folder)
                llm.collective_rpc("reload_weights")
            else:
                vr.load(llm, trainer)
            llm.wake_up(tags=["kv_cache"])
            rows = vr.rollout(llm, given, 0.7, NEW)
            wanted = trained(trainer, given, rows, token_logps, 0.7)
            CASES.same(f"after sleep level {level}, weights {way}", rows, wanted)


STAGES = {
    "rollouts": rollouts,
    "graphs": graphs,
    "pieces": pieces,
    "llama": lambda: a_family("Llama", rope_parameters=LLAMA_3_1),
    "mistral": lambda: a_family("Mistral", sliding_window=128),
    "qwen2": lambda: a_family("Qwen2", num_attention_heads=8, tie_word_embeddings=True),
    "experts": lambda: experts("Qwen3Moe", "Mixtral", "Olmoe"),
    "qwen2_moe": lambda: experts("Qwen2Moe"),
    "gpt_oss": lambda: experts("GptOss"),
    "steps": steps,
    "roundings": roundings,
    "log_softmax": log_softmax,
    "compiled": compiled,
    "plain": plain,
    "sleep": sleep,
}


def forget_groups():
    """vLLM makes its groups of processes with the first engine, and one for experts only if that has some."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def report(options, versions, left_out):
    """Print what was found, and write it if that is wanted; returns the exit status."""
    text = {
        "versions": versions, "passed": CASES.passed and not left_out, "left_out": left_out,
        "seconds": round(vr.seconds()), "cases": CASES.all,
    }  # fmt: skip
    print(json.dumps(text), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(text, file, indent=1)
    failed = [case["name"] for case in CASES.all if not case["ok"]]
    say(f"{len(CASES.all)} cases, failed: {failed or 'none'}, left out: {left_out or 'none'}")
    return 0 if text["passed"] else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the cases to this file")
    parser.add_argument("--seconds", type=float, default=190.0, help="begin no stage after this time")
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; all by default")
    options = parser.parse_args()
    versions = {"isobit": isobit.__version__, "torch": torch.__version__}
    isobit.integrations.vllm.enable()
    versions["vllm"] = sys.modules["vllm"].__version__
    say("imported", versions)
    waiting = list(options.stages or STAGES)

    def too_long():
        say("a stage does not end")
        os._exit(report(options, versions, waiting))

    watch = threading.Timer(options.seconds + 60, too_long)
    watch.daemon = True
    watch.start()
    while waiting and vr.seconds() < options.seconds:
        say(f"-- {waiting[0]}")
        with CASES.attempt(f"stage {waiting[0]}"):
            STAGES[waiting[0]]()
        waiting.pop(0)
        vr.free()
        with CASES.attempt("vLLM's groups of processes end"):
            forget_groups()
    watch.cancel()
    return report(options, versions, waiting)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's own threads may wait at the end
