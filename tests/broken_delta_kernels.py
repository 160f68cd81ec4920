"""The Triton kernels of the gated delta rule with one thing wrong in each run, in Triton's interpreter: a
program.

    TRITON_INTERPRET=1 python tests/broken_delta_kernels.py FAULT LAW CASE...

It prints JSON: the status of each cell; and how many elements of the inverse, in fp32, differ from the
model's, with the kernels as they are and with a multiply-add that rounds twice. That the kernels as they are
pass in these cases is shown by the check itself.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton

from isobit.check.interpreter import quick_interpreter
from isobit.check.runner import Request, run
from isobit.frame.launch import run as run_kernel
from isobit.numerics import cpu_steps
from isobit.ops.gated_delta_rule import kernels_triton as kernels
from isobit.ops.gated_delta_rule import model

product = kernels.product


@triton.jit
def spilled(left, right, acc, rows):  # type: ignore[no-untyped-def]
    """Multiplies the zeros of a triangle by later rows, whatever these hold."""
    return product(left, right, acc)


def rounded_twice(x: Any, y: Any, z: Any) -> Any:
    """A multiply-add of the substitution that is not fused."""
    return x * y + z


def descending(left: Any, right: Any, acc: Any) -> Any:
    """Groups of 16 from the last one back, where there are several."""
    acc = acc + 0.0
    a, b = (t.to(kernels.tl.float32).handle.data for t in (left, right))
    for first in reversed(range(0, a.shape[1], 16)):
        part = slice(first, first + 16)
        acc.handle.data[...] = cpu_steps.product(a[:, part], b[part], acc.handle.data)
    return acc


#: By fault: what replaces a name of the kernels' module.
FAULTS = {
    "spilled": ("triangular", spilled),
    "rounded twice": ("fma", rounded_twice),
    "descending": ("product", descending),
}


@contextmanager
def broken(fault: str) -> Iterator[None]:
    name, wrong = FAULTS[fault]
    right = getattr(kernels, name)
    setattr(kernels, name, wrong)
    try:
        yield
    finally:
        setattr(kernels, name, right)


def status(law: str, case: str) -> str:
    request = Request(
        ops=("gated_delta_rule",), backends=("triton",), laws=(law,), device=torch.device("cpu"), case=case
    )
    (cell,) = run(request)
    return cell.status


def other_elements_of_the_inverse() -> int:
    """How many elements of T in fp32 differ from the model's. Rounding to 16 bits hides most."""
    gen = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 64, 1, 16, generator=gen), dim=-1).bfloat16()
    beta, taken = torch.rand(1, 64, 1, generator=gen), []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        run_kernel(kernel, grid, *args, **options)
        taken.append(args[5])  # what a program keeps of its own: T at the end

    with quick_interpreter():
        kernels.prepare(k, k, beta, None, None, launch=launch)
    own_k, own_beta = k[:, :, 0].float().numpy(), beta[:, :, 0].numpy()
    A = model.system(own_k, own_beta, np.zeros_like(own_beta), model.CPU, k.dtype)
    expected = torch.from_numpy(model.inverse(A, model.CPU))
    return int((taken[0] != expected).sum())


def main(*given: str) -> None:
    statuses = []
    for fault, law, case in zip(given[::3], given[1::3], given[2::3], strict=True):
        with broken(fault):
            statuses.append(status(law, case))
    right = other_elements_of_the_inverse()
    with broken("rounded twice"):
        wrong = other_elements_of_the_inverse()
    print(json.dumps({"statuses": statuses, "inverse": [right, wrong]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
