"""Guards the kernels of `rms_norm`: bits of the model in the interpreter, and what compilers make of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import to_ptx
from interpreted import in_interpreter
from isobit.frame.launch import Recorder
from isobit.ops.rms_norm import kernels_triton, kernels_triton_bwd

pytestmark = pytest.mark.compat

BF16, F32 = torch.bfloat16, torch.float32
KERNELS = {
    "norm_rows",
    "norm_long_rows",
    "gradient_rows",
    "gradient_few_rows",
    "gradient_long_rows",
    "sum_groups",
    "fold",
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(in_interpreter(Path(__file__).parent / "rms_norm_calls.py"))
    return found


def test_kernels_have_the_bits_of_the_model(interpreted: dict[str, Any]) -> None:
    assert interpreted["wrong"] == []


def test_every_kernel_was_compared(interpreted: dict[str, Any]) -> None:
    launched = interpreted["launched"]
    assert {name for names in launched.values() for name in names} == KERNELS
    assert launched["many sums"].count("fold") == 2  # nine programs, four sums a time
    assert launched["tiles of rows"] == ["norm_rows", "gradient_few_rows"]  # one block: no sums are left


# Compiled


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def forward(launch: Recorder, N: int, D: int, dtype: torch.dtype = BF16) -> None:
    options: dict[str, Any] = {
        "residual": None,
        "eps": 1e-6,
        "offset": 0.0,
        "cast": "before",
        "return_rstd": True,
    }
    kernels_triton.rms_norm(launch, x=empty(N, D, dtype=dtype), weight=empty(D, dtype=dtype), **options)


def backward(launch: Recorder, N: int, D: int) -> None:
    options: dict[str, Any] = {"dsummed": None, "offset": 0.0, "want_h": True, "want_weight": True}
    x, rstd = empty(N, D), empty(N, dtype=F32)
    kernels_triton_bwd.rms_norm_bwd(launch, h=x, weight=empty(D), rstd=rstd, dout=x, **options)


def ptx_of(call: Any, *sizes: int) -> dict[str, str]:
    """PTX for Hopper, by kernel."""
    recorder = Recorder()
    call(recorder, *sizes)
    return {name: to_ptx.compiled(source, options).asm["ptx"] for name, source, options in recorder.sources()}


def counted(ptx: str, pattern: str) -> int:
    return len(re.findall(pattern, ptx))


@pytest.mark.parametrize("D", [2048, 128])
def test_rows_are_read_and_written_in_words_of_16_bytes(D: int) -> None:
    """Rows and weight, and dx; everything else is one number per row."""
    ptx = ptx_of(forward, 64, D)["norm_rows"]
    tile = max(D, 2048) // 1024
    assert counted(ptx, r"ld\.global\S*\.v4") >= tile and counted(ptx, r"st\.global\S*\.v4") == tile
    assert counted(ptx, r"ld\.global") - counted(ptx, r"ld\.global\S*\.v4") <= 1  # 128 numbers of the weight


def test_nothing_is_contracted_flushed_or_approximate() -> None:
    found = ptx_of(forward, 64, 2048) | ptx_of(backward, 64, 2048) | ptx_of(backward, 1 << 15, 2048)
    assert set(found) == {"norm_rows", "gradient_few_rows", "gradient_rows", "fold"}
    for name, ptx in found.items():
        assert not counted(ptx, r"\b(?:fma|atom|red)\.|\bmad\.\w+\.f|\.ftz|\.approx"), name
    assert counted(found["norm_rows"], r"sqrt\.rn\.f32") and counted(found["norm_rows"], r"div\.rn\.f32")


@pytest.mark.parametrize(("N", "D"), [(1 << 19, 128), (1 << 15, 2048), (1 << 15, 5120)])
def test_rows_arrive_while_others_are_computed(N: int, D: int) -> None:
    """Two rows of h and dout are copied to shared memory ahead, and no load of them waits in registers."""
    ptx = ptx_of(backward, N, D)["gradient_rows"]
    chunks = max(D, 2048) // 1024 if D <= 4096 else D // 1024
    assert counted(ptx, r"cp\.async\.c[ag]\.shared\.global") >= 3 * 2 * chunks  # two ahead, then one a turn
    assert counted(ptx, r"ld\.global") <= 3 * chunks  # the weight, and sums that wait for a neighbour


def test_long_rows_arrive_in_registers() -> None:
    """h and dout once, the weight twice, and so few registers that two programs fit in an SM."""
    ptx = ptx_of(backward, 1 << 15, 8192)["gradient_rows"]
    assert not counted(ptx, r"cp\.async\.c[ag]\.shared\.global")
    assert 4 * 8 <= counted(ptx, r"ld\.global") <= 5 * 8  # and sums that wait for a neighbour
    assert counted(ptx, r"\.maxnreg\s+128\b")


def keys(call: Any, N: int, D: int) -> dict[str, set[str]]:
    recorder, found = Recorder(), dict[str, set[str]]()
    call(recorder, N, D)
    for name, source, options in recorder.sources():
        found.setdefault(name, set()).add(f"{source.hash()} {sorted(options.items())}")
    return found


@pytest.mark.parametrize("D", [128, 1003, 4096, 20000])
@pytest.mark.parametrize("call", [forward, backward])
def test_batches_share_their_kernels(call: Any, D: int) -> None:
    """A schedule for few rows and one for many; sums that are the last ones have the dtype of the weight."""
    found: dict[str, set[str]] = {}
    for N in (1, 16, 33, 64, 300, 2048, 2064, 5000, 33000, 70000, 300000):
        for name, some in keys(call, N, D).items():
            found.setdefault(name, set()).update(some)
    most = {"fold": 2, "gradient_few_rows": 2, "norm_rows": 2}
    assert all(len(some) <= most.get(name, 1) for name, some in found.items())


# Strides


def words(*tensors: Tensor) -> int:
    return kernels_triton.walk(tensors[0].shape[:-1], tensors[0].shape[-1], *tensors).word


def test_words_are_as_wide_as_all_rows_allow() -> None:
    assert words(empty(4, 64)) == 8 and words(empty(4, 64, dtype=F32)) == 4
    assert words(empty(4, 68)) == 4 and words(empty(4, 7)) == 1
    assert words(empty(4, 70)[:, :64]) == 2  # rows that begin at a multiple of 70
    assert words(empty(4, 64), empty(4, 68)[:, :64]) == 4
    assert words(empty(2, 5, 64)[:, :4]) == 8


def test_rows_that_are_equally_far_apart_need_no_division() -> None:
    def inner(t: Tensor) -> int | None:
        return kernels_triton.walk(t.shape[:-1], t.shape[-1], t).inner

    assert inner(empty(4, 64)) is inner(empty(3, 4, 64)) is inner(empty(64)) is inner(empty(1, 4, 64)) is None
    assert inner(empty(3, 5, 64)[:, :4]) == 4
