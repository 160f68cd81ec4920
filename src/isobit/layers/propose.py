"""A proposal: which layers of a model should be of class tree8."""

from collections.abc import Sequence

from torch import nn

from isobit.layers.classes import layers_of_adapters, plain_name
from isobit.numerics import CHAIN16, TREE8

#: Layers that engines merge, by the last part of their names: siblings with one input.
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("wq", "wk", "wv"), ("w1", "w3"))

#: Where tree8 is faster: a k of this length, and of this many times the columns, and at most so many columns.
#: With a short k one chain is over soon; with many columns its tiles keep all SMs busy. The models of both
#: classes' times, fitted on an H200, say otherwise for 9 of 440 sizes (K 512 to 28672, N 128 to 151936), by
#: at most 3 %, in geometric mean at 8, 40, 72 and 144 rows.
LEAST_K, LEAST_K_PER_COLUMN, MOST_COLUMNS = 3072, 4, 3072

#: TMA reads leaves that begin at multiples of 16 bytes: of 8 elements, and there are 8 leaves; of K, and in
#: the backward of the N of each layer.
_MULTIPLE = 64


def proposed_class(K: int, N: int) -> str:
    """Of layers that are computed as one product."""
    long = K >= LEAST_K and K >= LEAST_K_PER_COLUMN * N
    return str(TREE8 if long and N <= MOST_COLUMNS else CHAIN16)


def propose_classes(model: nn.Module, *, merged: Sequence[Sequence[str]] = MERGED) -> dict[str, str]:
    """A map {layer: numerics class} for `swap_linear` and `zero_drift`, from the sizes of a model's layers.

    Class tree8 sums k in eight parts that run side by side. That is faster where k is long and the output has
    few columns, and a call few rows, as in decoding; elsewhere chain16 is. A layer is proposed for tree8 if
    its K is at least 3072 and at least 4 times its N, and N at most 3072. N counts all layers that engines
    merge with it, which get the same class. K and the N of each layer must be multiples of 64. These limits
    are those of an H200.

    The map is a proposal: any other is as good for the bits, as long as everyone who computes the model has
    the same one. Save it with the model.

    Args:
        model: any module. Layers that adapters of PEFT have added are left out.
        merged: the last parts of the names of layers that engines merge, if they are in one module.

    Returns:
        The class of every linear layer, by name.

    Example:
        >>> import torch, isobit
        >>> mlp = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(896, 4864, device="meta")})
        >>> mlp["down_proj"] = torch.nn.Linear(4864, 896, device="meta")
        >>> isobit.nn.propose_classes(mlp)
        {'up_proj': 'chain16', 'down_proj': 'tree8'}
    """
    added = layers_of_adapters(model)
    layers = {
        plain_name(name): layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name not in added
    }
    classes: dict[str, str] = {}
    for name, layer in layers.items():
        together = [each for each in _merged_with(name, merged) if each in layers]
        K, sizes = layer.in_features, [layers[each].out_features for each in together]
        if any(layers[each].in_features != K for each in together):  # of other inputs: not merged
            sizes = [layer.out_features]
        fits = not any(size % _MULTIPLE for size in (K, *sizes))
        classes[name] = proposed_class(K, sum(sizes)) if fits else str(CHAIN16)
    return classes


def _merged_with(name: str, merged: Sequence[Sequence[str]]) -> list[str]:
    """The names of layers that would be merged with this one, itself among them."""
    parent, dot, last = name.rpartition(".")
    siblings = next((group for group in merged if last in group), (last,))
    return [f"{parent}{dot}{each}" for each in siblings]
