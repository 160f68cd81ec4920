"""Guards the Triton kernels of `det_gemm`: their results in the interpreter, the choice of tiles, and that
their machine code does what decides the bits."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import to_ptx
from interpreted import in_interpreter
from isobit.frame.launch import Recorder
from isobit.kernels.host.token_stream import build
from isobit.ops.det_gemm import kernels_triton as kernels

pytestmark = pytest.mark.compat

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# In the interpreter

#: Runs calls of the public functions, [(name, arguments, options)], and keeps results and gradients; and
#: sums over tokens in several dtypes.
CHILD = """
import sys, torch, isobit
from isobit.ops.det_gemm import kernels_triton
done = []
for name, args, options in torch.load(sys.argv[1]):
    leaves = [a.requires_grad_() for a in args] if name != "det_gemm_dw" else []
    out = getattr(isobit, name)(*args, backend="triton", **options)
    grads = torch.autograd.grad(out.float().sum(), leaves) if leaves else ()
    done.append((out.detach(), *grads))
gen = torch.Generator().manual_seed(0)
x, dy = (torch.randn(1, 700, n, generator=gen).bfloat16() for n in (40, 70))
init = torch.randn(1, 70, 40, generator=gen)
sums = {
    dtype: kernels_triton.token_product(x, dy, None, init, out_dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
torch.save((done, sums), sys.argv[2])
"""

#: Sizes on both sides of every tile's edge, and of its multiples.
SIZES = ((1, 1, 1), (3, 17, 5), (16, 128, 32), (17, 130, 33), (64, 64, 16), (70, 100, 70), (130, 70, 140))


def calls() -> list[tuple[str, list[Tensor], dict[str, Any]]]:
    result: list[tuple[str, list[Tensor], dict[str, Any]]] = []
    for i, (M, K, N) in enumerate(SIZES):
        dtype, out_dtype = ((BF16, F32), (F16, F32), (BF16, None), (F16, None))[i % 4]
        a, b = randn(M, K, dtype=dtype), randn(K, N, dtype=dtype, seed=1)
        result.append(("det_gemm", [a, b], {"out_dtype": out_dtype}))
        result.append(("det_linear", [a, b.t(), randn(N, dtype=F32)], {"out_dtype": out_dtype}))
        apart = torch.stack((a, a), -1)[..., 1]
        result.append(("det_gemm", [apart.t().contiguous().t(), b.t().contiguous().t()], {"out_dtype": F32}))
    result.append(("det_gemm", [randn(2, 3, 20, 40), randn(2, 3, 40, 5)], {}))
    for T, K, N in ((1, 1, 1), (700, 20, 70), (1030, 70, 9), (520, 70, 130)):
        x, dy = randn(T, K), randn(T, N, seed=1)
        mask, cu = randn(T, seed=2) > -0.5, torch.tensor([0, T // 3, T // 3, T // 2, T])
        for options in ({}, {"mask": mask}, {"cu_seqlens": cu.int()}, {"mask": mask, "cu_seqlens": cu},
                        {"init": randn(N, K, dtype=F32)}):  # fmt: skip
            result.append(("det_gemm_dw", [x, dy], options))
    return result


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[Tensor, ...]], dict[Any, Tensor]]:
    folder: Path = tmp_path_factory.mktemp("interpreted")
    torch.save(calls(), folder / "calls")
    in_interpreter(CHILD, folder / "calls", folder / "results")
    result: tuple[list[tuple[Tensor, ...]], dict[Any, Tensor]] = torch.load(folder / "results")
    return result


@pytest.fixture(scope="module")
def interpreted(both: tuple[list[tuple[Tensor, ...]], dict[Any, Tensor]]) -> list[tuple[Tensor, ...]]:
    return both[0]


def truth(name: str, args: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    exact = [t.detach().double().requires_grad_(name != "det_gemm_dw") for t in args]
    if name == "det_gemm_dw":
        x, dy = exact
        out = (dy * options.get("mask", torch.ones(len(dy)))[:, None]).t() @ x
        return (out + options.get("init", 0.0),)
    out = exact[0] @ exact[1] if name == "det_gemm" else torch.nn.functional.linear(*exact)
    return (out.detach(), *torch.autograd.grad(out.sum(), exact))


@pytest.mark.parametrize("index", range(len(calls())))
def test_the_kernels_compute_products(interpreted: list[tuple[Tensor, ...]], index: int) -> None:
    name, args, options = calls()[index]
    for result, exact in zip(interpreted[index], truth(name, args, options), strict=True):
        coarse = {BF16: 2**-7, F16: 2**-9, F32: 2**-15}[result.dtype]
        assert result.shape == exact.shape
        torch.testing.assert_close(result.double(), exact, rtol=coarse, atol=coarse)


def test_a_sum_over_tokens_is_rounded_once(both: tuple[Any, dict[Any, Tensor]]) -> None:
    _, sums = both
    for dtype, result in sums.items():
        assert result.dtype == dtype and torch.equal(result, sums[F32].to(dtype))


# Tiles


def test_sizes_choose_the_tile_when_the_call_runs() -> None:
    names = {tile: name for name, tile in kernels.TILES.items()}
    chosen = [names[kernels.tile_for(M, N)] for M in (1, 16, 17, 64, 65) for N in (16, 64, 65)]
    assert chosen == ["narrow"] * 6 + ["slim", "small", "small"] * 2 + ["slim", "small", "large"]


def launches(recorder: Recorder) -> None:
    """Every tile, with and without bias, tables and start value; strides of all kinds; sizes of 1."""

    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    for M, N, K in ((1, 4096, 512), (64, 512, 512), (512, 16, 512), (512, 512, 512), (5, 5, 1)):
        weight, bias = empty(1, N, K).mT, empty(N)
        kernels.product(empty(1, M, K), weight, bias, BF16, launch=recorder)
        kernels.product(empty(2, M, K), empty(2, K, N), None, F32, launch=recorder)
    tables = build(1000, torch.ones(1000).bool(), None, torch.device("cpu"))
    meta = type(tables)(*(t.to("meta") for t in vars(tables).values()))
    for T, N, K in ((1000, 512, 512), (1000, 512, 1), (1, 512, 512)):
        x, dy, start = empty(1, T, K), empty(1, T, N), empty(1, N, K, dtype=F32)
        kernels.token_product(x, dy, None, start, launch=recorder)
        kernels.token_product(x, dy, meta, None, launch=recorder)


@pytest.fixture(scope="module")
def hopper() -> list[tuple[dict[str, Any], Any]]:
    """(arguments, compiled kernel) of every launch above, for sm_90."""
    recorder = Recorder()
    launches(recorder)
    result = []
    for (kernel, args, options), (_, source, flags) in zip(
        recorder.launches, recorder.sources(), strict=True
    ):
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        done = to_ptx.compiled(source, flags)
        result.append((given, done))
    return result


def test_no_kernel_may_fuse_a_product_and_a_sum() -> None:
    recorder = Recorder()
    launches(recorder)
    assert {options["enable_fp_fusion"] for _, _, options in recorder.launches} == {False}


def test_every_step_takes_16_k(hopper: list[tuple[dict[str, Any], Any]]) -> None:
    for _, done in hopper:
        shapes = re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k(\d+)", done.asm["ptx"])
        assert shapes and set(shapes) == {"16"}


def test_every_sum_is_one_dot_and_the_bias_is_added_separately(
    hopper: list[tuple[dict[str, Any], Any]],
) -> None:
    """Also where a loop runs once: a bias or a segment that became the dot's start value would round
    otherwise."""
    for given, done in hopper:
        ttir = done.asm["ttir"]
        added = given.get("bias") is not None or "dy" in given
        assert ttir.count("tt.dot ") == 1 and ttir.count("arith.addf") == added


def test_the_control_of_the_above_folds_the_bias_into_the_dot() -> None:
    recorder = Recorder()
    launches(recorder)
    kernel, args, options = next(
        launch
        for launch in recorder.launches
        if dict(zip(launch[0].arg_names, launch[1], strict=False))["K"] == 1
    )
    known = Recorder([(kernel, args, options)])
    ((_, source, flags),) = known.sources()
    at = kernel.arg_names.index("blocks")
    source.signature["blocks"] = "constexpr"
    source.constants[(at,)] = 1
    done = to_ptx.compiled(source, flags)
    assert "arith.addf" not in done.asm["ttir"]


def test_offsets_have_64_bits(hopper: list[tuple[dict[str, Any], Any]]) -> None:
    for _, done in hopper:
        added = re.findall(r"tt\.addptr .*: tensor<[^>]*>>?, tensor<[\dx]*x(i\d+)>", done.asm["ttir"])
        assert added and added.count("i32") <= 1  # the table of rows, which has 32


# What a recorder makes of a launch


def test_a_recorder_specialises_as_a_launch_does() -> None:
    recorder = Recorder()
    kernels.product(
        torch.empty(1, 32, 1, dtype=BF16), torch.empty(1, 1, 7, dtype=BF16), None, F32, launch=recorder
    )
    ((name, source, _),) = recorder.sources()
    assert name == "product_tile"
    assert source.signature["blocks"] == "i32"  # 1, and still a number: it is not to be specialised
    assert source.signature["K"] == source.signature["a_sk"] == "constexpr"
    assert source.signature["M"] == "i32" and source.signature["bias"] == "constexpr"
