"""Guards the stub of libcuda itself: it sees every difference between two launches, and none that is not.

And today's short way to a compiled kernel passes what Triton's own way passes, launch by launch.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame import launch as launching
from isobit.frame.contract import MISSING
from stub_cuda import (
    STREAM,
    Counts,
    Launch,
    Memory,
    clear,
    counts,
    differences,
    differences_but_for_places,
    launches,
    ordinary,
    run,
    same_memory,
    set_stream,
    why_not,
)

pytestmark = [pytest.mark.compat, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

BF16 = torch.bfloat16

Pairs = list[tuple[list[Launch], list[Launch]]]


# What the child does. Nothing is computed, so what tensors hold does not matter


@triton.jit(do_not_specialize=["n", "wide", "x"])
def toy(out, n, wide, x, flag: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, at * x + wide + flag, mask=at < n)


def toys() -> dict[str, list[Launch]]:
    """One launch, and others that differ from it in one thing each."""
    room = torch.empty(64)
    found = {}

    def log(name: str, grid: tuple[int, ...] = (3,), stream: int = STREAM, **change: Any) -> None:
        clear()
        set_stream(stream)
        toy[grid](**{"out": room, "n": 40, "wide": 2**40, "x": 0.5, "flag": 1, "BLOCK": 16} | change)
        found[name] = launches()

    log("plain")
    log("again")
    log("grid", grid=(3, 2))
    log("stream", stream=9)
    log("out", out=room[4:])
    log("n", n=41)
    log("wide", wide=2**40 + 1)
    log("x", x=0.75)
    log("constant", flag=2)
    log("warps", num_warps=8)
    log("dependent", launch_pdl=True)
    log("two", grid=(1,))
    found["two"] = found["plain"] + found["two"]
    return found


def product(launch: Callable[..., None], M: int = 33, shift: int = 0) -> tuple[Tensor, ...]:
    """Of M tokens and a weight that begins some elements later."""
    from isobit.ops.det_gemm import kernels_hopper

    K, N = 256, 512
    x, weight = torch.empty(1, 64, K, dtype=BF16)[:, :M], torch.empty(64 + N * K, dtype=BF16)
    weight = weight[shift : shift + N * K]
    return x, weight, kernels_hopper.product(x, weight.view(1, N, K).mT, None, BF16, launch)


def logp_args(V: int) -> dict[str, Any]:
    lead = (5,)
    args: dict[str, Any] = {"logits": torch.empty(*lead, V, dtype=BF16), "mask": None, "ignore_index": -100}
    args |= {"token_ids": torch.zeros(lead, dtype=torch.int64), "temperature": 0.7}
    return args | dict.fromkeys(("return_entropy", "return_lse", "return_stats"), True)


def rows(N: int) -> dict[str, Tensor]:
    made = {name: torch.empty(N) for name in ("entropy", "dlogp", "dentropy", "dlse")}
    return made | {"stats": torch.empty(2, N)}


def logp(launch: Callable[..., None]) -> None:
    from isobit.ops.logp import kernels_triton

    args = logp_args(1000)
    kernels_triton.logp(launch, **args)
    kernels_triton.logp_bwd(launch, **args, **rows(5))


def logp_hopper(launch: Callable[..., None]) -> None:
    from isobit.ops.logp import kernels_hopper

    kernels_hopper.logp(launch, **logp_args(1000))


def linear_logp_args() -> dict[str, Any]:
    from isobit.ops.linear_logp.op import forward

    N, D, V = 5, 64, 600
    args = {p.name: None if p.default is MISSING else p.default for p in forward.contract.params}
    args |= {"kept": None, "kept_base": None, "want_hidden": True, "want_weight": True, "want_bias": True}
    args |= {"hidden": torch.empty(N, D, dtype=BF16), "weight": torch.empty(V, D, dtype=BF16)}
    args |= {"bias": torch.empty(V), "token_ids": torch.zeros(N, dtype=torch.int64)}
    return args | dict.fromkeys(("return_entropy", "return_lse", "return_stats"), True)


def linear_logp(launch: Callable[..., None]) -> None:
    from isobit.ops.linear_logp import kernels_hopper

    kernels_hopper.linear_logp(launch, **linear_logp_args())


def linear_logp_bwd(launch: Callable[..., None]) -> None:
    from isobit.ops.linear_logp import kernels_hopper_bwd

    kernels_hopper_bwd.linear_logp_bwd(launch, **linear_logp_args() | rows(5))


def short(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """The way that `isobit.frame.launch.run` takes on a GPU, to a kernel that it has launched before."""
    launching.launched(kernel, grid, args, options)
    clear()
    if not launching._learn(kernel).known:  # only Triton knows for what it is compiled
        launching.launched(kernel, grid, args, options)
        return
    with mock.patch.object(type(kernel), "run", side_effect=AssertionError("this is the ordinary way")):
        launching.launched(kernel, grid, args, options)


def both_ways(call: Callable[..., Any]) -> Pairs:
    """Every launch of a call, the ordinary way and the short one."""
    pairs: Pairs = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        clear()
        ordinary(kernel, grid, *args, **options)
        first = launches()
        short(kernel, grid, *args, **options)
        pairs.append((first, launches()))

    call(launch)
    return pairs


def twice(call: Callable[..., Any], *others: Any) -> tuple[list[Launch], list[Launch]]:
    """A whole call, and another with other arguments, both the ordinary way and in the same memory."""
    found = []
    for args in ((), others):
        clear()
        with same_memory():
            call(ordinary, *args)
        found.append(launches())
    return found[0], found[1]


def elsewhere() -> tuple[list[Launch], Memory, list[Launch], Memory]:
    """A call twice, the second time with all that it makes in other memory, and 4 KB later there."""
    from isobit.ops.linear_logp import kernels_hopper

    args = linear_logp_args()
    with same_memory() as memory:
        kernels_hopper.linear_logp(ordinary, **args)
    one = launches()
    clear()
    with same_memory(1) as room:
        torch.empty(1024)
        kernels_hopper.linear_logp(ordinary, **args)
    return one, memory, launches(), room


def product_and_counts() -> tuple[int, Counts, list[Launch]]:
    _, weight, _ = product(ordinary)
    return weight.data_ptr(), counts(), launches()


def tensor_maps() -> list[bytes]:
    """Of one map, and of others that differ from it in one argument each."""
    library = ctypes.CDLL("libcuda.so.1")
    address = torch.empty(64).data_ptr() // 64 * 64
    plain: list[Any] = [10, 2, address, (96, 80), (192, 8192), (64, 16), (1, 1), 0, 3, 2, 0]
    changes: list[tuple[int, Any]] = [(0, 9), (1, 1), (2, address + 16), (7, 1), (8, 2), (9, 1), (10, 1)]
    changes += [(3, (97, 80)), (3, (96, 81)), (4, (208, 8192)), (5, (32, 16)), (5, (64, 8))]
    changes += [(6, (2, 1)), (6, (1, 2))]

    def encoded(values: list[Any]) -> bytes:
        out = ctypes.create_string_buffer(128)
        kinds: dict[int, Any] = {2: ctypes.c_void_p} | dict.fromkeys((3, 4), ctypes.c_uint64 * 2)
        kinds |= dict.fromkeys((5, 6), ctypes.c_uint32 * 2)
        given = [
            kinds.get(i, ctypes.c_uint32)(*(v if isinstance(v, tuple) else (v,)))
            for i, v in enumerate(values)
        ]
        assert library.cuTensorMapEncodeTiled(out, *given) == 0
        return out.raw

    return [encoded(plain), *(encoded([*plain[:i], value, *plain[i + 1 :]]) for i, value in changes)]


def refused() -> dict[str, str]:
    """What the stub says to what no device would do."""
    from triton.runtime import driver

    compiled = toy[(1,)](torch.empty(64), 40, 2**40, 0.5, 1, 16)
    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor", None) or utils.fill_tma_descriptor_tiled
    room = torch.empty(1024, dtype=BF16)
    at = room.data_ptr()
    rest = (compiled.packed_metadata, None, None, None, room, 40, 2**40, 0.5, 1, 16)
    tries: dict[str, Callable[[], Any]] = {
        "function": lambda: compiled.run(1, 1, 1, STREAM, 12345, *rest),
        "grid": lambda: compiled.run(1, 1 << 16, 1, STREAM, compiled.function, *rest),
        "block": lambda: compiled.run(1, 1, 1, STREAM, compiled.function, (64, 1, 0), *rest[1:]),
        "shared": lambda: compiled.run(1, 1, 1, STREAM, compiled.function, (4, 1, 65536), *rest[1:]),
        "address": lambda: fill(at + 2, 3, 2, 10, [8, 64], [8, 64], [64, 1], 0),
        "stride": lambda: fill(at, 3, 2, 10, [8, 64], [8, 60], [60, 1], 0),
        "box": lambda: fill(at, 3, 2, 10, [512, 64], [8, 64], [64, 1], 0),
    }
    clear()
    said = {}
    for name, attempt in tries.items():
        with pytest.raises(RuntimeError) as caught:
            attempt()
        said[name] = str(caught.value)
    assert launches() == [] and counts().maps == 0
    return said


def stops() -> None:
    os._exit(3)


# The log is honest


@pytest.fixture(scope="module")
def logs() -> dict[str, list[Launch]]:
    return run(toys)


def test_a_launch_is_what_it_was(logs: dict[str, list[Launch]]) -> None:
    (made,) = logs["plain"]
    assert (made.name, made.grid, made.block, made.stream) == ("toy", (3, 1, 1), (128, 1, 1), STREAM)
    assert made.attributes == ()
    address, *numbers, scratch, profile = made.params
    assert len(address) == 8 and int.from_bytes(address, "little") % 16 == 0
    n, wide, x = numbers
    assert (n, wide) == ((40).to_bytes(4, "little"), (2**40).to_bytes(8, "little"))
    assert x == bytes.fromhex("0000003f")
    assert scratch == profile == bytes(8)


def test_the_same_launch_has_the_same_log(logs: dict[str, list[Launch]]) -> None:
    assert not differences(logs["plain"], logs["again"])


@pytest.mark.parametrize(
    ("changed", "places"),
    [("grid", "grid"), ("stream", "stream"), ("out", "params[0]"), ("n", "params[1]"), ("wide", "params[2]"),
     ("x", "params[3]"), ("constant", "code shared"), ("dependent", "attributes"),
     ("warps", "code block shared")],
)  # fmt: skip
def test_a_difference_is_seen_where_it_is_and_nowhere_else(
    logs: dict[str, list[Launch]], changed: str, places: str
) -> None:
    """Shared memory stands for what only the compiled kernel says: it is another for other code."""
    assert list(differences(logs["plain"], logs[changed])) == [f"0.{place}" for place in places.split()]


def test_a_launch_more_is_seen(logs: dict[str, list[Launch]]) -> None:
    assert list(differences(logs["plain"], logs["two"])) == ["1"]


def test_every_argument_of_a_tensor_map_is_in_its_bytes() -> None:
    maps = run(tensor_maps)
    assert len(set(maps)) == len(maps) == 15


def test_a_product_has_three_tensor_maps_and_two_pointers() -> None:
    address, asked, (made,) = run(product_and_counts)
    assert [i for i, p in enumerate(made.params) if len(p) == 128] == [6, 11, 16]
    assert made.params[6].startswith(address.to_bytes(8, "little"))  # the weight's, for few tokens
    assert made.params[16].startswith(made.params[0])  # the output's
    assert asked == Counts(maps=3, pointers=2)  # out, and out again in place of a bias


@pytest.mark.parametrize(
    ("M", "shift", "places"),
    [(34, 0, (3, 11, 12, 16, 17)), (33, 8, (6,))],  # a token more; a weight that begins 16 bytes later
)
def test_a_call_that_is_another_is_seen_in_its_parameters(
    M: int, shift: int, places: tuple[int, ...]
) -> None:
    assert list(differences(*run(twice, product, M, shift))) == [f"0.params[{i}]" for i in places]


def test_other_addresses_are_the_same_call() -> None:
    one, memory, other, room = run(elsewhere)
    assert one and differences(one, other)
    assert not differences_but_for_places(one, memory, other, room)


def test_addresses_are_distinguished() -> None:
    """Of a tensor of 64 bytes and one of 32, in room for both."""
    memory, room = Memory([(1000, 64), (2000, 32)]), Memory([(5000, 96)])

    def log(*addresses: int) -> list[Launch]:
        params = (
            address.to_bytes(8, "little") + bytes(size)
            for address, size in zip(addresses, (0, 120, 0), strict=True)
        )
        return [Launch("kernel", 1, (1, 1, 1), (32, 1, 1), 0, STREAM, (), tuple(params))]

    def found(*addresses: int) -> list[str]:
        return list(differences_but_for_places(log(1000, 2000, 1016), memory, log(*addresses), room))

    assert found(5000, 5064, 5016) == found(5032, 5000, 5048) == []
    assert found(5000, 5064, 5020) == ["0.params[2]"]  # at another distance from the first than before
    assert found(5000, 5048, 5016) == ["made[1]"]  # inside of the first
    assert found(5000, 5072, 5016) == ["made[1]"]  # its end is outside
    assert found(5000, 2000, 5016) == ["0.params[1]"]  # where it was


def test_impossible_launches_are_refused() -> None:
    said = run(refused)
    for name, word in {"function": "no such function", "address": "multiple of 16 bytes"}.items():
        assert word in said[name], said
    assert all("stub: " in text for text in said.values())


# Isobit's launchers


CALLS = (product, linear_logp, linear_logp_bwd, logp, logp_hopper)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_short_way_passes_what_the_ordinary_one_does(call: Callable[..., Any]) -> None:
    pairs = run(both_ways, call)
    assert pairs
    for one, other in pairs:
        assert len(one) == len(other) == 1
        assert not differences(one, other)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_whole_call_made_twice_has_the_same_log(call: Callable[..., Any]) -> None:
    one, other = run(twice, call)
    assert one and not differences(one, other)


# At the end, since what comes after it waits for a new child


def test_a_child_that_dies_fails_one_test_and_not_the_next() -> None:
    with pytest.raises(AssertionError, match="stops killed"):
        run(stops)
    assert run(counts) == Counts(0, 0)
