"""Which laws hold: every op x backend x case x law that can exist on this machine, and nothing aborts it."""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from queue import Queue
from threading import Thread
from typing import Any

import torch

from isobit.arch import arch_key, triton_is_interpreted
from isobit.check import laws, laws_system
from isobit.check.compare import OutputCheck
from isobit.check.proof import Case, InputOptions
from isobit.check.trial import Trial, Unsupported
from isobit.contract import ContractError, dtype_name
from isobit.op import OPS, Op, UnsupportedError, known_op

Law = Callable[[Trial], list[OutputCheck]]

#: Every law by name, in the order they run: forward before backward, numbers before machinery.
LAWS: dict[str, Law] = {
    "accuracy": laws.accuracy,
    "gradient": laws.gradient,
    "repeatable": laws.repeatable,
    "written": laws.written,
    "invariant": laws.invariant,
    "contract": laws_system.contract,
    "traceable": laws_system.traceable,
    "memory": laws_system.memory,
    "compile": laws_system.compiles,
}

OK, FAIL, UNSUPPORTED = "ok", "FAIL", "UNSUPPORTED"


@dataclass
class Cell:
    """One law on one case of one backend of one op."""

    op: str
    backend: str
    law: str
    case: str
    status: str
    reason: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    command: str = ""


@dataclass(frozen=True)
class Request:
    """What to check: the command line as a value. Empty tuples mean everything."""

    ops: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    arch: str | None = None
    dims: dict[str, int] | None = None
    case: str | None = None  # the name of one declared case
    data: str = "edge"
    inputs: InputOptions = field(default_factory=InputOptions)
    gradient: bool = True
    grad_mode: str = "random"
    grad_seed: int = 123

    def options(self) -> str:
        """The flags that repeat this request, for reproduction lines and for the interpreter's process."""
        parts = [f"--device {self.device}"]
        parts += [f"--arch-key {self.arch}"] if self.arch else []
        parts += [f"--dim {k}={v}" for k, v in (self.dims or {}).items()]
        default = Request()
        if self.data != default.data:
            parts.append(f"--input-mode {self.data}")
        if self.inputs.seed != default.inputs.seed:
            parts.append(f"--seed {self.inputs.seed}")
        if self.inputs.constant != default.inputs.constant:
            parts.append(f"--constant-value {self.inputs.constant}")
        if self.inputs.token is not None:
            parts.append(f"--token-value {self.inputs.token}")
        if not self.gradient:
            parts.append("--no-gradient")
        if self.grad_mode != default.grad_mode:
            parts.append(f"--grad-mode {self.grad_mode}")
        if self.grad_seed != default.grad_seed:
            parts.append(f"--grad-seed {self.grad_seed}")
        return " ".join(parts)


def run(request: Request, progress: Callable[[Cell], None] = lambda cell: None) -> list[Cell]:
    """Every cell of the request. A request that selects nothing is an error, not a pass."""
    cells: list[Cell] = []

    def done(cell: Cell) -> None:
        cells.append(cell)
        progress(cell)

    ops = _ops(request)
    for op in ops:
        _check_case(op, request)
    pairs = [(op, backend) for op in ops for backend in _backends(op, request)]
    interpreted = _start_interpreter(
        [(*pair, laws) for pair in pairs if (laws := _elsewhere(*pair, request))], request
    )
    for op, backend in pairs:
        for cell in _cells_here(op, backend, request):
            done(cell)
    for cell in iter(interpreted.get, None):
        done(cell)
    if all(c.status == UNSUPPORTED for c in cells):
        raise ContractError(f"nothing was checked: {_why_nothing(cells)}")
    order = [(op.name, backend) for op, backend in pairs]
    return sorted(cells, key=lambda c: order.index((c.op, c.backend)))


def quick_check(op_name: str, device: torch.device) -> list[str]:
    """Reasons why the default backend of an op is not fit to be timed here; none if it is."""
    op = known_op(op_name)
    name = default_backend(op, device)
    wanted = ("accuracy", "gradient", "repeatable", "invariant")
    cells = run(Request(ops=(op_name,), backends=(name,), laws=wanted, device=device))
    return [f"{c.law} {c.case}: {c.reason}" for c in cells if c.status == FAIL]


def default_backend(op: Op, device: torch.device) -> str:
    """The backend that serves a plain call on this device."""
    args = op.proof.make(small_case(op), device, InputOptions())
    found = op.explain(**args).backend
    assert found is not None
    return found


# Selection


def _ops(request: Request) -> list[Op]:
    if request.ops:
        return [known_op(name) for name in request.ops]
    return [op for op in OPS.values() if op.proof is not None]


def _backends(op: Op, request: Request) -> list[str]:
    known = [b.name for b in op.backends]
    for name in request.backends:
        if name not in known:
            raise ContractError(f"{op.name}: unknown backend {name!r}; known: {', '.join(known)}")
    return list(request.backends) or known


def small_case(op: Op) -> Case:
    """The first declared case that is not degenerate."""
    return next(c for c in op.proof.cases if c.dims and min(c.dims.values()) > 1)


def cases_of(op: Op, law: str, request: Request) -> list[Case]:
    """The cases a law runs on: declared ones, or the one the command line describes."""
    proof = op.proof
    if request.dims is not None:
        dims = _check_dims(op, request.dims)
        chosen = [Case(dims, d, request.data) for d in (request.dtypes or (torch.float32,))]
        if law in ("compile", "contract", "traceable"):
            return chosen[:1]
        return chosen
    if law == "invariant":
        chosen = list(proof.bit_cases)
    elif law == "memory":
        chosen = list(proof.memory_cases)
    elif law in ("contract", "traceable", "compile"):
        chosen = [replace(small_case(op), dtype=torch.float32, options={})]
        if law == "compile":
            chosen.append(replace(chosen[0], dtype=torch.bfloat16))
    else:
        chosen = list(proof.cases)
        if law in ("repeatable", "written"):
            chosen = chosen[::3]
    if request.data != "edge":
        chosen = [replace(c, data=request.data) for c in chosen]
    if request.dtypes:
        # Every law sees every dtype that is asked for, not only those its cases were declared with.
        recast = [replace(c, dtype=d) for c in chosen for d in request.dtypes]
        chosen = list({c.name: c for c in recast}.values())
    return [c for c in chosen if request.case in (None, c.name)]


def _check_dims(op: Op, dims: dict[str, int]) -> dict[str, int]:
    """The dimensions in the order that the op declares them."""
    sets = {tuple(c.dims) for c in op.proof.cases}
    order = next((s for s in sets if set(s) == set(dims)), None)
    if order is None:
        known = "; ".join(", ".join(s) for s in sorted(sets))
        raise ContractError(f"{op.name}: dimensions {', '.join(dims)}; known sets: {known}")
    for name, size in dims.items():
        if size <= 0 and (name == "V" or size < 0):
            raise ContractError(f"{op.name}: {name}={size} must be positive")
    return {name: dims[name] for name in order}


def _check_case(op: Op, request: Request) -> None:
    if request.case is not None and request.dims is None:
        known = {
            c.name for law in request.laws or LAWS for c in cases_of(op, law, replace(request, case=None))
        }
        if request.case not in known:
            raise ContractError(
                f"{op.name}: unknown case {request.case!r}; known: {'; '.join(sorted(known))}"
            )


def _why_nothing(cells: list[Cell]) -> str:
    if not cells:
        return "no op, backend, law or case was selected"
    return "; ".join(sorted({f"{c.op} {c.backend}: {c.reason}" for c in cells}))


# Execution


def _interpretable(op: Op, backend: str, request: Request) -> bool:
    return op._by_name(backend).interpreted and request.device.type == "cpu"


def _elsewhere(op: Op, backend: str, request: Request) -> list[str]:
    """The laws that need Triton's interpreter, where this process compiles kernels instead."""
    if not _interpretable(op, backend, request) or triton_is_interpreted():
        return []
    return [law for law in request.laws or LAWS if law != "compile"]


def _cells_here(op: Op, backend: str, request: Request) -> Iterator[Cell]:
    elsewhere = _elsewhere(op, backend, request)
    slow = _interpretable(op, backend, request)  # heavy cases take minutes each there
    for law in request.laws or LAWS:
        for case in cases_of(op, law, request) if law not in elsewhere else ():
            if not (case.heavy and slow) and not (case.gpu_gb and request.device.type == "cpu"):
                yield _one(op, backend, law, case, request)


def _one(op: Op, backend: str, law: str, case: Case, request: Request) -> Cell:
    cell = Cell(op.name, backend, law, case.name, OK, command=_command(op, backend, law, case, request))
    trial = Trial(
        op, backend, request.device, case, request.arch or arch_key(request.device),
        request.inputs, request.gradient, request.grad_mode, request.grad_seed,
    )  # fmt: skip
    start = time.perf_counter()
    try:
        _fits(case, request.device)
        checks = LAWS[law](trial)
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
        where = traceback.extract_tb(error.__traceback__)[-1]
        cell.status = FAIL
        cell.reason = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
    cell.seconds = time.perf_counter() - start
    return cell


def _fits(case: Case, device: torch.device) -> None:
    if case.gpu_gb and device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory / 1e9
        if there < case.gpu_gb:
            raise Unsupported(f"needs a GPU with {case.gpu_gb} GB, this one has {there:.0f}")


def _command(op: Op, backend: str, law: str, case: Case, request: Request) -> str:
    one = f" --dtype {dtype_name(case.dtype)}" if request.dims is not None or request.dtypes else ""
    one += "" if request.dims is not None else f" --case '{case.name}'"
    return f"isobit check --op {op.name} --backend {backend} --law {law} {request.options()}{one}"


def _start_interpreter(jobs: list[tuple[Op, str, list[str]]], request: Request) -> "Queue[Cell | None]":
    """Run jobs one after another in processes of their own, beside what runs here; None ends the cells."""
    cells: Queue[Cell | None] = Queue()

    def work() -> None:
        for op, backend, wanted in jobs:
            try:
                for cell in _in_interpreter(op, backend, wanted, request):
                    cells.put(cell)
            except Exception as error:  # whoever waits for the cells must hear of it
                cells.put(
                    Cell(op.name, backend, ",".join(wanted), "", FAIL, f"{type(error).__name__}: {error}")
                )
        cells.put(None)

    Thread(target=work, daemon=True).start()
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
    command += request.options().split()
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
