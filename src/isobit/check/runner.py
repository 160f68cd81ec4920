"""Which laws hold: every op x backend x case x law that can exist on this machine, and nothing aborts it."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Queue
from threading import Thread
from typing import Any

import torch

from isobit.arch import arch_key
from isobit.backend import NONE, UnsupportedError
from isobit.blocks.devices import triton_is_interpreted
from isobit.check.blame import raised_at
from isobit.check.interpreter import quick_interpreter
from isobit.check.law import LAWS
from isobit.check.proof import Case
from isobit.check.proofs import proof_of
from isobit.check.request import (
    Request,
    candidates,
    cases_of,
    check_case,
    check_options,
    described,
    ops_of,
    small_args,
)
from isobit.check.trial import Trial, Unsupported
from isobit.contract import ContractError, dtype_name
from isobit.op import Op, known_op

OK, FAIL, UNSUPPORTED = "ok", "FAIL", "UNSUPPORTED"


@dataclass
class Cell:
    """One law on one case of one backend of one op. Without a case where a backend cannot serve any."""

    op: str
    backend: str
    law: str
    case: str
    status: str
    reason: str = ""
    numerics: str = NONE
    outputs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    command: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)  # from what the case can be made again


def run(
    request: Request, progress: Callable[[Cell], None] = lambda cell: None, part: bool = False
) -> list[Cell]:
    """Every cell of the request. A request that selects nothing is an error, not a pass; unless it is a part
    of another one, of which the rest may select more."""
    cells: list[Cell] = []

    def done(cell: Cell) -> None:
        cells.append(cell)
        progress(cell)

    ops = ops_of(request)
    check_options(ops, request)
    check_case(ops, request, request.laws or tuple(LAWS))
    pairs = candidates(ops, request)
    interpreted = _start_interpreter(
        [(*pair, laws) for pair in pairs if (laws := _elsewhere(*pair, request))], request
    )
    with quick_interpreter():
        for op, backend in pairs:
            for cell in _cells_here(op, backend, request):
                done(cell)
    for cell in iter(interpreted.get, None):
        done(cell)
    if not part and all(c.status == UNSUPPORTED for c in cells):
        raise ContractError(f"nothing was checked: {_why_nothing(cells)}")
    order, laws = [(op.name, backend) for op, backend in pairs], list(LAWS)
    return sorted(cells, key=lambda c: (order.index((c.op, c.backend)), laws.index(c.law.split(",")[0])))


def quick_check(
    op_name: str, device: torch.device, backend: str | None = None, options: Mapping[str, Any] | None = None
) -> list[str]:
    """Failures of an op that make it not fit to be timed here; none if it is. Small cases with these options,
    on this backend or the one that serves by default: a matter of seconds. The whole proof is `isobit
    check`."""
    name = backend or default_backend(known_op(op_name), device)
    wanted = ("accuracy", "gradient", "repeatable", "invariant")
    asked = Request(ops=(op_name,), backends=(name,), laws=wanted, device=device, heavy=False)
    cells = run(replace(asked, vary=dict(options or {})))
    return [f"{c.law} {c.case}: {c.reason}" for c in cells if c.status == FAIL]


def default_backend(op: Op, device: torch.device) -> str:
    """The backend that serves a plain call on this device."""
    found = op.explain(**small_args(op, device)).backend
    assert found is not None
    return found


def observations(request: Request) -> list[dict[str, Any]]:
    """What the ops of a request want written down beside their laws, on a GPU: facts, not promises."""
    if request.device.type != "cuda" or "agree" not in (request.laws or LAWS) or not request.heavy:
        return []
    asked = ((op.name, proof_of(op).observe) for op in ops_of(request))
    return [{"op": name, **fact} for name, observe in asked if observe for fact in observe(request.device)]


def _why_nothing(cells: list[Cell]) -> str:
    if not cells:
        return "no op, backend, law or case was selected"
    return "; ".join(sorted({f"{c.op} {c.backend}: {c.reason}" for c in cells}))


# Execution


def _interpretable(op: Op, backend: str, request: Request) -> bool:
    return op.backend_named(backend).interpreted and request.device.type == "cpu"


def _elsewhere(op: Op, backend: str, request: Request) -> list[str]:
    """The laws that need Triton's interpreter, where this process compiles kernels instead."""
    if not _interpretable(op, backend, request) or triton_is_interpreted():
        return []
    return [law for law in request.laws or LAWS if law != "compile"]


def _cells_here(op: Op, backend: str, request: Request) -> Iterator[Cell]:
    elsewhere = _elsewhere(op, backend, request)
    # Heavy cases take minutes each there.
    slow = _interpretable(op, backend, request) or backend in proof_of(op).slow or not request.heavy
    never = _cannot_serve(op, backend, request.device)
    for law in request.laws or LAWS:
        if law in elsewhere:
            continue
        if never is not None and law != "compile":
            again = f"isobit check --op {op.name} --backend {backend} --law {law} {request.options()}"
            yield Cell(op.name, backend, law, "", UNSUPPORTED, never, command=again)
            continue
        for case in cases_of(op, law, request):
            if not (case.heavy and slow) and not (case.gpu_gb and request.device.type == "cpu"):
                yield _one(op, backend, law, case, request)


def _cannot_serve(op: Op, backend: str, device: torch.device) -> str | None:
    """The reason why a backend can serve nothing on this device, if there is one."""
    try:
        op.explain(**small_args(op, device), backend=backend)
    except UnsupportedError as why:
        return str(why)
    return None


def _one(op: Op, backend: str, law: str, case: Case, request: Request) -> Cell:
    cell = Cell(op.name, backend, law, case.name, OK, command=_command(op, backend, law, case, request))
    trial = Trial(
        op, backend, request.device, case, request.arch or arch_key(request.device),
        request.inputs, request.gradient, request.grad_mode, request.grad_seed, targets=request.targets,
    )  # fmt: skip
    cell.numerics, cell.inputs = trial.numerics, described(op, case, request, trial.arch)
    start = time.perf_counter()
    try:
        _fits(op, case, request.device)
        checks = LAWS[law].run(trial)
        bad = [c for c in checks if not c.passed]
        cell.outputs = [c.to_json() for c in checks]
        if not checks:
            cell.status, cell.reason = FAIL, "the law compared nothing"
        elif bad:
            cell.status, cell.reason = FAIL, f"{bad[0].output}: {bad[0].message}"
    except (Unsupported, UnsupportedError) as why:
        cell.status, cell.reason = UNSUPPORTED, str(why)
    except Exception as error:
        # A backend may raise anything; the suite goes on and the row says what and where.
        where = raised_at(error, op, backend, __file__)
        cell.status, cell.reason = FAIL, f"{type(error).__name__}: {error} ({where})"
    cell.seconds = time.perf_counter() - start
    return cell


def _fits(op: Op, case: Case, device: torch.device) -> None:
    spec = next(p.spec for p in op.contract.params if p.spec is not None)
    if case.dtype not in spec.dtypes:
        raise Unsupported(f"{op.name} takes {', '.join(map(dtype_name, spec.dtypes))}")
    if case.gpu_gb and device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory / 1e9
        if there < case.gpu_gb:
            raise Unsupported(f"needs a GPU with {case.gpu_gb} GB, this one has {there:.0f}")


def _command(op: Op, backend: str, law: str, case: Case, request: Request) -> str:
    one = f" --dtype {dtype_name(case.dtype)}" if request.dims is not None or request.dtypes else ""
    one += "" if request.dims is not None else f" --case '{case.name}'"
    return f"isobit check --op {op.name} --backend {backend} --law {law} {request.options()}{one}"


#: Processes of the interpreter at a time, beside this one.
INTERPRETERS = 2


def _start_interpreter(jobs: list[tuple[Op, str, list[str]]], request: Request) -> "Queue[Cell | None]":
    """Run jobs in processes of their own, beside what runs here; None ends the cells. The invariant law calls
    a kernel dozens of times, so it is a job apart: two processes share an op then."""
    cells: Queue[Cell | None] = Queue()
    parts = [(op, b, [law for law in laws if (law == "invariant") is long])
             for op, b, laws in jobs for long in (True, False)]  # fmt: skip
    parts = [part for part in parts if part[2]]

    def work(job: tuple[Op, str, list[str]]) -> None:
        op, backend, wanted = job
        try:
            for cell in _in_interpreter(op, backend, wanted, request):
                cells.put(cell)
        except Exception as error:  # whoever waits for the cells must hear of it
            reason = f"{type(error).__name__}: {error}"
            cells.put(Cell(op.name, backend, ",".join(wanted), "", FAIL, reason))

    def work_all() -> None:
        try:
            with ThreadPoolExecutor(INTERPRETERS) as pool:
                pool.map(work, parts)
        finally:
            cells.put(None)  # or whoever waits would wait for ever

    Thread(target=work_all, daemon=True).start()
    return cells


def _in_interpreter(op: Op, backend: str, wanted: list[str], request: Request) -> Iterator[Cell]:
    """Triton kernels on CPU tensors: in a process of their own, since Triton decides when it decorates a
    kernel whether it is compiled or interpreted. Cells arrive as they are done."""
    command = [sys.executable, "-m", "isobit", "check", "--op", op.name, "--backend", backend, "--stream"]
    for law in wanted:
        command += ["--law", law]
    for dtype in request.dtypes:
        command += ["--dtype", dtype_name(dtype)]
    command += ["--case", request.case] if request.case else []
    command += shlex.split(request.options())
    # The interpreter is numpy, which warns about every NaN and infinity that kernels are given on purpose.
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    got = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as child:
        for line in child.stdout or ():
            if line.startswith("{"):
                got += 1
                yield Cell(**json.loads(line))
    if child.returncode not in (0, 1) or not got:
        reason = f"the interpreter's process ended after {got} cells with code {child.returncode}"
        again = "TRITON_INTERPRET=1 " + " ".join(["isobit", *command[3:]])
        yield Cell(op.name, backend, ",".join(wanted), "", FAIL, reason, command=again)
