"""`measure`: the same tokens computed in several ways, and what differs between them."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isobit.drift import axes
from isobit.drift.axes import AXES, DEFAULT, Sizes
from isobit.drift.calls import Plan, Run
from isobit.drift.metrics import differing, metrics
from isobit.drift.replay import replay
from isobit.drift.report import Report, Row, Tried
from isobit.drift.where import Where, compared, traced
from isobit.frame.contract import ContractError, dtype_name
from isobit.integrations.hf.drift import zero_drift
from isobit.integrations.hf.errors import HFError
from isobit.integrations.hf.trial import evaluating

Prompts = Sequence[Sequence[int]] | Sequence[Tensor]


def measure(
    model: Any,
    prompts: Prompts | None = None,
    *,
    vs: Sequence[str] = DEFAULT,
    tokens: int | None = None,
    batch_sizes: Sequence[int] = Sizes.batches,
    padding: int = Sizes.padding,
    chunk: int = Sizes.chunk,
    micro_batch: int = Sizes.micro_batch,
    locate: bool = True,
    try_zero_drift: bool = False,
    random_weights: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compute the log-probabilities of the same tokens in several ways, and say what differs, and where it
    begins. The reference is one forward of each sequence alone, as in training.

    Args:
        model: a causal LM: called with `input_ids`, and `attention_mask`, `position_ids`, `use_cache` and
            `past_key_values` where an axis needs them, it returns an object with `logits` [B, T, V]. It is
            put into evaluation mode meanwhile, and not changed.
        prompts: token ids of each sequence, prompt and answer together, at least 2 each. None makes some up.
        vs: axes: batch, padding, chunk, decode, length; and packed, micro-batch, autocast.
        tokens: use no more tokens than this: later sequences are cut or left out. None uses all of them.
        batch_sizes, padding, chunk, micro_batch: sizes of the axes.
        locate: also find the module where a difference begins, for one sequence of each setting: the one with
            the most tokens that differ.
        try_zero_drift: measure the same once more under `isobit.integrations.hf.zero_drift`, and time a
            forward before and after; the result is in `tried`. The model is restored.
        random_weights: say in the report that the weights are random.
        progress: called with a line of text before each step.

    Returns:
        A report: `print` it, or look at `rows`, each with `metrics` and `where`.

    Example:
        >>> import isobit, transformers
        >>> sizes = dict(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> report = isobit.drift.measure(model, [[7, 3, 11, 2], [5, 8, 1]], vs=["batch"], batch_sizes=[2])
        >>> [(row.axis, row.setting, row.metrics["tokens"]) for row in report.rows]
        [('batch', '2 rows', 5)]
    """
    say = progress or (lambda line: None)
    _check_axes(vs)
    device, dtype, vocab = facts(model)
    sizes = Sizes(_positive("batch_sizes", batch_sizes), *_positive("sizes", (padding, chunk, micro_batch)))
    rows = checked_sequences(made_up(vocab) if prompts is None else prompts, vocab, tokens, device)
    run = Run(model, device)
    compared_rows: list[Row] = []
    skipped: dict[str, str] = {}
    with evaluating(model) if isinstance(model, nn.Module) else nullcontext():
        say(f"reference: {len(rows)} sequences, each alone")
        reference = axes.alone(rows)
        expected = run.logps(reference, rows)
        for axis in vs:
            for setting, plans in AXES[axis](rows, sizes).items():
                say(f"{axis}: {setting}")
                try:
                    logps = run.logps(plans, rows)
                except (TypeError, AttributeError, NotImplementedError, ValueError, ImportError) as error:
                    why = str(error).splitlines()[0] if str(error) else type(error).__name__
                    skipped[f"{axis}, {setting},"] = f"the model does not take it ({why})"
                    continue
                there = [~logp.isnan() for logp in logps]
                numbers = metrics(*(
                    [x[keep] for x, keep in zip(side, there, strict=True)] for side in (expected, logps)
                ))  # fmt: skip
                where = None
                if locate and isinstance(model, nn.Module):
                    worst = _worst(expected, logps)
                    say(f"{axis}: {setting}: where it begins")
                    where = located(run, reference[worst], plans, worst, len(rows[worst]))
                compared_rows.append(Row(axis, setting, numbers, where))
    tried = None
    if try_zero_drift:
        again = partial(
            measure, model, rows, vs=vs, batch_sizes=batch_sizes, padding=padding, chunk=chunk,
            micro_batch=micro_batch, locate=False, progress=lambda line: say(f"zero_drift: {line}"),
        )  # fmt: skip
        tried = under_zero_drift(run, rows, again)
    return Report(
        model=type(model).__name__,
        device=str(device),
        dtype=dtype,
        random_weights=random_weights,
        sequences=len(rows),
        tokens=sum(map(len, rows)),
        rows=compared_rows,
        skipped=skipped,
        tried=tried,
    )


def under_zero_drift(run: Run, rows: Sequence[Tensor], measure_again: Callable[[], Report]) -> Tried:
    """The same measurement under `zero_drift`, or why the model is refused."""
    before_ms = _forward_ms(run, rows)
    try:
        with zero_drift(run.model):
            after_ms = _forward_ms(run, rows)
            return Tried(measure_again().rows, before_ms, after_ms)
    except HFError as error:
        return Tried([], before_ms, None, str(error).splitlines()[0])


def _forward_ms(run: Run, rows: Sequence[Tensor], times: int = 3) -> float:
    """The fastest of a few forwards of the longest sequence."""
    longest = max(rows, key=len)

    def once() -> float:
        if longest.is_cuda:
            torch.cuda.synchronize(longest.device)
        start = time.perf_counter()
        for _, logits in run.logits(axes.alone([longest])[0]):
            logits[0, -1, 0].item()  # waits for the device
        return 1000 * (time.perf_counter() - start)

    return min(once() for _ in range(times))


def located(run: Run, reference: Plan, plans: Sequence[Plan], sequence: int, length: int) -> Where:
    """Compare the modules of a model in two plans, at one sequence; and replay those that differ."""
    plan = next(plan for plan in plans if sequence in plan.sequences)
    a, b = (traced(run, each, sequence, length) for each in (reference, plan))
    where = compared(a, b, sequence)
    replay(run, reference, plan, where, a)
    return where


def made_up(vocab: int, tokens: int = 1024, longest: int = 128) -> list[Tensor]:
    """Random ids, `tokens` in all, in sequences of several lengths."""
    lengths: list[int] = []
    for share in _repeated((1.0, 0.5, 0.75, 0.5)):
        here = min(max(2, int(longest * share)), tokens - sum(lengths))
        if here < 2:
            break
        lengths.append(here)
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return list(ids.split(lengths))


def _repeated(shares: tuple[float, ...]) -> Any:
    while True:
        yield from shares


def _worst(expected: Sequence[Tensor], logps: Sequence[Tensor]) -> int:
    """The sequence with the most tokens that differ."""
    differ = [int((differing(a, b) & ~b.isnan()).sum()) for a, b in zip(expected, logps, strict=True)]
    return max(range(len(differ)), key=differ.__getitem__)


def _check_axes(vs: Sequence[str]) -> None:
    if isinstance(vs, str) or not vs:
        raise ContractError(f"drift(vs: {vs!r}): a list of axes: {', '.join(AXES)}")
    for i, axis in enumerate(vs):
        if axis not in AXES:
            raise ContractError(f"drift(vs: {axis!r}): unknown; known: {', '.join(AXES)}")
        if axis in vs[:i]:
            raise ContractError(f"drift(vs: {axis!r}): given twice")


def _positive(name: str, sizes: Sequence[int]) -> Any:
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise ContractError(f"drift({name}: {size!r}): an integer from 1 on")
    return tuple(sizes) if name == "batch_sizes" else list(sizes)


def facts(model: Any) -> tuple[torch.device, str, int]:
    """(device, dtype, size of the vocabulary) of a causal LM."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not callable(model):
        raise ContractError(f"drift(model: {type(model).__name__}): not a causal LM: it has no LM head "
                            "(get_output_embeddings)")  # fmt: skip
    weight = head.weight
    return weight.device, dtype_name(weight.dtype), weight.shape[0]


def checked_sequences(prompts: Prompts, vocab: int, tokens: int | None, device: torch.device) -> list[Tensor]:
    """Checked, cut to a number of tokens, and on the device."""
    rows, left = [], tokens
    for i, prompt in enumerate(prompts):
        ids = torch.as_tensor(prompt)
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ContractError(
                f"drift(prompts[{i}]: {list(ids.shape)}): token ids of one sequence, integers"
            )
        if len(ids) < 2:
            raise ContractError(f"drift(prompts[{i}]): {len(ids)} tokens: a log-probability needs 2")
        if int(ids.min()) < 0 or int(ids.max()) >= vocab:
            wrong = int(ids.max()) if int(ids.max()) >= vocab else int(ids.min())
            raise ContractError(f"drift(prompts[{i}]): id {wrong} is outside the vocabulary of {vocab}")
        if left is not None:
            ids = ids[: max(0, left)]
            left -= len(ids)
        if len(ids) >= 2:
            rows.append(ids.long().to(device))
    if not rows:
        raise ContractError("drift(prompts): no sequence of at least 2 tokens")
    return rows
