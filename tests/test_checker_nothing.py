"""A check of nothing is not a check that passes."""

import pytest
import torch

from isobit import ContractError
from isobit.check.runner import Request, run


def test_a_run_that_checks_nothing_is_an_error() -> None:
    with pytest.raises(ContractError, match=r"logp: unknown case 'no such case'; known: .*N=20 V=257"):
        run(Request(ops=("logp",), case="no such case"))
    with pytest.raises(
        ContractError, match=r"nothing was checked: logp reference: .*promises accuracy, not bits"
    ):
        run(Request(ops=("logp",), backends=("reference",), laws=("invariant",)))
    with pytest.raises(ContractError, match=r"nothing was checked: .*: det_gemm takes bf16, fp16"):
        run(Request(ops=("det_gemm",), backends=("model",), laws=("accuracy",), dtypes=(torch.float32,)))
