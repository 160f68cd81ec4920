"""What people use instead of `linear_logp`, the shapes at which both are timed, and the speed goals.

Four series, for N tokens with D features and a vocabulary of V:

    linear_logp          logp, without gradients
    linear_logp_train    and the gradients of hidden states and weight
    linear_logp_frozen   and that of the hidden states alone
    linear_logp_kept     gradients as in training, with memory for all probabilities between the passes

The baseline of all four is G, the time of one bare matrix product of that size: hidden states times weight in
bf16, stored. It computes no log-probability; it is a lower bound of any method, once for the forward and
three or four times with gradients. cuBLAS is slow for odd sizes, so for G the vocabulary is padded to a
multiple of 64: G at V = 50257 is that at 50304.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.bench.goals import Cell, Goal, longer_of_floor_and
from isobit.bench.rival import Rival, cannot_import
from isobit.bench.series import Series, by_rows
from isobit.bench.truth import Truth, truth_of
from isobit.check.proof import Args, Case, Cost
from isobit.check.proofs import proof_of
from isobit.check.trial import in_fp64
from isobit.ops.linear_logp.op import forward
from isobit.ops.linear_logp.proof.inputs import FULL

#: (N, D, V). Vocabularies of GPT-2 (as is and padded), Llama 3, DeepSeek V3, Qwen 2.5, and two round numbers.
SHAPES = (
    (4096, 2048, 32768), (4096, 2048, 50257), (4096, 2048, 50304), (4096, 2048, 131072),
    (8192, 4096, 151936), (16384, 4096, 128256), (2048, 7168, 129280), (512, 896, 151936),
)  # fmt: skip
#: Few rows, forward only: scoring a few sequences, where most of the traffic is the weight.
FEW_ROWS = tuple((N, 4096, 128256) for N in (1, 64, 128, 200))
#: Training only: a long batch on a small model, and a short one on a smaller model.
TRAINED = ((24576, 2048, 128256), (1024, 896, 151936))
#: Vocabularies at which torch.compile is timed, D = 2048: compiling takes tens of seconds.
COMPILED = (32768, 131072)

BASELINE = "bare_gemm"

_VERL = "verl.utils.kernel.linear_cross_entropy"

#: In PyTorch from 2.13 on.
_TORCH = "linear_cross_entropy"


# Rivals


class _Product(torch.autograd.Function):
    """One product, with one column as its output, so that autograd can run. Its gradients are zeros that cost
    nothing: only the product is timed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, filled: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, filled.t())[:, :1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
        return *(t.new_zeros(()).expand_as(t) if needed else None for t, needed in wanted), None


def bare_product(args: Args) -> Tensor:
    out: Tensor = _Product.apply(args["hidden"], args["weight"], args["filled"])
    return out


def filled_weight(args: Args) -> Args:
    """The weight padded with zeros to a multiple of 64 rows."""
    return args | {"filled": F.pad(args["weight"], (0, 0, 0, -len(args["weight"]) % 64))}


def native(args: Args) -> Tensor:
    z = F.linear(args["hidden"], args["weight"], args["bias"]).float()
    if args["logit_scale"] is not None:
        z = z * args["logit_scale"]
    if args["softcap"] is not None:
        z = args["softcap"] * torch.tanh(z / args["softcap"])
    if args["temperature"] != 1.0:
        z = z / args["temperature"]
    return z.log_softmax(-1).gather(-1, args["token_ids"][..., None])[..., 0]


def _cce(args: Args, **options: Any) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    loss = linear_cross_entropy(
        args["hidden"], args["weight"], args["token_ids"], reduction="none", **options
    )
    return -loss


def _liger(args: Args) -> Tensor:
    """Returns the sum over all tokens, a scalar. It computes gradients in its forward, if they are needed."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight = args["hidden"], args["weight"]
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, args["token_ids"])


def _verl(args: Args) -> Tensor:
    """It always computes the entropy too."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    out: Tensor = linear_cross_entropy(args["hidden"], args["weight"], args["token_ids"])[0]
    return out


def _torch(args: Args) -> Tensor:
    linear_cross_entropy: Any = getattr(F, _TORCH)
    return -linear_cross_entropy(args["hidden"], args["weight"], args["token_ids"], reduction="none")


def _needs(module: str, case: Case, device: torch.device) -> str | None:
    return "its kernels need a GPU" if device.type == "cpu" else cannot_import(module)


def _in_torch(case: Case, device: torch.device) -> str | None:
    return None if hasattr(F, _TORCH) else f"not in torch {torch.__version__}"


def _worth_compiling(case: Case, device: torch.device) -> str | None:
    if case.dims["V"] in COMPILED and case.dims["D"] == 2048:
        return None
    return f"compiled for D=2048 and V={' and '.join(map(str, COMPILED))} only"


def _rivals(*more: Rival) -> dict[str, Rival]:
    bare = Rival(BASELINE, bare_product, directions=None, prepare=filled_weight, jit=False, takes=None)
    return {rival.name: rival for rival in (bare, *more)}


_TAKES = ("temperature", "softcap", "logit_scale", "bias", "workspace_bytes")

NATIVE = Rival("native", native, directions=None, jit=False, takes=_TAKES)

_OTHERS = (
    NATIVE,
    Rival("torch.compile", native, directions=None, available=_worth_compiling, compiled=True, takes=_TAKES),
    # By default it skips gradients of small probabilities; the forward is the same either way.
    Rival("cce", _cce, directions=None, available=partial(_needs, "cut_cross_entropy"), graph=False),
    Rival(
        "liger", _liger, directions=None, available=partial(_needs, "liger_kernel.transformers"), graph=False
    ),
    Rival("verl", _verl, directions=None, available=partial(_needs, _VERL)),
    Rival("torch.lce", _torch, directions=None, available=_in_torch),
)
_EXACT = Rival("cce_exact", partial(_cce, filter_eps=None), directions=None,
               available=partial(_needs, "cut_cross_entropy"), graph=False)  # fmt: skip


# The truth


@dataclass(frozen=True)
class Sampled:
    """Truth in fp64: log-probabilities and the gradient of hidden states for sampled rows, or for all rows if
    only their sum can be compared. The gradient of the weight is a sum over all rows and is not compared."""

    args: Args
    inputs: tuple[str, ...]

    @cached_property
    def rows(self) -> Truth:
        found = truth_of(forward, self.args, self.inputs)
        assert found is not None  # its output is row by row
        return found

    @cached_property
    def total(self) -> float:
        ids, hidden = self.args["token_ids"], self.args["hidden"]
        wide = in_fp64({name: v for name, v in self.args.items() if name not in ("hidden", "token_ids")})
        parts = zip(hidden.split(512), ids.split(512), strict=True)
        formula = proof_of(forward).formula
        with torch.no_grad():
            return sum(
                float(formula(wide | {"hidden": h.double(), "token_ids": some})[0].sum()) for h, some in parts
            )

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        """For a sum, the error per row. A bare product has no log-probabilities, so no error."""
        output = result[0]
        if output.shape == self.args["token_ids"].shape:
            return self.rows.error(direction, result)
        if output.ndim == 0:
            return abs(float(output) - self.total) / self.args["token_ids"].numel()
        return None


# Series


def _cost(products: int, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Operands are read once per product, gradients written once; the backward has one product per
    gradient."""
    N, D, V = (dims[name] for name in "NDV")
    operands, flops = (N * D + V * D) * dtype.itemsize, 2 * N * D * V
    return Cost(operands + 12 * N, products * operands, flops, products * flops)


cost_of_training = partial(_cost, 2)


_Sizes = dict[str, int]


def _shape(op: str, chooses: Callable[[_Sizes], bool] = lambda sizes: True) -> Callable[[Cell], bool]:
    return lambda cell: cell.op == op and chooses(cell.sizes)


def _among(shapes: Sequence[tuple[int, ...]]) -> Callable[[_Sizes], bool]:
    return lambda sizes: tuple(sizes[name] for name in "NDV") in shapes


_usual, _few = _among(SHAPES), _among(FEW_ROWS)

#: As fractions of the speed of one product: 1 / 1.02 and so on; `most` as multiples of its time.
GOALS = (
    Goal("logp, D >= 2048",
         _shape("linear_logp", lambda n: _usual(n) and n["D"] >= 2048 and n["V"] % 64 == 0),
         mean=0.980, least=0.926),
    Goal("logp, D = 896", _shape("linear_logp", lambda n: n["D"] == 896), least=0.833),
    Goal("logp, V = 50257", _shape("linear_logp", lambda n: n["V"] == 50257), least=0.800),
    Goal("logp and all gradients", _shape("linear_logp_train", _usual), mean=0.227),
    Goal("logp and the gradient of hidden states", _shape("linear_logp_frozen"), mean=0.303),
    Goal("logp and all gradients, probabilities kept", _shape("linear_logp_kept"), mean=0.294),
    Goal("logp, N <= 200", _shape("linear_logp", _few), most=1.6, against=longer_of_floor_and(BASELINE)),
    Goal("logp, N <= 200", _shape("linear_logp", _few), most=1.0, against="verl"),
    Goal("logp and all gradients, 24576 x 2048 x 128256",
         _shape("linear_logp_train", _among(TRAINED[:1])), most=4.6, against=BASELINE),
    Goal("logp and all gradients, 1024 x 896 x 151936",
         _shape("linear_logp_train", _among(TRAINED[1:])), most=6.0, against=BASELINE),
)  # fmt: skip


def _cases(shapes: Sequence[tuple[int, int, int]]) -> list[Case]:
    return [Case({"N": N, "D": D, "V": V}, torch.bfloat16, data="random") for N, D, V in shapes]


CASES = _cases(SHAPES)
#: The subset for `--core`: a large vocabulary for each of two feature sizes; an odd one is not typical.
_CORE = [case for case in CASES if case.dims["V"] in (131072, 151936) and case.dims["D"] >= 2048]


def _series(
    name: str,
    inputs: tuple[str, ...],
    rivals: dict[str, Rival],
    also: Mapping[str, Sequence[Case]] | None = None,
    more: Sequence[tuple[int, int, int]] = (),
    **options: Any,
) -> Series:
    return by_rows(
        "linear_logp", [*CASES, *_cases(more)], partial(_cost, len(inputs)), rivals, name=name, inputs=inputs,
        judge=lambda args: Sampled(args, inputs), directions=("fwd_bwd",) if inputs else ("fwd",),
        against=BASELINE, copy=False, goals=GOALS if name == "linear_logp" else (), options=options,
        core=_CORE, also=also or {},
    )  # fmt: skip


SERIES: Sequence[Series] = (
    _series("linear_logp", (), _rivals(*_OTHERS), {"triton": _CORE}, FEW_ROWS),
    _series("linear_logp_train", ("hidden", "weight"), _rivals(*_OTHERS, _EXACT), {"triton": _CORE}, TRAINED),
    _series("linear_logp_frozen", ("hidden",), _rivals()),
    _series("linear_logp_kept", ("hidden", "weight"), _rivals(), workspace_bytes=FULL),
)
