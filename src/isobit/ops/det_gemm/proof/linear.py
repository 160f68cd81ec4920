"""The proof of `det_linear`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.numerics import chain
from isobit.ops.det_gemm.op import linear
from isobit.ops.det_gemm.proof import inputs, truth
from isobit.ops.det_gemm.proof.cublas import BATCH_SIZES
from isobit.ops.det_gemm.proof.gemm import Error, in_trees, memory_product, record_product
from isobit.ops.det_gemm.proof.merged import merged_layers
from isobit.ops.det_gemm.proof.ranks import SHARDS
from isobit.spec import error_bounds as errors
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, InputOptions, Mutant, Proof, Sample

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def make_linear(case: Case, device: torch.device, options: InputOptions) -> Args:
    *lead, K, N = case.dims.values()
    x = inputs.matrix(tuple(lead), K, case, device, options, side=0)
    weight = inputs.matrix((N,), K, case, device, options, side=1)
    args: Args = {"x": x, "weight": weight, "bias": None}
    # Inputs in fp32 are taken only with the dtype that they are multiplied in.
    operand = case.options.get("operand", BF16 if case.dtype == F32 else None)
    args |= {"operand_dtype": operand, "out_dtype": case.options.get("out")}
    if case.options.get("bias"):
        gen = torch.Generator().manual_seed(options.seed + 2)
        bias = inputs.addends((N,), case.data, case.dtype, gen)
        args["bias"] = bias.to(device, case.dtype if case.options["bias"] == "own" else case.options["bias"])
    return lay_out_linear(args, case.layout)


def lay_out_linear(args: Args, layout: str) -> Args:
    args = alter.laid_out_some(args, ("x", "weight"), layout)
    if args["bias"] is not None and layout == "offset":
        args["bias"] = alter.laid_out(args["bias"][None], layout)[0]
    return args


def operands(args: Args) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias as they are multiplied: rounded to operand_dtype first, if it is given. Gradients
    pass through the rounding unchanged."""
    narrow = args["operand_dtype"]

    def rounded(t: Tensor) -> Tensor:
        return t if narrow is None else t + (t.to(narrow).to(t.dtype) - t).detach()

    x, weight, bias = args["x"], args["weight"], args["bias"]
    return rounded(x), rounded(weight), None if bias is None else rounded(bias)


def formula_linear(args: Args) -> tuple[Tensor, ...]:
    x, weight, bias = operands(args)
    return (truth.product(x, weight.mT, bias, args["out_dtype"] or args["operand_dtype"]),)


def scale_linear(
    args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], error: Error = errors.chain_error
) -> dict[str, Tensor]:
    (x, weight, bias), out, operand = operands(args), args["out_dtype"], args["operand_dtype"]
    of_sum, _ = error(x, weight.mT)
    if bias is not None:
        of_sum = of_sum + outputs[0].abs()
    sizes = {"y": errors.rounded(of_sum, out)}
    if not cotangents:
        return sizes
    rows, dy = x.flatten(0, -2), cotangents[0].flatten(0, -2)
    bounds = errors.cut([len(rows)], errors.SEGMENT)
    ones = dy.new_ones(len(rows), 1)
    # By name: the two factors, and the error of their product.
    products = {
        "x": (dy, weight, error(dy, weight)[0]),
        "weight": (dy.mT, rows, errors.segment_error(dy.mT, rows, bounds, None)),
        "bias": (dy.mT, ones, errors.segment_error(dy.mT, ones, bounds, None)),
    }
    for name, (left, right, size) in products.items():
        if out is not None:  # the backward rounds dy to the dtype of the operands
            size = size + errors.rounded_factor(left, right, errors.narrow_dtype(x, weight))
        size = errors.rounded(size, None)
        if operand is not None:  # and rounds its results, which plain PyTorch does not
            size = size + torch.finfo(operand).eps / 2 * ((left @ right).abs() / errors.UNIT + size)
        sizes[f"gradient:{name}"] = size
    sizes["gradient:x"] = sizes["gradient:x"].view(x.shape)
    sizes["gradient:bias"] = sizes["gradient:bias"][:, 0]
    return sizes


def exact_linear(args: Args, cotangents: Sequence[Tensor], model: truth.Product = chain) -> dict[str, Sample]:
    own = args["operand_dtype"] or args["x"].dtype
    x, weight = (args[name].to(own) for name in ("x", "weight"))
    bias = args["bias"] if args["operand_dtype"] is None or args["bias"] is None else args["bias"].to(own)
    lead, rows = x.shape[:-1], x.flatten(0, -2)
    result = {"y": truth.product_sample(model, lead, rows, weight.mT, bias, args["out_dtype"] or own)}
    if cotangents:
        dy = cotangents[0].flatten(0, -2).to(own)
        result["gradient:x"] = truth.product_sample(model, lead, dy, weight, None, own)
        result["gradient:weight"] = truth.segment_sample(dy.mT, rows, [len(rows)], None, own)
        if bias is not None:
            ones = dy.new_ones(len(rows), 1)
            (where, _), bits = truth.segment_sample(dy.mT, ones, [len(rows)], None, bias.dtype)
            result["gradient:bias"] = (where[:, 0],), bits[:, 0]
        for name in ("x", "weight", "bias"):
            if f"gradient:{name}" in result:
                place, bits = result[f"gradient:{name}"]
                result[f"gradient:{name}"] = place, bits.to(args[name].dtype)
    return result


def _as_they_are(args: Args) -> Args:
    """With operands in 16 bits that are not rounded: only their dtypes must agree."""
    narrow = args["operand_dtype"] or args["x"].dtype
    return args | {n: args[n].to(narrow) for n in ("x", "weight")} | {"operand_dtype": None}


_WIDE = {"bias": F32, "out": F32}

LINEAR = Proof(
    op=linear,
    op_class="product",
    outputs=("y",),
    make=make_linear,
    formula=formula_linear,
    scale=scale_linear,
    controls=[
        Control(
            "another order of the groups of 16 k",
            lambda args: args | {n: alter.in_other_groups(args[n], -1) for n in ("x", "weight")},
        ),
        Control(
            "8 zeros before the first k",
            lambda args: args | {n: alter.after_zeros(args[n], -1) for n in ("x", "weight")},
        ),
        Control(
            "another order of the groups of 16 columns in dx",
            lambda args: args | {"weight": alter.in_other_groups(args["weight"], 0), "bias": None},
            lambda cotangents: [alter.in_other_groups(g, -1) for g in cotangents],
        ),
    ],
    padding=lambda args, rows: {"x": alter.rows_of_nan(args["x"], rows)},
    layouts=inputs.LAYOUTS,
    lay_out=lay_out_linear,
    memory=memory_product,
    cases=[
        Case({"M": 20, "K": 192, "N": 64}, BF16, options={"bias": F32}),
        Case({"M": 0, "K": 8, "N": 5}, BF16, options={"bias": "own"}),
        Case({"M": 3, "K": 0, "N": 5}, BF16, options={"bias": F32}),
        Case({"M": 17, "K": 1, "N": 1}, F16, options={"bias": "own"}),
        Case({"B": 2, "T": 10, "K": 40, "N": 20}, BF16, options={"bias": "own", "out": F32}),
        Case({"M": 65, "K": 15, "N": 17}, F16, layout="padded"),
        Case({"M": 20, "K": 150, "N": 65}, BF16, layout="offset", options={"bias": F32, "out": F16}),
        Case({"B": 2, "T": 300, "K": 17, "N": 9}, BF16, layout="strided", options={"bias": F32}),
        Case({"M": 16, "K": 520, "N": 16}, F16, layout="transposed", options={"out": F32}),
        Case({"M": 600, "K": 24, "N": 33}, BF16, layout="apart", options={"bias": "own"}),
        Case({"M": 20, "K": 104, "N": 40}, F32, options={"bias": "own", "operand": BF16}),
        Case({"M": 17, "K": 40, "N": 9}, F32, layout="padded", options={"operand": F16, "out": F32}),
        Case({"M": 20, "K": 104, "N": 40}, BF16, options={"bias": F32}),
        Case({"M": 16, "K": 4097, "N": 1000}, BF16, heavy=True, options=_WIDE),
        Case({"M": 1000, "K": 4096, "N": 1003}, F16, heavy=True, options={"bias": "own"}),
        Case({"B": 4, "T": 520, "K": 14336, "N": 512}, BF16, data="random", heavy=True,
             options={"bias": "own"}),
    ],
    bit_cases=[
        Case({"M": 130, "K": 200, "N": 104}, F16, options={"bias": "own", "out": F32}),
        Case({"M": 66, "K": 530, "N": 72}, BF16, layout="padded", options={"out": F32}),
        Case({"M": 4100, "K": 4096, "N": 4096}, BF16, data="random", heavy=True, options={"bias": F32}),
        Case({"M": 4100, "K": 4096, "N": 14336}, BF16, data="random", heavy=True),
        Case({"M": 300, "K": 14336, "N": 4096}, F16, data="random", heavy=True, options={"out": F32}),
        Case({"M": 1030, "K": 7168, "N": 2051}, BF16, data="random", heavy=True, options={"bias": "own"}),
        # More than 2**31 outputs.
        Case({"M": 16500, "K": 64, "N": 131072}, BF16, data="random", heavy=True, gpu_gb=70),
    ],
    memory_cases=[
        Case({"M": 64, "K": 512, "N": 128}, BF16, data="random", options={"bias": "own"}),
        Case({"M": 2048, "K": 4096, "N": 4096}, BF16, data="random", heavy=True, options={"bias": "own"}),
    ],
    mutants=[
        Mutant("fp32 operands", "x",
               lambda args: _as_they_are(args) | {n: args[n].float() for n in ("x", "weight")}),
        Mutant("integer operands", "x", lambda args: args | {n: args[n].int() for n in ("x", "weight")}),
        Mutant("two dtypes", "weight",
               lambda args: (a := _as_they_are(args)) | {"weight": alter.in_other_dtype(a["weight"])}),
        Mutant("a weight with one dimension", "weight", lambda args: args | {"weight": args["weight"][0]}),
        Mutant("a short bias", "bias", lambda args: args | {"bias": args["weight"][1:, 0].clone()}),
        Mutant("a bias of another dtype", "bias",
               lambda args: (a := _as_they_are(args)) | {"bias": alter.in_other_dtype(a["weight"][:, 0])}),
        Mutant("a bias in two dimensions", "bias", lambda args: args | {"bias": args["weight"].clone()}),
        Mutant("operands in fp32", "operand_dtype", lambda args: args | {"operand_dtype": F32}),
        Mutant("an output in fp64", "out_dtype", lambda args: args | {"out_dtype": torch.float64}),
    ],
    bad_value=None,
    kernels=record_product(bias=True),
    batch_sizes=BATCH_SIZES,
    exact=exact_linear,
    agree_cases=[
        Case({"M": 17, "K": 104, "N": 23}, BF16, options=_WIDE),
        Case({"M": 17, "K": 104, "N": 24}, F32, options={"bias": "own", "operand": BF16, "out": F32}),
        *(Case({"M": 17, "K": 192, "N": 64}, BF16, data=kind, options={"bias": "own", "out": F32})
          for kind in inputs.ADVERSARIAL),
        *(Case({"M": 70, "K": 72, "N": 24}, F16, data=kind, options=_WIDE)
          for kind in inputs.ADVERSARIAL),
        Case({"M": 20, "K": 104, "N": 40}, F16, data="cancelling", options={"bias": "own"}),
        Case({"B": 2, "T": 300, "K": 37, "N": 18}, F16, layout="strided", options=_WIDE),
        *(Case({"M": 129, "K": 4096, "N": 1000}, BF16, data=kind, heavy=True, options=_WIDE)
          for kind in inputs.ADVERSARIAL),
        Case({"M": 4096, "K": 4096, "N": 14336}, BF16, data="random", heavy=True, options=_WIDE),
        Case({"M": 264, "K": 4096, "N": 4096}, BF16, data="cancelling", heavy=True, options={"bias": "own"}),
        Case({"M": 8, "K": 4096, "N": 4099}, BF16, data="random", heavy=True, options={"out": F32}),
        Case({"M": 256, "K": 14336, "N": 4096}, F16, data="random", heavy=True, options={"out": F32}),
    ],
    slow=("model", "model-tree8"),
    differs=in_trees(scale_linear, exact_linear),
    parts=merged_layers,
    shards=SHARDS,
    shard_cases=[
        Case({"M": 24, "K": 192, "N": 64}, BF16, options={"bias": F32}),
        Case({"B": 8, "T": 2, "K": 64, "N": 32}, F32, options={"bias": "own", "operand": F16, "out": F32}),
        Case({"M": 24, "K": 192, "N": 64}, BF16, data="special", options={"out": F32}),
        Case({"M": 8, "K": 4096, "N": 4096}, BF16, data="random", heavy=True),
        Case({"M": 264, "K": 14336, "N": 1536}, BF16, data="random", heavy=True, options={"bias": F32}),
        Case({"B": 8, "T": 130, "K": 4096, "N": 6144}, F16, data="random", heavy=True),
    ],
)  # fmt: skip
