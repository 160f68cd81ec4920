"""The proof of `delta_gates`: inputs that would expose a wrong kernel, the truth, error bounds, and its class
by definition."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.delta_gates.op import forward
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, InputOptions, Kernels, Mutant, NoSum, Proof
from isobit.spec.trial import Trial

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MB = 1 << 20
BY_ROWS = ("a", "b")


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Option: `wide`, A_log and dt_bias in fp32."""
    *lead, H = case.dims.values()
    gen = torch.Generator().manual_seed(options.seed)
    a, b = (torch.randn(*lead, H, generator=gen) for _ in BY_ROWS)
    if case.data == "edge":
        for t in (a, b):
            rows = t.view(math.prod(lead), H)
            rows[1::5] *= 30.0  # exp overflows, and softplus is the identity
            rows[2::5] -= 20.0  # 1 + e^x is 1
            rows[3::5] = -0.0
            rows[4::5, -1:] += 15.0
    elif case.data == "constant":
        a.fill_(options.constant)
    A_log, dt_bias = torch.randn(H, generator=gen), torch.randn(H, generator=gen)
    own = F32 if case.options.get("wide") else case.dtype
    args = {n: t.to(device, case.dtype) for n, t in (("a", a), ("b", b))}
    args |= {"A_log": A_log.to(device, own), "dt_bias": dt_bias.to(device, own)}
    return alter.laid_out_some(args, BY_ROWS, case.layout)


def padding(args: Args, rows: int) -> Args:
    return {n: alter.rows_of_nan(args[n], rows) for n in BY_ROWS}


# Truth


def formula(args: Args) -> tuple[Tensor, Tensor]:
    """The text of Hugging Face's layer, in fp64 for fp64 inputs and in fp32 for all others."""
    wide = torch.promote_types(args["a"].dtype, F32)
    a, b, A_log, dt_bias = (args[n].to(wide) for n in ("a", "b", "A_log", "dt_bias"))
    return -A_log.exp() * F.softplus(a + dt_bias), torch.sigmoid(b).to(args["b"].dtype)


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """a + dt_bias is rounded, which an exponential multiplies; exp, log and quotients are off by two units.
    A result in 16 bits may round to the other neighbour: twice as far."""
    t, b = args["a"] + args["dt_bias"], args["b"]
    rate, p = args["A_log"].exp() * (1 + args["A_log"].abs()), torch.sigmoid(t)
    plus = F.softplus(t)
    off_t = t.abs() + args["a"].abs() + args["dt_bias"].abs()
    s = torch.sigmoid(b)
    sizes = {"g": rate * (8 * plus + p * off_t), "beta": 2 * (6 * s + s * (1 - s) * b.abs())}
    if cotangents:
        dg, dbeta = cotangents[0].abs(), cotangents[1].abs()
        da = rate * dg * (8 * p + p * (1 - p) * off_t)
        rows = math.sqrt(max(math.prod(t.shape[:-1]), 1))
        every = tuple(range(t.ndim - 1))
        sizes["gradient:a"] = 2 * da
        sizes["gradient:b"] = 2 * dbeta * s * (8 * (1 - s) + s * 8 + b.abs())
        sizes["gradient:dt_bias"] = 2 * rows * da.sum(every)
        sizes["gradient:A_log"] = 2 * rows * (sizes["g"] * dg).sum(every)
    return sizes


# Bits


def by_definition(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """numpy on a CPU. On a GPU nothing is compared with this: its exp is another one."""
    one = np.float32(1)
    with np.errstate(all="ignore"):
        H = args["a"].shape[-1]
        a, b, A_log, dt_bias = (
            args[n].float().reshape(-1, H).numpy() for n in ("a", "b", "A_log", "dt_bias")
        )
        t, rate = a + dt_bias, -np.exp(A_log)
        e = np.exp(t)
        u = one + e
        plus = np.where(u == one, e, np.log(u) * e / np.where(u == one, one, u - one))
        plus = np.where(t > np.float32(20), t, plus)
        s = one / (one + np.exp(-b))
        expected = {"g": rate * plus, "beta": s}
        if cotangents:
            dg, dbeta = (c.float().reshape(-1, H).numpy() for c in cotangents)
            own = rate * np.where(t > np.float32(20), one, one / (one + np.exp(-t))) * dg
            expected |= {"gradient:a": own, "gradient:b": s * (one - s) * dbeta}
            expected["gradient:A_log"] = _over_rows(rate * plus * dg)
            expected["gradient:dt_bias"] = _over_rows(own)
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in expected.items()}


def _over_rows(terms: Any) -> Any:
    """Groups of 16 rows one after another from +0, groups by a tree of neighbours."""
    level = []
    for first in range(0, max(len(terms), 1), 16):
        total = np.zeros(terms.shape[1:], np.float32)
        for term in terms[first : first + 16]:
            total = total + term
        level.append(total)
    while len(level) > 1:
        level += [np.zeros_like(level[0])] * (len(level) % 2)
        level = [a + b for a, b in zip(level[0::2], level[1::2], strict=True)]
    return level[0]


def same_elsewhere(trial: Trial) -> list[OutputCheck]:
    """The class by its definition, on a CPU. Gradients of A_log and dt_bias depend on the sequence of rows
    only, not on their layout nor on rows at the end whose gradient is 0. Control: the rows in another
    order."""
    args = trial.args()
    outputs, grads = trial.backward(args)
    cotangents = trial.cotangents(outputs)
    checks: list[OutputCheck] = []
    if trial.device.type == "cpu":
        ours = dict(zip(("g", "beta"), outputs, strict=True)) | {f"gradient:{n}": x for n, x in grads.items()}
        for name, expected in by_definition(args, cotangents if grads else ()).items():
            own = ours[name]
            same = expected.to(own.dtype).view(own.shape)
            checks.append(same_bits(name, own, same, f"{trial.numerics} by its definition"))
    if not grads:
        return checks
    flat = args | {n: args[n].flatten(0, -2) for n in BY_ROWS}
    flat |= {n: args[n].float() for n in ("A_log", "dt_bias")}
    given = [c.flatten(0, -2) for c in cotangents]

    def sums(changed: Args, given: Sequence[Tensor]) -> list[Tensor]:
        grads = replace(trial, given=tuple(given), only=("A_log", "dt_bias")).backward(changed)[1]
        return [grads["A_log"], grads["dt_bias"]]

    whole = sums(flat, given)

    def same_sums(what: str, ours: Sequence[Tensor]) -> None:
        names = ("gradient:A_log", "gradient:dt_bias")
        checks.extend(same_bits(n, a, b, what) for n, a, b in zip(names, ours, whole, strict=True))

    same_sums("layout padded", sums(alter.laid_out_some(flat, BY_ROWS, "padded"), given))
    longer = flat | {n: torch.cat([flat[n], flat[n][:1].expand(20, -1)]) for n in BY_ROWS}
    ended = [torch.cat([c, torch.zeros_like(c[:1]).expand(20, -1)]) for c in given]
    same_sums("20 rows without a gradient behind", sums(longer, ended))
    rolled = flat | {n: flat[n].roll(1, 0) for n in BY_ROWS}
    checks.append(trial.control("rows rolled by one", whole, sums(rolled, [c.roll(1, 0) for c in given])))
    return checks


# Memory, kernels, cases


def memory(case: Case, backend: str, direction: str) -> int:
    elements = math.prod(case.dims.values())
    if backend == "model":
        return 80 * elements + MB
    return MB + (elements // 8 if direction != "fwd" else 0)


def record(launch: Any, dtype: torch.dtype) -> None:
    """Both kernels, with all gradients and with few. For other dtypes than bf16 one call each."""
    from isobit.ops.delta_gates import kernels_triton

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for full in (True, False) if dtype == BF16 else (True,):
        both = empty(3, 8, 65)[:, :-1]
        a, b = (both[..., :32], both[..., 32:64]) if full else (empty(64, 24), empty(64, 24))
        H = a.shape[-1]
        args: Args = {"a": a, "b": b, "A_log": empty(H, dtype=F32), "dt_bias": empty(H)}
        kernels_triton.delta_gates(launch, **args)
        wanted = {f"want_{n}": full or n == "a" for n in ("a", "b", "A_log", "dt_bias")}
        dg, dbeta = empty(*a.shape, dtype=F32), empty(*a.shape) if full else None
        kernels_triton.delta_gates_bwd(launch, dg=dg, dbeta=dbeta, **args, **wanted)


def _case(N: int, H: int, dtype: torch.dtype, **rest: Any) -> Case:
    own = {n: rest.pop(n) for n in ("data", "layout", "heavy") if n in rest}
    return Case({"N": N, "H": H}, dtype, options=rest, **own)


_SMALL = [
    _case(0, 4, F32),
    _case(7, 5, F32),
    Case({"B": 2, "T": 9, "H": 32}, BF16, layout="shifted", options={"wide": True}),
    _case(19, 3, BF16, layout="padded"),
    _case(5, 16, F16, wide=True),
    _case(6, 1, BF16),
]
MUTANTS = [
    Mutant("b of another dtype", "b", lambda x: x | {"b": alter.in_other_dtype(x["b"])}),
    Mutant("A_log of another dtype", "A_log", lambda x: x | {"A_log": alter.in_other_dtype(x["A_log"])}),
    Mutant("another number of heads", "b", lambda x: x | {"b": x["b"][..., :-1]}),
    Mutant("no heads", "a", lambda x: {n: t[..., :0] for n, t in x.items()}),
]

PROOF = Proof(
    op=forward,
    op_class="delta_gates",
    outputs=("g", "beta"),
    make=make,
    formula=formula,
    scale=scale,
    controls=NoSum("every gate is computed alone"),
    padding=padding,
    layouts=("shifted", "padded", "offset"),
    lay_out=lambda args, layout: alter.laid_out_some(args, BY_ROWS, layout),
    memory=memory,
    cases=[*_SMALL, _case(5000, 32, BF16, data="random", heavy=True)],
    bit_cases=[_case(9, 7, F32, data="random"), _case(3000, 32, BF16, data="random", heavy=True)],
    memory_cases=[_case(64, 32, F32)],
    mutants=MUTANTS,
    bad_value=None,
    kernels={"triton": Kernels(record)},
    agree_cases=[
        _case(300, 3, F32, data="random"),
        _case(20, 32, BF16, wide=True),
        _case(40000, 32, F32, data="random", heavy=True),
    ],
    slow=("model",),
    positive=("H",),
    also=same_elsewhere,
)

PROOFS = [PROOF]
