"""What differs between ways of computing the same tokens, and where it begins.

    report = isobit.drift.measure(model, prompts)
    print(report)

measure            a model against itself: in a batch, padded, in chunks, decoded, in a longer sequence
measure_rollout    a model against the log-probabilities that an engine returned
metrics            two sets of log-probabilities, in the numbers that trainers log
trl_callback       these numbers in the log of TRL's GRPOTrainer
verl_metrics       these numbers from a batch of verl
"""

from isobit.drift.measure import measure
from isobit.drift.metrics import metrics
from isobit.drift.report import Report, Row
from isobit.drift.rollout import measure_rollout
from isobit.drift.rollout_file import read_rollouts
from isobit.drift.training import trl_callback, verl_metrics

__all__ = [
    "Report",
    "Row",
    "measure",
    "measure_rollout",
    "metrics",
    "read_rollouts",
    "trl_callback",
    "verl_metrics",
]
