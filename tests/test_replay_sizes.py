"""Calls with sizes that no call had before: their plans follow from one that was recorded, launch by launch
and byte by byte what Triton's own way would give to the driver. And a decode loop, whose cache is longer at
every step, compiles nothing after the first one. Above a libcuda that only records, as `test_replay`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor

import isobit
from isobit.frame import entry, family, launch, replay
from isobit.frame.backend import Backend
from isobit.frame.cache_key import cache_key_of
from isobit.frame.call_plan import CallPlan
from isobit.frame.launch import launched
from isobit.frame.op import OPS
from replay_calls import CALLS, by_entries_alone, differs, on_hopper
from replay_layers import EXPERTS
from replay_shapes import BF16, F32, INT32, Call, Shape, shape, tensors_of
from stub_cuda import clear, run, why_not
from test_replay_ops import rows

pytestmark = [pytest.mark.compat, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


# Which calls have plans for other sizes


def varying_in(op: str) -> Any:
    return family.varying(OPS[op].contract, OPS[op].grows)


def reasons(names: list[str]) -> dict[str, str | None]:
    """Why calls have no plans for other sizes: None if they have, "alone" if they belong to no family."""
    found: dict[str, str | None] = {}
    with on_hopper():
        for name in names:
            call = CALLS[name]
            args, varying = call.args(), varying_in(call.op)
            key = cache_key_of(call.declared.bind(call.named()), False)
            split = None if key is None else varying.split(key)
            if split is None:
                found[name] = "alone"
                continue
            _, plan = replay.record(call.run, args, tensors_of(args), split[1], varying.shape)
            assert plan is not None
            found[name] = None if plan.resized is not None else plan.untraceable
    return found


#: What keeps a launcher from being traced. Its calls with new sizes run the launcher: correct, but slower.
#: These loop over products, whose number is the size that varies.
UNTRACEABLE = dict.fromkeys(
    ("gemm", "gemm backward", "gemm, hopper-tree8", "gemm backward, hopper-tree8"),
    "a function of no other sizes",
)


def test_launchers_are_traced_but_for_those_that_are_known_not_to_be() -> None:
    found = {name: why for name, why in run(reasons, list(CALLS)).items() if why not in (None, "alone")}
    assert found.keys() == UNTRACEABLE.keys()
    assert all(UNTRACEABLE[name] in str(why) for name, why in found.items()), found


# New numbers of rows


@contextmanager
def without_launchers() -> Iterator[None]:
    closed = AssertionError("this is the launcher's way")
    with mock.patch.object(CallPlan, "run_backend", side_effect=closed), by_entries_alone():
        yield


def new_rows(
    name: str, counts: tuple[int, ...], rows: Callable[[int, Call], Call] = rows, first: int | None = None
) -> list[dict[str, Any]]:
    """Differences of calls with new numbers of rows to ordinary ones, after two calls with another: `first`,
    or that of the example."""
    found, call = [], CALLS[name]
    with on_hopper():
        before = call if first is None else rows(first, call)
        for _ in range(2):
            before.declared(**before.named(), backend=before.backend, validate=False)
        for count in counts:
            other = rows(count, call)
            clear()
            named = other.named(16)
            with without_launchers():  # the ordinary call is not made here
                other.declared(**named, backend=other.backend, validate=False)
            found.append(differs(other, named))
    return found


@pytest.mark.parametrize(
    ("name", "counts"),
    [("linear, few tokens", (34, 40, 37)), ("linear, many tokens", (1101, 1104)), ("linear, bias", (40,)),
     ("linear, triton", (34, 40)), ("linear backward", (34, 40)), ("linear, tree", (1101, 1104)),
     ("linear, tree in parts", (34, 40)), ("head", (6, 2, 64)), ("head, mask", (7,)),
     ("head, shared splits", (6,)), ("head backward, frozen", (6, 100)), ("head backward, kept", (6,)),
     ("head backward, padded vocabulary", (7, 100)), ("head backward, several slabs", (100,)),
     ("logp, few rows", (6, 17)), ("logp, hopper", (6, 100)), ("rms_norm", (34, 2)), ("gemm_dw", (701, 690))],
)  # fmt: skip
def test_a_new_number_of_rows_has_a_plan_at_once(name: str, counts: tuple[int, ...]) -> None:
    assert run(new_rows, name, counts) == [{}] * len(counts)


def instead_of(size: int, count: int, call: Call) -> Call:
    """The same call with another number wherever a dimension has this size."""
    shapes = {name: given for name, given in call.given.items() if isinstance(given, Shape)}
    return call.but(**{
        name: shape(*[count if n == size else n for n in given.sizes], dtype=given.dtype)
        for name, given in shapes.items() if size in given.sizes
    })  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "counts"),
    [("head, everything", 5, (6, 64)), ("head, shards", 5, (6, 2)), ("head backward, shards", 5, (6, 2)),
     ("logp, shards", 5, (6, 64)), ("linear backward, triton", 33, (34, 40)),
     ("linear backward, tree, triton", 33, (34, 48)), ("experts backward, triton", 66, (70, 80)),
     ("gemm, one product", 40, (41, 33, 64)), ("gemm backward, one product", 40, (41, 33)),
     ("gemm, triton", 3, (4, 16)), ("gemm backward, triton", 3, (4, 16)), ("gemm, triton-tree8", 3, (4,)),
     ("gemm backward, triton-tree8", 3, (4,)), ("chunk backward", 300, (301, 384)),
     ("chunk backward, the last", 300, (301,)), ("chunk backward, in slabs", 300, (301,)),
     ("chunk backward, postponed", 300, (301,)),
     # As many partial sums as before: the launcher asks for their number.
     ("rms_norm backward", 33, (34, 40)), ("rms_norm backward, long rows", 5, (6, 8)),
     ("gated norm backward", 33, (34, 40)), ("gates backward", 33, (34, 40))],
)  # fmt: skip
def test_a_new_size_anywhere_has_a_plan_at_once(name: str, old: int, counts: tuple[int, ...]) -> None:
    assert run(new_rows, name, counts, partial(instead_of, old)) == [{}] * len(counts)


def tokens(count: int, call: Call) -> Call:
    """The call of a layer of experts with this many tokens, which had 33: two rows for each."""
    sizes = {33: count, 66: 2 * count}
    return call.but(**{
        name: shape(sizes.get(given.sizes[0], given.sizes[0]), *given.sizes[1:], dtype=given.dtype)
        for name, given in call.given.items()
        if isinstance(given, Shape)
    })  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_a_layer_of_experts_has_plans_for_any_number_of_tokens(name: str) -> None:
    """Of many rows, 1025 and more, as of few: `route` sorts them in other ways."""
    assert run(new_rows, name, (34, 2, 40, 512), tokens) == [{}] * 4
    assert run(new_rows, name, (513, 4097), tokens, 600) == [{}] * 2


@pytest.mark.parametrize(
    "name", ["experts, hopper", "experts backward, hopper", "experts backward without bias, hopper"]
)
def test_products_of_experts_have_plans_for_any_number_of_rows(name: str) -> None:
    assert run(new_rows, name, (71, 80)) == [{}] * 2


def test_calls_of_a_product_are_one_family_for_any_rows() -> None:
    """But for one row, and tensors that disagree. Of several products the number may vary, as ever."""
    gemm, bwd = OPS["det_gemm"], OPS["det_gemm_bwd"]

    def split(op: Any, **tensors: Tensor) -> Any:
        key = cache_key_of(
            op.bind({"want_a": True, "want_b": True} | tensors if op is bwd else tensors), False
        )
        assert key is not None
        return varying_in(op.name).split(key)

    def made(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=BF16)

    b, columns = made(64, 48), made(48, 64).T
    first = split(gemm, a=made(40, 64), b=b)
    assert split(gemm, a=made(41, 64), b=b) == (first[0], (41,)) and first[1] == (40,)
    assert split(gemm, a=made(41, 128)[:, :64], b=b)[0] != first[0]  # with another stride
    assert split(gemm, a=made(40, 64), b=columns)[0] != first[0]
    assert split(gemm, a=made(40, 64), b=made(64, 56))[0] != first[0]
    assert split(gemm, a=made(1, 64), b=b) is None
    assert split(bwd, dc=made(40, 48), a=made(40, 64), b=b)[1] == (40,)
    assert split(bwd, dc=made(40, 48), a=made(41, 64), b=b) is None
    several = [split(gemm, a=made(n, 40, 64), b=made(n, 64, 48)) for n in (3, 4)]
    assert several[0][0] == several[1][0] and [sizes for _, sizes in several] == [(3,), (4,)]


def other_rows_than_tokens() -> tuple[list[bool], list[dict[str, Any]]]:
    """(whether calls belong to one family: of other tokens, of other rows, of other experts of a token, of
    one token, with tensors that disagree; differences to ordinary calls, with one row more for no token)."""
    call, varying = CALLS["combine"], varying_in("combine")

    def family_of(T: int, R: int, k: int = 2, of_weights: int | None = None) -> Any:
        given = {"y": shape(R, 64), "weights": shape(of_weights or T, k, dtype=F32)}
        named = call.but(**given, place=shape(T, k, dtype=INT32)).named()
        key = cache_key_of(call.declared.bind(named), False)
        split = None if key is None else varying.split(key)
        return None if split is None else split[0]

    first = family_of(33, 66)
    others = [family_of(40, 80), family_of(33, 70), family_of(33, 99, 3), family_of(1, 2),
              family_of(33, 66, of_weights=32)]  # fmt: skip
    found = []
    with on_hopper():
        for name in ("combine", "combine backward", "spread backward"):
            for count, more in ((33, 0), (33, 0), (34, 1), (40, 0), (41, 1), (41, 1), (41, 1), (50, 0)):
                other = tokens(count, CALLS[name])
                grown = {"y" if "y" in other.given else "dy": shape(2 * count + more, 64)}
                other = other.but(**grown)
                found.append(differs(other, other.named(16)))
    return [other == first for other in others], found


def test_tokens_and_rows_vary_apart_from_each_other() -> None:
    same, different = run(other_rows_than_tokens)
    assert same == [True, True, False, False, False] and different == [{}] * 24


def encoded_by(own_code: bool) -> tuple[list[dict[str, Any]], bool]:
    """(the same, whether Triton's C function for tensor maps was called directly); with `own_code` as if that
    was not found."""
    from isobit.kernels.hopper import descriptors

    found = entry._filling
    called: list[Any] = []

    def filling(descriptor: Any, meta: Any) -> Any:
        fill = None if own_code else found(descriptor, meta)
        return fill and (lambda *args: (called.append(args), fill(*args))[1])

    # Both, and both come back: a descriptor that was made before has maps of a form that was kept before.
    nothing = mock.patch.dict(descriptors._descriptors, clear=True)
    with (
        mock.patch.object(entry, "_filling", filling),
        nothing,
        mock.patch.object(entry, "_kept", entry._Kept()),
    ):
        return new_rows("linear, few tokens", (34, 40)), bool(called)


def test_tensor_maps_of_new_sizes_have_a_short_way_and_do_without_it() -> None:
    different, directly = run(encoded_by, False)
    assert different == [{}] * 2
    assert directly or not triton.__version__.startswith("3.7.")  # others may have another way
    assert run(encoded_by, True) == ([{}] * 2, False)


def tiles() -> tuple[int, int, list[bool]]:
    """A layer at many numbers of rows: (plans that are functions of it, calls that ran a launcher, whether
    plans choose the tiles that launchers choose)."""
    from isobit.ops.det_gemm.kernels_hopper import choose_tile

    call, chosen, ran = CALLS["linear, few tokens"], [], []
    real = CallPlan.run_backend
    with on_hopper(), mock.patch.object(CallPlan, "run_backend", autospec=True) as spy:
        spy.side_effect = lambda plan, tensors: (ran.append(plan.sizes), real(plan, tensors))[1]
        for count in [*range(2, 700, 3), *range(3, 700, 7)]:
            other = rows(count, call)
            other.declared(**other.named(), backend="hopper", validate=False)
        (first,) = call.declared._plans.families.values()
        for (_, _, _, (shape, *_), _), plan in call.declared._plans.items():
            tile, _ = choose_tile(shape[0], 512, 256, 132)
            made = plan._recorded
            if made is not None:
                ((_, _, _, _, args, _, _),) = made.parts[-1]
                chosen.append([tile.consumers, tile.columns] == args[-12:-10])
    return len(first.family._functions), len(ran), chosen


def test_a_layer_runs_its_launcher_once_for_every_tile() -> None:
    functions, ran, chosen = run(tiles)
    assert 3 <= functions <= 30
    assert ran <= functions + 2  # the first call is not recorded
    assert len(chosen) > 250 and all(chosen)


# A cache that grows


def on_the_short_path(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """What `launch.run` does with tensors of a GPU."""
    if 0 not in grid:
        launched(kernel, grid, args, options)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """On top of `on_hopper`: backends are chosen as for tensors of a GPU, and launched on the short path."""

    def why(
        self: Backend, args: dict[str, Any], device: torch.device, numerics: str | None = None
    ) -> str | None:
        return self.not_by_default(args) or self.when(args)

    code = launch.run.__code__  # launchers have the function itself as a default
    launch.run.__code__ = on_the_short_path.__code__
    try:
        with mock.patch.object(Backend, "why_not", why):
            yield
    finally:
        launch.run.__code__ = code


#: Caches of B sequences with KV heads of 64: a part of a larger one, copied at every step, and as a model of
#: Hugging Face keeps it, with heads before keys.
LAYOUTS: dict[str, Callable[[int, int, int], Tensor]] = {
    "a part": lambda B, S, KV: torch.empty(B, 4096, KV, 64, dtype=BF16)[:, :S],
    "copied": lambda B, S, KV: torch.empty(B, S, KV, 64, dtype=BF16),
    "heads first": lambda B, S, KV: torch.empty(B, KV, S, 64, dtype=BF16).transpose(1, 2),
}


def decoding(layout: str, B: int, lengths: list[int]) -> tuple[int, int, int]:
    """(kernels that the first step compiles, those after all steps, steps that ran a launcher)."""
    q, KV = torch.empty(B, 1, 4, 64, dtype=BF16), 2
    launch._compiled.clear()
    first, ran = 0, []
    real = CallPlan.run_backend
    with on_hopper(), like_a_gpu(), mock.patch.object(CallPlan, "run_backend", autospec=True) as spy:
        spy.side_effect = lambda plan, tensors: (ran.append(plan.sizes), real(plan, tensors))[1]
        for step, S in enumerate(lengths):
            k, v = (LAYOUTS[layout](B, S, KV) for _ in "kv")
            if step == 0:
                isobit.attention(q, k, v, validate=False)
                first = len(launch._compiled)
            else:
                with by_entries_alone():
                    isobit.attention(q, k, v, validate=False)
            clear()
    return first, len(launch._compiled), len(ran)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_loop_compiles_nothing_after_its_first_step(layout: str) -> None:
    """1,400 lengths, past 1024 keys: there another backend serves, with two kernels instead of one."""
    first, all_, ran = run(decoding, layout, 1, list(range(200, 1600)))
    assert first >= 3 and all_ == first
    assert ran == 4  # two on each side of 1024 keys: the second is recorded


@pytest.mark.parametrize("B", [1, 3, 33, 70])
def test_nothing_compiles_where_programs_exceed_the_sms(B: int) -> None:
    """With more programs than SMs two share one, and the kernel has a smaller ring."""
    lengths = [100, 1024, 1025, 1026, 2048, 2049, 3073, 3074, 23 * 1024, 23 * 1024 + 1, 70 * 1024]
    first, all_, _ = run(decoding, "copied", B, lengths if B < 70 else lengths[:-3])
    assert all_ == first


def kernels_of_a_first_call(T: int, S: int) -> int:
    q, k, v = (torch.empty(2, n, h, 64, dtype=BF16) for n, h in ((T, 4), (S, 2), (S, 2)))
    launch._compiled.clear()
    with on_hopper(), like_a_gpu():
        isobit.attention(q, k, v, validate=False)
    return len(launch._compiled)


@pytest.mark.parametrize(
    ("T", "S", "kernels"), [(1, 90, 4), (1, 2000, 3), (2, 90, 1), (2, 2000, 2), (9, 9, 1)]
)
def test_only_a_step_of_decoding_compiles_for_longer_caches(T: int, S: int, kernels: int) -> None:
    assert run(kernels_of_a_first_call, T, S) == kernels


def grown(layout: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Differences of a decode loop's calls to ordinary ones."""
    found = []
    with on_hopper(), like_a_gpu():
        for S in lengths:
            k, v = (LAYOUTS[layout](2, S, 2) for _ in "kv")
            call = Call("attention", "triton" if S <= 1024 else "hopper")
            named = {"q": shape(2, 1, 4, 64).make(0), "k": k, "v": v, "return_lse": True}
            found.append(differs(call, named))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_longer_cache_makes_the_launches_that_triton_would_make(layout: str) -> None:
    lengths = [200, 201, 202, 333, 1024, 1025, 1026, 1027, 2048, 2049, 5000 if layout != "a part" else 4096]
    assert run(grown, layout, lengths) == [{}] * len(lengths)


def choices(lengths: list[int]) -> list[tuple[bool, list[str | None]]]:
    """For each layout and other options: whether two lengths are one family, and the backends that serve."""
    attention, found = OPS["attention"], []
    options: list[dict[str, Any]] = [{}, {"window": 7}, {"key_end": torch.ones(3, dtype=torch.int64)}]
    with on_hopper(), like_a_gpu():
        for make in LAYOUTS.values():
            for rest in options:
                for T in (1, 100):
                    q = torch.empty(3, T, 4, 64, dtype=BF16)
                    given = [{"q": q, "k": make(3, S, 2), "v": make(3, S, 2), **rest} for S in lengths]
                    keys = [cache_key_of(attention.bind(each), False) for each in given]
                    splits = [varying_in("attention").split(key) for key in keys]
                    same = len({split and split[0] for split in splits}) == 1 and None not in splits
                    found.append((same, [attention.explain(**each).backend for each in given]))
    return found


@pytest.mark.parametrize("lengths", [[2, 100, 777, 1024], [1025, 2000, 4095]])
def test_lengths_of_one_family_are_served_by_one_backend(lengths: list[int]) -> None:
    for same, backends in run(choices, lengths):
        assert same and len(set(backends)) == 1 and backends[0] in ("hopper", "triton")


def outside() -> list[bool]:
    """Whether calls belong to a family: of one key, of two, with keys and values of other lengths, of other
    batches, with other bounds than sequences; and with keys that have too few dimensions."""
    attention, bounds = OPS["attention"], torch.zeros(2, dtype=torch.int32)
    makes: list[dict[str, Any]] = [
        {"k": (1, 1, 2, 64)}, {"k": (1, 2, 2, 64)}, {"k": (1, 5, 2, 64), "v": (1, 6, 2, 64)},
        {"k": (2, 5, 2, 64)}, {"k": (1, 5, 2, 64), "key_end": bounds}, {"k": ()}, {"k": (1, 2)},
    ]  # fmt: skip
    found = []
    for given in makes:
        k = torch.empty(given.pop("k"), dtype=BF16)
        v = torch.empty(given.pop("v", k.shape), dtype=BF16)
        values = attention.bind({"q": torch.empty(1, 5, 4, 64, dtype=BF16), "k": k, "v": v, **given})
        key = cache_key_of(values, False)
        found.append(varying_in("attention").split(key) is not None)
    return found


def test_calls_that_the_contract_refuses_have_no_family() -> None:
    assert outside() == [True, True, False, False, False, False, False]


def test_a_backend_without_launches_compiles_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a call of one that launches."""

    def ahead(args: Any) -> list[int]:
        raise AssertionError("compiled ahead")

    plans = OPS["attention"]._plans
    monkeypatch.setattr(plans, "varying", varying_in("attention")._replace(ahead=ahead))
    q, k = torch.randn(1, 1, 2, 64), torch.randn(1, 37, 2, 64)
    isobit.attention(q, k, k, backend="reference")
