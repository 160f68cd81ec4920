"""The laws of behaviour: bad input, PyTorch's machinery, memory, and compilation without a GPU."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.arch import triton_is_interpreted
from isobit.blocks.launch import Recorder
from isobit.check.compare import OutputCheck, failure, same_bits
from isobit.check.proof import Args, Mutant
from isobit.check.trial import LawBroken, Trial, Unsupported, cloned
from isobit.contract import ContractError, Param

#: Targets that every Triton kernel must compile for, on any machine.
TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64))


def passed(what: str, message: str = "") -> OutputCheck:
    check = failure(what, message)
    check.passed = True
    return check


# Contract


def contract(trial: Trial) -> list[OutputCheck]:
    """Bad calls raise ContractError naming the op and the argument, before any launch; a bad token id in a
    live row is reported where values may be read and poisons that row alone where they may not."""
    args = trial.args()
    if trial.forward(args)[0].numel() == 0:
        raise Unsupported("no rows: most bad calls need one to be bad")
    checks = []
    for mutant in [*_derived_mutants(trial, args), *trial.proof.mutants]:
        checks.append(_rejects(trial, mutant, args))
    checks.append(_unknown_backend(trial, args))
    return checks + _bad_values(trial, args)


def _derived_mutants(trial: Trial, args: Args) -> list[Mutant]:
    """What can be wrong with each argument, from the contract alone."""
    found = []
    for index, p in enumerate(p for p in trial.op.contract.params if p.name in args):
        if p.spec is None:
            found.append(
                Mutant(f"{p.name} of another type", p.name, partial(_replaced, name=p.name, value="text"))
            )
        elif args[p.name] is not None:
            found += _tensor_mutants(p, first=index == 0)
    return found


def _replaced(args: Args, name: str, value: Any) -> Args:
    return args | {name: value}


def _tensor_mutants(p: Param, first: bool) -> list[Mutant]:
    def change(what: str, f: Callable[[Tensor], Any]) -> Mutant:
        return Mutant(f"{p.name} {what}", p.name, lambda a: a | {p.name: f(a[p.name])})

    assert p.spec is not None
    found = [
        change("as a list", lambda t: t.tolist()),
        change("complex", lambda t: torch.zeros(t.shape, dtype=torch.complex64, device=t.device)),
    ]
    if not first:  # the first argument fixes device and sizes
        found.append(change("on another device", lambda t: t.to("meta")))
        found.append(change("one row short", lambda t: t[1:]))
        found.append(change("with one dimension more", lambda t: t[..., None]))
    if p.spec.contiguous_last:
        found.append(change("without dimensions", lambda t: t.reshape(-1)[0]))
        found.append(change("with strided columns", lambda t: torch.stack([t, t], -1)[..., 0]))
    return found


def _rejects(trial: Trial, mutant: Mutant, args: Args) -> OutputCheck:
    try:
        trial.proof.call(mutant.change(dict(args)), trial.backend)
    except ContractError as error:
        head = f"{trial.op.name}({mutant.arg}:"
        if head in str(error):
            return passed(mutant.what, str(error))
        return failure(mutant.what, f"message does not say {head!r}: {error}")
    except Exception as error:
        return failure(mutant.what, f"raised {type(error).__name__} instead of ContractError: {error}")
    return failure(mutant.what, "was accepted")


def _unknown_backend(trial: Trial, args: Args) -> OutputCheck:
    try:
        trial.proof.call(dict(args), "no_such_backend")
    except ContractError as error:
        if all(b.name in str(error) for b in trial.op.backends):
            return passed("unknown backend", str(error))
        return failure("unknown backend", f"message does not list the known ones: {error}")
    return failure("unknown backend", "was accepted")


def _bad_values(trial: Trial, args: Args) -> list[OutputCheck]:
    if trial.proof.bad_value is None:
        return []
    bad, row = trial.proof.bad_value(args)
    checks = [_reports_bad_value(trial, bad, "validate=True", True)]
    if trial.device.type == "cpu":
        checks.append(_reports_bad_value(trial, bad, "validate=None on the CPU", None))
    good_out, good_grad = trial.backward(args)
    bad_out, bad_grad = trial.backward(bad, validate=False)
    pairs = [(n, g, b) for n, g, b in zip(trial.proof.outputs, good_out, bad_out, strict=True)]
    pairs += [(f"gradient:{n}", good_grad[n], bad_grad[n]) for n in good_grad]
    rank = good_out[0].ndim  # leading dimensions
    for name, good, found in pairs:
        good, found = (x.flatten(0, rank - 1) if rank else x[None] for x in (good, found))
        if not bool(found[row].isnan().all()):
            checks.append(
                failure(
                    name, f"bad value in row {row}: result is not NaN but {found[row].flatten()[:3].tolist()}"
                )
            )
        keep = torch.arange(len(good), device=good.device) != row
        checks.append(same_bits(name, found[keep], good[keep], "rows beside one with a bad value"))
    return checks


def _reports_bad_value(trial: Trial, bad: Args, what: str, validate: bool | None) -> OutputCheck:
    try:
        trial.proof.call(bad, trial.backend, validate)
    except ContractError as error:
        return passed(what, str(error))
    return failure(what, "a bad value in a live row was accepted")


# PyTorch's machinery


def traceable(trial: Trial) -> list[OutputCheck]:
    """opcheck in and out of autocast, compile without graph breaks or a recompilation per size, graph
    capture on a GPU, and a clear error for a second derivative."""
    checks = [*_opcheck(trial), *_compiles(trial), _second_derivative(trial)]
    if trial.device.type == "cuda":
        checks += _captures(trial)
    return checks


def _op_values(trial: Trial) -> tuple[Any, ...]:
    args = cloned(trial.args())
    for name in trial.proof.grad_inputs:
        args[name].requires_grad_()
    args["backend"] = trial.backend
    return tuple(args.get(p.name, p.default) for p in trial.op.contract.params)


def _opcheck(trial: Trial) -> list[OutputCheck]:
    checks = []
    for inside in (False, True):
        name = f"opcheck {'inside' if inside else 'outside'} autocast"
        with torch.autocast(trial.device.type, dtype=torch.bfloat16, enabled=inside):
            torch.library.opcheck(trial.op._torch_op, _op_values(trial))
        checks.append(passed(name))
    return checks


def _compiles(trial: Trial) -> list[OutputCheck]:
    """One graph, the same bits, and no new compilation for another number of rows."""
    compiler = "inductor" if trial.device.type == "cuda" else "aot_eager"
    rows = [p.name for p in trial.op.contract.params if p.spec and p.spec.dims[:1] == ("*",)]
    args = trial.args()
    torch._dynamo.reset()

    def step(args: Args) -> tuple[Tensor, ...]:
        return trial.proof.call(args, trial.backend)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=compiler)
    checks, N = [], args[rows[0]].shape[0]
    if N == 0:
        raise Unsupported("no rows: PyTorch compiles sizes 0 and 1 apart")
    first = max(N, 5)
    while first in args[rows[0]].shape[1:]:  # PyTorch takes dimensions of one size for one dimension
        first += 1
    for attempt, size in enumerate((first, first - 2, first - 3)):
        index = torch.arange(size, device=trial.device) % N
        few = {k: v[index] if k in rows and v is not None else v for k, v in args.items()}
        results = []
        for run in (step, compiled):
            mine = cloned(few)
            for name in trial.proof.grad_inputs:
                mine[name].requires_grad_()
            # The first call compiles; from then on a recompilation is an error.
            with torch.compiler.set_stance("fail_on_recompile" if attempt and run is compiled else "default"):
                outputs = run(mine)
                leaves = [mine[name] for name in trial.proof.grad_inputs]
                grads = torch.autograd.grad(outputs, leaves, trial.cotangents(outputs))
            results.append((*outputs, *grads))
        names = [*trial.proof.outputs, *(f"gradient:{n}" for n in trial.proof.grad_inputs)]
        for name, eager, graph in zip(names, *results, strict=True):
            checks.append(same_bits(name, graph, eager, f"compiled at N={size}"))
    torch._dynamo.reset()
    return checks


def _second_derivative(trial: Trial) -> OutputCheck:
    args = cloned(trial.args())
    for name in trial.proof.grad_inputs:
        args[name].requires_grad_()
    leaf = args[trial.proof.grad_inputs[0]]
    outputs = trial.proof.call(args, trial.backend)
    (grad,) = torch.autograd.grad(outputs[0].sum(), leaf, create_graph=True)
    try:
        torch.autograd.grad(grad.float().sum(), leaf)
    except RuntimeError as error:
        if trial.op.name in str(error) and "second derivative" in str(error):
            return passed("second derivative", str(error))
        return failure("second derivative", f"unclear error: {error}")
    return failure("second derivative", "was computed without an error")


def _captures(trial: Trial) -> list[OutputCheck]:
    """Captured once, replayed on other contents, forward and backward."""
    first, second = trial.args(), trial.args()
    leaf = trial.proof.grad_inputs[0]
    second[leaf].copy_(second[leaf].flip(-1).nan_to_num())
    static = cloned(first)
    static[leaf].requires_grad_()

    def step() -> tuple[Tensor, ...]:
        outputs = trial.proof.call(static, trial.backend)
        return (*outputs, *torch.autograd.grad(outputs, [static[leaf]], cotangents))

    cotangents = trial.cotangents(trial.forward(first))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        static[leaf].copy_(second[leaf])
    graph.replay()
    torch.cuda.synchronize()
    outputs, grads = trial.backward(second)
    names = [*trial.proof.outputs, f"gradient:{leaf}"]
    eager = (*outputs, grads[leaf])
    return [
        same_bits(n, c.detach(), e, "graph replay") for n, c, e in zip(names, captured, eager, strict=True)
    ]


# Memory


def memory(trial: Trial) -> list[OutputCheck]:
    """Peak memory beyond inputs, outputs and gradients stays under the declared bound."""
    args = trial.args()
    leaves = [args[name] for name in trial.proof.grad_inputs]
    cotangents = trial.cotangents(trial.forward(args))

    def forward() -> Any:
        with torch.no_grad():
            return trial.proof.call(args, trial.backend)

    def forward_backward() -> Any:
        outputs = trial.proof.call(args, trial.backend)
        return [o.detach() for o in outputs], torch.autograd.grad(outputs, leaves, cotangents)

    checks = []
    for direction, run in (("fwd", forward), ("fwd_bwd", forward_backward)):
        for leaf in leaves:
            leaf.requires_grad_(direction != "fwd")
        run()  # compile and warm up
        extra = peak_extra_bytes(run, trial.device)
        bound = trial.proof.memory(trial.case, trial.backend, direction)
        check = failure(direction, f"{extra:,} bytes beyond inputs and outputs, bound {bound:,}")
        check.max_abs, check.atol, check.passed = float(extra), float(bound), extra <= bound
        checks.append(check)
    return checks


def peak_extra_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Peak of memory while `run` runs, beyond what was there before and what it returns."""
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
    now = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak - max(0, now)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's C++ side writes its own log lines to standard error, past Python."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


# Ahead-of-time compilation


def compiles(trial: Trial) -> list[OutputCheck]:
    """Every kernel compiles for sm_80, sm_90 and gfx942, with or without a GPU in the machine."""
    if trial.backend == "reference":
        raise Unsupported("plain PyTorch: nothing to compile")
    if triton_is_interpreted():
        raise LawBroken("kernels are interpreted in this process and cannot be compiled")
    import triton
    from triton.backends.compiler import GPUTarget

    recorder = Recorder()
    trial.proof.record(recorder, trial.case.dtype)
    if not recorder.launches:
        raise LawBroken("no launch was recorded")
    checks, seen = [], set()
    for name, source, options in recorder.sources():
        for target in TARGETS:
            key = (name, source.hash(), str(options), target)
            if key in seen:
                continue
            seen.add(key)
            done = triton.compile(source, target=GPUTarget(*target), options=options)
            checks.append(
                passed(f"{name} {target[0]}:{target[1]}", f"{done.metadata.shared} bytes of shared memory")
            )
    return checks
