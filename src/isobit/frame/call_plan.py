"""Call plans: how calls with one cache key run. A plan is made by the first of them, and cached.

The first call runs the backend's launcher. The second is recorded (`isobit.frame.replay`), and from the
third on the recorded launches are repeated, without the launcher. For calls that differ in the number of rows
these are one series: the plan of a new number follows from a recorded one (`isobit.frame.family`). Where it
does not, a number of rows that occurs only once costs no recording; if most numbers of rows recur, as in the
layers of a model, the first call is recorded already.

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
from isobit.frame.cache_key import Sizes

if TYPE_CHECKING:
    from isobit.frame.family import Family, Varying
    from isobit.frame.replay import Plan

#: Of the ops of `torch.library`: the name that the package was imported under, so that a copy under another
#: name, as the Hugging Face Hub loads it, has ops of its own.
NAMESPACE = __name__.partition(".")[0]

_profiler = torch.autograd.profiler
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


def validates(validate: bool | None) -> bool:
    """Whether tensor values are to be checked, by what the caller gave: None leaves it to the environment."""
    return os.environ.get("ISOBIT_VALIDATE") == "1" if validate is None else validate


class CallPlan(Body):
    """From the tensors of a call to its results. If `applied` is given, the caller goes through it, which is
    autograd, and autograd calls `run`."""

    __slots__ = (
        "_backend", "_check", "_expected", "_name", "_names", "_recorded", "_seen", "_tried", "_validate",
        "applied", "family", "sizes",
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
        self._seen = self._tried = self._expected = False
        self.family: Family | None = None  # only of calls that launch kernels
        self.sizes: Sizes = ()

    def of_family(self, sizes: Sizes, varying: "Varying") -> None:
        """It is the first plan of a family."""
        self.sizes, self.family = sizes, varying.family()
        self._expected = self.family.expected()

    def for_other_sizes(self, sizes: Sizes) -> "CallPlan":
        """The same for calls of the family with other sizes: only their launches differ."""
        made = object.__new__(CallPlan)
        made.positions, made.template = self.positions, self.template
        made.common, made.saved = self.common, self.saved
        made._name, made._names, made._backend = self._name, self._names, self._backend
        made._check, made._validate, made.applied = self._check, self._validate, self.applied
        family = made.family = self.family
        made.sizes, made._seen = sizes, False
        made._recorded = None if family is None else family.plan(sizes)
        made._tried = made._recorded is not None
        made._expected = not made._tried and family is not None and family.expected()
        return made

    def launches_on(self, t: Tensor) -> bool:
        """Whether it launches kernels on the device of this tensor."""
        return self._backend.launches and t.is_cuda

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
                        return self._record(args, tensors)
                self._seen = True
                return self._backend.run(**args)

    def _record(self, args: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """The outputs of a call that is recorded, and traced for other sizes if these are new."""
        from isobit.frame import replay

        family = self.family
        shape = None if family is None or family.plan(self.sizes) is not None else family.traces()
        if family is not None and not self._expected:
            family.count()
        outputs, self._recorded = replay.record(self._backend.run, args, tensors, self.sizes, shape)
        self._tried = True  # not if it was interrupted
        if family is not None and shape is not None:
            family.learn(self._recorded)
        return outputs
