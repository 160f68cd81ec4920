"""Temperatures of rows as factors, by one launch: a call with them can be replayed like one with a number."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch
from isobit.kernels.host.rows import row_strides
from isobit.kernels.host.temperature import LOG2E, Scaling, scaling
from isobit.kernels.triton.rows import row_offset

BLOCK = 256


@triton.jit(do_not_specialize=["N", "inner", "outer_stride", "inner_stride"])
def factors_of_rows(
    temperature, scales, inverses, N, inner, outer_stride, inner_stride,
    LOG2E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """log2(e) / temperature and 1 / temperature of BLOCK rows: fp64 divisions, to nearest, and then one
    rounding to fp32."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < N
    own = tl.load(temperature + row_offset(row, inner, outer_stride, inner_stride), mask=inside, other=1.0)
    own = own.to(tl.float64)
    # Not `LOG2E / own`: a number in an expression may be rounded to fp32 first.
    tl.store(scales + row, (tl.full([BLOCK], LOG2E, tl.float64) / own).to(tl.float32), mask=inside)
    tl.store(inverses + row, (tl.full([BLOCK], 1.0, tl.float64) / own).to(tl.float32), mask=inside)


def scaling_of_rows(temperature: float | Tensor, N: int, launch: Launch) -> Scaling:
    """The bits of `scaling`."""
    if isinstance(temperature, float | int):  # not `Tensor`: a launcher is traced with tensors that are none
        return scaling(temperature, N)
    inner, (each,), strides = row_strides(temperature.shape, (temperature,))
    scales, inverses = (torch.empty(N, dtype=torch.float32, device=each.device) for _ in range(2))
    launch(
        factors_of_rows, (triton.cdiv(N, BLOCK),), each, scales, inverses, N, inner, *strides,
        LOG2E=LOG2E, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return Scaling(scales, inverses, 1.0, 1.0)
