"""isobit inside verl.

    isobit.integrations.verl.enable()

From here on verl's fused kernels are `isobit.linear_logp`: log-probabilities and entropies of tokens from
hidden states and an LM head, with their gradients. verl's own configuration decides whether a model uses
fused kernels: `actor_rollout_ref.model.use_fused_kernels=True`. There are two implementations of them, and
isobit replaces both, whatever `fused_kernel_options.impl_backend` is:

    torch, liger    FusedLinearForPPO of verl.utils.experimental.torch_functional
    triton          linear_cross_entropy of verl.utils.kernel.linear_cross_entropy, also under the name that
                    modules for Megatron have imported it by

    with isobit.integrations.verl.enable() as on:
        ...
    print(on.served, on.passed)

Calls that isobit does not serve are passed on to verl's own function. They are counted by reason, with a
warning for the first of each. verl trains in separate processes, and each of them needs this line: `verl_on`
is a module for verl's `external_lib` that has it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import UnsupportedError
from isobit.integrations.logprobs import Call
from isobit.integrations.patch import Enabled, Patch, Switch
from isobit.ops.linear_logp.op import forward

TORCH, FUSED = "verl.utils.experimental.torch_functional", "FusedLinearForPPO"
TRITON, FUNCTION, NAME = (
    "verl.utils.kernel.linear_cross_entropy", "LinearCrossEntropy", "linear_cross_entropy"
)  # fmt: skip

#: The arguments of verl's functions, without annotations and the first, which is self or ctx.
ARGUMENTS = {
    FUSED: "hidden_states, vocab_weights, input_ids, temperature=1.0",
    FUNCTION: "hidden, weight, labels, temperature=1.0, reduction='none', dist_process_group=None",
}
INSTALL = "pip install verl==0.9.1"


class VerlError(UnsupportedError):
    """isobit does not support the installed verl. The message says what was found."""


SWITCH = Switch("isobit.integrations.verl")


# The installed verl


@dataclass(frozen=True)
class _Verl:
    """The parts of verl that are replaced."""

    fused: type  # its forward is replaced
    forward: Callable[..., Any]
    module: ModuleType  # its linear_cross_entropy is replaced, and that of modules that have imported it
    linear_cross_entropy: Callable[..., Any]


def _installed() -> _Verl:
    """The installed verl; or an error that says what was found instead."""
    try:
        version = import_module("verl").__version__
    except ModuleNotFoundError as error:
        if error.name != "verl":
            raise
        raise ModuleNotFoundError(f"{SWITCH.name}: verl is not installed: {INSTALL}", name="verl") from error
    kinds: dict[str, Any] = {}
    for place, name in ((TORCH, FUSED), (TRITON, FUNCTION)):
        try:
            kind = vars(import_module(place)).get(name)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            kind = None
        function = getattr(kind, "forward", None)
        if function is None:
            raise _refusal(f"verl {version} has no {name} in {place}")
        given = _text(function)
        if given != ARGUMENTS[name]:
            needed = f"{name}({ARGUMENTS[name]})"
            raise _refusal(f"verl {version} has {name}({given}), but isobit needs {needed}")
        kinds[name] = kind
    module = import_module(TRITON)
    if getattr(module, NAME, None) != kinds[FUNCTION].apply:
        raise _refusal(f"{NAME} in {TRITON} of verl {version} is not {FUNCTION}.apply")
    return _Verl(kinds[FUSED], vars(kinds[FUSED])["forward"], module, vars(module)[NAME])


def _text(function: Callable[..., Any]) -> str:
    _, *parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)


def _refusal(what: str) -> VerlError:
    return VerlError(f"{SWITCH.name}: {what} (isobit supports verl 0.9.1: {INSTALL})")


def _that_have(function: Callable[..., Any]) -> Iterator[ModuleType]:
    """Modules of verl with this function as their `linear_cross_entropy`: its own, and those that have
    imported it from there, at any time."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "verl" and getattr(module, "__dict__", {}).get(NAME) is function:
            yield module


# Replacements of verl's functions


class _Patch(Patch):
    def __init__(self, verl: _Verl, backend: str | None) -> None:
        own = f"{SWITCH.name}: verl's own function serves log-probabilities here"
        super().__init__(backend=backend, instead=own)
        self.verl, self.ours = verl, self.linear_cross_entropy

        def fused_forward(
            module: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor,
            temperature: float = 1.0,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            return self.fused_linear(module, hidden_states, vocab_weights, input_ids, temperature)

        setattr(verl.fused, "forward", fused_forward)  # noqa: B010  # a type has no such attribute
        self._rename(verl.linear_cross_entropy, self.ours)

    def undo(self) -> None:
        setattr(self.verl.fused, "forward", self.verl.forward)  # noqa: B010
        self._rename(self.ours, self.verl.linear_cross_entropy)

    def _rename(self, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        for module in _that_have(old):
            setattr(module, NAME, new)

    def fused_linear(
        self, module: Any, hidden: Tensor, weight: Tensor, input_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Replaces FusedLinearForPPO.forward: results have the shape of input_ids."""
        results = self._served(hidden, weight, input_ids, temperature)
        return results or self.verl.forward(module, hidden, weight, input_ids, temperature)

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Replaces the function of that name: results are flat."""
        given = (hidden, weight, labels, temperature, reduction, dist_process_group)
        reason = None
        if str(reduction).lower() != "none":
            reason = f"it wants reduction={reduction!r}"
        elif dist_process_group is not None:
            ranks = torch.distributed.get_world_size(dist_process_group)
            reason = f"the vocabulary is split over {ranks} ranks" if ranks > 1 else None
        if reason is not None:
            self.count_passed(reason)
            return self.verl.linear_cross_entropy(*given)
        flat = hidden.reshape(-1, hidden.shape[-1])
        results = self._served(flat, weight, labels.reshape(-1), temperature)
        return results or self.verl.linear_cross_entropy(*given)

    def _served(
        self, hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """(log-probabilities, entropies), or None for a call that is not served, which is counted."""
        options = {"temperature": temperature, "softcap": None, "logit_scale": None, "return_entropy": True}
        call = Call(options, self.backend)
        if isinstance(temperature, Tensor):  # verl has only numbers
            reason: str | None = "its temperature is a tensor"
        else:
            reason = call.why_not(hidden, weight, None)
        if reason is not None:
            self.count_passed(reason)
            return None
        logp, entropy = call(hidden, weight, None, token_ids)
        assert entropy is not None
        self.count_served()
        return logp, entropy


# On and off


def enable(backend: str | None = None) -> Enabled:
    """Replace verl's fused kernels by isobit: until `disable`, or as a context manager until the end of its
    block. If it is already enabled, it stays enabled and keeps counting.

    Args:
        backend: of `isobit.linear_logp`. None takes the first that can serve. Calls that a named backend
            cannot serve are passed on to verl's own function.

    Returns:
        An object with `served`, the number of calls that isobit has computed, and `passed`, the number of
        calls that it has passed on, by reason.

    Raises:
        ModuleNotFoundError: verl is not installed.
        VerlError: the functions of the installed verl differ in their signatures from those of 0.9.1.
        ContractError: no such backend, or it is enabled with another one.

    Example:
        >>> import isobit
        >>> with isobit.integrations.verl.enable() as on:  # doctest: +SKIP
        ...     output = model(input_ids, temperature=0.7, return_dict=True)
        >>> on.served, on.passed  # doctest: +SKIP
        (1, Counter())
    """
    if backend is not None:
        forward.backend_named(backend)
    return SWITCH.on(backend, lambda: _Patch(_installed(), backend))


def disable() -> None:
    """Leave everything to verl again. Does nothing if it is not enabled."""
    SWITCH.off()
