"""What was rehearsed is compiled, by other processes, and then nothing is compiled any more. Above a libcuda
that only records, so kernels are compiled for a Hopper GPU, and nothing is computed."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import isobit
from hf_models import made
from isobit.frame import launch, rehearsal
from isobit.frame.backend import Backend
from isobit.frame.launch import launched
from isobit.frame.op import OPS
from isobit.frame.rehearsed import Warmed, is_rehearsed, rehearsed_by
from isobit.integrations.hf import drift, logps, register_attention, swaps, trial, warmup, zero_drift
from replay_calls import on_hopper
from stub_cuda import launches, run, why_not

stubbed = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BF16 = torch.bfloat16


# In the child


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """What this process looks for in Triton's cache on disk, and whether it finds it."""
    seen = Counter[str]()

    def looked(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        seen["found" if cache_hit else "compiled"] += 1

    with mock.patch.object(triton.knobs.compilation, "listener", looked):
        yield seen


@contextmanager
def as_if_new(needed: list[rehearsal.Needed]) -> Iterator[None]:
    """Kernels are not in the memory of this process."""
    with ExitStack() as stack:
        for kernel in {id(each.kernel): each.kernel for each in needed}.values():
            fresh = defaultdict(kernel.create_binder)
            stack.enter_context(mock.patch.object(kernel, "device_caches", fresh))
        yield


@contextmanager
def a_hopper() -> Iterator[None]:
    """Also for models, and by default for kernels in Triton."""

    def why_not_by_default(self: Backend, args: Any, device: Any, numerics: Any = None) -> str | None:
        return self.not_by_default(args) or self.when(args)

    with (
        on_hopper(),
        mock.patch.object(launch, "_compiled", {}),
        mock.patch.object(Backend, "why_not", why_not_by_default),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        yield


@triton.jit
def toy(out, x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


def copies(sizes: list[int]) -> None:
    for size in sizes:
        x = torch.ones(size)
        launched(toy, (1,), (torch.empty_like(x), x, size), {})


def toys(folder: str, processes: int) -> tuple[int, dict[str, int], int, list[int], dict[str, int]]:
    """(kernels needed, what this process compiled and found, launches until then, progress; and what it
    looked for when the calls were made)."""
    sizes = [64, 128, 256, 64]
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder), mock.patch.object(launch, "_compiled", {}):
        needed = rehearsal.rehearse(partial(copies, sizes))
        progress: list[int] = []
        with as_if_new(needed):
            with watched() as before:
                rehearsal.compile_in_parallel(needed, processes, progress.append)
            made = len(launches())
            with watched() as after:
                copies(sizes)
    return len(needed), dict(before), made, progress, dict(after)


def a_model(more_keys: int) -> dict[str, Any]:
    """A prompt of 8 tokens is rehearsed. Then the model answers one, and decodes with so many keys."""
    with a_hopper():
        model = made("Llama", num_hidden_layers=1)
        register_attention()
        swaps.turn_on(model, None, None)
        plans = {name: op._plans for name, op in OPS.items()}
        needed = rehearsal.rehearse(partial(warmup._generates, model, 1, 8))
        found: dict[str, Any] = {"kernels": sorted({each.kernel.__name__ for each in needed})}
        found["launched"] = len(launches())
        found["plans"] = all(op._plans is plans[name] for name, op in OPS.items())
        rehearsal.compile_in_parallel(needed, 2)
        count = launch.compiled_count()
        with watched() as seen:
            warmup._generates(model, 1, 8)
            _decode(model, more_keys)
            found["answers"] = (dict(seen), launch.compiled_count() - count, bool(launches()))
            warmup._generates(model, 2, 8)  # control: it was not rehearsed, and has padding
            found["others"] = sum(seen.values())
    return found


@torch.no_grad()
def _decode(model: Any, keys: int) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        cache.update(*(torch.zeros(1, 1, keys, 64, dtype=BF16) for _ in range(2)), layer)
    position = torch.tensor([[keys]])
    model(torch.tensor([[5]]), past_key_values=cache, position_ids=position, use_cache=True)


def normed(x: Tensor, weight: Tensor) -> None:
    isobit.rms_norm(x, weight).sum().backward()


def a_training_step() -> tuple[list[str], dict[str, int]]:
    """(kernels of a forward and its backward, what was looked for when they ran)."""
    x, weight = (torch.ones(*sizes, dtype=BF16, requires_grad=True) for sizes in ((5, 64), (64,)))
    with a_hopper():
        needed = rehearsal.rehearse(partial(normed, x, weight))
        rehearsal.compile_in_parallel(needed, 2)
        with watched() as seen:
            normed(x, weight)
    return sorted(each.kernel.__name__ for each in needed), dict(seen)


def deaf() -> tuple[dict[str, int], int]:
    """Processes that hang: this one compiles. (What it compiled, how many of them are left.)"""
    with mock.patch.object(launch, "_compiled", {}):
        needed = rehearsal.rehearse(partial(copies, [512, 1024]))
        with (
            as_if_new(needed),
            watched() as seen,
            mock.patch.object(rehearsal, "PATIENCE_S", 0.2),
            mock.patch.object(rehearsal, "_work", lambda *given: __import__("time").sleep(60)),
        ):
            rehearsal.compile_in_parallel(needed, 2)
    try:
        return dict(seen), os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return dict(seen), 0


# Tests


@stubbed
@pytest.mark.parametrize("processes", [1, 2])
def test_kernels_are_compiled_by_other_processes(processes: int, tmp_path_factory: Any) -> None:
    """Each once. With one process, this one has to."""
    folder = str(tmp_path_factory.mktemp("cache"))
    needed, before, made, progress, after = run(toys, folder, processes)
    assert needed == 3 and made == 0  # rehearsed, not launched
    assert before == ({"found": 3} if processes > 1 else {"compiled": 3})
    assert progress[-1] == 3 and after == {}


@stubbed
def test_after_a_rehearsal_a_model_compiles_nothing() -> None:
    """Not in prefill, nor in decoding, nor when keys are split over programs, from 1024 on."""
    found = run(a_model, 1200)
    assert {"product_kernel", "prefill_kernel", "decode_kernel", "fold_kernel"} <= set(found["kernels"])
    assert found["launched"] <= 4 and found["plans"]  # `turn_on` tries norms
    assert found["answers"] == ({}, 0, True)
    assert found["others"] > 0


@stubbed
def test_a_backward_is_rehearsed() -> None:
    kernels, seen = run(a_training_step)
    assert len(kernels) >= 2 and seen == {}


@stubbed
def test_processes_that_hang_are_ended() -> None:
    seen, left = run(deaf)
    assert sum(seen.values()) == 2 and left == 0


def test_on_a_cpu_there_is_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    model = made("Llama", num_hidden_layers=1)
    assert isobit.warmup(model, batch=(1, 4), lengths=9, train=True).kernels == 0
    assert isobit.warmup([lambda: 1 / 0]).kernels == 0  # it is not called
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (torch.nn.Linear(2, 2), {"lengths": 4}, "warmup(model: Linear): it has no generate"),
        (made("Llama", num_hidden_layers=1), {}, "warmup(batch, lengths): numbers of sequences"),
        (made("Llama", num_hidden_layers=1), {"lengths": (0, 4)}, "warmup(batch, lengths): numbers"),
        ([], {}, "must be a model, a function, or a list"),
        (print, {"lengths": 4}, "they are for a model"),
    ],
)
def test_errors(what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(isobit.ContractError) as error:
        isobit.warmup(what, **options)
    assert message in str(error.value)


def test_zero_drift_rehearses_before_it_tests_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's test is rehearsed too: it makes the first calls."""
    order: list[Any] = []
    own = trial.of_model

    def seen(*given: Any) -> Any:
        order.append("trial")
        return own(*given)

    def rehearsed(model: Any, *given: Any) -> None:
        *sizes, first = given
        order.append((model, sizes))
        first()

    def of_norms(model: Any, norms: Any) -> None:
        order.append(len(norms()))

    monkeypatch.setattr(trial, "of_model", seen)
    monkeypatch.setattr(drift, "of_model", rehearsed)
    monkeypatch.setattr(drift, "of_calls", of_norms)
    model = made("Llama", num_hidden_layers=1)
    with isobit.nn.zero_drift(model, batch=3, lengths=(5, 9), train=True):
        assert order == [3, (model, [3, (5, 9), True, None, False]), "trial", "trial"]
    order.clear()
    with zero_drift(model):
        assert order == ["trial"]


def test_a_model_is_left_as_it_was() -> None:
    """Random numbers, gradients and modes; the calls themselves run on a CPU, too."""
    model = made("Llama", num_hidden_layers=1).train()
    swaps.turn_on(model, None, None)
    state = torch.get_rng_state()
    warmup._generates(model, 2, 5)
    warmup._trains(model, 2, 5)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(p.grad is None for p in model.parameters())


def test_logits_of_a_rehearsal_are_not_compared() -> None:
    """They are whatever was in memory, so the first call that computes compares them."""
    model, ids = made("Llama", num_hidden_layers=1), torch.tensor([[5, 7, 9]])
    with rehearsed_by(lambda *launch: None):
        logps.token_logps(model, ids)
    assert model not in logps._compared
    logps.token_logps(model, ids)
    assert model in logps._compared


def test_progress_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def warmed(calls: Any, processes: Any, progress: Callable[[int, int], None]) -> Warmed:
        progress(1, 2)
        return Warmed(2, 8, 1.25)

    monkeypatch.setattr(rehearsal, "warm", warmed)
    warmup._shown([], None, False)
    assert capsys.readouterr().err == "isobit: compiled 2 kernels in 8 processes: 1.2 s\n"
    warmup._shown([], None, True)
    assert capsys.readouterr().err == "" and not is_rehearsed()
