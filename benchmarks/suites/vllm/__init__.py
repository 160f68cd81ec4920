"""Rollouts of vLLM with isobit inside: how many tokens a second, and how many of them have the trainer's
bits. Random weights, bf16.

    plain       vLLM as it is, with FLASH_ATTN
    invariant   vLLM's own batch invariance: VLLM_BATCH_INVARIANT=1
    isobit      `isobit.integrations.vllm.enable()`
    isobit:compiled   the same with vLLM's own settings for compilation, where the other has graphs without it

A call is a rollout of B requests that arrive at once: prompts of 200 to 1000 tokens, 128 new tokens each,
temperature 1, with the log-probability of each token. Two directions: `eager`, and `graphs`, in which plain
and invariant compile the model and capture graphs, as vLLM does by default.

Every engine is a process of its own; those of a model and direction are started together, and take turns. A
time is the wall time of a rollout: the median and the quartiles of `RUNS`, after one more. `tokens_per_s` is
the number of new tokens by it.

Of the first rollout, the tokens of up to `JUDGED` requests go through the trainer: a transformers model under
`zero_drift`, one forward of one row. `tokens` is how many there are, `tokens_differ` how many of them have
other bits of log-probability, `max_abs` the largest difference, and `k3` the estimate of the KL divergence
of the rollout from the trainer, mean(exp(r) - 1 - r) of their log-ratios r. `first_ms` is the time of a
rollout of one new token: until every request has its first.
"""

import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.train_step import EXPERTS, QWEN_EXPERTS, Config, shrunk
from benchmarks.suites.vllm.engine import MOST_REQUESTS, NEW, ROOM, Generate, Rows, Sizes, Start
from isobit.bench.goals import Cell, Goal, limit
from isobit.check.process import ask, started
from isobit.integrations.hf import token_logps, zero_drift
from isobit.spec.compare import differing
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import NotHere, Pool, Series
from isobit.spec.truth import Verdict, spread_evenly

#: Timed rollouts of each engine, and requests whose tokens are compared with the trainer.
RUNS, JUDGED = 3, 32

#: Batches for which graphs are captured, by all engines. vLLM's own list has 35, and takes minutes.
CAPTURED = [8, 16, 32, 64, 128, 256]


# Models: as many layers as leave room for four engines and the trainer on 139 GiB

OF_QWEN = {"head_dim": 128}
MODELS = {
    "qwen3-0.6b": Config(
        "Qwen3", 151936, 1024, 3072, 28, 16, 8, tie_word_embeddings=True, rope_theta=1e6, more=OF_QWEN
    ),
    "qwen3-4b-18-layers": Config(
        "Qwen3", 151936, 2560, 9728, 18, 32, 8, tie_word_embeddings=True, rope_theta=1e6, more=OF_QWEN
    ),
    "llama-3-8b-16-layers": Config(
        "Llama", 128256, 4096, 14336, 16, 32, 8, tie_word_embeddings=False, rope_theta=5e5
    ),
    "qwen3-30b-a3b-8-layers": Config(
        "Qwen3Moe", 151936, 2048, 6144, 8, 32, 4, tie_word_embeddings=False, rope_theta=1e6, more=QWEN_EXPERTS
    ),
}


def tiny(config: Config) -> Config:
    """A model of that kind for a CPU."""
    return shrunk(config, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1)


def saved(config: Config, device: torch.device, dtype: torch.dtype, seed: int) -> str:
    """The folder of a model with random weights."""
    folder = tempfile.mkdtemp(prefix="isobit-vllm-")
    model: Any = config.build(device, dtype, seed)
    model.config.max_position_embeddings = ROOM
    model.config.eos_token_id = model.config.bos_token_id = None
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    return folder


def trainer(folder: str, device: torch.device) -> Any:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device).eval()
    zero_drift(model)
    return model


# Engines

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def options(config: Config, mode: str, compiled: bool, device: torch.device) -> dict[str, Any]:
    """Of vLLM, for one engine."""
    made: dict[str, Any] = {
        "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0, "enable_prefix_caching": False,
        "max_num_seqs": MOST_REQUESTS, "max_model_len": ROOM, "disable_cascade_attn": True,
    }  # fmt: skip
    if device.type == "cpu":
        return made | {"max_num_seqs": 8, "max_model_len": 64, "enforce_eager": True}
    token = (
        2 * 2 * config.head_dim * config.num_key_value_heads * config.num_hidden_layers
    )  # bytes of keys and values
    prompts = sum(map(len, Sizes(MOST_REQUESTS).prompts(2)))
    made["kv_cache_memory_bytes"] = (prompts + MOST_REQUESTS * (NEW + 64)) * token
    made |= {"gpu_memory_utilization": 0.1, "attention_config": {"backend": "FLASH_ATTN"}}
    if mode == "eager":
        return made | {"enforce_eager": True}
    without = {} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return made | {"compilation_config": {"cudagraph_capture_sizes": CAPTURED, **without}}


class Engine:
    """A process with an engine. What it raises while it starts is raised by its first rollout."""

    def __init__(self, start: Start, variables: Mapping[str, str]) -> None:
        self._process = started("benchmarks.suites.vllm.engine", _environment(variables), apart=True)
        weakref.finalize(self, _end, self._process)
        thread = ThreadPoolExecutor(1)
        self._up: Future[list[Any]] = thread.submit(_asked, self._process, start)
        thread.shutdown(wait=False)  # it ends when the engine is up

    def ask(self, request: object) -> list[Any]:
        self._up.result()
        return _asked(self._process, request)


def _asked(process: "subprocess.Popen[str]", request: object) -> list[Any]:
    return [json.loads(line) for line in ask(process, request)]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), root])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **variables}


def _end(process: "subprocess.Popen[str]") -> None:
    """It ends when nobody can ask any more."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


class Engines:
    """Those of a model in one mode, by implementation, and its trainer."""

    def __init__(
        self, config: Config, mode: str, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        self._config, self._mode, self._device = config, mode, device
        self._folder = saved(config, device, dtype, seed)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        names = ("isobit", "plain", "invariant", *(["isobit:compiled"] if mode == "graphs" else []))
        self._made = {name: self._started(name) for name in names}
        self.trainer = trainer(self._folder, device)

    def _started(self, name: str) -> Engine:
        ours, compiled = name.startswith("isobit"), name != "isobit"
        start = Start(self._folder, ours, options(self._config, self._mode, compiled, self._device))
        return Engine(start, {"VLLM_BATCH_INVARIANT": "1" if name == "invariant" else "0"})

    def __getitem__(self, name: str) -> Engine:
        return self._made[name]

    def vocabulary(self) -> int:
        return self._config.vocab_size


# A rollout


def roll(name: str, args: Args, backend: str | None = None) -> tuple[Any, ...]:
    assert backend is None
    engines: Engines = args["engines"]
    engine = engines[name]
    engine.ask(Generate(args["sizes"], engines.vocabulary()))
    return (engine,)


@dataclass(frozen=True)
class Judge:
    """Compares what an engine has generated with the trainer."""

    engines: Engines
    sizes: Sizes

    def error(self, direction: str, result: tuple[Any, ...]) -> Verdict:
        engine: Engine = result[0]
        vocabulary = self.engines.vocabulary()
        which = spread_evenly(self.sizes.requests, JUDGED, torch.device("cpu")).tolist()
        rows = engine.ask(Rows(tuple(which)))
        prompts = self.sizes.prompts(vocabulary)
        pairs = [self.both(prompts[i], *row) for i, row in zip(which, rows, strict=True)]
        rolled, trained = (torch.cat(each) for each in zip(*pairs, strict=True))
        (first_ms,) = engine.ask(Generate(replace(self.sizes, new=1), vocabulary))
        ratio = (trained - rolled).double()
        more = {
            "tokens": len(rolled), "tokens_differ": int(differing(rolled, trained).sum()),
            "k3": float((ratio.exp() - 1 - ratio).mean()), "first_ms": first_ms,
        }  # fmt: skip
        return Verdict(float(ratio.abs().max()), more=more)

    @torch.no_grad()
    def both(self, prompt: list[int], tokens: list[int], logps: list[float]) -> tuple[Tensor, Tensor]:
        """Log-probabilities of a request's tokens: of the rollout, and of the trainer."""
        model = self.engines.trainer
        ids = torch.tensor([prompt + tokens], device=model.device)
        trained = token_logps(model, ids)[0, len(prompt) - 1 :].float().cpu()
        return torch.tensor(logps, dtype=torch.float32), trained


def judge(args: Args) -> Judge:
    return Judge(args["engines"], args["sizes"])


def new_tokens(args: Args) -> int:
    sizes: Sizes = args["sizes"]
    return sizes.requests * sizes.new


# Series

CASES = [Case({"B": B}, torch.bfloat16, data="random") for B in (8, 64, 256)]
SMALL = [Case({"B": 3}, torch.bfloat16, data="random")]


def _make(name: str, mode: str, case: Case, pool: Pool) -> list[Args]:
    if find_spec("vllm") is None:
        raise NotHere("vllm is not installed")
    config, sizes = MODELS[name], Sizes(case.dims["B"])
    if pool.device.type == "cpu":
        config, sizes = tiny(config), Sizes(case.dims["B"], 5, 20, 4)
    making = partial(Engines, config, mode, pool.device, case.dtype, pool.inputs.seed)
    return [{"engines": pool.made(f"{name} {mode}", making), "sizes": sizes}]


def cost(config: Config, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Every weight once for each new token; products of all tokens. Keys, and prompts that are computed
    together, are not counted."""
    tokens = sum(map(len, Sizes(dims["B"]).prompts(2))) + dims["B"] * NEW
    each, weights = config.products(dims["B"])
    return Cost(NEW * weights * dtype.itemsize, 0, 2 * tokens * each, 0)


def _series(name: str, mode: str) -> Series:
    rivals = ("plain", "invariant")
    variants: dict[str, Callable[[Args], Any]] = {}
    if mode == "graphs":
        variants["compiled"] = partial(roll, "isobit:compiled")
    own = EXPERTS if MODELS[name].experts[0] > 1 else ()
    return Series(
        op=None, name=name, cases=CASES, core=CASES[1:2], small=SMALL, make=partial(_make, name, mode),
        call=partial(roll, "isobit"), variants=variants, cost=partial(cost, MODELS[name]), judge=judge,
        rivals={each: Rival(each, partial(roll, each), directions=None) for each in rivals},
        directions=(mode,), step=True, runs=RUNS, tokens=new_tokens, imports=("transformers",), copy=False,
        against="plain",
        needs=("attention", "det_linear", "rms_norm", "rope", "swiglu", "linear_logp", "logp", *own),
        about="a rollout of B requests by vLLM", shared=lambda case: (name, mode),
    )  # fmt: skip


def _cells(name: str, mode: str, *requests: int) -> Callable[[Cell], bool]:
    return lambda cell: (cell.op, cell.direction) == (name, mode) and cell.sizes["B"] in requests


def _goals(name: str, mode: str) -> list[Goal]:
    every = _cells(name, mode, 8, 64, 256)
    none = Goal(
        f"{name}, {mode}, tokens with other bits", every, most=0, figure="tokens_differ",
        against=limit(1, "token"),
    )  # fmt: skip
    if mode == "eager":
        return [none]
    return [
        none,
        Goal(f"{name}, {mode}, 64 and 256 requests", _cells(name, mode, 64, 256), least=0.90),
        Goal(f"{name}, {mode}, 8 requests", _cells(name, mode, 8), least=0.80),
        Goal(f"{name}, {mode}, of vLLM's own invariance", every, least=0.97, against="invariant"),
    ]


_TIMED = [(name, mode) for mode in ("graphs", "eager") for name in MODELS]
SERIES: Sequence[Series] = tuple(_series(*each) for each in _TIMED)
GOALS = tuple(goal for each in _TIMED for goal in _goals(*each))
