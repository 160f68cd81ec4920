"""One engine of vLLM in a process of its own: `python -m benchmarks.suites.vllm.engine`.

Switches of vLLM are variables of the environment, read when it is imported, so each way to run it needs a
process. It is told what to do by a `Request`, and answers with lines of JSON.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isobit.check.process import serve

#: Lengths of prompts, and how many tokens follow.
SHORTEST, LONGEST, NEW = 200, 1000, 128

#: Requests that an engine can have at a time, and the longest sequence that it allows: graphs are captured
#: for it, and most sequences are much shorter.
MOST_REQUESTS, ROOM = 256, 8192


@dataclass(frozen=True)
class Sizes:
    """Of a rollout."""

    requests: int
    shortest: int = SHORTEST
    longest: int = LONGEST
    new: int = NEW

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """The same in every process."""
        draw = random.Random(self.requests)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.requests)]
        return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Start:
    """Make an engine of the model in a folder."""

    folder: str
    isobit: bool
    options: dict[str, Any]  # of vLLM


@dataclass(frozen=True)
class Generate:
    """Answers with milliseconds. What was generated is kept, for `Rows`."""

    sizes: Sizes
    vocabulary: int


@dataclass(frozen=True)
class Rows:
    """Answers with what some requests of the last rollout have generated: tokens and log-probabilities."""

    which: tuple[int, ...]


class _Engine:
    def __init__(self) -> None:
        self.llm: Any = None
        self.outputs: list[Any] = []

    def answer(self, request: Any, say: Callable[[str], None]) -> None:
        if isinstance(request, Start):
            say(json.dumps(self.start(request)))
        elif isinstance(request, Generate):
            say(json.dumps(self.generate(request)))
        else:
            for i in request.which:
                output = self.outputs[i].outputs[0]
                tokens = list(output.token_ids)
                logps = [of[t].logprob for of, t in zip(output.logprobs, tokens, strict=True)]
                say(json.dumps([tokens, logps]))

    def start(self, request: Start) -> str:
        if request.isobit:
            from isobit.integrations import vllm

            vllm.enable()
        from vllm import LLM

        self.llm = LLM(model=request.folder, **request.options)
        return str(self.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)

    def generate(self, request: Generate) -> float:
        from vllm import SamplingParams

        sizes = request.sizes
        given = [{"prompt_token_ids": prompt} for prompt in sizes.prompts(request.vocabulary)]
        params = SamplingParams(
            temperature=1.0, max_tokens=sizes.new, logprobs=0, ignore_eos=True, detokenize=False
        )
        begin = time.perf_counter()
        self.outputs = self.llm.generate(given, params, use_tqdm=False)
        return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    # What this process answers is pickled under the name of the module, not of the program.
    from benchmarks.suites.vllm.engine import _Engine as Engine

    serve(Engine().answer)
