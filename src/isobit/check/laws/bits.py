"""The laws of bits. Equal bits prove something only if other bits were possible. So the invariant law has
controls in every run: changes that must alter bits."""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from isobit.check.laws.no_sum import SHOWN, nothing_is_added
from isobit.check.laws.shared import shared_gradients
from isobit.check.laws.stream import sums_over_rows
from isobit.check.laws.strides import strides_of_arguments
from isobit.check.row_groups import row_groups_of
from isobit.check.rows import Rows, rows_of
from isobit.frame.backend import NONE, UnsupportedError
from isobit.spec.compare import OutputCheck, differing, same_bits, same_values
from isobit.spec.proof import Args, Control, NoSum, Sample
from isobit.spec.proofs import is_candidate
from isobit.spec.trial import LawBroken, NeverEnds, Trial, Unsupported, cloned

Run = tuple[tuple[Tensor, ...], dict[str, Tensor]]
Result = TypeVar("Result")

#: Calls that are under way on two streams, seconds that they may take, and bytes that their results may take.
CALLS, PATIENCE_S, HELD_BYTES = 64, 60.0, 1 << 30


def repeatable(trial: Trial) -> list[OutputCheck]:
    """The same call gives the same bits, forward and backward: also from the third call on, when recorded
    launches may be repeated, and in other memory, since the results of earlier calls are still alive. And a
    call reads what its tensors hold now: it does not return the results of what they held before. Without
    gradients, which may be another path, it also leaves alone what it returned before. It may be the first
    call of its thread, in which no context of the GPU is current yet, or one of many that are under way on
    two streams."""
    args = trial.args()
    # isobit records launches on a GPU only. What others keep from call to call is not known.
    twice = trial.brief and trial.device.type == "cpu" and not is_candidate(trial.op)
    first, *others = (trial.backward(args) for _ in range(2 if twice else 4))
    _of_these_contents(trial, args)
    _apart(trial, [first, *others])
    runs = zip(("second", "third", "fourth"), others, strict=False)
    checks = [
        check
        for which, run in runs
        for check in _compare_runs(trial, run, first, f"{which} run against first")
    ]
    checks += _first_of_its_thread(trial, args)
    if trial.device.type == "cuda":
        checks += _side_by_side(trial, args)
    return checks


def _first_of_its_thread(trial: Trial, args: Args) -> list[OutputCheck]:
    """A forward in a new thread. Its arguments are copied before, because that would set a context. On a CPU
    it gets as many threads as this one, because sums of PyTorch depend on their number."""
    here = trial.forward(args)
    with ThreadPoolExecutor(
        1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as thread:
        there = thread.submit(trial.call, cloned(args)).result()
    _apart(trial, [(here, {}), (there, {})])
    return _compare_runs(trial, (there, {}), (here, {}), "in a thread of its own against this one")


def _side_by_side(trial: Trial, args: Args) -> list[OutputCheck]:
    """Calls on two streams at once have the bits of one alone."""
    alone = trial.forward(args)
    if CALLS * sum(o.nbytes for o in alone) > HELD_BYTES:
        return []

    def call() -> tuple[Tensor, ...]:
        """With a copy of what it writes into, made on the same stream; tensors are only read."""
        written = {n: v.clone() for n, v in args.items() if not isinstance(v, Tensor) and hasattr(v, "clone")}
        return trial.call(args | written)

    runs = calls_on_two_streams(call, trial.device)
    pairs = ([differing(o, a) for o, a in zip(run, alone, strict=True)] for run in runs)
    others = [run for run, pair in zip(runs, pairs, strict=True) if any(bool(d.any()) for d in pair)]
    what = f"{len(others)} of {CALLS} calls on two streams against one alone"
    return _compare_runs(trial, ((others or runs)[-1], {}), (alone, {}), what)


def calls_on_two_streams(call: Callable[[], Result], device: torch.device) -> list[Result]:
    """What calls return on two streams in turn, without waiting for any. Their kernels compete for the SMs:
    programs that wait for one another may wait for one that cannot start. And calls must not share memory."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize(device)
    runs, ends = [], []
    for i in range(CALLS):
        with torch.cuda.stream(streams[i % 2]):
            runs.append(call())
    for stream in streams:
        ends.append(torch.cuda.Event())
        ends[-1].record(stream)
    late = time.monotonic() + PATIENCE_S
    while not all(end.query() for end in ends):
        if time.monotonic() > late:
            raise NeverEnds(f"{CALLS} calls on two streams do not end: after {PATIENCE_S:g} s they still run")
        time.sleep(0.001)
    return runs


def _apart(trial: Trial, runs: Sequence[Run]) -> None:
    """No two calls return the same memory: the later one would overwrite what the earlier one returned, and
    comparing the two would compare a tensor with itself."""
    outputs = [(name, [run[0][i] for run in runs]) for i, name in enumerate(trial.proof.outputs)]
    gradients = [(f"gradient of {name}", [run[1][name] for run in runs]) for name in runs[0][1]]
    for name, tensors in outputs + gradients:
        places = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
        if len(set(places)) < len(places):
            raise LawBroken(
                f"{name} of two calls is the same memory: the later call overwrites what the earlier returned"
            )


def _not_inputs(trial: Trial, args: Args, outputs: Sequence[Tensor]) -> None:
    """No result is an argument: whoever changes one would change the other."""
    given = {
        t.untyped_storage().data_ptr(): n for n, t in args.items() if isinstance(t, Tensor) and t.numel()
    }
    for name, output in zip(trial.proof.outputs, outputs, strict=True):
        place = output.untyped_storage().data_ptr()
        if output.numel() and place in given:
            raise LawBroken(f"{name} is the memory of its input {given[place]}")


def _of_these_contents(trial: Trial, args: Args) -> None:
    """Called again without gradients, with the same tensors after something else was written into them, it
    must not give what it gave before: results or addresses may have been kept. The formula decides whether
    the results should differ. Nor may it write into what it returned for the first contents, which the caller
    still holds, or return one of its arguments."""
    other = replace(trial, inputs=replace(trial.inputs, seed=trial.inputs.seed + 1)).args()
    if trial.case.heavy or trial.case.gpu_gb or not _alike(args, other) or trial.refusal(other) is not None:
        return
    mine = cloned(args)
    with torch.no_grad():
        held = trial.call(mine)
        _not_inputs(trial, mine, held)
        before = [o.clone() for o in held]
        for name, value in other.items():
            if isinstance(value, Tensor):
                mine[name].untyped_storage().copy_(value.untyped_storage())
        after = trial.call(mine)
        plain = zip(trial.proof.formula(args), trial.proof.formula(other), strict=True)
    _apart(trial, [(held, {}), (after, {})])
    for name, now, then in zip(trial.proof.outputs, held, before, strict=True):
        if bool(differing(now, then).any()):
            raise LawBroken(f"{name} of an earlier call was overwritten by a later one with other values")
    if any(bool(differing(b, a).any()) for b, a in zip(before, after, strict=True)):
        return
    if any(_far(one, two) for one, two in plain):
        raise LawBroken("returned for other contents of its inputs what it had returned for the first ones")


def _alike(args: Args, other: Args) -> bool:
    """Whether one can be written over the other: nothing but what tensors hold differs."""

    def form(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes()

    plain = (Tensor, int, float, str, torch.dtype, type(None))
    known = all(isinstance(value, plain) for value in (*args.values(), *other.values()))
    same = known and args.keys() == other.keys()
    return same and all(form(value) == form(other[name]) for name, value in args.items())


def _far(one: Tensor, two: Tensor) -> bool:
    """Whether results differ by more than any rounding."""
    one, two = one.double().nan_to_num(), two.double().nan_to_num()
    return bool(((one - two).abs() > 0.1 * torch.maximum(one.abs(), two.abs())).any())


def _compare_runs(
    trial: Trial, ours: Run, other: Run, what: str, without: Container[int] = ()
) -> list[OutputCheck]:
    """All outputs except these, and all gradients."""
    names = [(i, n) for i, n in enumerate(trial.proof.outputs) if i not in without]
    checks = [same_bits(f"{i}:{n}", ours[0][i], other[0][i], what) for i, n in names]
    return checks + [same_bits(f"gradient:{n}", ours[1][n], other[1][n], what) for n in other[1]]


def written(trial: Trial) -> list[OutputCheck]:
    """Every element of every output is written: memory that is pre-filled with NaN changes nothing."""
    args = trial.args()
    clean = trial.backward(args)
    with poisoned_memory():
        poisoned = trial.backward(args)
    return _compare_runs(trial, poisoned, clean, "with NaN-filled memory")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Makes PyTorch fill what `torch.empty` returns with NaN (or the largest integer)."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill


# Independence of the batch


def invariant(trial: Trial) -> list[OutputCheck]:
    """Bits do not depend on the batch. Laws F and V: a row's bits do not depend on the other rows, their
    number or order, padding, chunking, strides, alignment, or on which other outputs are requested; if rows
    act in groups, not on other groups. Masked rows return what the formula says, with a gradient
    of 0. Law W: the bits of a sum over rows do not depend on masked rows, on layout, or on how the
    rows are split into two calls. Controls: another order of a sum changes bits; or it is shown that nothing
    is added."""
    _promises_bits(trial)
    if trial.case.data == "constant":
        raise Unsupported("constant inputs: every order of a sum of equal terms is the same")
    if trial.proof.invariant is not None:
        checks = trial.proof.invariant(trial)
    elif trial.proof.stream is not None:
        checks = sums_over_rows(trial, trial.proof.stream)
    else:
        checks = _by_rows(trial)
    if trial.proof.parts is not None:
        checks = trial.proof.parts(trial) + checks
    checks += strides_of_arguments(trial)
    if not any(check.output in ("control", SHOWN) for check in checks):
        raise LawBroken("no control: equal bits prove nothing; declare one, or NoSum with the reason")
    return trial.conclusive(checks)


def _promises_bits(trial: Trial) -> None:
    if trial.numerics == NONE:
        raise Unsupported(f"{trial.backend} has numerics class 'none' here: it promises accuracy, not bits")


def _by_rows(trial: Trial) -> list[OutputCheck]:
    rows, proof = rows_of(trial.op), trial.proof
    # Gradients of arguments that all rows share are sums over rows, so they depend on the batch.
    trial = replace(trial, only=tuple(n for n in trial.op.differentiable if n in rows.args))
    args = rows.flat(trial.args())
    whole = trial.backward(args)
    cotangents = trial.cotangents(whole[0])
    checks: list[OutputCheck] = []
    groups = row_groups_of(proof, args, rows.count(args), trial.device)
    N, unit = groups.count, "rows" if groups.groups is None else "groups"
    #: Outputs that are sums over the batch, and so depend on it.
    sums = [i for i, axis in enumerate(rows.outputs) if axis is None]
    #: Whether padding rows are excluded; otherwise they are rows of NaN like any other.
    excluded = "ignore_index" in trial.op.contract.names

    def compare(
        what: str, index: Tensor, changed: Args, take: Tensor | None = None, trial: Trial = trial,
        without: Container[int] = sums,
    ) -> None:  # fmt: skip
        """Rows `take` of the changed batch (all by default) must equal rows `index` of the whole one, with
        the same cotangents. All others are padding."""
        given = rows.of_outputs(cotangents, index)
        if take is not None:
            given = tuple(rows.spread(given, take, rows.count(changed), fill=1.0 if excluded else 0.0))
        outputs, grads = replace(trial, given=given).backward(changed)
        if take is not None:
            rest = _others(take, rows.count(changed))
            if excluded and len(rest):
                padded = rows.of_outputs(outputs, rest), rows.of_gradients(grads, rest)
                checks.extend(_as_excluded(what, trial, rows, rows.select(changed, rest[:1]), padded))
            outputs, grads = rows.of_outputs(outputs, take), rows.of_gradients(grads, take)
        base = rows.of_outputs(whole[0], index), rows.of_gradients(whole[1], index)
        checks.extend(_compare_runs(trial, (outputs, grads), base, what, without))

    def alone(what: str, index: Tensor) -> None:
        """Some units in a batch of their own."""
        chosen = groups.rows(index)
        compare(what, chosen, groups.args_of(rows.select(args, chosen), index.tolist()))

    gen = torch.Generator().manual_seed(7)
    everyone = torch.arange(N, device=trial.device)
    for size in sorted(n for n in {*proof.batch_sizes, N // 2, N - 1} if 0 < n < N):
        alone(f"{size} of {N} {unit} alone", torch.randperm(N, generator=gen)[:size].to(trial.device))
    alone(f"{unit} permuted", torch.randperm(N, generator=gen).to(trial.device))
    cuts = [0, *sorted({N // 3, N // 2 + 1}), N]  # like chunked prefill
    for first, end in pairwise(cuts):
        if first < end and end - first < N:
            alone(f"chunk [{first}, {end})", everyone[first:end])
    all_rows, pad = groups.rows(everyone), groups.sizes[0] if N else 1
    extra = proof.padding(args, 3 * pad)
    around = rows.join(
        args | _head(rows, extra, 0, 2 * pad), args, args | _head(rows, extra, 2 * pad, 3 * pad)
    )
    around = groups.args_of(around, [0, 0, *range(N), 0])
    if trial.refusal(around) is None:  # a candidate may not support masked rows
        compare(f"padding {unit} full of NaN around", all_rows, around, take=all_rows + 2 * pad)
    some = groups.rows(everyone[:: 2 if N > 1 else 1])
    among = _replaced(rows, args, proof.padding(args, len(all_rows)), keep=some)
    if trial.refusal(among) is None:
        compare(f"padding {unit} full of NaN in place of every other one", some, among, take=some)
    for layout in proof.layouts:
        # If the kernels cannot read a layout, another backend of their class serves it.
        laid = proof.lay_out(args, layout)
        if trial.refusal(laid) is not None:  # some layouts are schedules, which a candidate does not have
            continue
        compare(f"layout {layout}", all_rows, laid, trial=trial.in_class(laid), without=())
    for i, output in enumerate(trial.call(cloned(args), alone=True)[: len(proof.outputs)]):
        if isinstance(output, Tensor):
            checks.append(same_bits(f"{i}:{proof.outputs[i]}", output, whole[0][i], "asked for alone"))
    if isinstance(proof.controls, NoSum):
        return [*checks, nothing_is_added(trial, args, proof.controls)]
    shown = [control for control in proof.controls if control.cotangents is None or whole[1]]
    return checks + [_control(trial, control, args, whole) for control in shown]


def _head(rows: Rows, extra: Args, first: int, end: int) -> Args:
    """Some of the padding rows."""
    return {n: extra[n].narrow(rows.args[n], first, end - first) for n in rows.present(extra)}


def _replaced(rows: Rows, args: Args, extra: Args, keep: Tensor) -> Args:
    """Padding rows everywhere except at the places to keep."""
    names = rows.present(args)
    kept = rows.select(args, keep)
    return args | {n: extra[n].index_copy(extra[n].ndim + rows.args[n], keep, kept[n]) for n in names}


def _others(taken: Tensor, total: int) -> Tensor:
    """The numbers of all other rows."""
    left = torch.ones(total, dtype=torch.bool, device=taken.device).index_fill(0, taken, False)
    return left.nonzero()[:, 0]


def _as_excluded(what: str, trial: Trial, rows: Rows, one: Args, padded: Run) -> list[OutputCheck]:
    """What padding rows return: the values that the formula has for one of them, and a gradient of 0."""
    by_rows = [i for i, axis in enumerate(rows.outputs) if axis is not None and padded[0][i].numel()]
    truth = trial.proof.formula(one) if by_rows else ()
    names = trial.proof.outputs
    pairs = [(f"{i}:{names[i]}", padded[0][i], truth[i].expand_as(padded[0][i])) for i in by_rows]
    pairs += [(f"gradient:{name}", g, g.new_zeros(()).expand_as(g)) for name, g in padded[1].items()]
    return [same_values(name, ours, other, f"{what}: what these return") for name, ours, other in pairs]


def _control(trial: Trial, control: Control, args: Args, whole: Run) -> OutputCheck:
    """The same sum in another order must change some bit, or equal bits above prove nothing."""
    if control.cotangents is None:
        before, after = whole[0], control.back(trial.forward(control.change(args)))
    else:
        given = tuple(control.cotangents(trial.cotangents(whole[0])))
        _, grads = replace(trial, given=given).backward(control.change(args))
        names = control.of or whole[1]
        before, after = tuple(whole[1][n] for n in names), tuple(grads[n] for n in names)
    return trial.control(control.what, before, after)


# Backends of one class


def agree(trial: Trial) -> list[OutputCheck]:
    """All backends of one numerics class give the same bits, and if the class has a model, these are its
    bits."""
    _promises_bits(trial)
    proof, args = trial.proof, trial.args()
    others = _same_class(trial, args)
    shared = shared_gradients(trial)
    also = [] if proof.also is None else proof.also(trial)
    if proof.exact is None and not others:
        if shared or also:
            return trial.conclusive(shared, also)
        raise Unsupported(f"nothing else here keeps numerics class {trial.numerics!r}")
    ours = trial.backward(args)
    named = dict(zip(proof.outputs, ours[0], strict=True)) | {f"gradient:{n}": g for n, g in ours[1].items()}
    checks = []
    if proof.exact is not None:
        cotangents = trial.cotangents(ours[0]) if ours[1] else []
        for name, (where, expected) in _model_bits(trial, args, cotangents).items():
            sample = named[name][where].cpu()
            checks.append(same_bits(name, sample, expected, f"{trial.numerics} by its model"))
        if not isinstance(proof.controls, NoSum):
            checks.append(_model_control(trial, args, cotangents, proof.controls[0], named))
    for other in others:
        theirs = replace(trial, backend=other).backward(args)
        checks += _compare_runs(trial, ours, theirs, f"{trial.backend} against {other}")
    return trial.conclusive(shared, also, checks)


def _model_bits(trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """What the model expects. It takes the operations of the device on which its inputs are, and some
    backends compute on the CPU wherever their tensors are."""
    assert trial.proof.exact is not None
    if trial.backend in trial.proof.slow:
        args = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in args.items()}
        cotangents = [g.cpu() for g in cotangents]
    return trial.proof.exact(args, cotangents)


def _model_control(
    trial: Trial, args: Args, cotangents: list[Tensor], control: Control, named: dict[str, Tensor]
) -> OutputCheck:
    """The model with another order must not agree, or the sample could not detect an order."""
    given = [] if control.cotangents is None else control.cotangents(cotangents)
    samples = _model_bits(trial, control.change(args), given)
    samples = {n: samples[n] for n in [f"gradient:{name}" for name in control.of] or samples}
    ours = [named[name][where].cpu() for name, (where, _) in samples.items()]
    return trial.control(f"the model of {control.what}", ours, [bits for _, bits in samples.values()])


def _same_class(trial: Trial, args: Args) -> list[str]:
    """Other backends of the same class that can serve this call."""
    result = []
    for other in trial.op.backends:
        same = other.numerics_on(trial.device) == trial.numerics and other.name != trial.backend
        if not same or (trial.case.heavy and other.name in trial.proof.slow):
            continue
        try:
            trial.op.explain(**args, backend=other.name)
        except UnsupportedError:
            continue
        result.append(other.name)
    return result
