"""The numerics page says what the kernels compute: its numpy model gives their bits, run as it is printed."""

import re
from pathlib import Path

import pytest

from interpreted import in_interpreter

pytestmark = pytest.mark.compat

PAGE = Path(__file__).parents[1] / "docs" / "numerics" / "lse_triton_1.md"

COMPARE = """
import torch, isobit
torch.manual_seed(0)
for V, temperature in ((1, 1.0), (257, 0.7), (1024, 1.0), (1025, 2.5), (16385, 0.7), (50257, 1.0)):
    z = torch.randn(2, V) * 4
    z[1, V // 2 :] = float("-inf")
    ids = torch.tensor([V - 1, 0])
    flags = dict(return_entropy=True, return_lse=True, backend="triton")
    found = isobit.logp(z, ids, temperature=temperature, **flags)
    for i in range(2):
        if V == 1 and i == 1:
            continue  # nothing but -inf in this row
        model = torch.tensor([float(x) for x in row(z[i].numpy(), int(ids[i]), temperature)])
        kernel = torch.stack([x[i] for x in found])
        assert torch.equal(model, kernel), (V, i, model, kernel)
print("equal")
"""

COMPARE_SHARDS = """
import torch, isobit
torch.manual_seed(0)
for V, P, temperature in ((1, 64, 1.0), (500, 640, 0.7), (9000, 9024, 2.5), (133000, 133120, 1.0)):
    z = torch.randn(2, V) * 4
    ids = torch.tensor([V - 1, 0])
    flags = dict(return_entropy=True, return_lse=True, padded_vocab=P, temperature=temperature)
    for backend in ("triton-8x1", "model-8x1"):
        found = isobit.logp(z, ids, backend=backend, **flags)
        for i in range(2):
            model = torch.tensor([float(x) for x in sharded_row(z[i].numpy(), int(ids[i]), P, temperature)])
            kernel = torch.stack([x[i] for x in found])
            assert torch.equal(model, kernel), (V, i, model, kernel)
print("equal")
"""


def printed() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_printed_model_gives_the_bits_of_the_kernels() -> None:
    (model,) = (block for block in printed() if "def row(" in block)
    assert in_interpreter(model + COMPARE).strip() == "equal"


def test_so_does_the_one_of_shards() -> None:
    assert in_interpreter("\n".join(printed()) + COMPARE_SHARDS).strip() == "equal"
