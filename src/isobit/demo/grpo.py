"""GRPO from scratch: a tiny transformer learns from rewards alone to write strings of digits backwards.

    prompt "2718="    answer "8172"    reward: the share of the digits that are right, 1/16 by chance

A step samples a group of answers to each prompt from a KV cache and records the log-probabilities they were
sampled with, rewards the answers, turns the rewards of a group into advantages, and follows the loss for a
few minibatches. `isobit demo` runs it and draws the curves.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isobit
from isobit import losses
from isobit.demo.policy import ISOBIT, KV, TORCH, Ops, Policy

DIGITS, EQUALS, VOCAB = 10, 10, 16  # tokens 0 to 9 and "="; the vocabulary is padded to a multiple of 8


@dataclass(frozen=True)
class Config:
    steps: int = 80
    length: int = 4  # of a string
    prompts: int = 16  # in a step
    samples: int = 8  # for a prompt: its group
    epochs: int = 2  # over the answers of a step
    minibatches: int = 2  # in an epoch
    layers: int = 2
    lr: float = 2e-3
    beta: float = 1e-3  # weight of the KL to the policy before training
    entropy_coef: float = 0.02
    seed: int = 0
    probe_every: int = 4  # steps between two measurements of the drift of the functions that do not train
    probe_answers: int = 8  # answers that are measured then
    exam_strings: int = 500  # at the end


# The task


def make_prompts(count: int, length: int, gen: torch.Generator) -> Tensor:
    """[count, length + 1]: random strings, each followed by "="."""
    digits = torch.randint(DIGITS, (count, length), generator=gen, device=gen.device)
    return F.pad(digits, (0, 1), value=EQUALS)


def is_right(prompts: Tensor, answers: Tensor) -> Tensor:
    """[B, length]: which digits are correct, those of the prompt backwards."""
    return answers == prompts[:, :-1].flip(1)


# Rollouts, and the forward of training


@torch.no_grad()
def decode(
    policy: Policy, ops: Ops, prompts: Tensor, length: int, pick: Callable[[Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """(token ids, log-probabilities) of answers [B, length], one token at a time from a cache.
    `pick(logits, t)` chooses token t."""
    cache: list[KV] = []
    head, new = policy.head.bfloat16(), prompts
    token_ids, logps = [], []
    for t in range(length):
        hidden = policy(new, ops, cache)[:, -1:]
        new = pick(ops.logits(hidden, head)[:, 0], t)
        token_ids.append(new)
        logps.append(ops.logp(hidden, head, new))
    return torch.cat(token_ids, 1), torch.cat(logps, 1)


def answer_states(policy: Policy, ops: Ops, prompts: Tensor, answers: Tensor) -> Tensor:
    """Hidden states that predict the answers, all tokens at once."""
    return policy(torch.cat([prompts, answers[:, :-1]], 1), ops)[:, prompts.shape[1] - 1 :]


def training_logp(policy: Policy, ops: Ops, prompts: Tensor, answers: Tensor) -> Tensor:
    """The log-probabilities that `policy_loss` computes."""
    logp = isobit.linear_logp if ops is TORCH else ops.logp
    return logp(answer_states(policy, ops, prompts, answers), policy.head.bfloat16(), answers)


def policy_loss(
    policy: Policy, ops: Ops, prompts: Tensor, answers: Tensor, inputs: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, statistics summed over tokens)."""
    hidden, head = answer_states(policy, ops, prompts, answers), policy.head.bfloat16()
    if ops is ISOBIT and not hidden.is_cuda:  # the fused loss has no fixed order on a CPU
        logp, entropy = isobit.logp(ops.logits(hidden, head), answers, return_entropy=True)
        return losses.dapo(logp, entropy, **inputs)
    return isobit.linear_policy_loss(hidden, head, answers, loss_fn=losses.dapo, inputs=inputs, entropy=True)


@torch.no_grad()
def drift(
    policy: Policy, ops: Ops, prompts: Tensor, answers: Tensor, old_logp: Tensor | None = None
) -> dict[str, float]:
    """The difference between log-probabilities of decoding and of training. `old_logp` was recorded when the
    answers were sampled; without it they are decoded again."""
    if old_logp is None:
        _, old_logp = decode(policy, ops, prompts, answers.shape[1], lambda logits, t: answers[:, t : t + 1])
    difference = (training_logp(policy, ops, prompts, answers) - old_logp).abs()
    return {"max": difference.max().item(), "mean": difference.mean().item()}


# Training


def train(policy: Policy, ops: Ops, config: Config) -> Iterator[dict[str, Any]]:
    """Train the policy in place, and yield what each step measured."""
    gen = torch.Generator(policy.head.device).manual_seed(config.seed)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def sample(logits: Tensor, t: int) -> Tensor:
        return torch.multinomial(logits.softmax(-1), 1, generator=gen)

    for step in range(config.steps):
        prompts = make_prompts(config.prompts, config.length, gen).repeat_interleave(config.samples, 0)
        answers, old_logp = decode(policy, ops, prompts, config.length, sample)
        right = is_right(prompts, answers)
        rewards = right.float().mean(1)
        advantages = isobit.group_advantages(rewards, samples_per_prompt=config.samples)
        with torch.no_grad():
            ref_logp = training_logp(reference, TORCH, prompts, answers)

        drifts = {ops.name: drift(policy, ops, prompts, answers, old_logp)}
        if step % config.probe_every == 0:
            other = ISOBIT if ops is TORCH else TORCH
            some = slice(0, None, max(1, len(prompts) // config.probe_answers))
            drifts[other.name] = drift(policy, other, prompts[some], answers[some])

        sums: dict[str, float] = {}
        for _ in range(config.epochs):
            order = torch.randperm(len(prompts), generator=gen, device=gen.device)
            for rows in order.chunk(config.minibatches):
                inputs = {
                    "old_logp": old_logp[rows], "ref_logp": ref_logp[rows], "advantages": advantages[rows],
                    "normalizer": answers[rows].numel(), "beta": config.beta,
                    "entropy_coef": config.entropy_coef,
                }  # fmt: skip
                loss, stats = policy_loss(policy, ops, prompts[rows], answers[rows], inputs)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                for name, x in stats.items():
                    sums[name] = sums.get(name, 0.0) + x.item()
        yield {
            "step": step,
            "reward": rewards.mean().item(),
            "solved": right.all(1).float().mean().item(),
            "kl": sums["kl"] / sums["tokens"],
            "clipped": (sums["clip_low"] + sums["clip_high"]) / sums["tokens"],
            "entropy": sums["entropy"] / sums["tokens"],
            "drift": drifts,
        }


def new_policy(config: Config, device: torch.device) -> Policy:
    """Random weights, the same on every device."""
    gen = torch.Generator().manual_seed(config.seed)
    return Policy(VOCAB, 2 * config.length, config.layers, gen).to(device)


def exam(policy: Policy, ops: Ops, config: Config) -> float:
    """The fraction of new strings that are reversed without a mistake, with the likeliest token each time."""
    gen = torch.Generator(policy.head.device).manual_seed(config.seed + 1)
    prompts = make_prompts(config.exam_strings, config.length, gen)
    answers, _ = decode(policy, ops, prompts, config.length, lambda z, t: z.argmax(-1, keepdim=True))
    return is_right(prompts, answers).all(1).float().mean().item()
