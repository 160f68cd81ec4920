from isobit.ops.gated_delta_rule_step.op import gated_delta_rule_step

__all__ = ["gated_delta_rule_step"]
