"""Guards `isobit memcheck`, with a fake compute-sanitizer: what counts as passed, and what does not."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isobit.check import memcheck
from isobit.frame.contract import ContractError

SANITIZER = """#!/bin/sh
[ "$1" = --version ] && echo "Version 2025.3.1" && exit 0
while [ "$1" != --log-file ]; do shift; done
log=$2; shift 2
case "$*" in
  *--control*) echo "========= ERROR SUMMARY: {control} errors" > $log; exit {code};;
esac
printf '{said}' > $log
echo '{prints}'
[ -n "{ends}" ] && exit {ends}
exec "$@"
"""
CLEAN = "========= ERROR SUMMARY: 0 errors\\n"
DIRTY = "========= Invalid __global__ write of size 4 bytes\\n=========     at fill+0x80\\n" \
    "=========     by thread (0,0,0)\\n========= ERROR SUMMARY: 3 errors\\n"  # fmt: skip

Sanitizer = Callable[..., None]


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sanitizer:
    def make(control: int = 1, code: int = 99, said: str = CLEAN, ends: str = "", prints: str = "") -> None:
        path = tmp_path / "compute-sanitizer"
        path.write_text(SANITIZER.format(control=control, code=code, said=said, ends=ends, prints=prints))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_calls_are_made_and_counted(sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer()
    monkeypatch.setenv("ISOBIT_COMMIT", "abc")
    lines: list[str] = []
    found = memcheck.memcheck([("logp", "reference")], progress=lines.append)
    control, run = found["runs"]
    assert found["passed"] and found["tool"] == "compute-sanitizer 2025.3.1"
    assert found["stamp"]["commit"] == "abc" and control["errors"] == 1
    assert run["errors"] == 0 and run["calls"] > 10 and len(lines) == 2
    json.dumps(found)


@pytest.mark.parametrize(
    ("said", "ends", "message"),
    [
        (DIRTY, "99", "3 errors, exit code 99: Invalid __global__ write of size 4 bytes / at fill+0x80"),
        (CLEAN, "1", "exit code 1"),  # the program broke, and the sanitizer has nothing against it
        (CLEAN, "0", "exit code 0"),  # no call was made
        ("", "0", "None errors"),
    ],
)
def test_anything_else_fails(sanitizer: Sanitizer, said: str, ends: str, message: str) -> None:
    sanitizer(said=said, ends=ends)
    found = memcheck.memcheck([("logp", "reference")])
    assert not found["passed"] and message in found["runs"][1]["summary"]


def test_the_call_that_ended_the_process_is_named(sanitizer: Sanitizer) -> None:
    one, two = ("N=3 V=8 bf16, all gradients", "N=3 V=8 bf16, any integers")
    done = [{"begins": one}, {"case": one, "status": "ok"}, {"begins": two}]
    sanitizer(said=DIRTY, ends="99", prints="\n".join(map(json.dumps, done)))
    run = memcheck.memcheck([("logp", "reference")])["runs"][1]
    assert run["calls"] == 1
    assert run["summary"].startswith(f"3 errors in the case {two}, exit code 99: Invalid __global__ write")


@pytest.mark.parametrize("given", [{"control": 0, "code": 0}, {"control": 0}, {"control": 1, "code": 0}])
def test_a_sanitizer_that_misses_the_control_is_no_proof(sanitizer: Sanitizer, given: dict[str, int]) -> None:
    sanitizer(**given)
    with pytest.raises(ContractError, match="has not found the control's wrong write"):
        memcheck.memcheck([("logp", "reference")])


def test_without_a_sanitizer_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ContractError, match="compute-sanitizer is not on the PATH"):
        memcheck.memcheck([("logp", "reference")])


def test_integers_are_extreme_and_stay_where_they_are() -> None:
    ids, mask = torch.zeros(9, 2, dtype=torch.int64)[:, 0], torch.ones(4, dtype=torch.bool)
    kept = {"ids": ids, "mask": mask, "hidden": torch.ones(3), "n": 3}
    changed = memcheck._any_integers(kept)
    assert changed["ids"].stride() == (2,) and mask.all() and changed["hidden"].sum() == 3
    assert ids.min() == -(2**63) and ids.max() == 2**63 - 1 and (ids == 1 << 31).any()
    small = memcheck._any_integers({"mask": torch.zeros(5, dtype=torch.uint8)})["mask"]
    assert small.max() == 255 and small.min() == 0
