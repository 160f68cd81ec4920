"""A check of nothing is not a check that passes."""

from dataclasses import replace

import pytest
import torch

from isobit import ContractError
from isobit.check.cell import FAIL, OK
from isobit.check.laws import LAWS
from isobit.check.runner import DRAWS, Request, run
from isobit.spec.compare import OutputCheck, failure, passed
from isobit.spec.trial import Trial

ONE = Request(ops=("logp",), backends=("reference",), laws=("repeatable",), case="N=7 V=130 fp32 mask=ids")


def test_a_run_that_checks_nothing_is_an_error() -> None:
    with pytest.raises(ContractError, match=r"logp: unknown case 'no such case'; known: .*N=20 V=257"):
        run(Request(ops=("logp",), case="no such case"))
    with pytest.raises(
        ContractError, match=r"nothing was checked: logp reference: .*promises accuracy, not bits"
    ):
        run(Request(ops=("logp",), backends=("reference",), laws=("invariant",)))
    with pytest.raises(ContractError, match=r"nothing was checked: .*: det_gemm takes bf16, fp16"):
        run(Request(ops=("det_gemm",), backends=("model",), laws=("accuracy",), dtypes=(torch.float32,)))


@pytest.mark.parametrize(
    ("shown", "broken", "draws", "status"),
    [(0, False, 1, OK), (2, False, 3, OK), (9, False, DRAWS, FAIL), (9, True, 1, FAIL)],
)
def test_inputs_that_cannot_show_another_order_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch, shown: int, broken: bool, draws: int, status: str
) -> None:
    """And a law that is broken is not tried again, nor one whose controls never change a bit passed."""
    seeds = []

    def law(trial: Trial) -> list[OutputCheck]:
        assert trial.grad_seed == trial.inputs.seed
        seeds.append(trial.inputs.seed)
        silent = len(seeds) <= shown
        control = failure("control", "no bit") if silent else passed("control", "some bits")
        return [failure("logp", "other bits") if broken else passed("logp", "equal bits"), control]

    monkeypatch.setitem(LAWS, "repeatable", replace(LAWS["repeatable"], run=law))
    (cell,) = run(ONE)
    first = ONE.inputs.seed
    assert cell.status == status and seeds == list(range(first, first + draws))
    assert cell.inputs["seed"] == cell.inputs["grad_seed"] == seeds[-1]
