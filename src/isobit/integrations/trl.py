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
counted by reason, with a warning for the first of each.
"""

import inspect
from importlib import import_module
from types import ModuleType

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
INSTALL = "pip install trl==1.16.0"


class TRLError(UnsupportedError):
    """isobit does not support the installed TRL. The message says what was found."""


SWITCH = Switch("isobit.integrations.trl")


class _Patch(Patch):
    """Replaces TRL's function."""

    def __init__(self, module: ModuleType, backend: str | None) -> None:
        own = f"{SWITCH.name}: TRL's own function serves log-probabilities here"
        super().__init__(backend=backend, instead=own)
        self.module, self.theirs = module, vars(module)[NAME]

    def undo(self) -> None:
        setattr(self.module, NAME, self.theirs)

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
        reason = f"it wants {', '.join(more)} too" if more else call.why_not(hidden, weight, bias)
        if reason is not None:
            self.count_passed(reason)
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
    function = vars(module).get(NAME)
    supported = f"isobit supports TRL 1.16: {INSTALL}"
    if function is None or not hasattr(module, "maybe_gather_lm_head_ctx"):
        raise TRLError(f"isobit.integrations.trl: TRL {version} has no {NAME} in {MODULE} ({supported})")
    _, *parameters = inspect.signature(function.forward).parameters.values()  # the first is ctx
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
        TRLError: the function of the installed TRL differs in its signature from that of 1.16.
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
        setattr(patch.module, NAME, patch)
        return patch

    return SWITCH.on(backend, apply)


def disable() -> None:
    """Leave everything to TRL again. Does nothing if it is not enabled."""
    SWITCH.off()
