"""What isobit does for vLLM in one process, to be printed."""

from dataclasses import dataclass, field

from isobit.integrations.hf.errors import by_reason
from isobit.integrations.vllm.options import VARIABLE

#: Of a variable that a report shows.
_SHOWN = 60


@dataclass(frozen=True)
class VLLMReport:
    """What isobit does for vLLM in one process. Workers of an engine are other processes."""

    version: str = ""  # of vLLM
    proven: str = ""  # what was run with this version
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, for workers
    runner: str = ""  # which of vLLM's model runners an engine may have, and why
    logprobs: str = ""  # by which function the log-probabilities of tokens are computed
    rounding: str = ""  # where norms and rotary embeddings are rounded, and by which option
    models: list[str] = field(default_factory=list)  # loaded since, with their modules that are served
    calls: dict[str, int] = field(default_factory=dict)  # that were served, by Python
    uncounted: list[str] = field(default_factory=list)  # where calls are made without Python
    passed: dict[str, str] = field(default_factory=dict)  # modules left to vLLM: only with allow_others=True
    off: str | None = None  # why nothing is done: it is not enabled in this process

    def __str__(self) -> str:
        if self.off is not None:
            return f"isobit in vLLM: {self.off}"
        lines = [f"isobit in vLLM {self.version} ({self.proven})"]
        lines += [f"  {name}={_short(value)}" for name, value in self.variables.items()]
        lines.append(f"  model runner: {self.runner}")
        lines.append(f"  log-probabilities of {self.logprobs}")
        lines.append(f"  rounded {self.rounding}")
        lines += [f"  {model}" for model in self.models]
        lines += [f"  {name:18s} {count:7d} calls served" for name, count in sorted(self.calls.items())]
        if self.uncounted:
            lines.append(f"  not counted: calls in {' and '.join(self.uncounted)}")
        if self.passed:
            lines.append(f"  LEFT TO vLLM, bits may depend on the batch: {by_reason(self.passed)}")
        return "\n".join(lines)


def not_enabled(loaded: bool) -> VLLMReport:
    """`loaded`: whether vLLM has loaded the plugin in this process."""
    plugin = (
        f"vLLM has loaded isobit's plugin, and {VARIABLE} is not set"
        if loaded
        else "nobody has called enable(), and vLLM has not loaded isobit's plugin"
    )
    return VLLMReport(
        off=f"NOT ENABLED in this process ({plugin}): engines that are made now are vLLM's own. "
        "Call isobit.integrations.vllm.enable() before the engine is made"
    )


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({len(value)} characters)"
