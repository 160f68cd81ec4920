"""Guards how ops live in PyTorch: `torch.func`, profilers, FLOP counters, roundings that compilers keep."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.func import grad, jvp, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

import isobit

GEN = torch.Generator().manual_seed(3)
IDS = torch.tensor([1, 2, 6])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GEN).to(dtype)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="isobit: det_gemm")  # that the model is slow is known
        yield


#: A scalar of a call, and what it depends on.
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "logp": (lambda z: isobit.logp(z, IDS, temperature=0.7).sum(), (randn(3, 7),)),
    "linear_logp": (lambda h, w: isobit.linear_logp(h, w, IDS).sum(), (randn(3, 4), randn(7, 4))),
    "det_gemm": (
        lambda a, b: isobit.det_gemm(a, b, out_dtype=torch.float32).square().sum(),
        (randn(3, 16, dtype=torch.bfloat16), randn(16, 5, dtype=torch.bfloat16)),
    ),
    "det_linear": (
        lambda x, w, b: isobit.det_linear(x, w, b, out_dtype=torch.float32).square().sum(),
        (randn(3, 16, dtype=torch.bfloat16), randn(5, 16, dtype=torch.bfloat16), randn(5)),
    ),
}


@pytest.fixture(params=sorted(CALLS))
def call(request: pytest.FixtureRequest) -> Any:
    """A function, where to take its gradients, and those that autograd finds."""
    function, at = CALLS[request.param]
    leaves = [t.clone().requires_grad_() for t in at]
    return function, at, torch.autograd.grad(function(*leaves), leaves)


def test_grad_and_vjp_are_what_autograd_finds(call: Any) -> None:
    function, at, known = call
    found = grad(function, argnums=tuple(range(len(at))))(*at)
    pulled = vjp(function, *at)[1](torch.ones(()))
    for ours, theirs, other in zip(found, known, pulled, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, other)


def test_vmap_of_grad_is_a_loop_over_calls(call: Any) -> None:
    function, at, known = call
    several = (torch.stack([at[0], at[0] * 2.0]), *at[1:])
    dims = (0, *(None for _ in at[1:]))
    found = vmap(grad(function, argnums=tuple(range(len(at)))), dims)(*several)
    assert all(torch.equal(ours[0], theirs) for ours, theirs in zip(found, known, strict=True))


def test_a_second_derivative_is_refused_by_name_in_torch_func_too(call: Any) -> None:
    function, at, _ = call
    with pytest.raises(RuntimeError, match=r"isobit\.\w+ has no second derivative"):
        grad(lambda x: grad(function)(x, *at[1:]).float().sum())(at[0])


def test_forward_mode_is_refused_by_name(call: Any) -> None:
    """Torch's own message tells the caller to implement a function of theirs."""
    function, at, _ = call
    with pytest.raises(NotImplementedError, match=r"isobit\.\w+ has no derivative in forward mode"):
        jvp(lambda x: function(x, *at[1:]), (at[0],), (at[0],))


def test_graphs_and_profilers_show_the_name_of_the_op() -> None:
    z = randn(3, 7).requires_grad_()
    with torch.profiler.profile() as profile:
        out = isobit.logp(z, IDS)
        out.sum().backward()
    assert out.grad_fn.name() == "LogpBackward"
    seen = {event.key for event in profile.key_averages()}
    assert {"isobit::logp", "isobit::logp_bwd", "LogpBackward"} <= seen


def test_flops_are_counted() -> None:
    hidden, weight = randn(3, 4).requires_grad_(), randn(7, 4).requires_grad_()
    x, w = randn(3, 16, dtype=torch.bfloat16).requires_grad_(), randn(5, 16, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        isobit.linear_logp(hidden, weight, IDS).sum().backward()
        isobit.det_linear(x, w).sum().backward()
        isobit.det_gemm(x.detach(), w.t())
    counts = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {
        "isobit.linear_logp": 2 * 3 * 4 * 7,
        "isobit.linear_logp_bwd": 3 * 2 * 3 * 4 * 7,  # the logits again, dhidden, dweight
        "isobit.det_linear": 2 * 3 * 16 * 5,
        "isobit.det_linear_bwd": 2 * 3 * 16 * 5,  # dx; the weight is frozen
        "isobit.det_gemm": 2 * 3 * 16 * 5,
    }


def test_autocast_of_fp32_parameters_leaves_no_rounding_to_a_compiler() -> None:
    """A rounding to bf16 that is widened again is one that compilers leave out: none may be in a graph."""
    layer = isobit.nn.DetLinear(48, 24)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(randn(*p.shape))
    seen: list[str] = []

    def collect(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    x, results = randn(40, 48), []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=compiler)):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        y.backward(torch.ones_like(y))
        results.append((y, layer.weight.grad.clone(), layer.bias.grad.clone()))
        assert y.dtype == torch.bfloat16 and layer.weight.grad.dtype == torch.float32
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert "isobit.det_linear.default" in seen and "isobit.det_linear_bwd.default" in seen
    assert not [name for name in seen if "_to_copy" in name or "convert" in name]
    assert torch.equal(results[0][1], results[0][1].bfloat16().float())  # as autocast rounds
