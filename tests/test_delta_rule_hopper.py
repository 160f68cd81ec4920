"""The recurrence's kernel for Hopper run on a CPU: what it computes, and that no partition overtakes another
in the buffers that they share."""

import math
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_on_a_cpu import slowed
from gluon_on_a_cpu import F32, Array, Barrier, Device, Shared, array
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.ops.delta_rule import kernels_hopper, kernels_hopper_io, reference
from isobit.ops.delta_rule.kernels_hopper import Buffers

DTYPES = {F32: torch.float32, np.int32: torch.int32}


class Part:
    """Some of a room."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def load(self, layout: Any = None) -> Array:
        found = self.tensor
        return array((found.float() if found.is_floating_point() else found).numpy())

    def store(self, x: Any) -> None:
        self.tensor.copy_(torch.from_numpy(np.array(np.broadcast_to(x, self.tensor.shape))))

    def permute(self, order: Any) -> "Part":
        return Part(self.tensor.permute(*order))


class Room:
    """Bytes of shared memory as a tensor: what is stored under one name is overwritten under another."""

    def __init__(self, dtype: Any, shape: Any, memory: Tensor | None = None) -> None:
        self.dtype, self.shape = DTYPES.get(dtype, dtype), [int(n) for n in shape]
        size = math.prod(self.shape) * self.dtype.itemsize
        self.memory = torch.full((size,), 255, dtype=torch.uint8) if memory is None else memory
        assert len(self.memory) == size

    def index(self, i: Any) -> "Room":
        return Room(self.dtype, self.shape[1:], self.memory.view(self.shape[0], -1)[int(i)])

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> "Room":
        return Room(dtype, shape, self.memory)

    def tensor(self) -> Tensor:
        return self.memory.view(self.dtype).view(self.shape)

    def load(self, layout: Any = None) -> Array:
        found = self.tensor()
        return array((found.float() if found.is_floating_point() else found).numpy())

    read = load

    def store(self, x: Any) -> None:
        self.tensor().copy_(torch.from_numpy(np.array(np.broadcast_to(x, self.shape))))

    def permute(self, order: Any) -> Any:
        def load(layout: Any = None) -> Array:
            return array(self.load().T)

        return SimpleNamespace(load=load, read=load, store=lambda x: self.store(x.T))

    def slice(self, start: int, length: int, dim: int = 0) -> "Part":
        return Part(self.tensor().narrow(dim, int(start), int(length)))


class Exact:
    """Arithmetic that rounds once."""

    @staticmethod
    def product(a: Any, b: Any, acc: Any, _: Any) -> Any:
        return (a.astype(np.float64) @ b + acc).astype(F32)

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        return (a.astype(np.float64) * b + c).astype(F32)

    @staticmethod
    def exp2(x: Any) -> Any:
        return np.exp2(x)


class Walked(Device):
    def __init__(self, programs: int, arithmetic: Any = Exact) -> None:
        super().__init__(arithmetic, programs)
        self.stores = threading.local()

    def language(self) -> Any:
        def allocate(dtype: Any, shape: Any, layout: Any) -> Any:
            if dtype != "int64":
                return Room(dtype, shape)
            made = Shared(dtype, shape)
            made.parts = {i: Barrier() for i in range(int(shape[0]))}
            return made

        gl = super().language()
        gl.allocate_shared_memory, gl.BlockedLayout = allocate, lambda *rest: None
        return gl

    def store_box(self, desc: Any, where: list[Any], room: Room) -> None:
        self.stores.__dict__.setdefault("begun", []).append((desc.tensor, [int(i) for i in where], room))

    def store_wait(self, left: int) -> None:
        """Reads a buffer as late as it may be read."""
        begun = self.stores.__dict__.setdefault("begun", [])
        for target, (row, column), room in begun:
            assert room.dtype == target.dtype
            assert row >= 0 and column >= 0
            part = target[row : row + room.shape[0], column : column + room.shape[1]]
            part.copy_(room.tensor()[: part.shape[0], : part.shape[1]])
        begun.clear()


def on_a_cpu(args: dict[str, Any], programs: int = 2) -> tuple[Tensor | None, ...]:
    device = Walked(programs)
    scope = device.scope(
        hopper_pipe, kernels_hopper_io, kernels_hopper, tma_store=device.store_box,
        tma=SimpleNamespace(store_wait=device.store_wait), reinterpreted=Room.reinterpret,
    )  # fmt: skip

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        constants = (options[name] for name in kernel.arg_names[len(values) :])
        device.run(scope, kernel, (*values, *constants))

    return kernels_hopper.dhu(launch, programs, **args)


def made(mode: str, v_first: bool, lengths: list[int], K: int = 64, V: int = 128) -> dict[str, Any]:
    gen, T, S = torch.Generator().manual_seed(K), sum(lengths), len(lengths)

    def drawn(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=gen)

    wide, slim = (1, T, 1, K), (1, T, 1, V)
    args: dict[str, Any] = {n: drawn(*wide).bfloat16() for n in ("q", "k", "w")}
    args |= {n: drawn(*slim).bfloat16() for n in ("do", "dv")}
    args["g"] = -drawn(1, T, 1).abs() if "g" in mode else None
    args["gk"] = -drawn(*wide).abs() if "k" in mode else None
    state = (S, 1, V, K) if v_first else (S, 1, K, V)
    args["h0"] = drawn(*state) if "h" in mode else None
    args["dht"] = drawn(*state) if "t" in mode else None
    chunks = [-(-n // 64) for n in lengths]
    bounds, offsets = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, chunks))
    args |= {"cu_seqlens": bounds, "chunk_offsets": offsets, "chunk_indices": torch.empty(sum(chunks), 2)}
    return args | {"scale": 0.5, "chunk_size": 64, "use_exp2": True, "state_v_first": v_first}


#: Ragged, empty and whole ones, with even and odd numbers of chunks.
LENGTHS = [70, 0, 0, 128, 1, 64, 0]
MODES = ("", "h", "t", "ht", "g", "gkht")


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_is_the_recurrence(K: int, mode: str, v_first: bool) -> None:
    args = made(mode, v_first, LENGTHS, K)
    for found, right in zip(on_a_cpu(args), reference.dhu(**args), strict=True):
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            assert (found.double() - right.double()).norm() < 0.006 * right.double().norm()


@pytest.mark.parametrize("v_first", [False, True])
def test_no_state_is_stored_before_dh_whatever_the_integers_are(v_first: bool) -> None:
    args = made("kht", v_first, LENGTHS)
    low, high = -(1 << 63), (1 << 63) - 1
    args["chunk_offsets"] = torch.tensor([low, -1, high, low + 1, -(1 << 31), 1 << 20, 3, 0])
    right = reference.dhu(**made("kht", v_first, LENGTHS))
    _, dh0, dv2 = on_a_cpu(args)  # asserts that no store begins before its tensor
    for found, expected in ((dh0, right[1]), (dv2, right[2])):  # which do not depend on it
        assert (found.double() - expected.double()).norm() < 0.006 * expected.double().norm()
    few = args | {"chunk_indices": torch.empty(0, 2), "cu_seqlens": args["cu_seqlens"] * 0 + 198}
    few["cu_seqlens"][::2] = 0
    on_a_cpu(few)


@pytest.mark.parametrize("who", range(5))
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("mode", ["h", "t", "ht", "gkht"])
def test_whoever_is_slow_the_bits_are_the_same(
    mode: str, separate: bool, who: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program, so that all items share its buffers: consumer, producer, both store warps, producer of
    gates."""
    args = made(mode, False, LENGTHS)
    right = on_a_cpu(args)
    slowed(monkeypatch, who, (Walked, "store_wait"))
    monkeypatch.setattr(kernels_hopper, "fits_separate_buffers", lambda *sizes: separate)
    for found, expected in zip(on_a_cpu(args, 1), right, strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)


@pytest.mark.parametrize("separate", [True, False])
def test_the_consumer_goes_on_while_a_state_is_stored(
    separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of dh0 of the first item is held back until the consumer has dht of the second, two seconds
    at most: it gets that far if the states have buffers of their own, and only then."""
    taken = threading.Event()
    seen: list[bool] = []

    def leave(self: Walked, left: int, wait: Any = Walked.store_wait) -> None:
        first = [room for _, _, room in self.stores.begun if room.dtype == torch.float32]
        if first and not seen:
            seen.append(taken.wait(2.0))
        wait(self, left)

    class Watched(Room):
        """The second state that the consumer reads is dht of the second item."""

        states = 0

        def load(self, layout: Any = None) -> Array:
            if self.dtype == torch.float32 and self.shape == [64, 64]:
                Watched.states += 1
                if Watched.states == 2:
                    taken.set()
            return super().load(layout)

    monkeypatch.setattr(Walked, "store_wait", leave)
    monkeypatch.setitem(globals(), "Room", Watched)
    monkeypatch.setattr(kernels_hopper, "fits_separate_buffers", lambda *sizes: separate)
    on_a_cpu(made("ht", False, [64, 64], V=64), 1)
    assert seen == [separate]


def test_states_have_buffers_of_their_own_wherever_a_program_has_several_items() -> None:
    """With K = 256 one has, two have not; without a state there is nothing to share."""
    many, few = kernels_hopper.STAGES_OF_MANY, kernels_hopper.STAGES

    def fits(K: int, stages: int, states: int) -> bool:
        every = [Buffers(K, states, g, gk) for g in (False, True) for gk in (False, True)]
        (found,) = {kernels_hopper.fits_separate_buffers(buffers, stages) for buffers in every}
        return found  # whatever the gates

    assert [fits(K, many[K], 2) for K in (64, 128, 256)] == [True, True, False]
    assert all(fits(K, many[K], 1) for K in many)
    assert not fits(128, 3, 1)
    assert all(fits(K, few[K], 0) for K in many)
