"""isobit inside TRL.

    isobit.integrations.trl.enable()

From here on TRL's trainers take log-probabilities and entropies of tokens from `isobit.linear_logp`, with
their gradients. Since 1.15 every trainer of TRL computes them by one function, which `trl.trainer.utils`
looks up at each call, so existing trainers are served too. The losses, metrics, and the gathering of sharded
weights remain TRL's own.

    with isobit.integrations.trl.enable() as on:
        trainer.train()
    print(on.served, on.passed)

Calls that need more than log-probabilities and entropies are passed on to TRL's own function. They are
counted by reason, with a warning for the first of each. That is normal for the policies of SFT, DPO and KTO.

With an adapter (LoRA) the reference of DPO and KTO is the same model with its adapter switched off, so its
calls request what the policy needs. TRL reads nothing but log-probabilities of them, so they are served: a
call without gradients inside TRL's `use_adapter` is one of a reference.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import UnsupportedError
from isobit.integrations.logprobs import Call
from isobit.integrations.patch import Enabled, Patch, Switch
from isobit.ops.linear_logp.op import forward

MODULE, NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"

#: The expected arguments, without annotations and without the default of the last.
ARGUMENTS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping=None",
    "logit_scale=1.0", "outputs",
)  # fmt: skip
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def install_hint(python: tuple[int, ...]) -> str:
    """How to get a TRL that is supported; on Python 3.10 there is none."""
    hint = "pip install trl==1.16.0"
    if python >= (3, 11):
        return hint
    return f"{hint}, which needs Python 3.11 or newer, and this is {python[0]}.{python[1]}"


INSTALL = install_hint(sys.version_info[:2])

#: TRL's context manager in which a model with an adapter is its own reference.
ADAPTER = "use_adapter"

NORMAL = (
    ", which isobit does not compute. That is normal for the policies of SFT, DPO and KTO: nothing is wrong"
)


class TRLError(UnsupportedError):
    """isobit does not support the installed TRL. The message says what was found."""


SWITCH = Switch("isobit.integrations.trl")

#: Whether the model is its own reference now, with another adapter or none.
_of_reference: ContextVar[bool] = ContextVar("of_reference", default=False)

Adapters = Callable[..., AbstractContextManager[Any]]


def _marked(theirs: Adapters) -> Adapters:
    """TRL's `use_adapter`, in which calls are known to be of a reference."""

    @contextmanager
    def use_adapter(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with theirs(*args, **kwargs) as given:
            before = _of_reference.set(True)
            try:
                yield given
            finally:
                _of_reference.reset(before)

    return use_adapter


def _replace_in_trl(old: Any, new: Any) -> None:
    """In all modules of TRL that are loaded: trainers import the name, some before this and some after."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "trl" and vars(module).get(ADAPTER) is old:
            setattr(module, ADAPTER, new)


class _Patch(Patch):
    """Replaces TRL's function, and marks the calls of references."""

    def __init__(self, module: ModuleType, backend: str | None) -> None:
        own = f"{SWITCH.name}: TRL's own function serves log-probabilities here"
        super().__init__(backend=backend, instead=own)
        self.module, self.theirs = module, vars(module)[NAME]
        self.their_adapters: Adapters = vars(module)[ADAPTER]
        self.our_adapters = _marked(self.their_adapters)

    def do(self) -> None:
        setattr(self.module, NAME, self)
        _replace_in_trl(self.their_adapters, self.our_adapters)

    def undo(self) -> None:
        setattr(self.module, NAME, self.theirs)
        _replace_in_trl(self.our_adapters, self.their_adapters)

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """Called by TRL, with its arguments and its five results."""
        factor = None if logit_scale == 1.0 else logit_scale
        options = {"temperature": temperature, "softcap": final_logit_softcapping, "logit_scale": factor}
        call = Call(options | {"return_entropy": "entropy" in outputs}, self.backend)
        more = sorted(set(outputs) & {"log_sum_sq_probs", "mean_logits", "is_top1"})
        if _of_reference.get() and not torch.is_grad_enabled():
            more = []  # TRL reads them of a policy alone
        reason = f"it wants {', '.join(more)} too" if more else call.why_not(hidden, weight, bias)
        if reason is not None:
            self.count_passed(reason, NORMAL if more else "")
            return self.theirs.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale,
                outputs,
            )  # fmt: skip
        call.gather = self.module.maybe_gather_lm_head_ctx
        logp, entropy = call(hidden, weight, bias, targets)
        self.count_served()
        return logp, entropy, None, None, None


# On and off


def _installed() -> ModuleType:
    """The module of TRL that has the function; or an error that says what was found instead."""
    try:
        version = import_module("trl").__version__
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ModuleNotFoundError(
            f"isobit.integrations.trl: TRL is not installed: {INSTALL}", name="trl"
        ) from error
    module = import_module(MODULE)
    supported = f"isobit supports TRL 1.15 and 1.16: {INSTALL}"
    for name in (NAME, "maybe_gather_lm_head_ctx", ADAPTER):
        if vars(module).get(name) is None:
            raise TRLError(f"isobit.integrations.trl: TRL {version} has no {name} in {MODULE} ({supported})")
    _, *parameters = inspect.signature(vars(module)[NAME].forward).parameters.values()  # the first is ctx
    arguments = [str(p.replace(annotation=p.empty)) for p in parameters]
    if arguments[-1:] == [f"outputs={OUTPUTS!r}"]:
        arguments[-1] = "outputs"
    if tuple(arguments) != ARGUMENTS:
        raise TRLError(
            f"isobit.integrations.trl: TRL {version} has {NAME}({', '.join(arguments)}), but isobit needs "
            f"{NAME}({', '.join(ARGUMENTS)}) ({supported})"
        )
    return module


def enable(backend: str | None = None) -> Enabled:
    """Let TRL's trainers take log-probabilities and entropies from isobit: until `disable`, or as a context
    manager until the end of its block. If it is already enabled, it stays enabled and keeps counting.

    Args:
        backend: of `isobit.linear_logp`. None takes the first that can serve. Calls that a named backend
            cannot serve are passed on to TRL's own function.

    Returns:
        An object with `served`, the number of calls that isobit has computed, and `passed`, the number of
        calls that it has passed on, by reason.

    Raises:
        ModuleNotFoundError: TRL is not installed.
        TRLError: the function of the installed TRL differs in its signature from that of 1.15 and 1.16.
        ContractError: no such backend, or it is enabled with another one.

    Example:
        >>> import isobit
        >>> with isobit.integrations.trl.enable() as on:  # doctest: +SKIP
        ...     trainer.train()
        >>> on.served, on.passed  # doctest: +SKIP
        (96, Counter())
    """
    if backend is not None:
        forward.backend_named(backend)

    def apply() -> _Patch:
        patch = _Patch(_installed(), backend)
        patch.do()
        return patch

    return SWITCH.on(backend, apply)


def disable() -> None:
    """Leave everything to TRL again. Does nothing if it is not enabled."""
    SWITCH.off()
