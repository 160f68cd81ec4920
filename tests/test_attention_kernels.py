"""The attention kernels, in Triton's interpreter: orders, borders, and what they do with any integers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compat

CALLS = Path(__file__).with_name("attention_calls.py")


@pytest.mark.parametrize(
    "what", ["borders", "gradients", "tiles", "any_integers", "far_apart", "not_a_number"]
)
def test_kernels(what: str) -> None:
    """See the functions of these names."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, CALLS, what], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
