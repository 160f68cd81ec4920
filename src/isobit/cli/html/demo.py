"""The section of `isobit demo` on a page: whether the task was learned, and the curves of the run."""

from typing import Any

from isobit.cli.html.curves import Curve, chart

NAMES = {"torch": "PyTorch", "isobit": "isobit"}


def section(report: dict[str, Any]) -> dict[str, Any]:
    steps, trained_with = report["steps"], report["trained_with"]
    return {
        "title": f"GRPO, {len(steps)} steps with {NAMES[trained_with]}",
        "state": "ok" if report["passed"] else "fail",
        "verdict": "learned" if report["passed"] else "not learned",
        "said": [report["verdict"], report["drift"]],
        "charts": [
            {
                "title": "Reward",
                "text": "The share of an answer's digits that are right, and the share of answers without a "
                "mistake. Means over the answers of a step.",
                "svg": _chart(steps, "share", reward="reward", solved="no mistake"),
            },
            {
                "title": "KL",
                "text": "How far the policy is from the one before training, estimated from its answers.",
                "svg": _chart(steps, "nats per token", kl="KL (k3)"),
            },
            {
                "title": "Clip fraction",
                "text": "The share of tokens whose ratio to the policy that sampled them was clipped.",
                "svg": _chart(steps, "share of tokens", clipped="clipped"),
            },
            {
                "title": "Entropy",
                "text": "Of the next token. It falls as the policy makes up its mind.",
                "svg": _chart(steps, "nats", entropy="entropy"),
            },
        ],
        "drift": {"text": _drift_in_words(steps, trained_with), "svg": _drift_chart(steps, trained_with)},
    }


def _chart(steps: Any, unit: str, **names: str) -> str:
    return chart([Curve(name, [(s["step"], s[key]) for s in steps]) for key, name in names.items()], unit)


def _seen(steps: Any, ops: str) -> list[tuple[int, dict[str, float]]]:
    return [(s["step"], s["drift"][ops]) for s in steps if ops in s["drift"]]


def _drift_chart(steps: Any, trained_with: str) -> str:
    """Both sets of functions: the one that trained, and the one that was only measured."""
    lines = (("isobit", "max", "largest"), ("torch", "max", "largest"), ("torch", "mean", "mean"))
    curves = []
    for ops, key, name in lines:
        points = [(step, drift[key]) for step, drift in _seen(steps, ops)]
        curves.append(Curve(f"{NAMES[ops]}, {name}", points, dotted=ops != trained_with))
    return chart(curves, "|difference| of log-probabilities", log=True)


def _drift_in_words(steps: Any, trained_with: str) -> list[str]:
    words = [
        _sentence(ops, [drift["max"] for _, drift in _seen(steps, ops)], ops == trained_with) for ops in NAMES
    ]
    return [
        "A token has one log-probability from decoding, token by token from the KV cache, and one from the "
        "forward of training, all tokens at once. The weights are the same, so the difference should be 0, "
        "and the ratio at the first update of a step exactly 1.",
        *words,
        "PyTorch sums in another order for another shape, and log_softmax in decoding in another than the "
        "loss in training: last digits of fp32. Where bf16 then rounds the other way, the difference grows. "
        "isobit fixes the order.",
    ]


def _sentence(ops: str, largest: list[float], trained: bool) -> str:
    how = "in training" if trained else "in answers that were decoded again with the same weights"
    size = "exactly 0" if max(largest) == 0 else f"up to {max(largest):.1e}"
    return f"With {NAMES[ops]} it is {size} over {len(largest)} steps, {how}."
