"""isobit inside Hugging Face's transformers.

token_logps           log-probabilities of a causal LM, without its logits
register_attention    `attn_implementation="isobit"`
register_experts      `experts_implementation="isobit"`
zero_drift            a whole model whose bits do not depend on the batch
"""

from isobit.integrations.hf.attention import register_attention
from isobit.integrations.hf.drift import ZeroDrift, zero_drift
from isobit.integrations.hf.errors import HFError
from isobit.integrations.hf.experts import register_experts
from isobit.integrations.hf.logps import token_logps

__all__ = ["HFError", "ZeroDrift", "register_attention", "register_experts", "token_logps", "zero_drift"]
