from isobit.ops.gated_delta_rule.op import gated_delta_rule
from isobit.ops.gated_delta_rule.states_op import chunk_gated_delta_rule_fwd_h

__all__ = ["chunk_gated_delta_rule_fwd_h", "gated_delta_rule"]
