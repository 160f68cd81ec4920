"""Rotary embeddings of a model in vLLM, by `isobit.rope`.

vLLM's kernel rounds once. transformers rounds cos and sin, the two products and their sum, and so does
`isobit.rope`. Its cos and sin are looked up in a table of all positions. Inverse frequencies come from
transformers, computed on the CPU: `pow` of a GPU has other bits.

vLLM keeps its rotary modules in a dictionary, for all models of a process. So a module is not changed: each
layer gets a copy of it. One look-up serves all layers of a forward: the first layer does it.
"""

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from isobit.ops.rope import rope

#: The buffer that holds the table. vLLM saves buffers before it drops the memory of a model (sleep level 2).
BUFFER = "isobit_rotary_table"


def inverse_frequencies(rotary: Any) -> Tensor:
    """[rotary_dim / 2] in fp32, on the CPU: those of transformers for a rotary module of vLLM."""
    parameters = {"rope_type": "default", "rope_theta": rotary.base}
    if hasattr(rotary, "low_freq_factor"):  # Llama 3.1
        parameters |= {
            "rope_type": "llama3", "factor": rotary.scaling_factor,
            "low_freq_factor": rotary.low_freq_factor, "high_freq_factor": rotary.high_freq_factor,
            "original_max_position_embeddings": rotary.orig_max_position,
        }  # fmt: skip
    config = import_module("transformers").LlamaConfig(
        head_dim=rotary.rotary_dim, max_position_embeddings=rotary.max_position_embeddings,
        rope_parameters=parameters,
    )  # fmt: skip
    llama = import_module("transformers.models.llama.modeling_llama")
    with torch.device("cpu"):
        inverse: Tensor = llama.LlamaRotaryEmbedding(config).inv_freq
    return inverse


def table(inverse: Tensor, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[positions, 2 R]: cos, then sin, of every position, computed in fp32 and rounded to a dtype."""
    steps = torch.arange(positions, device=device).float()
    angles = steps[:, None] * inverse.to(device)[None]
    angles = torch.cat((angles, angles), dim=-1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class LookUp:
    """cos and sin for the positions of a forward."""

    def __init__(self, rotary: Any) -> None:
        self.size = rotary.rotary_dim
        theirs = rotary.cos_sin_cache
        inverse = inverse_frequencies(rotary)
        self.table = table(inverse, rotary.max_position_embeddings, theirs.dtype, theirs.device)
        self.positions: Tensor | None = None
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """The first layer always looks up: vLLM writes the positions of the next forward to the same memory.
        A compiler sees identical look-ups itself, and must see no state."""
        if torch.compiler.is_compiling():
            return self._read(positions)
        if first or self.last is None or positions is not self.positions:
            self.positions, self.last = positions, self._read(positions)
        return self.last

    def _read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table.index_select(0, positions.flatten())
        return rows[:, : self.size], rows[:, self.size :]


def separate(model: nn.Module, served: Callable[[nn.Module], bool]) -> None:
    """Give every layer its own copy of the rotary module that it uses, if that one is served."""
    shared: dict[nn.Module, LookUp] = {}
    for owner in list(model.modules()):
        for name, rotary in owner.named_children():
            if served(rotary):
                first = rotary not in shared
                if first:
                    shared[rotary] = LookUp(rotary)
                setattr(owner, name, _copied(rotary, shared[rotary], first))


def _copied(rotary: Any, look_up: LookUp, first: bool) -> Any:
    own = copy.copy(rotary)
    own._buffers, own._non_persistent_buffers_set = (
        dict(rotary._buffers),
        set(rotary._non_persistent_buffers_set),
    )
    own.register_buffer(BUFFER, look_up.table, persistent=False)
    own.look_up, own.first = look_up, first
    return own


def serve(rotary: Any, count: Callable[[str], None]) -> None:
    """Of a copy that `separate` has made."""
    look_up, first, size = rotary.look_up, rotary.first, rotary.head_size

    def forward(positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        count("isobit.rope")
        cos, sin = look_up(positions, first)
        q = query.view(len(cos), -1, size)
        k = q[:, :0] if key is None else key.view(len(cos), -1, size)
        q, k = rope(q, k, cos, sin)
        return q.view(query.shape), None if key is None else k.view(key.shape)

    rotary.forward = forward
