"""The law of ranks: bits do not depend on how many of them compute a result together."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.ranks import SIZES, in_turn
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Shards
from isobit.spec.proofs import is_candidate
from isobit.spec.trial import LawBroken, Trial, Unsupported


def parallel(trial: Trial) -> list[OutputCheck]:
    """1, 2, 4 and 8 ranks have the bits of one call without a group, outputs and gradients, on every rank.
    The ranks run in turn on one device: bits do not depend on who moves the bytes. Controls: sums over ranks
    in another order, or rounded between, have other bits."""
    if not trial.proof.shards:
        raise Unsupported("no group of ranks computes it together")
    if is_candidate(trial.op):
        raise Unsupported("a function that is checked in its place takes no group of ranks")
    if trial.numerics == NONE:
        raise Unsupported(f"{trial.backend} has numerics class 'none' here: it promises accuracy, not bits")
    args = trial.args()
    outputs, _ = trial.backward(args)
    cotangents = trial.cotangents(outputs)
    groups = []
    for shards in trial.proof.shards:
        if shards.why_not(trial) is None:
            controls = [trial.control(*each) for each in shards.controls(trial, args, cotangents)]
            if not controls:
                raise LawBroken(f"{shards.what}: no control: equal bits prove nothing")
            groups.append(_same_on_all(trial, shards, cotangents) + controls)
    if not groups:
        raise Unsupported("; ".join(str(shards.why_not(trial)) for shards in trial.proof.shards))
    return trial.conclusive(*groups)


def _same_on_all(trial: Trial, shards: Shards, cotangents: Sequence[Tensor]) -> list[OutputCheck]:
    args = trial.args()
    whole, checks = shards.whole(trial, args, cotangents), list[OutputCheck]()
    for size in SIZES:
        ranks = in_turn(size, lambda group: shards.run(group, trial, args, cotangents))
        what = f"{shards.what} on {size} ranks"
        if any(rank.keys() != whole.keys() for rank in ranks):
            raise LawBroken(f"{what}: {sorted(ranks[0])} and not {sorted(whole)}")
        for name, expected in whole.items():
            checks += [same_bits(name, each, expected, what) for each in _joined(shards.spread, name, ranks)]
    return checks


def _joined(
    spread: Mapping[str, int | None], name: str, ranks: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """The parts of all ranks as one tensor; or what every rank has, if each of them has all of it."""
    each, dim = [rank[name] for rank in ranks], spread[name]
    return each if dim is None else [torch.cat(each, dim)]
