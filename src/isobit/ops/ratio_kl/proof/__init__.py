"""What must be shown of `ratio_kl`: its inputs are in `inputs.py`, the truth and the errors in `truth.py`,
what it has in common with `logp`, bit for bit, in `bits.py`."""

import math

import torch

from isobit.blocks.logits import CHUNK_ELEMENTS
from isobit.check import inputs as alter
from isobit.check.proof import Case, Control, Proof
from isobit.ops.ratio_kl.op import forward
from isobit.ops.ratio_kl.proof import inputs, truth
from isobit.ops.ratio_kl.proof.bits import as_logp

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    N = math.prod(v for k, v in case.dims.items() if k != "V")
    if backend == "reference":
        chunk = min(N * case.dims["V"], max(CHUNK_ELEMENTS, case.dims["V"]))
        return 8 * 4 * chunk + 256 * N + (1 << 20)
    return (1 << 20) + 16 * N  # partial sums of few rows; the kept sums and slopes of many


# Cases

_SMALL = [
    Case({"N": 0, "V": 7}, F32),
    Case({"N": 20, "V": 1}, BF16),
    Case({"N": 20, "V": 257}, F32, options={"mask": torch.bool}),
    Case({"N": 20, "V": 257}, BF16, options={"temperature": 0.7, "ref_dtype": F32}),
    Case({"N": 20, "V": 257}, F16, options={"temperature": 2.5, "ids": torch.int32, "old": "none"}),
    Case({"N": 20, "V": 1025}, F32, options={"ref": "logp", "mask": 0.5}),
    Case({"B": 2, "T": 10, "V": 1025}, BF16, layout="shifted", options={"ref_dtype": F16}),
    Case({"N": 20, "V": 33}, F32, options={"ref": "none"}),
    Case({"N": 3, "V": 17001}, F16, layout="padded", options={"mask": torch.uint8}),
    Case({"N": 20, "V": 1030}, F32, layout="offset", options={"mask": torch.bool, "each": True}),
]
_HEAVY = [
    Case({"N": 65537, "V": 33}, BF16, data="random", heavy=True),
    Case({"N": 12, "V": 151936}, BF16, options={"mask": torch.bool}, heavy=True),
    Case({"N": 5, "V": 300000}, F32, options={"ref": "logp"}, heavy=True),
    Case({"N": 40, "V": 50257}, F16, options={"temperature": 0.7}, heavy=True),
]
# V beyond one split, so that few rows take the split kernels and many (from 16 on, on a CPU) do not.
_BITS = [
    Case({"N": 17, "V": 16501}, BF16, options={"ref_dtype": F32}),
    Case({"N": 5, "V": 3001}, F32, data="random", options={"each": True}),
    Case({"N": 2200, "V": 50257}, F16, data="random", heavy=True),
    Case({"N": 2200, "V": 151936}, BF16, data="random", heavy=True),
    # More than 2**31 logits: 32-bit offsets would show here.
    Case({"N": 16500, "V": 131072}, BF16, data="random", heavy=True, gpu_gb=100),
]
# Few and many rows, odd and even V, both layouts of rows, and everything that changes what is summed.
_AS_LOGP = [
    Case({"N": 17, "V": 16501}, BF16, options={"ref_dtype": F32}),
    Case({"N": 5, "V": 16640}, F32, data="random", options={"temperature": 0.7}),
    Case({"B": 2, "T": 9, "V": 1027}, F32, layout="shifted", options={"each": True, "mask": torch.bool}),
    Case({"N": 20, "V": 999}, F16, layout="offset", options={"mask": 0.5}),
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
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    agree_cases=_AS_LOGP,
    memory_cases=[
        Case({"N": 4, "V": 50257}, F32),
        Case({"N": 200, "V": 50257}, BF16, data="random", heavy=True),
    ],
    mutants=inputs.MUTANTS,
    bad_value=lambda args: alter.one_bad_id(args, args["policy_logits"].shape[-1]),
    kernels={},
    positive=("V",),
    judged=truth.judged,
    also=as_logp,
)

PROOFS = [PROOF]
