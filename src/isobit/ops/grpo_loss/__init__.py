from isobit.ops.grpo_loss.op import group_advantages, grpo_loss

__all__ = ["group_advantages", "grpo_loss"]
