"""Losses of RL post-training on the log-probabilities of tokens: plain PyTorch, differentiable, no kernels.

Every loss is called as

    loss, stats = losses.grpo(logp, entropy, advantages=..., normalizer=..., old_logp=..., mask=..., ...)

on a whole batch or on some of its rows, and returns the share that these rows have in the loss: a sum over
rows, divided by a `normalizer` that is given. So the shares of chunks of a batch or of micro-batches add up
to the loss of all, and their gradients do too. `stats` are sums over the rows that count, detached, and add
up in the same way.

Rows are [n], or [B, T] with one sequence a line. Gradients go to `logp` and `entropy`; everything else is a
constant.
"""

from isobit.losses.entropy import entropy_bonus
from isobit.losses.kl import k1, k2, k3
from isobit.losses.policy import cispo, dapo, dr_grpo, dual_clip_ppo, grpo, gspo
from isobit.losses.weights import truncated_weights

__all__ = [
    "cispo",
    "dapo",
    "dr_grpo",
    "dual_clip_ppo",
    "entropy_bonus",
    "grpo",
    "gspo",
    "k1",
    "k2",
    "k3",
    "truncated_weights",
]
