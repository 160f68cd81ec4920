"""Layers: `DetLinear`, an `nn.Linear` whose bits do not depend on the batch.

`swap_linear` replaces linear layers of a model with it, and can undo that. `zero_drift` replaces all that
decides the bits of a model of transformers. `propose_classes` proposes a numerics class for each layer, and
`merged_class` says which one layers have that are merged. `in_forward` runs a function while the parameters
of a module that FSDP2 has sharded are gathered.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from isobit.layers.classes import Classes, merged_class
from isobit.layers.experts import DetExperts
from isobit.layers.fsdp import class_of, in_forward
from isobit.layers.linear import DetLinear, Swap, swap_linear
from isobit.layers.propose import propose_classes

if TYPE_CHECKING:
    from isobit.integrations.hf import ZeroDrift

__all__ = [
    "DetExperts", "DetLinear", "Swap", "class_of", "in_forward", "merged_class", "propose_classes",
    "swap_linear", "zero_drift",
]  # fmt: skip


def zero_drift(
    model: nn.Module,
    *,
    numerics: Classes = None,
    rounding: Literal["hf", "vllm"] | None = None,
    tp: Any = None,
    batch: int | Sequence[int] = 1,
    lengths: int | Sequence[int] = (),
    train: bool = False,
) -> "ZeroDrift":
    """`isobit.integrations.hf.zero_drift` under a shorter name: a causal LM of transformers gives every token
    the same bits in training, prefill and decoding, alone or in any batch. It needs transformers. `numerics`
    is the numerics class of its linear layers, or a map {name: class}. With `rounding="vllm"` it rounds where
    vLLM's kernels do. The ranks of a mesh `tp` share its layers, with the bits of one. With `lengths` kernels
    are compiled in parallel beforehand (`isobit.warmup`).

    Example:
        >>> import torch, transformers, isobit
        >>> sizes = dict(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
        >>> model = transformers.LlamaForCausalLM(config).bfloat16()
        >>> ids = torch.tensor([[7, 3, 11, 2], [5, 5, 8, 1]])
        >>> with isobit.nn.zero_drift(model):
        ...     torch.equal(model(ids).logits[1], model(ids[1:]).logits[0])
        True
    """
    from isobit.integrations import hf

    return hf.zero_drift(
        model, numerics=numerics, rounding=rounding, tp=tp, batch=batch, lengths=lengths, train=train
    )
