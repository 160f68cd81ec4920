"""The proof of `route`: rows with ties, extremes and masked tokens, the truth, error bounds, and the sort,
which is compared with PyTorch's stable one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.ops.route import reference
from isobit.ops.route.op import forward, rows_op
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, InputOptions, Kernels, Mutant, Proof
from isobit.spec.trial import Trial

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MB = 1 << 20

#: Options of a case that are arguments, and their defaults.
PLAIN: Args = {"scoring": "softmax", "order": "softmax_topk", "normalize": False, "dtype": None}
PLAIN |= {"groups": None, "top_groups": None}


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    *lead, E, k = case.dims.values()
    N = math.prod(lead)
    gen = torch.Generator().manual_seed(options.seed)
    z = 2 * torch.randn(N, E, generator=gen, dtype=F64 if case.dtype == F64 else F32)
    if case.data == "edge":
        z[1::6, -1:] += 12.0  # the last expert, and a dropped tail
        z[2::6] = 0.5  # all equal: the lower experts
        z[3::6] = (z[3::6] * 2).round() / 2  # some equal
        z[4::6] += 200.0  # exp overflows without the maximum
        z[5::6, ::2] = 0.0
        z[5::6, 1::2] = -0.0  # which is equal to 0
    elif case.data == "constant":
        z.fill_(options.constant)
    args: Args = {"logits": z.to(device, case.dtype).view(*lead, E), "top_k": k}
    args |= {name: case.options.get(name, value) for name, value in PLAIN.items()}
    args |= {"bias": None, "mask": None}
    if case.dtype == F64:
        args["dtype"] = None  # weights in fp64 show what the arithmetic was
    if case.options.get("bias"):
        args["bias"] = torch.linspace(-0.3, 0.3, E)[torch.randperm(E, generator=gen)].to(device)
    if "mask" in case.options:
        live = (torch.arange(N) % 4 != 3).view(lead)
        args["mask"] = alter.mask_in(case.options["mask"], live).to(device)
    return lay_out(args, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    args = alter.laid_out_some(args, ("logits",), layout)
    if args["mask"] is not None and layout == "padded":
        args["mask"] = alter.laid_out(args["mask"], "strided")
    return args


def padding(args: Args, rows: int) -> Args:
    """Rows of NaN and infinities; they must not change others."""
    mask = args["mask"]
    result = {"logits": alter.rows_of_nan(args["logits"], rows)}
    return result if mask is None else result | {"mask": (torch.arange(rows) % 2).to(mask)}


# Truth


def formula(args: Args) -> tuple[Tensor, ...]:
    weights, experts = reference.formula(**{n: v for n, v in args.items() if n != "sort"})
    return weights, experts.int()


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """exp has an error of 2 units, and of its argument's rounding; a quotient and a sum follow. What is then
    rounded to 16 bits may be the other neighbour."""
    z, weights, experts = args["logits"], outputs[0].abs(), outputs[1]
    finite = z.nan_to_num(0.0, 0.0, 0.0)
    top = finite.amax(-1, keepdim=True) if args["scoring"] == "softmax" else 0.0
    units = 2 * (8 + 2 * (finite - top).abs().amax(-1, keepdim=True))
    sizes = {"weights": units * weights, "experts": torch.zeros_like(weights)}
    if cotangents:
        E = z.shape[-1]
        g = cotangents[0].abs()
        p = finite.softmax(-1) if args["scoring"] == "softmax" else finite.sigmoid()
        d = (g * weights).sum(-1, keepdim=True)
        own = torch.where(experts == E, 0, experts).long()
        if args["scoring"] == "sigmoid":
            total = p.gather(-1, own).sum(-1, keepdim=True) if args["normalize"] else 1.0
            each = (g + d) / total * p.gather(-1, own)
        else:
            each = weights * (g + d)
        each = each.masked_fill(experts == E, 0.0)
        sizes["gradient:logits"] = units * (torch.zeros_like(z).scatter(-1, own, each) + p * d)
    return sizes


# Bits


def sorted_rows(trial: Trial) -> list[OutputCheck]:
    """place and offsets are those of a stable sort, for what the op chose and for any numbers: nothing else
    is a promise about them. And masked tokens have none of the rows of experts."""
    args = trial.args()
    routed = trial.op.function(**args, backend=trial.backend)  # type: ignore[misc]
    E = args["logits"].shape[-1]
    what = "against a stable sort"
    checks = _sort_checks(routed.place, routed.offsets, routed.experts, E, what)
    if args["mask"] is not None:
        rest = routed.place[args["mask"] == 0]
        last = routed.offsets[-1].expand_as(rest)
        checks.append(same_bits("2:place", torch.minimum(rest, last), last, "masked tokens come last"))
    if trial.backend not in {backend.name for backend in rows_op.backends}:
        return checks  # a candidate sorts what it chose, and nothing else
    wild = torch.tensor([5, -7, E, 0, 2**31 - 1, 0, E - 1, -(2**31), 1, 0], device=trial.device)
    for dtype in (torch.int32, torch.int64):
        numbers = (wild + (2**40 if dtype == torch.int64 else 0) * (wild == 5)).to(dtype).view(-1, 2)
        place, offsets = rows_op(experts=numbers, count=E, backend=trial.backend)
        checks += _sort_checks(place, offsets, numbers, E, f"{dtype} numbers that are no experts")
    return checks


def _sort_checks(place: Tensor, offsets: Tensor, experts: Tensor, E: int, what: str) -> list[OutputCheck]:
    by_torch = reference.expert_rows(experts, E)
    ours = (("2:place", place), ("3:offsets", offsets))
    return [same_bits(name, t, other, what) for (name, t), other in zip(ours, by_torch, strict=True)]


def renumbered(trial: Trial) -> list[OutputCheck]:
    """A token's experts are the same under other numbers, where no two scores are equal; so are their
    weights, where no sum goes over all experts. That sum is the control: in another order it changes bits."""
    args = trial.args()
    E = args["logits"].shape[-1]
    order = torch.arange(E, device=trial.device).roll(1)
    call = args | {"logits": args["logits"][..., order].contiguous()}
    if args["bias"] is not None:
        call["bias"] = args["bias"][order].contiguous()
    (weights, experts), (other, theirs) = trial.forward(args), trial.forward(call)
    if args["groups"] is not None:
        return []
    back = torch.cat([order, order.new_tensor([E])]).int()[theirs.long()]
    checks = [same_bits("1:experts", back, experts, "experts numbered in another way")]
    if args["scoring"] == "sigmoid" or args["order"] == "topk_softmax":
        checks.append(same_bits("0:weights", other, weights, "experts numbered in another way"))
        return [*checks, _order_of_k(trial, args, weights)] if args["normalize"] else checks
    return [*checks, trial.control("another order of the sum over experts", [weights], [other])]


def _order_of_k(trial: Trial, args: Args, weights: Tensor) -> OutputCheck:
    """The same scores, summed from the last expert on, as the formula would have them: other bits."""
    plain = trial.forward(args | {"normalize": False, "dtype": F32})[0]
    total = plain[..., -1]
    for j in range(plain.shape[-1] - 2, -1, -1):
        total = total + plain[..., j]
    return trial.control(
        "another order of the sum over a token's experts", [weights], [plain / total[..., None]]
    )


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients. The sort has a count for every expert and 64 rows."""
    *lead, E, k = case.dims.values()
    N = math.prod(lead)
    return MB + 8 * (E + 1) * (N * k // 64 + 1) + (0 if backend == "triton" else 80 * N * E)


def record(launch: Any, dtype: torch.dtype) -> None:
    """Both scorings and orders, groups, a bias, a mask, one row of a program and several, few entries to sort
    and many. For others than bf16, which differ only in conversions, one call."""
    from isobit.ops.route import kernels_triton as kernels

    def one(N: int, E: int, k: int, masked: bool = False, **given: Any) -> None:
        logits = torch.empty(N, E, dtype=dtype, device="meta")
        call = {"logits": logits, "top_k": k, "bias": None, "mask": None, "sort": True} | PLAIN | given
        if masked:
            call["mask"] = torch.empty(N, dtype=torch.bool, device="meta")
        if given.get("bias"):
            call["bias"] = torch.empty(E, dtype=F32, device="meta")
        weights, experts, _, _ = kernels.route(launch, **call)
        kernels.route_bwd(launch, **call, experts=experts, dweights=weights)

    one(512, 128, 3, normalize=True)
    if dtype == BF16:
        one(64, 60, 2, order="topk_softmax", dtype=F32, masked=True)
        one(64, 512, 2, scoring="sigmoid", normalize=True, bias=True, groups=8, top_groups=2)


# Cases


def _case(N: int, E: int, k: int, dtype: torch.dtype, **rest: Any) -> Case:
    return Case({"N": N, "E": E, "k": k}, dtype, **rest)


_DEEPSEEK = {"scoring": "sigmoid", "normalize": True, "bias": True, "groups": 4, "top_groups": 2}
_OSS = {"order": "topk_softmax"}

PROOF = Proof(
    op=forward,
    op_class="route",
    outputs=("weights", "experts"),
    judged=lambda args, outputs: outputs[:2],
    make=make,
    formula=formula,
    scale=scale,
    controls=[],  # those of `renumbered` know how experts are numbered
    padding=padding,
    layouts=("padded", "offset", "apart"),
    lay_out=lay_out,
    memory=memory,
    cases=[
        _case(13, 12, 3, F32, options={"normalize": True}),
        _case(13, 32, 4, BF16, options={**_DEEPSEEK, "mask": torch.bool}),
        _case(9, 8, 2, BF16, options={"dtype": F32}),
        Case({"B": 2, "T": 5, "E": 20, "k": 4}, BF16, layout="padded", options={**_OSS, "mask": torch.int64}),
        _case(0, 4, 2, F32),
        _case(7, 5, 5, F16, layout="offset", options={"scoring": "sigmoid"}),
        _case(3, 1, 1, F32),
        _case(4000, 128, 8, BF16, data="random", heavy=True, options={"normalize": True}),
        _case(2000, 256, 8, F32, data="random", heavy=True, options={**_DEEPSEEK, "groups": 8}),
    ],
    bit_cases=[
        _case(20, 32, 3, F32, data="random"),
        _case(30, 24, 7, F32, data="random", options={"scoring": "sigmoid", "normalize": True}),
        _case(3000, 128, 8, F32, data="random", heavy=True),
        _case(3000, 512, 10, F32, data="random", heavy=True),
    ],
    memory_cases=[_case(64, 64, 4, F32, data="random")],
    mutants=[
        Mutant("no expert", "top_k", lambda a: a | {"top_k": 0}),
        Mutant("more than all experts", "top_k", lambda a: a | {"top_k": a["logits"].shape[-1] + 1}),
        Mutant("integer weights", "dtype", lambda a: a | {"dtype": torch.int32}),
        Mutant("a softmax of sigmoids", "order", lambda a: a | {"scoring": "sigmoid"} | _OSS),
        Mutant("a bias of no scores", "bias",
               lambda a: a | _OSS | {"bias": torch.zeros(a["logits"].shape[-1], device=a["logits"].device)}),
        Mutant("groups of one", "groups", lambda a: a | {"groups": a["logits"].shape[-1], "top_groups": 1}),
        Mutant("no number of groups", "top_groups", lambda a: a | {"groups": 2}),
        Mutant("a number without groups", "top_groups", lambda a: a | {"top_groups": 2}),
        Mutant("too few in the groups", "top_k",
               lambda a: a | {"groups": 2, "top_groups": 1, "top_k": a["logits"].shape[-1] // 2 + 1}),
    ],
    bad_value=None,
    kernels={"triton": Kernels(record)},
    agree_cases=[
        _case(40, 12, 3, F32, options={"mask": torch.bool}),
        _case(150, 7, 1, BF16),
        _case(20000, 128, 8, BF16, data="random", heavy=True),
        _case(70000, 512, 10, BF16, data="random", heavy=True, options={"mask": torch.bool}),
    ],
    parts=renumbered,
    also=sorted_rows,
)  # fmt: skip

PROOFS = [PROOF]
