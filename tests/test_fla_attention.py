"""Attention of FLA with isobit inside, through its own functions, in Triton's interpreter: `fla_on_a_cpu.py`
runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import isobit
from fla_versions import ROOT, folder


def on_a_cpu(version: str, *cases: str) -> dict[str, Any]:
    paths = os.pathsep.join([folder(version), str(Path(isobit.__file__).parent.parent)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "tests" / "fla_on_a_cpu.py"), *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


NO_GPU = {"its kernels need an NVIDIA Hopper GPU (sm_90); the tensors are on cpu": 1}


def test_attention_of_fla_has_the_same_gradients_with_isobit_inside() -> None:
    found = on_a_cpu("0.6.0", "gdn", "gdn packed", "kda packed", "gdn broken", "bench", "pieces")
    assert found.pop("pieces") == [0.0, [True, False], None]  # values have no part in the changed kernel
    bench, broken = found.pop("bench"), found.pop("gdn broken")
    assert found["gdn"].pop("hopper") == [0.0, 0, NO_GPU]
    assert set(found["gdn packed"]) == {"reference", "triton", "off"}
    for case in found.values():
        assert case.pop("off") == 0.0
        for distance, served, passed in case.values():
            assert distance < 1e-6 and (served, passed) == (1, {})
    distance, served, _ = broken["reference"]
    assert distance > 1e-3 and served == 1 and broken["off"] == 0.0
    for direction, results in (("bwd", 5), ("fwd_bwd", 6)):
        ours, theirs, count = bench[direction]
        assert ours < 1e-5 and theirs == 0.0 and count == results


def test_the_other_version_has_the_same_gradients_too() -> None:
    found = on_a_cpu("0.5.2", "gdn packed")["gdn packed"]
    assert found.pop("off") == 0.0
    assert all(distance < 1e-6 and served == 1 for distance, served, _ in found.values())
