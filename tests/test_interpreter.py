"""The quick interpreter computes what Triton's own does, says of overflows what that says, and leaves nothing
behind. The file is also the program that finds out, in an interpreter."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from interpreted import in_interpreter
from isobit.check.interpreter import REPLACED, quick_interpreter

pytestmark = pytest.mark.compat


@triton.jit
def halved(x):
    return tl.where(x > 0, x * 0.5, x)


@triton.jit
def mixed(x, out, sums, n, BLOCK: tl.constexpr):
    """A device function, one of Triton's own, casts, integers of several widths, a loop, and masks."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    for step in range(3):
        value = halved(value) + (at % (step + 2)).to(tl.float32)
    count = tl.sum((value > 1.0).to(tl.int32), 0).to(tl.int64) - tl.cdiv(n, BLOCK)
    tl.store(out + at, value.to(tl.bfloat16), mask=at < n)
    tl.store(sums + tl.program_id(0), count * 3 + tl.max(value, 0).to(tl.int64))


@triton.jit
def shaped(x, out, BLOCK: tl.constexpr):
    """Values of several shapes and dtypes: broadcast, transposed, reshaped, reduced."""
    at = tl.arange(0, BLOCK)
    column = tl.load(x + at).to(tl.float32)[:, None]
    square = column * at[None, :] + tl.trans(column + at[None, :].to(tl.int64))
    square += (at + at.to(tl.int64))[None, :] + (at[None, :] + column)
    pairs = tl.reshape(square, (BLOCK * BLOCK // 2, 2))
    square += tl.max(square, 1)[None, :] + tl.sum(tl.sum(pairs, 1), 0)
    tl.store(out + at[:, None] * BLOCK + at[None, :], tl.dot(square, square, input_precision="ieee"))


@triton.jit
def numbers(x, out, BLOCK: tl.constexpr):
    """Numbers of every kind on both sides: zeros of both signs, wider ones than the tensor, twice each. A
    shift changes the dtype of what it is given, which the next use of the same number must not see."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at).to(tl.float32)
    total = value * 0.0 + value * -0.0 + (0.0 - value) + (1 / (value + 9.5)) + 2.5 * value
    bits = at.to(tl.uint32, bitcast=True)
    for step in range(2):
        signed, unsigned = (at - 20) >> 2, bits >> 2
        total += (signed + 2).to(tl.float32) + (unsigned * 2 + (bits + 2) // 2).to(tl.float32)
        total += (at.to(tl.int64) * 3 + step).to(tl.float32) + tl.where(at % 2 == 0, 1.0, -0.0)
        total = tl.maximum(total, -1e30) + (2 - at) + (at < 3).to(tl.float32)
    rows = total[:, None] + tl.zeros((1, BLOCK), tl.float32)
    rows += tl.trans(rows) * total[None, :] + tl.sum(total, 0)
    tl.store(out + at[:, None] * BLOCK + at[None, :], 1.0 / rows)
    signs = tl.where(at == 0, value * 0 * 0.0, value * 0 * -0.0)
    tl.store(out + BLOCK * BLOCK + at, signs.to(tl.int32, bitcast=True).to(tl.float32))


@triton.jit
def operators(x, out, BLOCK: tl.constexpr):
    """Every operator, on values of one shape and of several, in two orders of memory, and next to numbers
    that are zero, tiny, huge or too wide for the tensor. The order of elements shows in sums."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at).to(tl.float32)
    row, column, wide = value[None, :] * 1.7, value[:, None] + 0.3, at.to(tl.int64)
    turned = tl.trans(row - column) + at[:, None].to(tl.float32)
    total = tl.sum(turned + tl.max(value, 0), 0) + tl.sum(turned * 1.1, 1) + tl.sum(turned - row, 0)
    total += tl.sum(tl.max(value, 0) - turned, 1) + tl.sum((column + row) * turned, 0)
    low, high = (at < 9) & (at >= 2), (wide > 3) | (wide <= 1)
    both = (low[:, None] & high[None, :]) | (at[:, None] == at[None, :]) & (at[:, None] != 5)
    total += tl.sum(both.to(tl.int32), 0).to(tl.float32) * 0.1 + tl.sum((turned > row).to(tl.float32), 1)
    total += (wide < 2**40).to(tl.float32) + (at * 3 - at - 1 + (wide - 2**33 + 2**33)).to(tl.float32)
    total += ((value * 1e-39 > 1e-40) & (value < 1e39)).to(tl.float32) + (value >= 2).to(tl.float32)
    total += (value * 16777217 > 16777217.0).to(tl.float32) + (value + 0.0 <= -0.0).to(tl.float32)
    total += tl.load(x + (wide + 0)[None, :] + at[:, None] * 0).to(tl.float32).sum(0)
    tl.store((out + at) + tl.program_id(0) * BLOCK, total)


@triton.jit
def there_and_back(x, wide, narrow, BLOCK: tl.constexpr):
    """bf16 as fp32, and fp32 as bf16."""
    at = tl.arange(0, BLOCK)
    tl.store(narrow + at, tl.load(wide + at).to(tl.bfloat16))
    tl.store(wide + at, tl.load(x + at).to(tl.float32))


@triton.jit
def misfit(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.arange(0, 2 * BLOCK))


@triton.jit
def combined(a, b, out, WHAT: tl.constexpr):
    x, y = tl.load(a), tl.load(b)
    if WHAT == "add":
        x = x + y
    elif WHAT == "sub":
        x = x - y
    else:
        x = x * y
    tl.store(out, x)


#: Dtype, operation, operands, and whether the result leaves the dtype.
OPERATIONS = (
    ("int32", "add", 2**31 - 2, 1, False), ("int32", "add", 2**31 - 1, 1, True),
    ("int32", "add", -(2**31), -1, True), ("int32", "add", -(2**31), 2**31 - 1, False),
    ("int32", "sub", -(2**31), 1, True), ("int32", "sub", 2**31 - 1, -1, True), ("int32", "sub", 3, 5, False),
    ("int32", "mul", 2**16, 2**15, True), ("int32", "mul", -(2**16), 2**15, False),
    ("int32", "mul", 2**16, 2**14, False), ("int16", "add", 2**15 - 1, 1, True),
    ("uint8", "sub", 3, 5, True), ("uint8", "sub", 5, 3, False), ("uint8", "mul", 16, 16, True),
    ("int64", "mul", 2**40, 2**20, False),
)  # fmt: skip


#: fp32 values by their bits: zeros, subnormals, ordinary ones, some that are halfway between two of bf16,
#: infinities, NaN. The upper half of each is one of bf16.
USUAL = (0, 0x80000000, 0x3F800000, 0x3F808000, 0x3F818000, 0xC2FFFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
         0x7F800001, 0x00800000, 0x7F7FFFFF, 0xFF810000, 0x42280000, 0xBF7FFFFF, 0x80800000)  # fmt: skip
SUBNORMAL = (*USUAL[:13], 0x00000001, 0x007FFFFF, 0x80400000)


def results() -> list[list[float]]:
    x = torch.linspace(-4, 4, 100).bfloat16()
    out, sums = torch.full((100,), -9.0).bfloat16(), torch.zeros(4, dtype=torch.int64)
    mixed[(4,)](x, out, sums, 90, BLOCK=32)
    square = torch.zeros(16, 16)
    shaped[(1,)](x, square, BLOCK=16)
    many = torch.zeros(17 * 16)
    numbers[(1,)](x, many, BLOCK=16)
    all_of_them = torch.zeros(2 * 16)
    operators[(2,)](x, all_of_them, BLOCK=16)
    return [out.tolist(), sums.tolist(), square.flatten().tolist(), many.tolist(), all_of_them.tolist()]


def converted(values: tuple[int, ...]) -> list[list[int]]:
    """Their bits as bf16, and those of their upper halves as fp32."""
    wide = torch.tensor(values, dtype=torch.int64).to(torch.int32)
    upper, narrow = (wide >> 16).to(torch.int16), torch.zeros(len(values), dtype=torch.int16)
    there_and_back[(1,)](
        upper.view(torch.bfloat16), wide.view(torch.float32), narrow.view(torch.bfloat16), BLOCK=len(values)
    )
    return [narrow.tolist(), wide.tolist()]


def refused() -> str:
    """The error for two shapes that do not fit."""
    try:
        misfit[(1,)](torch.zeros(8), torch.zeros(8), BLOCK=8)
    except interpreter.InterpreterError as error:
        return str(error)
    return "nothing"


def answers() -> dict[str, Any]:
    return {
        "results": results(),
        "usual": converted(USUAL),
        "subnormal": converted(SUBNORMAL),
        "refused": refused(),
        "debug": overflows(True),
        "plain": overflows(False),
    }


def overflows(debug: bool) -> list[bool]:
    """Which of the operations raise."""
    builder, found = interpreter.interpreter_builder, []
    builder.options = replace(builder.options, debug=debug)
    for dtype, what, left, right, _ in OPERATIONS:
        given = [torch.tensor([value], dtype=getattr(torch, dtype)) for value in (left, right, 0)]
        try:
            combined[(1,)](*given, WHAT=what)
            found.append(False)
        except interpreter.InterpreterError as error:
            assert "overflow detected" in str(error), error
            found.append(True)
    return found


def language() -> list[tuple[str, int]]:
    """Every attribute of the language, and which object it is."""
    modules = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
    return [(name, id(value)) for module in modules for name, value in sorted(vars(module).items())]


def calls_of(owner: Any, name: str, what: Callable[[], object]) -> int:
    with mock.patch.object(owner, name, wraps=getattr(owner, name)) as spy:
        what()
    return spy.call_count


def interpreted() -> dict[str, Any]:
    own = [getattr(owner, name) for owner, name in REPLACED]
    found: dict[str, Any] = {}
    with quick_interpreter():
        before = language()
        found["quick"] = answers()
        found["searches"] = calls_of(inspect, "getmembers", results)
        found["language after launches"] = language() == before
    found["put back"] = [getattr(owner, name) for owner, name in REPLACED] == own
    found["own searches"] = calls_of(inspect, "getmembers", results)
    found["own"] = answers()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    said: dict[str, Any] = json.loads(in_interpreter(Path(__file__), quick=False))
    return said


def test_this_triton_has_what_is_replaced() -> None:
    assert [name for owner, name in REPLACED if not hasattr(owner, name)] == []


def test_results_are_those_of_tritons_own(found: dict[str, Any]) -> None:
    assert found["quick"]["results"] == found["own"]["results"]
    assert len(set(found["own"]["results"][0])) > 20 and all(found["own"]["results"][1])  # they say something
    assert len(set(found["own"]["results"][2])) > 100 and len(set(found["own"]["results"][3])) > 100
    assert len(set(found["own"]["results"][4])) > 10


@pytest.mark.parametrize("values", ["usual", "subnormal"])
def test_bfloat16_is_that_of_tritons_own(found: dict[str, Any], values: str) -> None:
    assert found["quick"][values] == found["own"][values]


def test_shapes_that_do_not_fit_are_refused(found: dict[str, Any]) -> None:
    assert "incompatible dimensions" in found["own"]["refused"] == found["quick"]["refused"]


def test_overflows_are_found_in_debug_mode_alone(found: dict[str, Any]) -> None:
    """If Triton's own finds them always, the quick one is to do so too."""
    assert found["quick"]["debug"] == found["own"]["debug"] == [wrong for *_, wrong in OPERATIONS]
    assert found["quick"]["plain"] == found["own"]["plain"] == [False] * len(OPERATIONS)


def test_nothing_is_searched_for_again(found: dict[str, Any]) -> None:
    assert found["searches"] == 0 < found["own searches"]


def test_the_language_is_plain_between_launches(found: dict[str, Any]) -> None:
    assert found["language after launches"] and found["put back"]


def test_compiled_kernels_are_left_alone() -> None:
    own = [getattr(owner, name) for owner, name in REPLACED]
    with quick_interpreter():
        assert [getattr(owner, name) for owner, name in REPLACED] == own


if __name__ == "__main__":
    print(json.dumps(interpreted()))
