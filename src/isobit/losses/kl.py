"""Estimates of KL(policy || reference) at a token that the policy sampled, from two log-probabilities.

With d = ref_logp - logp, the logarithm of reference over policy:

    k1 = -d                 unbiased; negative at many tokens; its gradient has mean zero, so it is of no use
                            as a loss on samples of the current policy
    k2 = d^2 / 2            biased, never negative; its gradient is an unbiased one of the KL
    k3 = exp(d) - 1 - d     unbiased, never negative, little variance; what GRPO uses

A token to which only the policy gives the probability 0 has a k3 of inf; if both do, d is 0.

J. Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from isobit.frame.contract import ContractError, describe
from isobit.kernels.host.difference import difference

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
    return _difference("k1", logp, ref_logp)


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
    return 0.5 * _difference("k2", logp, ref_logp).square()


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
    d = -_difference("k3", logp, ref_logp)
    # A d of +inf, of a token to which the policy gives probability 0: inf - inf must be inf here.
    return torch.expm1(d) - torch.where(d == torch.inf, 0.0, d)


def _difference(estimator: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp - ref_logp."""
    for name, value in (("logp", logp), ("ref_logp", ref_logp)):
        if not isinstance(value, Tensor):
            raise ContractError(f"{estimator}({name}: {describe(value)}): must be a tensor")
    if ref_logp.device != logp.device:
        rule = f"is on {ref_logp.device} but logp is on {logp.device}"
        raise ContractError(f"{estimator}(ref_logp: {describe(ref_logp)}): {rule}")
    return difference(logp, ref_logp)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
