"""`measure`: the same tokens computed in several ways, and what differs between them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from isobit.drift import axes
from isobit.drift.axes import AXES, DEFAULT, Sizes
from isobit.drift.calls import Plan, Run, measured
from isobit.drift.metrics import differing, of_finite
from isobit.drift.replay import replay
from isobit.drift.report import Report, Row
from isobit.drift.subject import Progress, Prompts, check_causal, checked_sequences, made_up, subject
from isobit.drift.trying import tried
from isobit.drift.where import Where, compared, traced
from isobit.frame.contract import ContractError
from isobit.integrations.hf.trial import evaluating

#: What a model does that does not repeat its own bits.
CHANGES = (
    "the model has other bits when the same forward runs again: nothing else is blamed until it repeats. "
    "Look for dropout, random numbers, state in a module, or kernels with atomic sums"
)

#: What a model that cannot compute something in a certain way raises. NotImplementedError and
#: torch.OutOfMemoryError are kinds of RuntimeError.
CANNOT = (TypeError, AttributeError, ValueError, LookupError, ImportError, RuntimeError, AssertionError)


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
    try_remedies: bool = False,
    random_weights: bool = False,
    progress: Progress | None = None,
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
        try_remedies: also try what removes the differences: for each kind of module that adds some, these
            modules through isobit, then `isobit.integrations.hf.zero_drift`. What differs then and the time
            of a forward before and after are in `tried`. The model is restored.
        random_weights: say in the report that the weights are random.
        progress: called with a line of text before each step.

    Returns:
        A report: `print` it, or look at `rows`, each with `metrics` and `where`.

    Example:
        >>> import isobit, transformers
        >>> sizes = dict(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> report = isobit.drift.measure(model, [[7, 3, 11, 2], [5, 8, 1]], vs=["padding"])
        >>> [(row.axis, row.setting, row.metrics["tokens"]) for row in report.rows]
        [('padding', '13 on the left', 5), ('padding', '13 on the right', 5)]
    """
    say = progress or (lambda line: None)
    _check_axes(vs)
    about = subject(model, random_weights)
    sizes = _checked(Sizes(tuple(batch_sizes), padding, chunk, micro_batch, about.window))
    given = made_up(about.vocab) if prompts is None else prompts
    rows = checked_sequences(given, about.vocab, tokens, about.device)
    run = Run(model, about.device)
    work = _Comparison(run, rows, locate and isinstance(model, nn.Module), say)
    with evaluating(model) if isinstance(model, nn.Module) else nullcontext():
        say(f"reference: {len(rows)} sequences, each alone, twice")
        work.begin()
        for axis in vs:
            for setting, plans in AXES[axis](rows, sizes).items():
                work.compare(axis, setting, plans)
    attempts = []
    if try_remedies:

        def again(vs: Sequence[str], locate: bool, say: Progress) -> Report:
            return measure(
                model, rows, vs=vs, batch_sizes=batch_sizes, padding=padding, chunk=chunk,
                micro_batch=micro_batch, locate=locate, progress=say,
            )  # fmt: skip

        attempts = tried(run, rows, work.compared, again, say)
    return about.report(
        len(rows), sum(map(len, rows)), work.compared, skipped=work.skipped, tried=attempts,
        repeat=work.repeat, causes=work.causes,
        remarks=_remarks(vs, rows, about.window),
    )  # fmt: skip


class _Comparison:
    """Rows of a report, one by one. What a model cannot do, or what does not fit into memory, is skipped with
    the reason, and nothing that was measured before is lost."""

    def __init__(self, run: Run, rows: Sequence[Tensor], locate: bool, say: Progress) -> None:
        self.run, self.rows, self.locate, self.say = run, rows, locate, say
        self.reference = axes.alone(rows)
        self.expected: list[Tensor] = []
        self.compared: list[Row] = []
        self.repeat: Row | None = None
        self.causes: list[str] = []
        self.skipped: dict[str, str] = {}

    def begin(self) -> None:
        """The reference, and the control that it repeats. A model that changes from one run to the next has
        differences everywhere, and no axis and no module but the one that changes is to blame."""
        try:
            check_causal(self.run.model, self.rows[0])
            self.expected, again = self.run.twice(self.reference, self.rows)
        except torch.OutOfMemoryError:
            raise ContractError(
                f"drift(model): a sequence of {max(map(len, self.rows))} tokens alone does not fit into the "
                "memory of the GPU: give shorter ones"
            ) from None
        except ContractError:
            raise
        except CANNOT as error:
            name = type(self.run.model).__name__
            raise ContractError(
                f"drift(model: {name}): it cannot compute a sequence alone: {_first_line(error)}"
            ) from error
        self.repeat = self._row("repeat", "the reference again", self.reference, again)
        if self.repeat is not None and self.repeat.differ:
            self.locate = False
            self.causes.insert(0, CHANGES)

    def compare(self, axis: str, setting: str, plans: Sequence[Plan]) -> None:
        self.say(f"{axis}: {setting}")
        try:
            logps = self.run.logps(plans, self.rows)
        except CANNOT as error:
            self.skipped[f"{axis}, {setting},"] = _why(error)
            return
        row = self._row(axis, setting, plans, logps)
        if row is not None:
            self.compared.append(row)

    def _row(self, axis: str, setting: str, plans: Sequence[Plan], logps: Sequence[Tensor]) -> Row | None:
        there = measured(plans, self.rows)
        split = of_finite(self.expected, logps, there)
        if split.nan:
            self.causes.append(self._nan(f"{axis}, {setting}", logps, there, split.nan))
        if not split.numbers:
            why = (
                "no log-probability is a number"
                if split.nan or split.infinite
                else "no sequence is long enough"
            )
            self.skipped[f"{axis}, {setting},"] = why
            return None
        where = None
        if self.locate:
            worst = _worst(self.expected, logps, there)
            self.say(f"{axis}: {setting}: where it begins")
            try:
                where = located(self.run, self.reference[worst], plans, worst, len(self.rows[worst]))
            except CANNOT as error:
                self.skipped[f"{axis}, {setting}, where it begins"] = _why(error)
        return Row(axis, setting, split.numbers, where)

    def _nan(self, name: str, logps: Sequence[Tensor], there: Sequence[Tensor], count: int) -> str:
        sides = zip(self.expected, logps, there, strict=True)
        nan = [((a.isnan() & live), (b.isnan() & live)) for a, b, live in sides]
        first = next((i, int((a | b).nonzero()[0])) for i, (a, b) in enumerate(nan) if (a | b).any())
        which = [word for word, side in (("the reference", 0), ("this way of computing", 1))
                 if any(each[side].any() for each in nan)]  # fmt: skip
        return (
            f"{name}: {count} log-probabilities are NaN, in {' and in '.join(which)}; the first is that of "
            f"token {first[1]} of sequence {first[0]}"
        )


def _why(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "it does not fit into the memory of the GPU"
    return f"the model does not take it ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _remarks(vs: Sequence[str], rows: Sequence[Tensor], window: int | None) -> list[str]:
    longest = max(map(len, rows))
    keys = max(longest, 2 * longest * ("length" in vs), sum(map(len, rows)) * ("packed" in vs))
    remarks = [
        f"the longest context that was compared has {keys} tokens: what begins beyond is not seen. Give "
        "longer prompts, or --length and --tokens"
    ]
    if window is None or longest > window or not {"chunk", "decode"} & set(vs):
        return remarks
    return [
        *remarks,
        f"no sequence is longer than the window of {window} tokens: a sliding cache has dropped nothing",
    ]


def located(run: Run, reference: Plan, plans: Sequence[Plan], sequence: int, length: int) -> Where:
    """Compare the modules of a model in two plans, at one sequence; and replay those that differ."""
    plan = next(plan for plan in plans if sequence in plan.sequences)
    a, b = (traced(run, each, sequence, length) for each in (reference, plan))
    where = compared(a, b, sequence)
    replay(run, reference, plan, where, a)
    return where


def _worst(expected: Sequence[Tensor], logps: Sequence[Tensor], there: Sequence[Tensor]) -> int:
    """The sequence with the most tokens that differ, of those that were computed."""
    both = zip(expected, logps, there, strict=True)
    differ = [int((differing(a, b) & live).sum()) if live.any() else -1 for a, b, live in both]
    return max(range(len(differ)), key=differ.__getitem__)


def _check_axes(vs: Sequence[str]) -> None:
    if isinstance(vs, str) or not vs:
        raise ContractError(f"drift(vs: {vs!r}): a list of axes: {', '.join(AXES)}")
    for i, axis in enumerate(vs):
        if axis not in AXES:
            raise ContractError(f"drift(vs: {axis!r}): unknown; known: {', '.join(AXES)}")
        if axis in vs[:i]:
            raise ContractError(f"drift(vs: {axis!r}): given twice")


def _checked(sizes: Sizes) -> Sizes:
    named = {"padding": sizes.padding, "chunk": sizes.chunk, "micro_batch": sizes.micro_batch}
    for name, size in (*(("batch_sizes", size) for size in sizes.batches), *named.items()):
        if type(size) is not int or size < 1:
            raise ContractError(f"drift({name}: {size!r}): an integer from 1 on")
    if not sizes.batches:
        raise ContractError("drift(batch_sizes): none")
    return sizes
