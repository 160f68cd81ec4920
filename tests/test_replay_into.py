"""Calls that write to memory of the caller, as an engine's do, are made again from recorded launches like all
others. Their keys and values are parts of one cache. Above a libcuda that only records, as `test_replay`."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import isobit
from isobit.integrations.vllm.attention import split
from isobit.ops.attention.into import attention_into
from isobit.ops.attention.op import forward
from replay_calls import Noted, by_entries_alone, differs, on_hopper
from replay_shapes import INT32, Call, as_launch
from stub_cuda import Memory, clear, differences_but_for_places, launches, ordinary, run, why_not

pytestmark = [pytest.mark.compat, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

BF16, H, KV, D, PAGE = torch.bfloat16, 4, 2, 128, 64


def decoding(requests: int = 5) -> dict[str, Any]:
    """One query a request, keys and values in pages of one cache: the decoding kernel for Hopper."""
    cache = torch.ones(40, KV, PAGE, 2 * D, dtype=BF16)
    k, v = split(cache, D)
    table, lengths = torch.ones(requests + 1, 20, dtype=INT32), torch.ones(requests + 1, dtype=INT32)
    q = torch.ones(requests + 1, H, D, dtype=BF16)
    return {
        "q": q[1:, None], "k": k, "v": v, "key_end": lengths[1:], "block_table": table[1:], "scale": 0.1
    }  # fmt: skip


def chunks() -> dict[str, Any]:
    """Packed queries, with keys in pages."""
    q, starts = torch.ones(40, H, D, dtype=BF16), torch.ones(3, dtype=INT32)
    return {**decoding(2), "q": q, "cu_seqlens_q": starts, "backend": "triton"}


def prompts() -> dict[str, Any]:
    """Packed queries, keys and values, which are parts of one product."""
    qkv = torch.ones(300, H + 2 * KV, D, dtype=BF16)
    q, k, v = qkv.split((H, KV, KV), dim=1)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": torch.ones(3, dtype=INT32)}


FORMS: dict[str, Callable[[], dict[str, Any]]] = {"decoding": decoding, "chunks": chunks, "prompts": prompts}
KERNELS = {
    "decoding": ["decode_kernel", "fold_kernel"],
    "chunks": ["segments_kernel", "fold_kernel"],
    "prompts": ["attention_kernel"],
}


def memory_of(given: dict[str, Any], shift: int = 0) -> Tensor:
    """Of the result: a part of a larger tensor."""
    q = given["q"]
    return torch.ones(shift + q.numel() + 8, dtype=BF16)[shift : shift + q.numel()].view(q.shape)


def served_by(given: dict[str, Any]) -> Any:
    return forward.backend_named(str(forward.explain(**forward.adapt(given)).backend))


def ordinary_launches(out: Tensor, given: dict[str, Any]) -> tuple[list[Any], Memory]:
    """Those of the backend that serves, by Triton's own way."""
    named = forward.adapt(given)
    args = Call("attention", "", {}).bound(named)
    clear()
    with Noted({**named, "out": out}) as noted:
        served_by(given).run(launch=ordinary, out=out.view(named["q"].shape), **args)
    return [*launches(), as_launch(out)], noted.memory


def into(form: str) -> tuple[list[str], list[dict[str, Any]]]:
    """(kernels of a call, differences of calls to ordinary ones, each at other addresses); the last call has
    only the recorded way."""
    different = []
    with on_hopper():
        for _ in range(5):
            given = FORMS[form]()
            out = memory_of(given, 16)
            one, memory = ordinary_launches(out, given)
            clear()
            with Noted({**given, "out": out}) as noted:
                attention_into(out, **given, validate=False)
            other = [*launches(), as_launch(out)]
            different.append(differences_but_for_places(one, memory, other, noted.memory))
        clear()
        with by_entries_alone():
            given = FORMS[form]()
            attention_into(memory_of(given), **given, validate=False)
        return [made.name for made in launches()], different


def launcher_runs(layers: int, shifts: tuple[int, ...] = (0,)) -> int:
    """How often the launcher runs for the layers of a model that decodes: each has its own cache and memory,
    so far into its own."""
    with on_hopper():
        given = [decoding() for _ in range(layers)]
        backend, seen = served_by(given[0]), []
        theirs = backend.run

        def counted(**args: Any) -> Any:
            seen.append(args)
            return theirs(**args)

        with mock.patch.dict(vars(backend), run=counted):
            for i, each in enumerate(given):
                attention_into(memory_of(each, shifts[i % len(shifts)]), **each, validate=False)
        return len(seen)


def host_us() -> tuple[float, float]:
    """(a call that is replayed, one that runs the launcher), each the fastest of several rounds."""
    given = decoding(64)
    out = memory_of(given)

    def once(calls: int = 50) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            attention_into(out, **given, validate=False)
        return (time.perf_counter() - start) / calls * 1e6

    with on_hopper():
        once(4)
        replayed = min(once() for _ in range(5))
        with mock.patch("isobit.frame.replay.recordable", lambda inputs: False):
            forward.forget()
            once(4)
            return replayed, min(once() for _ in range(5))


def parts_of_one_tensor() -> list[dict[str, Any]]:
    """Calls of `swiglu` with halves of a tensor, and of `rope` with parts of two: differences to ordinary
    ones. The last call of each has only the recorded way."""

    def halves() -> dict[str, Any]:
        gate, up = torch.ones(33, 2200, dtype=BF16).chunk(2, dim=-1)
        return {"gate": gate, "up": up}

    def heads() -> dict[str, Any]:
        q, k = torch.ones(33, 6, 64, dtype=BF16).split((4, 2), dim=1)
        cos, sin = torch.ones(33, 128, dtype=BF16).chunk(2, dim=-1)
        return {"q": q, "k": k, "cos": cos, "sin": sin}

    found = []
    with on_hopper():
        for call, parts in ((Call("swiglu", "triton"), halves), (Call("rope", "triton"), heads)):
            found += [differs(call, parts()) for _ in range(4)]
            with by_entries_alone():
                call.declared(**parts(), backend="triton", validate=False)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_call_into_memory_of_the_caller_makes_the_launches_that_triton_would_make(form: str) -> None:
    kernels, different = run(into, form)
    assert kernels == KERNELS[form] and different == [{}] * 5


def test_of_many_layers_the_launcher_serves_two() -> None:
    """The first call runs it, the second is recorded."""
    assert run(launcher_runs, 12) == 2


def test_memory_at_another_alignment_has_launches_of_its_own() -> None:
    """Kernels are compiled for addresses that are multiples of 16 bytes, or for all."""
    assert run(launcher_runs, 12, (0, 1)) == 4


def test_a_replayed_call_takes_less_time_of_the_host() -> None:
    replayed, launched = run(host_us)
    print(f"\nattention_into: {replayed:.1f} us replayed, {launched:.1f} us by the launcher")
    assert replayed < launched


def test_parts_of_one_tensor_are_recorded_like_tensors_of_their_own() -> None:
    assert run(parts_of_one_tensor) == [{}] * 8


def test_results_are_those_of_the_op() -> None:
    """On a CPU, where what a backend returns is copied."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, heads, 64).bfloat16() for n, heads in ((3, 2), (9, 1), (9, 1)))
    out = torch.zeros(2, 3, 2, 64).bfloat16()
    attention_into(out, q, k, v, window=4)
    assert torch.equal(out, isobit.attention(q, k, v, window=4))
