"""FLA's `chunk_gated_delta_rule` by `isobit.gated_delta_rule`: its arguments, what is not served, and its
registry.

Forward and backward are isobit's then, in the class `gdr/1`. Gates that FLA's kernels compute, as in its
layers (`use_gate_in_kernel`, `use_beta_sigmoid_in_kernel`), are those of `isobit.delta_gates`, in fp32.

FLA's `fused_recurrent_gated_delta_rule` is not served. FLA has no registry for it; and it goes on from a
state after any token, where this class goes on from the start of a chunk and from the rows since then
(`isobit.gated_delta_rule_step`), which FLA does not keep.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import Backend
from isobit.frame.contract import dtype_name
from isobit.integrations.patch import Patch
from isobit.ops.delta_gates.op import MOST_HEADS, delta_gates
from isobit.ops.gated_delta_rule.op import CHUNK, forward, gated_delta_rule

NAME, MODULE = "chunk_gated_delta_rule", "fla.ops.gated_delta_rule.chunk"

#: Arguments of FLA's function by version, before the keywords that it takes as `**kwargs`.
_BEFORE = (
    "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens", "cu_seqlens_cpu",
)  # fmt: skip
ARGUMENTS = {"0.5.2": (*_BEFORE, "cp_context"), "0.6.0": (*_BEFORE, "chunk_indices", "cp_context")}
KEYWORDS = ("chunk_size", "use_gate_in_kernel", "A_log", "dt_bias")

#: Taken as they are.
_SAME = ("scale", "output_final_state", "use_qk_l2norm_in_kernel", "state_v_first", "cu_seqlens")

#: For warnings.
INSTEAD = f"isobit.integrations.fla: FLA's own kernels serve {NAME} here"

#: Stands for tensors in a probing call.
_PROBE = object()


def why_not(backend: Backend, given: dict[str, Any]) -> str | None:
    """Why this backend of isobit cannot serve a call of FLA's, or None. Some of these FLA refuses too."""
    unknown = [n for n in given if n not in (*ARGUMENTS["0.6.0"], *KEYWORDS)]
    if unknown:
        return f"{unknown[0]} is not an argument that isobit knows"
    if given.get("cp_context") is not None:
        return "cp_context: context parallelism is not served"
    chunk_size = given.get("chunk_size", CHUNK)
    if chunk_size != CHUNK:
        return f"chunk_size={chunk_size} of {NAME} is not {CHUNK}"
    if given.get("chunk_indices") is not None and given.get("cu_seqlens") is None:
        return "chunk_indices comes without cu_seqlens"
    q = given["q"]
    for name in ("k", "v"):
        if given[name].dtype != q.dtype:
            return f"{name} is {dtype_name(given[name].dtype)} and q is {dtype_name(q.dtype)}"
    for name in ("g", "beta", "initial_state"):
        t = given.get(name)
        if t is not None and t.dtype == torch.float64 and q.dtype != torch.float64:
            return f"{name} is fp64 and q is {dtype_name(q.dtype)}"
    return _gates_why_not(given) or backend.when({**_defaults(), **given})


def _gates_why_not(given: dict[str, Any]) -> str | None:
    """Why the gates of a call cannot be computed, or None."""
    gate, sigmoid = given.get("use_gate_in_kernel"), given.get("use_beta_sigmoid_in_kernel")
    if given.get("allow_neg_eigval") and not sigmoid:
        return "allow_neg_eigval=True comes without use_beta_sigmoid_in_kernel"
    if gate and given.get("A_log") is None:
        return "use_gate_in_kernel=True comes without A_log"
    if (gate or sigmoid) and given["q"].dtype == torch.float64:
        return "gates of fp64 tensors are not computed"
    heads = given["v"].shape[2]
    if (gate or sigmoid) and heads > MOST_HEADS:
        return f"gates of {heads} heads are not computed; at most {MOST_HEADS}"
    return None


@cache
def _defaults() -> dict[str, Any]:
    return {p.name: p.default for p in forward.contract.params}


def serve(backend: Backend, given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """(o, final_state), with gradients. Tensors are made contiguous, as by FLA."""
    tensors = {n: given[n].contiguous() for n in ("q", "k", "v")}
    initial = given.get("initial_state")
    g, beta = _gates(given)
    return gated_delta_rule(
        **tensors, g=g, beta=beta, initial_state=None if initial is None else initial.contiguous(),
        **{n: given[n] for n in _SAME if n in given}, backend=backend.name,
    )  # fmt: skip


def _gates(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(g, beta) after what FLA's kernels would do to them, in fp32."""
    g, beta = given["g"], given["beta"]
    gate, sigmoid = given.get("use_gate_in_kernel"), given.get("use_beta_sigmoid_in_kernel")
    if not (gate or sigmoid):
        return g, beta
    zeros = torch.zeros(beta.shape[-1], dtype=torch.float32, device=beta.device)
    # `delta_gates` computes both. One that is not wanted gets zeros, and no gradient.
    a, b = (t.float().contiguous() if wanted else torch.zeros_like(t, dtype=torch.float32)
            for t, wanted in ((g, gate), (beta, sigmoid)))  # fmt: skip
    A_log, dt_bias = (given.get(n) if gate else None for n in ("A_log", "dt_bias"))
    decay, rate = delta_gates(
        a, b, zeros if A_log is None else A_log.float(), zeros if dt_bias is None else dt_bias.float()
    )
    if sigmoid:
        beta = 2.0 * rate if given.get("allow_neg_eigval") else rate
    return decay if gate else g, beta


# The registry


def registry(version: str) -> Any:
    """FLA's registry of backends for this function. Errors of lookups are the caller's."""
    if version.startswith("0.5."):
        return import_module("fla.ops.gated_delta_rule.backends").gdr_registry
    import_module(MODULE)
    return import_module("fla.backends")._operation_registries["gated_delta_rule"]


def check(version: str, base: type, refusal: Callable[[str], Exception]) -> Any:
    """The registry, after checking FLA's function and that it uses registered backends."""
    function = vars(import_module(MODULE)).get(NAME)
    if function is None:
        raise refusal(f"version {version} has no {NAME} in {MODULE}")
    theirs = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    if theirs != list(ARGUMENTS[version]):
        wanted = ", ".join(ARGUMENTS[version])
        raise refusal(
            f"found {NAME}({', '.join(theirs)}) in version {version}, but isobit needs {NAME}({wanted})"
        )
    entries = registry(version)
    entries.register(_backend_class(base, version)())
    try:
        answer = function(**dict.fromkeys(("q", "k", "v", "g", "beta"), _PROBE))
    except Exception as error:
        raise refusal(f"{NAME} of version {version} does not use the backends that are registered") from error
    finally:
        unregister(entries)
    if answer is not _PROBE:
        raise refusal(f"another backend of FLA serves {NAME} before isobit's")
    return entries


def register(entries: Any, base: type, version: str, backend: Backend, patch: Patch) -> None:
    entry = _backend_class(base, version)()
    entry.serving, entry.patch = backend, patch
    entries.register(entry)


def unregister(entries: Any) -> None:
    """FLA has no function for this."""
    entries._backends.pop("isobit", None)
    if hasattr(entries, "_update_active_backend"):  # 0.5 caches which backend comes first
        entries._active = None
        entries._update_active_backend()


#: FLA tries backends in ascending order: that of FlashQLA has 3.
PRIORITY = 1


@cache
def _backend_class(base: type, version: str) -> Any:
    """The entry for FLA's registry, a subclass of FLA's own base class."""

    class IsobitWhole(base):
        backend_type = "isobit"
        priority = PRIORITY
        serving: Backend
        patch: Patch

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            """Whether isobit serves a call. FLA's own method would treat an error in here as a refusal."""
            if function_name != NAME:
                return False, f"isobit has {NAME} alone"
            given = dict(zip(ARGUMENTS[version], args, strict=False)) | kwargs
            if given["q"] is _PROBE:
                return True, None
            reason = why_not(self.serving, given)
            if reason is not None:
                self.patch.count_passed(reason, instead=INSTEAD)
            return reason is None, reason

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
            given = dict(zip(ARGUMENTS[version], args, strict=False)) | kwargs
            if given["q"] is _PROBE:
                return _PROBE
            results = serve(self.serving, given)
            self.patch.count_served()
            return results

    return IsobitWhole
