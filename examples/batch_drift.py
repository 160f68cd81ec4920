"""Do the bits of a linear layer's output depend on how many rows it was given?

    python examples/batch_drift.py

A batch of bf16 rows goes through a layer, y = x W^T. Then its first 1, 2, 4, ... rows alone go through the
same layer. Mathematically nothing changes for them. The table says how many of their outputs have other bits
than in the whole batch: once for `torch.nn.functional.linear`, once for `isobit.det_linear`.

On a GPU the layers have the sizes of real ones, and outputs are bf16. On a CPU they are small, because
`det_linear` computes the exact bits of a Hopper GPU there, and outputs are fp32. What torch does depends on
the machine, the versions and the sizes: it drifts where a library takes another order of sums for the
smaller batch, and a size without drift says nothing about the next. Rounding to bf16 hides most of what
differs before it.
What isobit does is a promise, so the program ends with 1 if it is broken.
"""

import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import isobit

Layer = Callable[[Tensor, Tensor], Tensor]

BF16: dict[str, Layer] = {"F.linear": F.linear, "det_linear": isobit.det_linear}
FP32: dict[str, Layer] = {
    "F.linear": lambda x, weight: F.linear(x.float(), weight.float()),
    "det_linear": lambda x, weight: isobit.det_linear(x, weight, out_dtype=torch.float32),
}


def drift(whole: Tensor, alone: Tensor) -> float:
    """The share of outputs of the first rows whose bits change when only those rows are given."""
    bits = torch.int32 if whole.dtype == torch.float32 else torch.int16
    return (whole[: len(alone)].view(bits) != alone.view(bits)).double().mean().item()


def main() -> int:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    batch, sizes, layers, out = 1024, [(4096, 4096), (14336, 4096), (7168, 2048)], BF16, "bf16"
    if device.type == "cpu":
        batch, sizes, layers, out = 64, [(256, 128), (1024, 256), (4096, 64)], FP32, "fp32"
        warnings.filterwarnings("ignore", message="isobit: det_gemm")  # that it is slow here is known
    torch.manual_seed(0)
    drifted = dict.fromkeys(layers, 0)

    print(f"torch {torch.__version__}, {device.type}, {out} outputs with other bits than in {batch} rows")
    print(f"\n{'layer (in, out)':>15s} {'rows':>6s}" + "".join(f"{name:>13s}" for name in layers))
    for features_in, features_out in sizes:
        x = torch.randn(batch, features_in, device=device).bfloat16()
        weight = (torch.randn(features_out, features_in, device=device) / features_in**0.5).bfloat16()
        whole = {name: layer(x, weight) for name, layer in layers.items()}
        for rows in (2**i for i in range(batch.bit_length() - 1)):
            line = f"{f'{features_in}, {features_out}':>15s} {rows:6d}"
            for name, layer in layers.items():
                share = drift(whole[name], layer(x[:rows], weight))
                drifted[name] += share > 0
                line += f"{share:13.3%}"
            print(line)

    print(f"\n{isobit.explain('det_linear', x, weight)}\n")
    for name, times in drifted.items():
        print(
            f"{name}: {f'other bits in {times} of these lines' if times else 'the same bits in every line'}"
        )
    return int(drifted["det_linear"] > 0)


if __name__ == "__main__":
    sys.exit(main())
