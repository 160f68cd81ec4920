"""The attention kernels, in Triton's interpreter: orders, borders, and what they do with any integers."""

from pathlib import Path

import pytest

from interpreted import in_interpreter

pytestmark = pytest.mark.compat

CALLS = Path(__file__).with_name("attention_calls.py")


@pytest.mark.parametrize(
    "what", ["borders", "gradients", "any_strides", "tiles", "any_integers", "far_apart", "not_a_number"]
)
def test_kernels(what: str) -> None:
    """See the functions of these names."""
    in_interpreter(CALLS, what)
