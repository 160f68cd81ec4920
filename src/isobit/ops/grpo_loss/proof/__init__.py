"""The proof of `grpo_loss`: inputs are in `inputs.py`, the truth and error bounds in `truth.py`, the order of
its sums in `model.py`. The proof of `group_advantages` is in `advantages.py`."""

from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.logits import CHUNK_ELEMENTS
from isobit.ops.grpo_loss.op import forward
from isobit.ops.grpo_loss.proof import inputs, model, truth
from isobit.ops.grpo_loss.proof.advantages import ADVANTAGES
from isobit.ops.ratio_kl.proof.inputs import rolled
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Groups, Kernels, Proof

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    N = case.dims["B"] * case.dims["T"]
    if backend == "reference":
        chunk = min(N * case.dims["V"], max(CHUNK_ELEMENTS, case.dims["V"]))
        return 8 * max(case.dtype.itemsize, 4) * chunk + 512 * N + (1 << 20)
    return (1 << 20) + 64 * N  # partial sums of few rows, or a few numbers per row of many


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every kernel that `ratio_kl` does not have, with and without options."""
    from isobit.ops.grpo_loss import kernels_triton as kernels

    def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    B, T = 32, 256
    for full, reduction in ((False, "token_mean"), (True, "sequence_mean"), (False, "sum")):
        args: Args = {"token_ids": empty(B, T, dtype=torch.int64), "ignore_index": -100, "eps": 1e-6}
        args |= {"mask": empty(B, T, dtype=torch.bool) if full else None, "reduction": reduction}
        args |= {"rollout_weights": empty(B, T, dtype=dtype) if full else None, "return_kept": full}
        args |= {"advantages": None if full else empty(B, T), "rewards": empty(B, dtype=dtype)}
        args |= {"samples_per_prompt": 4, "group_boundaries": None}
        args |= {"normalizer": empty(dtype=torch.int64) if full else None}
        args |= {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.1 if full else 0.0}
        kl, entropy, slopes = (empty(*lead, B, T) if full else None for lead in ((), (), (2,)))
        kernels.token_loss(empty(B, T), kl, entropy, slopes, launch, **args)
    kernels.group_advantages(launch, **args, scale=True)  # where the groups are too large to be found often
    args = {"policy_logits": empty(B, T, 1000, dtype=dtype), "token_ids": args["token_ids"], "mask": None}
    args |= {"stats": empty(2, B, T), "slope": empty(B, T), "scale": empty(B), "dloss": empty()}
    kernels.grpo_loss_bwd(launch, **args, ignore_index=-100, temperature=1.0)


_GROUPS = {"by": "samples", "mask": torch.bool, "reduction": "sequence_mean"}
# Few tokens, because the interpreter takes a tenth of a second for each.
_CASES = [
    Case({"B": 2, "T": 2, "V": 17}, F32),
    Case({"B": 0, "T": 3, "V": 7}, F32),
    Case({"B": 4, "T": 2, "V": 257}, BF16, options=_GROUPS),
    Case({"B": 3, "T": 2, "V": 130}, F16, options={"by": "bounds", "weights": True, "normalizer": 12.5}),
    Case({"B": 3, "T": 2, "V": 65}, F32, layout="shifted", options={
        "by": "tokens", "mask": torch.int64, "ref": "logp", "reduction": "sum", "normalizer": "tensor"}),
    Case({"B": 2, "T": 2, "V": 1030}, F32, options={"ref": "none", "old": "none", "temperature": 0.7}),
    Case({"B": 3, "T": 1, "V": 5}, BF16, options={"mask": 0.0, "each": True}),
    Case({"B": 6, "T": 700, "V": 130}, BF16, heavy=True, options=_GROUPS),
    Case({"B": 2, "T": 4200, "V": 33}, F32, heavy=True, options={
        "mask": 0.3, "by": "tokens", "weights": True}),
    Case({"B": 5, "T": 6, "V": 50257}, F16, heavy=True, options={"by": "bounds", "mask": torch.bool}),
    Case({"B": 2, "T": 2, "V": 17}, F32, options={"mask": alter.BY_IDS}),
    Case({"B": 4, "T": 1, "V": 17}, F32, options={"by": "samples", "ref": "none", "far": True}),
    Case({"B": 4, "T": 1, "V": 17}, F32, options={
        "by": "samples", "ref": "none", "far": True, "clip_high": float("inf")}),
]  # fmt: skip

# A fixed divisor, whatever the batch; otherwise the gradient of a row depends on the number of rows.
_BITS = [
    Case({"B": 9, "T": 1, "V": 3030}, F32, data="random", options={"reduction": "sum"}),
    Case({"B": 9, "T": 1, "V": 3030}, F32, data="random", options={
        "by": "bounds", "reduction": "sequence_mean", "normalizer": 3.0}),
    Case({"B": 64, "T": 40, "V": 50257}, F16, data="random", heavy=True, options={"reduction": "sum"}),
    Case({"B": 64, "T": 40, "V": 32768}, BF16, data="random", heavy=True, options={
        "by": "samples", "mask": torch.bool, "weights": True, "normalizer": "tensor"}),
]  # fmt: skip
_AS_RATIO_KL = [
    Case({"B": 4, "T": 40, "V": 33}, F32, data="random", options=_GROUPS),
    Case({"B": 3, "T": 2, "V": 130}, F16, options={"by": "bounds", "weights": True, "normalizer": 12.5}),
    Case({"B": 2, "T": 4200, "V": 33}, F32, data="random", heavy=True, options={"by": "tokens"}),
    Case({"B": 300, "T": 70, "V": 515}, BF16, data="random", heavy=True, options=_GROUPS),
]

LOSS = Proof(
    op=forward,
    op_class="logprob",
    outputs=truth.OUTPUTS,
    make=inputs.make,
    formula=truth.formula,
    scale=truth.scale,
    controls=[Control("the vocabulary rolled by one column", rolled)],
    padding=inputs.padding,
    layouts=inputs.LAYOUTS,
    lay_out=inputs.lay_out,
    memory=memory,
    cases=_CASES,
    bit_cases=_BITS,
    essential=("reduction", "normalizer"),
    agree_cases=_AS_RATIO_KL,
    memory_cases=[
        Case({"B": 2, "T": 2, "V": 5003}, F32),
        Case({"B": 4, "T": 50, "V": 50257}, BF16, data="random", heavy=True),
    ],
    mutants=inputs.MUTANTS,
    # One bad id makes the loss NaN, and the gradient of one row; a test covers this.
    bad_value=lambda args: (alter.one_bad_id(args, args["policy_logits"].shape[-1])[0], None),
    kernels={
        "triton": Kernels(record),
        "hopper": Kernels(record, targets=(("cuda", 90, 32),)),
    },
    positive=("V",),
    rows="B",
    groups=Groups("samples_per_prompt", "group_boundaries"),
    judged=truth.judged,
    also=model.as_ratio_kl,
)

PROOFS = [LOSS, ADVANTAGES]
