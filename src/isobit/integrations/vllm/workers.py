"""Worker processes of an engine: whether they will load isobit, and whether they have.

An engine computes in other processes than the one that calls `enable`. A forked one has what its parent has.
A spawned one has isobit if vLLM loads its plugin there, and if it finds the variable that `enable` sets.
Where one of the two is missing the engine would be vLLM's own, and nobody would be told. So `enable` looks at
what can be known before, and `reports` asks the workers.
"""

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

from isobit.integrations.vllm import versions as v
from isobit.integrations.vllm.options import VARIABLE, Options
from isobit.integrations.vllm.report import VLLMReport
from isobit.integrations.vllm.versions import refusal

#: Of vLLM: the plugins that it may load, and names of variables that Ray gives to workers on other machines,
#: next to those of vLLM's own.
PLUGINS, RAY = "VLLM_PLUGINS", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"

#: Of vLLM: 0 for an engine without processes of its own.
PROCESSES = "VLLM_ENABLE_V1_MULTIPROCESSING"

#: The group, name and function of isobit's plugin.
GROUP, NAME, FUNCTION = "vllm.general_plugins", "isobit", "isobit.integrations.vllm:load_plugin"

#: The method that a worker gets with its first model. By its name vLLM calls it in every worker, without
#: leave to send functions.
METHOD = "isobit_report"

#: An attribute of a model that is served in an engine: the `Options` that it is served with.
SERVED = "isobit_options"


def check_plugin() -> None:
    """Raises an error if the processes of an engine will not load isobit's plugin."""
    if os.environ.get(PROCESSES) == "0":
        return
    plugins = os.environ.get(PLUGINS)
    if plugins is not None and NAME not in plugins.split(","):
        wanted = ",".join([*filter(None, plugins.split(",")), NAME])
        raise refusal(
            f"{PLUGINS}={plugins!r} keeps vLLM from loading isobit's plugin in its worker processes: set "
            f"{PLUGINS}={wanted}, or unset it"
        )
    if not any(found.value == FUNCTION for found in metadata.entry_points(group=GROUP, name=NAME)):
        raise refusal(
            "isobit is on the path but not installed, so vLLM does not find its plugin in worker processes: "
            f"pip install isobit, or set {PROCESSES}=0 for an engine in this process"
        )


def with_ours(names: str | None) -> str:
    """The value of `RAY` with isobit's variable."""
    given = [name.strip() for name in (names or "").split(",") if name.strip()]
    return ",".join(dict.fromkeys([*given, VARIABLE]))


def answer(report: Callable[[], VLLMReport]) -> None:
    """Give vLLM's workers in this process the method that `reports` calls. It stays, like engines."""

    def isobit_report(worker: Any) -> str:
        served = getattr(worker.model_runner.get_model(), SERVED, None) is not None
        return json.dumps({"served": served, "report": asdict(report())})

    setattr(v.find(v.WORKER, "WorkerBase"), METHOD, isobit_report)


def reports(llm: Any) -> list[VLLMReport]:
    """The report of each worker of an engine, wherever its workers are. Call it once after the engine is
    made: it is how to know that isobit computes in them.

    Args:
        llm: a `vllm.LLM`, or anything that has its `collective_rpc`.

    Raises:
        VLLMError: a worker computes without isobit, with the likely reasons.

    Example:
        >>> import isobit
        >>> isobit.integrations.vllm.enable()  # doctest: +SKIP
        >>> llm = vllm.LLM("Qwen/Qwen3-0.6B", dtype="bfloat16")  # doctest: +SKIP
        >>> print(*isobit.integrations.vllm.reports(llm))  # doctest: +SKIP
    """
    try:
        answers = llm.collective_rpc(METHOD)
    except Exception as error:
        if METHOD not in str(error):
            raise
        raise _without(f"its workers do not have {METHOD}") from error
    if inspect.isawaitable(answers):
        getattr(answers, "close", lambda: None)()
        raise refusal(f"reports: this engine is asynchronous: await its collective_rpc({METHOD!r}) instead")
    made = [json.loads(each) for each in answers]
    lacking = [i for i, each in enumerate(made) if not each["served"]]
    if lacking:
        raise _without(f"the models of workers {', '.join(map(str, lacking))} are vLLM's own")
    return [VLLMReport(**each["report"]) for each in made]


def _without(what: str) -> v.VLLMError:
    return refusal(
        f"this engine computes without isobit: {what}. It was made before enable() or after disable(); or "
        f"its processes did not load isobit's plugin (pip install isobit there; {PLUGINS} unset, or with "
        f"{NAME}), "
        f"or have no {VARIABLE} (copy it to machines that were started before enable())"
    )


def options_of(llm: Any) -> Options | None:
    """The options with which isobit serves an engine whose worker is in this process, or None."""
    executor = getattr(getattr(llm, "llm_engine", None), "model_executor", None)
    if executor is None:
        raise refusal(
            "the worker of this engine is in another process, and its options are not seen from here: "
            f"set {PROCESSES}=0 before it is made"
        )
    runner = executor.driver_worker.model_runner
    options: Options | None = getattr(runner.get_model(), SERVED, None)
    return options
