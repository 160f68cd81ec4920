from isobit.ops.gated_delta_rule.op import gated_delta_rule

__all__ = ["gated_delta_rule"]
