"""The kernel of one token for Hopper run on a CPU, against the numpy model."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gluon_on_a_cpu import F32, Array, Device, Pointer, array, in_order
from isobit import DeltaState
from isobit.numerics import cpu_steps
from isobit.ops.gated_delta_rule_step import kernels_hopper, model
from isobit.ops.gated_delta_rule_step.kernels_hopper_keep import keep_kernel
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

    def async_copy_global_to_shared(self, to: Piece, source: Pointer, mask: Any) -> None:
        assert np.shape(source.at) == to.data.shape
        self.open.append((to, source, mask))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left:
            for to, source, mask in self.groups.pop(0):
                to.store(self.load(source, mask=mask, other=0))


def keep(
    new_k: Tensor, new_gates: Tensor, place: Tensor, slots: Tensor | None, lengths: Tensor | None,
    k_rows: Tensor, gate_rows: Tensor, halves: int,
) -> None:  # fmt: skip
    """As `keep_kernel` does."""
    for b in range(len(new_k)):
        slot = b if slots is None else int(slots[b])
        if not 0 <= slot < len(place) or (lengths is not None and lengths[b] <= 0):
            continue
        rows, chunks = place[slot, :2].tolist()
        if rows == 64:
            rows, chunks = 0, chunks + 1
            place[slot, 1:3] = torch.tensor([chunks, chunks + 1 - halves])
        place[slot, 0] = rows + 1
        half = chunks & (halves - 1)
        k_rows[slot, half, :, rows], gate_rows[slot, half, :, rows] = new_k[b], new_gates[b]


def on_a_cpu(args: dict[str, Any]) -> Tensor:
    device = Device(Steps, 1)
    language = device.language()
    language.allocate_shared_memory = lambda dtype, shape, layout: Piece(
        np.full([int(n) for n in shape], np.nan, F32), dtype
    )
    language.sqrt_rn = lambda x: array(np.sqrt(x))

    def product(a: Any, b: Any, acc: Any) -> Array:
        return array(Steps.product(np.asarray(a), np.asarray(b), np.asarray(acc)))

    copies = Copies(language.load)
    scope = device.scope(
        kernels_hopper, gl=language, async_copy=copies, mma_v2=product, reinterpreted=Piece.reinterpret,
        by_row=lambda columns: None,
    )  # fmt: skip

    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        if kernel is kernels_hopper.token_kernel:
            device.programs = grid[0]
            device.run(scope, kernel, in_order(kernel, values, options))
            assert not copies.open and not copies.groups
        else:
            assert kernel is keep_kernel
            keep(*values[:7], options["HALVES"])

    out = torch.full(args["v"].shape, np.nan, dtype=args["v"].dtype)
    return kernels_hopper.token(args, out, launch)


def made(
    at: list[int], HV: int, K: int, V: int, dtype: torch.dtype, seeded: bool, drafts: bool, **rest: Any
) -> dict[str, Any]:
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

    options = {
        "scale": 0.3,
        "slots": torch.arange(B, 0, -1),
        "use_qk_l2norm_in_kernel": True,
    } | state.tensors()
    model.rows(**tokens(max(at)), lengths=torch.tensor(at), **options)
    return tokens(1) | options | {"lengths": None} | rest


@pytest.mark.parametrize(
    ("K", "V", "dtype", "seeded", "drafts"),
    [
        (64, 64, torch.bfloat16, False, False),
        (128, 64, torch.float16, True, True),
        (256, 64, torch.bfloat16, True, False),
    ],
)
def test_has_the_bits_of_the_class(K: int, V: int, dtype: torch.dtype, seeded: bool, drafts: bool) -> None:
    args = made([0, 1, 16, 37, 63, 64, 100, 128], 2, K, V, dtype, seeded, drafts)
    own = args | {name: args[name].clone() for name in TENSORS}
    right = model.rows(**args)
    assert torch.equal(on_a_cpu(own), right)
    for name in TENSORS:
        assert torch.equal(own[name].nan_to_num(7.0), args[name].nan_to_num(7.0)), name
