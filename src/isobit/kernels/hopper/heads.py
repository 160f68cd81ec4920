"""TMA boxes of tensors [B, T, H, D]: some rows of one head, read in place.

TMA sees such a tensor as [B, H, T, D] with any strides, and fills with zeros outside T or D. So D is padded
to a power of two in shared memory.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.frame.cache_key import CacheKey, remember
from isobit.kernels.hopper.pipeline import TensorDescriptor, gl, gluon, reinterpreted, tma_load

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def load_box(desc, batch, head, row, buffer, ready):
    """Start the TMA load of one box."""
    box = reinterpreted(buffer, desc.dtype, desc.block_type.shape, desc.layout)
    tma_load(desc, [batch, head, row, 0], ready, box)


# Host side


@lru_cache(maxsize=64)
def tile_layout(D: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of boxes in shared memory, as tensor cores read them. D is padded."""
    return gl.NVMMASharedLayout.get_default_for([64, D], DTYPES[dtype])


@lru_cache(maxsize=64)
def _box_layout(rows: int, D: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, D], DTYPES[dtype])


def why_not_tma(name: str, t: Tensor) -> str | None:
    """Why TMA cannot read [B, T, H, D] in place, or None. A dimension of 1 has any stride."""
    each = 16 // t.element_size()
    if t.device.type != "meta" and t.data_ptr() % 16:
        return f"{name} begins at an address that is not a multiple of 16 bytes, which TMA needs"
    for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % each):
            return f"TMA reads rows that are multiples of 16 bytes apart; strides of {name} are not"
    return None


#: The fields of descriptors, except for their tensor.
_descriptors: dict[CacheKey, dict[str, Any]] = {}


def descriptor(t: Tensor, rows: int, D: int) -> TensorDescriptor:
    """The TMA descriptor for reading [B, T, H, D] in boxes of some rows of one head, D padded."""
    key = (t.shape, t.stride(), t.dtype, rows, D)
    known = _descriptors.get(key)
    if known is None:
        known = _form(t, rows, D)
        remember(_descriptors, key, known)
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(known, base=t)
    return made


def _form(t: Tensor, rows: int, D: int) -> dict[str, Any]:
    """What descriptors of such a tensor have in common, with a place for tensor maps (see `entry.Entry`)."""
    B, T, H, width = t.shape
    b, r, h, _ = t.stride()
    unused = -(-width // 8) * 8  # the stride of a dimension of 1: any that TMA accepts
    strides = [b if B > 1 else unused, h if H > 1 else unused, r if T > 1 else unused, 1]
    made = TensorDescriptor(t, [B, H, T, width], strides, [1, 1, rows, D], _box_layout(rows, D, t.dtype))
    return vars(made) | {"base": None, "maps": []}
