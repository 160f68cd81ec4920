"""Where a model rounds to 16 bits: trainer and engine must do so in the same places.

    part                   "hf": transformers        "vllm": vLLM's CUDA kernels
    RMSNorm                as the model's module     once, after the weight
    sum with a residual    before the norm           before the norm
    rotary embedding       both products, their sum  once, the sum
    SwiGLU                 silu, then the product    silu, then the product

The kernels are those of vLLM 0.26.0 and 0.32.0 (layernorm_kernels.cu, pos_encoding_kernels.cu and
activation_kernels.cu), which round alike. An engine calls them with `enforce_eager=True`. One that compiles
takes vLLM's text in PyTorch instead, and a compiler decides what is rounded: that is no set of roundings
which a trainer could have.
"""

from typing import Literal

Rounding = Literal["hf", "vllm"]

ROUNDINGS: tuple[Rounding, ...] = ("hf", "vllm")

#: Models with which both were compared, trainer and engine: all that is rounded in them is in the table.
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

#: For reports.
AS = {"hf": "as transformers does", "vllm": "as vLLM's CUDA kernels do"}


def cast_of(rounding: str, own: Literal["before", "after"]) -> Literal["before", "after"]:
    """`cast` of `isobit.rms_norm` for a norm that transformers computes with `own`."""
    return "after" if rounding == "vllm" else own
