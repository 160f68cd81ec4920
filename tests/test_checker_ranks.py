"""The law `parallel` on layers of ranks that are known to be bad: each must fail, and a correct one must
pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.numerics import chain
from isobit.ops.det_gemm import model, model_tree, sharded
from isobit.ops.rms_norm import sharded as rms_sharded
from isobit.ranks import ordered
from isobit.spec.proofs import proofs

CASE = "B=8 T=2 K=64 N=32 fp32 bias=own operand=fp16 out=fp32"


def cell(
    backend: str = "model-tree8", law: str = "parallel", case: str = CASE, op: str = "det_linear"
) -> Cell:
    request = Request(ops=(op,), backends=(backend,), laws=(law,), device=torch.device("cpu"), case=case)
    (found,) = run(request)
    return found


def test_the_layers_of_isobit_pass() -> None:
    assert cell().status == OK and cell("model").status == OK


def _ring(parts: Tensor, bias: Tensor | None, first: int, columns: int, out_dtype: torch.dtype) -> Tensor:
    """One rank after the other."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return _fold(total[None], bias, first, columns, out_dtype)


_fold = ordered.fold


def _in_16_bits(group: Any, partial: Tensor, *rest: Any) -> Tensor:
    """Partial sums are rounded before they are sent."""
    return ordered.ordered_sum(group, partial.half().float(), *rest)


def _without_leaves(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, leaves: int = 8
) -> Tensor:
    """A rank with some of the leaves computes one chain."""
    return model.product_by(chain, a, b, bias, out_dtype) if leaves < 8 else _product(
        a, b, bias, out_dtype
    )  # fmt: skip


_product = model_tree.product


def _bias_of_every_rank(group: Any, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Each rank adds the bias."""
    return ordered.ordered_sum(group, partial if bias is None else partial + bias.float(), None, dtype)


def _not_reduced(group: Any, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gradient of x is that of this rank's columns."""
    return partial.to(dtype) if bias is None else ordered.ordered_sum(group, partial, bias, dtype)


BAD: dict[str, tuple[Any, str, Callable[..., Tensor], str]] = {
    "ring order": (ordered, "fold", _ring, "a column layer on 4 ranks"),
    "16-bit partial sums": (sharded, "ordered_sum", _in_16_bits, "a column layer on 2 ranks"),
    "chains of ranks": (model_tree, "product", _without_leaves, "a row layer on 2 ranks"),
    "a bias of every rank": (sharded, "ordered_sum", _bias_of_every_rank, "a row layer on 2 ranks"),
    "no sum of dx": (sharded, "ordered_sum", _not_reduced, "a column layer on 2 ranks"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_sums_over_ranks_fail(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, bad, where = BAD[what]
    monkeypatch.setattr(module, name, bad)
    found = cell()
    assert found.status == FAIL and where in found.reason


NORM = {"op": "rms_norm", "backend": "model", "case": "B=1 T=5 H=8 D=24 bf16 random weight=fp32"}


def _own_rows(group: Any, t: Tensor, dim: int) -> Tensor:
    """No rows of other ranks."""
    return t


def _by_ranks(group: Any, t: Tensor, dim: int) -> Tensor:
    """The rows of one rank after those of another, and not head by head."""
    return torch.cat([*group.all_gather(t)], 0)


@pytest.mark.parametrize("bad", [_own_rows, _by_ranks])
def test_a_norm_with_other_rows_in_its_gradient_fails(bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cell(**NORM).status == OK
    monkeypatch.setattr(rms_sharded, "gather_rows", bad)
    found = cell(**NORM)
    assert found.status == FAIL and "gradient:weight" in found.reason


def test_a_bad_sum_over_ranks_breaks_no_other_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "fold", _ring)
    assert cell(law="invariant", case="M=130 K=200 N=104 fp16 bias=own out=fp32").status == OK


#: By op, what its functions of ranks do not take.
NOT_OF_RANKS = {"rms_norm": {"residual"}}


def test_every_option_that_is_declared_is_in_a_case_of_ranks() -> None:
    seen = set()
    for name, proof in proofs().items():
        for own in (proof.of(backend.name) for backend in proof.op.backends):
            if own.shards:
                declared = {option for case in (*own.cases, *own.agree_cases) for option in case.options}
                of_ranks = {option for case in own.shard_cases for option in case.options}
                assert declared - of_ranks <= NOT_OF_RANKS.get(name, set()), name
                seen.add(name)
    assert seen == {"det_linear", "linear_logp", "linear_policy_loss", "logp", "rms_norm"}
