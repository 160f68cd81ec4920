"""Functions of rows that isobit has no op for: some that are right, and others with a fault each."""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor


def make() -> dict[str, Any]:
    return {"x": torch.randn(12, 301), "weight": torch.rand(301)}


def make_tokens() -> dict[str, Any]:
    """For the faults of `third_party`, which are candidates for logp."""
    return {"logits": torch.randn(12, 257), "token_ids": torch.randint(0, 257, (12,))}


# Right


def norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.contiguous()  # PyTorch adds up a transposed tensor in another order
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def backwards(x: Tensor, weight: Tensor) -> Tensor:
    """The same from the last column to the first."""
    return norm(x.flip(-1), weight.flip(-1)).flip(-1)


class Both(NamedTuple):
    scaled: Tensor
    rest: dict[str, Any]


def several(x: Tensor, weight: Tensor) -> Both:
    """Outputs in a tuple and a dictionary, of floats and of integers, one of them without a gradient."""
    scaled = norm(x, weight)
    return Both(scaled, {"top": x.argmax(-1), "largest": [x.detach().amax(-1), None]})


@torch.no_grad()
def forward_only(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x, weight)


def contiguous_only(x: Tensor, weight: Tensor) -> Tensor:
    assert x.is_contiguous(), "x must be contiguous"
    return norm(x, weight)


class Norm(torch.nn.Module):
    """A layer with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(301))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight) * self.scale


def sum_in_its_backward(x: Tensor, weight: Tensor) -> Tensor:
    return _Backward.apply(x, weight, "sum")


def other_sum_in_its_backward(x: Tensor, weight: Tensor) -> Tensor:
    return _Backward.apply(x, weight, "other sum")


# With a fault


def zeros(x: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros_like(x)


def one_result_for_all(x: Tensor, weight: Tensor) -> Tensor:
    return weight.expand(x.shape) + 0 * x


def splits_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Splits its sum into as many parts as there are rows."""
    parts = [part.sum(-1) for part in (x * weight).tensor_split(min(len(x), 64), -1)]
    return sum(parts[1:], parts[0])


def centred_over_rows(x: Tensor, weight: Tensor) -> Tensor:
    return (x - x.mean(0)) * weight


def lets_nan_through(x: Tensor, weight: Tensor) -> Tensor:
    """Right for finite rows: 0 * NaN is NaN."""
    return norm(x, weight) + 0.0 * x.detach().sum()


def adds_its_place(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + torch.arange(len(x), device=x.device)[:, None]


def whole_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Leaves the last rows at 0 if there is no whole block of four of them."""
    whole = len(x) // 4 * 4
    return torch.cat([norm(x[:whole], weight), 0.0 * x[whole:]])


@torch.no_grad()
def leaves_a_column(x: Tensor, weight: Tensor) -> Tensor:
    result = torch.empty_like(x)
    result[:, :-1] = norm(x, weight)[:, :-1]
    return result


def overflows(x: Tensor, weight: Tensor) -> Tensor:
    """Softmax without subtracting the largest."""
    e = (100 * x).exp()
    return e / e.sum(-1, keepdim=True)


def reads_past_strides(x: Tensor, weight: Tensor) -> Tensor:
    return norm(x.as_strided(x.shape, (x.shape[1], 1)), weight)


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


def order_by_strides(x: Tensor, weight: Tensor) -> Tensor:
    return (norm if x.is_contiguous() else backwards)(x, weight)


def order_by_autograd(x: Tensor, weight: Tensor) -> Tensor:
    return (norm if torch.is_grad_enabled() else backwards)(x, weight)


def order_by_thread(x: Tensor, weight: Tensor) -> Tensor:
    main = threading.current_thread() is threading.main_thread()
    return (norm if main else backwards)(x, weight)


def order_by_compiler(x: Tensor, weight: Tensor) -> Tensor:
    return (backwards if torch.compiler.is_compiling() else norm)(x, weight)


def drops_some(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x * weight)


def writes(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        weight += 1
    return x * weight


_CALLS: list[int] = []


def other_every_third_time(x: Tensor, weight: Tensor) -> Tensor:
    _CALLS.append(1)
    return (backwards if len(_CALLS) % 3 == 0 else norm)(x, weight)


_BUFFERS: dict[Any, Tensor] = {}


def one_buffer_without_autograd(x: Tensor, weight: Tensor) -> Tensor:
    """The next call without autograd overwrites what this one returned."""
    result = norm(x, weight)
    if torch.is_grad_enabled():
        return result
    return _BUFFERS.setdefault(result.shape, torch.empty_like(result)).copy_(result)


_RING: list[Tensor] = []


@torch.no_grad()
def buffers_in_turn(x: Tensor, weight: Tensor) -> Tensor:
    """Nine buffers for all calls: the tenth overwrites what the first one returned."""
    _RING[:] = [*_RING[1:], _RING[0]] if len(_RING) == 9 else [*_RING, torch.empty(0)]
    _RING[-1].resize_(x.shape).copy_(norm(x, weight))
    return _RING[-1]


class _Backward(torch.autograd.Function):
    """x * weight, with a backward of a kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.kind = kind
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        if ctx.kind == "contiguous":
            grad = torch.empty(0, dtype=grad.dtype).set_(
                grad.untyped_storage(), grad.storage_offset(), grad.shape, (grad.shape[1], 1)
            )
        elif ctx.kind == "view":
            grad = grad.view(-1).view(grad.shape)
        elif ctx.kind == "batch":
            grad = grad * (1 + 1e-3 * len(grad))
        elif ctx.kind == "sum":
            grad = grad.contiguous().sum(-1, keepdim=True)
        elif ctx.kind == "other sum":
            grad = grad.contiguous().flip(-1).sum(-1, keepdim=True)
        elif ctx.kind == "zero":
            grad = 0 * grad
        return grad * weight, None, None


def assumes_contiguous_gradient(x: Tensor, weight: Tensor) -> Tensor:
    return _Backward.apply(x, weight, "contiguous")


def views_its_gradient(x: Tensor, weight: Tensor) -> Tensor:
    return _Backward.apply(x, weight, "view")


def gradient_of_the_batch(x: Tensor, weight: Tensor) -> Tensor:
    return _Backward.apply(x, weight, "batch")


def gradient_of_zero(x: Tensor, weight: Tensor) -> Tensor:
    return _Backward.apply(x, weight, "zero")
