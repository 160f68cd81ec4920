"""Rotary embeddings of a model in vLLM, by `isobit.rope`.

vLLM's kernel rounds cos and sin, and then once. transformers rounds cos and sin, the two products and their
sum. `isobit.rope` has both. Its cos and sin are looked up in a table of all positions. Inverse frequencies
come from transformers, computed on the CPU, whatever the rounding: `pow` of a GPU has other bits.

vLLM keeps its rotary modules in a dictionary, for all models of a process. So a module is not changed: each
layer gets a copy of it. One look-up serves all layers of a forward: the first layer does it.
"""

import copy
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from isobit.integrations.rounding import Rounding
from isobit.ops.rope import rope

NARROW = (torch.bfloat16, torch.float16)

#: Models that vLLM computes with YaRN whatever their config says.
ALWAYS_YARN = ("gpt_oss",)

#: Parameters of YaRN that transformers reads and vLLM does not.
UNREAD = ("attention_factor", "mscale", "mscale_all_dim")

#: The buffer that holds the table. vLLM saves buffers before it drops the memory of a model (sleep level 2).
BUFFER = "isobit_rotary_table"


def unlike_the_config(config: Any) -> Iterator[str]:
    """Where vLLM rotates otherwise than transformers does by this config of a model, or None."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if getattr(config, "model_type", "") in ALWAYS_YARN and parameters and kind != "yarn":
        yield f"the model has rope_type={kind!r}, and vLLM computes it with 'yarn'"
    for name in UNREAD if kind == "yarn" else ():
        if parameters.get(name) is not None:
            yield f"the model has {name}={parameters[name]} in rope_parameters, which vLLM does not read"


def why_not(rotary: Any) -> str | None:
    """Why a rotary module of vLLM cannot be served, or None."""
    if not rotary.is_neox_style:
        return "it pairs neighbours, and not halves of a head"
    try:
        return _why_not_yarn(rotary) if _is_yarn(rotary) else None
    except AttributeError as error:
        return f"it is not the YaRN of vLLM 0.26: {error}"


def _why_not_yarn(rotary: Any) -> str | None:
    extrapolation = getattr(rotary, "extrapolation_factor", 1)  # newer versions have none
    if extrapolation != 1:
        return f"its extrapolation_factor is {extrapolation}, which transformers does not have"
    if abs(rotary.mscale - (factor := frequencies(rotary)[1])) > 1e-6:
        return f"its cos and sin are multiplied by {rotary.mscale}, and in transformers by {factor}"
    return None


def _is_yarn(rotary: Any) -> bool:
    return hasattr(rotary, "beta_fast")


def frequencies(rotary: Any) -> tuple[Tensor, float]:
    """Inverse frequencies, [rotary_dim / 2] in fp32, on the CPU, and a factor on cos and sin: those of
    transformers for a rotary module of vLLM."""
    parameters = {"rope_type": "default", "rope_theta": rotary.base}
    if hasattr(rotary, "low_freq_factor"):  # Llama 3.1
        parameters |= {
            "rope_type": "llama3", "factor": rotary.scaling_factor,
            "low_freq_factor": rotary.low_freq_factor, "high_freq_factor": rotary.high_freq_factor,
            "original_max_position_embeddings": rotary.orig_max_position,
        }  # fmt: skip
    elif _is_yarn(rotary):
        parameters |= {
            "rope_type": "yarn", "factor": rotary.scaling_factor, "beta_fast": rotary.beta_fast,
            "beta_slow": rotary.beta_slow, "truncate": rotary.truncate,
            "original_max_position_embeddings": rotary.max_position_embeddings,
        }  # fmt: skip
    config = import_module("transformers").LlamaConfig(
        head_dim=rotary.rotary_dim, max_position_embeddings=len(rotary.cos_sin_cache),
        rope_parameters=parameters,
    )  # fmt: skip
    llama = import_module("transformers.models.llama.modeling_llama")
    with torch.device("cpu"):
        made = llama.LlamaRotaryEmbedding(config)
    return made.inv_freq, float(made.attention_scaling)


def table(inverse: Tensor, factor: float, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[positions, 2 R]: cos, then sin, of every position, times a factor, computed in fp32 and rounded to a
    dtype."""
    steps = torch.arange(positions, device=device).float()
    angles = steps[:, None] * inverse.to(device)[None]
    angles = torch.cat((angles, angles), dim=-1)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(dtype)


class LookUp:
    """cos and sin for the positions of a forward."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        self.size = rotary.rotary_dim
        theirs = rotary.cos_sin_cache  # of all positions; in fp32 in GPT-OSS, where transformers rounds it
        self.table = table(*frequencies(rotary), len(theirs), dtype, theirs.device)
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
    dtype = next((p.dtype for p in model.parameters() if p.dtype in NARROW), torch.bfloat16)
    for owner in list(model.modules()):
        for name, rotary in owner.named_children():
            if served(rotary):
                first = rotary not in shared
                if first:
                    shared[rotary] = LookUp(rotary, dtype)
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


def serve(rotary: Any, count: Callable[[str], None], rounding: Rounding) -> None:
    """Of a copy that `separate` has made."""
    look_up, first, size = rotary.look_up, rotary.first, rotary.head_size

    def forward(positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        count("isobit.rope")
        cos, sin = look_up(positions, first)
        q = query.view(len(cos), -1, size)
        k = q[:, :0] if key is None else key.view(len(cos), -1, size)
        q, k = rope(q, k, cos, sin, rounding=rounding)
        return q.view(query.shape), None if key is None else k.view(key.shape)

    rotary.forward = forward
