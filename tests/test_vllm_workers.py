"""Engines before, between and after `enable`, and workers in other processes: against the stub of vLLM."""

import os
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import stub_vllm as stub
from isobit.integrations import vllm
from isobit.integrations.vllm import options, versions, workers
from stub_vllm import Qwen3ForCausalLM, runner_of


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from stub.installed(monkeypatch)


def test_an_engine_has_its_own_attention_whatever_came_before(engine: dict[str, ModuleType]) -> None:
    """vLLM keeps the class that the first engine of a process was given."""

    def given() -> str:
        name: str = engine[versions.SELECTOR]._cached_get_attn_backend("FLASH_ATTN").__module__
        return name

    assert given() == stub.FlashAttentionBackend.__module__
    for _ in range(2):
        with vllm.enable():
            assert given() == "isobit.integrations.vllm.flash_attention"
        assert given() == stub.FlashAttentionBackend.__module__


def test_every_worker_says_what_it_computes(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = stub.LLM(Qwen3ForCausalLM())
    with pytest.raises(vllm.VLLMError, match="its workers do not have isobit_report"):
        vllm.reports(plain)
    with vllm.enable():
        served = stub.LLM(Qwen3ForCausalLM())
        (report,) = vllm.reports(served)
        assert report == vllm.report() and report.models and report.variables[options.VARIABLE] == "1"
        with pytest.raises(vllm.VLLMError, match=r"models of workers 0 are vLLM's own. It was made before"):
            vllm.reports(plain)
    assert vllm.reports(served) == [report]  # an engine keeps what it was made with
    with pytest.raises(vllm.VLLMError, match="computes without isobit"):
        vllm.reports(stub.LLM(Qwen3ForCausalLM()))

    def broken(worker: Any) -> str:
        raise RuntimeError("something else")

    monkeypatch.setattr(engine[versions.WORKER].WorkerBase, workers.METHOD, broken)
    with pytest.raises(RuntimeError, match="something else"):
        vllm.reports(served)


def test_an_asynchronous_engine_is_named(engine: dict[str, ModuleType]) -> None:
    async def collective_rpc(method: str) -> None: ...

    with pytest.raises(vllm.VLLMError, match="this engine is asynchronous"):
        vllm.reports(SimpleNamespace(collective_rpc=collective_rpc))


def test_plugins_without_isobit_are_refused(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    for plugins, wanted in (("", "isobit"), ("other", "other,isobit")):
        monkeypatch.setenv(workers.PLUGINS, plugins)
        with pytest.raises(vllm.VLLMError, match=f"VLLM_PLUGINS='{plugins}' .*: set VLLM_PLUGINS={wanted},"):
            vllm.enable()
        assert vllm.report().off and options.VARIABLE not in os.environ
    monkeypatch.setenv(workers.PLUGINS, "other,isobit")
    with vllm.enable():
        pass
    monkeypatch.setenv(workers.PLUGINS, "")
    monkeypatch.setenv(workers.PROCESSES, "0")  # nothing needs a plugin
    with vllm.enable():
        pass


def test_isobit_that_is_not_installed_is_refused(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From PYTHONPATH it can be imported, and vLLM does not find its plugin."""
    monkeypatch.setattr(metadata, "entry_points", lambda **which: [])
    with pytest.raises(
        vllm.VLLMError, match=r"on the path but not installed.*VLLM_ENABLE_V1_MULTIPROCESSING=0"
    ):
        vllm.enable()
    monkeypatch.setenv(workers.PROCESSES, "0")
    with vllm.enable():
        pass


def test_ray_copies_the_variable_to_other_machines(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    with vllm.enable():
        assert os.environ[workers.RAY] == options.VARIABLE
    assert workers.RAY not in os.environ
    monkeypatch.setenv(workers.RAY, "MINE, OTHER")
    with vllm.enable():
        assert os.environ[workers.RAY] == "MINE,OTHER,ISOBIT_VLLM"
    assert os.environ[workers.RAY] == "MINE, OTHER"


def test_a_plugin_that_is_loaded_and_not_enabled_says_so(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobit.integrations.vllm.switch._plugin_was_loaded", False)
    assert "(nobody has called enable(), and vLLM has not loaded isobit's plugin)" in str(vllm.report())
    vllm.load_plugin()
    told = str(vllm.report())
    assert "vLLM has loaded isobit's plugin, and ISOBIT_VLLM is not set" in told and "enable() before" in told


@pytest.mark.parametrize(
    ("name", "found"), [(None, "no device"), ("", "no device"), ("xpu", "runs on 'xpu'")]
)
def test_a_machine_without_a_gpu_is_named(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, name: Any, found: str
) -> None:
    monkeypatch.setattr(stub._Platform, "is_cuda", lambda self: False)
    monkeypatch.setattr(stub._Platform, "device_name", name)
    with pytest.raises(vllm.VLLMError, match=f"{found}.* isobit serves NVIDIA GPUs, .*nvidia-smi"):
        vllm.enable()


def test_a_method_that_a_class_inherits_is_replaced_in_it_alone(engine: dict[str, ModuleType]) -> None:
    """As a newer vLLM may have it."""
    base = engine[versions.GPU_RUNNER].GPUModelRunner
    engine[versions.GPU_RUNNER].GPUModelRunner = type("GPUModelRunner", (base,), {})  # type: ignore[attr-defined]
    theirs = base.load_model
    with vllm.enable(allow_untested=True) as on:
        model = runner_of(Qwen3ForCausalLM()).model
        assert base.load_model is theirs
        model.proj(torch.randn(1, 64).bfloat16())
        assert on.served == 1
    assert "load_model" not in vars(engine[versions.GPU_RUNNER].GPUModelRunner)


def test_the_options_of_an_engine_in_another_process_are_not_seen(engine: dict[str, ModuleType]) -> None:
    for llm in (SimpleNamespace(llm_engine=SimpleNamespace()), SimpleNamespace()):
        with pytest.raises(vllm.VLLMError, match=r"in another process.*VLLM_ENABLE_V1_MULTIPROCESSING=0"):
            workers.options_of(llm)
