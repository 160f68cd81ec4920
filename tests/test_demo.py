"""Guards `isobit demo`: that it learns, repeats itself, fails where it should, and says so on its page."""

import math
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import isobit
from isobit.cli.html import page
from isobit.cli.html.curves import HEIGHT, TOP, Curve, chart
from isobit.cli.html.demo import section
from isobit.cli.main import app
from isobit.demo import run
from isobit.demo.grpo import (
    Config,
    answer_states,
    decode,
    drift,
    is_right,
    make_prompts,
    new_policy,
    policy_loss,
    training_logp,
)
from isobit.demo.policy import ISOBIT, TORCH, Ops, Policy
from isobit.frame.contract import ContractError
from test_pages import Shape

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
#: Seconds on a CPU: one digit is copied.
ONE_DIGIT = Config(steps=44, length=1, layers=1, probe_every=8, exam_strings=40)
TINY = Config(
    steps=2, length=3, prompts=3, samples=2, layers=1, probe_every=1, probe_answers=2, exam_strings=4
)


@pytest.fixture(scope="module")
def learned() -> dict[str, Any]:
    return run.measured(ONE_DIGIT, CPU, False)


def a_policy(config: Config = TINY) -> tuple[Policy, torch.Tensor]:
    gen = torch.Generator().manual_seed(5)
    policy = new_policy(config, CPU)
    with torch.no_grad():
        policy.head.mul_(20)  # far from uniform
    return policy, make_prompts(4, config.length, gen)


def sampled(policy: Policy, ops: Ops, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(6)
    return decode(
        policy, ops, prompts, TINY.length, lambda z, t: torch.multinomial(z.softmax(-1), 1, generator=gen)
    )


# The task and the policy


def test_an_answer_is_the_prompt_backwards() -> None:
    prompts = torch.tensor([[2, 7, 1, 10], [3, 3, 4, 10]])
    found = is_right(prompts, torch.tensor([[1, 7, 2], [4, 4, 3]]))
    assert found.tolist() == [[True, True, True], [True, False, True]]
    made = make_prompts(50, 3, torch.Generator().manual_seed(0))
    assert (
        made.shape == (50, 4)
        and (made[:, 3] == 10).all()
        and made[:, :3].unique().tolist() == list(range(10))
    )


@pytest.mark.parametrize("ops", [TORCH, ISOBIT], ids=lambda ops: ops.name)
@pytest.mark.filterwarnings("ignore:isobit. det_gemm")
def test_decoding_from_the_cache_is_the_forward_of_training(ops: Ops) -> None:
    policy, prompts = a_policy()
    answers, logp = sampled(policy, ops, prompts)
    with torch.no_grad():
        trained = training_logp(policy, ops, prompts, answers)
        hidden = answer_states(policy, ops, prompts, answers).double()
    assert logp.std() > 0.1 and trained.shape == answers.shape == (4, TINY.length)
    torch.testing.assert_close(logp, trained, rtol=0, atol=0 if ops is ISOBIT else 2e-2)
    logits = hidden @ policy.head.detach().bfloat16().double().t()
    truth = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    torch.testing.assert_close(trained.double(), truth, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:isobit. det_gemm")
def test_drift_is_measured_against_what_was_kept_or_decoded_again() -> None:
    assert (ISOBIT.linear, ISOBIT.attention) == (isobit.det_linear, isobit.attention)
    policy, prompts = a_policy()
    answers, logp = sampled(policy, ISOBIT, prompts)
    assert drift(policy, ISOBIT, prompts, answers) == {"max": 0.0, "mean": 0.0}
    assert drift(policy, ISOBIT, prompts[1:2], answers[1:2], logp[1:2]) == {"max": 0.0, "mean": 0.0}
    moved = logp.clone()
    moved[2, 1] += 0.5
    found = drift(policy, ISOBIT, prompts, answers, moved)
    assert found["max"] == pytest.approx(0.5, abs=1e-6) and found["mean"] == pytest.approx(0.5 / 12, abs=1e-7)


@pytest.mark.filterwarnings("ignore:isobit. det_gemm")
def test_both_sets_of_functions_have_the_same_loss_and_gradients() -> None:
    losses, gradients = [], []
    for ops in (TORCH, ISOBIT):
        policy, prompts = a_policy()
        answers, logp = sampled(policy, TORCH, prompts)
        inputs = {
            "old_logp": logp, "ref_logp": logp - 0.1, "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
            "normalizer": answers.numel(), "beta": 0.01, "entropy_coef": 0.02,
        }  # fmt: skip
        loss, stats = policy_loss(policy, ops, prompts, answers, inputs)
        loss.backward()
        assert stats["tokens"] == 12 and {"kl", "entropy", "clip_low", "clip_high"} <= set(stats)
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-2)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999


# Runs


def test_it_learns_from_rewards_and_says_so(learned: dict[str, Any]) -> None:
    assert learned["passed"] and learned["verdict"].startswith("solved: mean reward 0.")
    assert learned["steps"][0]["reward"] < 0.2 and learned["exam"] > 0.9
    assert learned["steps"][0]["entropy"] == pytest.approx(math.log(16), abs=0.05)
    assert learned["steps"][-1]["entropy"] < 1
    assert learned["steps"][0]["kl"] < learned["steps"][-1]["kl"] and any(
        s["clipped"] for s in learned["steps"]
    )
    looked_at = [s["step"] for s in learned["steps"] if "isobit" in s["drift"]]
    assert looked_at == [0, 8, 16, 24, 32, 40] and learned["drift"].endswith(", isobit 0")


def test_two_runs_give_the_same_curve_and_another_seed_another(learned: dict[str, Any]) -> None:
    again = run.measured(replace(ONE_DIGIT, steps=9), CPU, False)["steps"]
    assert again == learned["steps"][:9]
    other = run.measured(replace(ONE_DIGIT, steps=1, seed=1), CPU, False)["steps"]
    assert other[0]["entropy"] != again[0]["entropy"] and other[0]["reward"] != again[0]["reward"]


def test_a_run_restores_global_settings() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with run._repeatable(CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2 and not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(before)


def test_zero_drift_trains_with_isobit_and_measures_torch() -> None:
    report = run.measured(TINY, CPU, True)
    assert [s["drift"]["isobit"] for s in report["steps"]] == [{"max": 0.0, "mean": 0.0}] * 2
    assert all("torch" in s["drift"] for s in report["steps"]) and report["trained_with"] == "isobit"
    assert report["command"] == "isobit demo --device cpu --steps 2 --seed 0 --zero-drift"


def test_drift_of_isobit_fails_the_run(monkeypatch: pytest.MonkeyPatch, learned: dict[str, Any]) -> None:
    def drifted(*args: Any) -> Any:
        yield from [
            s | {"drift": s["drift"] | {"isobit": {"max": 1e-9, "mean": 1e-12}}} for s in learned["steps"]
        ]

    monkeypatch.setattr(run, "train", drifted)
    report = run.measured(ONE_DIGIT, CPU, False)
    assert (
        not report["passed"]
        and "isobit 1.0e-09, which should be 0" in report["drift"]
        and report["verdict"].startswith("solved")
    )
    assert '<p class="fail">decoding against training' in page([report])


def test_a_reward_that_was_high_from_the_start_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, learned: dict[str, Any]
) -> None:
    monkeypatch.setattr(run, "train", lambda *args: iter(learned["steps"][-5:]))
    report = run.measured(ONE_DIGIT, CPU, False)
    assert not report["passed"] and report["verdict"].startswith("NOT SOLVED")


# The command


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(run, "Config", lambda: TINY)
    return lambda *args: CliRunner().invoke(app, ["demo", "--html", str(tmp_path / "x.html"), *args])


def test_an_unsolved_run_exits_with_1_and_still_writes_its_page(
    demo: Callable[..., Any], tmp_path: Path
) -> None:
    done = demo("--device", "cpu", "--steps", "1")
    assert done.exit_code == 1 and "NOT SOLVED" in done.output and "step   1 of 1" in done.output
    text = (tmp_path / "x.html").read_text()
    assert '<p class="fail">NOT SOLVED' in text and "isobit demo --device cpu --steps 1 --seed 0" in text


def test_training_with_isobit_on_a_cpu_is_cut_down(
    demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(run, "measured", lambda config, *args: seen.append(config))
    for args in ((), ("--zero-drift",), ("--zero-drift", "--steps", "7")):
        demo("--device", "cpu", *args)
    assert [(c.steps, c.length, c.layers) for c in seen] == [(2, 3, 1), (50, 2, 1), (7, 2, 1)]
    assert [(c.probe_every, c.probe_answers) for c in seen] == [(1, 2), (1, 6), (1, 6)]


def test_a_solved_run_exits_with_0(
    demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, learned: dict[str, Any]
) -> None:
    monkeypatch.setattr(run, "measured", lambda *args: learned)
    assert demo("--device", "cpu").exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--steps", "0"), "--steps 0: at least 1"),
        (("--seed", "-1"), "--seed -1: outside"),
        (("--device", "meta"), "'meta' computes nothing"),
        (("--html", "/dev/null/x.html"), "--html /dev/null/x.html: no folder /dev/null"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, args: tuple[str, str], message: str
) -> None:
    monkeypatch.setattr(run, "measured", lambda *args: pytest.fail("it ran"))
    done = demo(*args)
    assert isinstance(done.exception, ContractError) and message in str(done.exception)


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"step": i, "reward": 0.5, "entropy": 1.0} for i in range(15)]
    for record in records:
        run._show_progress(record, 15)
    assert capsys.readouterr().out.count("\n") == 15
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for record in records:
        run._show_progress(record, 15)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("\r[##....") and f"[{30 * '#'}] step  15 of 15" in out


def test_make_and_the_example_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "$(BIN)/isobit demo" in (ROOT / "Makefile").read_text()
    solved = runpy.run_path(str(ROOT / "examples" / "grpo_demo.py"))["main"](steps=1)
    assert 0 <= solved < 0.2 and "step  0: reward 0.0" in capsys.readouterr().out


# The page


def test_the_page_has_every_curve_and_fetches_nothing(learned: dict[str, Any]) -> None:
    text = page([learned], "isobit demo")
    shape = Shape(text)
    assert shape.open == [] and shape.fetched == [] and text.count("<svg") == 5
    for title in ("Reward", "KL", "Clip fraction", "Entropy", "Rollout against training"):
        assert f"<h3>{title}</h3>" in text
    assert '<p class="ok">solved' in text and learned["stamp"]["torch"] in text
    assert "With isobit it is exactly 0 over 6 steps" in text
    largest = max(s["drift"]["torch"]["max"] for s in learned["steps"])
    assert f"With PyTorch it is up to {largest:.1e} over 44 steps, in training" in text


def test_each_curve_has_the_numbers_of_its_own_name(learned: dict[str, Any]) -> None:
    found = section(learned)["charts"]
    for one, key in zip(found, ("reward", "kl", "clipped", "entropy"), strict=True):
        points = [(s["step"], s[key]) for s in learned["steps"]]
        drawn = chart([Curve("x", points)], "x").split('d="M')
        assert max(drawn, key=len).split('"')[0] in one["svg"], key


def test_larger_is_higher_and_0_has_a_line_of_its_own_below_the_decades() -> None:
    def heights(log: bool, *values: float) -> list[float]:
        drawn = chart([Curve("<a>", list(enumerate(values)), dotted=True)], "u", log)
        assert "&lt;a&gt;" in drawn and "<a>" not in drawn
        return [float(part.split('"')[0]) for part in drawn.split('cy="')[1:]]

    assert heights(False, 0.0, 0.5, 1.0) == [TOP + HEIGHT, TOP + HEIGHT / 2, TOP]
    zero, small, middle, large = heights(True, 0.0, 1e-8, 1e-6, 1e-4)
    assert (
        zero == TOP + HEIGHT > small + 20
        and large == TOP
        and middle == pytest.approx((small + large) / 2, abs=0.1)
    )
    assert heights(True, 0.0, 0.0) == [TOP + HEIGHT] * 2 and heights(False, 0.0) == [TOP + HEIGHT]
