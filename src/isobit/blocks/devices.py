"""On which devices kernels can run, with a reason if they cannot. Nothing is probed at import."""

from functools import cache

import torch

from isobit.arch import arch_key


@cache
def triton_is_interpreted() -> bool:
    """Whether Triton kernels of this process run in the CPU interpreter."""
    from isobit.blocks.interpreter import INTERPRETED

    return bool(INTERPRETED.value)


def triton_cannot_run(device: torch.device) -> str | None:
    """None when Triton kernels can run on tensors of this device, else the reason."""
    interpreted = triton_is_interpreted()
    if device.type == "cpu":
        if interpreted:
            return None
        return "tensors are on the CPU; Triton runs there only in its interpreter (TRITON_INTERPRET=1)"
    if interpreted:
        return "TRITON_INTERPRET=1 is set, so Triton kernels run on CPU tensors only"
    if device.type not in ("cuda", "xpu"):
        return f"Triton has no backend for {device.type} tensors"
    return None


@cache
def gluon_cannot_import() -> str | None:
    """None when Triton's Gluon, which the Hopper kernels are written in, can be imported, else the reason."""
    from importlib.util import find_spec

    if find_spec("triton") is None or find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon (triton.experimental.gluon), which its kernels are written in"
    return None


def hopper_cannot_run(device: torch.device) -> str | None:
    """None when Hopper kernels can run on tensors of this device, else the reason."""
    if arch_key(device) != "sm_90":
        return f"its kernels need an NVIDIA Hopper GPU (sm_90); the tensors are on {arch_key(device)}"
    return triton_cannot_run(device) or gluon_cannot_import()
