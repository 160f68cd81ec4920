"""A few steps of GRPO on a toy policy: sample groups, reward them, and follow the loss, in micro-batches.

The policy is a table of logits, one line a step. The reward is how often a sequence says token 3.

    python examples/grpo_step.py
"""

import torch

import isobit

PROMPTS, SAMPLES, T, V = 4, 8, 6, 10


def main(steps: int = 30) -> float:
    gen = torch.Generator().manual_seed(0)
    table = torch.zeros(T, V, requires_grad=True)
    reference = table.detach().clone()
    optimizer = torch.optim.Adam([table], lr=0.2)
    reward = 0.0
    for step in range(steps):
        B = PROMPTS * SAMPLES
        logits = table.detach().expand(B, T, V)
        token_ids = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=gen).view(B, T)
        rewards = (token_ids == 3).float().mean(1)
        # Sequences have lengths of their own; the tokens after them are masked.
        mask = torch.arange(T) < torch.randint(2, T + 1, (B, 1), generator=gen)
        batch = {"token_ids": token_ids, "mask": mask, "old_logp": isobit.logp(logits, token_ids, mask=mask)}
        advantages = isobit.group_advantages(rewards, samples_per_prompt=SAMPLES)

        optimizer.zero_grad()
        for rows in torch.arange(B).split(B // 2):
            # Divided by the tokens of the whole batch, so that the gradients of its parts add up to its own.
            loss, stats = isobit.grpo_loss(
                table.expand(len(rows), T, V), reference.expand(len(rows), T, V),
                **{name: x[rows] for name, x in batch.items()}, advantages=advantages[rows],
                beta=0.01, normalizer=mask.sum(), clip_high=0.28,
            )  # fmt: skip
            loss.backward()
        optimizer.step()
        reward = rewards.mean().item()
        if step % 10 == 0:
            print(f"step {step}: reward {reward:.2f}, kl {stats['kl'].item():.4f}")
    print(f"step {steps - 1}: reward {reward:.2f}")
    return reward


if __name__ == "__main__":
    main()
