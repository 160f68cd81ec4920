"""The attention backend for CPUs. vLLM imports this module by the name in its registry.

Keys are stored by torch: the kernels of vLLM for CPUs pack them, and use instructions that not every CPU has.
"""

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from isobit.integrations.vllm.attention import Served, split
from isobit.integrations.vllm.groups import groups_of


class Impl(Served, CPUAttentionBackendImpl):
    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Called by vLLM: the new tokens' places in the cache; places below 0 are padding."""
        keys, values = split(kv_cache, self.head_size)
        used = slot_mapping >= 0
        slots = slot_mapping[used]
        page, place = slots // keys.shape[1], slots % keys.shape[1]
        keys[page, place] = key[: len(used)][used]
        values[page, place] = value[: len(used)][used]


class Builder(CPUAttentionMetadataBuilder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Without the schedule for vLLM's own kernels, and with the groups of requests."""
        given = common_attn_metadata
        made = CPUAttentionMetadata(
            num_actual_tokens=given.num_actual_tokens,
            max_query_len=given.max_query_len,
            query_start_loc=given.query_start_loc,
            max_seq_len=given.max_seq_len,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            scheduler_metadata=None,
            causal=given.causal,
        )
        made.groups = groups_of(given)
        return made


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
