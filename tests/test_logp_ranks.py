"""`logp` with a vocabulary that ranks share: real processes over gloo, DTensor logits, what verl's test of
tensor parallelism states, calls that must be refused on every rank, and sums that the law must notice."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import isobit
from interpreted import in_interpreter
from isobit import ContractError
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.ops.logp import model_shards
from isobit.ranks import as_group, in_turn
from vocab_parallel_rivals import entropy_of_ranks, megatron

N, V, P = 12, 1150, 1152


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(3)
    logits = torch.full((N, P), torch.nan)
    logits[:, :V] = 3 * torch.randn(N, V, generator=gen)
    ids = torch.randint(0, V, (N,), generator=gen)
    ids[4] = -100
    ids[5:8] = torch.tensor([0, P // 2, V - 1])
    return {"logits": logits.to(dtype), "token_ids": ids, "temperature": 0.7}


def results(rank: int, ranks: int, **options: Any) -> list[torch.Tensor]:
    """logp, entropy, lse, and the gradient of the rank's columns."""
    args = tensors()
    leaf = args["logits"].tensor_split(ranks, -1)[rank].clone().requires_grad_()
    flags = {"return_entropy": True, "return_lse": True}
    outputs = isobit.logp(**args | {"logits": leaf}, padded_vocab=P, **flags, **options)
    weighed = sum((x * torch.linspace(-1, 1, N)).sum() for x in outputs)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(weighed, leaf)]


def alone(**options: Any) -> list[torch.Tensor]:
    """Without a group, and without padding."""
    args = tensors()
    leaf = args["logits"][:, :V].clone().requires_grad_()
    flags = {"return_entropy": True, "return_lse": True, "padded_vocab": P}
    outputs = isobit.logp(**args | {"logits": leaf}, **flags, **options)
    weighed = sum((x * torch.linspace(-1, 1, N)).sum() for x in outputs)
    (grad,) = torch.autograd.grad(weighed, leaf)
    return [*(x.detach() for x in outputs), torch.nn.functional.pad(grad, (0, P - V))]


def assert_same(found: list[list[torch.Tensor]], whole: list[torch.Tensor]) -> None:
    for rank in found:
        assert all(torch.equal(ours, one) for ours, one in zip(rank[:3], whole[:3], strict=True))
    assert torch.equal(torch.cat([rank[3] for rank in found], -1), whole[3])


# Processes


def _process(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    group: Any = dist.group.WORLD
    mesh = init_device_mesh("cpu", (ranks,))
    assert as_group("logp", group) is as_group("logp", group)
    assert as_group("logp", mesh) is as_group("logp", mesh.get_group())
    found = results(rank, ranks, vocab_size=V, group=group)
    args = tensors()
    own = args["logits"].tensor_split(ranks, -1)[rank].clone().requires_grad_()
    leaf = DTensor.from_local(own, mesh, [Shard(-1)])
    logp = isobit.logp(leaf, args["token_ids"], temperature=0.7, vocab_size=V)
    logp.sum().backward()
    assert own.grad is not None
    found += [logp.detach(), own.grad]
    with pytest.raises(ContractError, match="must be cut by columns"):
        isobit.logp(DTensor.from_local(args["logits"], mesh, [Shard(0)]), args["token_ids"])
    with pytest.raises(ContractError, match="do not make the same call"):
        isobit.logp(own, args["token_ids"], temperature=1.0 + rank, vocab_size=V, group=group)
    found += _verls_statement(rank, ranks)
    torch.save(found, os.path.join(folder, str(rank)))
    dist.destroy_process_group()


def test_processes_have_the_bits_of_one(tmp_path: Path) -> None:
    mp.spawn(_process, (2, str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    whole = alone()
    assert_same([each[:4] for each in found], whole)
    args = tensors()
    leaf = args["logits"][:, :V].clone().requires_grad_()
    logp = isobit.logp(leaf, args["token_ids"], temperature=0.7, padded_vocab=P)
    logp.sum().backward()
    assert leaf.grad is not None
    assert all(torch.equal(each[4], logp) for each in found)
    assert torch.equal(torch.cat([each[5] for each in found], -1)[:, :V], leaf.grad)
    _assert_verls_statement([each[6:] for each in found])


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_columns_behind_the_last_token_may_be_missing(ranks: int) -> None:
    args = tensors()
    z, ids = args["logits"][:, :V], args["token_ids"]
    options: dict[str, Any] = {"padded_vocab": P, "temperature": 0.7}
    whole = isobit.logp(z, ids, **options)

    def on_a_rank(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = z.split(P // ranks, -1)[group.rank].clone().requires_grad_()
        found = isobit.logp(own, ids, vocab_size=V, group=group, **options)
        return found.detach(), *torch.autograd.grad(found.sum(), own)

    found = in_turn(ranks, on_a_rank)
    assert all(torch.equal(logp, whole) for logp, _ in found)
    assert torch.cat([grad for _, grad in found], -1).shape == z.shape


# What verl's test of tensor parallelism states: with the LM head cut over ranks, log-probabilities and
# entropies, and after a backward from both of them the gradients of hidden states and of a rank's rows of the
# head, are those of plain PyTorch with the whole head.

D, TOKENS, TEMPERATURE = 24, 384, 1.5


def _layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the head, tokens, and gradients of log-probabilities and entropies."""
    gen = torch.Generator().manual_seed(7)
    hidden, head = torch.rand(N, D, generator=gen) - 0.5, torch.rand(TOKENS, D, generator=gen) - 0.5
    ids = torch.randint(0, TOKENS, (N,), generator=gen)
    return (
        (4 * hidden).bfloat16(),
        (4 * head).bfloat16(),
        ids,
        torch.rand(2, N, generator=gen) * 2 - 1,
    )


def _verls_statement(rank: int, ranks: int) -> list[torch.Tensor]:
    """(logp, entropy, dhidden, dhead) of `linear_logp`, then of `logp` after a product of this rank."""
    hidden, head, ids, grads = _layer()
    hidden = hidden.requires_grad_()
    own = head.tensor_split(ranks)[rank].clone().requires_grad_()
    options: dict[str, Any] = {"temperature": TEMPERATURE, "return_entropy": True, "group": dist.group.WORLD}
    found = list[torch.Tensor]()
    outputs = isobit.linear_logp(hidden, own, ids, **options)
    found += [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, (hidden, own), [*grads])]
    logits = hidden.float() @ own.float().t()
    outputs = isobit.logp(logits, ids, **options)
    dhidden, dhead = torch.autograd.grad(outputs, (hidden, own), [*grads])
    dist.all_reduce(dhidden)
    return [*found, *(x.detach() for x in outputs), dhidden, dhead]


def _assert_verls_statement(found: list[list[torch.Tensor]]) -> None:
    hidden, head, ids, grads = _layer()
    leaves = (hidden.double().requires_grad_(), head.double().requires_grad_())
    log_p = (leaves[0] @ leaves[1].t() / TEMPERATURE).log_softmax(-1)
    outputs = (log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    dhidden, dhead = torch.autograd.grad(outputs, leaves, [*grads.double()])
    for at in (0, 4):
        own = torch.cat([each[at + 3] for each in found]).double()
        for logp, entropy, ours, *_ in (each[at : at + 4] for each in found):
            for value, truth in ((logp, outputs[0]), (entropy, outputs[1])):
                assert (value - truth).abs().max() < 1e-5
            # In bf16, with d-logits in bf16 in one of the two: some roundings of the largest terms.
            assert (ours - dhidden).abs().max() < 0.01 * dhidden.abs().max()
        assert (own - dhead).abs().max() < 0.01 * dhead.abs().max()


@pytest.mark.parametrize("ranks", [2, 8])
def test_formulas_of_megatron_and_verl_are_hardly_closer_to_the_truth(ranks: int) -> None:
    """From the same fp32 logits. Errors are of the size of one rounding of the log-sum-exp."""
    args = tensors(torch.float32)
    live = args["token_ids"] >= 0
    z, ids = args["logits"][live, :V] / 0.7, args["token_ids"][live]
    logp, entropy = isobit.logp(z, ids, padded_vocab=P, return_entropy=True)
    log_p = z.double().log_softmax(-1)
    exact = log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    shards = [*z.tensor_split(ranks, 1)]
    rounding = torch.finfo(torch.float32).eps * z.double().logsumexp(-1).abs()
    for ours, theirs, truth in (
        (logp, megatron(shards, ids), exact[0]),
        (entropy, entropy_of_ranks(shards), exact[1]),
    ):
        assert ((ours - truth).abs() <= 2 * (theirs - truth).abs().max() + rounding).all()
        assert ((theirs - truth).abs() <= 16 * rounding).all()  # it is the same quantity


# In the interpreter

BAD_IDS = """
import torch, isobit
from isobit.ranks import in_turn
z = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
ids = torch.tensor([3, 128, -1, 2**40, 100])
flags = {"return_entropy": True, "return_lse": True, "validate": False, "backend": "triton-8x1"}
whole = isobit.logp(z, ids, padded_vocab=128, **flags)


def on_a_rank(group):
    own = z.tensor_split(group.size, -1)[group.rank].clone().requires_grad_()
    outputs = isobit.logp(own, ids, group=group, **flags)
    return *outputs, *torch.autograd.grad(sum(x.sum() for x in outputs), own)


for *outputs, grad in in_turn(2, on_a_rank):
    for ours, one in zip(outputs, whole):
        assert ours.isnan().tolist() == [False, True, True, True, False]
        assert torch.equal(ours.nan_to_num(), one.nan_to_num())
    assert grad.isnan().all(1).tolist() == [False, True, True, True, False]
    assert grad[[0, 4]].isfinite().all()
print("NaN")
"""


def test_ids_outside_the_vocabulary_make_their_rows_nan_on_every_rank() -> None:
    """An id of another rank is no such id."""
    assert in_interpreter(BAD_IDS).strip() == "NaN"


# Refused


def refused(message: str, ranks: int = 2, **options: Any) -> None:
    def call(group: Any) -> None:
        args = tensors()
        args["logits"] = args["logits"].tensor_split(ranks, -1)[group.rank]
        changed = {name: change(args) if callable(change) else change for name, change in options.items()}
        isobit.logp(**args | {"vocab_size": V, "padded_vocab": P, "group": group} | changed)

    with pytest.raises(ContractError, match=message):
        in_turn(ranks, call)


def test_calls_that_cannot_have_equal_bits_are_refused() -> None:
    def fewer(args: dict[str, Any]) -> Any:
        return args["logits"][:, :-3]

    refused(
        "a rank of 2 has 576 columns of a vocabulary padded to 1152, from column 0 on, not 573", logits=fewer
    )
    refused("padded_vocab=1152 would fit them", padded_vocab=1216)
    refused("multiple of 64", padded_vocab=1160)
    refused("outside", token_ids=lambda args: args["token_ids"] + V)
    refused("numerics class", numerics="lse/triton-1")
    refused("no backend can serve", logits=lambda args: args["logits"].double())
    with pytest.raises(ContractError, match="1, 2, 4 or 8 ranks"):
        in_turn(3, lambda group: isobit.logp(**tensors(), group=group))
    with pytest.raises(ContractError, match="must be a ProcessGroup"):
        isobit.logp(**tensors(), group="tp")
    with pytest.raises(ContractError, match=r"vocab_size.*belongs to a call with a group"):
        isobit.logp(**tensors(), vocab_size=V)


def test_without_a_class_nothing_changes() -> None:
    args = tensors()
    assert isobit.explain("logp", **args).numerics == "none"
    assert isobit.explain("logp", **args, padded_vocab=P).backend == "model-8x1"
    assert isobit.explain("logp", **args, numerics="lse/triton-8x1/cpu").backend == "model-8x1"


# Wrong sums over ranks: the law must notice them


def parallel() -> Cell:
    case, cpu = "N=90 V=9000 fp32 random mask=bool temperature=0.7", torch.device("cpu")
    (cell,) = run(Request(ops=("logp",), backends=("model-8x1",), laws=("parallel",), device=cpu, case=case))
    return cell


_fold = model_shards._fold


def _by_ranks(sums: Any, scale: Any) -> Any:
    """Each rank adds up its own shards before the others' are added, one rank after the other."""
    m, s, t = sums
    if s.shape[-1] != 8:
        return _fold(sums, scale)
    top, *moved = m.max(-1, keepdims=True), s, t
    s, t = model_shards._rescaled(m, *moved, top, scale[:, None])
    total = [np.zeros_like(s[:, 0]), np.zeros_like(t[:, 0])]
    for i in range(8):
        total = [total[0] + s[:, i], total[1] + t[:, i]]
    return top[:, 0], *total


def test_a_token_that_another_rank_has_is_not_the_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parallel().status == OK
    whole = model_shards.logp_shard_bwd

    def clamped(**args: Any) -> torch.Tensor:
        """A target in the nearest column that is here."""
        first, columns = args["first_column"], args["logits"].shape[-1]
        ids = args["token_ids"]
        inside = torch.where(ids < 0, ids, ids.clamp(first, first + columns - 1))
        return whole(**args | {"token_ids": inside})

    monkeypatch.setattr(model_shards, "logp_shard_bwd", clamped)
    cell = parallel()
    assert cell.status == FAIL and "gradient:logits" in cell.reason


def test_sums_in_another_order_with_ranks_fail_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = model_shards.logp_merged

    def merged(**args: Any) -> Any:
        with monkeypatch.context() as patch:
            if len(args["states"]) > 1:
                patch.setattr(model_shards, "_fold", _by_ranks)
            return whole(**args)

    monkeypatch.setattr(model_shards, "logp_merged", merged)
    cell = parallel()
    assert cell.status == FAIL and "on 2 ranks" in cell.reason
