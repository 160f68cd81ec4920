"""Estimates of KL(policy || reference) at a token that the policy sampled, from two log-probabilities.

With d = ref_logp - logp, the logarithm of reference over policy:

    k1 = -d                 unbiased; negative at many tokens; its gradient has mean zero, so it is of no use
                            as a loss on samples of the current policy
    k2 = d^2 / 2            biased, never negative; its gradient is an unbiased one of the KL
    k3 = exp(d) - 1 - d     unbiased, never negative, little variance; what GRPO uses

J. Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Estimator: TypeAlias = Literal["k1", "k2", "k3"]


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp - ref_logp. "kl" and "k1" in verl.

    Args:
        logp: log-probabilities of the tokens under the policy, any shape.
        ref_logp: under the reference, of that shape.

    Returns:
        One estimate per token, differentiable.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> losses.k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])
    """
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(ref_logp - logp)^2 / 2. "mse" and "k2" in verl.

    Args:
        logp: log-probabilities of the tokens under the policy, any shape.
        ref_logp: under the reference, of that shape.

    Returns:
        One estimate per token, differentiable.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> losses.k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])
    """
    return 0.5 * (ref_logp - logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = ref_logp - logp, computed as expm1(d) - d, which stays accurate near d = 0.

    TRL adds this with `beta`. It is "low_var_kl" and "k3" in verl, which clamps d to +-20 and the estimate to
    10; nothing is clamped here.

    Args:
        logp: log-probabilities of the tokens under the policy, any shape.
        ref_logp: under the reference, of that shape.

    Returns:
        One estimate per token, differentiable: the gradient with respect to logp is -expm1(d).

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> losses.k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1065, 0.7183])
    """
    d = ref_logp - logp
    return torch.expm1(d) - d


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
