"""What TMA reads and writes, seen from the host: matrices in the memory of tensors, and their descriptors.

Each layout is made once: Triton uses layouts as keys of compiled kernels, and finds one by identity much
faster.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.frame.cache_key import CacheKey
from isobit.frame.traced import recalled
from isobit.kernels.hopper.pipeline import TensorDescriptor, gl

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@cache
def _shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _GLUON_TYPES[dtype])


class Matrix(NamedTuple):
    """Rows x columns in the memory of a tensor, from its first element on. Launchers need several of these
    per call, and a view of a tensor takes microseconds to make."""

    base: Tensor
    rows: int
    columns: int
    row_stride: int  # elements from a row to the next
    column_stride: int

    def transposed(self) -> "Matrix":
        return Matrix(self.base, self.columns, self.rows, self.column_stride, self.row_stride)

    def is_row_major(self) -> bool:
        """Whether rows are contiguous and begin at multiples of 16 bytes (a single row may begin
        anywhere)."""
        return (self.columns == 1 or self.column_stride == 1) and (self.rows == 1 or self.rows_aligned())

    def rows_aligned(self) -> bool:
        return self.row_stride > 0 and self.row_stride * self.base.element_size() % 16 == 0


def matrix(t: Tensor) -> Matrix:
    """The matrix in the last two dimensions of a tensor; the first one if there are several."""
    *_, rows, columns = t.shape
    *_, row_stride, column_stride = t.stride()
    return Matrix(t, rows, columns, row_stride, column_stride)


def aligned_for_tma(m: Matrix) -> bool:
    """Whether TMA can read this matrix in place, row-major or column-major."""
    return m.base.data_ptr() % 16 == 0 and (m.is_row_major() or m.transposed().is_row_major())


#: Fields of descriptors other than the tensor, by matrix form and box.
_descriptors: dict[CacheKey, dict[str, Any]] = {}


def descriptor(m: Matrix, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor for rows x columns boxes of a row-major matrix."""
    base, size, width, stride, _ = m
    key = (size, width, stride, base.dtype, rows, columns)
    known = recalled(_descriptors, key, _form, m, rows, columns)
    # Triton validates every descriptor when it is made, which takes longer than all the rest. It has already
    # validated one of this form; only the address differs.
    assert base.data_ptr() % 16 == 0, "TMA reads what begins at a multiple of 16 bytes"
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(known, base=base)
    return made


def _form(m: Matrix, rows: int, columns: int) -> dict[str, Any]:
    """Fields that descriptors of such a matrix have in common, and a list for tensor maps: see
    `entry.Entry`."""
    known = _checked(m.base.dtype, m.columns, _valid_stride(m), rows, columns)
    return {**known, "shape": [m.rows, m.columns], "maps": []}


def _valid_stride(m: Matrix) -> int:
    """From a row to the next; that of a single row is unused, but TMA needs a valid one."""
    stride, size = m.row_stride, m.base.element_size()
    if not m.rows_aligned():
        assert m.rows == 1, f"TMA cannot read rows that are {stride} elements apart"
        stride = 16 * (m.columns * size // 16 + 1) // size
    return stride


@lru_cache(maxsize=4096)
def _checked(dtype: torch.dtype, width: int, stride: int, rows: int, columns: int) -> dict[str, Any]:
    """The fields of a descriptor for a matrix with one row: Triton does not check the number of rows."""
    layout = _shared_layout(rows, columns, dtype)
    made = TensorDescriptor(_Nowhere(dtype), [1, width], [stride, 1], [rows, columns], layout)
    return vars(made) | {"base": None}


class _Nowhere(NamedTuple):
    """The parts of a tensor that Triton checks."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def operand_descriptor(m: Matrix, side: int, step: int) -> tuple[TensorDescriptor, bool]:
    """Descriptor of an operand [side, k], in tiles of `side` by `step`, and whether k is contiguous."""
    if m.is_row_major():
        return descriptor(m, side, step), True
    return descriptor(m.transposed(), step, side), False


def leaf_descriptor(m: Matrix, side: int, step: int, leaves: int) -> tuple[TensorDescriptor, bool]:
    """The same for k in equal leaves, which are the first dimension: TMA fills with zeros beyond the end of
    each. If k is contiguous, leaves must begin at multiples of 16 bytes."""
    by_k = m.is_row_major()
    flat = m if by_k else m.transposed()
    base, rows, columns, stride, _ = flat
    key = (rows, columns, stride, base.dtype, side, step, leaves, by_k)
    known = recalled(_descriptors, key, _leaf_form, flat, by_k, side, step, leaves)
    assert base.data_ptr() % 16 == 0, "TMA reads what begins at a multiple of 16 bytes"
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(known, base=base)
    return made, by_k


def _leaf_form(m: Matrix, by_k: bool, side: int, step: int, leaves: int) -> dict[str, Any]:
    """As `_form`, of a row-major matrix whose columns, or rows, are k."""
    stride = _valid_stride(m)
    if by_k:
        leaf = m.columns // leaves
        shape, box, between = [leaves, m.rows, leaf], (1, side, step), leaf
    else:
        leaf = m.rows // leaves
        shape, box, between = [leaves, leaf, m.columns], (1, step, side), leaf * stride
    known = _checked_leaves(m.base.dtype, shape[2], between, stride, box)
    return {**known, "shape": shape, "maps": []}


class Stack(NamedTuple):
    """Matrices of one form, `apart` elements from each to the next; those of a tensor [Z, rows, columns]."""

    first: Matrix
    matrices: int
    apart: int

    def aligned_for_tma(self) -> bool:
        """Whether TMA can read them in place, with one descriptor."""
        apart, size = self.apart, self.first.base.element_size()
        return aligned_for_tma(self.first) and (self.matrices == 1 or (apart > 0 and apart * size % 16 == 0))


def stack(t: Tensor) -> Stack:
    return Stack(matrix(t), t.shape[0], t.stride(0))


def stack_descriptor(s: Stack, side: int, step: int) -> tuple[TensorDescriptor, bool]:
    """As `operand_descriptor`, for a stack of operands [Z, side, k]: which one is the first dimension. TMA
    fills with zeros beyond the end of each, and beyond the last one."""
    m, count, apart = s
    by_k = m.is_row_major()
    flat = m if by_k else m.transposed()
    key = (count, apart, *flat[1:4], m.base.dtype, side, step, by_k, "stack")
    known = recalled(_descriptors, key, _stack_form, flat, count, apart, by_k, side, step)
    assert m.base.data_ptr() % 16 == 0, "TMA reads what begins at a multiple of 16 bytes"
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(known, base=m.base)
    return made, by_k


def _stack_form(m: Matrix, count: int, apart: int, by_k: bool, side: int, step: int) -> dict[str, Any]:
    """As `_form`, of row-major matrices. The distance from a single one to the next is unused, but TMA needs
    a valid one."""
    stride = _valid_stride(m)
    box = (1, side, step) if by_k else (1, step, side)
    known = _checked_leaves(m.base.dtype, m.columns, stride if count == 1 else apart, stride, box)
    return {**known, "shape": [count, m.rows, m.columns], "maps": []}


@lru_cache(maxsize=4096)
def _checked_leaves(
    dtype: torch.dtype, width: int, between: int, stride: int, box: tuple[int, ...]
) -> dict[str, Any]:
    """The fields of a descriptor with one leaf and one row: Triton does not check their numbers."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), _GLUON_TYPES[dtype])
    made = TensorDescriptor(_Nowhere(dtype), [1, 1, width], [between, stride, 1], list(box), layout)
    return vars(made) | {"base": None}
