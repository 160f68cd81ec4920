"""Equal bits that `linear_logp` promises for reasons of its own, beside those that every op has.

*W.* dweight and dbias are sums over rows, so the batch is what they are made of. They depend on the stream of
rows that count alone: not on rows that do not, on the leading shape, or on how wide a slab of d-logits is.

*Fused = unfused.* In class lse/1 a call has the bits of `logp` on the logits of `det_linear` in fp32.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isobit.blocks.tokens import live_rows
from isobit.check.compare import OutputCheck, differing, same_bits
from isobit.check.proof import Args
from isobit.check.rows import rows_of
from isobit.check.trial import Trial
from isobit.ops.det_gemm.op import det_linear
from isobit.ops.linear_logp.op import vocabulary
from isobit.ops.linear_logp.proof_inputs import keeps, padding, rolled_vocabulary
from isobit.ops.logp.op import logp

#: Rows of the stream that join one tensor-core step.
GROUP = 16

FUSED = "lse/1"


def also(trial: Trial) -> list[OutputCheck]:
    return [*one_stream(trial), *fused(trial)]


# W


def one_stream(trial: Trial) -> list[OutputCheck]:
    rows = rows_of(trial.op)
    args = rows.flat(trial.args())
    N, (outputs, whole) = rows.count(args), trial.backward(args)
    cotangents = trial.cotangents(outputs)
    shared = [name for name in whole if name not in rows.args]
    everyone = torch.arange(N, device=trial.device)

    def gradients(changed: Args, given: Sequence[Tensor]) -> dict[str, Tensor]:
        return replace(trial, given=tuple(given)).backward(changed)[1]

    def same(what: str, changed: Args, given: Sequence[Tensor]) -> list[OutputCheck]:
        found = gradients(changed, given)
        return [same_bits(f"gradient:{name}", found[name], whole[name], what) for name in shared]

    checks = []
    for where, at, total in _places(N, trial.device):
        spread = padding(args, total)
        names = [n for n in rows.args if args.get(n) is not None]
        moved = {n: spread[n].index_copy(0, at, args[n]) for n in names}
        given = rows.spread(cotangents, at, total)
        checks += same(f"ignored rows full of NaN {where}", args | moved, given)
        # The same by a mask, with ids that would count without it.
        ours = torch.zeros(total, dtype=torch.bool, device=trial.device).index_fill(0, at, True)
        ids = torch.where(ours, moved["token_ids"], 0)
        masked = args | moved | {"token_ids": ids, "mask": ours if args["mask"] is None else moved["mask"]}
        checks += same(f"masked rows full of NaN {where}", masked, given)
    if args["mask"] is not None:
        index = everyone[live_rows(args["token_ids"], args["mask"], args["ignore_index"])]
        packed = rows.select(args, index) | {"mask": None}
        checks += same("packed: rows that do not count taken out", packed, rows.of_outputs(cotangents, index))
    everything = 2 * N * vocabulary(args)  # d-logits of the whole vocabulary, in 16 bits
    for nbytes in () if keeps(args) else (1, everything // 5, everything // 2):
        checks += same(f"workspace_bytes={nbytes}", args | {"workspace_bytes": nbytes}, cotangents)
    # Who else wants a gradient does not show in those of rows.
    for name in (name for name in whole if name in rows.args):
        alone = replace(trial, only=(name,)).backward(args)[1]
        checks.append(same_bits(f"gradient:{name}", alone[name], whole[name], "asked for alone"))
    # Controls
    turned = torch.cat(everyone.split(GROUP)[::-1])
    changed = gradients(rows.select(args, turned), rows.of_outputs(cotangents, turned))
    differ = [differing(changed[n], whole[n]).any() for n in shared]
    checks.append(_must_differ(trial, "groups of 16 rows in another order", differ, outputs[0]))
    return checks


def _places(N: int, device: torch.device) -> list[tuple[str, Tensor, int]]:
    """Where the rows of a batch are put among others, in their order."""
    gen = torch.Generator().manual_seed(11)
    more = N // 3 + 9
    anywhere = torch.randperm(N + more, generator=gen)[:N].sort().values
    return [("in front", torch.arange(9, N + 9, device=device), N + 9),
            ("anywhere", anywhere.to(device), N + more)]  # fmt: skip


def _must_differ(trial: Trial, what: str, differ: Sequence[Tensor], any_tensor: Tensor) -> OutputCheck:
    if any(bool(d) for d in differ):
        return same_bits("control", any_tensor, any_tensor, f"control: {what} changes bits, as it must")
    return trial.blind(what)


# Fused = unfused


def fused(trial: Trial) -> list[OutputCheck]:
    """Where there is a class for it, and an unfused call: without one temperature a row and softcap."""
    args = trial.args()
    if trial.numerics != FUSED or any(args[n] is not None for n in ("row_temperature", "softcap")):
        return []
    ours, theirs = trial.forward(args), unfused(args, "hopper")
    named = list(enumerate(trial.proof.outputs))
    what = "fused against det_linear and logp"
    checks = [same_bits(f"{i}:{name}", ours[i], theirs[i], what) for i, name in named]
    others = {
        "logp in another class": unfused(args, "triton"),
        "the vocabulary rolled by one column, unfused": unfused(rolled_vocabulary(args), "hopper"),
    }
    for told, found in others.items():
        differ = [differing(ours[i], found[i]).any() for i, _ in named]
        checks.append(_must_differ(trial, told, differ, ours[0]))
    return checks


def unfused(args: Args, backend: str) -> tuple[Tensor, ...]:
    """(logp, entropy, lse) from logits that are stored, in fp32 or in the dtype they are rounded to."""
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
