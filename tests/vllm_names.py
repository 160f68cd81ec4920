"""What isobit uses of vLLM, by name, and what vLLM has: signatures and attributes, read from its source.

    PYTHONPATH=src python tests/vllm_names.py vllm-0.26.0-*.whl .engines/lib/python3.*/site-packages

writes `golden/vllm_names.json`, which `test_vllm_names.py` compares with isobit and with the stub of vLLM. It
takes wheels (`pip download --no-deps vllm==0.26.0`) and folders of installed packages. Nothing of vLLM is
imported, so neither a GPU nor its other packages are needed. `make engines` compares the file with the vLLM
that it has installed.

Names are those of `isobit.integrations.vllm.versions`, what classes of the stub have, whose tests show that
isobit needs no more, and `READ`: attributes of objects for which the stub has no class.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import Path as ZipPath

import stub_vllm as stub
import stub_vllm_gpt_oss
import stub_vllm_moe
from isobit.integrations.vllm import switch, workers
from isobit.integrations.vllm import versions as v

FILE = Path(__file__).parent / "golden" / "vllm_names.json"

#: In the file: a name that this version of vLLM does not have, an attribute, and a class.
MISSING, ATTRIBUTE, CLASS = "MISSING", "attribute", "class"

FUSED_MOE = "vllm.model_executor.layers.fused_moe"

#: Attributes of objects for which the stub has no class of its own.
READ = {
    ("vllm.config.vllm", "VllmConfig"):
        "model_config parallel_config compilation_config lora_config speculative_config additional_config "
        "use_v2_model_runner",
    ("vllm.config.model", "ModelConfig"): "dtype hf_config logprobs_mode disable_cascade_attn",
    ("vllm.config.parallel", "ParallelConfig"): "tensor_parallel_size pipeline_parallel_size",
    ("vllm.config.compilation", "CompilationConfig"): "mode cudagraph_mode",
    (stub.BACKEND, "CommonAttentionMetadata"):
        "num_reqs num_actual_tokens max_query_len max_seq_len query_start_loc query_start_loc_cpu seq_lens "
        "seq_lens_cpu_upper_bound block_table_tensor slot_mapping causal",
    (stub.FLASH, "FlashAttentionMetadata"): "block_table seq_lens causal use_cascade",
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionMetadata"):
        "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping "
        "scheduler_metadata causal",
    ("vllm.v1.sample.metadata", "SamplingMetadata"):
        "max_num_logprobs logprob_token_ids allowed_token_ids_mask bad_words_token_ids no_penalties "
        "thinking_budget_state_holder logitsprocs",
    ("vllm.v1.sample.logits_processor.state", "LogitsProcessors"): "non_argmax_invariant",
    ("vllm.v1.sample.logits_processor.builtin", "LogitBiasLogitsProcessor"): "biases",
    ("vllm.v1.sample.logits_processor.builtin", "MinTokensLogitsProcessor"): "min_toks",
    ("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler"): "logprobs_mode",
    ("vllm.v1.outputs", "SamplerOutput"): "sampled_token_ids logprobs_tensors",
    ("vllm.v1.outputs", "LogprobsTensors"): "logprob_token_ids logprobs selected_token_ranks",
    ("vllm.v1.worker.gpu.sample.output", "SamplerOutput"): "sampled_token_ids logprobs_tensors",
    (v.GPU_RUNNER, "GPUModelRunner"): "vllm_config sampler requests input_batch model",
    (v.GPU_RUNNER_V2, "GPUModelRunner"): "vllm_config sampler prompt_logprobs_worker model",
    ("vllm.v1.worker.gpu_input_batch", "InputBatch"): "req_ids",
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState"): "sampling_params",
    ("vllm.v1.worker.gpu.input_batch", "InputBatch"): "idx_mapping_np expanded_idx_mapping",
    ("vllm.sampling_params", "SamplingParams"):
        "temperature top_k top_p min_p min_tokens logit_bias allowed_token_ids bad_words presence_penalty "
        "frequency_penalty repetition_penalty",
    (f"{FUSED_MOE}.config", "FusedMoEConfig"):
        "tp_size dp_size pcp_size ep_size is_sequence_parallel has_bias",
    (f"{FUSED_MOE}.oracle.unquantized", "UnquantizedMoeBackend"): "TRITON BATCHED_TRITON CPU",
    ("vllm.entrypoints.llm", "LLM"): "llm_engine collective_rpc",
    ("vllm.envs", ""): " ".join((workers.PLUGINS, workers.RAY, workers.PROCESSES, switch.RUNNER)),
}  # fmt: skip

#: What classes of the stub have for tests, and vLLM does not.
OF_THE_STUB = {
    (v.LINEAR, "LinearBase"): "of forward", (v.EMBEDDING, "VocabParallelEmbedding"): "of forward bias",
    (v.ROTARY, "RotaryEmbedding"): "forward", (v.ROTARY_LLAMA3, "Llama3RotaryEmbedding"): "forward",
    (v.ROTARY_YARN, "YaRNScalingRotaryEmbedding"): "forward",
    (stub.FLASH, "FlashAttentionMetadataBuilder"): "spec",
    (v.SAMPLER, "Sampler"): "written", (v.SAMPLER_V2, "Sampler"): "written",
    (v.STATES_V2, "SamplingStates"): "given", (v.LOGPROB_V2, "LogprobTokenIdsState"): "ids",
    (v.GPU_RUNNER, "GPUModelRunner"): "given step logits metadata profiled",
    (v.GPU_RUNNER_V2, "GPUModelRunner"): "given step logits batch",
    (v.GPT_OSS, "OAIAttention"): "sizes forward",
    (v.GPT_OSS, "MLPBlock"): "name shared_expert shared_expert_gate",
    ("vllm.model_executor.models.mixtral", "MixtralMoE"): "name shared_expert shared_expert_gate",
    ("vllm.model_executor.models.olmoe", "OlmoeMoE"): "name shared_expert shared_expert_gate",
    ("vllm.model_executor.models.qwen2_moe", "Qwen2MoeSparseMoeBlock"): "name",
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeSparseMoeBlock"): "name",
}  # fmt: skip

#: Attributes that vLLM gives to objects of a class elsewhere, and the class where it does.
GIVEN_BY = {
    (v.LINEAR, "LinearBase", "weight"): (v.LINEAR, "UnquantizedLinearMethod"),
    (v.LINEAR, "LinearBase", "bias"): (v.LINEAR, "ReplicatedLinear"),
    (v.EMBEDDING, "VocabParallelEmbedding", "weight"): (v.EMBEDDING, "UnquantizedEmbeddingMethod"),
} | {
    (f"{FUSED_MOE}.routed_experts", "RoutedExperts", name): (v.EXPERTS, "UnquantizedFusedMoEMethod")
    for name in ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
}  # fmt: skip

#: Where the stub has classes that no module of it has.
PLACES = {
    stub_vllm_moe.RoutedExperts: f"{FUSED_MOE}.routed_experts",
    stub_vllm_moe.SharedExperts: f"{FUSED_MOE}.runner.shared_experts",
    stub_vllm_moe.Qwen2MoeMLP: "", stub_vllm_moe.Qwen2MoeSparseMoeBlock: "",
    stub_vllm_moe.Qwen3MoeSparseMoeBlock: "", stub_vllm_moe.MixtralMoE: "", stub_vllm_moe.OlmoeMoE: "",
    stub_vllm_moe.MLPBlock: "", stub_vllm_gpt_oss.OAIAttention: "",
}  # fmt: skip


# What is used


def used() -> dict[str, set[str]]:
    """By module: functions, classes, and attributes of classes with a dot."""
    found: dict[str, set[str]] = {}

    def add(module: str, name: str) -> None:
        owner, dot, _ = name.rpartition(".")
        found.setdefault(module, set()).update({name, owner} if dot else {name})

    for names in (v.NAMES, v.CPU_NAMES, v.CUDA_NAMES, v.V2_NAMES):
        for module, name in names:
            add(module, name)
    for (module, name), attributes in READ.items():
        for attribute in attributes.split():
            add(module, f"{name}.{attribute}" if name else attribute)
    for module, kind in classes_of_the_stub():
        own = OF_THE_STUB.get((module, kind.__name__), "").split()
        add(module, kind.__name__)
        for attribute in members(kind):
            if attribute not in own:
                add(module, f"{kind.__name__}.{attribute}")
    return found


def classes_of_the_stub() -> Iterator[tuple[str, type]]:
    for name, module in stub.modules().items():
        for each in vars(module).values():
            if isinstance(each, type):
                yield name, each
    for kind, place in PLACES.items():
        yield place or kind.__module__, kind


def members(kind: type) -> set[str]:
    """Of a class of the stub and those above it in the stub."""
    found = set[str]()
    for each in kind.__mro__:
        if each.__module__.partition(".")[0].startswith(("stub_vllm", "vllm")):
            found |= {*vars(each), *inspect.get_annotations(each)}
            functions = [value for value in vars(each).values() if inspect.isfunction(value)]
            trees = [ast.parse(textwrap.dedent(inspect.getsource(function))) for function in functions]
            found |= {name for tree in trees for name, _ in _given_to_self(tree)}
    return {name for name in found if not name.startswith("__") and not name.endswith("_")} | (
        {"__call__"} & found
    )


# What vLLM has


class _Scope(NamedTuple):
    """A module, and what it has at its top level."""

    name: str
    package: str  # in which it is, or which it is
    names: dict[str, ast.AST]


class Source:
    """vLLM's source, in a wheel or a folder of packages."""

    def __init__(self, place: Path) -> None:
        self.root: Any = ZipPath(place) if place.is_file() else place
        self.scopes: dict[str, _Scope | None] = {}

    @cached_property
    def version(self) -> str:
        (info,) = (p for p in self.root.iterdir() if re.fullmatch(r"vllm(_cpu)?-[^-]+\.dist-info", p.name))
        (version,) = re.findall(r"^Version: ([^+\n]+)", (info / "METADATA").read_text(), re.M)
        return str(version)

    def found(self, module: str, name: str) -> str:
        """The arguments of a function, or what else this is."""
        first, _, attribute = name.partition(".")
        scope, node = self._resolve(module, first)
        if attribute and isinstance(node, ast.ClassDef):
            place, owner = GIVEN_BY.get((module, first, attribute), (module, first))
            scope, node = self._resolve(place, owner)
            node = self._member(scope, node, attribute)
        elif attribute:  # of a function: what functools.cache adds
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
            return ATTRIBUTE if attribute == "cache_clear" and "cache" in decorators else MISSING
        if node is None:
            return MISSING
        if isinstance(node, ast.FunctionDef) and not _is_property(node):
            return f"({_arguments(node)})"
        return CLASS if isinstance(node, ast.ClassDef) else ATTRIBUTE

    def _resolve(self, module: str, name: str) -> tuple[_Scope | None, ast.AST | None]:
        """What a name is in a module, wherever it was imported from."""
        scope = self._scope(module)
        node = None if scope is None else scope.names.get(name)
        if scope is not None and isinstance(node, ast.ImportFrom):
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            above = scope.package.rsplit(".", node.level - 1)[0] if node.level else ""
            return self._resolve(".".join(filter(None, (above, node.module))), original)
        return scope, node

    def _scope(self, module: str) -> _Scope | None:
        if module not in self.scopes:
            place = self.root.joinpath(*module.split("."))
            files = (place / "__init__.py", place.parent / f"{place.name}.py")
            file = next((each for each in files if each.exists()), None)
            if file is None:
                self.scopes[module] = None
            else:
                package = module if file == files[0] else module.rpartition(".")[0]
                names = dict(_names(ast.parse(file.read_text()).body))
                self.scopes[module] = _Scope(module, package, names)
        return self.scopes[module]

    def _member(self, scope: _Scope | None, node: ast.AST | None, name: str) -> ast.AST | None:
        """Of a class, or of the first above it that has it."""
        if scope is None or not isinstance(node, ast.ClassDef):
            return None
        if (found := _members(node).get(name)) is not None:
            return found
        for base in node.bases:
            above = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if (found := self._member(*self._resolve(scope.name, above), name)) is not None:
                return found
        return None


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """At the top level of a module, also under an if."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from _names([*getattr(node, "orelse", ()), *node.body])
        else:
            yield from ((name, node) for name in _assigned(node))


def _assigned(node: ast.AST) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        for each in ast.walk(target) if target is not None else ():
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id


def _members(tree: ast.ClassDef) -> dict[str, ast.AST]:
    """Functions, attributes of the class, and those that its functions give to objects."""
    return dict(_given_to_self(tree)) | dict(_names(tree.body))


def _given_to_self(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Attributes of self, and tensors that are registered with a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for each in ast.walk(target):
                    if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                        yield each.attr, node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if node.func.attr in ("register_parameter", "register_buffer") and isinstance(
                first, ast.Constant
            ):
                yield str(first.value), node


def _is_property(node: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _arguments(node: ast.FunctionDef) -> str:
    """As `versions` writes them: without annotations."""
    for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        each.annotation = None
    for more in (node.args.vararg, node.args.kwarg):
        if more is not None:
            more.annotation = None
    return ast.unparse(node.args)


def read(source: Source) -> dict[str, dict[str, str]]:
    return {
        module: {name: source.found(module, name) for name in sorted(names)}
        for module, names in sorted(used().items())
    }


def golden() -> dict[str, dict[str, dict[str, str]]]:
    """By version, module and name."""
    return dict(json.loads(FILE.read_text()))


def changed(source: Source) -> list[str]:
    """Where vLLM is not what the file says of its version."""
    theirs, kept = (
        {(module, name): text for module, each in made.items() for name, text in each.items()}
        for made in (read(source), golden()[source.version])
    )
    return [
        f"{module}: {name} is {theirs.get((module, name))}, and in the file {kept.get((module, name))}"
        for module, name in sorted(theirs | kept)
        if theirs.get((module, name)) != kept.get((module, name))
    ]


if __name__ == "__main__":
    sources = [Source(Path(place)) for place in sys.argv[1:]]
    made = {source.version: read(source) for source in sources}
    FILE.write_text(json.dumps(dict(sorted(made.items())), indent=1) + "\n")
