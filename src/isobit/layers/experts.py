"""The experts of a mixture: every token goes to some of them, and their results are weighed and added.

    gate_up[i] = x[t] Wgu[e]^T + bgu[e]     for every row i, a token t and one of its experts e
    y[i]       = (act(gate) up) Wd[e]^T + bd[e]
    out[t]     = sum_j round(y[t, j] w[t, j])     over the experts of the token, in their order

Rows are sorted by expert with one counting sort, so rows of an expert are in the order of tokens. Products
are those of `det_grouped_linear`, the activation that of `swiglu_packed`, and tokens go to their rows and
back by `spread` and `combine`. No token's bits depend on other tokens, forward or backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isobit.frame.composed import validated
from isobit.frame.contract import ContractError, describe
from isobit.ops.combine import combine, spread
from isobit.ops.det_grouped_linear import det_grouped_linear
from isobit.ops.route import expert_rows
from isobit.ops.swiglu import swiglu_packed


def experts_forward(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    gated: Callable[[Tensor], Tensor], gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [tokens, D], experts and weights [tokens, k], gate_up [E, 2 F, D], down [E, D, F] -> [tokens, D].
    `gated` makes F columns of the 2 F between the products. An expert E is none: that row adds nothing."""
    _check_numbers(experts, gate_up.shape[0])
    place, offsets = expert_rows(experts, gate_up.shape[0])
    rows = spread(x, place, validate=False)
    inner = gated(det_grouped_linear(rows, gate_up, offsets, gate_up_bias, validate=False))
    y = det_grouped_linear(inner, down, offsets, down_bias, validate=False)
    return combine(y, weights, place, validate=False)


def _check_numbers(experts: Tensor, count: int) -> None:
    """On a CPU, and everywhere with ISOBIT_VALIDATE=1. Without the check, rows of numbers that are no experts
    add nothing; nothing is read or written out of bounds. A tensor that is traced has no numbers."""
    if type(experts) is not Tensor or torch.compiler.is_compiling():
        return
    if not validated(None, experts.device.type == "cpu"):
        return
    wrong = ((experts < 0) | (experts > count)).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        raise ContractError(
            f"isobit.nn.DetExperts(top_k_index: {describe(experts)}): must be in [0, {count}], the {count} "
            f"experts and {count} for none: {at} is {int(experts[tuple(at)])}"
        )


def gated_by(act_fn: Any) -> Callable[[Tensor], Tensor]:
    """The activation of experts with gates first. A SiLU, PyTorch's or transformers', has a kernel."""
    if type(act_fn).__name__ in ("SiLU", "SiLUActivation"):
        return swiglu_packed

    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        out: Tensor = act_fn(gate) * up
        return out

    return gated


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
        """[tokens, D] of [tokens, D], and the experts of each token and their weights, [tokens, k]. An expert
        that is the number of experts is none; other numbers are an error on CPU tensors, and everywhere with
        ISOBIT_VALIDATE=1."""
        gated = gated_by(self.act_fn)
        return experts_forward(
            hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, gated
        )

    def extra_repr(self) -> str:
        E, D, F = self.down_proj.shape
        return f"{E}, hidden_size={D}, intermediate_size={F}"
