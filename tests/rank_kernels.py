"""The Triton kernels of ranks in the interpreter: a program. It prints the number of comparisons."""

import torch

from isobit.frame.op import OPS
from isobit.kernels.triton.tree_fold import fold
from isobit.numerics import canonical

BF16 = torch.bfloat16


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


compared = 0
gen = torch.Generator().manual_seed(0)
for ranks in (1, 2, 4, 8):
    for count, first, dtype in ((1500, 0, BF16), (70, 31, torch.float16), (3, 5, torch.float32)):
        parts = torch.randn(ranks, count, generator=gen) * torch.exp2(torch.arange(count) % 9 - 4)
        bias = torch.randn(13, generator=gen)
        column = (first + torch.arange(count)) % 13
        assert torch.equal(fold(parts, bias, first, 13, dtype), (tree([*parts]) + bias[column]).to(dtype))
        assert torch.equal(fold(parts, None, first, 13, dtype), tree([*parts]).to(dtype))
        if ranks == 8 and count == 1500:
            ring = parts[0].clone()
            for part in parts[1:]:
                ring += part
            assert not torch.equal(tree([*parts]), ring)  # or equal bits would prove nothing
        compared += 2

a, b = torch.randn(5, 320, generator=gen).to(BF16), torch.randn(320, 19, generator=gen).to(BF16)
subtree = OPS["det_gemm_subtree"]
whole = OPS["det_gemm"](a=a, b=b, out_dtype=torch.float32, backend="triton-tree8")
for ranks in (1, 2, 4, 8):
    own = 320 // ranks
    sums = [
        subtree(a=a[:, i : i + own], b=b[i : i + own], leaves=8 // ranks, backend="triton-tree8")
        for i in range(0, 320, own)
    ]
    assert torch.equal(tree(sums), whole) and canonical(whole.clone()).equal(whole)
    compared += 1
print(compared)
