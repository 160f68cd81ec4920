"""One op on one backend, device and case: runs it and checks the form of the results."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import UnsupportedError
from isobit.frame.contract import dtype_name
from isobit.frame.op import Op
from isobit.spec.compare import OutputCheck, differing, failure, passed
from isobit.spec.proof import Args, Case, InputOptions, Proof
from isobit.spec.proofs import is_candidate, proof_of
from isobit.spec.tolerances import Tolerances

#: The end of the message about a control that changes nothing and does not have to.
SILENT = "changes no bit of this function"


class Unsupported(Exception):
    """This law does not apply to this backend here; the message is the reason."""


class LawBroken(Exception):
    """A promise was broken that is not a comparison of numbers."""


class NeverEnds(LawBroken):
    """Calls still run after a time in which they should have ended. Whatever waits for the GPU would wait for
    them: nothing more can be checked in this process."""


@dataclass(frozen=True)
class Trial:
    """One op on one backend, device and case."""

    op: Op
    backend: str
    device: torch.device
    case: Case
    arch: str
    inputs: InputOptions = field(default_factory=InputOptions)
    gradient: bool = True
    grad_mode: str = "random"
    grad_seed: int = 123
    given: tuple[Tensor, ...] | None = None  # cotangents to use instead of random ones
    only: tuple[str, ...] | None = None  # compute these gradients only
    bound: str | None = None  # any backend of this numerics class instead of the named one
    targets: tuple[str, ...] = ()  # compile for these only; for all if empty
    brief: bool = False  # as in a check of all laws: some of them do less (docs/dev/laws.md)
    one_target: bool = False  # and only one kernel for the first target
    tolerances: Tolerances = field(default_factory=Tolerances)
    judges_memory: bool = True  # against the bound of isobit's kernels; otherwise it is reported alone

    @property
    def proof(self) -> Proof:
        return proof_of(self.op).of(self.backend)

    @property
    def numerics(self) -> str:
        return self.op.backend_named(self.backend).numerics_on(self.device)

    def in_class(self, args: Args) -> "Trial":
        """The same trial; but if this backend cannot serve, with another of its class, which promises the
        same bits."""
        try:
            self.op.explain(**args, backend=self.backend)
        except UnsupportedError:
            return replace(self, bound=self.numerics)
        return self

    def controls(self, validate: bool | None = None, alone: bool = False) -> Args:
        """The controls of a call: which backend serves it, and that every optional output is requested."""
        result: Args = {"validate": validate, "numerics": self.bound}
        result["backend"] = self.backend if self.bound is None else None
        assert self.op.function is not None
        known = inspect.signature(self.op.function).parameters
        switches = {p.name for p in self.op.contract.params if p.scalar is bool}
        flags = {str(spec.when) for spec in self.op.contract.outputs} & known.keys() & switches
        return result | ({} if alone else dict.fromkeys(flags, True))

    def call(self, args: Args, validate: bool | None = None, alone: bool = False) -> tuple[Tensor, ...]:
        """The public function with every output; or `alone`, as most callers use it, without optional
        ones."""
        assert self.op.function is not None
        refused = self.refusal(args)
        if refused is not None:
            raise Unsupported(refused)
        outputs = self.op.function(**self.controls(validate, alone) | args)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        return several if alone else self.proof.judged(args, several)

    def refusal(self, args: Args) -> str | None:
        """Why a candidate cannot be called with these arguments. For isobit's own backends the op itself
        raises an error."""
        return self.op.refusal(args)

    def leaves(self, args: Args) -> list[str]:
        """Arguments that get a gradient in this call: optional ones may be missing, some calls have none, and
        gradients may be switched off."""
        if not self.gradient or self.case.options.keys() & set(self.proof.without_gradient):
            return []
        wanted = [n for n in self.op.differentiable if args.get(n) is not None]
        return [n for n in wanted if self.only is None or n in self.only]

    def args(self, case: Case | None = None) -> Args:
        return self.proof.make(case or self.case, self.device, self.inputs)

    def forward(self, args: Args, validate: bool | None = None) -> tuple[Tensor, ...]:
        """Outputs for private copies of the arguments, which must not be modified."""
        mine = cloned(args)
        outputs = self.call(mine, validate)
        self._well_formed(args, outputs)
        self._untouched(args, mine)
        return tuple(o.detach() for o in outputs)

    def backward(
        self, args: Args, validate: bool | None = None
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """(outputs, gradients by argument name) with this trial's cotangents; no gradients if they are
        switched off, or if no argument has one."""
        names = self.leaves(args)
        if not names:
            return self.forward(args, validate), {}
        mine = cloned(args)
        for name in names:
            mine[name].requires_grad_()
        outputs = self.call(mine, validate)
        self._well_formed(args, outputs)
        if not any(o.requires_grad for o in outputs):
            raise LawBroken("outputs do not require grad though an input does")
        wanted = [mine[name] for name in names]
        several, given = with_gradient(outputs, self.cotangents(outputs))
        grads_of_these = torch.autograd.grad(several, wanted, given, allow_unused=True)
        grads = {}
        for name, leaf, grad in zip(names, wanted, grads_of_these, strict=True):
            if grad is None:
                raise LawBroken(f"no gradient for {name}")
            if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
                raise LawBroken(f"gradient of {name} is {list(grad.shape)} {grad.dtype}")
            grads[name] = grad
        self._untouched(args, mine)
        return tuple(o.detach() for o in outputs), grads

    def cotangents(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Random per element, so that no wrong factor can hide; drawn on the CPU, so that they depend only on
        the seed and the position. Those of a heavy case are drawn on the device: on a CPU that would take
        longer than all the rest."""
        if self.given is not None:
            return list(self.given)
        where = self.device if self.case.heavy else torch.device("cpu")
        gen = torch.Generator(where).manual_seed(self.grad_seed)
        result = []
        for o in outputs:
            g = torch.ones(o.shape, dtype=o.dtype, device=where)
            if self.grad_mode != "ones":
                drawn = o.dtype if where.type != "cpu" and o.is_floating_point() else torch.float32
                g = torch.empty(o.shape, dtype=drawn, device=where).normal_(generator=gen)
            result.append(g.to(o.device, o.dtype))
        return result

    def control(self, what: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> OutputCheck:
        """A change that must alter bits, or equal bits elsewhere would prove nothing."""
        pairs = list(zip(before, after, strict=True))
        if any(a.data_ptr() == b.data_ptr() and a.numel() for a, b in pairs):
            raise LawBroken(f"the control of {what} compares a tensor with itself")
        changed = sum(int(differing(a, b).sum()) for a, b in pairs)
        if changed:
            return passed("control", f"{what} changes bits, as it must: {changed} elements")
        # The changes are those that show in isobit's orders of sums, and in the cases that were declared for
        # it. What the command line asks for may have too few terms, or be rounded too far.
        declared = [(c.dims, c.dtype) for c in _cases_of_bits(self.proof)]
        if is_candidate(self.op) or (self.case.dims, self.case.dtype) not in declared:
            return passed("control", f"{what} {SILENT}")
        return failure("control", f"{what} changed no bit: these inputs cannot show a wrong order")

    def conclusive(self, *groups: list[OutputCheck]) -> list[OutputCheck]:
        """All the checks, if they prove something: a group's equal bits do where one of its controls has
        changed bits. Bits that are not equal prove something in any case."""
        checks = [check for group in groups for check in group]
        said = [[c.message for c in group if c.output == "control"] for group in groups]
        silent = any(one and all(message.endswith(SILENT) for message in one) for one in said)
        if silent and all(check.passed for check in checks):
            raise Unsupported("equal bits prove nothing here: no other order of these inputs changes any")
        return checks

    def _well_formed(self, args: Args, outputs: Any) -> None:
        names = self.proof.outputs
        if not isinstance(outputs, tuple) or len(outputs) != len(names):
            got = len(outputs) if isinstance(outputs, (tuple, list)) else type(outputs).__name__
            raise LawBroken(f"{len(names)} outputs expected ({', '.join(names)}), got {got}")
        flags = {k: v for k, v in self.controls().items() if v is True}
        expected = self.op.fake(**flags | args)[: len(names)]
        for name, o, e in zip(names, outputs, expected, strict=True):
            if not isinstance(o, Tensor):
                raise LawBroken(f"output {name} is {type(o).__name__}, not a tensor")
            if o.device.type != self.device.type:
                raise LawBroken(f"output {name} is on {o.device}, should be on {self.device}")
            if o.shape != e.shape or o.dtype != e.dtype:
                raise LawBroken(
                    f"output {name} is {list(o.shape)} {dtype_name(o.dtype)}, "
                    f"should be {list(e.shape)} {dtype_name(e.dtype)}"
                )

    def _untouched(self, args: Args, used: Args) -> None:
        for name, value in args.items():
            if isinstance(value, Tensor) and bool(differing(value, used[name].detach()).any()):
                raise LawBroken(f"wrote into its input {name}")


def _cases_of_bits(proof: Proof) -> list[Case]:
    return [*proof.bit_cases, *proof.agree_cases, *proof.shard_cases]


def with_gradient(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs that have a gradient, and their cotangents. Other outputs (statistics next to a loss) have
    none."""
    pairs = [(o, g) for o, g in zip(outputs, cotangents, strict=True) if o.requires_grad]
    return [o for o, _ in pairs], [g for _, g in pairs]


def cloned(args: Args) -> Args:
    """Private copies that keep values, strides and alignment: of the storage, not only of the view. An object
    that is written into, the state of a layer, copies itself."""

    def copy(t: Tensor) -> Tensor:
        storage = t.untyped_storage().clone()
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(
            storage, t.storage_offset(), t.shape, t.stride()
        )

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy(value)
        return value.clone() if hasattr(value, "clone") else value

    return {name: of(value) for name, value in args.items()}


def in_fp64(args: Args) -> Args:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in args.items()}
