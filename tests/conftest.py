"""Slow tests start first, and processes share the cores."""

import gc
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import commands
import whole_check
from chromium import Chromium, executable

#: Tests of programs in the environment `.parity` (`parity_env.py`).
PARITY = (
    "test_trl.py",
    "test_lora.py",
    "test_trl_rollouts.py",
    "test_drift_training.py",
    "test_trl_vllm.py",
    "test_verl.py",
    "test_losses_parity.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """In a run of all tests by several processes (`-n`), which do not know of each other: before them."""
    if getattr(config.option, "dist", "no") != "no":
        # Threads of PyTorch and NumPy that wait for each other keep a core busy, which other processes need.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    all_of_them = config.args == config.getini("testpaths") and not config.option.keyword
    if getattr(config.option, "dist", "no") != "no" and all_of_them and not config.option.collectonly:
        whole_check.started()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file at a time; but one process takes all that are served by a process of `parity_env`, which takes
    ten seconds to start."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "parity" if file.endswith(PARITY) else file

    return Together(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that the run does not wait for one of them in the end. Last what waits for
    the check, and what needs the kernels of the first file: at the same time, two processes would compile
    each of them twice."""
    first = ("test_replay.py", *PARITY, "test_hopper_pieces.py", "test_repo.py", "test_workers.py")
    first += ("test_site_browser.py", "test_parallel.py", "test_stamp.py", "test_ratio_kl_kernels.py")
    first += ("test_zero_drift.py", "test_wrong_candidates.py", "test_drift.py", "test_cli.py")
    first += ("test_zero_drift_delta_nets.py", "test_zero_drift_experts.py", "test_zero_drift_models.py")
    last = ("test_ops.py", "test_replay_ops.py")
    place = {name: at - len(first) for at, name in enumerate(first)} | dict.fromkeys(last, 1)
    items.sort(key=lambda item: place.get(item.path.name, 0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a run of all tests by one. A run of a few waits for the check where it needs it."""
    _settle_heap()
    wanted = any(item.path.name == "test_ops.py" for item in session.items)
    if wanted and len(session.items) > 100 and not session.config.option.collectonly:
        whole_check.started()


def _settle_heap() -> None:
    """What tests and libraries are made of is no garbage. Benchmarks and the memory law look for some all the
    time, and would take half a second each to go through it. Benchmarks do the same, and undo it."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    path = executable()
    if path is None:
        pytest.skip("UNSUPPORTED: there is no Chromium here (apt-get install chromium)")
    with Chromium(path) as found:
        yield found


@pytest.fixture
def isobit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> commands.Isobit:
    return partial(commands.run, monkeypatch, capfd)
