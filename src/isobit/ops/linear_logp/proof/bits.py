"""Bit laws that only `linear_logp` has.

*Fused = unfused.* In class lse/1 a call has the bits of `logp` on the logits of `det_linear` in fp32.
"""

import torch
from torch import Tensor

from isobit.ops.det_gemm import det_linear
from isobit.ops.linear_logp.op import vocabulary
from isobit.ops.linear_logp.proof.inputs import rolled_vocabulary
from isobit.ops.logp import logp
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial

FUSED = "lse/1"


def fused(trial: Trial) -> list[OutputCheck]:
    """Only for class lse/1, and without a softcap, which an unfused call does not have."""
    args = trial.args()
    if trial.numerics != FUSED or args["softcap"] is not None:
        return []
    ours, theirs = trial.forward(args), unfused(args, "hopper")
    named = list(enumerate(trial.proof.outputs))
    what = "fused against det_linear and logp"
    checks = [same_bits(f"{i}:{name}", ours[i], theirs[i], what) for i, name in named]
    others = {
        "logp in another class": unfused(args, "triton"),
        "the vocabulary rolled by one column, unfused": unfused(rolled_vocabulary(args), "hopper"),
    }
    for what_changed, changed in others.items():
        checks.append(trial.control(what_changed, ours, changed))
    return checks


def unfused(args: Args, backend: str) -> tuple[Tensor, ...]:
    """(logp, entropy, lse) from stored logits, in fp32 or in the dtype they are rounded to."""
    logits = det_linear(
        args["hidden"], args["weight"], args["bias"], out_dtype=torch.float32, numerics="chain16"
    )[..., : vocabulary(args)]
    if args["logits_dtype"] is not None:
        logits = logits.to(args["logits_dtype"])
    factor = 1.0 if args["logit_scale"] is None else args["logit_scale"]
    return logp(
        logits, args["token_ids"], mask=args["mask"], ignore_index=args["ignore_index"],
        temperature=args["temperature"] / factor, return_entropy=True, return_lse=True, backend=backend,
    )  # fmt: skip
