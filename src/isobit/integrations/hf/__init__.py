"""isobit inside of Hugging Face's transformers.

    token_logps           log-probabilities of a causal LM, without its logits
    register_attention    `attn_implementation="isobit"`
"""

from isobit.integrations.hf.attention import register_attention
from isobit.integrations.hf.errors import HFError
from isobit.integrations.hf.logps import token_logps

__all__ = ["HFError", "register_attention", "token_logps"]
