"""The kernels of one token for Hopper run on a CPU, against the numpy model: the first by numpy, the second
in Triton's interpreter. Programs of a launch run in any order, so two orders must give the same."""

from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gluon_on_a_cpu import F32, Array, Device, Pointer, _argument, array, in_order
from interpreted import in_interpreter
from isobit import DeltaState
from isobit.frame.launch import Recorder
from isobit.numerics import cpu_steps
from isobit.ops.gated_delta_rule_step import kernels_hopper, model
from isobit.ops.gated_delta_rule_step.state import TENSORS


class Steps:
    """The arithmetic of class gdr/1/cpu."""

    product, fma, exp2 = staticmethod(cpu_steps.product), staticmethod(cpu_steps.fused), staticmethod(np.exp2)


class Piece:
    """A view of shared memory."""

    def __init__(self, data: np.ndarray, dtype: Any) -> None:
        self.data, self.dtype = data, dtype

    def index(self, i: Any) -> "Piece":
        assert 0 <= int(i) < len(self.data)
        return Piece(self.data[int(i)], self.dtype)

    def slice(self, start: int, length: int) -> "Piece":
        return Piece(self.data[start : start + length], self.dtype)

    def permute(self, order: Any) -> "Piece":
        return Piece(self.data.transpose(order), self.dtype)

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> "Piece":
        assert dtype == self.dtype
        return Piece(self.data.reshape([int(n) for n in shape]), dtype)  # never a copy: it is contiguous

    def load(self, layout: Any) -> Array:
        return array(self.data)

    def store(self, x: Any) -> None:
        assert np.shape(x) == self.data.shape
        self.data[...] = x


class Copies:
    """Copies to shared memory, which happen as late as they may: when they are waited for."""

    def __init__(self, load: Any) -> None:
        self.load, self.open, self.groups = load, [], []

    def begin(self, to: Piece, source: Pointer, mask: Any) -> None:
        assert np.shape(source.at) == to.data.shape
        self.open.append((to, source, mask))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left:
            for to, source, mask in self.groups.pop(0):
                to.store(self.load(source, mask=mask, other=0))


def on_a_cpu(args: dict[str, Any], backwards: bool = False) -> Tensor:
    device = Device(Steps, 1)
    language = device.language()
    language.allocate_shared_memory = lambda dtype, shape, layout: Piece(
        np.full([int(n) for n in shape], np.nan, F32), dtype
    )

    def product(a: Any, b: Any, acc: Any) -> Array:
        return array(Steps.product(np.asarray(a), np.asarray(b), np.asarray(acc)))

    copies = Copies(language.load)
    scope = device.scope(
        kernels_hopper, gl=language, async_copy=copies, begin_copy=copies.begin, mma_v2=product,
        reinterpreted=Piece.reinterpret, by_row=lambda columns: None,
    )  # fmt: skip

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        if kernel is not kernels_hopper.token_kernel:
            kernel[grid](*values, **options)
            return
        own, given = FunctionType(kernel.fn.__code__, scope), in_order(kernel, values, options)
        for program in range(grid[0])[:: -1 if backwards else 1]:
            device.mine.places = (program, 0)
            with np.errstate(all="ignore"):
                own(*map(_argument, given))
            assert not copies.open and not copies.groups

    return kernels_hopper.rows(launch, **args)


def made(at: list[int], HV: int, K: int, V: int, dtype: torch.dtype, seeded: bool, drafts: bool) -> Any:
    """One more token for sequences with these numbers of them, in slots in descending order."""
    B, H, gen = len(at), 1, torch.Generator().manual_seed(3)
    state = DeltaState(B + 1, H, HV, K=K, V=V, dtype=dtype, drafts=drafts)
    for t in state.tensors().values():
        if t.is_floating_point():
            t.fill_(np.nan)  # what is stored in rows that do not exist must not matter
    if seeded:
        state.reset(None, torch.randn(B + 1, HV, K, V, generator=gen))

    def tokens(T: int) -> dict[str, Any]:
        q, k = (torch.randn(B, T, H, K, generator=gen).to(dtype) for _ in range(2))
        v, g = torch.randn(B, T, HV, V, generator=gen).to(dtype), torch.rand(B, T, HV, generator=gen) / -8
        return {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(B, T, HV, generator=gen)}

    options = {"scale": 0.3, "slots": torch.arange(B, 0, -1), "use_qk_l2norm_in_kernel": True}
    model.rows(**tokens(max(at)), lengths=torch.tensor(at), **options, **state.tensors())
    return tokens(1) | options | state.tensors() | {"lengths": None}


def copied(args: dict[str, Any]) -> dict[str, Any]:
    return args | {name: args[name].clone() for name in TENSORS}


def assert_same(args: dict[str, Any]) -> None:
    """In both orders of programs: the output, and everything that is stored."""
    right = copied(args)
    expected = model.rows(**right)
    for backwards in (False, True):
        own = copied(args)
        out = on_a_cpu(own, backwards)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())
        for name in TENSORS:
            assert torch.equal(own[name].nan_to_num(7.0), right[name].nan_to_num(7.0)), name


# Programs of the tests


def every_place() -> None:
    at = [0, 1, 16, 37, 63, 64, 128]
    assert_same(made(at, 2, 64, 64, torch.bfloat16, False, False))
    few = made([5, 64], 2, 128, 64, torch.float16, True, True)
    assert_same(few | {"lengths": torch.tensor([0, 9]), "use_qk_l2norm_in_kernel": False, "g": None})
    assert_same(made([64], 1, 256, 64, torch.bfloat16, True, False))
    many = made([3, 64], 33, 64, 128, torch.bfloat16, False, False)  # programs of 128 columns
    assert_same(many | {"slots": torch.tensor([7, 1])})


def infinite_rows() -> None:
    for name, value in (("k", np.inf), ("v", np.inf), ("v", np.nan), ("q", np.nan), ("beta", np.inf)):
        args = made([3, 64], 1, 64, 64, torch.bfloat16, False, False)
        args["use_qk_l2norm_in_kernel"] = False
        args[name][:, :, 0] = value
        assert_same(args)


def garbage() -> None:
    """No address is outside: the device asserts it."""
    args = made([3, 64], 1, 64, 64, torch.bfloat16, False, False)
    numbers = torch.tensor([-(2**31), 2**31 - 1, 77, -1], dtype=torch.int32)
    for n in range(4):
        own = copied(args)
        own["place"][1:] = numbers.roll(n)
        before = own["place"][0].clone()
        on_a_cpu(own | {"slots": torch.tensor([1, 2**40]), "lengths": torch.tensor([2**40, 1])})
        assert torch.equal(own["place"][0], before) and 0 <= int(own["place"][1, 0]) <= 64
        out = on_a_cpu(own | {"slots": torch.tensor([-1, 2**31]), "lengths": None})
        assert not out.any()


@pytest.mark.parametrize("program", [every_place, infinite_rows, garbage])
def test_has_the_bits_of_the_class(program: Any) -> None:
    name = program.__name__
    in_interpreter(f"from test_gated_delta_step_hopper import {name}\n{name}()")


def test_memory_that_is_not_aligned_is_triton_s() -> None:
    """Copies to shared memory are 16 bytes wide."""
    state = DeltaState(2, 1, 2, K=64, V=64, device="cpu")
    args = {"q": torch.zeros(2, 1, 1, 64).bfloat16(), "k": torch.zeros(2, 1, 1, 64).bfloat16()}
    args |= {"v": torch.zeros(2, 1, 2, 64).bfloat16(), "g": None, "beta": torch.zeros(2, 1, 2)}
    args |= {"slots": None, "lengths": None, "scale": 1.0, "use_qk_l2norm_in_kernel": False}
    moved = torch.zeros(state.vn_rows.numel() + 1).bfloat16()[1:].view(state.vn_rows.shape)
    for vn_rows, kernels in ((state.vn_rows, ["token_kernel", "keep_kernel"]),
                             (moved, ["rows_kernel", "values_kernel"])):  # fmt: skip
        recorder = Recorder()
        kernels_hopper.rows(recorder, **args, **state.tensors() | {"vn_rows": vn_rows})
        assert [kernel.__name__ for kernel, *_ in recorder.launches] == kernels
