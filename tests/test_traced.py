"""What a launcher does with sizes becomes a function of them, or an error: never a number that was true for
one size only."""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.frame import compile_ahead
from isobit.frame.backend import UnsupportedError
from isobit.frame.traced import (
    Allocations,
    Memory,
    Size,
    Trace,
    Traced,
    UntraceableError,
    decides,
    dense,
    recalled,
)

BF16, CPU = torch.bfloat16, torch.device("cpu")


def traced(run: Callable[..., Any], *values: int) -> Callable[..., Any]:
    trace = Trace(values)
    with Allocations([], trace):
        result = run(*trace.sizes)
    return trace.function(result)


def schedule(n: int, m: int) -> tuple[Any, ...]:
    """The kind of arithmetic that launchers do."""
    tiles = -(-n // 128) * -(-m // 64)
    each = max(1, tiles // 7)
    ragged = n % 16 != 0
    return (min(tiles, 132), each, [n - m, -n], 3 * n + 1 if ragged or n < m else 100 - n, (tiles, (m,)))


@settings(max_examples=200, deadline=None)
@given(*[st.integers(1, 3000)] * 4)
def test_a_function_gives_what_the_arithmetic_gives_or_nothing(n: int, m: int, i: int, j: int) -> None:
    function = traced(schedule, n, m)
    assert function(n, m) == schedule(n, m)
    assert function(i, j) in (None, schedule(i, j))


def test_sizes_that_are_decided_for_alike_share_a_function() -> None:
    function = traced(schedule, 257, 64)
    assert function(300, 65) == schedule(300, 65)
    assert function(288, 64) is None and function(2001, 64) is None  # a multiple of 16; more tiles than 7


def test_a_number_of_bits_is_a_number_and_a_condition() -> None:
    function = traced(lambda n, m: (m, 1 << (n - 1).bit_length()), 70, 3)
    assert function(70, 3) == (3, 128) and function(128, 5) == (5, 128) and function(65, 5) == (5, 128)
    assert function(64, 3) is None and function(129, 3) is None


@lru_cache
def cached(n: int) -> int:
    return 2 * n


LEAKS: dict[str, Callable[[Any], Any]] = {
    "an index": lambda n: [0, 1, 2, 3, 4, 5][n],
    "a range": lambda n: len(range(n)),
    "an integer": int,
    "a float": float,
    "a square root": math.isqrt,
    "a product with a fraction": lambda n: n * 0.5,
    "a quotient": lambda n: n / 2,
    "a key": lambda n: {5: 1}.get(n),
    "a cached function": cached,
    "an index before an allocation": lambda n: torch.empty([7, 8, 9, 10, 11, 12][n]).numel(),
    "an index beside an allocation": lambda n: torch.empty(n, [7, 8, 9, 10, 11, 12][n]).numel(),
    "another allocation": lambda n: torch.zeros(n).numel(),
    "a length": lambda n: len(torch.empty(n)),
    "a comparison with another type": lambda n: n == 5.0,
    "a string": lambda n: "x" * n,
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_size_that_becomes_a_number_is_an_error(leak: Callable[[Any], Any]) -> None:
    with pytest.raises((UntraceableError, TypeError)):
        traced(leak, 5)


def test_the_leaks_are_no_errors_of_integers() -> None:
    for name, leak in LEAKS.items():
        leak(5) if name != "a key" else leak(6)


@decides
def parity(n: int, names: tuple[str, ...]) -> str:
    return names[n % 2]


def test_a_rule_is_a_condition() -> None:
    function = traced(lambda n: (parity(n + 1, ("even", "odd")), n), 5)
    assert parity(3, ("even", "odd")) == "odd"
    assert function(7) == ("even", 7) and function(8) is None


def tensor(*shape: Any, at: int = 0) -> Traced:
    return Traced(shape, dense(shape), BF16, CPU, Memory(0, at), [])


def views_of(t: Any) -> list[Any]:
    """Views of [n, 6, 4], as launchers make them."""
    n = t.shape[0]
    flat = t.reshape(-1, 4)
    first, second = t.new_empty(3 * n + 2, dtype=torch.float32).split((n, 2 * n + 2))
    found = [t, flat, flat.t(), t.mT, t[1:], t[:, 2:5], t[-3:], t[1, 2], t[: n + 5], t.view(torch.float16)]
    found += [t.contiguous(), t.to(BF16), first, second, second[n:], torch.empty((n, 2)), torch.empty(3, n)]
    found += [t[:-1], t[:, -2:], t[-1], t[5:2], t[:, 9:], t[-n - 2 : 1], t[None], t[:, None], t[1, None, 2]]
    found += [flat[:, 0][None], t.new_empty(1).expand(n, 1), t[:, :1].expand(2, -1, 6, 4), *t[0].split(4)]
    return [*found, torch.empty_like(t, dtype=torch.float32), t.view(n, 24)[:, :5], t.transpose(0, 1)]


def as_numbers(found: list[Any]) -> list[Any]:
    return [
        (*each.shape, *each.stride(), each.numel(), each.nbytes, str(each.dtype), each.ndim) for each in found
    ]


@pytest.mark.parametrize("n", [5, 9])
def test_views_are_those_of_tensors(n: int) -> None:
    function = traced(lambda n: as_numbers(views_of(tensor(n, 6, 4))), 7)
    wanted = views_of(torch.empty(n, 6, 4, dtype=BF16))
    assert function(n) == as_numbers(wanted)


def test_a_length_is_a_number_that_all_sizes_must_share() -> None:
    function = traced(lambda n, m: (len(tensor(n // 4, 3)) + 1, n, m), 9, 2)
    assert function(11, 5) == (3, 11, 5) and function(12, 2) is None
    with pytest.raises(UntraceableError, match=r"no other sizes"):
        traced(lambda n: len(tensor(n, 3)), 9)
    assert traced(lambda n, m: (len(tensor(n)), m), 9, 2)(9, 5) == (9, 5)


def test_offsets_are_those_of_tensors() -> None:
    """In bytes, from the beginning of the memory that they are in."""
    function = traced(lambda n: [each.offset for each in views_of(tensor(n, 6, 4))], 7)
    found = views_of(torch.empty(9, 6, 4, dtype=BF16))
    assert function(9) == [each.storage_offset() * each.element_size() for each in found]


def test_alignment_is_all_that_is_known_of_an_address() -> None:
    def aligned(n: Size) -> list[Any]:
        t = tensor(n, 3, at=8)
        return [t.data_ptr() % 16, t[1:].data_ptr() % 8, t[n - 1 :].data_ptr() % 16]

    assert traced(aligned, 7)(9) == [8, 6, (8 + 8 * 3 * 2) % 16]
    for use in (lambda t: t.data_ptr() == 0, lambda t: t.data_ptr() % 512, lambda t: hash(t.data_ptr())):
        with pytest.raises((UntraceableError, TypeError)):
            use(tensor(3))


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.mT.contiguous(),
        lambda t: t.mT.view(-1),
        lambda t: t.to(torch.float32),
        lambda t: t.view(torch.float32),
        lambda t: t.view(3, 3),
        lambda t: t[::2],
        lambda t: t[-9],
        lambda t: t[9],
        lambda t: t.expand(2, 3, 4),
        lambda t: torch.add(t, t),
        lambda t: t + t,
    ],
)
def test_what_is_no_view_is_an_error(use: Callable[[Any], Any]) -> None:
    with pytest.raises((UntraceableError, TypeError)):
        traced(lambda n: use(tensor(n, 4)), 6)


def test_a_shape_that_varies_is_no_key_of_a_cache() -> None:
    answers: dict[Any, Any] = {(torch.Size((6, 4)),): "a number"}
    (n,) = Trace((6,)).sizes
    assert answers.get((tensor(n, 4).shape,)) is None
    assert recalled(answers, (n, 4), lambda: "made") == "made"
    assert list(answers.values()) == ["a number"]


# Compiling ahead


def test_what_cannot_be_compiled_ahead_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of today's size must not fail by it; but a rollout would stop to compile later."""
    monkeypatch.setattr(compile_ahead, "traced_args", lambda *given: ({}, [SimpleNamespace(made=[])]))

    def broken(args: Any) -> Any:
        raise ValueError("no such tile\nand more")

    def refused(args: Any) -> Any:
        raise UnsupportedError("not of this size")

    with pytest.warns(UserWarning, match=r"could not be compiled ahead. ValueError: no such tile$"):
        compile_ahead.compile_ahead(broken, {}, [(1025,)], lambda *given: ((), ()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_ahead.compile_ahead(refused, {}, [(1025,)], lambda *given: ((), ()))
