"""Calls like earlier ones take a short way, and give what the dispatcher's way gives: outputs and gradients,
to the bit, whatever autograd does around them. On the CPU, where each of them runs a backend."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from isobit.frame.op import OPS

BF16, F32 = torch.bfloat16, torch.float32
ROWS = 5

Args = dict[str, Any]


def values(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def linear() -> Args:
    return {
        "x": values(5, 24, dtype=BF16),
        "weight": values(8, 24, dtype=BF16),
        "bias": values(8, dtype=BF16),
    }


def gemm() -> Args:
    return {"a": values(2, 5, 24, dtype=BF16), "b": values(2, 24, 8, dtype=BF16), "out_dtype": F32}


def logits() -> Args:
    return {"logits": values(5, 9), "token_ids": torch.tensor([0, 8, 3, -100, 1]), "return_entropy": True}


def head() -> Args:
    ids, mask = torch.tensor([0, 8, 3, -100, 1]), torch.tensor([1, 1, 0, 1, 1])
    given = {
        "hidden": values(5, 4),
        "weight": values(9, 4),
        "bias": values(9),
        "token_ids": ids,
        "mask": mask,
    }
    return given | {"return_lse": True, "temperature": torch.full((5,), 0.7)}


CALLS: dict[str, Callable[[], Args]] = {
    "det_linear": linear, "det_gemm": gemm, "logp": logits, "linear_logp": head,
}  # fmt: skip

every_call = pytest.mark.parametrize("name", CALLS)

Way = Callable[[str, Args], tuple[Tensor, ...]]


def several(outputs: Any) -> tuple[Tensor, ...]:
    """Outputs that were requested: the dispatcher returns empty tensors where the direct path has none."""
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple(t for t in found if t is not None and t.numel())


def short(name: str, args: Args) -> tuple[Tensor, ...]:
    return several(OPS[name](**args))


def dispatched(name: str, args: Args) -> tuple[Tensor, ...]:
    op = OPS[name]
    return several(op.torch_op(*op.contract.to_torch(op.bind(args))))


def asking_for(needs: tuple[str, ...], args: Args) -> Args:
    """The same with gradients for these arguments, in separate tensors."""

    def own(name: str, t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_(name in needs)

    return {name: own(name, v) if isinstance(v, Tensor) else v for name, v in args.items()}


def differentiated(way: Way, name: str, args: Args, needs: tuple[str, ...]) -> list[Tensor]:
    """Outputs that have gradients, and gradients."""
    outputs = [t for t in way(name, args) if t.requires_grad]
    grads = torch.autograd.grad(outputs, [args[n] for n in needs], [values(*t.shape).to(t) for t in outputs])
    return [*outputs, *grads]


def both(name: str, needs: tuple[str, ...], around: Callable[..., list[Tensor]] = differentiated) -> None:
    """Calls of one kind, one after the other, beside one through the dispatcher."""
    wanted = around(dispatched, name, asking_for(needs, CALLS[name]()), needs)
    assert len(wanted) > len(needs)
    OPS[name].forget()
    for _ in range(3):
        found = around(short, name, asking_for(needs, CALLS[name]()), needs)
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


SUBSETS = [
    (name, needs)
    for name in CALLS
    for n in range(1, 4)
    for needs in itertools.combinations(OPS[name].differentiable, n)
]


# Gradients


@pytest.mark.parametrize(("name", "needs"), SUBSETS)
def test_gradients_are_those_of_the_dispatcher_s_way(name: str, needs: tuple[str, ...]) -> None:
    both(name, needs)


@every_call
def test_without_gradients_outputs_are_those_of_the_dispatcher_s_way(name: str) -> None:
    wanted = dispatched(name, CALLS[name]())
    for _ in range(3):
        for ours, theirs in zip(short(name, CALLS[name]()), wanted, strict=True):
            assert torch.equal(ours, theirs) and not ours.requires_grad


@every_call
def test_a_graph_can_be_walked_twice(name: str) -> None:
    def twice(way: Way, name: str, args: Args, needs: tuple[str, ...]) -> list[Tensor]:
        output = way(name, args)[0]
        inputs = [args[n] for n in needs]
        first = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        second = torch.autograd.grad(output.sum(), inputs)
        assert all(torch.equal(a, b) and a is not b for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="a second time"):
            output.sum().backward()
        return [output, *second]

    both(name, OPS[name].differentiable, twice)


@every_call
def test_gradients_add_up_over_calls(name: str) -> None:
    def added(way: Way, name: str, args: Args, needs: tuple[str, ...]) -> list[Tensor]:
        outputs = [way(name, args)[0] for _ in range(3)]
        for t in outputs:
            t.sum().backward()
        return [*outputs, *(args[n].grad for n in needs)]

    both(name, OPS[name].differentiable, added)


def apart(t: Tensor) -> Tensor:
    """The same numbers in other strides: rows, or numbers of rows, with others between them."""
    if t.ndim == 1:
        return torch.stack((t, t), 1).flatten()[::2] if len(t) == ROWS else t
    return torch.cat((t, t), -1)[..., : t.shape[-1]]


@every_call
def test_saved_tensors_may_be_restored_with_other_strides(name: str) -> None:
    changed: list[bool] = []

    def unpacked(t: Tensor) -> Tensor:
        found = apart(t)
        changed.append(found.stride() != t.stride())
        return found

    def hooked(way: Way, name: str, args: Args, needs: tuple[str, ...]) -> list[Tensor]:
        with saved_tensors_hooks(lambda t: t.detach().clone(), unpacked):
            return differentiated(way, name, args, needs)

    needs = OPS[name].differentiable
    both(name, needs, hooked)
    found, wanted = (
        f(short, name, asking_for(needs, CALLS[name]()), needs) for f in (hooked, differentiated)
    )
    assert any(changed) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@every_call
def test_checkpoints(name: str, reentrant: bool) -> None:
    def kept(way: Way, name: str, args: Args, needs: tuple[str, ...]) -> list[Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            return way(name, args | dict(zip(needs, tensors, strict=True)))[0]

        inputs = [args[n] for n in needs]
        output = checkpoint(call, *inputs, use_reentrant=reentrant)
        output.sum().backward()
        return [output, *(t.grad for t in inputs)]

    both(name, OPS[name].differentiable, kept)


@every_call
def test_there_is_no_second_derivative(name: str) -> None:
    needs = OPS[name].differentiable
    for _ in range(3):
        args = asking_for(needs, CALLS[name]())
        inputs = [args[n] for n in needs]
        output = short(name, args)[0]
        grads = torch.autograd.grad(
            output, inputs, torch.ones_like(output).requires_grad_(), create_graph=True
        )
        with pytest.raises(RuntimeError, match=rf"^isobit\.{name} has no second derivative"):
            sum(g.float().sum() for g in grads).backward()


@every_call
def test_transforms_see_through_calls_like_earlier_ones(name: str) -> None:
    needs = OPS[name].differentiable
    for _ in range(2):
        args = asking_for(needs, CALLS[name]())
        wanted = torch.autograd.grad(short(name, args)[0].sum(), [args[n] for n in needs])
        plain = asking_for((), args)

        def loss(*tensors: Tensor) -> Tensor:
            return short(name, plain | dict(zip(needs, tensors, strict=True)))[0].sum()

        found = torch.func.grad(loss, argnums=tuple(range(len(needs))))(*(plain[n] for n in needs))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_vmap_is_a_loop_over_calls_like_earlier_ones() -> None:
    args = CALLS["det_linear"]()
    wanted = short("det_linear", args)[0]
    for _ in range(3):
        each = torch.func.vmap(lambda x: OPS["det_linear"](**args | {"x": x}))(args["x"])
        assert torch.equal(each, wanted)
        assert torch.equal(short("det_linear", args)[0], wanted)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [("det_gemm", "a", "b"), ("det_linear", "x", "weight"), ("logp", "token_ids", "mask")],
)
def test_a_tensor_that_is_given_twice_is_two_to_the_next_call(name: str, one: str, other: str) -> None:
    """Nothing that is remembered of a kind takes the one for the other."""
    needs = OPS[name].differentiable[:2]
    if name == "logp":
        args = CALLS["logp"]() | {
            "token_ids": torch.tensor([0, 1, 2, 3, 0]),
            "mask": torch.tensor([1, 0, 0, 1, 1]),
        }
    else:
        args = {one: values(16, 16, dtype=BF16), other: values(16, 16, dtype=BF16).flip(0).contiguous()}
    wanted = differentiated(dispatched, name, asking_for(needs, args), needs)
    OPS[name].forget()
    for _ in range(2):
        twice = asking_for(needs, args)
        twice[other] = twice[one]
        short(name, twice)[0].float().sum().backward()
        found = differentiated(short, name, asking_for(needs, args), needs)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# Changes of autograd's state between calls with the same tensors


@every_call
def test_the_mode_of_autograd_may_change_between_calls(name: str) -> None:
    args = asking_for(OPS[name].differentiable, CALLS[name]())
    wanted = dispatched(name, args)[0].detach()
    for _ in range(3):
        assert short(name, args)[0].requires_grad
        with torch.no_grad():
            assert not short(name, args)[0].requires_grad
        with torch.inference_mode():
            inside = short(name, args)[0]
        assert inside.is_inference() and torch.equal(inside, wanted)
        outside = short(name, args)[0]
        assert not outside.is_inference() and torch.equal(outside, wanted)


@every_call
def test_what_requires_a_gradient_may_change_between_calls(name: str) -> None:
    args, needs = CALLS[name](), OPS[name].differentiable
    for which in (*needs, None, *needs, None):
        for n in needs:
            args[n].requires_grad_(n == which)
            args[n].grad = None
        output = short(name, args)[0]
        assert output.requires_grad is (which is not None)
        if which is not None:
            output.sum().backward()
        assert {n for n in needs if args[n].grad is not None} == ({which} if which else set())


def test_tensors_of_inference_are_served_and_cannot_be_saved() -> None:
    args = CALLS["det_linear"]()
    wanted = short("det_linear", args)[0]
    with torch.inference_mode():
        x = args["x"].clone()
    for _ in range(3):
        assert torch.equal(short("det_linear", args | {"x": x})[0], wanted)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            short("det_linear", asking_for(("weight",), args) | {"x": x})
        short("det_linear", asking_for(("weight",), args))[0].sum().backward()


@every_call
def test_a_call_that_fails_leaves_nothing_behind(name: str) -> None:
    """With the same key as a valid call: tensor values are checked every time."""
    needs = OPS[name].differentiable
    wanted = differentiated(short, name, asking_for(needs, CALLS[name]()), needs)
    if "token_ids" in CALLS[name]():
        wrong = asking_for(needs, CALLS[name]())
        wrong["token_ids"] = torch.full((5,), 77)
        for _ in range(2):
            with pytest.raises(ValueError, match="token_ids"):
                short(name, wrong)
    found = differentiated(short, name, asking_for(needs, CALLS[name]()), needs)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("way", [short, dispatched])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_outputs_may_be_written_to(rank: int, way: Way) -> None:
    """As those of `F.linear`: they are no views, whatever a backend returns."""
    args = CALLS["det_linear"]()
    args["x"] = {1: args["x"][0], 2: args["x"], 3: args["x"][None]}[rank]
    for needs in ((), ("x", "weight")) * 2:
        given = asking_for(needs, args)
        output = way("det_linear", given)[0]
        wanted = output.detach() * 2
        output *= 2
        assert torch.equal(output, wanted)
        if needs:
            once, twice = (
                torch.autograd.grad(t.float().sum(), given["weight"])[0]
                for t in (way("det_linear", given)[0], output)
            )
            assert torch.equal(twice, once * 2)
        with torch.no_grad():
            output = way("det_linear", given)[0]
        output.mul_(torch.ones(8, dtype=BF16, requires_grad=True))
        assert output.requires_grad
