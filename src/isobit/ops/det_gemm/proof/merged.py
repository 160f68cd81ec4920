"""Layers that are merged: the columns of a product have the bits of a product of these columns alone.

Engines multiply by the weights of q, k and v at once, and by those of gate and up; and each GPU may have some
of the columns. So no order of k may depend on N.
"""

from itertools import pairwise

from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args
from isobit.spec.trial import Trial


def cuts(N: int) -> list[int]:
    """Where N columns are cut: into unequal parts, the last with one column."""
    return sorted({0, 5 * N // 8, 7 * N // 8, max(N - 1, 0), N})


def merged_layers(trial: Trial) -> list[OutputCheck]:
    """A layer and its bias, cut into parts: each has the bits of these columns in the whole."""
    args = trial.args()
    whole, *_ = trial.forward(args)
    N, checks = whole.shape[-1], []
    for first, end in pairwise(cuts(N)):
        part: Args = args | {"weight": args["weight"][first:end]}
        if args["bias"] is not None:
            part["bias"] = args["bias"][first:end]
        if end - first < N and trial.refusal(part) is None:
            # A part may begin where a kernel cannot read it; another backend of its class serves it then.
            ours, *_ = trial.in_class(part).forward(part)
            what = f"columns [{first}, {end}) of {N} as a layer of their own"
            checks.append(same_bits("0:y", ours, whole[..., first:end], what))
    return checks
