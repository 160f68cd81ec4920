"""Numerics classes of an engine's linear layers, from the map of a trainer.

The map has the names of layers in transformers. vLLM has q, k and v in one layer, and gate and up: these must
be of one class, because a product has one order of sums. GPT-OSS calls its attention otherwise, and a tied
LM head is the embedding.

The LM head of a trainer's model has a class too. It is used with logprobs="log_softmax". `linear_logp` has a
class of its own, lse/1, in the trainer as here.
"""

from collections.abc import Sequence
from typing import Any

from isobit.frame.contract import ContractError
from isobit.integrations.vllm import experts
from isobit.integrations.vllm import versions as v
from isobit.integrations.vllm.versions import refusal
from isobit.layers.classes import check_k, check_keys, class_given, merged_class

#: What vLLM merges, by the last part of the name of the merged layer.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

#: GPT-OSS: a part of a name in vLLM, and in transformers.
ATTENTION = (".attn.", ".self_attn.")

HEAD = "lm_head"


def of_model(
    given: dict[str, str], found: Sequence[tuple[str, Any]], left: Sequence[tuple[str, Any]] = ()
) -> dict[str, str]:
    """The classes that were given for these linear layers and blocks of experts, by their names in vLLM. An
    error if a key is of no layer, not even of one that is `left` to vLLM, or if merged layers are of
    different classes."""
    if not given:
        return {}
    layers = dict[str, Any]()
    for name, module in found:
        parts = experts.linear_layers(module) if experts.block_of(module) else {"": module}
        layers |= {_joined(name, part): layer for part, layer in parts.items()}
    names = {name: _in_transformers(name, layer) for name, layer in layers.items()}
    known = [*names.values(), *(_in_transformers(name, layer) for name, layer in left)]
    try:
        check_keys("enable", given, dict.fromkeys(each for several in known for each in several))
        made = dict[str, str]()
        for name, several in names.items():
            merged_class(given, several)
            own = class_given(given, several[0])
            check_k("enable(numerics)", own, layers[name].weight.shape[1], name)
            if own is not None:
                made[name] = own
    except ContractError as error:
        raise refusal(f"the map of numerics classes does not fit the model: {error}") from None
    return made


def of_part(classes: dict[str, str], owner: str, part: str) -> str | None:
    """Of a layer that is a part of a module, or with "" the module; None is the default."""
    return classes.get(_joined(owner, part))


def _joined(owner: str, part: str) -> str:
    return f"{owner}.{part}" if part else owner


def _in_transformers(name: str, layer: Any) -> list[str]:
    if isinstance(layer, v.find(v.EMBEDDING, "VocabParallelEmbedding")):
        return [HEAD]
    above, dot, last = name.rpartition(".")
    return [f"{above}{dot}{each}".replace(*ATTENTION) for each in MERGED.get(last, (last,))]
