"""Ranks that compute one result together: who they are, how they exchange tensors, and sums over them whose
order is fixed.

    Group            what a rank knows: its number, how many there are, two collectives
    as_group         a group of torch.distributed, or a one-dimensional mesh, as a `Group`
    in_turn          the same code on several ranks of one process, one after another on one device
    agree            all ranks make the same call, or every one of them raises the same error
    reads_values     whether a call checks the contents of tensors
    shown, bits      an argument in the description of a call, and checksums of tensors
    ranks_that_share the ranks that a call shares a weight with, which may be a DTensor
    under_the_name   errors of a function's parts, under its own name
    OfVocabulary     a function whose vocabulary ranks share: the call of a rank
    ordered_sum      the sum of all ranks' fp32 tensors as a balanced tree, rounded once, on every rank
    ordered_scatter  the same, of which a rank keeps its own rows
"""

from isobit.ranks.agreement import agree, bits, reads_values, shown
from isobit.ranks.fold import fold
from isobit.ranks.group import ALONE, SIZES, Group, Processes, RanksError, as_group
from isobit.ranks.in_turn import in_turn
from isobit.ranks.ordered import gather_rows, ordered_scatter, ordered_sum
from isobit.ranks.shared import dtensor_error, local_part, ranks_that_share, under_the_name
from isobit.ranks.vocabulary import Call, OfVocabulary

__all__ = [
    "ALONE", "SIZES", "Call", "Group", "OfVocabulary", "Processes", "RanksError", "agree", "as_group",
    "bits", "dtensor_error", "fold", "gather_rows", "in_turn", "local_part", "ordered_scatter", "ordered_sum",
    "ranks_that_share", "reads_values", "shown", "under_the_name",
]  # fmt: skip
