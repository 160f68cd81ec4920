"""The two backends of a small op: its Triton kernels, and a model in numpy for CPU tensors."""

from typing import Any

import torch

from isobit.frame.device import triton_cannot_run


def triton_and_model(on_a_gpu: str, on_a_cpu: str, first: str) -> tuple[dict[str, Any], ...]:
    """What both declare besides their functions: of `triton`, and of `model`, whose classes these are. In the
    interpreter the kernels have that of the model. `first` names a tensor among the arguments."""

    def here(device: torch.device) -> str:
        return on_a_cpu if device.type in ("cpu", "meta") else on_a_gpu

    def not_on_the_cpu(args: dict[str, Any]) -> str | None:
        if args[first].device.type == "cpu":
            return None
        return "it computes on the CPU, thousands of times slower: select it by name to compare"

    triton = {"numerics": here, "cannot_run": triton_cannot_run, "interpreted": True, "launches": True}
    return triton, {"numerics": on_a_cpu, "not_by_default": not_on_the_cpu}
