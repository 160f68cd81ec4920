"""isobit inside TRL.

enable, disable    log-probabilities and entropies of tokens by `isobit.linear_logp`
zero_drift         a GRPO trainer whose rollouts and training have the same bits
"""

from isobit.integrations.trl.logps import INSTALL, OUTPUTS, SWITCH, TRLError, disable, enable, install_hint
from isobit.integrations.trl.rollouts import ZeroDriftTrainer, zero_drift

__all__ = [
    "INSTALL",
    "OUTPUTS",
    "SWITCH",
    "TRLError",
    "ZeroDriftTrainer",
    "disable",
    "enable",
    "install_hint",
    "zero_drift",
]
