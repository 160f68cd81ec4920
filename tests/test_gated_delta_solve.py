"""The kernel for Hopper that inverts triangular systems, run on a CPU: every bit of T."""

from typing import Any

import numpy as np
import pytest
import torch

from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.ops.gated_delta_rule import kernels_hopper_solve, model
from isobit.ops.gated_delta_rule.kernels_hopper_solve import SYSTEMS, solve
from test_delta_rule_hopper import Room, Walked
from test_gated_delta_hopper import Steps


def on_a_cpu(
    k: torch.Tensor, beta: torch.Tensor, g2: Any, bounds: Any, steps: Any = Steps, normal: Any = None
) -> torch.Tensor:
    def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **options: Any) -> None:
        device = Walked(grid[0], steps)
        scope = device.scope(hopper_pipe, kernels_hopper_solve, reinterpreted=Room.reinterpret)
        for written in (values[3], values[4]):
            written.fill_(7.0)  # what is not stored is not 0 by chance
        constants = (options[name] for name in kernel.arg_names[len(values) :])
        device.run(scope, kernel, (*values, *constants))

    return solve(k, beta, g2, bounds, launch, normal)


def drawn(B: int, T: int, H: int, HV: int, K: int, gated: bool) -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(T)
    k = torch.nn.functional.normalize(torch.randn(B, T, H, K, generator=gen), dim=-1).bfloat16()
    beta = torch.rand(B, T, HV, generator=gen).bfloat16()
    return k, beta, -torch.rand(B, T, HV, generator=gen) if gated else None


def right(k: torch.Tensor, beta: torch.Tensor, g: Any, bounds: Any) -> torch.Tensor:
    args = {"k": k, "beta": beta, "g": g, "cu_seqlens": bounds, "use_qk_l2norm_in_kernel": False}
    with np.errstate(all="ignore"):
        return model.inverses(args, model.CPU)


def sums(g: Any, k: torch.Tensor, bounds: Any) -> Any:
    """g2, as step 1 has it."""
    if g is None:
        return None
    g2 = torch.zeros_like(g)
    for n in model.places(k.shape[0], k.shape[1], bounds):
        for first in range(n.tokens.start, n.tokens.stop, 64):
            here = slice(first, min(first + 64, n.tokens.stop))
            g2[n.batch, here] = torch.from_numpy(model.gates(g[n.batch, here].numpy().T)).T
    return g2


@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "K", "gated", "bounds"),
    [
        (1, 64, 1, 1, 64, True, None),  # one system of four
        (2, 70, 2, 2, 128, True, None),  # heads of their own, a last chunk of 6 rows
        (1, 30, 1, 3, 128, False, None),
        (1, 140, 1, 3, 64, True, [0, 3, 3, 70, 140]),  # packed, with an empty sequence and empty tiles
    ],
)
def test_has_the_bits_of_the_class(
    B: int, T: int, H: int, HV: int, K: int, gated: bool, bounds: list[int] | None
) -> None:
    k, beta, g = drawn(B, T, H, HV, K, gated)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    assert torch.equal(on_a_cpu(k, beta, sums(g, k, cu), cu), right(k, beta, g, cu))


def test_tokens_behind_the_last_bound_are_in_no_sequence() -> None:
    k, beta, _ = drawn(1, 140, 1, 3, 64, False)
    k[:, 70:] = beta[:, 70:] = float("nan")
    cu = torch.tensor([0, 3, 70, 70], dtype=torch.int32)
    found = on_a_cpu(k, beta, None, cu)
    assert torch.equal(found[:, :70], right(k, beta, None, cu)[:, :70]) and bool((found[:, 70:] == 7.0).all())


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_rows(wrong: float) -> None:
    """A row of T has what the class says, and rows before it have the bits that they have without."""
    k, beta, _ = drawn(1, 64, 1, SYSTEMS.value + 1, 64, False)
    beta[0, 40, 2] = wrong
    found, expected = on_a_cpu(k, beta, None, None), right(k, beta, None, None)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_it_shows_a_multiply_add_that_rounds_twice() -> None:
    class Twice(Steps):
        fma = staticmethod(lambda x, y, z: (x * y + z).astype(np.float32))

    k, beta, g = drawn(1, 64, 1, 4, 64, True)
    beta = beta.float() * 8  # large elements, so that some of the differences outlive the rounding to 16 bits
    expected = right(k, beta, g, None)
    assert torch.equal(on_a_cpu(k, beta, sums(g, k, None), None), expected)
    assert not torch.equal(on_a_cpu(k, beta, sums(g, k, None), None, Twice), expected)


@pytest.mark.parametrize(("K", "H", "HV"), [(64, 1, 1), (128, 2, 4), (128, 3, 3)])
def test_divides_rows_by_their_norm(K: int, H: int, HV: int) -> None:
    k, beta, g = drawn(1, 140, H, HV, K, True)
    k, cu = k * 8, torch.tensor([0, 3, 3, 70, 138], dtype=torch.int32)
    k[0, 5] = 0.0
    normal = torch.empty_like(k)
    found = on_a_cpu(k, beta, sums(g, k, cu), cu, normal=normal)
    expected = torch.from_numpy(model.l2norm(k.float().numpy(), torch.bfloat16)).bfloat16()
    assert torch.equal(normal[:, :138], expected[:, :138]) and bool((normal[:, 138:] == 7.0).all())
    assert torch.equal(found[:, :138], right(expected, beta, g, cu)[:, :138])
