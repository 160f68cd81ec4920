"""What differs between decoding and training in a small Llama, where it begins, and that isobit removes it.

    python examples/measure_drift.py

The weights are random. `isobit.drift.measure` compares tokens that are decoded from a cache, or in a padded
row, with one forward of their sequence: once with plain PyTorch, once under `zero_drift`. The program ends
with 1 if bits differ under `zero_drift`. It needs transformers.
"""

import sys
import warnings

import torch
import transformers

import isobit


def main() -> int:
    warnings.filterwarnings("ignore", message="isobit: det_gemm")  # that it is slow on a CPU is known
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1,
        initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16().to(device)
    prompts = list(torch.randint(200, (112,)).split([64, 48]))
    axes = ["padding", "decode"]

    print("plain PyTorch\n")
    print(isobit.drift.measure(model, prompts, vs=axes, random_weights=True))
    with isobit.integrations.hf.zero_drift(model):
        print("\n\nunder zero_drift\n")
        after = isobit.drift.measure(model, prompts, vs=axes, random_weights=True)
        print(after)
    return int(after.differ > 0)


if __name__ == "__main__":
    sys.exit(main())
