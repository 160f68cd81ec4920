"""Hooks on compilations: what Triton writes about a kernel for them is JSON, for every kernel of every op."""

import json
from typing import Any
from unittest import mock

import pytest
import torch
import triton

import stub_cuda
from isobit.frame.launch import Recorder, launched, roles_of
from isobit.ops.det_gemm import kernels_hopper
from stub_cuda import launches, run, why_not

pytestmark = [pytest.mark.compat, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def a_process_without_kernels() -> None:
    """Triton tells a hook of a kernel once: not if another test has launched it in the same process."""
    stub_cuda._child.cache_clear()


def recorded() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches that the law `compile` compiles: one for each kernel and its constants."""
    from isobit.spec.proofs import proofs

    recorder = Recorder()
    for proof in proofs().values():
        for kernels in proof.kernels.values():
            kernels.record(recorder, BF16)
    return recorder.launches


def described() -> tuple[set[str], set[str], int]:
    """(kernels that there are, those that a hook was told of, how many constants were layouts). The hook says
    that it has a compiled kernel already, so nothing is compiled."""
    there, told, layouts = set(), set(), 0

    def hook(fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        nonlocal layouts
        data = json.loads(compile["specialization_data"])
        json.dumps(list(compile["constants"].values()), default=str)
        layouts += sum(isinstance(value, str) and "Layout(" in value for value in data["constant_vals"])
        told.add(fn.name)
        return True

    with mock.patch.object(triton.knobs.runtime, "jit_cache_hook", hook):
        for kernel, args, options in recorded():
            there.add(kernel.fn.__qualname__)
            roles_of(kernel)  # as for every launch
            kernel.run(*args, grid=(1, 1, 1), warmup=True, **options)
    return there, told, layouts


def test_every_kernel_can_be_described_to_a_hook() -> None:
    there, told, layouts = run(described)
    assert told == there and len(there) > 20
    assert layouts > 20  # Hopper kernels have some


def launched_with_a_hook() -> tuple[list[str], int]:
    """(what a hook was told of a product, how many launches it made)."""
    told = []

    def hook(fn: Any, compile: dict[str, Any], **_: Any) -> None:
        json.loads(compile["specialization_data"])
        told.append(fn.name)

    def on_a_gpu(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launched(kernel, grid, args, options)

    x, w = (torch.empty(1, 48, 80, dtype=BF16) for _ in range(2))
    with mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", hook):
        for _ in range(2):
            kernels_hopper.product(x, w.mT, None, BF16, on_a_gpu)
    return told, len(launches())


def test_a_product_launches_while_a_hook_is_set() -> None:
    told, count = run(launched_with_a_hook)
    assert len(told) == 1 and count == 2
