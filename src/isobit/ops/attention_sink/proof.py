"""The proof of `attention_sink`: inputs that would expose a wrong kernel, the truth, error bounds, and its
class in numpy."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.ops.attention_sink import model, reference
from isobit.ops.attention_sink.op import forward
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof, Sample

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MB = 1 << 20
BY_ROWS = ("x", "lse")


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Options: `sinks`, their dtype if it is wider than that of x."""
    dims = dict(case.dims)
    H, D = dims.pop("H"), dims.pop("D")
    lead = tuple(dims.values())
    where = device if case.heavy or case.data == "random" else torch.device("cpu")
    gen = torch.Generator(where).manual_seed(options.seed)
    wide = F64 if case.dtype == F64 else F32

    def drawn(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=wide, device=where).normal_(generator=gen)

    x, lse, sinks = drawn(*lead, H, D), 2.0 * drawn(*lead, H) + 1.0, drawn(H)
    if case.data == "edge":
        rows, own = x.view(math.prod(lead), H, D), lse.view(math.prod(lead), H)
        rows[1::6, :, -1:] += 50.0  # exposes a dropped tail
        own[2::6] += 300.0  # exp underflows
        own[3::6] -= 300.0  # exp overflows
        own[4::6] = -torch.inf  # queries that see no key
        rows[4::6] = 0.0
        sinks[1::3] = -torch.inf  # heads without a sink
    elif case.data == "constant":
        x.fill_(options.constant)
    args: Args = {"x": x.to(device, case.dtype), "lse": lse.to(device)}
    args["sinks"] = sinks.to(device, torch.promote_types(case.dtype, case.options.get("sinks", case.dtype)))
    return lay_out(args, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    """`heads`: lse in the memory order of attention, [B, H, T]."""
    if layout == "heads":
        return alter.laid_out_some(args, ("lse",), "transposed")
    return alter.laid_out_some(args, BY_ROWS, layout)


def padding(args: Args, rows: int) -> Args:
    """Rows of NaN and infinities; they must not change others."""
    like = {n: args[n].flatten(1) for n in BY_ROWS}
    return {n: alter.rows_of_nan(t, rows).view(rows, *args[n].shape[1:]) for n, t in like.items()}


def reordered(args: Args) -> Args:
    return args | {"x": _shuffled(args["x"])}


def reordered_gradients(cotangents: list[Tensor]) -> list[Tensor]:
    return [_shuffled(g) for g in cotangents]


def _shuffled(t: Tensor) -> Tensor:
    """Elements of heads in another order, those with even numbers first. Not whole groups of them: sums by
    halves are the same wherever in a circle they begin."""
    return torch.cat([t[..., ::2], t[..., 1::2]], -1)


# Truth


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The difference that two computations can have, in units of eps. s - lse is rounded, so exp has a
    relative error of its size; that moves f by f h of it. A number that is then rounded to 16 bits may round
    to the other neighbour."""
    x, lse, sinks = args["x"], args["lse"], args["sinks"].double()
    eps = 2.0**-52 if _dtype_of(lse) == F64 else 2.0**-23
    seen = lse != -torch.inf
    gap = torch.where(seen & sinks.isfinite(), sinks - lse, 0.0).abs()
    f = torch.where(seen, torch.sigmoid(lse - sinks), 0.0)
    h = torch.where(seen, torch.sigmoid(sinks - lse), 0.0)
    off = f * (4 + h * gap)  # of f: exp 2 units, the sum, the quotient

    def between(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
        least, most = value - eps * error, value + eps * error
        return (most.to(dtype).double() - least.to(dtype).double()) / eps

    sizes = {"out": between(x * f[..., None], x.abs() * (off + f)[..., None], _dtype_of(x))}
    if cotangents:
        g = torch.where(seen[..., None], cotangents[0], 0.0)
        own = torch.where(seen[..., None], x, 0.0)
        sizes["gradient:x"] = between(g * f[..., None], g.abs() * (off + f)[..., None], _dtype_of(x))
        dot, terms = (g * own).sum(-1), (g * own).abs().sum(-1)
        steps = x.shape[-1].bit_length() + 1
        dlse = f * h * dot
        of_lse = f * h * (terms * steps + dot.abs() * (12 + 2 * gap))
        sizes["gradient:lse"] = of_lse
        rows = math.prod(lse.shape[:-1])
        over = tuple(range(lse.ndim - 1))
        error = of_lse.sum(over) + dlse.abs().sum(over) * (rows // model.LANES + 12)
        sizes["gradient:sinks"] = between(-dlse.sum(over), error, _dtype_of(args["sinks"]))
    return sizes


def _dtype_of(*given: Tensor) -> torch.dtype:
    """The dtype that these fp64 tensors came from: the narrowest that represents all values."""
    for dtype in (BF16, F16, F32):
        if all(bool(((t.to(dtype).double() == t) | t.isnan()).all()) for t in given):
            return dtype
    return F64


# Bits


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """On a GPU PyTorch's elementwise operations, on a CPU numpy's: each has its own exp."""
    if args["x"].is_cuda:
        results = in_torch(args, cotangents)
    else:
        results = {"out": model.attention_sink(**args)}
        if cotangents:
            wanted = {"want_x": True, "want_lse": True, "want_sinks": True}
            made = model.attention_sink_bwd(**args, dout=cotangents[0], **wanted)
            names = ("gradient:x", "gradient:lse", "gradient:sinks")
            results |= {name: t for name, t in zip(names, made, strict=True) if t is not None}
    return {name: ((slice(None),), t.cpu()) for name, t in results.items()}


def in_torch(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The class with the exp of PyTorch on this device, each operation rounded by itself."""
    x, lse, sinks = args["x"], args["lse"], args["sinks"].float()
    seen = lse != -torch.inf

    def share(exponent: Tensor) -> Tensor:
        return torch.where(seen, 1.0 / (1.0 + torch.exp(exponent)), 0.0)

    f = share(sinks - lse)
    results = {"out": (x.float() * f[..., None]).to(x.dtype)}
    if cotangents:
        g, own = (torch.where(seen[..., None], t.float(), 0.0) for t in (cotangents[0], x))
        dlse = _by_halves(g * own) * (f * share(lse - sinks))
        rows = -dlse.reshape(-1, dlse.shape[-1])
        lanes = rows.new_zeros(model.LANES, rows.shape[1])
        for some in rows.split(model.LANES):
            lanes[: len(some)] += some
        results |= {"gradient:x": (g * f[..., None]).to(x.dtype), "gradient:lse": dlse}
        results["gradient:sinks"] = _by_halves(lanes.T).to(args["sinks"].dtype)
    return results


def _by_halves(t: Tensor) -> Tensor:
    width = 1 << max(t.shape[-1] - 1, 0).bit_length()
    t = torch.nn.functional.pad(t, (0, width - t.shape[-1]))
    while t.shape[-1] > 1:
        first, second = t.chunk(2, -1)
        t = first + second
    return t[..., 0]


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    dims = dict(case.dims)
    D, rows = dims.pop("D"), math.prod(dims.values())
    if backend == "triton":
        return (8 * rows if direction != "fwd" else 0) + MB
    return 12 * max(case.dtype.itemsize, 4) * rows * (D + 1) + MB


def record(launch: Any, dtype: torch.dtype) -> None:
    """Whole tiles and partial ones, every set of gradients. For fp32, which differs only in conversions, one
    call."""
    from isobit.ops.attention_sink import kernels_triton

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for D in (64, 80) if dtype != F32 else (64,):
        args = {"x": empty(2, 9, 4, D), "lse": empty(2, 4, 9, dtype=F32).mT, "sinks": empty(4)}
        kernels_triton.attention_sink(launch, **args)
        for names in (("want_x", "want_lse", "want_sinks"), ("want_x",)) if D == 64 else ():
            wanted = {name: name in names for name in ("want_x", "want_lse", "want_sinks")}
            kernels_triton.attention_sink_bwd(launch, **args, dout=args["x"], **wanted)


# Cases


def _case(N: int, H: int, D: int, dtype: torch.dtype, **rest: Any) -> Case:
    return Case({"N": N, "H": H, "D": D}, dtype, **rest)


# Some laws use every third case; these are the quick ones.
_SMALL = [
    _case(0, 2, 64, F32),
    _case(7, 3, 64, BF16, options={"sinks": F32}),
    Case({"B": 2, "T": 9, "H": 4, "D": 80}, F16, layout="heads"),
    Case({"B": 2, "T": 3, "H": 2, "D": 128}, BF16, layout="shifted"),
    _case(7, 3, 40, F64),
    _case(7, 2, 1, F32, layout="padded"),
    Case({"A": 2, "B": 2, "T": 2, "H": 2, "D": 64}, BF16),
]
_HEAVY = [_case(300, 64, 64, BF16, data="random", heavy=True)]
_BITS = [
    _case(40, 4, 256, F32, data="random"),
    _case(21, 3, 80, BF16, data="random"),
    _case(4096, 64, 64, BF16, data="random", heavy=True),
]
_AGREE = [_case(40, 3, 64, BF16), _case(1100, 2, 64, F16, data="random"), _case(60, 2, 100, F32)]

MUTANTS = [
    Mutant("lse of another dtype", "lse", lambda a: a | {"lse": alter.in_other_dtype(a["lse"])}),
    Mutant("lse of other rows", "lse", lambda a: a | {"lse": a["lse"][1:]}),
    Mutant("sinks of other heads", "sinks", lambda a: a | {"sinks": a["sinks"][1:]}),
    Mutant("sinks of another dtype", "sinks", lambda a: a | {"sinks": alter.in_other_dtype(a["sinks"])}),
]

PROOF = Proof(
    op=forward,
    op_class="attention_sink",
    outputs=("out",),
    make=make,
    formula=lambda args: reference.formula(**args),
    scale=scale,
    controls=[
        Control("elements of heads in another order", reordered, cotangents=reordered_gradients, of=("lse",)),
    ],
    padding=padding,
    layouts=("heads", "shifted", "padded", "offset"),
    lay_out=lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[_case(64, 4, 64, F32), _case(500, 32, 64, BF16, data="random", heavy=True)],
    mutants=MUTANTS,
    bad_value=None,
    kernels={"triton": Kernels(record)},
    exact=exact,
    agree_cases=_AGREE,
    slow=("model",),
)

PROOFS = [PROOF]
