"""`isobit drift`: measure, show, and write the report."""

import shlex
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import isobit
from isobit.check.files import in_lines, write
from isobit.check.stamp import gpu_name, stamp
from isobit.cli.check import Files
from isobit.cli.html import page
from isobit.drift.axes import DEFAULT
from isobit.drift.load import load_model, read_prompts
from isobit.drift.measure import measure
from isobit.drift.report import Report, verdict
from isobit.drift.rollout import measure_rollout
from isobit.drift.rollout_file import read_rollouts
from isobit.drift.subject import made_up, subject
from isobit.frame.contract import ContractError


@dataclass(frozen=True)
class Drift:
    """The flags of `isobit drift`."""

    model: str
    random: bool
    dtype: torch.dtype | None
    device: torch.device
    axes: tuple[str, ...]
    prompts: Path | None
    rollout: Path | None
    tokens: int
    length: int
    locate: bool
    try_it: bool
    files: Files

    def run(self) -> int:
        """The exit code: 0 if all bits are equal, 1 if some differ."""
        self._check()
        self.files.check_names()
        # Files are read before a model is loaded, which may take minutes.
        rollouts = None if self.rollout is None else read_rollouts(self.rollout)
        prompts = None if self.prompts is None else read_prompts(self.prompts, self.model)
        say = _progress(self.files.to_stdout)
        say(f"loading {self.model}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # it computes it otherwise
            warnings.filterwarnings("ignore", message="isobit: det_gemm")
            model = load_model(self.model, self.random, self.dtype, self.device)
            start = time.perf_counter()
            if rollouts is not None:
                limit = None if self.tokens == 0 else self.tokens
                report = measure_rollout(
                    model, rollouts, tokens=limit, random_weights=self.random, progress=say
                )
            else:
                sequences: Any = prompts
                if sequences is None:
                    sequences = made_up(subject(model).vocab, self.tokens or 1024, self.length)
                report = measure(
                    model, sequences, vs=self.axes, tokens=self.tokens or None, locate=self.locate,
                    try_remedies=self.try_it,
                    random_weights=self.random, progress=say,
                )  # fmt: skip
        say("")
        self._write(report, time.perf_counter() - start)
        return int(not report.passed)

    def _check(self) -> None:
        if self.device.type == "meta":
            raise ContractError("device 'meta' computes nothing: choose cpu or cuda")
        if self.tokens < 0 or self.length < 2:
            raise ContractError("--tokens is 0, for all, or more; --length at least 2")
        if self.rollout is not None and self.try_it:
            raise ContractError("--try changes the model, not the engine of a --rollout: use one of them")
        if self.rollout is not None and (self.prompts is not None or self.axes != DEFAULT):
            raise ContractError(
                "--rollout has its own tokens and is one comparison: no --prompts and no --vs"
            )

    def _write(self, report: Report, seconds: float) -> None:
        made = {
            **report.to_json(),
            "stamp": stamp(self.device),
            "command": " ".join(["isobit", *map(shlex.quote, sys.argv[1:])]),
            "model_name": self.model,
            "seconds": seconds,
        }
        if self.files.to_stdout:
            print(in_lines(made), file=self.files.stdout)
        else:
            print(f"isobit {isobit.__version__} drift on {self.device} ({gpu_name(self.device)})\n\n{report}")
            print(f"\n{verdict(made)} ({seconds:.0f} s)")
        if self.files.json is not None and not self.files.to_stdout:
            write(self.files.json, in_lines(made) + "\n")
        if self.files.html is not None:
            write(self.files.html, page([made], "isobit drift"))


def _progress(silent: bool) -> Any:
    """A line that is redrawn on a terminal, and empty at the end, else one line a step; on standard error."""

    def say(text: str) -> None:
        if silent:
            return
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)

    return say
