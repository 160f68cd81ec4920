"""What `isobit.drift` finds in a Hugging Face model with random weights before and after `zero_drift`, and
what the measurement costs. bf16, eager.

    sdpa     the model as it is, with PyTorch's attention
    isobit   the same parameters after `isobit.integrations.hf.zero_drift`

A call is `isobit.drift.measure` on one axis, from the reference to the modules where a difference begins; its
time is the cost of the measurement. `tokens` is how many log-probabilities were compared, over all settings
of the axis, and `tokens_differ` how many of them have other bits than alone; `max_abs` is the largest
difference, and `k3` the mean k3 KL of the worst setting. `adding` is the number of modules that add a
difference. With isobit no token may differ: then nothing is timed.

`drift_metrics` is what a trainer logs: the metrics of B answers of T tokens, from log-probabilities that it
has anyway. Next to it, `train_step` is a training step of Qwen3 0.6B on as many tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.train_step import (
    QWEN_35,
    QWEN_35_NAME,
    QWEN_NEXT,
    QWEN_NEXT_NAME,
    Config,
    Models,
    plain,
)
from benchmarks.suites.zero_drift import LLAMA, QWEN, cost, own_ops, tiny
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import Cell, Goal, limit
from isobit.drift import Report, measure
from isobit.drift.axes import DEFAULT
from isobit.drift.metrics import batch_metrics
from isobit.drift.subject import made_up
from isobit.integrations.hf import zero_drift
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import Pool, Series
from isobit.spec.truth import Verdict

#: A few layers of each width: decoding takes hundreds of forwards.
LAYERS = 4
MODELS = {
    "qwen3-0.6b-4-layers": replace(QWEN, num_hidden_layers=LAYERS),
    "llama-3-8b-4-layers": replace(LLAMA, num_hidden_layers=LAYERS),
}
DELTA_NETS = {QWEN_NEXT_NAME: QWEN_NEXT, QWEN_35_NAME: QWEN_35}
METRICS = "drift_metrics"

#: Tokens in all, and of the longest sequence. Gated delta nets compute 64 tokens at a time: with them a
#: sequence is longer than that.
CASES = [Case({"tokens": 192, "longest": 48}, torch.bfloat16, data="random")]
LONGER = [Case({"tokens": 192, "longest": 96}, torch.bfloat16, data="random")]
SMALL = [Case({"tokens": 12, "longest": 6}, torch.bfloat16, data="random")]
LOGGED = [Case({"B": 8, "T": 1024}, torch.bfloat16, data="random")]
LOGGED_SMALL = [Case({"B": 2, "T": 12}, torch.bfloat16, data="random")]


# The measurement of one axis


def measured(axis: str, ours: bool, args: Args, backend: str | None = None) -> tuple[Report, bool]:
    assert backend is None
    models: Models = args["models"]
    model = models.swapped if ours else models.plain
    return measure(model, args["prompts"], vs=[axis], random_weights=True), ours


class Judge:
    """Raises CheckFailed if isobit drifts."""

    def error(self, direction: str, result: tuple[Any, ...]) -> Verdict:
        report, ours = result
        report = _complete(report)
        if ours and report.differ:
            worst = max(report.rows, key=lambda row: row.differ)
            raise CheckFailed(f"drift: {worst.differ} of {worst.metrics['tokens']} tokens have other bits on "
                              f"the axis {worst.axis}, {worst.setting}, so nothing is timed")  # fmt: skip
        adding = {found.name for row in report.rows for found in (row.where.adding if row.where else [])}
        more = {
            "tokens": sum(row.metrics["tokens"] for row in report.rows),
            "tokens_differ": sum(row.differ for row in report.rows),
            "k3": max(row.metrics["k3_kl"] for row in report.rows),
            "adding": len(adding),
        }
        return Verdict(max(row.metrics["logp_diff_max"] for row in report.rows), more=more)


def _complete(report: Report) -> Report:
    """A setting that did not run would be missing from the counts."""
    if report.skipped:
        raise CheckFailed(f"drift: {'; '.join(report.notes)}")
    return report


def _models(name: str, config: Config, swap: Callable[[Any], object], case: Case, pool: Pool) -> Models:
    config = tiny(config) if pool.device.type == "cpu" else config
    making = partial(Models.of, swap, config, pool.device, case.dtype, pool.inputs.seed)
    models: Models = pool.made(name, making)
    return models


def _make(name: str, config: Config, case: Case, pool: Pool) -> list[Args]:
    models = _models(name, config, zero_drift, case, pool)
    vocabulary = models.plain.config.vocab_size
    return [{"models": models, "prompts": made_up(vocabulary, case.dims["tokens"], case.dims["longest"])}]


def rehearse(name: str, config: Config, case: Case, pool: Pool) -> None:
    """All axes once with our model, which compiles its kernels."""
    (args,) = _make(name, config, case, pool)
    measure(args["models"].swapped, args["prompts"], vs=DEFAULT, locate=False)


def _forward_cost(config: Config, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Of one forward of the longest sequence: a floor of everything that is measured."""
    whole = cost(config, True, {"B": 1, "T": dims["longest"]}, dtype)
    return Cost(whole.bytes("fwd"), 0, whole.flops("fwd"), 0)


def _series(name: str, config: Config, cases: list[Case], axis: str) -> Series:
    first = axis == DEFAULT[0]
    return Series(
        op=None, name=name, cases=cases, core=cases, small=SMALL, make=partial(_make, name, config),
        call=partial(measured, axis, True), cost=partial(_forward_cost, config), judge=lambda args: Judge(),
        rivals={"sdpa": Rival("sdpa", partial(measured, axis, False), directions=None)}, directions=(axis,),
        needs=("attention", "det_linear", "rms_norm", "logp", *own_ops(config)),
        imports=("transformers",), step=True, runs=2,
        against="sdpa", copy=False, about="a measurement of drift, one axis",
        shared=lambda case: name, rehearse=(partial(rehearse, name, config, cases[0]),) if first else (),
    )  # fmt: skip


# What a trainer logs


def logged(args: Args, backend: str | None = None) -> tuple[dict[str, Any]]:
    assert backend is None
    return (batch_metrics(args["training"], args["rollout"], args["mask"]),)


def _make_logged(case: Case, pool: Pool) -> list[Args]:
    models = _models("trained", QWEN, lambda model: None, case, pool)
    B, T = case.dims.values()
    gen = torch.Generator(pool.device).manual_seed(pool.inputs.seed)

    def drawn() -> Tensor:
        return torch.rand(B, T, generator=gen, device=pool.device)

    training = -5 * drawn()
    return [{
        "models": models, "ids": (drawn() * models.plain.config.vocab_size).long(),
        "training": training, "rollout": training + 1e-3 * drawn(), "mask": drawn() < 0.8,
    }]  # fmt: skip


_LOGGED = Series(
    op=None, name=METRICS, cases=LOGGED, core=LOGGED, small=LOGGED_SMALL, make=_make_logged, call=logged,
    cost=lambda dims, dtype: Cost(dims["B"] * dims["T"] * 9, 0, 0, 0), judge=lambda args: None,
    rivals={"train_step": Rival("train_step", plain, directions=None)}, directions=("metrics",),
    imports=("transformers",), step=True, copy=False, about="metrics of drift in a training step",
    shared=lambda case: METRICS,
)  # fmt: skip


def _of(name: str) -> Any:
    def own(cell: Cell) -> bool:
        return cell.op == name

    return own


SERIES: Sequence[Series] = (
    *(_series(name, config, CASES, axis) for name, config in MODELS.items() for axis in DEFAULT),
    _LOGGED,
    *(_series(name, config, LONGER, axis) for name, config in DELTA_NETS.items() for axis in DEFAULT),
)
GOALS = (
    *(
        Goal(f"{name}, tokens with other bits", _of(name), most=0, figure="tokens_differ",
             against=limit(1, "token"))
        for name in (*MODELS, *DELTA_NETS)
    ),
    Goal("metrics in training, speed as a multiple of a training step", _of(METRICS), least=100,
         against="train_step"),
)  # fmt: skip
