"""The proof of `det_grouped_linear`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import GROUP
from isobit.numerics import canonical, chain
from isobit.ops.det_gemm.op import det_linear
from isobit.ops.det_gemm.proof import inputs as of_products
from isobit.ops.det_gemm.proof import truth
from isobit.ops.det_gemm.proof.gemm import HOPPER, MB, memory_of_model
from isobit.ops.det_grouped_linear.op import linear
from isobit.ops.det_grouped_linear.proof import inputs
from isobit.ops.det_grouped_linear.proof.inputs import INT64, groups
from isobit.ops.det_grouped_linear.proof.plans import BLANK, Plan, in_other_order, plans, taken
from isobit.spec import error_bounds as errors
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, Control, Kernels, Mutant, Proof, Sample
from isobit.spec.trial import Trial

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

#: Experts whose gradients are sampled.
SAMPLED_EXPERTS = 5


def _flat(args: Args) -> Args:
    return args | {"x": args["x"].flatten(0, -2)}


# Numbers


def formula(args: Args) -> tuple[Tensor, ...]:
    x, weight, bias = args["x"].flatten(0, -2), args["weight"], args["bias"]
    parts = [
        truth.product(x[first:end], weight[e].mT, None if bias is None else bias[e], None)
        for e, first, end in groups(args)
    ]
    parts.append(x.new_zeros(len(x) - sum(map(len, parts)), weight.shape[1]))
    return (torch.cat(parts).view(*args["x"].shape[:-1], weight.shape[1]),)


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """As `det_linear`, expert by expert."""
    x, weight, bias = args["x"].flatten(0, -2), args["weight"], args["bias"]
    sizes = {"y": x.new_zeros(len(x), weight.shape[1])}
    if cotangents:
        dy = cotangents[0].flatten(0, -2)
        sizes |= {"gradient:x": torch.zeros_like(x), "gradient:weight": torch.zeros_like(weight)}
        sizes["gradient:bias"] = weight.new_zeros(weight.shape[:2])
    for e, first, end in groups(args):
        own = slice(first, end)
        of_sum, sums = errors.chain_error(x[own], weight[e].mT)
        if bias is not None:
            of_sum = of_sum + (sums + bias[e]).abs()
        sizes["y"][own] = errors.rounded(of_sum, None)
        if cotangents:
            bounds, ones = errors.cut([end - first], errors.SEGMENT), dy.new_ones(end - first, 1)
            sizes["gradient:x"][own] = errors.rounded(errors.chain_error(dy[own], weight[e])[0], None)
            for name, other in (("weight", x[own]), ("bias", ones)):
                error = errors.rounded(errors.segment_error(dy[own].mT, other, bounds, None), None)
                sizes[f"gradient:{name}"][e] = error if name == "weight" else error[:, 0]
    lead = args["x"].shape[:-1]
    return {n: s.view(*lead, s.shape[-1]) if n in ("y", "gradient:x") else s for n, s in sizes.items()}


# The exact bits of the class


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    x, weight, bias = args["x"].flatten(0, -2), args["weight"], args["bias"]
    lead, own = args["x"].shape[:-1], x.dtype
    result = {"y": _rows(args, x, weight.mT, bias, lead)}
    if not cotangents:
        return result
    dy = cotangents[0].flatten(0, -2)
    result["gradient:x"] = _rows(args, dy, weight, None, lead)
    several = sorted(groups(args), key=lambda group: group[1] - group[2])[:SAMPLED_EXPERTS]
    experts = torch.tensor([e for e, _, _ in several])
    of_weight, of_bias, where = [], [], None
    for _, first, end in several:
        rows, ones = x[first:end], dy.new_ones(end - first, 1)
        where, bits = truth.segment_sample(dy[first:end].mT, rows, [end - first], None, own)
        of_weight.append(bits)
        dtype = own if bias is None else bias.dtype
        _, bits = truth.segment_sample(dy[first:end].mT, ones, [end - first], None, dtype)
        of_bias.append(bits[:, 0])
    if where is not None:
        index = (experts[:, None, None], *(i[None] for i in where))
        result["gradient:weight"] = index, torch.stack(of_weight)
        if bias is not None:
            result["gradient:bias"] = (experts[:, None], where[0].flatten()[None]), torch.stack(of_bias)
    return result


def _rows(args: Args, a: Tensor, b: Tensor, bias: Tensor | None, lead: Sequence[int]) -> Sample:
    """Some rows of a [M, K] b[e] [K, N] + bias[e]: 0 for those of no expert."""
    rows, columns = truth.places(len(a)), truth.places(b.shape[-1])
    result = torch.zeros(len(rows), len(columns))
    for e, first, end in groups(args):
        here = (first <= rows) & (rows < end)
        if here.any():
            left, right = a[rows[here].to(a.device)].cpu(), b[e][:, columns.to(b.device)].cpu()
            total = chain(left, right)
            if bias is not None:
                total = canonical(total + bias[e][columns.to(bias.device)].cpu().float())
            result[here] = total
    return truth.at(lead, rows, columns), truth.rounded(result, a.dtype)


# Bits


def invariant(trial: Trial) -> list[OutputCheck]:
    """A row of y and of dx depends on the row and on its expert's parameters; dweight and dbias of an expert
    depend on the expert's rows and their order. Nothing depends on other experts, on their number or their
    order, or on rows of none."""
    args = _flat(trial.args())
    outputs, grads = trial.backward(args)
    whole = (outputs[0], grads)
    dy = trial.cotangents(outputs)[0]
    sizes = trial.proof.batch_sizes if trial.device.type == "cuda" else (1, 7)
    checks = [check for plan in plans(args, sizes) for check in _same(trial, plan, args, dy, whole)]
    rest = slice(int(args["offsets"][-1]), None)
    nothing = {"0:y": outputs[0][rest]} | ({"gradient:x": grads["x"][rest]} if "x" in grads else {})
    checks += [same_bits(n, t, torch.zeros_like(t), "rows of no expert are 0") for n, t in nothing.items()]
    other = torch.int64 if args["offsets"].dtype == torch.int32 else torch.int32
    changed = {"offsets in another dtype": args | {"offsets": args["offsets"].to(other)}}
    changed |= {f"layout {each}": inputs.lay_out_linear(args, each) for each in trial.proof.layouts}
    for what, call in changed.items():
        ours = replace(trial.in_class(call), given=(dy,)).backward(call)
        checks += _compared(what, (ours[0][0], ours[1]), whole)
    return checks + _controls(trial, args, dy, whole)


Run = tuple[Tensor, dict[str, Tensor]]


def _compared(what: str, ours: Run, other: Run) -> list[OutputCheck]:
    checks = [same_bits("0:y", ours[0], other[0], what)]
    return checks + [same_bits(f"gradient:{n}", ours[1][n], other[1][n], what) for n in other[1]]


def _called(trial: Trial, plan: Plan, args: Args, dy: Tensor) -> Run:
    index, experts = plan.index(trial.device), plan.experts(trial.device)
    call = args | {"x": taken(args["x"], index), "offsets": plan.offsets(args["offsets"])}
    call |= {n: taken(args[n], experts) for n in ("weight", "bias") if args[n] is not None}
    outputs, grads = replace(trial, given=(taken(dy, index),)).backward(call)
    return outputs[0], grads


def _same(trial: Trial, plan: Plan, args: Args, dy: Tensor, whole: Run) -> list[OutputCheck]:
    y, grads = _called(trial, plan, args, dy)
    index = plan.index(trial.device)
    kept = (index != BLANK).nonzero()[:, 0]
    theirs = index[kept]
    checks = [same_bits("0:y", y[kept], whole[0][theirs], plan.what)]
    if "x" in grads:
        checks.append(same_bits("gradient:x", grads["x"][kept], whole[1]["x"][theirs], plan.what))
    pairs = plan.whole(args)
    if pairs:
        places, experts = (torch.tensor(side, device=trial.device) for side in zip(*pairs, strict=True))
        for name in grads.keys() - {"x"}:
            ours, other = grads[name][places], whole[1][name][experts]
            checks.append(same_bits(f"gradient:{name}", ours, other, plan.what))
    return checks


def _controls(trial: Trial, args: Args, dy: Tensor, whole: Run) -> list[OutputCheck]:
    """Other orders of the same sums must change bits."""
    checks = [
        trial.control(control.what, [whole[0]], trial.forward(control.change(args)))
        for control in LINEAR.controls  # type: ignore[union-attr]
    ]
    return checks + (controls_of_gradients(trial, args, dy) if whole[1] else [])


def controls_of_gradients(trial: Trial, args: Args, dy: Tensor) -> list[OutputCheck]:
    """Of sums that cancel: rounded to 16 bits, others seldom show their order. A sum over at most 16 rows, or
    as many columns, is one step and has none."""
    checks = []
    if max(end - first for _, first, end in groups(args)) > GROUP:
        index, sign = _mirrored_rows(args)
        call, given = args | {"x": args["x"][index]}, dy[index] * sign
        _, before = replace(trial, given=(given,)).backward(call)
        _, after = _called(trial, in_other_order(args, GROUP // 2), call, given)
        names = sorted(before.keys() - {"x"})
        what = "another first row of every expert in dweight"
        checks.append(trial.control(what, [before[n] for n in names], [after[n] for n in names]))
    if dy.shape[-1] > GROUP:
        index, sign = mirrored(dy.shape[-1], trial.device)
        call, given = args | {"weight": args["weight"][:, index], "bias": None}, dy[:, index] * sign.to(dy)
        _, before = replace(trial, given=(given,)).backward(call)
        call = call | {"weight": alter.in_other_groups(call["weight"], 1)}
        _, after = replace(trial, given=(alter.in_other_groups(given, -1),)).backward(call)
        what = "another order of the groups of 16 columns in dx"
        checks.append(trial.control(what, [before["x"]], [after["x"]]))
    return checks


def mirrored(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(index, sign) by which the second half of `count` terms is the first one with another sign. A term that
    is left over is 0."""
    half = count // 2
    at, sign = torch.arange(count, device=device), torch.ones(count, device=device)
    at[half : 2 * half] -= half
    sign[half : 2 * half] = -1.0
    sign[2 * half :] = 0.0
    return at, sign


def _mirrored_rows(args: Args) -> tuple[Tensor, Tensor]:
    """The same for the rows of every expert; those of none stay."""
    x = args["x"]
    index, sign = torch.arange(len(x), device=x.device), x.new_ones(len(x), 1)
    for _, first, end in groups(args):
        own, factor = mirrored(end - first, x.device)
        index[first:end], sign[first:end, 0] = first + own, factor.to(x.dtype)
    return index, sign


def as_det_linear(trial: Trial) -> list[OutputCheck]:
    """Expert by expert the bits of `det_linear`, forward and backward."""
    args = _flat(trial.args())
    outputs, grads = trial.backward(args)
    dy, checks = trial.cotangents(outputs)[0], []
    several = sorted(groups(args), key=lambda group: group[1] - group[2])[: SAMPLED_EXPERTS - 2]
    for e, first, end in several:
        if first == end:
            continue
        what = f"expert {e} against det_linear"
        leaves = {n: args[n][e] for n in ("weight", "bias") if args[n] is not None}
        leaves = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
        leaves["x"] = args["x"][first:end].detach().clone().requires_grad_()
        y = det_linear(**leaves, numerics=trial.numerics)
        checks.append(same_bits("0:y", outputs[0][first:end], y.detach(), what))
        if not grads:
            continue
        theirs = torch.autograd.grad(y, list(leaves.values()), dy[first:end])
        for name, theirs_one in zip(leaves, theirs, strict=True):
            ours = grads["x"][first:end] if name == "x" else grads[name][e]
            checks.append(same_bits(f"gradient:{name}", ours, theirs_one, what))
    return checks


# Kernels, memory, cases


def record(module: str, launch: Any, dtype: torch.dtype) -> None:
    """Tiles for few rows of an expert and for many, both orders of the weight, with and without bias."""
    kernels = import_module(f"isobit.ops.det_grouped_linear.{module}")
    E, K, N = 64, 2048, 1536

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for M, transposed in ((128, False), (2048, True), (32768, False)):
        weight = empty(E, K, N).mT if transposed else empty(E, N, K)
        bias = empty(E, N) if transposed else None
        offsets = empty(E + 1, dtype=torch.int32)
        kernels.product(empty(M, K), weight, offsets, bias, launch=launch)


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients: the list of strips."""
    *lead, E, K, N = case.dims.values()
    M = torch.Size(lead).numel()
    if backend == "model":
        return memory_of_model(M, K, N) + 16 * E * N * K
    return MB + 16 * (M + E)


LINEAR = Proof(
    op=linear,
    op_class="product",
    outputs=("y",),
    make=inputs.make_linear,
    formula=formula,
    scale=scale,
    controls=[
        Control(
            "another order of the groups of 16 k",
            lambda args: args | {n: alter.in_other_groups(args[n], -1) for n in ("x", "weight")},
        ),
        Control(
            "8 zeros before the first k",
            lambda args: args | {n: alter.after_zeros(args[n], -1) for n in ("x", "weight")},
        ),
    ],
    padding=lambda args, rows: {"x": alter.rows_of_nan(args["x"], rows)},
    layouts=of_products.LAYOUTS,
    lay_out=inputs.lay_out_linear,
    memory=memory,
    cases=[
        Case({"M": 40, "E": 4, "K": 48, "N": 24}, BF16, options={"bias": F32}),
        Case({"M": 0, "E": 3, "K": 8, "N": 5}, BF16, options={"bias": "own"}),
        Case({"M": 7, "E": 3, "K": 0, "N": 5}, BF16, options={"bias": F32}),
        Case({"M": 17, "E": 1, "K": 1, "N": 1}, F16, options={"bias": "own", "groups": "one"}),
        Case({"B": 2, "T": 10, "E": 5, "K": 40, "N": 20}, BF16, options={"bias": "own"}),
        Case({"M": 65, "E": 6, "K": 15, "N": 17}, F16, layout="padded", options={"groups": "one"}),
        Case({"M": 20, "E": 9, "K": 72, "N": 33}, BF16, layout="offset", options={"offsets": INT64}),
        Case({"M": 50, "E": 3, "K": 17, "N": 9}, BF16, layout="strided", options={"bias": F32}),
        Case({"M": 70, "E": 2, "K": 64, "N": 16}, F16, layout="transposed", options={"groups": "routed"}),
        Case({"M": 600, "E": 64, "K": 1032, "N": 520}, BF16, layout="apart", heavy=True,
             options={"bias": "own"}),
        Case({"M": 9000, "E": 8, "K": 1024, "N": 515}, F16, heavy=True, options={"bias": F32}),
    ],
    bit_cases=[
        Case({"M": 90, "E": 6, "K": 200, "N": 40}, F16, data="cancelling"),
        Case({"M": 100, "E": 4, "K": 136, "N": 24}, F16, data="cancelling", layout="transposed"),
        Case({"M": 560, "E": 2, "K": 40, "N": 40}, F16, data="cancelling",
             options={"groups": "one", "bias": F32}),
        Case({"M": 4096, "E": 128, "K": 2048, "N": 1536}, BF16, data="random", heavy=True,
             options={"groups": "routed"}),
        Case({"M": 20000, "E": 64, "K": 768, "N": 2048}, BF16, data="random", heavy=True,
             options={"bias": "own"}),
        Case({"M": 200, "E": 512, "K": 512, "N": 1024}, F16, data="random", heavy=True),
        Case({"M": 16000, "E": 8, "K": 1024, "N": 2051}, BF16, data="random", heavy=True),
    ],
    memory_cases=[
        Case({"M": 64, "E": 4, "K": 128, "N": 64}, BF16, data="random", options={"bias": "own"}),
        Case({"M": 8192, "E": 32, "K": 1024, "N": 2048}, BF16, data="random", heavy=True,
             options={"bias": "own"}),
    ],
    mutants=[
        Mutant("fp32 operands", "x", lambda args: args | {n: args[n].float() for n in ("x", "weight")}),
        Mutant("two dtypes", "weight", lambda args: args | {"weight": alter.in_other_dtype(args["weight"])}),
        Mutant("one weight for all", "weight", lambda args: args | {"weight": args["weight"][0]}),
        Mutant("float offsets", "offsets", lambda args: args | {"offsets": args["offsets"].float()}),
        Mutant("an offset too few", "offsets", lambda args: args | {"offsets": args["offsets"][:-1]}),
        Mutant("no offsets", "offsets",
               lambda args: args | {"offsets": args["offsets"][:0], "weight": args["weight"][:0]}),
        Mutant("a bias for all", "bias", lambda args: args | {"bias": args["weight"][0, :, 0].clone()}),
        Mutant("a bias of another dtype", "bias",
               lambda args: args | {"bias": alter.in_other_dtype(args["weight"][..., 0])}),
    ],
    bad_value=inputs.descending,
    kernels={
        "hopper": Kernels(partial(record, "kernels_hopper"), targets=HOPPER),
        "triton": Kernels(partial(record, "kernels_triton")),
    },
    exact=exact,
    # Of 16-bit outputs few show another order, unless most of a sum cancels.
    agree_cases=[
        Case({"M": 60, "E": 5, "K": 200, "N": 23}, BF16, data="cancelling"),
        Case({"M": 40, "E": 3, "K": 104, "N": 24}, F16, data="cancelling", options={"bias": F32}),
        Case({"M": 60, "E": 4, "K": 200, "N": 32}, BF16, data="special", options={"groups": "routed"}),
        Case({"M": 560, "E": 2, "K": 40, "N": 40}, F16, data="cancelling",
             options={"groups": "one", "bias": "own"}),
        Case({"M": 700, "E": 9, "K": 1000, "N": 264}, BF16, data="special", heavy=True),
        Case({"M": 8192, "E": 32, "K": 1024, "N": 768}, BF16, data="cancelling", heavy=True,
             options={"groups": "routed"}),
        Case({"M": 256, "E": 64, "K": 768, "N": 1024}, F16, data="cancelling", heavy=True,
             options={"bias": "own"}),
    ],
    slow=("model",),
    invariant=invariant,
    also=as_det_linear,
)  # fmt: skip
