"""Class tree8: the Hopper kernels on a CPU, whole, against the model, bit for bit.

Products are computed with the arithmetic of the tensor cores, so a leaf that begins one element too early, a
sum in another order or a part that is added twice changes bits.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gluon_on_a_cpu import Device, Shared, in_order
from isobit.kernels.hopper import descriptors, pipeline, product
from isobit.kernels.hopper.pipeline import gl
from isobit.numerics import chain
from isobit.numerics.trees import tree
from isobit.ops.det_gemm import kernels_hopper, kernels_hopper_tree
from isobit.ops.det_gemm.plans_hopper_tree import Plan
from isobit.ops.det_gemm.plans_hopper_tree import planned as planned_or_none

BF16 = torch.bfloat16


def _steps(a: Any, b: Any, acc: Any, _: Any) -> Any:
    left, right = (torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(BF16) for x in (a, b))
    return chain(left, right, torch.from_numpy(np.ascontiguousarray(acc, dtype=np.float32))).numpy()


class Emulated(Device):
    """Launches both kernels. `launches`: their names and grids."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(product=_steps), 1)
        self.launches: list[tuple[str, int]] = []

    def store_box(self, desc: Any, where: list[Any], buffer: Any) -> None:
        i, j = (int(at) for at in where)
        to, values = desc.tensor, torch.from_numpy(np.array(buffer.value))
        rows, columns = min(len(values), len(to) - i), min(values.shape[1], to.shape[1] - j)
        to[i : i + rows, j : j + columns] = values[:rows, :columns].to(to.dtype)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.programs = grid[0]
        self.launches.append((kernel.fn.__name__, grid[0]))
        scope = self.scope(
            kernels_hopper_tree, kernels_hopper, product, pipeline,
            tma=SimpleNamespace(store_wait=lambda left: None), tma_store=self.store_box,
            gdc_wait=lambda: None, gdc_launch_dependents=lambda: None, reinterpreted=Shared.reinterpret,
        )  # fmt: skip
        self.run(scope, kernel, in_order(kernel, args, options))


def operand(rows: int, columns: int, by_rows: bool, seed: int) -> Tensor:
    """Numbers of many sizes, with rows (or columns) that begin at multiples of 16 bytes; and one row more in
    memory."""
    if not by_rows:
        return operand(columns, rows, True, seed).t()
    gen = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows + 1, -(-columns // 8) * 8, generator=gen)
    return (wide * 2.0 ** torch.randint(-6, 7, wide.shape, generator=gen)).to(BF16)[:rows, :columns]


def multiplied(
    plan: Plan, M: int, N: int, K: int, layout: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch, out_dtype: torch.dtype = torch.float32, bias: bool = False,
) -> tuple[Tensor, Tensor, Emulated]:  # fmt: skip
    """The result of the kernels, and of the model."""
    monkeypatch.setattr(kernels_hopper_tree, "sm_count", lambda device: 3)
    a, b = operand(M, K, layout[0], 1), operand(K, N, not layout[1], 2)
    added = torch.randn(N, generator=torch.Generator().manual_seed(3)) if bias else None
    out, device = torch.full((M, N), torch.nan, dtype=out_dtype), Emulated()
    kernels_hopper_tree._multiply(out, descriptors.matrix(a), descriptors.matrix(b), added, plan, device)
    summed = tree(a, b, leaves=plan.total)
    expected = summed if added is None else summed + added
    return out, expected.to(out_dtype), device


def planned(consumers: int, columns: int, swapped: bool, parts: int, whole: bool | None = None) -> Plan:
    whole = parts == 1 if whole is None else whole
    plan = planned_or_none(consumers, columns, swapped, 4, parts, whole)
    assert plan is not None
    return plan


LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("consumers", "columns", "swapped"), [(1, 80, False), (2, 64, True), (1, 24, True)])
def test_every_part_of_the_tree_has_the_bits_of_the_model(
    consumers: int, columns: int, swapped: bool, parts: int, layout: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Leaves of 24: a group and a half, and less than a step. Sizes that are no multiple of a tile."""
    plan = planned(consumers, columns, swapped, parts)
    ours, model, device = multiplied(plan, 21, 100, 192, layout, monkeypatch, bias=layout[0])
    assert torch.equal(ours, model)
    assert [name for name, _ in device.launches] == ["tree_kernel"] + ["fold_kernel"] * (parts > 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("consumers", "columns", "swapped"), [(1, 80, False), (1, 24, True)])
def test_tiles_that_are_left_over_are_computed_in_parts(
    consumers: int, columns: int, swapped: bool, layout: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three SMs: of 8 and 16 tiles, 6 and 15 are computed whole."""
    plan, bias = planned(consumers, columns, swapped, 4, whole=True), layout[1]
    M, N = (120, 300) if not swapped else (85, 250)
    ours, model, device = multiplied(plan, M, N, 192, layout, monkeypatch, bias=bias)
    assert torch.equal(ours, model)
    tiles = 8 if not swapped else 16
    folded = (tiles - plan.first(tiles, 3)) * consumers * columns // 8 // (2 if columns == 80 else 1)
    assert device.launches == [("tree_kernel", 3), ("fold_kernel", folded)]


@pytest.mark.parametrize("parts", [1, 4])
def test_leaves_of_several_steps(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of 136: two steps of 64 and one of 8; rounded to 16 bits."""
    ours, model, _ = multiplied(
        planned(2, 128, False, parts), 70, 136, 1088, (True, True), monkeypatch, BF16, bias=True
    )
    assert torch.equal(ours, model)


@pytest.mark.parametrize(
    ("leaves", "parts", "whole"), [(2, 1, True), (2, 2, False), (4, 1, True), (4, 2, True), (4, 4, False)]
)
@pytest.mark.parametrize(("consumers", "columns", "swapped"), [(1, 80, False), (1, 24, True)])
def test_the_leaves_of_a_rank_have_the_bits_of_the_model(
    consumers: int, columns: int, swapped: bool, leaves: int, parts: int, whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ranks that share k have 4 or 2 of the eight leaves; 1 is a chain."""
    plan = planned_or_none(consumers, columns, swapped, 4, parts, whole, leaves)
    assert plan is not None
    ours, _, _ = multiplied(plan, 85, 170, 24 * leaves, (True, True), monkeypatch)
    a, b = operand(85, 24 * leaves, True, 1), operand(24 * leaves, 170, False, 2)
    assert torch.equal(ours, tree(a, b, leaves=leaves))


def test_one_chain_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: the inputs can tell the classes apart."""
    ours, _, _ = multiplied(planned(1, 24, True, 8), 21, 100, 192, (True, True), monkeypatch)
    a, b = operand(21, 192, True, 1), operand(192, 100, False, 2)
    assert not torch.equal(ours, chain(a, b))


def _next_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without leaves as a dimension of their own: a step goes on into the next leaf."""
    made = kernels_hopper_tree.leaf_descriptor

    def flat(m: Any, side: int, step: int, leaves: int) -> Any:
        desc, by_k = made(m, side, step, leaves)
        longer = vars(desc) | {"shape": [*desc.shape]}
        longer["shape"][2 if by_k else 1] += step
        desc.__dict__.update(longer)
        return desc, by_k

    monkeypatch.setattr(kernels_hopper_tree, "leaf_descriptor", flat)


def _another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of parts one after the other."""

    def folded(parts: Any, at: Any, size: Any, FIRST: int, COUNT: int) -> Any:
        total = gl.load(parts + at)
        for i in range(1, int(COUNT)):
            total = total + gl.load(parts + i * size + at)
        return total

    monkeypatch.setattr(kernels_hopper_tree, "_folded", SimpleNamespace(fn=folded))


def _pairs_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(total: Any, two: Any, pair: Any, buffer: Any, LAYOUT: Any, LEAVES: int) -> Any:
        return (total if int(pair) == 0 else two + total,) * 2

    monkeypatch.setattr(kernels_hopper_tree, "_fold", SimpleNamespace(fn=fold))


@pytest.mark.parametrize(
    ("broken", "parts"), [(_next_leaf, 8), (_another_tree, 8), (_pairs_in_another_order, 1)]
)
def test_wrong_trees_are_detected(broken: Any, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    descriptors._descriptors.clear()
    ours, model, _ = multiplied(planned(1, 24, True, parts), 21, 100, 192, (True, True), monkeypatch)
    descriptors._descriptors.clear()
    assert not torch.equal(ours, model)
