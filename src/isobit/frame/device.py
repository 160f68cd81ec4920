"""Properties of a device, and which kernels can run there, with a reason if they cannot. Nothing is probed at
import."""

import re
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
def launches_early(device: torch.device) -> bool:
    """Whether a kernel can start before the kernel that it depends on has finished: NVIDIA's programmatic
    dependent launch, from Hopper on."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))


@cache
def arch_key(device: torch.device) -> str:
    """`sm_90`, `gfx942`, `cpu`, ...: the key of tolerance overrides."""
    if device.type != "cuda":
        return device.type
    props = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(props.gcnArchName).split(":")[0]
    return f"sm_{props.major}{props.minor}"


#: The forms of such keys, as errors show them.
FORMS = ("cpu", "sm_90", "gfx942", "and others of these forms")


def arch_named(key: str) -> str:
    """The key as `arch_key` writes it: `sm90` is `sm_90`."""
    return re.sub(r"^sm(?=\d)", "sm_", key)


def is_arch(key: str) -> bool:
    """Whether some device may have this key."""
    return bool(re.fullmatch(r"cpu|xpu|mps|sm_\d{2,3}|gfx[0-9a-f]{3,4}", arch_named(key)))


def default_device() -> torch.device:
    """The accelerator of this machine, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# Which kernels can run


def kernels_are_interpreted() -> bool:
    """Whether Triton interprets kernels that are decorated now. It looks at TRITON_INTERPRET itself."""
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    def probe() -> None: ...

    return isinstance(triton.jit(probe), InterpretedFunction)


@cache
def triton_is_interpreted() -> bool:
    """Whether Triton kernels of this process run in the CPU interpreter."""
    return kernels_are_interpreted()


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
