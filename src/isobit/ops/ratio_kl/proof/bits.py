"""Bit laws between `ratio_kl` and `logp`: a policy's ratio to itself is exactly 1."""

import torch
from torch import Tensor

from isobit.frame.contract import dtype_name
from isobit.ops.det_gemm import det_linear
from isobit.ops.linear_logp import linear_logp
from isobit.ops.logp import logp
from isobit.ops.ratio_kl.op import ratio_kl
from isobit.ops.ratio_kl.proof.inputs import reversed_, rolled
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial

FUSED = "lse/1"


def as_logp(trial: Trial) -> list[OutputCheck]:
    """ratio is 1 if old_logp is `logp` of the same logits in the same class, and without old_logp, with the
    same gradient; logp and entropy have the bits of `logp`; and kl is the same from reference logits and from
    `logp` of them. Control: an old_logp that was summed in another order."""
    args = trial.args()
    trial.op.explain(**args, backend=trial.backend)  # raises here if the backend cannot serve
    own, entropy = _logp(trial, args, "policy_logits")
    acted = args | {"old_logp": own}
    outputs, grads = trial.backward(acted)
    ratio, kl, *rest = outputs
    one = torch.ones_like(ratio)
    checks = [same_bits("0:ratio", ratio, one, "old_logp of logp: exactly 1")]
    for i, (name, ours, expected) in enumerate(zip(("logp", "entropy"), rest, (own, entropy), strict=True)):
        checks.append(same_bits(f"{i + 2}:{name}", ours, expected, "against logp"))
    (on_policy, *_), same = trial.backward(args | {"old_logp": None})
    checks.append(same_bits("0:ratio", on_policy, one, "without old_logp: exactly 1"))
    name = "policy_logits"
    checks.append(same_bits(f"gradient:{name}", same[name], grads[name], "without old_logp"))
    if args["ref_logits"] is not None:
        ref, _ = _logp(trial, args, "ref_logits")
        given = trial.forward(acted | {"ref_logits": None, "ref_logp": ref})
        checks.append(same_bits("1:kl", given[1], kl, "from logp of the reference against its logits"))
    # For a single row both orders may round to the same bits.
    one_way, other_way = (_logp(trial, change(args), "policy_logits")[0] for change in (rolled, reversed_))
    other = torch.where(one_way == own, other_way, one_way)
    changed = trial.forward(args | {"old_logp": other})
    checks.append(trial.control("old_logp summed in another order", [one], changed[:1]))
    return checks + _from_hidden_states(trial)


def _logp(trial: Trial, args: Args, logits: str) -> tuple[Tensor, ...]:
    options = {name: args[name] for name in ("mask", "ignore_index", "temperature")}
    result = logp(args[logits], args["token_ids"], **options, return_entropy=True, backend=trial.backend)
    return result


def _from_hidden_states(trial: Trial) -> list[OutputCheck]:
    """In the class of fused log-probabilities, ratio is 1 if old_logp came from `linear_logp`, which never
    stores logits, for fp32 and for rounded logits. Control: the same in another class."""
    if trial.numerics != FUSED:
        return []
    gen = torch.Generator(trial.device).manual_seed(3)
    hidden, weight = (
        torch.empty(n, 256, device=trial.device).normal_(generator=gen).div(4).bfloat16() for n in (64, 5003)
    )
    ids = torch.randint(0, len(weight), (len(hidden),), generator=gen, device=trial.device)
    logits = det_linear(hidden, weight, out_dtype=torch.float32, numerics="chain16")
    checks = []
    for dtype in (None, torch.bfloat16):
        old_logp = linear_logp(hidden, weight, ids, logits_dtype=dtype, numerics=FUSED)
        stored = logits if dtype is None else logits.to(dtype)
        ours, other = (
            ratio_kl(stored, None, ids, old_logp=old_logp, return_kl=False, backend=backend)
            for backend in (trial.backend, "triton")
        )
        told = f"old_logp of linear_logp, logits in {dtype_name(stored.dtype)}"
        checks.append(same_bits("0:ratio", ours, torch.ones_like(ours), f"{told}: exactly 1"))
        checks.append(trial.control(f"{told}: another class", [torch.ones_like(ours)], [other]))
    return checks
