"""GRPO from scratch on a CPU: what `isobit demo` runs. A tiny transformer learns to write digits backwards.

The script to read and copy is `src/isobit/demo/grpo.py`: the task, rollouts from a KV cache, the loss and the
training loop. `policy.py` next to it has the transformer. They are in the package so that an installed isobit
has them too.

    python examples/grpo_demo.py
"""

import warnings

import torch

from isobit.demo.grpo import Config, exam, new_policy, train
from isobit.demo.policy import TORCH


def main(steps: int = 80) -> float:
    warnings.filterwarnings(
        "ignore", message="isobit: det_gemm"
    )  # slow on a CPU: a few answers a step are not
    config = Config(steps=steps)
    policy = new_policy(config, torch.device("cpu"))
    for record in train(policy, TORCH, config):
        if record["step"] % 10 == 0:
            print(f"step {record['step']:2d}: reward {record['reward']:.2f}, KL {record['kl']:.2f}")
    solved = exam(policy, TORCH, config)
    print(f"{100 * solved:.1f} % of new strings are reversed without a mistake")
    return solved


if __name__ == "__main__":
    main()
