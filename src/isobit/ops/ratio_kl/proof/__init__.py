"""The proof of `ratio_kl`. Inputs are in `inputs.py`, the truth and error bounds in `truth.py`, the bits that
it shares with `logp` in `bits.py`."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.logits import CHUNK_ELEMENTS
from isobit.ops.ratio_kl.op import forward
from isobit.ops.ratio_kl.proof import inputs, truth
from isobit.ops.ratio_kl.proof.bits import as_logp
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Kernels, Proof

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    N = math.prod(v for k, v in case.dims.items() if k != "V")
    if backend == "reference":
        chunk = min(N * case.dims["V"], max(CHUNK_ELEMENTS, case.dims["V"]))
        return 8 * max(case.dtype.itemsize, 4) * chunk + 256 * N + (1 << 20)
    return (1 << 20) + 16 * N  # partial sums of few rows; the kept sums and slopes of many


# Kernels


def _meta(N: int, V: int, dtype: torch.dtype, full: bool, ref: str = "logits") -> tuple[Args, Args]:
    """Arguments of a forward and of its backward: with no optional ones, or with all."""

    def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    args: Args = {"policy_logits": empty(N, V, dtype=dtype), "token_ids": empty(N, dtype=torch.int64)}
    args |= {"mask": empty(N, dtype=torch.bool) if full else None, "ignore_index": inputs.IGNORE}
    args["temperature"] = empty(N) if full else 1.0
    ours = args | {"ref_logits": empty(N, V, dtype=dtype) if ref == "logits" else None}
    ours |= {"ref_logp": empty(N) if ref == "logp" else None, "old_logp": empty(N) if full else None}
    ours |= {f"return_{name}": full for name in ("logp", "entropy", "stats")} | {"return_kl": ref != "none"}
    grads = {name: empty(N) if full else None for name in ("entropy", "dkl", "dlogp", "dentropy")}
    return ours, args | {"stats": empty(2, N), "slopes": empty(2, N), "dratio": empty(N), **grads}


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every kernel: few and many rows, odd and even V, with and without options, all kinds of references."""
    from isobit.ops.ratio_kl import kernels_triton as kernels

    calls = (
        (4096, 50257, True, "logits"), (1, 151936, True, "logits"), (4096, 50257, False, "logits"),
        (4096, 1000, False, "logp"),
    )  # fmt: skip
    for N, V, full, ref in calls:
        ours, theirs = _meta(N, V, dtype, full, ref)
        kernels.ratio_kl(launch=launch, **ours)
    kernels.ratio_kl_bwd(launch=launch, **theirs)


def record_hopper(launch: Any, dtype: torch.dtype) -> None:
    """The forward only; the backward is that of the portable kernels."""
    from isobit.ops.ratio_kl import kernels_hopper as kernels

    for full, ref in ((True, "logits"), (False, "logp")):
        kernels.ratio_kl(launch=launch, **_meta(4096, 50257, dtype, full, ref)[0])


# Cases

# Cases that are not heavy run in the interpreter, which takes a tenth of a second per row. So there are few
# rows, and fewest in every third case, which laws call repeatedly.
_SMALL = [
    Case({"N": 4, "V": 33}, F32, options={"mask": torch.bool}),
    Case({"N": 0, "V": 7}, F32),
    Case({"N": 10, "V": 257}, BF16, layout="every other", options={"temperature": 0.7, "ref_dtype": F32}),
    Case({"B": 2, "T": 3, "V": 1030}, BF16, layout="shifted", options={"each": True, "mask": 0.5}),
    Case({"N": 4, "V": 100}, F16, options={"temperature": 2.5, "ids": torch.int32, "old": "none"}),
    Case({"N": 7, "V": 1025}, F32, layout="offset", options={"ref": "logp", "mask": torch.int64}),
    Case({"N": 3, "V": 1}, F32, options={"ref": "none"}),
    Case({"N": 2, "V": 17001}, F16, layout="padded"),
]
_HEAVY = [
    Case({"N": 65537, "V": 33}, BF16, data="random", heavy=True),
    Case({"N": 24, "V": 257}, F32, heavy=True),
    Case({"N": 8, "V": 151936}, BF16, options={"mask": torch.bool}, heavy=True),
    Case({"N": 3, "V": 300000}, F32, options={"ref": "logp"}, heavy=True),
    Case({"N": 20, "V": 50257}, F16, options={"temperature": 0.7}, heavy=True),
]
_IGNORED = [Case({"N": 4, "V": 130}, F32, options={"mask": alter.BY_IDS})]
# V is more than one split. With a quarter of another few rows are summed in parts, and many (from 9 on, on a
# CPU) are not.
_BITS = [
    Case({"N": 16, "V": 16501}, BF16, data="sharp", options={"ref_dtype": F32, "mask": 0.025}),
    Case({"N": 16, "V": 20501}, F16, data="sharp", options={"mask": 0.025}),
    Case({"N": 2200, "V": 50257}, F16, data="random", heavy=True),
    Case({"N": 2200, "V": 151936}, BF16, data="random", heavy=True),
    # More than 2**31 logits: wrong 32-bit offsets would fail here.
    Case({"N": 16500, "V": 131072}, BF16, data="random", heavy=True, gpu_gb=100),
]
# Few and many rows, odd and even V, both layouts of rows, and every option that affects the sums.
_AS_LOGP = [
    Case({"N": 17, "V": 16501}, BF16, data="sharp", options={"ref_dtype": F32, "mask": 0.025}),
    Case({"B": 2, "T": 2, "V": 3001}, F32, data="sharp", layout="shifted", options={"each": True}),
    Case({"N": 7, "V": 151936}, F32, data="sharp", options={"ref_dtype": F16}, heavy=True),
    Case({"N": 2200, "V": 50257}, F16, data="random", options={"mask": 0.5}, heavy=True),
    Case({"N": 2200, "V": 151936}, BF16, data="random", options={"temperature": 0.7}, heavy=True),
]

PROOF = Proof(
    op=forward,
    op_class="logprob",
    outputs=("ratio", "kl", "logp", "entropy"),
    make=inputs.make,
    formula=truth.formula,
    scale=truth.scale,
    controls=[Control("the vocabulary rolled by one column", inputs.rolled)],
    padding=inputs.padding,
    layouts=inputs.LAYOUTS,
    lay_out=inputs.lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY + _IGNORED,
    bit_cases=_BITS,
    agree_cases=_AS_LOGP,
    memory_cases=[
        Case({"N": 1, "V": 17000}, F32),
        Case({"N": 100, "V": 50257}, BF16, data="random", heavy=True),
    ],
    mutants=inputs.MUTANTS,
    bad_value=lambda args: alter.one_bad_id(args, args["policy_logits"].shape[-1]),
    kernels={
        "triton": Kernels(record),
        "hopper": Kernels(record_hopper, targets=(("cuda", 90, 32),)),
    },
    positive=("V",),
    judged=truth.judged,
    also=as_logp,
)

PROOFS = [PROOF]
