"""Layers, models and vocabularies that several processes share have the bits of one, and a call that cannot
be made is an error on every rank. `ranks_on_cpus.py` runs them over gloo; one run serves all tests of
processes here."""

import json
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit import parallel
from isobit.ranks import Group, Processes, ordered, ordered_scatter, ordered_sum

ROOT = Path(__file__).parent.parent
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def processes() -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "tests" / "ranks_on_cpus.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_have_the_bits_of_one(processes: Any, ranks: int) -> None:
    found = processes[str(ranks)]
    assert len(found) == ranks
    for rank in found:
        assert len(rank) == (35 if ranks == 4 else 39)
        assert [name for name, same in rank.items() if same is not True] == ["refusals"]


REFUSALS = {
    "another class": "numerics='tree8'), computed by numerics class tree8",
    "another dtype": "the ranks of the group do not make the same call: rank 0: row_linear(",
    "other rows": "do not make the same call: rank 0: row_linear(x: [2, ",
    "refused on one": "dtype must be that of x, fp16",
    "chain16": "row_linear(numerics: 'chain16'): y is a sum over k, and k is shared by the ranks",
    "chain16 and a gradient": "the gradient of x is a sum over N, and N is shared by the ranks",
    "odd": "must be a multiple of 8",
    "parts": "column_linear(parts: (8, 8)): must add up to N of the whole weight, 32",
    "parts of a style": "DetColwise(parts: (32, 8)): must add up to out_features=64, and each must be a",
    "parts of a shard": "DetColwise(parts: (32, 32)): the weight is cut already, and not in these parts",
    "two dimensions": "its mesh has 2 dimensions, ('dp', 'tp')",
    "a mesh": 'must have one dimension; select it by name: mesh["tp"]',
    "no class": 'ask for numerics="tree8"',
    "uneven": "det_linear(weight: DTensor [32, 30] bf16): Shard(dim=1) cuts 30 over 4 ranks unevenly",
    "not said": "If they share it, say so: group=weight.device_mesh. If FSDP2 has cut it, the module",
    "another mesh": "is on another mesh than the ranks of group",
    "a plain shard": "isobit.parallel.column_linear and row_linear take the shard of a rank",
    "no group": "must be a ProcessGroup of torch.distributed",
    "x not cut": "row_linear(x: [3, 64] bf16, weight: [32, 16] bf16): must have the same columns of K, those",
    "words": "column_linear(parts: 'qkv'): must be numbers of columns, such as (1024, 256, 256)",
    "a dimension by name": "row_linear(sequence_dim: 'tokens'): must be a number, or None",
    "no tensor": "column_linear(weight: NoneType): must be a tensor",
    "another dtype of x": "column_linear(weight: [8, 64] bf16): dtype must be that of x, fp16",
    "all rows": "from row 32 on, not 128: these are all rows: a rank takes its own, .tensor_split(4)[rank]",
    "another temperature": "do not make the same call: rank 0: linear_logp: ",
    "other tokens": "bits of token_ids: ",
    "a gradient of one": "gradient=False, computed by model-8x4",
    "rows of one": "a rank of 4 has 32 rows of a vocabulary padded to 128, from row ",
    "another temperature of logp": "do not make the same call: rank 0: logp: ",
    "logits cut by rows": "must be cut by columns",
    "few heads": "num_key_value_heads=1 cannot be divided among 2 ranks",
    "cut already": "ranks share its layers already; call zero_drift without tp",
    "norms of heads": "whose gradient is a sum over ranks: give zero_drift the whole model, with tp=mesh",
    "cut by torch's styles": "or with DetColwise and DetRowwise of isobit.parallel",
    "a model of chain16": "must be of class tree8",
    "another style": "",
    "another class of a style": "",
    "cut otherwise": "weight is a DTensor already, placed (Shard(dim=0),) on ",
    "refused by one": "its config has no plan (base_model_tp_plan)",
    "classes of one": "('whole', 'tree8'): 1",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_call_that_cannot_be_made_is_an_error_on_every_rank(processes: Any, case: str) -> None:
    where = {case: ranks for ranks in ("2", "4") for case in processes[ranks][0]["refusals"]}
    assert where.keys() == REFUSALS.keys()
    for rank in processes[where[case]]:
        said = rank["refusals"][case]
        assert REFUSALS[case] in said and (REFUSALS[case] or "do not make the same call" in said)


@pytest.mark.parametrize("when", ["row_linear", "linear_logp"])
def test_others_do_not_wait_for_a_rank_that_has_died(processes: Any, when: str) -> None:
    """Before a call, or between a forward and its backward."""
    for rank in processes[f"a death in {when}"]:
        assert rank["seconds"] < 10
        assert "Another rank has ended" in rank["said"] and "time-out of 60 s" in rank["said"]


def test_the_example_runs_on_two_processes() -> None:
    """As docs/parallel.md starts it."""
    command = "torchrun --nproc-per-node 2 examples/tensor_parallel.py"
    assert command in (ROOT / "docs" / "parallel.md").read_text()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()[1:]]
    done = subprocess.run(
        torchrun, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Without a buffer, as torchrun starts Python, the end of a line is a write of its own: ranks may mix.
    lines = sorted(re.findall(r"rank \d: (?:True|False), (?:True|False)", done.stdout))
    assert lines == [f"rank {rank}: True, True" for rank in range(2)], done.stdout


# Ranks in turn


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_sum_over_ranks_is_the_tree_however_it_is_made(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered whole, in slices, with a last slice that is not full, or by rows."""
    parts, bias = drawn(1, size, 72, 13), drawn(2, 13)
    sums = list(parts)
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
    expected = (sums[0] + bias).to(BF16)

    def on_one(group: Group) -> tuple[Tensor, Tensor]:
        mine = parts[group.rank]
        return ordered_sum(group, mine, bias, BF16), ordered_scatter(group, mine, bias, BF16)

    for small in (0, 1 << 30):
        monkeypatch.setattr(ordered, "SMALL_BYTES", small)
        found = parallel.in_turn(size, on_one)
        assert all(torch.equal(whole, expected) for whole, _ in found)
        assert torch.equal(torch.cat([own for _, own in found]), expected)


def test_another_dimension_of_tokens() -> None:
    x, weight, dy = drawn(1, 3, 4, 32).to(BF16), drawn(2, 16, 32).to(BF16), drawn(3, 3, 4, 16).to(BF16)

    def on_one(group: Group) -> tuple[Tensor, Tensor]:
        cut = [t.chunk(group.size, -1)[group.rank].clone().requires_grad_() for t in (x, weight)]
        y = parallel.row_linear(*cut, group=group, sequence_dim=1)
        y.backward(dy.chunk(group.size, 1)[group.rank])
        assert cut[1].grad is not None
        return y.detach(), cut[1].grad

    whole = weight.clone().requires_grad_()
    y = isobit.det_linear(x, whole, numerics="tree8")
    y.backward(dy)
    found = parallel.in_turn(4, on_one)
    assert torch.equal(torch.cat([own for own, _ in found], 1), y)
    assert whole.grad is not None and torch.equal(torch.cat([own for _, own in found], 1), whole.grad)


def test_ranks_in_turn_that_make_other_calls_end_with_an_error() -> None:
    def calls(group: Group) -> Tensor | None:
        return None if group.rank == 2 else group.all_gather(torch.zeros(2))

    before = threading.active_count()
    with pytest.raises(parallel.RanksError, match=r"rank 1: all_gather.*; rank 2: has ended"):
        parallel.in_turn(4, calls)
    with pytest.raises(parallel.RanksError, match=r"rank 0: all_gather of \[0\]"):
        parallel.in_turn(2, lambda group: group.all_gather(torch.zeros(group.rank)))
    with pytest.raises(ZeroDivisionError):
        parallel.in_turn(2, lambda group: group.all_gather(torch.zeros(1 // group.rank)))
    assert threading.active_count() == before


def test_ranks_in_turn_run_under_the_modes_of_the_caller() -> None:
    def modes(group: Group) -> tuple[bool, ...]:
        return (
            torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu") == torch.float16,
        )  # fmt: skip

    assert parallel.in_turn(2, modes) == [(False, True, False, False)] * 2
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        assert parallel.in_turn(2, modes) == [(True, False, True, True)] * 2


def test_an_error_of_this_rank_alone_is_not_blamed_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is full in a collective; anything else is an error of ranks, with their time-out."""

    def failing(error: Exception) -> Any:
        def collective(*tensors: Tensor, group: Any) -> None:
            raise error

        return collective

    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))
    asked = []

    class Nccl:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def _get_backend(self, device: torch.device) -> Any:
            asked.append(device.type)
            return backend

    nccl = Nccl()
    for error, kind in (
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (RuntimeError("gone"), parallel.RanksError),
    ):
        monkeypatch.setattr(torch.distributed, "all_to_all_single", failing(error))
        with pytest.raises(kind, match=r"full|time-out of 7 s"):
            Processes(nccl).all_to_all(torch.zeros(2, device="meta"))
    assert asked == ["meta"]


def test_kernels_of_ranks_have_the_order_of_the_tree() -> None:
    assert in_interpreter(ROOT / "tests" / "rank_kernels.py") == "28\n"


def test_the_last_dimension_holds_no_tokens() -> None:
    x, weight = drawn(1, 4, 32).to(BF16), drawn(2, 16, 32).to(BF16)
    with pytest.raises(isobit.ContractError, match="must be one of the 1 dimensions of x before the last"):
        parallel.row_linear(x, weight, group=None, sequence_dim=1)
