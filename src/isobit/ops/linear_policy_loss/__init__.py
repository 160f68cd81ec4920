from isobit.ops.linear_policy_loss.op import linear_policy_loss

__all__ = ["linear_policy_loss"]
