"""The laws of behaviour: bad input, PyTorch's machinery, and memory."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.check.candidate import Candidate
from isobit.check.row_groups import row_groups_of
from isobit.check.rows import rows_of
from isobit.frame.composed import Composed
from isobit.frame.contract import ContractError, Param
from isobit.spec.compare import OutputCheck, failure, passed, same_bits
from isobit.spec.proof import Args, Mutant
from isobit.spec.trial import Trial, Unsupported, cloned, with_gradient

# Contract


def contract(trial: Trial) -> list[OutputCheck]:
    """Bad calls raise ContractError with the op and the argument, before any launch. A bad value in a row
    that is live is reported where values may be read, and makes only that row NaN where they may not."""
    args = trial.args()
    if trial.forward(args)[0].numel() == 0:
        raise Unsupported("no rows: most bad calls need one to be bad")
    checks = []
    for mutant in [*_derived_mutants(trial, args), *trial.proof.mutants]:
        checks.append(_rejects(trial, mutant, args))
    return checks + _unknown_controls(trial, args) + _bad_values(trial, args)


def _derived_mutants(trial: Trial, args: Args) -> list[Mutant]:
    """What can be wrong with each argument, derived from the contract."""
    result: list[Mutant] = []
    bound: set[str] = set()  # dimensions that have a size from earlier arguments
    for p in (p for p in trial.op.contract.params if p.name in args):
        if p.scalar is not None:
            result.append(
                Mutant(f"{p.name} of another type", p.name, partial(_replaced, name=p.name, value="text"))
            )
        if p.spec is not None and isinstance(args[p.name], Tensor):
            result += _tensor_mutants(p, args[p.name], bound)
            bound |= set(p.spec.dims)
    return result


def _replaced(args: Args, name: str, value: Any) -> Args:
    return args | {name: value}


def _tensor_mutants(p: Param, given: Tensor, bound: set[str]) -> list[Mutant]:
    def change(what: str, f: Callable[[Tensor], Any]) -> Mutant:
        return Mutant(f"{p.name} {what}", p.name, lambda a: a | {p.name: f(a[p.name])})

    assert p.spec is not None
    result = [
        change("as a list", lambda t: t.tolist()),
        change("complex", lambda t: torch.zeros(t.shape, dtype=torch.complex64, device=t.device)),
    ]
    if bound:  # the first argument fixes the device
        result.append(change("on another device", lambda t: t.to("meta")))
        result.append(change("with one dimension more", lambda t: t[..., None]))
    for i, dim in enumerate(p.spec.dims):
        if dim in bound and given.ndim:
            axis = 0 if dim == "*" else i - len(p.spec.dims)
            # Not a slice of the last dimension: its strides would be wrong as well.
            less = torch.arange(1, given.shape[axis], device=given.device)
            what = "row" if dim == "*" else dim
            if dim != "*" or given.ndim >= len(p.spec.dims):
                result.append(change(f"one {what} short", partial(_selected, axis=axis, index=less)))
    if any(dim != "*" for dim in p.spec.dims):
        result.append(change("without dimensions", lambda t: t.reshape(-1)[0]))
    if p.spec.contiguous_last:
        result.append(change("with strided columns", lambda t: torch.stack([t, t], -1)[..., 0]))
    return result


def _selected(t: Tensor, axis: int, index: Tensor) -> Tensor:
    return t.index_select(axis, index)


def _rejects(trial: Trial, mutant: Mutant, args: Args) -> OutputCheck:
    try:
        trial.call(mutant.change(dict(args)), validate=mutant.values or None)
    except ContractError as error:
        head = f"{trial.op.name}({mutant.arg}"
        if f"{head}:" in str(error) or f"{head}=" in str(error):
            return passed(mutant.what, str(error))
        return failure(mutant.what, f"message does not say '{head}:': {error}")
    except Exception as error:
        return failure(mutant.what, f"raised {type(error).__name__} instead of ContractError: {error}")
    return failure(mutant.what, "was accepted")


def _unknown_controls(trial: Trial, args: Args) -> list[OutputCheck]:
    """An unknown backend or numerics class gives a message that lists the known ones."""
    device, backends = trial.device, trial.op.backends
    known = {"backend": {b.name for b in backends}, "numerics": {b.numerics_on(device) for b in backends}}
    checks = []
    for control, names in known.items():
        what = f"unknown {control}"
        try:
            trial.call(args | {"backend": None, control: "no_such_one"})
        except ContractError as error:
            listed = all(name in str(error) for name in names)
            said = passed(what, str(error))
            checks.append(said if listed else failure(what, f"message does not list the known ones: {error}"))
        else:
            checks.append(failure(what, "was accepted"))
    return checks


def _bad_values(trial: Trial, args: Args) -> list[OutputCheck]:
    if trial.proof.bad_value is None:
        return []
    bad, row = trial.proof.bad_value(args)
    checks = [_reports_bad_value(trial, bad, "validate=True", True)]
    if trial.device.type == "cpu":
        checks.append(_reports_bad_value(trial, bad, "validate=None on the CPU", None))
    if row is None:
        return checks
    good_out, good_grad = trial.backward(args)
    bad_out, bad_grad = trial.backward(bad, validate=False)
    pairs = [(n, g, b) for n, g, b in zip(trial.proof.outputs, good_out, bad_out, strict=True)]
    by_rows = rows_of(trial.op).args  # a gradient that all rows share has no row that could be NaN
    pairs += [(f"gradient:{n}", good_grad[n], bad_grad[n]) for n in good_grad if n in by_rows]
    rank = good_out[0].ndim  # leading dimensions
    for name, good, ours in pairs:
        good, ours = (x.flatten(0, rank - 1) if rank else x[None] for x in (good, ours))
        if not bool(ours[row].isnan().all()):
            checks.append(
                failure(
                    name, f"bad value in row {row}: result is not NaN but {ours[row].flatten()[:3].tolist()}"
                )
            )
        keep = torch.arange(len(good), device=good.device) != row
        checks.append(same_bits(name, ours[keep], good[keep], "rows next to one with a bad value"))
    return checks


def _reports_bad_value(trial: Trial, bad: Args, what: str, validate: bool | None) -> OutputCheck:
    try:
        trial.call(bad, validate)
    except ContractError as error:
        return passed(what, str(error))
    return failure(what, "a bad value in a live row was accepted")


# PyTorch's machinery


def traceable(trial: Trial) -> list[OutputCheck]:
    """opcheck with and without autocast, compile without graph breaks and without a recompilation per size,
    graph capture on a GPU, and a clear error for a second derivative."""
    if isinstance(trial.op, Composed):
        raise Unsupported(trial.op.untraceable)
    if isinstance(trial.op, Candidate):  # no torch.library op; a second derivative is its own matter
        trial.forward(trial.args())  # which says what is wrong with the form of its outputs
        checks = _compiles(trial)
    else:
        checks = [*_opcheck(trial), *_compiles(trial), *_second_derivative(trial)]
    if _on_gpu(trial):
        checks += _captures(trial)
    return checks


def _on_gpu(trial: Trial) -> bool:
    return trial.device.type == "cuda" and trial.backend not in trial.proof.slow


#: The tests of opcheck: schema and autograd's registration, forms of results, the traced op with gradients.
FORM, RESULTS, TRACED = (
    ("test_schema", "test_autograd_registration"), ("test_faketensor",), ("test_aot_dispatch_dynamic",),
)  # fmt: skip


def _tests(trial: Trial, inside: bool) -> tuple[str, ...]:
    """Those to run, inside autocast or outside. All; but in a check of all laws those that say something new.
    Autocast changes dtypes, not the schema. What PyTorch traces is the same for all backends of an op: for
    kernels in Triton's interpreter, which is slow, `_compiles` shows what the last test does."""
    slow = trial.op.backend_named(trial.backend).interpreted and trial.device.type == "cpu"
    if not trial.brief:
        return FORM + RESULTS + TRACED
    return (() if inside else FORM) + RESULTS + (() if slow else TRACED)


def _op_values(trial: Trial) -> tuple[Any, ...]:
    args = cloned(trial.args())
    for name in trial.leaves(args):
        args[name].requires_grad_()
    return trial.op.contract.to_torch(trial.op.bind(args | {"backend": trial.backend}))


def _opcheck(trial: Trial) -> list[OutputCheck]:
    # What the backend refuses it refuses here: PyTorch would take it for an error.
    trial.op.explain(**trial.args(), backend=trial.backend)
    checks = []
    for inside in (False, True):
        name = f"opcheck {'inside' if inside else 'outside'} autocast"
        with torch.autocast(trial.device.type, dtype=torch.bfloat16, enabled=inside):
            torch.library.opcheck(trial.op.torch_op, _op_values(trial), test_utils=_tests(trial, inside))
        checks.append(passed(name))
    return checks


def _compiles(trial: Trial) -> list[OutputCheck]:
    """One graph, the same bits, and no recompilation for another number of rows."""
    compiler = "inductor" if _on_gpu(trial) else "aot_eager"
    args, rows = trial.args(), rows_of(trial.op)
    lead = next(iter(rows.args))  # any tensor with rows; with several leading dimensions the first is varied
    axis = 0 if rows.merged else rows.args[lead]
    torch._dynamo.reset()

    controls, call, judged = trial.controls(), trial.op.function, trial.proof.judged  # not to be traced
    assert call is not None

    def step(args: Args) -> tuple[Tensor, ...]:
        outputs = call(**controls | args)
        return judged(args, outputs if isinstance(outputs, tuple) else (outputs,))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=compiler)
    checks, N = [], args[lead].shape[axis]
    if N == 0:
        raise Unsupported("no rows: PyTorch compiles sizes 0 and 1 apart")
    groups = row_groups_of(trial.proof, args, N, trial.device)
    first = max(groups.count, 5)
    sizes = {n for t in args.values() if isinstance(t, Tensor) for n in t.shape} - {N}
    while first in sizes:  # PyTorch treats dimensions of equal size as one
        first += 1
    for attempt, size in enumerate((first, first - 2) if trial.brief else (first, first - 2, first - 3)):
        index = torch.arange(size, device=trial.device) % groups.count
        axes = {n: 0 if rows.merged else rows.args[n] for n in rows.present(args)}
        few = args | {n: args[n].index_select(axis, groups.rows(index)) for n, axis in axes.items()}
        few = groups.args_of(few, index.tolist())
        results = []
        for run in (step, compiled):
            mine = cloned(few)
            # The first call compiles; after that a recompilation is an error.
            with torch.compiler.set_stance("fail_on_recompile" if attempt and run is compiled else "default"):
                results.append(_with_gradients(trial, run, mine))
        names = [*trial.proof.outputs, *(f"gradient:{n}" for n in trial.leaves(few))]
        for name, eager, graph in zip(names, *results, strict=True):
            checks.append(same_bits(name, graph, eager, f"compiled at {size} rows"))
    torch._dynamo.reset()
    return checks


def _with_gradients(
    trial: Trial, run: Callable[[Args], tuple[Tensor, ...]], args: Args, given: list[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Outputs, then gradients of all leaves."""
    leaves = [args[name].requires_grad_() for name in trial.leaves(args)]
    outputs = run(args)
    cotangents = trial.cotangents(outputs) if given is None else given
    several, given = with_gradient(outputs, cotangents)
    return (*outputs, *(torch.autograd.grad(several, leaves, given) if leaves else ()))


def _second_derivative(trial: Trial) -> list[OutputCheck]:
    args = cloned(trial.args())
    names = trial.leaves(args)
    if not names:
        return []
    leaves = [args[name].requires_grad_() for name in names]
    outputs = trial.call(args)
    (grad, *_) = torch.autograd.grad(outputs[0].sum(), leaves, create_graph=True)
    if not grad.requires_grad:
        return _constant_gradient(trial, grad, names)
    try:
        torch.autograd.grad(grad.float().sum(), leaves, allow_unused=True)
    except RuntimeError as error:
        if trial.op.name in str(error) and "second derivative" in str(error):
            return [passed("second derivative", str(error))]
        return [failure("second derivative", f"unclear error: {error}")]
    return [failure("second derivative", "was computed without an error")]


def _constant_gradient(trial: Trial, grad: Tensor, names: Sequence[str]) -> list[OutputCheck]:
    """A gradient without a graph is that of a linear op, or a second derivative would be missing silently."""
    other = replace(trial, inputs=replace(trial.inputs, seed=trial.inputs.seed + 1)).args()
    args = cloned(trial.args() | {name: other[name] for name in names})
    outputs = trial.call(args | {name: args[name].requires_grad_() for name in names})
    (again, *_) = torch.autograd.grad(outputs[0].sum(), [args[name] for name in names])
    return [same_bits("second derivative", again, grad, "the gradient at other inputs: it has no graph")]


def _captures(trial: Trial) -> list[OutputCheck]:
    """Captured once, replayed with other values, forward and backward."""
    first, second = trial.args(), trial.args()
    floats = [n for n, t in first.items() if isinstance(t, Tensor) and t.is_floating_point()]
    changed = (trial.leaves(first) or floats)[0]
    second[changed].copy_(second[changed].flip(-1).nan_to_num())
    static = cloned(first)
    given = trial.cotangents(trial.forward(first))

    def step() -> tuple[Tensor, ...]:
        return _with_gradients(trial, trial.call, static, given)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        static[changed].copy_(second[changed])
    graph.replay()
    torch.cuda.synchronize()
    outputs, grads = trial.backward(second)
    names = [*trial.proof.outputs, *(f"gradient:{n}" for n in grads)]
    eager = (*outputs, *grads.values())
    return [
        same_bits(n, c.detach(), e, "graph replay") for n, c, e in zip(names, captured, eager, strict=True)
    ]


# Memory


def memory(trial: Trial) -> list[OutputCheck]:
    """Peak memory beyond inputs, outputs and gradients stays under the declared bound. That bound is a
    promise of isobit's kernels: what another function takes is reported, and judged if this law is named."""
    with _older_heap_aside():
        return _memory(trial)


def _memory(trial: Trial) -> list[OutputCheck]:
    args = trial.args()
    leaves = [args[name] for name in trial.leaves(args)]
    cotangents = trial.cotangents(trial.forward(args))

    def forward() -> Any:
        with torch.no_grad():
            return trial.call(args)

    def forward_backward() -> Any:
        outputs = trial.call(args)
        several, given = with_gradient(outputs, cotangents)
        return [o.detach() for o in outputs], torch.autograd.grad(several, leaves, given)

    checks = []
    runs: dict[str, Callable[[], Any]] = {"fwd": forward} | ({"fwd_bwd": forward_backward} if leaves else {})
    for direction, run in runs.items():
        for leaf in leaves:
            leaf.requires_grad_(direction != "fwd")
        if direction != "fwd" or trial.device.type != "cpu":  # there the forward above was the first call
            run()  # compile and warm up
        extra = peak_extra_bytes(run, trial.device)
        bound = trial.proof.memory(trial.case, trial.backend, direction)
        check = failure(direction, f"{extra:,} bytes beyond inputs and outputs, bound {bound:,}")
        check.max_abs, check.atol = float(extra), float(bound)
        check.passed = extra <= bound or not trial.judges_memory
        checks.append(check)
    return checks


@contextmanager
def _older_heap_aside() -> Iterator[None]:
    """Excludes all existing objects from garbage collection: searching them would take longer than most
    measured calls."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def peak_extra_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Peak memory while `run` runs, beyond what was allocated before and what it returns."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = run()
        torch.cuda.synchronize(device)
        peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del kept
        return peak - max(before, after)
    with quiet_stderr(), torch.profiler.profile(profile_memory=True) as profile:
        kept = run()
        gc.collect()  # reference cycles of Triton's interpreter are not results: they count as extra
    now = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak - max(0, now)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The C++ side of the profiler writes log lines to standard error, past Python."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
