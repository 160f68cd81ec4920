"""Call plans: how calls with one cache key run. A plan is made by the first of them, and cached.

The first call runs the backend's launcher. The second is recorded (`isobit.frame.replay`), and from the
third on the recorded launches are repeated, without the launcher. So a number of rows that occurs only once
costs no recording. If most numbers of rows recur, as in the layers of a model, the first call is recorded
already.

Every call goes through here, tens of thousands of times a second, so the code is written for few steps.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.frame.autograd import Applied, Body, Saved
from isobit.frame.backend import Backend

if TYPE_CHECKING:
    from isobit.frame.replay import Plan

#: Of the ops of `torch.library`: the name that the package was imported under, so that a copy under another
#: name, as the Hugging Face Hub loads it, has ops of its own.
NAMESPACE = __name__.partition(".")[0]

_profiler = torch.autograd.profiler
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


class _Recurrence:
    """How often numbers of rows recur in the calls of a family, from samples of them."""

    __slots__ = ("_new", "_recurred", "_samples")

    def __init__(self) -> None:
        self._new = self._samples = self._recurred = 0

    def expected(self) -> bool:
        """Whether a new number of rows is likely to recur. False for at least every eighth, which is a
        sample: its second call, if there is one, counts as a recurrence."""
        self._new += 1
        if 2 * self._recurred > self._samples and self._new % 8:
            return True
        self._samples += 1
        return False

    def count(self) -> None:
        """A sample has recurred."""
        self._recurred += 1


def validates(validate: bool | None) -> bool:
    """Whether tensor values are to be checked, by what the caller gave: None leaves it to the environment."""
    return os.environ.get("ISOBIT_VALIDATE") == "1" if validate is None else validate


class CallPlan(Body):
    """From the tensors of a call to its results. If `applied` is given, the caller goes through it, which is
    autograd, and autograd calls `run`."""

    __slots__ = (
        "_backend", "_check", "_expected", "_name", "_names", "_recorded", "_recurrence", "_seen", "_tried",
        "_validate", "applied",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        backend: Backend,
        check: Callable[[Sequence[Any]], None],
        validate: bool | None,
        applied: Applied | None,
        values: Sequence[Any],
    ) -> None:
        """`names` are those of the arguments that a backend gets; they come first. `check` reads tensor
        values: always or never, or, if `validate` is None, as the environment variable says."""
        super().__init__(values)
        self._name, self._names, self._backend = name, names, backend
        self._check, self._validate, self.applied = check, validate, applied
        self._recorded: Plan | None = None
        self._seen = self._tried = False
        self._recurrence, self._expected = _Recurrence(), False

    def for_other_rows(self) -> "CallPlan":
        """The same for calls with another number of rows: only their launches differ."""
        made = object.__new__(CallPlan)
        made.positions, made.template = self.positions, self.template
        made.common, made.saved = self.common, self.saved
        made._name, made._names, made._backend = self._name, self._names, self._backend
        made._check, made._validate, made.applied = self._check, self._validate, self.applied
        made._recorded, made._seen, made._tried = None, False, False
        made._recurrence, made._expected = self._recurrence, self._recurrence.expected()
        return made

    def cache_saved(self, saved: Saved) -> None:
        self.saved = saved

    def run(self, *tensors: Tensor) -> Any:
        """Replay the recorded call if there is one, or else run the backend."""
        recorded = self._recorded
        if (
            recorded is None
            or _profiler._is_profiler_enabled
            or (self._validate is not False and self._must_check())
            or not recorded.can_run()
        ):
            return self.run_backend(tensors)
        return recorded(tensors)

    def _must_check(self) -> bool:
        """Whether tensor values must be checked."""
        return validates(self._validate)

    def run_backend(self, tensors: Sequence[Tensor]) -> Any:
        """Check tensor values, tell a profiler the name of the call, and run the backend's function, or
        record it; with autocast off."""
        if self._must_check():
            self._check(self.values(tensors))
        profiled = autocast = _AS_IT_IS
        if _profiler._is_profiler_enabled:
            profiled = torch.profiler.record_function(f"{NAMESPACE}::{self._name}")  # as the dispatcher would
        with profiled:
            if self._recorded is not None and self._recorded.can_run():
                return self._recorded(tensors)
            device = tensors[0].device.type
            if torch.is_autocast_enabled(device):  # dtypes of the inputs decide, not the autocast context
                autocast = torch.autocast(device, enabled=False)
            args = dict(zip(self._names, self.values(tensors), strict=False))
            # Below autograd's view tracking. A result may be a view of memory that the launcher allocated.
            # Nobody else has that memory, but PyTorch would forbid to change the view in place, by a ReLU
            # after a layer for example.
            with autocast, torch._C._AutoDispatchBelowADInplaceOrView():
                if (self._seen or self._expected) and not self._tried and self._backend.launches:
                    from isobit.frame import replay

                    if replay.recordable(tensors):
                        if not self._expected:
                            self._recurrence.count()
                        outputs, self._recorded = replay.record(self._backend.run, args, tensors)
                        self._tried = True  # not if it was interrupted
                        return outputs
                self._seen = True
                return self._backend.run(**args)
