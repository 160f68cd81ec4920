"""The proof of `det_gemm`, and what `det_linear` shares with it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.triton.tree_fold import fold
from isobit.numerics import LEAVES, chain
from isobit.numerics.trees import tree
from isobit.ops.det_gemm.op import gemm
from isobit.ops.det_gemm.proof import inputs, truth
from isobit.ops.det_gemm.proof.cublas import BATCH_SIZES, where_torch_agrees
from isobit.spec import error_bounds as errors
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof, Sample

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

MB = 1 << 20

#: (a, b) -> (a bound on the error of a b in a class, a b).
Error = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

#: Backends of class tree8.
TREES = ("hopper-tree8", "triton-tree8", "model-tree8")

#: Kernels in Gluon are written for one architecture.
HOPPER = (("cuda", 90, 32),)


def make_gemm(case: Case, device: torch.device, options: InputOptions) -> Args:
    *lead, M, K, N = case.dims.values()
    a = inputs.matrix((*lead, M), K, case, device, options, side=0)
    b = inputs.matrix((*lead, N), K, case, device, options, side=1).mT.contiguous()
    args = {"a": a, "b": b, "out_dtype": case.options.get("out")}
    return alter.laid_out_some(args, ("a", "b"), case.layout)


def formula_gemm(args: Args) -> tuple[Tensor, ...]:
    return (truth.product(args["a"], args["b"], None, args["out_dtype"]),)


def scale_gemm(
    args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], error: Error = errors.chain_error
) -> dict[str, Tensor]:
    a, b, out = args["a"], args["b"], args["out_dtype"]
    sizes = {"c": errors.rounded(error(a, b)[0], out)}
    if cotangents:
        dc, M = cotangents[0], a.shape[-2]
        da, _ = error(dc, b.mT)
        db = errors.segment_error(a.mT, dc, errors.cut([M], errors.SEGMENT), None)
        if out is not None:  # the backward rounds dc to the dtype of a and b
            narrow = errors.narrow_dtype(a, b)
            da = da + errors.rounded_factor(dc, b.mT, narrow)
            db = db + errors.rounded_factor(dc.mT, a, narrow).mT
        sizes |= {"gradient:a": errors.rounded(da, None), "gradient:b": errors.rounded(db, None)}
    return sizes


def exact_gemm(args: Args, cotangents: Sequence[Tensor], model: truth.Product = chain) -> dict[str, Sample]:
    """A sample from the last matrix of a batch."""
    a, b, dtype = args["a"], args["b"], args["a"].dtype
    last = (-1,) * (a.ndim - 2)
    (a, b), M = (a[last], b[last]), a.shape[-2]
    result = {"c": truth.product_sample(model, (M,), a, b, None, args["out_dtype"] or dtype)}
    if cotangents:
        dc = cotangents[0][last].to(dtype)
        result["gradient:a"] = truth.product_sample(model, (M,), dc, b.mT, None, dtype)
        result["gradient:b"] = truth.segment_sample(a.mT, dc, [M], None, dtype)
    return {name: ((*last, *where), bits) for name, (where, bits) in result.items()}


def record_product(bias: bool) -> dict[str, Kernels]:
    """Records the kernels of both backends: tiles for few rows, for many, and one between, which on Hopper
    has two accumulators. The two ops split the combinations of output dtype and memory order of b: fp32 and
    row-major is compiled for many rows in one op, for few rows in the other."""

    def record(module: str, launch: Any, dtype: torch.dtype) -> None:
        kernels = import_module(f"isobit.ops.det_gemm.{module}")
        dtype = BF16 if dtype == F32 else dtype  # inputs in fp32 are rounded before a kernel sees them
        K, N = 4096, 12288
        for M, out_dtype in ((1, F32 if bias else dtype), (160, dtype), (1024, dtype if bias else F32)):
            by_rows = (K, N) if out_dtype == F32 else (N, K)
            a, b = (torch.empty(1, *shape, dtype=dtype, device="meta") for shape in ((M, K), by_rows))
            b = b if out_dtype == F32 else b.mT
            added = torch.empty(N, dtype=dtype, device="meta") if bias else None
            kernels.product(a, b, added, out_dtype, launch=launch)
        if module.endswith("_tree"):
            record_ranks(kernels, launch, dtype, 2 if bias else 4)

    return {
        "hopper": Kernels(partial(record, "kernels_hopper"), targets=HOPPER),
        "triton": Kernels(partial(record, "kernels_triton")),
        "hopper-tree8": Kernels(partial(record, "kernels_hopper_tree"), targets=HOPPER),
        "triton-tree8": Kernels(partial(record, "kernels_triton_tree")),
    }


def record_ranks(kernels: Any, launch: Any, dtype: torch.dtype, leaves: int) -> None:
    """What ranks compute that share k: the sum of some leaves, and the sum over ranks."""
    a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((72, 2048), (4096, 2048)))
    kernels.product(a, b.t(), None, F32, leaves, launch=launch)
    parts = torch.empty(LEAVES // leaves, 4096, dtype=F32, device="meta")
    fold(parts, torch.empty(4096, dtype=dtype, device="meta"), 0, 4096, dtype, launch=launch)


def memory_product(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients. Forward none. Backward the fp32 gradients of the shared
    operand before they are rounded, and the cotangent in the operands' dtype."""
    *_, M, K, N = case.dims.values()
    if backend in ("model", "model-tree8"):
        return memory_of_model(M, K, N)
    # The sums of up to eight parts of k, where few outputs would leave most SMs idle.
    parts = 32 * M * max(N, K if direction != "fwd" else 0) if backend == "hopper-tree8" else 0
    return MB + parts + (4 * N * K + 4 * N + 2 * M * N if direction != "fwd" else 0)


def in_trees(scale: Callable[..., Any], exact: Callable[..., Any]) -> dict[str, Mapping[str, Any]]:
    """What is different for backends of class tree8: the bound on their errors, and their exact bits."""
    fields = {"scale": partial(scale, error=errors.tree_error), "exact": partial(exact, model=tree)}
    return dict.fromkeys(TREES, fields)


def memory_of_model(M: int, K: int, N: int) -> int:
    """Whole float64 operands with their exponents; products one block at a time."""
    return 32 * MB + 64 * (M * K + K * N + M * N)


_A_AND_B = ("a", "b")

#: (K, N) of the products that are compared at M = 4096: projections, both halves of an MLP, and a head.
OF_MODELS = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 12288), (4096, 32000))

GEMM = Proof(
    op=gemm,
    op_class="product",
    outputs=("c",),
    make=make_gemm,
    formula=formula_gemm,
    scale=scale_gemm,
    controls=[
        Control(
            "another order of the groups of 16 k",
            lambda args: args
            | {"a": alter.in_other_groups(args["a"], -1), "b": alter.in_other_groups(args["b"], -2)},
        ),
        Control(
            "8 zeros before the first k",
            lambda args: args
            | {"a": alter.after_zeros(args["a"], -1), "b": alter.after_zeros(args["b"], -2)},
        ),
        Control(
            "another order of the groups of 16 columns in da",
            lambda args: args | {"b": alter.in_other_groups(args["b"], -1)},
            lambda cotangents: [alter.in_other_groups(g, -1) for g in cotangents],
        ),
    ],
    padding=lambda args, rows: {"a": alter.rows_of_nan(args["a"], rows)},
    layouts=inputs.LAYOUTS,
    lay_out=lambda args, layout: alter.laid_out_some(args, _A_AND_B, layout),
    memory=memory_product,
    # TMA needs rows of a multiple of 8 elements; another backend serves other sizes.
    cases=[
        Case({"M": 20, "K": 192, "N": 64}, BF16),  # the first one is small, and every backend can serve it
        Case({"M": 0, "K": 8, "N": 5}, BF16),
        Case({"M": 3, "K": 0, "N": 5}, F16),
        Case({"M": 5, "K": 1, "N": 1}, F16),
        Case({"M": 17, "K": 15, "N": 33}, BF16, options={"out": F32}),
        Case({"M": 72, "K": 24, "N": 66}, F16, layout="transposed"),
        Case({"B": 2, "M": 9, "K": 40, "N": 24}, BF16, options={"out": F32}),
        Case({"B": 2, "M": 3, "K": 70, "N": 18}, F16, layout="offset"),
        Case({"M": 20, "K": 100, "N": 37}, BF16, layout="strided", options={"out": F16}),
        Case({"M": 513, "K": 32, "N": 24}, BF16, layout="apart", options={"out": F32}),
        Case({"M": 20, "K": 104, "N": 40}, BF16),
        Case({"M": 257, "K": 4097, "N": 1003}, BF16, heavy=True),
        Case({"M": 4096, "K": 4096, "N": 1000}, F16, heavy=True, options={"out": F32}),
        Case({"M": 17, "K": 14336, "N": 1000}, BF16, heavy=True, options={"out": F32}),
        Case({"B": 6, "M": 136, "K": 1000, "N": 203}, BF16, data="random", layout="transposed", heavy=True),
    ],
    bit_cases=[
        Case({"M": 130, "K": 200, "N": 104}, F16, options={"out": F32}),
        Case({"B": 2, "M": 66, "K": 150, "N": 70}, BF16, options={"out": F32}),
        Case({"M": 4100, "K": 4096, "N": 1000}, BF16, data="random", heavy=True),
        Case({"M": 4100, "K": 4097, "N": 4099}, F16, data="random", heavy=True, options={"out": F32}),
        Case({"M": 304, "K": 14336, "N": 4096}, BF16, data="random", layout="transposed", heavy=True),
        *(Case({"M": 4096, "K": K, "N": N}, BF16, data="random", heavy=True, gpu_gb=16)
          for K, N in OF_MODELS),
        # More than 2**31 elements in an operand, first in b, then in a: wrong 32-bit offsets would fail here.
        Case({"M": 70, "K": 4096, "N": 524800}, BF16, data="random", heavy=True, gpu_gb=70),
        Case({"M": 524800, "K": 4096, "N": 72}, BF16, data="random", heavy=True, gpu_gb=70),
    ],
    memory_cases=[
        Case({"M": 64, "K": 512, "N": 128}, BF16, data="random"),
        Case({"M": 2048, "K": 4096, "N": 4096}, BF16, data="random", heavy=True),
    ],
    mutants=[
        Mutant("fp32 operands", "a", lambda args: args | {n: args[n].float() for n in _A_AND_B}),
        Mutant("integer operands", "a", lambda args: args | {n: args[n].int() for n in _A_AND_B}),
        Mutant("two dtypes", "b", lambda args: args | {"b": alter.in_other_dtype(args["b"])}),
        Mutant("a with one dimension", "a", lambda args: args | {"a": args["a"][0]}),
        Mutant("b with one dimension", "b", lambda args: args | {"b": args["b"][:, 0]}),
        Mutant("a batch of one operand alone", "b", lambda args: args | {"a": args["a"][None]}),
        Mutant("an output in fp64", "out_dtype", lambda args: args | {"out_dtype": torch.float64}),
        Mutant("an integer output", "out_dtype", lambda args: args | {"out_dtype": torch.int32}),
    ],
    bad_value=None,
    kernels=record_product(bias=False),
    rows="M",
    batch_sizes=BATCH_SIZES,
    exact=exact_gemm,
    agree_cases=[
        Case({"M": 17, "K": 104, "N": 24}, BF16, options={"out": F32}),
        *(Case({"M": 17, "K": 192, "N": 64}, BF16, data=kind, options={"out": F32})
          for kind in inputs.ADVERSARIAL),
        *(Case({"M": 70, "K": 72, "N": 24}, F16, data=kind, options={"out": F32})
          for kind in inputs.ADVERSARIAL),
        Case({"M": 20, "K": 104, "N": 40}, BF16, data="cancelling"),
        Case({"M": 20, "K": 37, "N": 18}, BF16, layout="strided", options={"out": F32}),
        Case({"B": 2, "M": 600, "K": 40, "N": 24}, BF16, layout="transposed", options={"out": F32}),
        *(Case({"M": 257, "K": 4096, "N": 1000}, BF16, data=kind, heavy=True, options={"out": F32})
          for kind in inputs.ADVERSARIAL),
        Case({"M": 4096, "K": 4097, "N": 4099}, F16, data="random", heavy=True, options={"out": F32}),
        Case({"M": 1, "K": 14336, "N": 4096}, BF16, data="random", heavy=True, options={"out": F32}),
        Case({"M": 64, "K": 7168, "N": 2048}, BF16, data="random", heavy=True, options={"out": F32}),
        Case({"M": 1024, "K": 4096, "N": 6144}, BF16, data="random", heavy=True, options={"out": F32}),
    ],
    slow=("model", "model-tree8"),
    differs=in_trees(scale_gemm, exact_gemm),
    observe=where_torch_agrees,
)  # fmt: skip
