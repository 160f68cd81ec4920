"""Calls of attention with sizes that no call had before, as in `test_replay_sizes`: sequences, queries and
keys vary, and calls of a family have one backend, whatever their sizes."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import isobit.ops.attention
from isobit.frame.cache_key import cache_key_of
from isobit.frame.family import Family, dimensions
from isobit.frame.op import OPS
from replay_calls import CALLS, differs, on_hopper
from replay_shapes import BF16, F32, INT32, Call, Shape, shape
from stub_cuda import run, why_not
from test_replay_sizes import like_a_gpu, new_rows, varying_in

on_the_stub = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
pytestmark = pytest.mark.compat

Sizes = tuple[int, int, int]


def of_sizes(sizes: Any, call: Call) -> Call:
    """The call with this many sequences, queries and keys, or pages of a sequence. Packed sequences stay as
    many as they are."""
    B, T, S = sizes
    packed, paged = (call.given.get(name) is not None for name in ("cu_seqlens_q", "block_table"))
    whole: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "out", "dout"), (B, T))
    whole |= dict.fromkeys(() if paged else ("k", "v"), (B, S)) | dict.fromkeys(("lse", "dlse"), (B, 4, T))
    whole |= {} if packed else dict.fromkeys(("key_start", "key_end", "block_table"), (B,))

    def resized(name: str, given: Shape) -> Shape:
        own = whole.get(name, ())
        dims = [*own, *given.sizes[len(own) :]]
        return shape(*dims[:-1], S if name == "block_table" else dims[-1], dtype=given.dtype)

    tensors = {name: given for name, given in call.given.items() if isinstance(given, Shape)}
    return call.but(**{name: resized(name, given) for name, given in tensors.items()})


PREFILL = [(2, 71, 200), (3, 70, 201), (4, 100, 333), (2, 128, 129), (3, 65, 1000)]
#: Rounded up to powers of two as before, and strides that 16 does not divide either.
BLOCKS = [(2, 71, 200), (3, 70, 201), (4, 99, 256)]
PACKED = [(1, 301, 301), (1, 400, 400), (1, 290, 290)]


@on_the_stub
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("attention", PREFILL), ("attention, prefill by triton", PREFILL),
     ("attention, softcap on hopper-attn2", PREFILL), ("attention backward", BLOCKS),
     ("attention backward, hopper", PREFILL), ("attention backward, wide", PREFILL[:2]),
     ("attention backward, softcap on triton-attn2", BLOCKS), ("attention, packed", PACKED),
     ("attention, packed by triton", [(1, 71, 201), (1, 90, 333)]),
     ("attention backward, packed", [(1, 71, 71), (1, 100, 100)]),
     ("attention, pages", [(3, 1, 40), (2, 1, 41), (5, 1, 50)]),
     ("attention, packed, in pages", [(1, 10, 40), (1, 9, 41), (1, 14, 56)])],
)  # fmt: skip
def test_any_new_sizes_have_a_plan_at_once(name: str, sizes: list[Sizes]) -> None:
    assert run(new_rows, name, tuple(sizes), of_sizes) == [{}] * len(sizes)


def with_other_sizes(name: str, sizes: Sizes) -> dict[str, Any]:
    """The difference that a plan makes whose sizes are those of another call."""
    call = of_sizes(sizes, CALLS[name])
    with on_hopper():
        for _ in range(3):
            CALLS[name].declared(**CALLS[name].named(), backend=call.backend, validate=False)
        (family,) = [plan.family for plan in call.declared._plans.families.values()]
        old = family._functions[0](2, 70, 200)
        with mock.patch.object(Family, "plan", lambda self, sizes: old):
            return differs(call, call.named(16))


@on_the_stub
@pytest.mark.parametrize("sizes", [(3, 70, 200), (2, 71, 200), (2, 70, 201)])
def test_a_plan_for_other_sizes_would_be_seen(sizes: Sizes) -> None:
    assert run(with_other_sizes, "attention", sizes)


# Families


def layouts(B: int, T: int, heads: int) -> Iterator[Tensor]:
    """[B, T, heads, 64] in the ways that models have it."""
    yield torch.empty(B, T, heads, 64, dtype=BF16)
    yield torch.empty(B, heads, T, 64, dtype=BF16).transpose(1, 2)
    yield torch.empty(T, B, heads, 64, dtype=BF16).transpose(0, 1)
    yield torch.empty(B, T, heads + 3, 64, dtype=BF16)[:, :, :heads]
    yield torch.empty(B, 700, heads, 64, dtype=BF16)[:, :T]
    yield torch.empty(1, 1, heads, 64, dtype=BF16).expand(B, T, heads, 64)


def test_sizes_and_a_family_are_all_that_a_call_is() -> None:
    """Shapes and strides of a call follow from another one of its family, however its tensors lie; whether
    the family is known, or worked out."""
    attention = OPS["attention"]
    varying, families = varying_in("attention"), dict[Any, list[Any]]()
    for B, T, S, KV in product((1, 2, 5), (2, 3, 64, 65), (2, 5, 64), (1, 2)):
        for q, k in zip(layouts(B, T, 4), layouts(B, S, KV), strict=True):
            args = dict(zip(attention.contract.names, attention.bind({"q": q, "k": k, "v": k}), strict=True))
            key = cache_key_of(tuple(args.values()), False)
            assert key is not None
            found = varying.split(key)
            assert found == varying_in("attention").split(key)
            families.setdefault(found[0], []).append((found[1], args))
    assert len(families) == 6 * 2 * 2 * 2  # layouts, heads, whether there is one sequence, few queries
    for calls in families.values():
        for (_, args), (sizes, other) in product(calls, calls):
            for name in "qkv":
                assert varying.shape(name, args, sizes) == (tuple(other[name].shape), other[name].stride())


def served(kind: Callable[..., Any] | None) -> list[set[Any]]:
    """For each family of calls of many sizes, the backends that serve them; with another function for what
    the choice reads, if one is given."""
    found: dict[Any, set[Any]] = {}
    module = isobit.ops.attention
    with on_hopper(), like_a_gpu(), mock.patch.object(module, "_choice", kind or module._choice):
        for op in ("attention", "attention_bwd"):
            varying = varying_in(op)
            for named in calls(op == "attention_bwd"):
                key = cache_key_of(OPS[op].bind(named), False)
                split = None if key is None else varying.split(key)
                if split is not None:
                    found.setdefault(split[0], set()).add(OPS[op].explain(**named).backend)
    return list(found.values())


def calls(backward: bool) -> Iterator[dict[str, Any]]:
    """With few and many queries, heads of a group, keys and sequences: packed, in pages, or neither."""
    tables = [shape(n, m, dtype=INT32) for n in (2, 3) for m in (4, 15, 16, 17, 40)]
    for H, T in product((2, 64), (1, 2, 31, 32, 33, 62, 63, 64, 65, 127, 128, 129, 190, 193)):
        shapes: list[dict[str, Shape]] = [
            {"q": shape(B, T, H, 64), "k": shape(B, S, 2, 64)} for B in (1, 2, 3) for S in (1, 2, 1024, 1025)
        ]
        packed = [{"q": shape(1, T, H, 64), "cu_seqlens_q": shape(n, dtype=INT32)} for n in (2, 3, 4)]
        shapes += [one | {"k": shape(1, S, 2, 64)} for one in packed for S in (T, 1025)]
        if not backward:
            pages = shape(5, 64, 2, 64)
            shapes += [{"q": shape(t.sizes[0], T, H, 64), "k": pages, "block_table": t} for t in tables]
            shapes += [packed[t.sizes[0] - 1] | {"k": pages, "block_table": t} for t in tables]
        for one in shapes:
            named: dict[str, Any] = {name: given.make(0) for name, given in one.items()}
            named["v"] = named["k"]
            if backward:
                named |= dict.fromkeys(("want_q", "want_k", "want_v", "causal"), True)
                named |= {"out": named["q"], "dout": named["q"], "dlse": None}
                named["lse"] = shape(*one["q"].sizes[:1], H, T, dtype=F32).make(0)
                rest = ("scale", "window", "softcap", "key_start", "key_end", "cu_seqlens_k", "block_table")
                named = dict.fromkeys((*rest, "cu_seqlens_q")) | named
            yield named


@on_the_stub
def test_calls_of_a_family_are_served_by_one_backend() -> None:
    found = run(served, None)
    assert len(found) > 20 and all(len(backends) == 1 for backends in found)
    assert set().union(*found) == {"hopper", "triton"}


def nothing(shapes: Any) -> None:
    """What the choice would read if it read nothing."""


@on_the_stub
def test_a_family_with_two_backends_would_be_seen() -> None:
    assert any(len(backends) == 2 for backends in run(served, nothing))


def test_a_choice_is_told_apart_in_a_family_that_is_known() -> None:
    """By the conditions under which its sizes are known."""
    split = varying_in("attention").split

    def of(T: int, S: int) -> Any:
        q, k = torch.empty(2, T, 4, 64, dtype=BF16), torch.empty(2, S, 2, 64, dtype=BF16)
        key = cache_key_of(OPS["attention"].bind({"q": q, "k": k, "v": k}), False)
        assert key is not None
        return split(key)

    few, decoding, many = of(9, 90), of(9, 2000), of(64, 90)
    assert len({few[0], decoding[0], many[0]}) == 3
    for _ in range(3):
        assert of(10, 1024) == (few[0], (2, 10, 1024)) and of(63, 2) == (few[0], (2, 63, 2))
        assert of(32, 1025)[0] == decoding[0] and of(33, 1025)[0] == few[0]
        assert of(100, 5000) == (many[0], (2, 100, 5000))
        assert of(1, 90)[1] == (90,) and of(1, 90)[0] != few[0]


def test_a_kind_that_is_a_number_is_one_of_the_conditions() -> None:
    """Of a family that is known: its sizes are those with the same number."""
    attention = OPS["attention"]
    varying = dimensions(
        attention.contract, lambda given: {"T": "T", "S": "S"}, lambda shapes: shapes["k"][1] // 100
    )
    found = []
    for S in (250, 260, 270, 299, 300, 250, 310):
        q, k = torch.empty(1, 9, 4, 64, dtype=BF16), torch.empty(1, S, 2, 64, dtype=BF16)
        key = cache_key_of(attention.bind({"q": q, "k": k, "v": k}), False)
        assert key is not None
        found.append(varying.split(key)[0])
    assert [family == found[0] for family in found] == [True, True, True, True, False, True, False]
    assert found[4] == found[6]
