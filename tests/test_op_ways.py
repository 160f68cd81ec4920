"""Guards that every way into an op gives the same: the short way, the dispatcher, fakes, traces, threads,
checkpoints, autocast."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from isobit import ContractError
from toy_op import RAN, by_torch, call, even, ran


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    RAN.clear()
    yield
    RAN.clear()


class Watch(TorchDispatchMode):
    """Sees what reaches PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Labelled(Tensor):
    """A tensor subclass without any behaviour."""


@pytest.mark.parametrize("want_sum", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (0, 4), (2, 0, 3, 5)])
def test_the_direct_path_gives_the_results_of_the_torch_op(shape: tuple[int, ...], want_sum: bool) -> None:
    results = []
    for way in (call, by_torch):
        x = torch.linspace(-1, 1, int(torch.Size(shape).numel())).reshape(shape).requires_grad_()
        y, total, top = way(x, 0.7, want_sum)
        loss = (y * y.detach()).sum() + (total.sum() if want_sum else 0.0)
        results.append([y, total if want_sum else None, top, *torch.autograd.grad(loss, x)])
        # An output that was not requested is None on the direct path, and an empty tensor where a schema
        # needs one.
        assert want_sum or (total is None if way is call else list(total.shape) == [0])
    for short, long in zip(*results, strict=True):
        assert short is long is None or torch.equal(short, long)
    assert ran()[:2] == ran()[2:]


def test_plain_calls_do_not_pay_for_the_dispatcher_and_watched_ones_go_through_it() -> None:
    assert call(even())[1] is None  # the mark of the short way
    with Watch() as watch:
        x = even(requires_grad=True)
        call(x)[0].sum().backward()
    assert [name for name in watch.seen if "test_op" in name] == [
        "isobit.test_op_scale.default", "isobit.test_op_scale_bwd.default",
    ]  # fmt: skip


def test_tensor_subclasses_are_kept() -> None:
    assert type(call(even().as_subclass(Labelled))[0]) is Labelled
    assert type(call(torch.nn.Parameter(even()))[0]) is Tensor


def test_fake_tensors_get_shapes_and_run_nothing() -> None:
    with FakeTensorMode():
        x = torch.empty(6, 4, dtype=torch.bfloat16, requires_grad=True)
        y, total, top = call(x, want_sum=True)
        y.sum().backward()
        assert [(list(t.shape), t.dtype) for t in (y, total, top)] == [
            ([6, 4], torch.float32), ([6], torch.float32), ([6], torch.float32),
        ]  # fmt: skip
        assert x.grad is not None and x.grad.dtype == torch.bfloat16
        with pytest.raises(ContractError, match="must be positive"):
            call(x, -1.0)
    assert RAN == []


def test_meta_tensors_get_shapes() -> None:
    y, _, top = call(torch.empty(6, 4, device="meta"))
    assert list(y.shape) == [6, 4] and list(top.shape) == [6] and y.device.type == "meta"


def test_a_traced_graph_holds_the_ops() -> None:
    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(call(x)[0].sum(), x)[0]

    graph = make_fx(step, tracing_mode="symbolic")(even(requires_grad=True))
    names = [str(node.target) for node in graph.graph.nodes]
    assert "isobit.test_op_scale.default" in names and "isobit.test_op_scale_bwd.default" in names
    assert torch.equal(
        graph(torch.ones(5, 6)), torch.full((5, 6), 2.0)
    )  # other sizes than it was traced with


def test_vmap_is_a_loop_over_calls() -> None:
    x = even(requires_grad=True)
    y = torch.func.vmap(lambda row: call(row)[0])(x)
    assert torch.equal(y, 2.0 * x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradient(reentrant: bool) -> None:
    x = even(requires_grad=True)
    y = checkpoint(lambda x: call(x * 1.0, backend="exact")[0], x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0)) and ran() == ["exact", "exact", "exact"]


def test_threads_do_not_disturb_each_other() -> None:
    found: dict[int, bool] = {}

    def work(i: int) -> None:
        for _ in range(20):
            x = torch.full((3, 4), 1.0, requires_grad=True)
            y = call(x, float(i + 1))[0]
            y.sum().backward()
            found[i] = found.get(i, True) and bool((x.grad == i + 1).all()) and bool((y == i + 1).all())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


# Autocast


@pytest.mark.parametrize("torch_op", [False, True])
def test_autocast_does_not_reach_backends(torch_op: bool) -> None:
    way: Any = by_torch if torch_op else call
    outside, inside = even(requires_grad=True), even(requires_grad=True)
    expected = way(outside, 0.7)[0]
    expected.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (even() @ torch.eye(4)).dtype == torch.bfloat16  # it is on
        found = way(inside, 0.7)[0]
        found.sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, expected) and torch.equal(inside.grad, outside.grad)
    assert ran() == ["fast", "plain", "fast", "plain"] and not any(autocast for _, _, autocast in RAN)
