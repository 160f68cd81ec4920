"""FSDP2: a model sharded over two processes, on a CPU, gives what the whole model gives.
`fsdp_on_two_cpus.py` runs them; one run serves all tests here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent

HEADS = (
    "with the root", "on its own", "with the norm", "with a root that is sharded between",
    "on its own, kept", "tied, with the root",
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "tests" / "fsdp_on_two_cpus.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2
    return found


@pytest.mark.parametrize("head", HEADS)
def test_log_probabilities_and_gradients_are_those_of_the_whole_model(ranks: Any, head: str) -> None:
    for rank in ranks:
        assert len(rank[head]) == 4 and max(rank[head]) <= 1e-5


def test_parameters_that_are_cast_to_bf16_are_served_so(ranks: Any) -> None:
    for rank in ranks:
        assert 1e-5 < max(rank["in bf16"]) < 0.05


@pytest.mark.parametrize("head", ["root", "own", "group"])
@pytest.mark.parametrize("how", ["linear_logp", "loss", "seam"])
def test_a_loop_of_ones_own_goes_through_in_forward(ranks: Any, how: str, head: str) -> None:
    """Also for `linear_policy_loss`, and for the replacements inside of TRL and verl."""
    assert all(max(rank[f"{how}, {head}"]) <= 1e-5 for rank in ranks)


@pytest.mark.parametrize("head", ["root", "own"])
@pytest.mark.parametrize("first", ["swap", "shard"])
def test_swapped_layers_have_the_bits_of_the_whole_model(ranks: Any, first: str, head: str) -> None:
    for rank in ranks:
        found = rank[f"{first} first, {head}"]
        # Gradients are in bf16, of two ranks that are added.
        assert found["bits"] and found["gradients"] <= 0.01 and found["undone"]


@pytest.mark.parametrize(
    ("case", "argument"),
    [
        ("hidden", "linear_logp(hidden: [3, 16] fp32)"),
        ("layer", "det_linear(x: [3, 16] bf16)"),
    ],
)
def test_other_dtensors_are_refused_in_one_sentence(ranks: Any, case: str, argument: str) -> None:
    for rank in ranks:
        assert rank["refusals"][case] == (
            f"{argument}: is a DTensor; pass its local part (.to_local()) or the whole of it "
            "(.full_tensor()), or, for a parameter that FSDP2 has sharded, call this through "
            "isobit.nn.in_forward"
        )


@pytest.mark.parametrize("case", ["weight", "padded", "class", "loss", "loss of a class"])
def test_a_head_that_fsdp_has_cut_is_no_shared_vocabulary(ranks: Any, case: str) -> None:
    """Each rank has tokens of its own: their states must never be merged."""
    what = "linear_policy_loss" if case.startswith("loss") else "linear_logp"
    for rank in ranks:
        assert rank["refusals"][case].startswith(
            f"{what}(weight: DTensor [53, 16] fp32): is cut over 2 ranks"
        )
        assert "call this there, or through isobit.nn.in_forward" in rank["refusals"][case]


def test_a_group_of_ranks_with_other_tokens_is_an_error_on_each_of_them(ranks: Any) -> None:
    for rank in ranks:
        for case in ("other tokens", "other states"):
            assert "the ranks of the group do not make the same call" in rank["refusals"][case]
        assert "bits of token_ids: " in rank["refusals"]["other tokens"]


def test_logits_that_are_not_cut_by_columns_are_refused(ranks: Any) -> None:
    for rank in ranks:
        assert rank["refusals"]["logits"] == (
            "logp(logits: placements (Replicate(),)): must be cut by columns, (Shard(-1),); or pass "
            ".full_tensor()"
        )


def test_a_policy_that_would_round_log_probabilities_is_refused(ranks: Any) -> None:
    for rank in ranks:
        assert rank["rounded"].endswith("would round log-probabilities; make it None")
