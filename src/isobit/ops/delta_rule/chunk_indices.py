"""The chunks of packed sequences, [NT, 2]: the sequence of each chunk and its number there.

Their number is known on the device only, so computing them waits for it. All layers of a model pass the same
bounds, so the indices of a tensor of bounds are kept until it is freed or changed: by identity, and by the
version that PyTorch counts up whenever it writes into a tensor.

No kernel reads the indices: their number is the size of a result. So a call in another stream need not wait
for them, and a call that is captured into a CUDA graph finds those of the call before. Only validation reads
them, and computes them anew.
"""

from collections import OrderedDict
from threading import RLock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from isobit.frame.watched import is_watched

#: Indices that are kept, those used last. A training step has a few micro-batches.
MOST_KEPT = 16


class Kept(NamedTuple):
    """Indices, and what they were computed from."""

    bounds: "ref[Tensor]"
    state: tuple[Any, ...]
    indices: Tensor


#: By the id of the bounds and the size of chunks.
_kept: OrderedDict[tuple[int, int], Kept] = OrderedDict()

#: Held by whoever changes what is kept. Without it four threads raised a KeyError within an OrderedDict, in
#: one of a hundred runs of `test_threads`. A thread may have it twice, if bounds are freed meanwhile.
_changing = RLock()


def chunk_indices(cu_seqlens: Tensor, chunk_size: int, anew: bool = False) -> Tensor:
    """The indices of these bounds: those that are kept, unless they are to be computed anew."""
    if anew or not keeps(cu_seqlens):
        return computed(cu_seqlens, chunk_size)
    key, state = (id(cu_seqlens), chunk_size), _state(cu_seqlens)
    known = _kept.get(key)
    # An id says little: that of a tensor that was freed is given to another one.
    if known is not None and known.bounds() is cu_seqlens and known.state == state:
        with _changing:
            if key in _kept:  # another thread may have dropped it since
                _kept.move_to_end(key)
        return known.indices
    indices = computed(cu_seqlens, chunk_size)
    if not indices.is_inference():
        made = Kept(ref(cu_seqlens, lambda freed: _forget(key, freed)), state, indices)
        with _changing:
            _kept[key] = made
            if len(_kept) > MOST_KEPT:
                _kept.popitem(last=False)
    return indices


def computed(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    each = (cu_seqlens.diff().clamp(min=0) + chunk_size - 1) // chunk_size
    ends, sequence = each.cumsum(0), torch.arange(len(each), device=each.device)
    sequence = sequence.repeat_interleave(each)
    at = torch.arange(len(sequence), device=each.device) - (ends - each)[sequence]
    return torch.stack((sequence, at), 1)


def keeps(cu_seqlens: Tensor) -> bool:
    """Whether indices of these bounds may be kept. On a CPU they cost nothing, and numpy may write into the
    same memory, which PyTorch does not count. A subclass, or a tensor that a trace, a transform or a mode
    sees, may have no values; and a tensor of inference mode has no version."""
    return not (
        on_cpu(cu_seqlens)
        or torch.compiler.is_compiling()
        or type(cu_seqlens) is not Tensor
        or is_watched()
        or cu_seqlens.is_inference()
    )


def on_cpu(t: Tensor) -> bool:
    return t.device.type == "cpu"


def _state(t: Tensor) -> tuple[Any, ...]:
    """What changes if the tensor gets other values: its version, or, by `t.data = ...`, its memory."""
    return t._version, t.data_ptr(), t.shape, t.stride(), t.dtype


def _forget(key: tuple[int, int], freed: "ref[Tensor]") -> None:
    with _changing:
        known = _kept.get(key)
        if known is not None and known.bounds is freed:  # and not of a new tensor with the same id
            _kept.pop(key, None)
