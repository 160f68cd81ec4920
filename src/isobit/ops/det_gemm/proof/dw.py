"""The proof of `det_gemm_dw`, a sum over the token stream."""

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host import token_stream as stream
from isobit.ops.det_gemm.op import gemm_dw
from isobit.ops.det_gemm.proof import inputs, truth
from isobit.ops.det_gemm.proof.gemm import HOPPER, MB, memory_of_model
from isobit.spec import error_bounds as errors
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof, Sample, Stream

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOOL, UINT8, INT64 = torch.bool, torch.uint8, torch.int64

_X_AND_DY = ("x", "dy")


def make_dw(case: Case, device: torch.device, options: InputOptions) -> Args:
    """In a masked case every fourth row is masked out and holds NaN."""
    *lead, K, N = case.dims.values()
    T = math.prod(lead)
    x = inputs.matrix((K,), T, case, device, options, side=0).mT.contiguous()  # here k is the rows
    dy = inputs.matrix((N,), T, case, device, options, side=1).mT.contiguous()
    args: Args = {"mask": None, "cu_seqlens": None, "init": None}
    gen = torch.Generator().manual_seed(options.seed + 2)
    if case.options.get("mask"):
        live = torch.arange(T, device=device) % 4 != 3
        x, dy = (torch.where(live[:, None], t, float("nan")) for t in (x, dy))
        args["mask"] = alter.mask_in(case.options["mask"], live).view(lead)
    if case.options.get("sequences"):
        # Random boundaries, with an empty sequence among them.
        inner = (
            torch.randint(0, T + 1, (case.options["sequences"] - 2,), generator=gen).sort().values.tolist()
        )
        bounds = [0, *inner, *inner[:1], T]
        args["cu_seqlens"] = torch.tensor(sorted(bounds), dtype=torch.int32, device=device)
    if case.options.get("init"):
        args["init"] = inputs.addends((N, K), case.data, case.dtype, gen).to(device)
    args |= {"x": x.view(*lead, K), "dy": dy.view(*lead, N)}
    return lay_out_dw(args, case.layout)


def lay_out_dw(args: Args, layout: str) -> Args:
    """x and dy in another layout, or what has one number per row or sequence."""
    if layout == "every other":
        return alter.laid_out_some(args, ("mask", "cu_seqlens"), "strided")
    return alter.laid_out_some(args, _X_AND_DY, layout)


def formula_dw(args: Args) -> tuple[Tensor, ...]:
    return (truth.token_sum(args["x"], args["dy"], args["mask"], args["init"]),)


def stream_of(args: Args) -> tuple[Tensor, Tensor, list[int]]:
    """The unmasked rows of x and dy, and how many each sequence has."""
    x, dy, mask = args["x"].flatten(0, -2), args["dy"].flatten(0, -2), args["mask"]
    live = x.new_ones(len(x), dtype=torch.bool) if mask is None else mask.flatten() != 0
    bounds = [0, len(x)] if args["cu_seqlens"] is None else args["cu_seqlens"].tolist()
    lengths = [int(live[first:end].sum()) for first, end in pairwise(bounds)]
    return x[live], dy[live], lengths


def scale_dw(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    x, dy, lengths = stream_of(args)
    return {"dw": errors.segment_error(dy.mT, x, errors.cut(lengths, errors.SEGMENT), args["init"])}


def exact_dw(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    x, dy, lengths = stream_of(args)
    return {"dw": truth.segment_sample(dy.mT, x, lengths, args["init"], F32)}


def record_dw(module: str, launch: Any, dtype: torch.dtype) -> None:
    """Records every tile, with all rows and with a stream; in fp32, and rounded as for `det_linear`."""
    kernels = import_module(f"isobit.ops.det_gemm.{module}")
    T, N = 4096, 4096
    narrow = ((64, 64, False, F32), (N, 64, False, F32))
    for K, width, some, out_dtype in (*narrow, (N, N, True, F32), (N, N, False, dtype)):
        x, dy = (torch.empty(1, T, size, dtype=dtype, device="meta") for size in (K, width))
        slots, segments = stream.capacity(T, 8)
        tables = (torch.empty(n, dtype=torch.int32, device="meta") for n in (slots, segments, segments, 1))
        init = torch.empty(1, width, K, device="meta") if some else None
        rows = stream.Stream(*tables) if some else None
        kernels.token_product(x, dy, rows, init, launch=launch, out_dtype=out_dtype)
    kernels.ones(torch.empty(T, N, dtype=dtype, device="meta"), launch)


def memory_dw(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs and output: the tables of a stream, and a copy of its rows that TMA can read."""
    *lead, K, N = case.dims.values()
    T = math.prod(lead)
    if backend == "model":
        return memory_of_model(K, T, N)
    slots, _ = stream.capacity(T, case.options.get("sequences", 1))
    return MB + (128 * T + 2 * slots * (K + N) if {"mask", "sequences"} & set(case.options) else 0)


def bounds_that_descend(args: Args) -> tuple[Args, int | None]:
    T = args["x"].shape[:-1].numel()
    bounds = torch.tensor([0, T // 2, T // 2 - 1, T], dtype=torch.int32, device=args["x"].device)
    return args | {"cu_seqlens": bounds}, None


def other_groups_of_rows(t: Tensor | None) -> Tensor | None:
    """For any leading shape; a mask has only that."""
    if t is None:
        return None
    lines = t.reshape(-1, t.shape[-1]) if t.is_floating_point() else t.reshape(-1)
    return alter.in_other_groups(lines, 0).view(t.shape)


DW = Proof(
    op=gemm_dw,
    op_class="token_sum",
    outputs=("dw",),
    make=make_dw,
    formula=formula_dw,
    scale=scale_dw,
    controls=[
        Control(
            "another order of the groups of 16 rows",
            lambda args: args | {n: other_groups_of_rows(args[n]) for n in (*_X_AND_DY, "mask")},
        ),
    ],
    padding=lambda args, rows: {n: alter.rows_of_nan(args[n], rows) for n in _X_AND_DY},
    layouts=(*inputs.LAYOUTS, "every other"),
    lay_out=lay_out_dw,
    memory=memory_dw,
    cases=[
        Case({"T": 40, "K": 32, "N": 24}, BF16),
        Case({"T": 0, "K": 8, "N": 5}, BF16, options={"init": True}),
        Case({"T": 1, "K": 5, "N": 1}, F16),
        Case({"B": 3, "T": 200, "K": 24, "N": 8}, BF16, options={"mask": BOOL}),
        Case({"T": 700, "K": 9, "N": 21}, F16, options={"sequences": 5, "init": True}),
        Case({"T": 1100, "K": 20, "N": 8}, BF16, layout="padded", options={"mask": INT64, "sequences": 4}),
        Case({"T": 530, "K": 17, "N": 33}, F16, layout="strided", options={"init": True}),
        Case({"B": 2, "T": 512, "K": 16, "N": 17}, BF16, layout="transposed"),
        # TMA can read these in place, but not once they are packed without a gap.
        Case({"T": 600, "K": 20, "N": 23}, BF16, layout="transposed", options={"mask": BOOL}),
        Case({"T": 16, "K": 72, "N": 64}, BF16, layout="apart", options={"sequences": 3}),
        Case({"T": 16, "K": 70, "N": 65}, BF16, layout="offset"),
        Case({"T": 4097, "K": 1000, "N": 264}, BF16, heavy=True, options={"mask": BOOL, "sequences": 9}),
        Case({"T": 16384, "K": 512, "N": 1003}, F16, data="random", heavy=True, options={"init": True}),
        Case({"T": 16384, "K": 512, "N": 1000}, F16, data="random", heavy=True, options={"init": True}),
    ],
    bit_cases=[
        Case({"T": 1100, "K": 40, "N": 24}, BF16),
        Case({"T": 1500, "K": 24, "N": 16}, F16, options={"mask": BOOL, "init": True}),
        Case({"T": 900, "K": 18, "N": 33}, BF16, options={"sequences": 6}),
        Case({"T": 1300, "K": 32, "N": 24}, BF16, options={"mask": UINT8, "sequences": 4, "init": True}),
        Case({"T": 8200, "K": 4096, "N": 1000}, BF16, data="random", heavy=True, options={"mask": BOOL}),
        Case({"T": 8192, "K": 1000, "N": 4096}, F16, data="random", heavy=True, options={"sequences": 20}),
        Case({"T": 4100, "K": 1001, "N": 515}, F16, data="random", heavy=True, options={"init": True}),
        # More than 2**31 elements of x.
        Case({"T": 524800, "K": 4096, "N": 72}, BF16, data="random", heavy=True, gpu_gb=70),
    ],
    memory_cases=[
        Case({"T": 600, "K": 64, "N": 96}, BF16, data="random"),
        Case({"T": 8192, "K": 4096, "N": 4096}, BF16, data="random", heavy=True, options={"sequences": 16}),
    ],
    mutants=[
        Mutant("fp32 operands", "x", lambda args: args | {n: args[n].float() for n in _X_AND_DY}),
        Mutant("two dtypes", "dy", lambda args: args | {"dy": alter.in_other_dtype(args["dy"])}),
        Mutant("integer operands", "x", lambda args: args | {n: args[n].int() for n in _X_AND_DY}),
        Mutant("a float mask", "mask", lambda args: args | {"mask": args["x"][..., 0].float()}),
        Mutant("a mask that is too short", "mask", lambda args: args | {"mask": args["x"][1:, 0] > 0}),
        Mutant("float bounds", "cu_seqlens", lambda args: args | {"cu_seqlens": args["x"][:, 0].clone()}),
        Mutant("bounds in two dimensions", "cu_seqlens", lambda args: args | {"cu_seqlens": args["x"].int()}),
        Mutant("empty bounds", "cu_seqlens", lambda args: args | {"cu_seqlens": args["x"][:0, 0].int()}),
        Mutant("an init of another shape", "init", lambda args: args | {"init": args["x"].float()}),
        Mutant("a narrow init", "init", lambda args: args | {"init": args["dy"][0, :, None] * args["x"][:1]}),
    ],
    bad_value=bounds_that_descend,
    kernels={
        "hopper": Kernels(partial(record_dw, "kernels_hopper"), targets=HOPPER),
        "triton": Kernels(partial(record_dw, "kernels_triton")),
    },
    stream=Stream(mask="mask", cuts="cu_seqlens", start="init", segment=errors.SEGMENT),
    exact=exact_dw,
    agree_cases=[
        Case({"T": 600, "K": 20, "N": 23}, BF16, options={"mask": BOOL, "init": True}),
        *(Case({"T": 600, "K": 24, "N": 16}, BF16, data=kind) for kind in inputs.ADVERSARIAL),
        *(Case({"T": 600, "K": 24, "N": 16}, F16, data=kind, options={"sequences": 4, "init": True})
          for kind in inputs.ADVERSARIAL),
        *(Case({"T": 4100, "K": 1000, "N": 264}, BF16, data=kind, heavy=True, options={"mask": BOOL})
          for kind in inputs.ADVERSARIAL),
        Case({"T": 8192, "K": 4096, "N": 4096}, BF16, data="random", heavy=True),
        Case({"T": 8192, "K": 2048, "N": 1000}, F16, data="random", heavy=True, options={"sequences": 20}),
        Case({"T": 2048, "K": 1001, "N": 515}, F16, data="random", heavy=True),
    ],
    slow=("model",),
)  # fmt: skip
