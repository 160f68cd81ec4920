"""The checker for other projects' test suites: check your own function against the laws of an op, or whether
the bits of a row depend on the batch, for any function of rows.

from isobit import testing

def test_my_kernel() -> None:
    testing.check(my_kernel, op="logp", laws=("accuracy", "gradient"))

def test_my_norm() -> None:
    testing.check_batch_invariance(my_norm, make_inputs, row_args=("x",), reduction=my_norm_backwards)
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from isobit.check import report
from isobit.check.any_function.runner import Named, RowRequest, rows_report, run_rows
from isobit.check.candidate import candidate_of
from isobit.check.effects import check_effects
from isobit.check.laws import LAWS
from isobit.check.request import Request
from isobit.check.runner import Stuck, run
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import default_device
from isobit.frame.op import known_op
from isobit.spec.proof import InputOptions
from isobit.spec.proofs import proof_of


def check(
    function: Callable[..., Any],
    op: str,
    *,
    adapter: Callable[[Any], Callable[..., Any]] | None = None,
    output_dtype: torch.dtype | None = None,
    laws: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] = (),
    dims: Mapping[str, int] | None = None,
    case: str | None = None,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Check a function against the laws of an op, like `isobit check --candidate`.

    Args:
        function: called by keyword, with the argument names of the op. Its signature determines which options
            it supports; cases with others are UNSUPPORTED, and are not failures.
        op: the name of the op, as for `isobit check --op`.
        adapter: adapt(function) -> function, if names or outputs differ.
        output_dtype: the dtype of its outputs, if it differs from the op's.
        laws: some of the laws; all by default.
        dtypes, dims, case, options: as on the command line; the declared cases by default.
        device: a GPU if there is one, by default.

    Returns:
        The report, as `isobit check --json` writes it.

    Raises:
        AssertionError: a law failed; the message is the report. If calls never end, the check ends with them,
            the message says so, and this process cannot use the GPU any more.
        ContractError: nothing could be checked, or a name is unknown.

    Example:
        >>> import torch
        >>> from isobit import testing
        >>> def mine(logits, token_ids):
        ...     return torch.log_softmax(logits.float(), -1).gather(-1, token_ids.long()[..., None])[..., 0]
        >>> report = testing.check(mine, op="logp", laws=("accuracy",), device="cpu")
        >>> report["fail"]
        0
    """
    if isinstance(laws, str) or isinstance(dtypes, torch.dtype):
        raise ContractError("laws and dtypes are sequences: laws=('accuracy',), dtypes=(torch.bfloat16,)")
    for law in laws:
        if law not in LAWS:
            raise ContractError(f"unknown law {law!r}; known: {', '.join(LAWS)}")
    if case is not None and dims is not None:
        raise ContractError("case selects a declared case and dims make one: use only one of them")
    device = _usable(device)
    named, flags = known_op(op), _flags(function, adapter, output_dtype)
    candidate = candidate_of(
        named, proof_of(named), function, device, name=_name(function) or repr(function),
        flags=flags, adapter=adapter, output_dtype=output_dtype,
    )  # fmt: skip
    request = Request(
        ops=(op,), laws=tuple(laws), dtypes=tuple(dtypes), device=device, case=case, candidate=candidate,
        dims=None if dims is None else dict(dims), vary=dict(options or {}),
    )  # fmt: skip
    check_effects(request)
    stuck = None
    try:
        cells = run(request)
    except Stuck as error:
        cells, stuck = error.cells, str(error)
    command = None if flags is None else request.command()
    result = report.to_json(cells, device, command=command, interrupted=stuck)
    if not result["passed"]:
        raise AssertionError(
            "\n".join([f"{op}: {report.verdict(result)}", "", report.table(cells), "", *report.notes(cells)])
        )
    return result


def check_batch_invariance(
    fn: Callable[..., Any],
    make_inputs: Callable[[], Mapping[str, Any]],
    *,
    row_args: Sequence[str],
    reduction: Callable[..., Any] | None = None,
    laws: Sequence[str] = (),
    case: str | None = None,
    seed: int = InputOptions().seed,
    gradients: bool = True,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Check that the bits of a row do not depend on the batch, for any function of rows.

    Rows are computed alone, some at a time, in chunks, permuted, next to rows of NaN, with other strides,
    again, in another thread, on two streams, compiled, and in a CUDA graph, with their gradients. Whether the
    numbers are right is not judged.

    Args:
        fn: called by keyword. It returns a tensor, or tuples, lists and dictionaries of them; the first
            dimension of each is that of the rows. It may raise NotImplementedError for a call that it does
            not serve.
        make_inputs: called once, without arguments, after `torch.manual_seed(seed)`. Returns the arguments of
            `fn` by name.
        row_args: names of the arguments whose first dimension is that of the rows: 2 rows or more. All other
            arguments, such as weights, are shared by all rows. Gradients of those are sums over rows: only
            the same batch must repeat their bits.
        reduction: a function like `fn` that adds the same terms in another order. It must return other bits,
            or these inputs could not show a wrong order, and the check fails. Without it the report says that
            nothing shows this.
        laws, case: some of the laws (repeatable, written, invariant, traceable), or one case; all by default.
        seed: of the inputs and of incoming gradients.
        gradients: whether gradients are judged, if there are some.
        device: where tensors are moved before the call. By default they stay where they were made.

    Returns:
        The report, as `isobit check --fn ... --json` writes it.

    Raises:
        AssertionError: bits of a row depend on something else; the message is the report.
        ContractError: nothing could be judged: fewer than 2 rows, outputs without rows, an unknown name.

    Example:
        >>> import torch
        >>> from isobit import testing
        >>> def norm(x):
        ...     x = x.contiguous()  # PyTorch adds up a transposed tensor in another order
        ...     return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        >>> def backwards(x):
        ...     return norm(x.flip(-1)).flip(-1)
        >>> def make_inputs():
        ...     return {"x": torch.randn(6, 100)}
        >>> report = testing.check_batch_invariance(
        ...     norm, make_inputs, row_args=("x",), reduction=backwards, laws=("invariant",)
        ... )
        >>> report["fail"]
        0
    """
    if isinstance(laws, str) or isinstance(row_args, str):
        raise ContractError("laws and row_args are sequences: row_args=('x',), laws=('invariant',)")
    request = RowRequest(
        _named(fn), _named(make_inputs), tuple(row_args), None if reduction is None else _named(reduction),
        tuple(laws), case, seed, gradients, None if device is None else _usable(device),
    )  # fmt: skip
    mine = request.prepared()
    stuck = None
    try:
        cells = run_rows(request, mine)
    except Stuck as error:
        cells, stuck = error.cells, str(error)
    result = rows_report(request, mine, cells, interrupted=stuck)
    if not result["passed"]:
        lines = [f"{mine.name}: {report.verdict(result)}", "", mine.in_words, ""]
        raise AssertionError("\n".join([*lines, report.table(cells), "", *report.notes(cells)]))
    return result


def _usable(device: torch.device | str | None) -> torch.device:
    """The device, if tensors can be there and have values."""
    try:
        chosen = default_device() if device is None else torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise ContractError(f"device {device!r} is not usable here: {why}") from None
    if chosen.type == "meta":
        raise ContractError("device 'meta' holds no values to check")
    return chosen


def _flags(function: Any, adapter: Any, output_dtype: torch.dtype | None) -> str | None:
    """The equivalent flags of the command line; None if something could not be imported by name."""
    flags = ["--candidate", _importable(function)]
    if adapter is not None:
        flags += ["--adapter", _importable(adapter)]
    if output_dtype is not None:
        flags += ["--output-dtype", dtype_name(output_dtype)]
    return None if None in flags else " ".join(str(flag) for flag in flags)


def _name(thing: Any) -> str | None:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    return None if module is None or name is None else f"{module}:{name}"


def _importable(thing: Any) -> str | None:
    """`module:name`, unless something else has this name: it is defined inside a function or in a script."""
    name = _name(thing)
    if name is None or name.startswith("__main__:"):
        return None
    module, _, path = name.partition(":")
    there = sys.modules.get(module)
    for part in path.split("."):
        there = getattr(there, part, None)
    return name if there is thing else None


def _named(thing: Any) -> Named:
    name = _name(thing) or (repr(thing) if len(repr(thing)) < 40 else f"a {type(thing).__name__}")
    return Named(thing, name, _importable(thing) is not None)
