"""PyTorch's global state: what somebody's function changed of it, and the state as it was before.

A function that sets the default dtype or seeds the generator changes what its caller computes afterwards.
Here it would also change the reference that it is compared with, and the cases after it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import dtype_name


@dataclass(frozen=True)
class _Part:
    """A part of the state. Without `say` it is a generator, whose values mean nothing to a reader."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    say: Callable[[Any], str] | None = str


def _device() -> torch.device | None:
    """None if no default device is set: then it may be that of a `with torch.device(...)` outside."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "a warning" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _set_deterministic(mode: str) -> None:
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "a warning")


_BACKENDS: Any = torch.backends
#: Owners of `fp32_precision`, the more general first.
_PRECISIONS = (_BACKENDS, _BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul, _BACKENDS.cudnn.conv)


def _precision() -> list[str | None]:
    """By the older interface, which refuses to answer after use of the newer one, and by the newer one."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    return [older, *(owner.fp32_precision for owner in _PRECISIONS)]


def _set_precision(before: list[str | None]) -> None:
    older, *newer = before
    if older is not None:
        torch.set_float32_matmul_precision(older)  # also sets those of products
    for owner, value in zip(_PRECISIONS, newer, strict=True):
        owner.fp32_precision = value


def _say_precision(values: list[str | None]) -> str:
    """Prefers torch.backends.fp32_precision. Once it is set, get_float32_matmul_precision raises or returns a
    stale value."""
    older, general, *others = values
    if general not in (None, "none"):
        return str(general)
    return older or next((value for value in others if value and value != "none"), "none")


_ATTENTION = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "plain": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cuDNN": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
}


def _flag(owner: Any, name: str, words: str) -> _Part:
    return _Part(words, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _autocast(device: str) -> _Part:
    return _Part(
        f"autocast on {device}",
        lambda: torch.is_autocast_enabled(device),
        lambda value: torch.set_autocast_enabled(device, value),
    )


def _gpu_generator() -> Tensor | None:
    """That of the current GPU; None if none is in use yet."""
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


_PARTS = (
    _Part("default dtype", torch.get_default_dtype, torch.set_default_dtype, dtype_name),
    _Part("default device", _device, torch.set_default_device, lambda d: "none" if d is None else str(d)),
    _Part("deterministic mode", _deterministic, _set_deterministic),
    _flag(torch.utils.deterministic, "fill_uninitialized_memory", "filling of uninitialized memory"),
    _Part("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _autocast("cpu"),
    _autocast("cuda"),
    _Part("number of threads", torch.get_num_threads, torch.set_num_threads),
    _Part("float32 precision", _precision, _set_precision, _say_precision),
    _flag(torch.backends.cudnn, "enabled", "use of cuDNN"),
    _flag(torch.backends.cudnn, "benchmark", "cuDNN's benchmark mode"),
    _flag(torch.backends.cudnn, "deterministic", "cuDNN's deterministic mode"),
    *(_Part(f"use of {name} attention", read, write) for name, (read, write) in _ATTENTION.items()),
    _Part("random generator", torch.get_rng_state, torch.set_rng_state, None),
    _Part("random generator of the GPU", _gpu_generator, torch.cuda.set_rng_state, None),
)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(other, Tensor):  # a generator; one that did not exist before has not changed
        return one is None or torch.equal(one, other)
    return bool(one == other)


@contextmanager
def preserved(generators: bool = True) -> Iterator[list[str]]:
    """Inside this context anything may be set. Afterwards everything is as before, and the list says what
    was changed: `default dtype from fp32 to fp64`. Without `generators`, these may go on."""
    parts = [part for part in _PARTS if generators or part.say is not None]
    before = [part.read() for part in parts]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for part, value in zip(parts, before, strict=True):
            now = part.read()
            if not _same(value, now):
                part.write(value)
                say = part.say
                changed.append(part.name + (f" from {say(value)} to {say(now)}" if say else ""))


@contextmanager
def compiled_anew() -> Iterator[None]:
    """Inside this context `torch.compile` knows no earlier sizes, and compiles for as many as there are.
    After eight of them it would call the function as it was written, and that would be tested instead."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    torch.compiler.reset()
    config: Any = sys.modules["torch._dynamo"].config
    with config.patch(recompile_limit=config.accumulated_recompile_limit):
        yield


def in_words(changed: list[str]) -> str:
    """`changed PyTorch's default dtype from fp32 to fp64, random generator`."""
    return f"changed PyTorch's {', '.join(changed)}"
