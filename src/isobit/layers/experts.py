"""The experts of a mixture: every token goes to some of them, and their results are weighed and added.

    gate_up[i] = x[t] Wgu[e]^T              for every row i, a token t and one of its experts e
    y[i]       = (act(gate) up) Wd[e]^T
    out[t]     = sum_j round(y[t, j] w[t, j])     over the experts of the token, in their order

Rows are sorted by expert with a stable sort, so rows of an expert are in the order of tokens. Products are
those of `det_grouped_linear`. The sum over a token's experts is made in fp32 in the order in which the router
gives them, and rounded once. No token's bits depend on other tokens. Gradients:

    dx[t]   = sum_j of the rows' gradients, in fp32 in the same order, rounded once
    dw[t,j] = dout[t] . y[t, j], in fp32: halves of the columns are added until one is left
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from isobit.ops.det_grouped_linear import det_grouped_linear


class Rows:
    """Where the rows of tokens are among rows that are sorted by expert. `place` [tokens, k]: the row of each
    expert of a token; `token`: the token of each row; `offsets`: where the rows of experts begin."""

    def __init__(self, experts: Tensor, count: int) -> None:
        """experts [tokens, k], numbers from 0 on; `count` of them, and what is not below belongs to none."""
        by_expert, order = experts.flatten().sort(stable=True)
        self.token = order // experts.shape[1]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        self.place = place.view(experts.shape)
        numbers = torch.arange(count + 1, device=experts.device, dtype=by_expert.dtype)
        self.offsets = torch.searchsorted(by_expert, numbers)


class _Spread(torch.autograd.Function):
    """Rows of tokens, each as often as it has experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return _in_order(dy, place).to(dy.dtype), None, None


class _Combine(torch.autograd.Function):
    """The rows of a token, each times its weight and rounded, added."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, token: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, token, place)
        weighed = [(y[at] * w[:, None]).to(y.dtype) for at, w in _by_turn(place, weights)]
        return _added(weighed).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        y, weights, token, place = ctx.saved_tensors
        dy = dweights = None
        if ctx.needs_input_grad[0]:
            of_row = torch.empty_like(weights).flatten()
            of_row[place.flatten()] = weights.flatten()
            dy = (dout[token] * of_row[:, None]).to(y.dtype)
        if ctx.needs_input_grad[1]:
            dots = [_dot(dout, y[at]) for at in place.unbind(1)]
            dweights = torch.stack(dots, 1).to(weights.dtype)
        return dy, dweights, None, None


def _by_turn(place: Tensor, weights: Tensor) -> Any:
    return zip(place.unbind(1), weights.unbind(1), strict=True)


def _added(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def _in_order(rows: Tensor, place: Tensor) -> Tensor:
    return _added([rows[at] for at in place.unbind(1)])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """By rows, in an order that depends on their length alone. A reduction of PyTorch may take another one
    with other rows next to it."""
    terms = a.float() * b.float()
    while terms.shape[1] > 1:
        half = (terms.shape[1] + 1) // 2
        low, high = terms[:, :half], terms[:, half:]
        terms = torch.cat([low[:, : high.shape[1]] + high, low[:, high.shape[1] :]], 1)
    return terms[:, 0]


def experts_forward(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gated: Callable[[Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """x [tokens, D], experts and weights [tokens, k], gate_up [E, 2 F, D], down [E, D, F] -> [tokens, D].
    `gated` makes F columns of the 2 F between the products."""
    rows = Rows(experts, len(gate_up))
    spread: Tensor = _Spread.apply(x, rows.token, rows.place)
    inner = gated(det_grouped_linear(spread, gate_up, rows.offsets, validate=False))
    y = det_grouped_linear(inner, down, rows.offsets, validate=False)
    out: Tensor = _Combine.apply(y, weights, rows.token, rows.place)
    return out


class DetExperts(nn.Module):
    """The experts of a layer: `gate_up_proj` [E, 2 F, D] with the gates first, `down_proj` [E, D, F], and an
    activation. The parameters have the names and shapes that transformers gives them.

    Example:
        >>> import torch, isobit
        >>> experts = isobit.nn.DetExperts(4, hidden_size=16, intermediate_size=8).bfloat16()
        >>> x = torch.randn(3, 16).bfloat16()
        >>> chosen, weights = torch.tensor([[0, 2], [3, 0], [1, 2]]), torch.rand(3, 2).bfloat16()
        >>> y = experts(x, chosen, weights)
        >>> torch.equal(y[1:2], experts(x[1:2], chosen[1:2], weights[1:2]))  # a token alone
        True
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: nn.Module

    def __init__(self, num_experts: int, *, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        for name, shape in (
            ("gate_up_proj", (num_experts, 2 * intermediate_size, hidden_size)),
            ("down_proj", (num_experts, hidden_size, intermediate_size)),
        ):
            parameter = nn.Parameter(torch.empty(shape))
            nn.init.normal_(parameter, std=shape[-1] ** -0.5)
            setattr(self, name, parameter)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, D] of [tokens, D], and the experts of each token and their weights, [tokens, k]."""
        return experts_forward(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, self.gated
        )

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up

    def extra_repr(self) -> str:
        E, D, F = self.down_proj.shape
        return f"{E}, hidden_size={D}, intermediate_size={F}"
