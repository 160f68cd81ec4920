"""The proof of `linear_logp`. Inputs are in `inputs.py`, the truth and the error bounds of its classes in
`truth.py`, bit laws beyond those of every op in `bits.py`."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.ops.linear_logp import reference
from isobit.ops.linear_logp.op import forward, linear_logp, vocabulary
from isobit.ops.linear_logp.proof import inputs, shards, truth
from isobit.ops.linear_logp.proof.bits import fused
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Proof, Shared
from isobit.spec.trial import in_fp64

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

MB = 1 << 20

#: Memory for d-logits in the backward by default; on Hopper SLAB_ROW per row if that is more, but then at
#: most the size of the weight.
SLAB, SLAB_ROW = 64 * MB, 16 << 10


def _live(args: Args) -> Tensor:
    return live_rows(args["token_ids"], args["mask"], args["ignore_index"])


def judged(args: Args, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logp, entropy, lse = outputs
    return logp, truth.constant(entropy, logp) if inputs.keeps(args) else entropy, lse


# Memory


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    sizes = dict(case.dims)
    V, D = sizes.pop("V"), sizes.pop("D")
    N, item = math.prod(sizes.values()), case.dtype.itemsize
    if backend == "reference":
        rows = min(N * V, max(reference.TEMPORARY_BYTES // 4, V))
        wide = min(V * D, max(reference.SLAB_ELEMENTS, D))
        return 4 * (12 * rows + 3 * wide + V * D + 3 * N * D) + 256 * N + MB
    packed = item * N * D if case.options.get("mask") else 0
    if direction == "fwd":
        if backend == "hopper" and case.layout == "shifted":
            packed += item * N * D  # TMA cannot read these rows in place; the backward packs them in any case
        # The sums of every split: on Hopper 33 of them. Portable kernels need at most as much as a slab.
        return packed + 8 * MB + (SLAB if backend == "triton" else 0)
    # Sums of dhidden between slabs; with triton also those of the weight between chunks of rows.
    open_sums = 4 * N * D + (4 * 4096 * D if backend == "triton" else 0)
    slab = max(SLAB, min(SLAB_ROW * N, item * V * D)) if backend == "hopper" else SLAB
    return packed + slab + open_sums + 64 * N + 8 * MB


# Kernels


def _meta(dtype: torch.dtype, N: int, D: int, V: int, full: bool) -> tuple[Args, Args]:
    """Arguments of a forward and of its backward: with no optional ones, or with all."""

    def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    optional = ("bias", "mask", "softcap", "logit_scale", "logits_dtype", "vocab_size", "padded_vocab")
    given = dict.fromkeys((*optional, "workspace_bytes"))
    args: Args = {"hidden": empty(N, D, dtype=dtype), "weight": empty(V, D, dtype=dtype), **given}
    args |= {"token_ids": empty(N, dtype=torch.int64), "ignore_index": inputs.IGNORE, "temperature": 1.0}
    if full:
        args |= {"bias": empty(V), "mask": empty(N, dtype=torch.bool), "temperature": empty(N)}
        args |= {"logit_scale": 0.5, "logits_dtype": BF16}
    ours = args | {"return_entropy": full, "return_lse": full, "return_stats": True, "keep": False}
    theirs = args | {"stats": empty(2, N), "kept": None, "kept_base": None, "dlogp": empty(N)}
    theirs |= {name: empty(N) if full else None for name in ("entropy", "dentropy", "dlse")}
    theirs |= {"dhidden_dtype": None, "shard": 0, "shards": 8}
    return ours, theirs | {"want_hidden": True, "want_weight": True, "want_bias": full}


def record_triton(launch: Any, dtype: torch.dtype) -> None:
    """Without options in one slab; then with all options in two, with unfinished sums between them."""
    from isobit.ops.linear_logp import kernels_triton, kernels_triton_bwd

    for full in (False, True):
        ours, theirs = _meta(dtype, 4096, 1024, 8192 if full else 2048, full)
        more = {"softcap": 30.0} if full else {}
        kernels_triton.linear_logp(**ours | more, launch=launch)
        room = {"workspace_bytes": 4096 * 4096 * dtype.itemsize} if full else {}
        kernels_triton_bwd.linear_logp_bwd(**theirs | more | room, launch=launch)
        if dtype == F32:
            return  # another tile, but the same branches


def record_hopper(launch: Any, dtype: torch.dtype) -> None:
    """Without options, with all options, both with few rows and with splits that programs share, with kept
    probabilities, and with a frozen head."""
    from isobit.ops.linear_logp import kernels_hopper, kernels_hopper_bwd

    narrow = F16 if dtype == F32 else dtype  # tensor cores take no fp32: the second dtype is fp16 here
    N, V = 4096, 131072
    for full in (False, True):
        ours, theirs = _meta(narrow, N, 2048, V, full)
        if full:  # a bias of 16 bits is read in other words than one of 32, which the others have
            ours["bias"] = torch.empty_like(ours["bias"], dtype=narrow)
        kernels_hopper.linear_logp(launch=launch, **ours)
        kernels_hopper_bwd.linear_logp_bwd(launch=launch, **theirs)
        if dtype == F32:
            return
        for rows, sms in ((64, 1), (64, 132), (128, 132)):
            ours, _ = _meta(narrow, rows, 2048, V, full)
            kernels_hopper.linear_logp(launch=launch, sms=sms, **ours)
    ours, theirs = _meta(narrow, N, 2048, V, False)
    *_, kept, kept_base = kernels_hopper.linear_logp(launch=launch, **ours | {"keep": True})
    kernels_hopper_bwd.linear_logp_bwd(launch=launch, **theirs | {"kept": kept, "kept_base": kept_base})
    ours, theirs = _meta(narrow, 2 * N, 2048, 8192, False)
    kernels_hopper_bwd.linear_logp_bwd(launch=launch, **theirs | {"want_weight": False})


def _only(launch: Any, *kernels: Any) -> Any:
    """A launch that records these kernels. The others are recorded for the class without shards."""

    def some(kernel: Any, *given: Any, **options: Any) -> None:
        if kernel in kernels:
            launch(kernel, *given, **options)

    return some


def record_hopper_shards(launch: Any, dtype: torch.dtype) -> None:
    """The forward with splits that programs share, of a rank whose tokens are counted anew, and the sum of
    shards. For the second dtype, which differs only in conversions, the sum alone."""
    from isobit.kernels.hopper import shards as small
    from isobit.kernels.triton.tree_fold import fold_slice
    from isobit.ops.linear_logp import kernels_hopper, kernels_hopper_shards

    if dtype == BF16:
        ours, _ = _meta(dtype, 64, 2048, 131072, True)
        rank = {"vocab_size": 4 * 131072, "padded_vocab": 4 * 131072, "shard": 2, "shards": 2}
        new = (kernels_hopper.forward_kernel, small.here_kernel)
        kernels_hopper_shards.linear_logp(launch=_only(launch, *new), sms=132, **ours | rank)
        small.make_empty(torch.empty(32, 3, 64, device="meta"), launch)
    _, theirs = _meta(dtype, 4096, 2048, 8192, False)
    kernels_hopper_shards.linear_logp_bwd(launch=_only(launch, fold_slice), **theirs)


def record_triton_shards(launch: Any, dtype: torch.dtype) -> None:
    """What is not there without shards. For the second dtype the forward alone."""
    from isobit.ops.linear_logp import kernels_triton_shards as kernels

    ours, theirs = _meta(dtype, 4096, 1024, 8192, True)
    kernels.linear_logp(**ours, launch=_only(launch, kernels.shard_splits, kernels.merge_states))
    if dtype == BF16:
        kernels.linear_logp_bwd(**theirs, launch=_only(launch, kernels.dhidden_tile, kernels.place_rows))


# Observations for the report of a check


def observe(device: torch.device) -> list[dict[str, Any]]:
    """The error of logp against fp64 at logits of unit scale, by D. The bound of the law is for the worst
    case."""
    result = {}
    for D in (64, 1024, 4096):
        case = Case({"N": 256, "D": D, "V": 32768}, BF16, data="random")
        args = inputs.make(case, device, InputOptions())
        ours: Any = linear_logp(**args)
        error = ours.double() - truth.formula(in_fp64(args))[0]
        result[D] = float(error.abs().max())
    return [{"what": "largest error of logp at logits of unit scale, by D", "dtype": "bf16", "D": result}]


# Cases

# Kernels are compiled for every combination of options, and of sizes that are multiples of 16. A check on a
# GPU spends most time on that, so the cases repeat a few combinations.
_SMALL = [
    Case({"N": 32, "D": 48, "V": 272}, BF16),
    Case({"N": 20, "D": 24, "V": 130}, F32, layout="every other",
         options={"mask": torch.bool, "bias": "own", "temperature": 0.7}),
    Case({"N": 0, "D": 8, "V": 7}, F32),
    Case({"N": 32, "D": 48, "V": 272}, BF16, options={"mask": 0.25}),
    Case({"N": 9, "D": 8, "V": 1}, BF16, options={"bias": "own"}),
    Case({"B": 2, "T": 9, "D": 72, "V": 300}, F16, layout="shifted",
         options={"each": True, "ids": torch.int32}),
    Case({"N": 17, "D": 33, "V": 65}, BF16, layout="offset", options={"mask": torch.int32, "bias": "own"}),
    Case({"N": 32, "D": 16, "V": 272}, BF16, options={"vocab": 259, "bias": "own", "logits_dtype": BF16}),
    Case({"N": 17, "D": 16, "V": 90}, F32, layout="padded", options={"softcap": 3.0, "logit_scale": 1.5}),
    Case({"N": 32, "D": 16, "V": 304}, F16, options={"workspace_bytes": inputs.FULL, "mask": torch.bool}),
    Case({"N": 32, "D": 16, "V": 704}, BF16, layout="apart",
         options={"workspace_bytes": 1, "logit_scale": 0.5}),
]  # fmt: skip


def _heavy(
    N: int, D: int, V: int, dtype: torch.dtype, data: str = "edge", gpu_gb: int = 16, **options: Any
) -> Case:
    """A case for a GPU: on a CPU its truth alone takes minutes."""
    return Case({"N": N, "D": D, "V": V}, dtype, data, options=options, heavy=True, gpu_gb=gpu_gb)


_HEAVY = [
    _heavy(65537, 16, 257, BF16, "random", bias="own"),
    _heavy(1, 896, 151936, BF16, "random"),
    _heavy(80, 64, 151936, F16, mask=torch.bool, each=True, bias=F32),
    _heavy(80, 4096, 1000, BF16, bias="own", temperature=0.7),
    _heavy(208, 512, 50257, BF16, "random", logits_dtype=BF16, bias="own"),
    _heavy(608, 1024, 8208, F16, workspace_bytes=inputs.FULL),
    _heavy(304, 256, 5003, BF16, softcap=30.0, logit_scale=2.0),
]

_IGNORED = [Case({"N": 32, "D": 48, "V": 272}, BF16, options={"mask": alter.BY_IDS})]

_BITS = [
    Case({"N": 300, "D": 136, "V": 1000}, BF16, options={"bias": "own"}),
    _heavy(1100, 1024, 50257, BF16, "random", mask=torch.bool, each=True),
    _heavy(530, 896, 151936, F16, "random", temperature=0.7),
    _heavy(200, 72, 3000, F32, "random"),
    # More than 2**31 logits: wrong 32-bit offsets would fail here.
    _heavy(16500, 64, 131072, BF16, "random", gpu_gb=70),
]

_AGREE = [
    Case({"N": 1100, "D": 136, "V": 1300}, BF16, options={"bias": "own"}),
    _heavy(1300, 72, 3000, F16, mask=torch.bool, vocab=2700),
    _heavy(300, 4096, 50257, BF16, "random", temperature=0.7),
    _heavy(129, 896, 151936, BF16, "random", logits_dtype=BF16, bias="own"),
    # Blocks of rows if only dhidden is wanted, slabs in the memory of dweight otherwise; and kept
    # probabilities.
    _heavy(4500, 2048, 9000, BF16, "random", mask=torch.bool, vocab=8900, workspace_bytes=8 * MB),
    _heavy(4500, 512, 3000, F16, "random", mask=torch.bool, workspace_bytes=inputs.FULL),
]

PROOF = Proof(
    op=forward,
    op_class="logprob",
    outputs=("logp", "entropy", "lse"),
    make=inputs.make,
    formula=truth.formula,
    scale=truth.scale,
    controls=[
        Control("the vocabulary rolled by one column", inputs.rolled_vocabulary),
        Control("another order of the groups of 16 features", inputs.other_groups_of_features),
        Control("the vocabulary rolled, in dhidden", inputs.rolled_vocabulary, lambda cotangents: cotangents),
    ],
    padding=inputs.padding,
    layouts=inputs.LAYOUTS,
    lay_out=inputs.lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY + _IGNORED,
    bit_cases=_BITS,
    memory_cases=[
        Case({"N": 64, "D": 64, "V": 300}, BF16, data="random"),
        _heavy(4096, 2048, 50257, BF16, "random"),
        _heavy(12288, 1024, 65536, BF16, "random"),  # a slab as large as the weight
        _heavy(2048, 1024, 32768, BF16, "random", mask=torch.bool, bias="own"),
        Case(
            {"B": 4, "T": 4000, "D": 2048, "V": 8192}, BF16, "random", layout="shifted", heavy=True, gpu_gb=16
        ),
    ],
    mutants=inputs.MUTANTS,
    bad_value=lambda args: alter.one_bad_id(args, vocabulary(args)),
    kernels={
        "hopper": Kernels(record_hopper, targets=(("cuda", 90, 32),)),
        "triton": Kernels(record_triton),
        "hopper-8x4": Kernels(record_hopper_shards, targets=(("cuda", 90, 32),)),
        "triton-8x4": Kernels(record_triton_shards, targets=(("cuda", 90, 32), ("hip", "gfx942", 64))),
    },
    batch_sizes=(1, 2, 7, 63, 64, 65, 127, 128, 129, 256, 257),
    agree_cases=_AGREE,
    positive=("D", "V"),
    observe=observe,
    judged=judged,
    shared=Shared("mask", _live, inputs.maskable, inputs.schedules),
    also=fused,
    slow=("model-8x4",),
    differs=shards.differs(memory),
)

PROOFS = [PROOF]
