"""Checks that kernels access only their own memory: runs an op's cases under NVIDIA's compute-sanitizer.

    isobit memcheck --op linear_logp

A separate process makes the calls, forward and backward: every declared case that is not too large, with all
gradients and with each alone; and again with arbitrary integers (token ids, masks and offsets from -2^63 to
2^63 - 1), which are not validated on a GPU. Every tensor is its own allocation there, with padding behind it,
so that an access one element too far is detected. TMA accesses are limited by the descriptor, in hardware;
the sanitizer checks all others.

First it must find the wrong write of a bad kernel (the control): otherwise a clean run would prove nothing.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from isobit.check.stamp import stamp
from isobit.frame.backend import UnsupportedError
from isobit.frame.contract import ContractError
from isobit.frame.device import arch_key, default_device
from isobit.frame.op import known_op
from isobit.spec.proof import Args
from isobit.spec.proofs import proof_of
from isobit.spec.trial import Trial, Unsupported

SCHEMA = 1

#: Exit code of a process in which the sanitizer found an error.
FOUND = 99

#: Unused bytes behind every allocation.
PADDING = 1 << 16

#: Cases up to this product of sizes are run: the sanitizer makes kernels slow.
LARGEST = 1 << 30

CONTROL = "--control"


@dataclass
class Run:
    """One process under the sanitizer. `errors` is None if it did not report a number."""

    op: str
    backend: str
    errors: int | None
    calls: int
    unsupported: int
    seconds: float
    passed: bool
    summary: str


def memcheck(
    pairs: list[tuple[str, str]],
    timeout: float = 900.0,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The report on ops and backends: one process each, after the control."""
    if shutil.which("compute-sanitizer") is None:
        raise ContractError("compute-sanitizer is not on the PATH: it comes with NVIDIA's CUDA toolkit")
    runs = []
    for op, backend in [(CONTROL, ""), *pairs]:
        run = _run(op, backend, timeout)
        runs.append(run)
        progress(f"  {'ok' if run.passed else 'FAIL':6s}{op} {backend}: {run.summary}, "
                 f"{run.calls} calls, {run.seconds:.0f} s")  # fmt: skip
        if op == CONTROL and not run.passed:
            raise ContractError(f"compute-sanitizer has not found the control's wrong write: {run.summary}")
    device = default_device()
    source = stamp(device, ops={known_op(op).folder for op, _ in pairs})
    head = {"schema": SCHEMA, "suite": "isobit memcheck", "stamp": source, "tool": _version()}
    return {**head, "passed": all(r.passed for r in runs), "runs": [asdict(r) for r in runs]}


def _run(op: str, backend: str, timeout: float) -> Run:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder, "log"), Path(folder, "out")
        command = [
            "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(FOUND), "--padding",
            str(PADDING), "--log-file", str(log), sys.executable, "-m", "isobit.check.memcheck", op, backend,
        ]  # fmt: skip
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        with out.open("w") as standard:
            try:
                done = subprocess.run(command, stdout=standard, stderr=standard, env=env, timeout=timeout)
                code = str(done.returncode)
            except subprocess.TimeoutExpired:
                code = f"none, it was stopped after {timeout:.0f} s"
        said = log.read_text() if log.exists() else ""
        lines = out.read_text().splitlines()
    statuses = [json.loads(line)["status"] for line in lines if line.startswith('{"case"')]
    counted = re.search(r"ERROR SUMMARY: (\d+) error", said)
    errors = int(counted[1]) if counted else None
    if op == CONTROL:
        passed, summary = bool(errors) and code == str(FOUND), f"{errors} errors: its wrong write is seen"
    else:
        passed, summary = errors == 0 and code == "0" and "ok" in statuses, f"{errors} errors"
    if not passed:
        begun = [json.loads(line)["begins"] for line in lines if line.startswith('{"begins"')]
        where = f" in the case {begun[-1]}" if len(begun) > len(statuses) else ""
        summary += f"{where}, exit code {code}: {_first_error(said) or ' / '.join(lines[-3:])}"
    calls, unsupported = statuses.count("ok"), statuses.count("UNSUPPORTED")
    return Run(op, backend, errors, calls, unsupported, time.perf_counter() - start, passed, summary)


def _first_error(said: str) -> str:
    """The sanitizer's first error, and where."""
    lines = [line.removeprefix("=========").strip() for line in said.splitlines()]
    at = next((i for i, line in enumerate(lines) if line.startswith(("Invalid", "Program hit"))), None)
    return "" if at is None else " / ".join(lines[at : at + 3])


def _version() -> str:
    done = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"[Vv]ersion\s+([\w.]+)", done.stdout)
    return f"compute-sanitizer {match[1] if match else 'of unknown version'}"


# In the process under the sanitizer


def watched(op_name: str, backend: str) -> Iterator[dict[str, str]]:
    """Make the calls, and yield which one begins, and how it ended."""
    op, device = known_op(op_name), default_device()
    proof = proof_of(op)
    largest = 1 << 20 if device.type == "cpu" else LARGEST
    cases = [c for c in (*proof.cases, *proof.bit_cases) if math.prod(c.dims.values()) <= largest]
    for case in cases:
        trial = Trial(op, backend, device, case, arch_key(device))
        calls = {"all gradients": (trial, trial.args()), "any integers": (trial, _any_integers(trial.args()))}
        for name in trial.leaves(trial.args()):
            calls[f"gradient of {name}"] = (replace(trial, only=(name,)), trial.args())
        for what, (each, args) in calls.items():
            status = "ok"
            yield {"begins": f"{case.name}, {what}"}
            try:
                each.backward(args, validate=False)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except (Unsupported, UnsupportedError):
                status = "UNSUPPORTED"
            yield {"case": f"{case.name}, {what}", "status": status}


def _any_integers(args: Args) -> Args:
    """The same call with the extremes of every integer type, alternating, in place: strides are kept."""
    for t in args.values():
        if isinstance(t, torch.Tensor) and not t.is_floating_point() and t.dtype != torch.bool:
            low, high = torch.iinfo(t.dtype).min, torch.iinfo(t.dtype).max
            values = (low, -1, high, low + 1, 1 << 20, high - 1, -(1 << 31), (1 << 31) - 1, 1 << 31)
            there = torch.tensor([v for v in values if low <= v <= high], dtype=t.dtype, device=t.device)
            t.copy_(there.repeat(t.numel() // len(there) + 1)[: t.numel()].view(t.shape))
    return args


@triton.jit
def _one_too_many(out, n):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 128)
    tl.store(out + i, 1.0, mask=i <= n)


def write_past_the_end() -> None:
    """The control: writes one element too far."""
    _one_too_many[(1,)](torch.empty(100, device=default_device()), 100)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1] == CONTROL:
        write_past_the_end()
    else:
        for call in watched(*sys.argv[1:3]):
            print(json.dumps(call), flush=True)
