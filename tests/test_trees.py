"""Class tree8: its definition on the CPU, known answers, and the ops that keep it."""

from pathlib import Path

import pytest
import torch

import isobit
from isobit import ContractError
from isobit.numerics import LEAVES, TREE8, chain, known_numerics
from isobit.numerics.trees import tree

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = pytest.mark.filterwarnings("ignore:isobit. det_gemm, det_linear")


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(bits(x), bits(y))


@pytest.mark.parametrize("K", [8, 72, 192, 1040])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_definition_written_out(K: int, dtype: torch.dtype) -> None:
    a, b = randn(3, K, dtype=dtype), randn(K, 5, dtype=dtype, seed=1)
    n = K // 8
    leaf = [chain(a[:, i * n : (i + 1) * n], b[i * n : (i + 1) * n]) for i in range(8)]
    by_hand = ((leaf[0] + leaf[1]) + (leaf[2] + leaf[3])) + ((leaf[4] + leaf[5]) + (leaf[6] + leaf[7]))
    assert same_bits(tree(a, b), by_hand)
    in_turn = leaf[0]
    for each in leaf[1:]:
        in_turn = in_turn + each
    if K == 1040:  # others: a sum in turn, and one chain
        assert not same_bits(by_hand, in_turn) and not same_bits(by_hand, chain(a, b))


def test_known_answers() -> None:
    """Of numbers that no generator makes: the bits of the class may never change."""
    i = torch.arange(2 * 320).view(2, 320)
    a = ((i * 37 % 101 - 50).float() * 2.0 ** (i * 29 % 23 - 11)).to(BF16)
    b = ((i * 53 % 89 - 44).float() * 2.0 ** (i * 31 % 19 - 9)).to(BF16).t()
    assert bits(tree(a, b)).tolist() == KNOWN
    assert bits(chain(a, b)).tolist() != KNOWN


KNOWN = [[1292841388, -851692387], [-828806617, 1315152730]]


@pytest.mark.parametrize("k", [512, 4096])
def test_the_accuracy_that_the_page_shows(k: int) -> None:
    """docs/numerics/products.md: the columns of tree8."""
    page = (Path(__file__).parent.parent / "docs/numerics/products.md").read_text()
    (shown,) = (line.split("|")[1:-1] for line in page.splitlines() if line.startswith(f"| {k} | 4."))
    for positive, column in ((False, 2), (True, 5)):
        gen = torch.Generator().manual_seed(k)
        a, b = torch.randn(48, k, generator=gen), torch.randn(k, 48, generator=gen)
        a, b = (t.abs().to(BF16) if positive else t.to(BF16) for t in (a, b))
        truth = a.double() @ b.double()
        error = (tree(a, b).double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt()
        assert float(shown[column]) == pytest.approx(float(error), rel=0.03)


def test_special_values() -> None:
    one = torch.ones(1, 64, dtype=BF16)
    assert tree(one[:, :0], one.t()[:0]).item() == 0.0
    assert tree(one, one.t()).item() == 64.0
    infinite = one.clone()
    infinite[0, 3] = torch.inf
    assert tree(infinite, one.t()).item() == torch.inf
    both = infinite.clone()
    both[0, 60] = -torch.inf  # in another leaf
    assert bits(tree(both, one.t())).item() == 0x7FFFFFFF
    with pytest.raises(ContractError, match=r"tree\(a: \[1, 63\] bf16\): K must be a multiple of 8"):
        tree(one[:, :63], one.t()[:63])


def test_a_class_by_name() -> None:
    assert known_numerics("tree8") is TREE8 and LEAVES == 8
    assert isobit.numerics.tree is tree


def test_the_ops_keep_it_forward_and_backward() -> None:
    x, weight, bias = randn(6, 192), randn(40, 192, seed=1), randn(40, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = isobit.det_linear(*leaves, numerics="tree8", out_dtype=F32)
    assert same_bits(y.detach(), tree(x, weight.t()) + bias.float())
    dy = randn(6, 40, seed=3)
    y.backward(dy.float())
    assert leaves[0].grad is not None and same_bits(leaves[0].grad, tree(dy, weight).to(BF16))
    # Sums over tokens are those of every class.
    plain = [t.clone().requires_grad_() for t in (x, weight, bias)]
    isobit.det_linear(*plain, out_dtype=F32).backward(dy.float())
    assert plain[1].grad is not None and leaves[1].grad is not None
    assert same_bits(plain[1].grad, leaves[1].grad)
    a, b = randn(2, 3, 64), randn(2, 64, 8, seed=1)
    c = isobit.det_gemm(a, b, numerics="tree8", out_dtype=F32)
    assert same_bits(c, torch.stack([tree(*pair) for pair in zip(a, b, strict=True)]))


def test_nobody_gets_it_unasked() -> None:
    x, weight = randn(6, 192), randn(40, 192, seed=1)
    assert isobit.explain("det_linear", x, weight).numerics == "chain16"
    assert isobit.explain("det_linear", x, weight, numerics="tree8").backend == "model-tree8"
    assert not same_bits(
        isobit.det_linear(x, weight, out_dtype=F32),
        isobit.det_linear(x, weight, numerics="tree8", out_dtype=F32),
    )


def test_sizes_that_cannot_be_cut() -> None:
    with pytest.raises(ContractError, match="cuts k into 8 equal leaves, and 20 is not a multiple of 8"):
        isobit.det_linear(randn(3, 20), randn(16, 20), numerics="tree8")
    # The gradient of x is a sum over the outputs.
    x = randn(3, 24).requires_grad_()
    y = isobit.det_linear(x, randn(5, 24), numerics="tree8")
    with pytest.raises(ContractError, match="cuts k into 8 equal leaves, and 5 is not a multiple of 8"):
        y.sum().backward()
