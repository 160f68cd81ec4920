"""A function of rows: the inputs it is called with, the outputs that are judged, and its gradients.

Arguments are given by name. Those in `rows` have one row per entry of their first dimension; all others, such
as weights, are shared by all rows. Every output has the rows in its first dimension, too. What cannot be
judged like that is refused by name before anything is compared: see `first_call`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.check.blame import raised_in
from isobit.frame.contract import DTYPE_NAMES
from isobit.spec.compare import differing
from isobit.spec.proof import Args
from isobit.spec.trial import LawBroken, Unsupported, cloned, with_gradient

Function = Callable[..., Any]


@dataclass(frozen=True)
class Run:
    """What a call returned, and the gradients of its arguments, both by name."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RowFunction:
    """A function with its inputs. `outputs` and `graded` (arguments with a gradient) are what a first call
    showed; without `graded` it is judged by its outputs alone, and `forward_only` says why."""

    name: str
    function: Function
    inputs: Args
    rows: tuple[str, ...]
    seed: int
    outputs: tuple[str, ...] = ()
    graded: tuple[str, ...] = ()
    forward_only: str = ""
    #: What its first calls changed of PyTorch's state.
    changed: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return int(self.inputs[self.rows[0]].shape[0])

    @property
    def device(self) -> torch.device:
        tensor: Tensor = self.inputs[self.rows[0]]
        return tensor.device

    @property
    def graded_rows(self) -> tuple[str, ...]:
        """Arguments whose gradient has rows. Others add up over all rows, and so depend on the batch."""
        return tuple(name for name in self.graded if name in self.rows)

    # Rows

    def everyone(self) -> Tensor:
        return torch.arange(self.count, device=self.device)

    def select(self, index: Tensor) -> Args:
        """The arguments of a call with these rows, in this order."""
        return self.inputs | {name: self.inputs[name].index_select(0, index) for name in self.rows}

    # Calls

    def call(self, args: Args) -> dict[str, Tensor]:
        """Its outputs by name, all of them tensors."""
        try:
            returned = self.function(**args)
        except NotImplementedError as error:
            raise Unsupported(f"it says: {error or 'not implemented'}") from error
        result = dict(named_tensors(returned))
        if self.outputs and tuple(result) != self.outputs:
            raise LawBroken(f"returned {', '.join(result) or 'nothing'}, not {', '.join(self.outputs)}")
        return result

    def forward(self, args: Args) -> Run:
        """A call without autograd, with private copies of the arguments, which it must not modify."""
        mine = cloned(args)
        with torch.no_grad():
            outputs = self.call(mine)
        _untouched(args, mine)
        _has_rows(outputs, len(args[self.rows[0]]))
        return Run(outputs)

    def backward(self, args: Args, cotangents: Mapping[str, Tensor] | None = None) -> Run:
        """A call and its gradients, with random cotangents unless others are given."""
        if not self.graded:
            return self.forward(args)
        mine = cloned(args)
        outputs, grads = self.with_gradients(mine, cotangents)
        _untouched(args, mine)
        return Run({name: o.detach() for name, o in outputs.items()}, grads)

    def with_gradients(
        self, args: Args, cotangents: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same with these very tensors."""
        leaves = [args[name].requires_grad_() for name in self.graded]
        with torch.enable_grad():
            outputs = self.call(args)
        _has_rows(outputs, len(args[self.rows[0]]))
        given = self.cotangents(outputs) if cotangents is None else cotangents
        for name, output in outputs.items():
            if output.shape != given[name].shape:
                raise LawBroken(f"output {name} is {shape_of(output)}, should be {list(given[name].shape)}")
        several, theirs = with_gradient(list(outputs.values()), [given[name] for name in outputs])
        if not several:
            raise LawBroken("no output requires a gradient, though one of all rows does")
        grads = torch.autograd.grad(several, leaves, theirs, allow_unused=True)
        result = {}
        for name, leaf, grad in zip(self.graded, leaves, grads, strict=True):
            if grad is None:
                raise LawBroken(f"no gradient for {name}, though there is one in a call with all rows")
            if grad.shape != leaf.shape:
                raise LawBroken(f"gradient of {name} is {list(grad.shape)}, should be {list(leaf.shape)}")
            result[name] = grad
        return outputs, result

    def cotangents(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Random per element, and drawn on the CPU: they depend on the seed and the position only. The seed
        is not that of the inputs: the first of them could be the same numbers, and a gradient of rows that
        are normalized would be 0."""
        gen = torch.Generator().manual_seed(self.seed + 1)
        return {
            name: torch.empty(o.shape, dtype=torch.float32).normal_(generator=gen).to(o.device, o.dtype)
            for name, o in outputs.items()
        }

    # For the report

    @property
    def summary(self) -> dict[str, Any]:
        return {
            "takes": list(self.inputs),
            "rows": {name: shape_of(self.inputs[name]) for name in self.rows},
            "outputs": list(self.outputs),
            "gradients": list(self.graded),
            "in_words": self.in_words,
        }

    @property
    def in_words(self) -> str:
        rows = ", ".join(f"{name} {shape_of(self.inputs[name])}" for name in self.rows)
        shared = [name for name in self.graded if name not in self.rows]
        outputs = f"output{'s' if len(self.outputs) > 1 else ''} {', '.join(self.outputs)}"
        text = f"{self.count} rows of {rows}; judged by {outputs}"
        text += f" and gradients of {', '.join(self.graded_rows)}" if self.graded_rows else ""
        text += f"; {self.forward_only}" if self.forward_only else ""
        if shared:
            text += f"; gradients of {', '.join(shared)} are sums over rows: the same batch must repeat them"
        return text


def named_tensors(returned: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of what a function returned, by their places in tuples, lists and dictionaries: `0`,
    `stats.lse`. None is no output; anything else is refused."""
    if isinstance(returned, Tensor):
        yield name or "0", returned
    elif isinstance(returned, Mapping):
        for key, value in returned.items():
            yield from named_tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(returned, (tuple, list)):
        for key, value in zip(getattr(returned, "_fields", range(len(returned))), returned, strict=True):
            yield from named_tensors(value, f"{name}.{key}" if name else str(key))
    elif returned is not None:
        what = f"output {name} is" if name else "it returned"
        raise LawBroken(f"{what} {type(returned).__name__}: only tensors have rows, leave it out")


def shape_of(t: Tensor) -> str:
    return f"{list(t.shape)} {DTYPE_NAMES.get(t.dtype, str(t.dtype).removeprefix('torch.'))}"


def _has_rows(outputs: Mapping[str, Tensor], count: int) -> None:
    for name, output in outputs.items():
        if output.ndim == 0 or len(output) != count:
            raise LawBroken(f"output {name} of a call with {count} rows is {shape_of(output)}")


def _untouched(args: Args, used: Args) -> None:
    for name, value in args.items():
        if isinstance(value, Tensor) and bool(differing(value, used[name].detach()).any()):
            raise LawBroken(f"wrote into its input {name}")


def where_raised(error: BaseException, mine: RowFunction) -> str:
    """The line of the function, if the exception passed through its file."""
    written = type(mine.function).forward if isinstance(mine.function, torch.nn.Module) else mine.function
    return raised_in(error, (written,), str(Path(__file__).parent))
