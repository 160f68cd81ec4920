"""Losses of RL post-training on the log-probabilities of tokens: plain PyTorch, differentiable, no kernels.

Every loss is called as

    loss, stats = losses.grpo(logp, entropy, advantages=..., normalizer=..., old_logp=..., mask=..., ...)

on a whole batch or on some of its rows, and returns the share of these rows in the loss: a sum over rows,
divided by a given `normalizer`. So the shares of chunks or micro-batches of a batch add up to the loss of the
batch, and so do their gradients. `stats` are detached sums over the live rows, those that are not masked, and
add up in the same way.

Rows are [n], or [B, T] with one sequence per line. Gradients go to `logp` and `entropy`; everything else is a
constant.
"""

from isobit.losses.by_rows import by_rows
from isobit.losses.entropy import entropy_bonus
from isobit.losses.kl import k1, k2, k3
from isobit.losses.policy import cispo, dapo, dr_grpo, dual_clip_ppo, grpo, gspo
from isobit.losses.weights import truncated_weights

__all__ = [
    "by_rows",
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
