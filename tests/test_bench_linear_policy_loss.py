"""The rivals of `linear_policy_loss`: TRL's kernels are loaded without TRL, and compute the same."""

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch

import isobit
from isobit.ops.linear_policy_loss import rivals
from isobit.spec.proof import Case
from policy_loss_calls import make

ROOT = Path(__file__).resolve().parents[1]
CASE, GPU = Case({"N": 8, "D": 4, "V": 9}, torch.bfloat16), torch.device("cuda")


@pytest.fixture(autouse=True)
def loaded_anew() -> Iterator[None]:
    rivals._trl_kernels.cache_clear()
    yield
    rivals._trl_kernels.cache_clear()
    for name in [name for name in sys.modules if name.startswith("isobit_without_trl")]:
        del sys.modules[name]


def reason() -> str | None:
    return rivals._needs_trl(CASE, GPU)


def test_kernels_of_trl_need_none_of_its_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [str(place) for place in (ROOT / ".parity").glob("lib/python*/site-packages")]
    assert places, "run `make parity` first"
    monkeypatch.setattr(rivals, "find_spec", lambda name: PathFinder.find_spec(name, places))
    assert reason() is None
    hidden, weight, ids = make(12)
    ours = isobit.linear_logp(hidden, weight, ids)
    theirs = rivals._trl({"hidden": hidden, "weight": weight, "token_ids": ids})
    torch.testing.assert_close(theirs, ours)
    found, expected = (torch.autograd.grad(logp.square().sum(), (hidden, weight)) for logp in (theirs, ours))
    torch.testing.assert_close(found, expected)
    assert not {"trl", "datasets"} & sys.modules.keys()


def test_a_reason_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def installed(text: str | None) -> Any:
        (tmp_path / "trl" / "kernels").mkdir(parents=True, exist_ok=True)
        (tmp_path / "trl" / "__init__.py").touch()
        if text is not None:
            (tmp_path / "trl" / "kernels" / "chunked_logprob.py").write_text(text)
        return lambda name: PathFinder.find_spec(name, [str(tmp_path)])

    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    assert reason() == "not installed"
    monkeypatch.setattr(rivals, "find_spec", installed(None))
    assert "this TRL has no " in (reason() or "")
    monkeypatch.setattr(rivals, "find_spec", installed("import no_such_package"))
    assert "No module named 'no_such_package'" in (reason() or "")
    assert rivals._needs_trl(CASE, torch.device("cpu")) == "its kernels need a GPU"
