"""Implements `isobit demo`: train, show progress, and check that the task was learned. The report it returns
is what the command line renders as a page."""

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from isobit.check.stamp import gpu_name, stamp
from isobit.demo.grpo import Config, exam, new_policy, train
from isobit.demo.policy import ISOBIT, TORCH
from isobit.frame.contract import ContractError

#: Mean rewards that count as chance and as solved, and the steps at the end that are averaged.
CHANCE, SOLVED, LAST = 0.25, 0.9, 10
#: A run that trains with isobit's functions on a CPU, where they are slow, is reduced to this.
SMALLER: dict[str, int] = {"length": 2, "layers": 1, "steps": 50}


def run_demo(device: torch.device, steps: int | None, seed: int, zero_drift: bool) -> dict[str, Any]:
    """The report of a run: its "passed" says whether the task was learned and isobit's functions did not
    drift."""
    config = replace(Config(), seed=seed)
    if zero_drift:  # PyTorch is quick to measure: at every step, all answers
        config = replace(config, probe_every=1, probe_answers=config.prompts * config.samples)
    if zero_drift and device.type == "cpu":
        config = replace(config, **SMALLER)
    if steps is not None:
        config = replace(config, steps=steps)
    if config.steps < 1:
        raise ContractError(f"--steps {steps}: at least 1")
    if not 0 <= seed < 2**63 - 1:  # the exam uses seed + 1
        raise ContractError(f"--seed {seed}: outside [0, 2^63 - 1)")
    if device.type == "meta":
        raise ContractError("device 'meta' computes nothing: choose cpu or cuda")
    print(f"isobit demo on {device} ({gpu_name(device)}): GRPO, {config.length} digits to be reversed")
    start = time.perf_counter()
    report = measured(config, device, zero_drift)
    print(f"{report['verdict']}\n{report['drift']}\n{time.perf_counter() - start:.0f} s")
    return report


def measured(config: Config, device: torch.device, zero_drift: bool) -> dict[str, Any]:
    """The report of a run."""
    ops = ISOBIT if zero_drift else TORCH
    policy, steps = new_policy(config, device), []
    with _repeatable(device):
        for record in train(policy, ops, config):
            steps.append(record)
            _show_progress(record, config.steps)
        share = exam(policy, ops, config)
    drifts = [record["drift"]["isobit"]["max"] for record in steps if "isobit" in record["drift"]]
    first, last = steps[0]["reward"], sum(r["reward"] for r in steps[-LAST:]) / len(steps[-LAST:])
    learned, exact = first <= CHANCE and last >= SOLVED, not any(drifts)
    words = "solved" if learned else f"NOT SOLVED (from at most {CHANCE} to at least {SOLVED} is)"
    passed = f"{100 * share:.1f} % of {config.exam_strings} new strings reversed without a mistake"
    return {
        "suite": "isobit demo",
        "stamp": stamp(device),
        "command": f"isobit demo --device {device} --steps {config.steps} --seed {config.seed}"
        + " --zero-drift" * zero_drift,
        "trained_with": ops.name,
        "passed": learned and exact,
        "verdict": f"{words}: mean reward {first:.2f} at the first step, {last:.2f} over the last "
        f"{len(steps[-LAST:])}; {passed}",
        "drift": _drift_line(steps, exact),
        "exam": share,
        "steps": steps,
    }


def _drift_line(steps: list[dict[str, Any]], exact: bool) -> str:
    largest = []
    for ops in (TORCH, ISOBIT):
        most = max((r["drift"][ops.name]["max"] for r in steps if ops.name in r["drift"]), default=0.0)
        largest.append(f"{most:.1e}" if most else "0")
    both = f"plain PyTorch {largest[0]}, isobit {largest[1]}{'' if exact else ', which should be 0'}"
    return f"decoding against training, largest difference of a log-probability: {both}"


def _show_progress(record: dict[str, Any], steps: int) -> None:
    """A bar that is redrawn in place on a terminal, else a line now and then."""
    done = record["step"] + 1
    line = f"step {done:3d} of {steps}  reward {record['reward']:.2f}  entropy {record['entropy']:.2f}"
    if sys.stdout.isatty():
        bar = ("#" * (30 * done // steps)).ljust(30, ".")
        print(f"\r[{bar}] {line}", end="\n" if done == steps else "", flush=True)
    elif done == steps or record["step"] % max(1, steps // 10) == 0:
        print(line, flush=True)


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """One thread on the CPU, which is no slower for tensors this small, and on a GPU none of PyTorch's
    kernels with a varying order of additions. Both are restored."""
    threads, before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        stack.callback(torch.use_deterministic_algorithms, before)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="isobit: det_gemm")  # slow on a CPU: known here
        torch.set_num_threads(1)
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product
            torch.use_deterministic_algorithms(True, warn_only=True)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # others add gradients in a varying order
        yield
