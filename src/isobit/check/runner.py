"""Runs every combination of op, backend, case and law that is possible on this machine; no exception stops
it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from isobit.check import workers
from isobit.check.blame import raised_at
from isobit.check.candidate import Candidate
from isobit.check.cell import FAIL, OK, UNSUPPORTED, Cell
from isobit.check.gpu_memory import Full, in_words, is_full
from isobit.check.interpreter import quick_interpreter
from isobit.check.judge import blame_for, judge
from isobit.check.laws import LAWS, small_case
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
from isobit.check.torch_state import compiled_anew, preserved
from isobit.frame.backend import UnsupportedError
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import arch_key, triton_is_interpreted
from isobit.frame.op import Op, known_op
from isobit.spec.compare import OutputCheck
from isobit.spec.proof import Case
from isobit.spec.proofs import proof_of
from isobit.spec.trial import NeverEnds, Trial, Unsupported

#: How often inputs are drawn, with one seed after another, until the controls of a law show another order of
#: a sum. Few bits change where results are rounded to 16 bits, and random numbers are not those of all CPUs.
DRAWS = 4

#: The laws of a quick check.
QUICK = ("accuracy", "gradient", "repeatable", "invariant")


def run(
    request: Request,
    progress: Callable[[Cell], None] = lambda cell: None,
    part: bool = False,
    only: Set[tuple[str, str]] | None = None,
) -> list[Cell]:
    """Every cell of the request, or of these ops and backends of it. A request that selects nothing is an
    error, not a pass; unless it is a part of another one, whose other parts may select more."""
    cells: list[Cell] = []

    def done(cell: Cell) -> None:
        cells.append(cell)
        progress(cell)

    request = _brief_if_whole(request)
    ops = ops_of(request)
    check_options(ops, request)
    check_case(ops, request, request.laws or tuple(LAWS))
    pairs = candidates(ops, request)
    if only is not None:
        pairs = [(op, backend) for op, backend in pairs if (op.name, backend) in only]
    jobs = [job for pair in pairs for job in _elsewhere(*pair, request)]
    elsewhere = workers.start(jobs)
    try:
        with quick_interpreter(), workers.cores_left_to(jobs):
            for op, backend in pairs:
                for cell in _cells_here(op, backend, request):
                    done(cell)
                    for other in elsewhere.now():
                        done(other)
        for cell in elsewhere.rest():
            done(cell)
    except BaseException as error:
        elsewhere.stop()  # or this process would wait for all that they were sent
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(in_order(cells, request)) from None
        if isinstance(error, NeverEnds):
            raise Stuck(in_order(cells, request)) from error  # which keeps its memory
        raise
    cells = in_order(cells, request)
    if not part:
        _something_ran(cells, request)
    return cells


def _brief_if_whole(request: Request) -> Request:
    """A request for all laws is brief, unless it names a dtype: its cells are many."""
    return replace(request, brief=request.brief or not (request.laws or request.dtypes))


def in_order(cells: Sequence[Cell], request: Request) -> list[Cell]:
    """Cells of a request in the order in which a single process would find them."""
    request, laws = _brief_if_whole(request), list(LAWS)
    pairs = candidates(ops_of(request), request)
    known = [(op.name, backend) for op, backend in pairs]
    cases = {
        (op.name, backend, law): [case.name for case in cases_of(op, backend, law, request)]
        for op, backend in pairs for law in request.laws or laws
    }  # fmt: skip

    def place(cell: Cell) -> tuple[int, int, int]:
        mine = cases.get((cell.op, cell.backend, cell.law), [])
        at = mine.index(cell.case) if cell.case in mine else -1
        return known.index((cell.op, cell.backend)), laws.index(cell.law), at

    return sorted(cells, key=place)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a check. `cells` are those that were done."""

    def __init__(self, cells: list[Cell]) -> None:
        super().__init__("interrupted")
        self.cells = cells


class Stuck(Exception):
    """Calls that never end hold the GPU in the middle of a check. `cells` are those that were done; the last
    one that ran FAILS. This process should end at once, by `os._exit`: even an orderly end waits for the
    GPU."""

    def __init__(self, cells: list[Cell]) -> None:
        super().__init__("calls that never end hold the GPU: this process cannot use it any more")
        self.cells = cells


class NothingRan(ContractError):
    """A check without result: nothing ran, or nothing of an op that was named. `cells` have the reasons."""

    def __init__(self, message: str, cells: list[Cell]) -> None:
        super().__init__(message)
        self.cells = cells


def _something_ran(cells: list[Cell], request: Request) -> None:
    ran = {c.op for c in cells if c.status != UNSUPPORTED}
    if not ran:
        raise NothingRan(f"nothing was checked: {_why_nothing(cells)}", cells)
    for name in request.ops:
        if name not in ran:
            mine = [c for c in cells if c.op == name]
            raise NothingRan(f"nothing of {name} was checked: {_why_nothing(mine)}", cells)


def quick_check(
    op_name: str, device: torch.device, backend: str | None = None, options: Mapping[str, Any] | None = None
) -> list[str]:
    """Failures because of which an op must not be timed here; none if it may. Runs small cases with these
    options, on this backend or the default one: a matter of seconds. The whole proof is `isobit check`."""
    name = backend or default_backend(known_op(op_name), device)
    asked = Request(ops=(op_name,), backends=(name,), laws=QUICK, device=device, heavy=False)
    cells = run(replace(asked, vary=dict(options or {})))
    return [_failed(c) for c in cells if c.status == FAIL]


def quick_checks(pairs: Sequence[tuple[str, str]], device: torch.device) -> dict[tuple[str, str], list[str]]:
    """The same for several ops, each on one backend and with plain options, by processes that start once."""
    ops, backends = (tuple(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    asked = Request(ops=ops, backends=backends, laws=QUICK, device=device, heavy=False)
    failures: dict[tuple[str, str], list[str]] = {pair: [] for pair in pairs}
    for cell in run(asked, only=set(pairs)):
        if cell.status == FAIL:
            failures[cell.op, cell.backend].append(_failed(cell))
    return failures


def _failed(cell: Cell) -> str:
    return f"{cell.law} {cell.case}: {cell.reason}"


def default_backend(op: Op, device: torch.device) -> str:
    """The backend that serves a plain call on this device."""
    backend = op.explain(**small_args(op, device)).backend
    assert backend is not None
    return backend


def observations(request: Request) -> list[dict[str, Any]]:
    """Observations that the ops of a request record on a GPU: facts, not promises."""
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


def _is_elsewhere(op: Op, backend: str, law: str, request: Request) -> bool:
    """Runs in a worker: what needs Triton's interpreter if this process compiles kernels; and in a check of
    all laws or all ops on a CPU also compilation, which takes as long as all the rest if kernels are not
    cached."""
    if triton_is_interpreted() or request.device.type != "cpu":
        return False
    if law == "compile":
        named = request.backends or (request.laws and request.ops)
        return not named and backend in proof_of(op).kernels
    return _interpretable(op, backend, request)


def _is_shared(op: Op, request: Request) -> bool:
    """Whether workers take the cases of all laws: on a GPU, where compiling kernels takes most of the
    time."""
    one = request.case is not None or request.dims is not None
    return request.device.type == "cuda" and not one and not isinstance(op, Candidate)


def _shared(op: Op, backend: str, request: Request) -> list[Request]:
    """The requests for workers on a GPU, case by case."""
    never = _cannot_serve(op, backend, request.device)
    return [
        replace(asked, ops=(op.name,), backends=(backend,), laws=(law,), case=case.name)
        for law in request.laws or LAWS
        if law == "compile" or never is None
        for asked in [request.for_law(law)]
        for case in _light_enough(op, backend, law, asked)
    ]


def _elsewhere(op: Op, backend: str, request: Request) -> list[Request]:
    """The requests for workers, law by law."""
    if _is_shared(op, request):
        return _shared(op, backend, request)
    laws = [law for law in request.laws or LAWS if _is_elsewhere(op, backend, law, request)]
    return [
        replace(request.for_law(law), ops=(op.name,), backends=(backend,), laws=(law,))
        for law in laws
        if cases_of(op, backend, law, request)
    ]


def _light_enough(op: Op, backend: str, law: str, request: Request) -> list[Case]:
    """The cases of a law that run on this backend and device. A check of all laws on a CPU has heavy ones for
    accuracy only, and where a law has no others."""
    # Heavy cases take minutes each there.
    slow = _interpretable(op, backend, request) or backend in proof_of(op).slow or not request.heavy
    slow = slow or (isinstance(op, Candidate) and request.device.type == "cpu")
    no_gpu = request.device.type == "cpu"
    cases = [c for c in cases_of(op, backend, law, request) if not (c.gpu_gb and no_gpu)]
    light = [c for c in cases if not c.heavy]
    brief = no_gpu and request.brief and law != "accuracy" and bool(light)
    return light if slow or brief else cases


def how_many(request: Request) -> Counter[str]:
    """How many cells with a case a request has, by op."""
    count, request = Counter[str](), _brief_if_whole(request)
    for op, backend in candidates(ops_of(request), request):
        never = _cannot_serve(op, backend, request.device)
        for law in request.laws or LAWS:
            why = op.lacks.get(law) if isinstance(op, Candidate) else never if law != "compile" else None
            if why is None or _is_elsewhere(op, backend, law, request):
                count[op.name] += len(_light_enough(op, backend, law, request))
    return count


def _cells_here(op: Op, backend: str, request: Request) -> Iterator[Cell]:
    never = _cannot_serve(op, backend, request.device)
    for law in request.laws or LAWS:
        if _is_elsewhere(op, backend, law, request):
            continue
        asked = request.for_law(law)
        why = op.lacks.get(law) if isinstance(op, Candidate) else never if law != "compile" else None
        if why is not None:
            again = _command(op, backend, law, None, asked)
            yield Cell(op.name, backend, law, "", UNSUPPORTED, why, command=again)
            continue
        if not _is_shared(op, request):
            for case in _light_enough(op, backend, law, asked):
                cell, error = _one(op, backend, law, case, asked)
                yield cell
                if isinstance(error, NeverEnds):
                    raise error


def _cannot_serve(op: Op, backend: str, device: torch.device) -> str | None:
    """The reason why a backend can serve nothing on this device, or None."""
    try:
        op.explain(**small_args(op, device, backend), backend=backend)
    except UnsupportedError as why:
        return str(why)
    except RuntimeError as error:
        if device.type != "cuda" or not is_full(error):
            raise
        raise Full(in_words(device)) from None
    return None


def _one(op: Op, backend: str, law: str, case: Case, request: Request) -> tuple[Cell, BaseException | None]:
    """A cell, and an error that was raised."""
    cell = Cell(op.name, backend, law, case.name, OK, command=_command(op, backend, law, case, request))
    # A check of all laws would spend most of its time compiling. A dtype that is named is compiled in full.
    second = not request.dtypes and case.dtype != small_case(proof_of(op).of(backend)).dtype
    trial = Trial(
        op, backend, request.device, case, arch_key(request.device),
        request.inputs, request.cotangents != "none", request.cotangents, request.inputs.seed,
        targets=request.targets,
        brief=request.brief, one_target=request.brief and second,
        tolerances=request.tolerances,
        judges_memory=not isinstance(op, Candidate) or "memory" in request.laws,
    )  # fmt: skip
    cell.numerics, cell.inputs = trial.numerics, described(op, case, request, trial.arch)
    start = time.perf_counter()
    if isinstance(op, Candidate):
        with preserved() as changed, compiled_anew():
            error = _judge(cell, trial)
        cell.reason += "" if error is None or isinstance(error, NeverEnds) else _hint(error, op, trial)
        blame_for(cell, list(dict.fromkeys(op.first_changes() + changed)))
    else:
        error = _judge(cell, trial)
    cell.seconds = time.perf_counter() - start
    return cell, error


def _judge(cell: Cell, trial: Trial) -> BaseException | None:
    """Run a cell's law and store its verdict. Returns an unexpected exception, None otherwise."""

    def law() -> list[OutputCheck]:
        _fits(trial.op, trial.case, trial.device)
        for seed in range(trial.inputs.seed, trial.inputs.seed + DRAWS):
            inputs = replace(trial.inputs, seed=seed)
            checks = LAWS[cell.law].run(replace(trial, inputs=inputs, grad_seed=seed))
            cell.inputs |= {"seed": seed, "grad_seed": seed}
            if not _cannot_show(checks):
                break
        return checks

    error = judge(cell, law, lambda error: raised_at(error, trial.op, trial.backend, __file__))
    if error is not None and trial.device.type == "cuda" and is_full(error):
        cell.reason = f"{cell.reason.splitlines()[0]}; {in_words(trial.device)}"
    return error


def _cannot_show(checks: Sequence[OutputCheck]) -> bool:
    """Whether all is well but for a control: another order of a sum has changed no bit of these inputs."""
    wrong = [check for check in checks if not check.passed]
    return bool(wrong) and all(check.output == "control" for check in wrong)


def _hint(error: BaseException, op: Candidate, trial: Trial) -> str:
    """What to do about an error that may not be the function's fault."""
    if trial.device.type == "cpu" and "active drivers" in str(error) and not triton_is_interpreted():
        return ". On a CPU Triton's kernels need TRITON_INTERPRET=1 in the environment"
    if none := op.given_none(trial.args()):
        called = f". It was called with {none}, which {op.name} allows"
        return f"{called}: raise NotImplementedError for what it does not serve"
    return ""


def _fits(op: Op, case: Case, device: torch.device) -> None:
    spec = next(p.spec for p in op.contract.params if p.spec is not None)
    if case.dtype not in spec.dtypes:
        raise Unsupported(f"{op.name} takes {', '.join(map(dtype_name, spec.dtypes))}")
    if case.gpu_gb and device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory / 1e9
        if there < case.gpu_gb:
            raise Unsupported(f"needs a GPU with {case.gpu_gb} GB, this one has {there:.0f}")


def _command(op: Op, backend: str, law: str, case: Case | None, request: Request) -> str:
    """The command that repeats a cell; without a case, all cells of its law."""
    if request.candidate is not None and request.candidate.flags is None:
        return _call(op, law, case, request)  # no command line could import the function
    if case is None:
        return f"{request.start(op.name, backend)} {request.law_flags(law)} {request.options()}"
    one = f" --dtype {dtype_name(case.dtype)}" if request.dims is not None or request.dtypes else ""
    one += "" if request.dims is not None else f" --case '{case.name}'"
    return f"{request.start(op.name, backend)} {request.law_flags(law)} {request.options()}{one}"


def _call(op: Op, law: str, case: Case | None, request: Request) -> str:
    """The same as a call of `isobit.testing.check`."""
    given: dict[str, Any] = {"op": op.name, "laws": (law,), "device": str(request.device)}
    if request.dims is not None:
        given["dims"] = request.dims
    elif case is not None:
        given["case"] = case.name
    if case is not None and (request.dims is not None or request.dtypes):
        given["dtypes"] = (case.dtype,)
    given |= {"options": request.vary} if request.vary else {}
    return f"isobit.testing.check(<the function>, {', '.join(f'{k}={v!r}' for k, v in given.items())})"
