"""Guards `group_advantages`: rewards worked out by hand, rewards on which naive formulas lose accuracy, and
boundaries."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isobit import ContractError, explain, group_advantages
from isobit.frame.op import OPS
from isobit.ops.grpo_loss import groups, reference

F16, F32, F64 = torch.float16, torch.float32, torch.float64


def by_hand(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """One group, in Python's fractions."""
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(r - mean) / max(std, eps) for r in rewards]


def test_worked_out_by_hand() -> None:
    # mean 2, deviations -1, 0, 0, 1: std sqrt(1/2); mean 0, std 3.
    rewards = torch.tensor([1.0, 2.0, 2.0, 3.0, 3.0, -3.0])
    found = group_advantages(rewards, group_boundaries=[0, 4, 6])
    root = math.sqrt(2)
    assert torch.equal(found, torch.tensor([-root, 0.0, 0.0, root, 1.0, -1.0]))
    plain = group_advantages(rewards, group_boundaries=[0, 4, 6], scale=False)
    assert torch.equal(plain, torch.tensor([-1.0, 0.0, 0.0, 1.0, 3.0, -3.0]))


@pytest.mark.parametrize("value", [0.1, 1000.1, -3e30, 0.0])
@pytest.mark.parametrize("n", [1, 6, 8, 1500])
def test_equal_rewards_have_exactly_no_advantage(value: float, n: int) -> None:
    for scale in (True, False):
        found = group_advantages(torch.full((2 * n,), value), samples_per_prompt=n, scale=scale)
        assert torch.equal(found, torch.zeros(2 * n))


@pytest.mark.parametrize("first", [1000.0, 1e4, -1e6])
def test_rewards_that_are_large_beside_their_differences_lose_nothing(first: float) -> None:
    rewards = first + 0.5 * torch.arange(4)
    expected = torch.tensor(by_hand([0.0, 0.5, 1.0, 1.5]))
    torch.testing.assert_close(group_advantages(rewards, samples_per_prompt=4), expected, rtol=2e-7, atol=0)


def test_rewards_near_1000_that_differ_by_hundredths() -> None:
    """What fp32 holds of 1000.00 to 1000.03, and not what naive fp32 makes of it."""
    rewards = torch.tensor([1000.00, 1000.01, 1000.02, 1000.03])
    expected = torch.tensor(by_hand(rewards.tolist()))
    found = group_advantages(rewards, samples_per_prompt=4)
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
    torch.testing.assert_close(found, torch.tensor([-1.342, -0.447, 0.447, 1.342]), rtol=0, atol=2e-3)


def test_eps_is_the_least_standard_deviation() -> None:
    rewards = torch.tensor([0.0, 2e-7], dtype=F64)
    found = group_advantages(rewards, samples_per_prompt=2)
    torch.testing.assert_close(found, torch.tensor([-0.1, 0.1], dtype=F64))
    wider = group_advantages(torch.tensor([0.0, 2.0]), samples_per_prompt=2, eps=4.0)
    assert torch.equal(wider, torch.tensor([-0.25, 0.25]))


def test_trl_and_verl_differ_by_the_documented_factor() -> None:
    """They divide by the standard deviation of the sample, plus an eps of 1e-4 and 1e-6."""
    n, rewards = 5, torch.randn(5, dtype=F64, generator=torch.Generator().manual_seed(0))
    theirs = (rewards - rewards.mean()) / (rewards.std() + 1e-12)
    ours = group_advantages(rewards, samples_per_prompt=n)
    torch.testing.assert_close(theirs, ours * math.sqrt((n - 1) / n), rtol=1e-9, atol=0)


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 1025])
def test_groups_of_any_size(n: int) -> None:
    rewards = torch.randn(2 * n, dtype=F64, generator=torch.Generator().manual_seed(n)).to(F32)
    expected = [by_hand(part.tolist()) for part in rewards.split(n)]
    found = group_advantages(rewards, samples_per_prompt=n)
    torch.testing.assert_close(found, torch.tensor(expected).flatten(), rtol=1e-6, atol=1e-7)
    as_list = group_advantages(rewards, group_boundaries=[0, n, 2 * n])
    as_tensor = group_advantages(rewards, group_boundaries=torch.tensor([0, n, 2 * n], dtype=torch.int32))
    assert torch.equal(found, as_list) and torch.equal(found, as_tensor)


def test_nan_stays_within_its_group() -> None:
    rewards = torch.tensor([1.0, 0.0, float("nan"), 1.0, float("inf"), 1.0, 3.0, 1.0])
    found = group_advantages(rewards, samples_per_prompt=2)
    assert found[2:6].isnan().all() and torch.equal(found[[0, 1, 6, 7]], torch.tensor([1.0, -1.0, 1.0, -1.0]))


def test_rewards_whose_squares_overflow() -> None:
    """Their standard deviation was inf, and all advantages 0."""
    rewards = torch.tensor([1e300, -1e300, 1.7e308, -1.7e308, 5.0, 3.0], dtype=F64)
    assert group_advantages(rewards, samples_per_prompt=2).tolist() == [1, -1, 1, -1, 1, -1]
    assert torch.equal(
        group_advantages(rewards, group_boundaries=[0, 2, 4, 6], scale=False),
        torch.tensor([1e300, -1e300, 1.7e308, -1.7e308, 1.0, -1.0], dtype=F64),
    )
    assert torch.equal(reference.advantages_formula(rewards, 2)[0].sign(), rewards.sub(4).sign())


def test_rewards_that_are_not_finite_are_reported_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for bad in (float("nan"), float("inf")):
        rewards = torch.tensor([1.0, 0.0, 7.0, 1.0, bad, 1.0])
        told = rf"^group_advantages\(rewards: \[6\] fp32\): \[4\] is {bad}, so .* group 1, sequences 2 to 5$"
        with pytest.raises(ContractError, match=told):
            group_advantages(rewards, group_boundaries=[0, 2, 6], validate=True)
        with pytest.raises(ContractError, match=r"group 2, sequences 4 to 5$"):
            group_advantages(rewards, samples_per_prompt=2, validate=True)
        for validate in (None, False):  # it stays in its group: see above
            assert group_advantages(rewards, group_boundaries=[0, 2, 6], validate=validate).isnan().sum() == 4
        with monkeypatch.context() as environment:
            environment.setenv("ISOBIT_VALIDATE", "1")
            with pytest.raises(ContractError, match=told):
                group_advantages(rewards, group_boundaries=[0, 2, 6])


@pytest.mark.parametrize("dtype", [torch.bfloat16, F16, F32, F64])
def test_result_dtypes_and_empty_rewards(dtype: torch.dtype) -> None:
    wide = F64 if dtype == F64 else F32
    assert group_advantages(torch.ones(4, dtype=dtype), samples_per_prompt=2).dtype == wide
    empty = group_advantages(torch.ones(0, dtype=dtype), samples_per_prompt=2)
    assert empty.shape == (0,) and empty.dtype == wide
    assert group_advantages(torch.ones(0, dtype=dtype), group_boundaries=[0]).shape == (0,)


# Boundaries

WRONG: dict[str, tuple[list[int], str]] = {
    "begin": ([1, 4], "must begin with 0, not 1"),
    "end": ([0, 3], "must end with the number of sequences, 4, not 3"),
    "too far": ([0, 2, 6], "must end with the number of sequences, 4, not 6"),
    "equal": ([0, 2, 2, 4], "must ascend: [1]=2, [2]=2"),
    "descend": ([0, 3, 1, 4], "must ascend: [1]=3, [2]=1"),
    "one": ([0], "must end with the number of sequences, 4, not 0"),
    "none": ([], "must begin with 0"),
}


@pytest.mark.parametrize("validate", [None, True, False])
@pytest.mark.parametrize("name", WRONG)
def test_lists_and_tensors_on_the_cpu_are_always_checked(name: str, validate: bool | None) -> None:
    bounds, rule = WRONG[name]
    for given in (bounds, tuple(bounds), *([torch.tensor(bounds)] if bounds else [])):
        with pytest.raises(ContractError) as error:
            group_advantages(torch.ones(4), group_boundaries=given, validate=validate)
        assert str(error.value).startswith("group_advantages(group_boundaries: ") and rule in str(error.value)


@pytest.mark.parametrize("name", [name for name in WRONG if name != "none"])
def test_wrong_boundaries_that_nobody_checks_make_everything_nan(name: str) -> None:
    """As on a GPU: the op itself, without what the function reads first."""
    bounds = torch.tensor(WRONG[name][0])
    found = OPS["group_advantages"](rewards=torch.ones(4), group_boundaries=bounds, validate=False)
    assert found.shape == (4,) and found.isnan().all()


def test_boundaries_on_a_device_are_not_read() -> None:
    """Nor moved. A tensor without memory could not be."""
    given = {"rewards": torch.ones(4, device="meta"), "group_boundaries": torch.ones(3, device="meta").long()}
    assert groups.adapted(OPS["group_advantages"].contract, given) is given


@pytest.mark.parametrize(
    ("arg", "args"),
    [
        ("samples_per_prompt", {}),
        ("samples_per_prompt", {"samples_per_prompt": 3}),
        ("samples_per_prompt", {"samples_per_prompt": 0}),
        ("samples_per_prompt", {"samples_per_prompt": -2}),
        ("samples_per_prompt", {"samples_per_prompt": 2.0}),
        ("group_boundaries", {"samples_per_prompt": 2, "group_boundaries": [0, 4]}),
        ("group_boundaries", {"group_boundaries": [0, 2.0, 4]}),
        ("group_boundaries", {"group_boundaries": [0, True, 4]}),
        ("group_boundaries", {"group_boundaries": {0, 4}}),
        ("group_boundaries", {"group_boundaries": torch.tensor([0.0, 4.0])}),
        ("group_boundaries", {"group_boundaries": torch.tensor([[0, 4]])}),
        ("group_boundaries", {"group_boundaries": [0, 2**64]}),
        ("group_boundaries", {"group_boundaries": [0, -(2**70), 4]}),
        ("group_boundaries", {"group_boundaries": np.array([0.0, 4.0])}),
        ("group_boundaries", {"group_boundaries": np.array([[0, 4]])}),
        ("group_boundaries", {"group_boundaries": np.int64(4)}),
        ("group_boundaries", {"group_boundaries": "04"}),
        ("eps", {"samples_per_prompt": 2, "eps": 0.0}),
        ("eps", {"samples_per_prompt": 2, "eps": float("nan")}),
    ],
)
def test_a_wrong_call_names_the_argument(arg: str, args: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=rf"^group_advantages\({arg}: "):
        group_advantages(torch.ones(4), **args)


def test_boundaries_may_be_numbers_of_numpy() -> None:
    """[0, *np.cumsum(lengths)] is the usual way to make them."""
    rewards = torch.tensor([1.0, 0.0, 7.0, 6.0, 5.0])
    expected = group_advantages(rewards, group_boundaries=[0, 2, 5])
    ends = np.cumsum([2, 3])
    for given in (
        [0, *ends],
        (0, *ends),
        np.array([0, *ends]),
        np.array([0, *ends], np.uint8),
        [*torch.tensor([0, 2, 5])],
    ):
        assert torch.equal(group_advantages(rewards, group_boundaries=given), expected)
    with pytest.raises(ContractError, match="must end with the number of sequences, 5, not 4"):
        group_advantages(rewards, group_boundaries=np.array([0, 4]))
    with pytest.raises(
        ContractError, match=r"rewards: array.* must be a tensor, not ndarray; torch.from_numpy"
    ):
        group_advantages(rewards.numpy(), samples_per_prompt=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("rewards", [torch.ones(4).int(), torch.ones(2, 2), [1.0, 2.0]])
def test_rewards_are_one_line_of_floating_point_numbers(rewards: Any) -> None:
    with pytest.raises(ContractError, match=r"^group_advantages\(rewards: "):
        group_advantages(rewards, samples_per_prompt=2)
    with pytest.raises(ContractError, match=r"^group_advantages\(rewards: "):
        group_advantages(rewards, group_boundaries=[0, 4] if len(rewards) == 4 else [0, 2])


def test_explain_takes_what_the_function_takes() -> None:
    assert explain("group_advantages", torch.ones(4), group_boundaries=[0, 1, 4]).backend == "reference"


def test_rewards_get_no_gradient_and_say_so() -> None:
    rewards: Tensor = torch.ones(4, requires_grad=True)
    found = group_advantages(rewards, samples_per_prompt=2)
    with pytest.raises(RuntimeError, match="rewards are numbers"):
        found.sum().backward()
