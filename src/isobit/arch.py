"""What a device can do, as functions of a device. Nothing is probed at import."""

from functools import cache

import torch


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU (1 elsewhere). Used to schedule work, never to order a sum."""
    if device.type in ("cpu", "meta"):
        return 1
    props = torch.get_device_module(device.type).get_device_properties(device)
    return int(getattr(props, "multi_processor_count", 0) or getattr(props, "gpu_subslice_count", 1))


@cache
def arch_key(device: torch.device) -> str:
    """`sm_90`, `gfx942`, `cpu`, ...: the key of tolerance overrides."""
    if device.type != "cuda":
        return device.type
    props = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(props.gcnArchName).split(":")[0]
    return f"sm_{props.major}{props.minor}"


def default_device() -> torch.device:
    """The accelerator of this machine, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


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
