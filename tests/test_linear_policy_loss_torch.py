"""`linear_policy_loss` and PyTorch around it: second derivatives, hooks, compilation, transforms."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import isobit
from isobit import ContractError
from isobit.frame.op import OPS
from isobit.ops.linear_policy_loss.op import linear_policy_loss
from policy_loss_calls import bytes_for, make, weighed


@pytest.fixture(autouse=True)
def the_same_numbers_every_time() -> None:
    torch.manual_seed(0)


def test_there_is_no_second_derivative() -> None:
    hidden, weight, ids = make(5)
    loss, _ = linear_policy_loss(hidden, weight, ids, loss_fn=lambda logp, entropy: logp.sum())
    (grad,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_policy_loss has no second derivative"):
        torch.autograd.grad(grad.sum(), hidden)


@pytest.mark.parametrize("leaf", [0, 1])
def test_a_gradient_penalty_is_refused_and_not_taken_for_a_constant(leaf: int) -> None:
    """The gradient of the loss is 1 there, so nothing but the tensors themselves can carry the refusal."""
    tensors = make(5)
    wanted = tensors[leaf]
    loss, _ = linear_policy_loss(*tensors, loss_fn=lambda logp, entropy: logp.sum())
    (grad,) = torch.autograd.grad(loss, wanted, create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match="linear_policy_loss has no second derivative"):
        torch.autograd.grad(loss + grad.square().sum(), wanted)


def test_the_backward_keeps_no_hidden_states() -> None:
    hidden, weight, ids = make(5)
    states = hidden * 1
    alive = weakref.ref(states)
    loss, _ = linear_policy_loss(states, weight, ids, loss_fn=lambda logp, entropy: logp.sum())
    del states
    assert alive() is None
    loss.backward()
    assert hidden.grad is not None and hidden.grad.any()


def test_hooks_on_saved_tensors_leave_the_inner_graph_alone() -> None:
    """Checkpointing recomputes what such a graph saved, in the middle of the forward; and offloading it moves
    what lives for one chunk."""
    hidden, weight, ids = make(5)
    calls: list[int] = []

    def loss_fn(logp: Tensor, entropy: Tensor | None) -> Tensor:
        calls.append(len(logp))
        return (logp.exp() * logp).sum()

    def loss_of(states: Tensor) -> Tensor:
        return linear_policy_loss(states * 1, weight, ids, loss_fn=loss_fn, validate=False)[0]

    loss_of(hidden).backward()
    expected, hidden.grad = hidden.grad, None
    checkpoint(loss_of, hidden, use_reentrant=False).backward()
    assert torch.equal(hidden.grad, expected) and calls == [5, 5, 5]  # plain; then forward and recomputation
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        loss_of(hidden)
    assert all(t.shape != (5,) for t in seen)


class Wrapped(Tensor):
    """A subclass without a behaviour of its own."""


@pytest.mark.parametrize("kind", ["subclass", "negative view", "dispatch mode"])
@pytest.mark.parametrize("rows", [8, 1 << 20])
@pytest.mark.parametrize("entropy", [False, True])
def test_calls_that_the_dispatcher_must_see(kind: str, rows: int, entropy: bool) -> None:
    """An entropy that nobody requested came back as an empty tensor, which an internal op refused."""
    hidden, weight, ids = make(4, 5)
    given = hidden.detach()
    if kind == "subclass":
        given = given.as_subclass(Wrapped)
    elif kind == "negative view":
        given = torch._neg_view(-given)
    options = {"loss_fn": entropic_loss if entropy else plain_loss, "entropy": entropy}
    found = []
    for states in (given.requires_grad_(), hidden.detach().clone().requires_grad_()):
        head = weight.detach().clone().requires_grad_()
        mode = (
            FlopCounterMode(display=False) if kind == "dispatch mode" and states is given else nullcontext()
        )
        with mode:
            loss, _ = linear_policy_loss(states, head, ids, workspace_bytes=bytes_for(rows), **options)
        loss.backward()
        found.append(
            [torch.as_tensor(t).as_subclass(Tensor) for t in (loss.detach(), states.grad, head.grad)]
        )
    assert all(torch.equal(ours, plain) for ours, plain in zip(*found, strict=True))


def plain_loss(logp: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is None
    return logp.sum()


def entropic_loss(logp: Tensor, entropy: Tensor | None) -> Tensor:
    assert entropy is not None
    return (logp + entropy).sum()


def test_explain_knows_it() -> None:
    hidden, weight, ids = make(5)
    result = isobit.explain("linear_policy_loss", hidden, weight, ids, loss_fn=weighed)
    known = ["hopper", "triton", "hopper-8x4", "triton-8x4", "model-8x4", "reference"]
    assert result.backend == "reference" and list(result.reasons) == known
    with pytest.raises(TypeError, match=r"call isobit\.linear_policy_loss"):
        OPS["linear_policy_loss"](hidden=hidden)


def test_torch_compile_breaks_there_and_says_why() -> None:
    hidden, weight, ids = make(12)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        loss, _ = isobit.linear_policy_loss(
            hidden * 2, weight, ids, loss_fn=lambda logp, entropy: logp.sum(), workspace_bytes=bytes_for(5)
        )
        return loss * 3

    torch._dynamo.reset()
    eager = torch.autograd.grad(step(hidden, weight), (hidden, weight))
    broken = torch.compile(step, backend="eager")(hidden, weight)
    for ours, theirs in zip(torch.autograd.grad(broken, (hidden, weight)), eager, strict=True):
        assert torch.equal(ours, theirs)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear_policy_loss is a function over ops"):
        torch.compile(step, backend="eager", fullgraph=True)(hidden, weight)
    torch._dynamo.reset()


def test_transforms_of_torch_func_are_refused() -> None:
    hidden, weight, ids = (t.detach() for t in make(5))

    def loss(hidden: Tensor) -> Tensor:
        return linear_policy_loss(hidden, weight, ids, loss_fn=lambda logp, entropy: logp.sum())[0]

    with pytest.raises(ContractError, match=r"no transform of torch\.func can see through it"):
        torch.func.grad(loss)(hidden)
