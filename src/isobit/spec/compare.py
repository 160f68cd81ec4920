"""Elementwise comparison with the truth, within what plain PyTorch achieves; and comparison of bits."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.frame.contract import dtype_name

#: Allowed error of fp64 results, relative to their scale: the truth is fp64 too, and sums of a hundred
#: thousand terms lose some of its 53 bits.
OF_FP64 = 2.0**-42


@dataclass
class OutputCheck:
    """One output (`0`, `1`, ...) or gradient (`gradient:<name>`) compared with its expected value.

    `atol` and `rtol` describe the slack at the worst element: it is rtol times that element's scale.
    """

    output: str
    shape: list[int]
    dtype: str
    truth_dtype: str
    atol: float
    rtol: float
    max_abs: float
    mean_abs: float
    max_rel: float
    worst_index: list[int]
    passed: bool
    message: str
    #: At the worst element: our distance from the truth, and that of plain PyTorch. The bound there is the
    #: second plus `atol`, the slack; and the part of the slack that is used, above 1 if it does not suffice.
    worst_abs: float = 0.0
    torch_abs: float = 0.0
    slack_used: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """NaN and infinities as strings: JSON has no numbers for them."""
        return {
            k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()
        }


def part_used(ours: float, torchs: float, slack: float) -> float:
    """The part of the slack that an error uses: what it exceeds torch's error by, over the slack. It is 0 for
    a result that is as close to the truth as torch's, whatever both errors are. NaN is beyond any slack."""
    # Where plain torch itself has no number, its error excuses nothing.
    beyond = ours - (torchs if math.isfinite(torchs) else 0.0)
    if beyond <= 0:
        return 0.0
    return beyond / slack if slack > 0 and math.isfinite(beyond) else math.inf


def failure(output: str, message: str) -> OutputCheck:
    """A check that failed before there were numbers to compare."""
    nan = float("nan")
    return OutputCheck(output, [], "", "", nan, nan, nan, nan, nan, [], False, message)


def passed(what: str, message: str = "") -> OutputCheck:
    """A check that held, without numbers to compare."""
    check = failure(what, message)
    check.passed = True
    return check


def against_truth(
    output: str, ours: Tensor, torch_result: Tensor, truth: Tensor, scale: Tensor, ulps: float, eps: float
) -> OutputCheck:
    """|ours - truth| <= |torch - truth| + ulps * eps * scale at every element; for fp64, like the truth, with
    a slack of at least `OF_FP64` * scale.

    NaN must match NaN and an infinity the same infinity; anywhere else a non-finite value fails.
    """
    slack = max(ulps * eps, OF_FP64 if ours.dtype == torch.float64 else 0.0)
    ours64, torch64 = ours.double(), torch_result.double()
    error, torch_error = _distance(ours64, truth), _distance(torch64, truth)
    # Where plain torch itself overflows or loses the value, its error is not added to the bound.
    allowed = torch.where(torch_error.isfinite(), torch_error, 0.0) + slack * scale
    excess = error - allowed
    excess = torch.where(error == 0, -1.0, torch.where(excess.isnan(), float("inf"), excess))
    shape = list(ours.shape)
    if ours.numel() == 0:
        return OutputCheck(
            output,
            shape,
            dtype_name(ours.dtype),
            dtype_name(truth.dtype),
            0,
            slack,
            0,
            0,
            0,
            [],
            True,
            "",
        )
    flat = _worst(error, torch_error, slack * scale)
    worst = [int(i) for i in torch.unravel_index(torch.tensor(flat), ours.shape)]
    at = tuple(worst)
    finite = error[error.isfinite()]
    relative = error / truth.abs().clamp_min(1e-12)
    relative = relative[relative.isfinite()]
    held = bool((excess <= 0).all())
    three = ", ".join(
        f"{n} {x[at].item():.9g}" for n, x in (("ours", ours64), ("torch", torch64), ("truth", truth))
    )
    message = f"worst at {worst}: {three}"
    return OutputCheck(
        output=output,
        shape=shape,
        dtype=dtype_name(ours.dtype),
        truth_dtype=dtype_name(truth.dtype),
        atol=float(slack * scale[at]),
        rtol=slack,
        max_abs=float(error.max()) if len(finite) == error.numel() else float("inf"),
        mean_abs=float(finite.mean()) if len(finite) else float("nan"),
        max_rel=float(relative.max()) if len(relative) else float("nan"),
        worst_index=worst,
        worst_abs=float(error[at]),
        torch_abs=float(torch_error[at]),
        slack_used=part_used(float(error[at]), float(torch_error[at]), float(slack * scale[at])),
        passed=held,
        message=message
        if held
        else f"{int((excess > 0).sum())} of {ours.numel()} beyond the bound; {message}",
    )


def _worst(error: Tensor, torch_error: Tensor, slack: Tensor) -> int:
    """The element that uses most of its slack; the largest error, if none uses a hundredth. Otherwise it
    would be any of those that are as wrong as torch, and often the tiniest."""
    beyond = error - torch.where(torch_error.isfinite(), torch_error, 0.0)
    used = beyond / slack.clamp_min(torch.finfo(torch.float64).tiny)
    used = torch.where(beyond.isnan(), float("inf"), used).nan_to_num(0.0, posinf=float("inf"))
    return int((used if bool((used > 0.01).any()) else error).argmax())


def _distance(x: Tensor, truth: Tensor) -> Tensor:
    same = (x == truth) | (x.isnan() & truth.isnan())
    return torch.where(same, 0.0, (x - truth).abs())


def same_bits(output: str, ours: Tensor, other: Tensor, what: str) -> OutputCheck:
    """Raw bits equal (NaN payloads and signed zeros included)."""
    return _same(output, ours, other, what, differing)


def same_values(output: str, ours: Tensor, other: Tensor, what: str) -> OutputCheck:
    """Equal numbers: a zero may have either sign, and NaN equals nothing."""
    return _same(output, ours, other, what, torch.ne)


def _same(
    output: str, ours: Tensor, other: Tensor, what: str, unlike: Callable[[Tensor, Tensor], Tensor]
) -> OutputCheck:
    check = OutputCheck(
        output,
        list(ours.shape),
        dtype_name(ours.dtype),
        dtype_name(other.dtype),
        0,
        0,
        0,
        0,
        0,
        [],
        True,
        what,
    )
    if ours.shape != other.shape or ours.dtype != other.dtype:
        check.passed, check.message = (
            False,
            f"{what}: {list(ours.shape)} {ours.dtype} against {list(other.shape)} {other.dtype}",
        )
        return check
    differ = unlike(ours, other)
    if bool(differ.any()):
        first = [int(i) for i in differ.nonzero()[0]]
        at = tuple(first)
        gap = (ours.detach().double() - other.detach().double()).abs()
        check.passed, check.worst_index = False, first
        check.max_abs, check.mean_abs = float(gap.nan_to_num(float("inf")).max()), float(gap.nanmean())
        check.message = (
            f"{what}: {int(differ.sum())} of {ours.numel()} differ, first at {first}: "
            f"{ours[at].item():.9g} against {other[at].item():.9g}"
        )
    return check


def differing(x: Tensor, y: Tensor) -> Tensor:
    """Where the raw bits of two tensors of one dtype differ."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integer) != y.contiguous().view(integer)
