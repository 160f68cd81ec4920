"""isobit inside vLLM: rollouts with the bits of a trainer under `zero_drift`.

    isobit.integrations.vllm.enable()
    llm = vllm.LLM(model, dtype="bfloat16")
    print(*isobit.integrations.vllm.reports(llm))

An engine that is made after `enable` computes linear layers, the LM head, norms, rotary embeddings, SwiGLU
and attention as a transformers model under `zero_drift` does, with the same roundings:
those of transformers, or with `rounding="vllm"` on both sides those of vLLM's CUDA kernels. A model with a
layer that isobit does not serve is refused when it is loaded. See `versions` for what was run where.

versions    which versions of vLLM, and the names in it that are used
rotary      rotary embeddings, with the frequencies of transformers
experts     layers of experts: the whole block of a model, router included
layers      which modules of a model are served, how, and which are refused
scores      log-probabilities of tokens: those of `isobit.linear_logp`
sampler_v1, sampler_v2   how the samplers of vLLM's two model runners get them
logprobs    which of the two, and whether it can be done
attention   `isobit.attention` on vLLM's pages of keys and values
groups      which requests of a batch one call of attention computes
options     what `enable` is asked for, as a text for worker processes
report      what is done in one process
workers     whether worker processes load isobit, and what they say of it
switch      on, off, and the plugin that worker processes load
"""

from isobit.integrations.vllm.report import VLLMReport
from isobit.integrations.vllm.switch import (
    INSTALL,
    SWITCH,
    disable,
    enable,
    load_plugin,
    report,
)
from isobit.integrations.vllm.versions import VLLMError
from isobit.integrations.vllm.workers import reports

__all__ = [
    "INSTALL",
    "SWITCH",
    "VLLMError",
    "VLLMReport",
    "disable",
    "enable",
    "load_plugin",
    "report",
    "reports",
]
