from isobit.ops.delta_rule.op import chunk_gated_delta_rule_bwd_dhu

__all__ = ["chunk_gated_delta_rule_bwd_dhu"]
