"""Calls of FLA and of FlashQLA that the gated delta rule is timed next to.

    fla             FLA's own kernels, also where another package would serve its function
    fla_recurrent   FLA's recurrence, token by token; no gradient
    fla_pieces      FLA's forward and backward, with one kernel of the backward without gates
    flash_qla       FlashQLA, without context parallelism within a GPU

On Hopper, FLA raises an error in its gated backward with Triton from 3.4.0 on and before 3.7.1: one kernel,
for the gradients of q, k, w and g, is miscompiled. There `fla_pieces` is timed. That kernel then reads no
gates and writes no gradient of them, so it does less, and the gradients are not those of the op.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import unwrap
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from isobit.ops.delta_rule.rivals import forget_tuning
from isobit.spec.proof import Args, Case
from isobit.spec.rival import Rival, cannot_import

FLA, STATES, FLASH_QLA = "fla.ops.gated_delta_rule", "fla.ops.common.chunk_delta_h", "flash_qla"
CHUNK = f"{FLA}.chunk"

#: Where FLA's autotuned kernels are.
KERNELS = (STATES, f"{FLA}.chunk_fwd", f"{FLA}.wy_fast", "fla.ops.common.chunk_o", "fla.ops.utils.cumsum")

#: o and the last states; or h, v_new and the last states.
Results = tuple[Tensor | None, ...]


# FLA


def _own(module: ModuleType) -> Callable[..., Any]:
    """FLA's function without its choice among backends: FlashQLA would serve it, if it is installed."""
    return unwrap(module.chunk_gated_delta_rule)


def _fla_chunk(args: Args) -> Results:
    o, final = _own(import_module(CHUNK))(**args, output_final_state=True)
    return o, final


def _fla_training(args: Args) -> Tensor:
    o: Tensor = _own(import_module(CHUNK))(**args)[0]
    return o


def _fla_recurrent(args: Args) -> Results:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    o, final = fused_recurrent_gated_delta_rule(**args, output_final_state=True)
    return o, final


def _fla_states(args: Args) -> Results:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h as fwd_h

    h, v_new, final = fwd_h(**args, output_final_state=True)
    return h, v_new, final


# FLA's backward where it refuses it


@cache
def pieces() -> ModuleType:
    """A copy of FLA's module, in which one kernel of the backward gets no gates. FLA stays as it is."""
    spec = spec_from_file_location("isobit_pieces_of_fla", import_module(CHUNK).__file__)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with_gates = module.chunk_bwd_dqkwg

    def without_gates(*, g: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dq, dk, dw, _ = with_gates(g=None, **given)
        return dq, dk, dw, torch.empty_like(g, dtype=torch.float32)

    module.chunk_bwd_dqkwg = without_gates  # type: ignore[attr-defined]
    return module


def _fla_pieces(args: Args) -> Tensor:
    o: Tensor = _own(pieces())(**args)[0]
    return o


def refused_by_fla() -> str | None:
    """Why FLA's gated backward raises an error here, or None."""
    known = import_module("fla.utils")
    if not known.IS_NVIDIA_HOPPER or not known.TRITON_ABOVE_3_4_0 or known.TRITON_ABOVE_3_7_1:
        return None
    others = vars(import_module("fla.ops.common.backends"))
    tilelang = others.get("CommonTileLangBackend") or others["TileLangBackend"]
    if tilelang.can_use():
        return None
    return "FLA refuses its gated backward on Hopper with Triton from 3.4.0 on and before 3.7.1"


# FlashQLA


def _flash_qla(args: Args) -> Results:
    from flash_qla import chunk_gated_delta_rule

    o, final = chunk_gated_delta_rule(**args, output_final_state=True, auto_cp=False)
    return o, final


def _flash_qla_training(args: Args) -> Tensor:
    from flash_qla import chunk_gated_delta_rule

    o: Tensor = chunk_gated_delta_rule(**args, auto_cp=False)[0]
    return o


# Where they can be timed


def _given(args: Args) -> Args:
    return {name: value for name, value in args.items() if value is not None}


def _tuned_afresh(*modules: str) -> Callable[[Args], Args]:
    def prepare(args: Args) -> Args:
        forget_tuning(*modules)
        return _given(args)

    return prepare


def _available(module: str) -> Callable[[Case, torch.device], str | None]:
    def why_not(case: Case, device: torch.device) -> str | None:
        return cannot_import(module) or ("its kernels need a GPU" if device.type == "cpu" else None)

    return why_not


def _training_available(case: Case, device: torch.device) -> str | None:
    return _available(FLA)(case, device) or refused_by_fla()


def _pieces_available(case: Case, device: torch.device) -> str | None:
    reason = _available(FLA)(case, device)
    if reason is None and refused_by_fla() is None:
        reason = "FLA's own backward runs here"
    return reason


def _flash_qla_available(case: Case, device: torch.device) -> str | None:
    sizes = case.dims["K"], case.dims["V"]
    return _available(FLASH_QLA)(case, device) or (None if sizes == (128, 128) else "needs K = V = 128")


_FORWARD: dict[str, Any] = {"directions": ("fwd",), "takes": None}
_TRAINING: dict[str, Any] = {"directions": ("fwd_bwd",), "takes": None}

RIVALS = {
    "fla": Rival("fla", _fla_chunk, prepare=_tuned_afresh(*KERNELS), available=_available(FLA), **_FORWARD),
    "fla_recurrent": Rival(
        "fla_recurrent", _fla_recurrent, prepare=_given, available=_available(FLA), **_FORWARD
    ),
    "flash_qla": Rival("flash_qla", _flash_qla, prepare=_given, available=_flash_qla_available, **_FORWARD),
}
RIVALS_OF_TRAINING = {
    "fla": Rival(
        "fla", _fla_training, prepare=_tuned_afresh(*KERNELS), available=_training_available, **_TRAINING
    ),
    "fla_pieces": Rival(
        "fla_pieces",
        _fla_pieces,
        prepare=_tuned_afresh(*KERNELS),
        available=_pieces_available,
        judged=False,
        **_TRAINING,
    ),
    "flash_qla": Rival(
        "flash_qla", _flash_qla_training, prepare=_given, available=_flash_qla_available, **_TRAINING
    ),
}
RIVALS_OF_STATES = {
    "fla": Rival("fla", _fla_states, prepare=_tuned_afresh(STATES), available=_available(STATES), **_FORWARD)
}  # fmt: skip
