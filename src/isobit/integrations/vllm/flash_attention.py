"""The attention backend for GPUs. vLLM imports this module by the name in its registry.

Keys are stored by vLLM's own kernel, which copies them.
"""

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from isobit.integrations.vllm.attention import Served
from isobit.integrations.vllm.groups import groups_of

#: Keys of a page, unless the user says how many. The decoding kernel for Hopper reads multiples of 64.
PAGE = 64


class Impl(Served, FlashAttentionImpl):
    """vLLM's own class, with another forward."""


class Builder(FlashAttentionMetadataBuilder):
    #: Graphs are captured of batches that only decode. Other batches run without a graph.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.aot_schedule = False  # a schedule for vLLM's own kernels, made on the GPU at every step

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Also the groups of requests, once for all layers."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made.groups = groups_of(common_attn_metadata)
        return made


class Backend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PAGE)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
