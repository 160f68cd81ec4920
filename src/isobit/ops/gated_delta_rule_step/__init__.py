from isobit.ops.gated_delta_rule_step.op import gated_delta_rule_step
from isobit.ops.gated_delta_rule_step.state import DeltaState

__all__ = ["DeltaState", "gated_delta_rule_step"]
