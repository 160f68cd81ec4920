"""The chunk indices that the delta rule keeps for a tensor of bounds: computed once, and again when the
bounds may be others."""

import gc
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import isobit
from isobit.ops.delta_rule import chunk_indices as module
from isobit.ops.delta_rule import kernels_hopper, kernels_triton
from isobit.ops.delta_rule.chunk_indices import chunk_indices


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The bounds that indices were computed of, on a CPU that is treated like a GPU."""
    seen: list[list[int]] = []
    compute = module.computed

    def counted(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
        seen.append([] if isinstance(cu_seqlens, torch._subclasses.FakeTensor) else cu_seqlens.tolist())
        return compute(cu_seqlens, chunk_size)

    monkeypatch.setattr(module, "on_cpu", lambda t: False)
    monkeypatch.setattr(module, "computed", counted)
    module._kept.clear()
    yield seen
    module._kept.clear()


def test_by_hand() -> None:
    found = chunk_indices(torch.tensor([0, 5, 5, 45, 62], dtype=torch.int32), 16)
    assert found.tolist() == [[0, 0], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1]]


def test_a_second_call_with_the_same_tensor_computes_none(
    computed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = torch.tensor([0, 20, 70])
    args = [torch.randn(1, 70, 1, 16) for _ in range(5)]
    first = isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)
    again = isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)
    assert computed == [[0, 20, 70]] and torch.equal(first[0], again[0])
    assert chunk_indices(bounds, 16) is chunk_indices(bounds, 16)
    isobit.chunk_gated_delta_rule_bwd_dhu(
        *args, cu_seqlens=bounds.clone(), chunk_size=16
    )  # equal, not the same
    isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16, validate=True)
    assert len(computed) == 3
    monkeypatch.setenv("ISOBIT_VALIDATE", "1")
    isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)
    assert len(computed) == 4


def test_bounds_that_are_changed_in_place_have_new_indices(computed: list[list[int]]) -> None:
    bounds = torch.tensor([0, 20, 70])
    assert len(chunk_indices(bounds, 16)) == 2 + 4
    bounds[1] = 32
    assert chunk_indices(bounds, 16).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    bounds.copy_(torch.tensor([0, 1, 2]))
    assert chunk_indices(bounds, 16).tolist() == [[0, 0], [1, 0]]
    bounds.view(-1)[2] = 18  # through a view, which shares the version
    assert len(chunk_indices(bounds, 16)) == 3
    with torch.inference_mode():
        torch.add(bounds, 16, out=bounds)
    assert chunk_indices(bounds, 16).tolist() == [[0, 0], [1, 0], [1, 1]] and computed[-1] == [16, 17, 34]
    bounds.data = torch.tensor([0, 64, 70])  # without a new version, but with other memory
    assert len(chunk_indices(bounds, 16)) == 5
    args = [torch.randn(1, 70, 1, 16) for _ in range(5)]
    dh, *_ = isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)
    bounds[1] = 1
    changed, *_ = isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)
    assert dh.shape[1] == 5 and changed.shape[1] == 6
    assert computed[-1] == [0, 1, 70] and len(module._kept) == 1  # what was replaced is not kept


def test_every_chunk_size_has_its_own(computed: list[list[int]]) -> None:
    bounds = torch.tensor([0, 70])
    assert [len(chunk_indices(bounds, size)) for size in (16, 32, 64, 16, 32, 64)] == [5, 3, 2, 5, 3, 2]
    assert len(computed) == 3


def test_those_used_last_are_kept(computed: list[list[int]]) -> None:
    """And not those computed last: one tensor that every step uses stays among many that one step uses."""
    every_step = torch.tensor([0, 70])
    others = [torch.tensor([0, 10 + i]) for i in range(2 * module.MOST_KEPT)]
    for other in others:
        chunk_indices(every_step, 16)
        chunk_indices(other, 16)
    assert computed.count([0, 70]) == 1 and len(module._kept) == module.MOST_KEPT


@pytest.mark.parametrize("kernels", [kernels_hopper, kernels_triton], ids=["hopper", "triton"])
def test_no_kernel_reads_them(kernels: Any) -> None:
    """Otherwise a call in another stream would have to wait for those that are kept."""
    bounds, indices = torch.tensor([0, 64, 128]), torch.tensor([[0, 0], [1, 0]])
    args = {name: torch.zeros(1, 128, 1, 64).bfloat16() for name in ("q", "k", "w", "do", "dv")}
    options = {
        "scale": 1.0,
        "state_v_first": False,
        "chunk_size": 64,
        "use_exp2": True,
        "chunk_offsets": None,
    }
    options |= {"cu_seqlens": bounds, "chunk_indices": indices, **dict.fromkeys(("g", "gk", "h0", "dht"))}
    read: set[int] = set()

    def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **more: Any) -> None:
        tensors = [getattr(value, "base", value) for value in given]
        read.update(t.data_ptr() for t in tensors if isinstance(t, Tensor))

    kernels.dhu(launch=launch, **args, **options, **({"sms": 132} if kernels is kernels_hopper else {}))
    assert bounds.data_ptr() in read and args["q"].data_ptr() in read and indices.data_ptr() not in read


def test_a_freed_tensor_leaves_nothing(computed: list[list[int]]) -> None:
    bounds = torch.tensor([0, 70])
    chunk_indices(bounds, 16)
    assert len(module._kept) == 1
    # Its memory and its id may be those of another tensor now; with a version that is equal too.
    key, known = next(iter(module._kept.items()))
    del bounds
    gc.collect()
    assert not module._kept and known.bounds() is None
    other = torch.tensor([0, 20])
    module._kept[(id(other), *key[1:])] = known._replace(state=module._state(other))
    assert len(chunk_indices(other, 16)) == 2


def test_the_number_that_is_kept_is_bounded(computed: list[list[int]]) -> None:
    many = [torch.tensor([0, n]) for n in range(1, 2 * module.MOST_KEPT)]
    for bounds in many:
        chunk_indices(bounds, 16)
        assert len(module._kept) <= module.MOST_KEPT
    chunk_indices(many[-1], 16)
    assert len(computed) == len(many)
    chunk_indices(many[0], 16)
    assert len(computed) == len(many) + 1


class Wrapped(Tensor):
    pass


def test_what_may_have_other_values_is_not_kept(computed: list[list[int]]) -> None:
    with torch.inference_mode():
        inference = torch.tensor([0, 70])
        outside = chunk_indices(inference, 16)
        assert outside.is_inference()
    assert len(chunk_indices(inference, 16)) == 5 and not module._kept
    bounds = torch.tensor([0, 70])
    with torch.inference_mode():
        chunk_indices(bounds, 16)
    assert not module._kept and not chunk_indices(bounds, 16).is_inference()
    module._kept.clear()
    chunk_indices(bounds.as_subclass(Wrapped), 16)
    assert not module._kept


def test_fake_tensors_are_not_kept(computed: list[list[int]]) -> None:
    bounds = torch.tensor([0, 70])
    kept = chunk_indices(bounds, 16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(bounds)
        for given in (fake, bounds):  # a mode makes fakes of real tensors too
            with pytest.raises(Exception, match="repeat_interleave"):
                chunk_indices(given, 16)
    assert chunk_indices(bounds, 16) is kept and len(module._kept) == 1


def test_a_compiled_call_sees_new_bounds(computed: list[list[int]]) -> None:
    args, bounds = [torch.randn(1, 70, 1, 16) for _ in range(5)], torch.tensor([0, 20, 70])

    @torch.compile(backend="eager", dynamic=False)
    def call(bounds: Tensor) -> Tensor:
        return isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)[0]

    plain = isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)[0]
    module._kept.clear()
    assert torch.equal(call(bounds), plain)
    for known in module._kept.values():  # where the compiler left the call to Python
        assert type(known.indices) is Tensor
    bounds[1] = 1
    assert call(bounds).shape[1] == 6


def test_on_a_cpu_nothing_is_kept() -> None:
    """numpy may write into the memory of a tensor, and its version stays."""
    module._kept.clear()
    numbers = torch.tensor([0, 20, 70]).numpy()
    bounds = torch.from_numpy(numbers)
    args: list[Any] = [torch.randn(1, 70, 1, 16) for _ in range(5)]
    before, *_ = isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)
    numbers[1] = 1
    after, *_ = isobit.chunk_gated_delta_rule_bwd_dhu(*args, cu_seqlens=bounds, chunk_size=16)
    assert (before.shape[1], after.shape[1]) == (6, 6) and not module._kept
    numbers[1] = 16
    assert len(chunk_indices(bounds, 16)) == 5


def test_another_thread_may_drop_them_meanwhile(
    computed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dropping(OrderedDict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return self.pop(key, default)

    bounds = torch.tensor([0, 33])
    first = chunk_indices(bounds, 16)
    monkeypatch.setattr(module, "_kept", Dropping(module._kept))
    assert chunk_indices(bounds, 16) is first


def test_whoever_changes_them_holds_the_lock(
    computed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[str] = []

    def watched(name: str) -> Any:
        def change(self: Any, *args: Any, **kwargs: Any) -> Any:
            assert module._changing._is_owned(), name  # type: ignore[attr-defined]
            changes.append(name)
            return getattr(OrderedDict, name)(self, *args, **kwargs)

        return change

    names = ("__setitem__", "__delitem__", "move_to_end", "pop", "popitem")
    monkeypatch.setattr(module, "_kept", type("Watched", (OrderedDict,), {n: watched(n) for n in names})())
    every = [torch.tensor([0, n]) for n in range(1, module.MOST_KEPT + 2)]
    for bounds in (*every, every[-1]):
        chunk_indices(bounds, 16)
    del bounds
    every.pop()  # freed
    assert {"__setitem__", "move_to_end", "popitem"} < set(changes) and changes[-1] in ("pop", "__delitem__")


def test_threads(computed: list[list[int]]) -> None:
    shared = [torch.tensor([0, n]) for n in range(1, 40)]
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(5):
                for bounds in (*shared, torch.tensor([0, 33])):
                    found = len(chunk_indices(bounds, 16))
                    if found != -(-int(bounds[1]) // 16):
                        wrong.append((bounds, found))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(module._kept) <= module.MOST_KEPT
