"""No op looks at torch's default dtype or default device: they change no bit and no dtype of a result."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import capture_mma as capture
import default_calls
from interpreted import in_interpreter

CALLS = list(default_calls.calls())

Results = dict[str, dict[str, dict[str, list[Tensor] | str]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by backend, default and call. The Triton kernels run in the interpreter, in a process that was
    started for it."""
    path: Path = tmp_path_factory.mktemp("interpreted") / "results"
    in_interpreter(Path(default_calls.__file__), path)
    return {"in process": default_calls.results(default_calls.in_process), "interpreted": torch.load(path)}


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["in process", "interpreted"])
def test_defaults_change_nothing(results: Results, backend: str, call: str) -> None:
    plain = results[backend][""][call]
    assert not isinstance(plain, str), plain
    for default in default_calls.DEFAULTS if backend == "in process" else default_calls.IN_INTERPRETER:
        ours = results[backend][default][call]
        assert not isinstance(ours, str), (default, ours)
        assert len(ours) == len(plain), default
        for one, other in zip(ours, plain, strict=True):
            assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device), default
            assert torch.equal(bits(one), bits(other)), default


@pytest.mark.parametrize("default", default_calls.DEFAULTS)
def test_inputs_of_golden_vectors_are_the_same_everywhere(default: str) -> None:
    def drawn() -> list[Tensor]:
        tiles = (*capture.step_tiles(torch.bfloat16), *capture.chain_tiles(torch.bfloat16))
        return [x for _, *tile in tiles for x in tile]

    with default_calls.defaults(*default_calls.DEFAULTS[default]):
        ours = drawn()
    for one, other in zip(ours, drawn(), strict=True):
        assert one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def test_the_helper_sets_defaults_and_puts_them_back() -> None:
    """The control of the above: plain torch does follow them."""
    with default_calls.defaults(torch.bfloat16, "meta"):
        made = torch.zeros(1)
    assert (made.dtype, made.device.type) == (torch.bfloat16, "meta")
    assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float32, "cpu")
