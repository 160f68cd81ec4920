"""The kernels of one token for Hopper run on a CPU, against the numpy model: the first by numpy, the second
in Triton's interpreter. Programs of a launch run in any order, and side by side, so all orders must give the
same, in one launch as in two."""

import threading
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
from isobit.ops.gated_delta_rule_step.state import ARRIVED, TENSORS


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


class Copies(threading.local):
    """Copies to shared memory, which happen as late as they may: when they are waited for. Each program that
    has a thread has its own."""

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


class Arrivals:
    """Programs side by side: none arrives before all others have come to where they arrive, or have ended. So
    what any of them reads before is what was there before the launch. Then they go on one after another."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.changed, self.mine = order, threading.Condition(), threading.local()
        self.waiting: set[int] = set()
        self.ended: set[int] = set()

    def come(self) -> None:
        own = self.mine.number
        with self.changed:
            if own in self.waiting:
                return  # it has arrived, and takes the arrivals away
            self.waiting.add(own)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.turn(own), 20)

    def turn(self, own: int) -> bool:
        if self.waiting | self.ended != set(self.order):
            return False
        return next(n for n in self.order if n not in self.ended) == own

    def end(self) -> None:
        with self.changed:
            self.ended.add(self.mine.number)
            self.changed.notify_all()


def in_this_order(programs: int, order: str) -> list[int]:
    if order in ("forwards", "backwards"):
        return list(range(programs))[:: -1 if order == "backwards" else 1]
    return sorted(range(programs), key=lambda n: n * 37 % 101)


def on_a_cpu(args: dict[str, Any], order: str = "forwards", one: bool | None = None) -> Tensor:
    """`order`: of programs; "together" is side by side. `one`: in one launch."""
    device = Device(Steps, 1)
    language = device.language()
    arrivals: list[Arrivals] = []
    add = language.atomic_add

    def atomic_add(p: Pointer, x: Any, mask: Any = True, *, sem: str) -> Array:
        if arrivals and np.any(mask):
            arrivals[0].come()
        return add(p, x, mask, sem=sem)

    language.atomic_add = atomic_add
    language.allocate_shared_memory = lambda dtype, shape, layout: Piece(
        np.full([int(n) for n in shape], np.nan, F32), dtype
    )

    def product(a: Any, b: Any, acc: Any) -> Array:
        return array(Steps.product(np.asarray(a), np.asarray(b), np.asarray(acc)))

    copies = Copies(language.load)
    scope = device.scope(
        kernels_hopper, gl=language, async_copy=copies, begin_copy=copies.begin, mma_v2=product,
        reinterpreted=Piece.reinterpret, by_row=lambda columns: None, of_new=lambda columns: None,
        gdc_wait=lambda: None, gdc_launch_dependents=lambda: None,
    )  # fmt: skip

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        if kernel is not kernels_hopper.token_kernel:
            kernel[grid](*values, **options)
            return
        own, given = FunctionType(kernel.fn.__code__, scope), in_order(kernel, values, options)

        def program(n: int) -> None:
            device.mine.places = (n, 0)
            with np.errstate(all="ignore"):
                own(*map(_argument, given))
            assert not copies.open and not copies.groups

        def beside_others(n: int) -> None:
            arrivals[0].mine.number = n
            try:
                program(n)
            finally:
                arrivals[0].end()

        numbers = in_this_order(grid[0], order)
        if order != "together":
            for n in numbers:
                program(n)
            return
        arrivals.append(Arrivals(numbers))
        device._together([(beside_others, (n,)) for n in numbers])
        arrivals.clear()

    return kernels_hopper.token(args, torch.empty_like(args["v"]), launch, one=one)


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
    """In one launch and in two, in any order of programs: the output, and everything that is stored, with no
    arrival left."""
    right = copied(args)
    expected = model.rows(**right)
    for order, one in (("forwards", False), ("backwards", True), ("mixed", True), ("together", True)):
        own = copied(args)
        out = on_a_cpu(own, order, one)
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
    numbers = torch.tensor([-(2**31), 2**31 - 1, 77, -1, 3], dtype=torch.int32)
    for n in range(5):
        own = copied(args)
        own["place"][1:] = numbers.roll(n)
        before = own["place"][0].clone()
        on_a_cpu(own | {"slots": torch.tensor([1, 2**40]), "lengths": torch.tensor([2**40, 1])})
        assert torch.equal(own["place"][0], before) and 0 <= int(own["place"][1, 0]) <= 64
        out = on_a_cpu(own | {"slots": torch.tensor([-1, 2**31]), "lengths": None})
        assert not out.any()


def a_whole_chunk() -> None:
    """70 tokens, over the end of a chunk, from a state that was given and from none, with drafts and without,
    in slots that change their places among the sequences and are none, and with calls that have no token. The
    first 44 are the model's: `every_place` has them, and the kernel takes a while."""
    HV, K, V, gen = 2, 64, 64, torch.Generator().manual_seed(5)
    begun = torch.randn(1, HV, K, V, generator=gen)
    for drafts in (False, True):
        two, one = (DeltaState(4, 1, HV, K=K, V=V, drafts=drafts) for _ in range(2))
        for state in (two, one):
            for t in state.tensors().values():
                if t.is_floating_point():
                    t.fill_(np.nan)
            state.reset([2], begun)
        for t in range(70):
            slots, lengths = torch.tensor([3, 2, -1]).roll(t), torch.tensor([1, t % 11, 1])
            q, k = (torch.randn(3, 1, 1, K, generator=gen).bfloat16() for _ in range(2))
            token: dict[str, Any] = {"q": q, "k": k, "v": torch.randn(3, 1, HV, V, generator=gen).bfloat16()}
            token |= {"g": torch.rand(3, 1, HV, generator=gen) / -8, "slots": slots, "lengths": lengths}
            token |= {"beta": torch.rand(3, 1, HV, generator=gen), "scale": 0.3}
            token |= {"use_qk_l2norm_in_kernel": True}
            if t < 44:
                outs = [model.rows(**token, **state.tensors()) for state in (two, one)]
                continue
            outs = [
                on_a_cpu(token | state.tensors(), order, together)
                for state, order, together in ((two, "forwards", False), (one, "mixed", True))
            ]
            assert torch.equal(*outs)
            assert torch.equal(one.place, two.place) and not one.place[:, ARRIVED].any()
        assert one.tokens[2] > 64 and one.tokens[3] > 64
        for mine, other in zip(one.tensors().values(), two.tensors().values(), strict=True):
            assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))


def arrivals_that_were_left() -> None:
    """Where a program takes itself for the last too early, other slots are right, and so is this one when it
    has been reset."""
    args = made([5, 64], 2, 64, 64, torch.bfloat16, False, False)
    right = copied(args)
    expected = model.rows(**right)
    args["place"][2, ARRIVED] = 2  # of the first sequence
    out = on_a_cpu(args, one=True)
    assert torch.equal(out[1], expected[1]) and not torch.equal(out[0], expected[0])
    assert torch.equal(args["place"][1], right["place"][1])
    state = DeltaState.from_tensors({name: args[name] for name in TENSORS})
    state.reset([2])
    assert not state.place[:, ARRIVED].any()


@pytest.mark.parametrize(
    "program", [every_place, infinite_rows, garbage, a_whole_chunk, arrivals_that_were_left]
)
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
    for vn_rows, kernels in ((state.vn_rows, ["token_kernel"]),
                             (moved, ["rows_kernel", "values_kernel"])):  # fmt: skip
        recorder = Recorder()
        kernels_hopper.rows(recorder, **args, **state.tensors() | {"vn_rows": vn_rows})
        assert [kernel.__name__ for kernel, *_ in recorder.launches] == kernels


@pytest.mark.parametrize(("B", "kernels"), [(128, ["token_kernel"]), (129, ["token_kernel", "keep_kernel"])])
def test_many_sequences_have_a_second_launch(B: int, kernels: list[str]) -> None:
    state, recorder = DeltaState(B, 1, 2, K=64, V=64, device="meta"), Recorder()
    q, k, v = (torch.empty(B, 1, n, 64, dtype=torch.bfloat16, device="meta") for n in (1, 1, 2))
    args = {"q": q, "k": k, "v": v, "g": None, "beta": torch.empty(B, 1, 2, device="meta"), "slots": None}
    args |= {"lengths": None, "scale": 1.0, "use_qk_l2norm_in_kernel": False}
    kernels_hopper.rows(recorder, **args, **state.tensors())
    assert [kernel.__name__ for kernel, *_ in recorder.launches] == kernels
    options = recorder.launches[0][2]
    assert options["ONE"] == bool(options.get("launch_pdl")) == (len(kernels) == 1)
