"""What differs between ways of computing the same tokens, and where it begins.

    report = isobit.drift.measure(model, prompts)
    print(report)

measure            a model against itself: in a batch, padded, in chunks, decoded, in a longer sequence
measure_rollout    a model against the log-probabilities that an engine returned
metrics            two sets of log-probabilities, in the numbers that trainers log
"""

from isobit.drift.measure import measure
from isobit.drift.metrics import metrics
from isobit.drift.report import Report, Row
from isobit.drift.rollout import measure_rollout, read_rollouts

__all__ = ["Report", "Row", "measure", "measure_rollout", "metrics", "read_rollouts"]
