"""The attention backend for GPUs. vLLM imports this module by the name in its registry.

Keys are stored by vLLM's own kernel, which copies them.
"""

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from isobit.integrations.vllm.attention import Served


class Impl(Served, FlashAttentionImpl):
    """vLLM's own class, with another forward."""


class Backend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
