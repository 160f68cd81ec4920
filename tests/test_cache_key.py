"""When two calls have the same cache key, or the same family key; and that nothing which is cached for a
family depends on its number of rows."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobit import ContractError
from isobit.frame import cache_key
from isobit.frame.backend import UnsupportedError
from isobit.frame.cache_key import CacheKey, cache_key_of, remember, split_key
from isobit.frame.composed import Composed
from isobit.frame.contract import Param
from isobit.frame.op import OPS
from isobit.kernels.hopper import descriptors

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def family_key_of(key: CacheKey, rows_at: Any) -> CacheKey | None:
    split = split_key(key, rows_at)
    return None if split is None else split[0]


def at(offset: int, *shape: int) -> Tensor:
    """A tensor that begins this many elements into its memory."""
    return torch.zeros(offset + torch.Size(shape).numel())[offset:].view(shape)


# Kinds


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3, 4), torch.ones(3, 4)),
        (torch.zeros(3, 4), at(4, 3, 4)),  # 16 bytes later
        (torch.zeros(3, 4), torch.zeros(9, 4)[3:6]),
        (torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))),
        (torch.zeros(3).requires_grad_(), torch.zeros(3).requires_grad_() * 2),  # a leaf or not
        (2.0, float("2")),
        ("hopper", "".join(["hop", "per"])),
        (BF16, torch.bfloat16),
    ],
)
def test_calls_with_the_same_key(one: Any, other: Any) -> None:
    found = cache_key_of((one, None), True)
    assert found is not None and found == cache_key_of((other, None), True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4, dtype=F64)),
        (torch.zeros(3, 4), torch.zeros(4, 3)),
        (torch.zeros(3, 4), torch.zeros(12)),
        (torch.zeros(3, 4), torch.zeros(4, 3).t()),
        (torch.zeros(3, 4), torch.zeros(3, 8)[:, :4]),
        (torch.zeros(3, 4), torch.zeros(1, 4).expand(3, 4)),
        (torch.zeros(3, 4), at(1, 3, 4)),
        (at(1, 3, 4), at(2, 3, 4)),
        (torch.zeros(3, 4), torch.zeros(3, 4).requires_grad_()),
        (torch.zeros(1), None),
        (torch.zeros(1), 0.0),
        (1, True),
        (1, 1.0),
        (0, False),
        (0.0, -0.0),  # a factor of -0 turns the sign of zeros
        (0.5, 0.25),
        (None, False),
        ("BF16", BF16),
        (BF16, F16),
    ],
)
def test_calls_with_different_keys(one: Any, other: Any) -> None:
    keys = [cache_key_of((value, 1.0), True) for value in (one, other)]
    assert None not in keys and keys[0] != keys[1]


def test_autograd_mode_and_argument_order_are_part_of_the_key() -> None:
    x = torch.zeros(2)
    assert len({cache_key_of(v, g) for v in ((x, None), (None, x), (x, x)) for g in (False, True)}) == 6


class Labelled(Tensor):
    """A tensor subclass without any behaviour."""


def leaked() -> Tensor:
    """A tensor that a transform has wrapped, after its end."""
    found: list[Tensor] = []
    torch.func.vmap(lambda x: (found.append(x), x)[1])(torch.zeros(2, 2))
    return found[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.zeros(0, 4),  # there is no address
        lambda: torch.zeros(2).as_subclass(Labelled),
        lambda: torch._efficientzerotensor(2),
        lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,  # negated when it is read
        leaked,
        lambda: np.float32(1.0),
        lambda: [1.0],
        lambda: type("Number", (float,), {"__hash__": None})(1.0),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_calls_without_a_key(make: Callable[[], Any]) -> None:
    assert cache_key_of((torch.zeros(2), make()), True) is None


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "MOST_KEYS", 3)
    answers: dict[CacheKey, int] = {}
    for i in range(10):
        remember(answers, (i,), i)
        assert len(answers) <= 3 and answers[(i,)] == i
    remember(answers, None, 11)
    assert 11 not in answers.values()


def test_answers_that_were_cached_first_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "MOST_KEYS", 16)
    answers: dict[CacheKey, int] = {}
    for i in range(40):
        remember(answers, (i,), i)
        kept = list(answers.values())
        assert kept == list(range(i + 1 - len(kept), i + 1)) and len(kept) >= min(i + 1, 15)


def test_the_descriptor_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "MOST_KEYS", 3)
    monkeypatch.setattr(descriptors, "_descriptors", {})
    for rows in (64, 65, 66, 67, 68, 64, 69):
        t = torch.empty(rows, 64, dtype=BF16)
        made = descriptors.descriptor(descriptors.matrix(t), 64, 64)
        assert list(made.shape) == [rows, 64] and made.base is t
        assert len(descriptors._descriptors) <= 3


# Families


ROWS_AT = ((0, 1), (0, 0), (1, 0), None, None)  # [*, V], [*], [2, *], [V, D], a number


def family(*values: Any, grad: bool = False) -> CacheKey | None:
    kind = cache_key_of(values, grad)
    assert kind is not None
    return family_key_of(kind, ROWS_AT)


def like(lead: list[int]) -> list[Any]:
    return [torch.zeros(*lead, 8), torch.zeros(lead), torch.zeros(2, *lead), torch.zeros(8, 3), 0.5]


@pytest.mark.parametrize(
    ("one", "other"), [([3], [700]), ([2, 3], [5, 4]), ([2, 1], [1, 2]), ([1, 2, 3], [4, 1, 1])]
)
def test_calls_with_the_same_family_key(one: list[int], other: list[int]) -> None:
    found = family(*like(one))
    assert found is not None and found == family(*like(other))


def changed(which: int, value: Any) -> list[Any]:
    return [value if i == which else v for i, v in enumerate(like([4]))]


@pytest.mark.parametrize(
    "other",
    [
        like([2, 2]),
        changed(0, torch.zeros(4, 9)),
        changed(0, torch.zeros(4, 8, dtype=BF16)),
        changed(0, at(1, 4, 8)),
        changed(0, torch.zeros(4, 8).requires_grad_()),
        changed(1, None),
        changed(1, 1.0),
        changed(3, torch.zeros(9, 3)),
        changed(3, torch.zeros(3, 8).t()),
        changed(4, 0.25),
        changed(4, None),
        changed(2, torch.zeros(3, 4)),
    ],
)
def test_calls_with_different_family_keys(other: list[Any]) -> None:
    found = family(*other)
    assert found is not None and found != family(*like([4]))
    assert family(*other, grad=True) != found


@pytest.mark.parametrize(
    "values",
    [
        like([1]),
        like([1, 1]),
        like([]),
        changed(0, torch.zeros(4, 9)[:, :8]),  # rows apart
        changed(0, torch.zeros(8, 4).t()),
        changed(1, torch.zeros(8)[::2]),
        changed(1, torch.zeros(1).expand(4)),
        changed(2, torch.zeros(2, 5)[:, :4]),
        changed(1, torch.zeros(5)),  # tensors disagree about rows
        changed(2, torch.zeros(2, 2, 2)),
        [None, None, None, torch.zeros(8, 3), 0.5],  # there are none
    ],
)
def test_calls_without_a_family_key(values: list[Any]) -> None:
    assert family(*values) is None


def test_a_call_without_rows_has_no_family() -> None:
    assert cache_key_of(like([0]), False) is None


# What is cached for a family is the same for all numbers of rows


SIZES = st.sampled_from([1, 3, 8, 24])
SCALARS: dict[type, tuple[Any, ...]] = {
    bool: (False, True),
    float: (1.0, 0.5, -1.0),
    int: (-100, 3, 0),
    str: ("before", "after", "hf", "neither"),
    torch.dtype: (BF16, F16, F32),
}
#: What parameters are mostly given that take hardly any of the above, or only with another one.
TAKEN: dict[str, tuple[Any, ...]] = {
    "groups": (None,),
    "order": ("softmax_topk", "topk_softmax"),
    "padded_vocab": (64, 128),
    "scoring": ("softmax", "sigmoid"),
    "top_groups": (None,),
    "top_k": (1, 3),
}
LIBRARY = sorted(name for name in OPS if OPS[name].package.startswith("isobit.ops."))
#: Ops that take every call that fits their contract.
NEVER_REFUSED = ("linear_logp_chunk_rounded",)

#: If rows are sequences, rules depend on their number, so another number is validated again. Functions
#: over ops are served by theirs.
BY_ROWS = [
    name for name in LIBRARY
    if any(at is not None for at in OPS[name].contract.rows_at) and not isinstance(OPS[name], Composed)
]  # fmt: skip


def mostly(usual: Any, unusual: Any) -> Any:
    return st.integers(0, 7).flatmap(lambda n: unusual if n == 0 else usual)


@st.composite
def calls(draw: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of two calls that differ in their number of rows."""
    rank = draw(st.integers(1, 2))
    leads = [draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)) for _ in range(2)]
    dims: dict[str, int] = {}
    narrow = draw(st.sampled_from([BF16, F16, F32, F64]))
    found: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for p in OPS[name].contract.params:
        for args, value in zip(found, draw(values(p, leads, dims, narrow)), strict=True):
            args[p.name] = value
    return found


@st.composite
def values(
    draw: Any, p: Param, leads: list[list[int]], dims: dict[str, int], narrow: torch.dtype
) -> list[Any]:
    """Of one parameter, for each number of rows."""
    if p.optional and (p.name in ("validate", "numerics", "backend", "prefer") or draw(st.booleans())):
        return [None] * 2
    if p.spec is None or (p.scalar is not None and draw(st.booleans())):
        assert p.scalar is not None
        found = st.sampled_from(SCALARS[p.scalar])
        return [draw(mostly(st.sampled_from(TAKEN[p.name]), found) if p.name in TAKEN else found)] * 2
    own = st.sampled_from(p.spec.dtypes)
    dtype = draw(mostly(st.just(narrow) if narrow in p.spec.dtypes else own, own))
    offset = draw(mostly(st.just(0), st.sampled_from([1, 4, 8])))
    turned = draw(mostly(st.just(False), st.booleans()))
    for dim in p.spec.dims:
        if dim == "*":
            continue
        size = int(dim) if dim.isdigit() else draw(SIZES)
        if dim.endswith("+1"):
            size = dims.get(dim.removesuffix("+1"), size - 1) + 1
        elif f"{dim}+1" in dims:
            size = max(dims[f"{dim}+1"] - 1, 0)
        dims.setdefault(dim, size)
    made = []
    for lead in leads:
        shape = [n for dim in p.spec.dims for n in (lead if dim == "*" else [dims[dim]])]
        memory = torch.ones(offset + int(np.prod(shape)), dtype=dtype)[offset:]
        swap = turned and len(shape) > 1
        made.append(
            memory.view(shape[::-1]).permute(*range(len(shape))[::-1]) if swap else memory.view(shape)
        )
    return made


def answer(name: str, args: dict[str, Any], backend: str | None) -> Any:
    """The explanation of a call, without the sizes in it."""

    def sizeless(text: str | None) -> str | None:
        return None if text is None else text.partition(" (shape ")[0]

    try:
        found = OPS[name].explain(**args | {"backend": backend})
    except UnsupportedError as error:
        return sizeless(str(error))
    except ContractError as error:
        return str(error).partition("): ")[2]  # before it is what was given
    return found.backend, found.numerics, [sizeless(reason) for reason in found.reasons.values()]


def test_most_ops_are_by_rows() -> None:
    assert len(BY_ROWS) > len(LIBRARY) / 2 and "logp" in BY_ROWS and "grpo_loss" not in BY_ROWS


@pytest.mark.parametrize("name", BY_ROWS)
def test_the_number_of_rows_decides_nothing_about_a_call(name: str) -> None:
    met: list[bool] = []

    @given(calls(name))
    @settings(max_examples=60, deadline=None, database=None, derandomize=True,
              suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
    def check(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
        contract, families = OPS[name].contract, []
        for args in two:
            kind = cache_key_of(contract.in_order(args), True)
            families.append(None if kind is None else family_key_of(kind, contract.rows_at))
        if families[0] is None or families[0] != families[1]:
            return
        for backend in (None, *(b.name for b in OPS[name].backends)):
            one, other = (answer(name, args, backend) for args in two)
            assert one == other
            met.append(not isinstance(one, str))

    on_hopper = {"arch_key": lambda device: "sm_90", "triton_is_interpreted": lambda: True}
    with mock.patch.multiple("isobit.frame.device", **on_hopper):
        check()
    assert True in met, "every call was refused"
    assert False in met or name in NEVER_REFUSED, "every call was served"
