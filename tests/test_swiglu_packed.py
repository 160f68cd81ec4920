"""The class of `swiglu_packed` next to PyTorch's eager code. On a GPU the check compares them. On a CPU
PyTorch rounds the steps of a sigmoid's gradient in fp16 as it does there, which shows where they are."""

import pytest
import torch

from isobit.ops.swiglu.proof import packed
from isobit.spec.compare import same_bits
from isobit.spec.proof import Case, InputOptions


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_class_has_the_bits_of_eager_code_in_fp16(interleaved: bool) -> None:
    options = {"interleaved": interleaved, "clamped": True}
    case = Case({"N": 12, "C": 600}, torch.float16, options=options)
    args = packed.make(case, torch.device("cpu"), InputOptions())
    gate_up = args["gate_up"]
    dout = torch.randn(12, 300, generator=torch.Generator().manual_seed(1)).half()
    eager, exact = packed._eager(args, [dout]), packed.exact(args, [dout])
    usual = ~gate_up.isnan().any(-1)  # the bits of NaN are each library's own
    for name, (_, expected) in exact.items():
        check = same_bits(name, eager[name][usual], expected[usual], "eager")
        assert check.passed, check.message
