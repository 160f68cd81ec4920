"""Runs the caller's loss on a chunk of rows: its share of the loss, and the gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.frame.contract import Contract

LossFn = Callable[..., Any]


class Share(NamedTuple):
    """A chunk's contribution to the loss, its sums, and the gradients of its log-probabilities and
    entropies."""

    loss: Tensor
    sums: dict[str, Any]
    dlogp: Tensor | None
    dentropy: Tensor | None


class Loss:
    """The caller's loss function, and the errors it may raise."""

    def __init__(self, contract: Contract, loss_fn: LossFn) -> None:
        self._contract, self._loss_fn = contract, loss_fn

    @property
    def by_rows(self) -> bool:
        """Whether it is declared to be a sum over rows (`isobit.losses.by_rows`), itself or what a partial
        calls."""
        fn: Any = self._loss_fn
        while isinstance(fn, partial) and not hasattr(fn, "by_rows"):
            fn = fn.func
        return getattr(fn, "by_rows", False) is True

    def error(self, rule: str) -> Exception:
        return self._contract.error("loss_fn", self._loss_fn, rule)

    def share(
        self, logp: Tensor, entropy: Tensor | None, inputs: Mapping[str, Any], gradients: bool | None,
        where: str,
    ) -> Share:  # fmt: skip
        """The share of rows with these log-probabilities. gradients: True requires them, False skips them,
        None computes them if the loss depends on logp. `where` names the rows in errors."""
        wanted = gradients is not False
        leaves = [t.detach().requires_grad_(wanted) for t in (logp, entropy) if t is not None]
        given = (leaves[0], leaves[1] if entropy is not None else None)
        dlogp = dentropy = None
        with torch.set_grad_enabled(wanted), _own_graph():
            with self._their_code(where):
                returned = self._loss_fn(*given, **inputs)
            loss, sums = self._parts(returned)
            if gradients or (wanted and loss.requires_grad):
                dlogp, dentropy = self._gradients(loss, leaves, where)
        return Share(loss.detach().clone(), sums, dlogp, dentropy)

    @contextmanager
    def _their_code(self, where: str) -> Iterator[None]:
        """An exception from the caller's code is raised again with the rows it was called on. Out-of-memory
        errors pass unchanged, because callers catch them."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self.error(f"raised {type(error).__name__} on {where}: {error}") from error

    def _parts(self, returned: Any) -> tuple[Tensor, dict[str, Any]]:
        """(loss, sums) from the returned value."""
        loss, sums = returned, dict[str, Any]()
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
            loss, sums = returned
        if not isinstance(loss, Tensor):
            got = type(returned).__name__
            raise self.error(f"must return a scalar tensor, or that and a dict of sums; it returned {got}")
        if loss.ndim or not loss.is_floating_point():
            got = f"{list(loss.shape)} {loss.dtype}"
            raise self.error(f"must return a scalar, the rows' share of the summed loss; it returned {got}")
        wrong = [name for name, v in sums.items() if not isinstance(v, Tensor | int | float)]
        if wrong:
            got = type(sums[wrong[0]]).__name__
            raise self.error(f"sums must be tensors or numbers; {wrong[0]!r} is {got}")
        return loss, {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in sums.items()}

    def _gradients(self, loss: Tensor, leaves: list[Tensor], where: str) -> list[Tensor | None]:
        detached = "returned a loss without a gradient: it does not depend on logp, or was detached"
        if not loss.requires_grad:
            raise self.error(detached)
        if any(all(t is not leaf for leaf in leaves) for t in _variables(loss)):
            rule = "the loss depends on another tensor that requires a gradient, and none would reach it"
            raise self.error(f"{rule}; detach() it")
        with self._their_code(where):  # the loss may contain autograd functions of its own
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        if all(g is None for g in gradients):
            raise self.error(detached)
        return [*gradients, None][:2]

    def together(self, whole: Share, parts: Sequence[Share], logp: Tensor) -> None:
        """Raise unless the shares of two parts add up to the share of the whole, which has these
        log-probabilities. Otherwise the loss mixes rows (a mean, for example) and would depend on where
        chunks end."""
        # Terms of a loss may cancel, so the tolerance is relative to the gradients, not to the loss.
        losses = torch.stack([share.loss.double() for share in (whole, *parts)])
        terms = 0.0 if whole.dlogp is None else (whole.dlogp.abs() * (1 + logp.abs())).nansum()
        size = losses.abs().nan_to_num().max() + terms
        rounding = torch.finfo(whole.loss.dtype).eps  # of a share in 16 bits
        pairs = [(losses[:1], losses[1:].sum()[None], size * max(1.0, 1e3 * rounding))]
        for name in ("dlogp", "dentropy"):
            ours, theirs = getattr(whole, name), [getattr(part, name) for part in parts]
            if ours is not None and all(g is not None for g in theirs):
                both = ours.flatten(), torch.cat([g.flatten() for g in theirs])
                pairs.append((*both, torch.stack(both).abs().nan_to_num().max()))
        for one, other, size in pairs:
            near = ((one - other).abs() <= 1e-3 * size) | (one == other) | (one.isnan() & other.isnan())
            if not bool(near.all()):
                raise self.error(
                    f"its share of {logp.numel()} rows is not the sum of the shares of two parts, so the "
                    "loss would depend on where chunks end: return a sum over rows, divided by a number that "
                    "is fixed, not a mean over the rows of the chunk"
                )


def _own_graph() -> AbstractContextManager[Any]:
    """Disables the caller's hooks on saved tensors. The graph of a share ends before the share is returned,
    so offloading would move its tensors in vain, and checkpointing would start to recompute them."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)


def widened(value: Any) -> Any:
    """A share or one of its sums. 16 bits become fp32: they have too few digits to add chunks in."""
    narrow = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4
    return value.float() if narrow else value


def _variables(loss: Tensor) -> Iterator[Tensor]:
    """The leaf tensors into which a backward would accumulate gradients."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [next_node for next_node, _ in node.next_functions]
