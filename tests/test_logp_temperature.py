"""A temperature for every row of `logp`: in the Triton kernels, run by the interpreter, a row has exactly the
bits that a call with its own number gives it, and in the reference what the formula says."""

import itertools
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import ASTSource

import to_ptx
from interpreted import in_interpreter
from isobit.kernels.host.temperature import LOG2E, scaling
from isobit.kernels.triton.temperature import BLOCK, factors_of_rows
from isobit.ops.logp import kernels_triton, reference

NAN = float("nan")

#: Sizes that take one program a row, and one program a split (fewer than 16 rows of several splits).
SHAPES = {"rows": ((2, 4), 9), "splits": ((2, 3), 17000)}


def case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of a call, and gradients of its results. Two rows are masked and have no temperature."""
    lead, V = SHAPES[name]
    gen = torch.Generator().manual_seed(7)
    logits = torch.randn(*lead, V, generator=gen).bfloat16()
    ids, mask = torch.randint(0, V, lead, generator=gen), torch.ones(lead, dtype=torch.bool)
    ids[0, 1], mask[1, 0] = -100, False
    # Columns of a larger tensor, walked the other way round: the strides of an expanded or cut batch.
    temperature = (torch.rand(lead[1], 3 * lead[0], generator=gen) + 0.5)[:, ::3].t()
    temperature[0, 1] = temperature[1, 0] = NAN
    args = {
        "logits": logits,
        "token_ids": ids,
        "mask": mask,
        "temperature": temperature,
        "ignore_index": -100,
    }
    grads = {name: torch.randn(lead, generator=gen) for name in ("dlogp", "dentropy", "dlse")}
    return args, grads


def evaluate(backend: Any, args: dict[str, Any], grads: dict[str, Tensor]) -> list[Tensor]:
    """(logp, entropy, lse, stats, dlogits)."""
    outputs = backend.logp(**args, return_entropy=True, return_lse=True, return_stats=True)
    return [*outputs, backend.logp_bwd(**args, **grads, stats=outputs[3], entropy=outputs[1])]


def by_numbers(args: dict[str, Any], grads: dict[str, Tensor]) -> list[Tensor]:
    """The same row by row, each in a batch as large, with its temperature as a number."""
    each = args["temperature"]
    found: list[Tensor] = []
    for at in itertools.product(*map(range, each.shape)):
        number = 1.0 if each[at].isnan() else float(each[at])
        ours = evaluate(kernels_triton, args | {"temperature": number}, grads)
        found = found or [torch.full_like(x, NAN) for x in ours]
        for whole, part in zip(found, ours, strict=True):
            here = (..., *at, slice(None)) if part.shape == args["logits"].shape else (..., *at)
            whole[here] = part[here]
    return found


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    path: Path = tmp_path_factory.mktemp("interpreted") / "results"
    in_interpreter(Path(__file__), path)
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = torch.load(path)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_bits_of_its_number(
    interpreted: dict[str, tuple[list[Tensor], list[Tensor]]], name: str
) -> None:
    each, numbers = interpreted[name]
    for i, (one, other) in enumerate(zip(each, numbers, strict=True)):
        assert one.isfinite().all(), i  # what a masked row has there reaches nothing
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), i


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_is_near_the_formula(name: str) -> None:
    args, grads = case(name)
    exact = args["logits"].double().requires_grad_()
    expected = reference.formula(**args | {"logits": exact, "temperature": args["temperature"].double()})
    (dlogits,) = torch.autograd.grad(expected, exact, [g.double() for g in grads.values()])
    *outputs, _, found = evaluate(reference, args, grads)
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), dlogits, rtol=2**-7, atol=1e-6)


def test_numbers_are_rounded_once() -> None:
    """fp32 arithmetic would round log2(e) first and its quotient again."""
    t = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.1
    each = scaling(t, 1000)
    numbers = [scaling(float(x), 1) for x in t]
    for name in ("scale", "inverse"):
        found = torch.tensor([getattr(n, name) for n in numbers], dtype=torch.float64).float()
        assert torch.equal(getattr(each, f"{name}s"), found)
    assert not torch.equal(
        each.scales, torch.tensor(numbers[0].scale * float(t[0])).float() / t
    )  # the control
    assert numbers[0].scales is None and numbers[0].inverses is None


@pytest.mark.compat
def test_the_kernel_divides_in_fp64_to_nearest() -> None:
    """As the host does for a number. The interpreter, above, has one division only; a GPU has several."""
    types = {"temperature": "*fp32", "scales": "*fp32", "inverses": "*fp32", "N": "i32", "inner": "i32"}
    types |= {"outer_stride": "i32", "inner_stride": "i32", "LOG2E": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(factors_of_rows, types, {(7,): LOG2E, (8,): BLOCK})
    ptx = to_ptx.compiled(source, {"num_warps": 4}).asm["ptx"]
    divisions = set(re.findall(r"div\.\S*f\d+", ptx))
    assert divisions == {"div.rn.f64"} and "cvt.rn.f32.f64" in ptx
    (bits,) = struct.unpack(">Q", struct.pack(">d", LOG2E))
    assert f"0d{bits:016X}" in ptx  # not rounded to fp32 on its way


if __name__ == "__main__":
    done = {}
    for shape in SHAPES:
        given = case(shape)
        done[shape] = (evaluate(kernels_triton, *given), by_numbers(*given))
    torch.save(done, sys.argv[1])
