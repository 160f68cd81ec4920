"""What people use instead of `linear_logp`, and the shapes at which both are timed.

Six series, for N tokens with D features and a vocabulary of V:

    linear_logp              logp, without gradients
    linear_logp_bias         the same with a bias, next to the same call without it (`isobit:no bias`)
    linear_logp_train        logp, and the gradients of hidden states and weight
    linear_logp_train_bias   and that of the bias
    linear_logp_frozen       logp, and the gradient of the hidden states alone
    linear_logp_kept         gradients as in training, with memory for all probabilities between the passes

The baseline of all six is G, the time of one bare matrix product of that size: hidden states times weight in
bf16, stored. It computes no log-probability; it is a lower bound of any method, once for the forward and
three or four times with gradients. cuBLAS is slow for odd sizes, so for G the vocabulary is padded to a
multiple of 64: G at V = 50257 is that at 50304.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.frame.device import sm_count
from isobit.ops.linear_logp.op import forward, linear_logp
from isobit.ops.linear_logp.proof.inputs import FULL
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.proofs import proof_of
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import Series, by_rows
from isobit.spec.trial import in_fp64
from isobit.spec.truth import Truth, truth_of

#: (N, D, V). Vocabularies of GPT-2 (as is and padded), Llama 3, DeepSeek V3, Qwen 2.5, and two round numbers.
SHAPES = (
    (4096, 2048, 32768), (4096, 2048, 50257), (4096, 2048, 50304), (4096, 2048, 131072),
    (8192, 4096, 151936), (16384, 4096, 128256), (2048, 7168, 129280), (512, 896, 151936),
)  # fmt: skip
#: From one row to the sizes above, forward only, for the heads of an 8B and of a 0.5B model. With few rows
#: most of the traffic is the weight.
FEW_ROWS = tuple(
    (N, D, V) for D, V in ((4096, 128256), (896, 151936)) for N in (1, 16, 64, 128, 192, 320, 640, 1152)
)
#: A long batch on a small model, and rows that are no multiple of a tile.
LONG, UNEVEN = (65536, 1024, 151936), (7000, 3584, 152064)
#: Training only: a long batch on a small model, a short one on a smaller model, and shapes that nothing was
#: tuned for.
TRAINED = (
    (24576, 2048, 128256), (1024, 896, 151936), (6000, 4096, 151936), (28672, 2560, 102400),
    (777, 1536, 151936), (300, 2048, 151936),
)  # fmt: skip
#: Shapes with a bias. The fewer features, the more it costs; the second is forward only, the third training.
BIASED = ((2500, 5120, 100352), (1152, 896, 151936), (150, 5120, 128256))
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
    def forward(ctx: Any, filled: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        return torch.mm(hidden, filled.t())[:, :1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(t.new_zeros(()).expand_as(t) if needed else None for t, needed in wanted)


def bare_product(args: Args) -> Tensor:
    out: Tensor = _Product.apply(args["filled"], args["hidden"], args["weight"], args.get("bias"))
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


def without_bias(args: Args) -> Tensor:
    out = linear_logp(**args | {"bias": None})
    assert isinstance(out, Tensor)  # no entropy was requested
    return out


def _needs(module: str, case: Case, device: torch.device) -> str | None:
    return "its kernels need a GPU" if device.type == "cpu" else cannot_import(module)


#: Libraries for training are timed with few rows, too, but not at each number of them.
_SKIPPED = [shape for shape in FEW_ROWS if shape[0] in (16, 64, 192, 320)]


def _for_training(module: str, case: Case, device: torch.device) -> str | None:
    if tuple(case.dims.get(name) for name in "NDV") in _SKIPPED:
        return "with fewer than 512 rows timed at N=1 and 128 only"
    return _needs(module, case, device)


#: In fp32 16 GB, of which PyTorch holds three at a time.
_MOST_LOGITS = 4e9


def _stored(case: Case, device: torch.device) -> str | None:
    N, V = case.dims["N"], case.dims["V"]
    return f"{N} x {V} logits are not stored" if N * V > _MOST_LOGITS else None


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

NATIVE = Rival("native", native, directions=None, available=_stored, jit=False, takes=_TAKES)

_OTHERS = (
    NATIVE,
    Rival("torch.compile", native, directions=None, available=_worth_compiling, compiled=True, takes=_TAKES),
    # By default it skips gradients of small probabilities; the forward is the same either way.
    Rival("cce", _cce, directions=None, available=partial(_for_training, "cut_cross_entropy"), graph=False),
    Rival("liger", _liger, directions=None,
          available=partial(_for_training, "liger_kernel.transformers"), graph=False),
    Rival("verl", _verl, directions=None, available=partial(_needs, _VERL)),
    Rival("torch.lce", _torch, directions=None, available=_in_torch),
)  # fmt: skip
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
        truth = truth_of(forward, self.args, self.inputs)
        assert truth is not None  # its output is row by row
        return truth

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


def predict(backend: str | None, args: Args) -> float | None:
    """Milliseconds of the forward by the model that chooses its schedule, and what its three kernels, or
    four with shared splits, take in addition to their work."""
    if backend != "hopper":
        return None
    from isobit.ops.linear_logp.kernels_hopper import LAUNCH_US, schedule_for

    (V, D), N, sms = args["weight"].shape, args["token_ids"].numel(), sm_count(args["weight"].device)
    plan = schedule_for(N, D, V, sms)
    return 1e-3 * (plan.us(N, D, V, sms) + (3 + (plan.pieces > 0)) * LAUNCH_US)


def _cases(shapes: Sequence[tuple[int, int, int]]) -> list[Case]:
    return [Case({"N": N, "D": D, "V": V}, torch.bfloat16, data="random") for N, D, V in shapes]


CASES = _cases(SHAPES)
#: The subset for `--core`: a large vocabulary for each of two feature sizes; an odd one is not typical. And
#: some of what a kind of call has of its own, so that the goals for many shapes have cells.
_CORE = [case for case in CASES if case.dims["V"] in (131072, 151936) and case.dims["D"] >= 2048]
_CORE_FEW = [(N, D, V) for N, D, V in FEW_ROWS if N in ((1, 128, 320) if D == 4096 else (64, 192, 640))]


def _series(
    name: str, inputs: tuple[str, ...], rivals: dict[str, Rival], cases: list[Case], core: list[Case],
    **rest: Any,
) -> Series:  # fmt: skip
    products = len(set(inputs) - {"bias"})  # the gradient of a bias is a sum
    return by_rows(
        "linear_logp", cases, partial(_cost, products), rivals, name=name, inputs=inputs, core=core,
        judge=lambda args: Sampled(args, inputs), directions=("fwd_bwd",) if inputs else ("fwd",),
        against=BASELINE, copy=False, **rest,
    )  # fmt: skip


def _bias_series(name: str, inputs: tuple[str, ...], cases: list[Case], **rest: Any) -> Series:
    """Requested sizes get a bias from `--option bias=own` in the other series."""
    options = {"bias": "own"}
    return _series(
        name, inputs, _rivals(NATIVE), cases, cases[:1], options=options, declared_only=True, **rest
    )


_BOTH = ("hidden", "weight")
_UNEVEN, _BIASED = _cases([UNEVEN]), _cases(BIASED)
_CORE_TRAINED = [case for case in _cases(TRAINED) if case.dims["N"] in (300, 777)]

SERIES: Sequence[Series] = (
    _series(
        "linear_logp", (), _rivals(*_OTHERS), CASES + _cases([*FEW_ROWS, LONG]) + _UNEVEN,
        _CORE + _cases(_CORE_FEW) + _UNEVEN, also={"triton": _CORE, "hopper-8x4": CASES}, predict=predict,
        about="log-probabilities, without gradients",
    ),
    _bias_series("linear_logp_bias", (), _BIASED[:2], variants={"no bias": without_bias}, predict=predict,
        about="the same with a bias"),
    _series(
        "linear_logp_train", _BOTH, _rivals(*_OTHERS, _EXACT), CASES + _cases([*TRAINED, LONG]) + _UNEVEN,
        _CORE + _UNEVEN + _CORE_TRAINED, also={"triton": _CORE, "hopper-8x4": _CORE},
        about="with the gradients of hidden states and weight",
    ),
    _bias_series("linear_logp_train_bias", (*_BOTH, "bias"), _BIASED[::2], about="and that of a bias"),
    _series(
        "linear_logp_frozen", ("hidden",), _rivals(), CASES + _UNEVEN, _CORE + _UNEVEN,
        about="with the gradient of the hidden states alone",
    ),
    _series(
        "linear_logp_kept", _BOTH, _rivals(), CASES + _UNEVEN, _CORE + _UNEVEN,
        options={"workspace_bytes": FULL},
        about="all gradients, with memory for all probabilities between the passes",
    ),
)  # fmt: skip
