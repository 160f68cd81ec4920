"""Class lse/8x4 on Hopper, run on a CPU: the forward's own code with the arithmetic of the model must have
its bits, on all shards and on those of a rank, and the backward's host code must put things where they
belong."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gluon_on_a_cpu
from hopper_device import Device
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.kernels.host import lse_model
from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.host.vocab_shards import Shards, padded, shards_of
from isobit.numerics import chain
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp import kernels_hopper_bwd as lse_1
from isobit.ops.linear_logp import kernels_hopper_shards as shards
from isobit.ops.linear_logp import model_shards as model
from isobit.ops.linear_logp.pending import Pending
from test_hopper_backward import DEFAULTS, new_memory_is_nan, one_thread  # noqa: F401
from test_hopper_pieces import FEW, MANY, MODULES

BF16, IGNORE = torch.bfloat16, -100


def _product(a: Any, b: Any, acc: Any, _: Any) -> Any:
    left, right = (torch.from_numpy(np.ascontiguousarray(x)).to(BF16) for x in (a, b))
    return chain(left, right, torch.from_numpy(np.ascontiguousarray(acc))).numpy()


#: Products of the tensor cores; all else as in the model.
DO = SimpleNamespace(product=_product, fma=lse_model.CPU.fma, exp2=np.exp2)


class Emulated(Device):
    """With the forward's own code; all other kernels in plain PyTorch."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if kernel is not forward.forward_kernel:
            return super().__call__(kernel, grid, *args, **options)
        args = gluon_on_a_cpu.in_order(kernel, args, options)
        self.arguments["forward_kernel"] = SimpleNamespace(**dict(zip(kernel.arg_names, args, strict=True)))
        rounds = {hopper_pipe.gl.bfloat16: BF16}
        args = tuple(rounds.get(x, x) if isinstance(x, hopper_pipe.gl.dtype) else x for x in args)
        device = gluon_on_a_cpu.Device(DO, grid[0])
        with np.errstate(all="ignore"):
            device.run(device.scope(forward, *MODULES, gdc_launch_dependents=lambda: None), kernel, args,
                       together=True)  # fmt: skip
        return None


def call(N: int, V: int, P: int | None = None, D: int = 24, **options: Any) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(N + V)
    ids = torch.randint(0, V, (N,), generator=gen)
    ids[1] = V - 1
    ids[N // 2] = IGNORE
    args = {
        "hidden": torch.randn(N, D, generator=gen).bfloat16(), "token_ids": ids, "bias": None, "mask": None,
        "weight": (torch.randn(V, D, generator=gen) / 4).bfloat16(), "ignore_index": IGNORE, "keep": False,
        "return_entropy": True, "return_lse": True, "return_stats": True, "padded_vocab": P,
        "dhidden_dtype": None,
    }  # fmt: skip
    if options.pop("bias", False):
        args["bias"] = torch.randn(V, generator=gen)
    if options.pop("mask", False):
        args["mask"] = torch.rand(N, generator=gen) < 0.6
    if options.pop("each", False):
        args["temperature"] = torch.rand(N, generator=gen) + 0.5
    return DEFAULTS | {"vocab_size": None} | args | options


def rank_of(args: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """The part of a rank, whose rows may be fewer at the end."""
    V = len(args["weight"])
    P = args["padded_vocab"] or padded(V)
    rows = slice(rank * P // ranks, (rank + 1) * P // ranks)
    bias = None if args["bias"] is None else args["bias"][rows]
    here = {"weight": args["weight"][rows], "bias": bias, "vocab_size": V, "padded_vocab": P}
    return args | here | {"shard": rank * 8 // ranks, "shards": 8 // ranks}


def schedule(monkeypatch: pytest.MonkeyPatch, chosen: forward.Schedule, programs: int) -> None:
    monkeypatch.setattr(shards, "schedule_for", lambda *sizes: chosen)
    monkeypatch.setattr(shards, "sm_count", lambda device: programs)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


def live(args: dict[str, Any]) -> Tensor:
    result = args["token_ids"] != IGNORE
    return result if args["mask"] is None else result & args["mask"]


CALLS = {
    "tiles that end inside a shard": call(70, 8 * 300 - 77, bias=True),
    "more tiles than splits": call(20, 8 * 1288, 8 * 1296),
    "a shard of one tile, and one without tokens": call(66, 500, 640, each=True, bias=True),
    "rounded, packed": call(40, 2200, mask=True, logits_dtype=BF16, bias=True),
}
WAYS = [(FEW, 0, 3), (MANY, 0, 3), (FEW, 2, 3), (MANY, 3, 70)]


@pytest.mark.parametrize("name", CALLS)
def test_states_of_the_forward_have_the_bits_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = CALLS[name]
    exact = model.linear_logp_states(**args)
    rows = live(args).nonzero()[:, 0]
    for tile, pieces, programs in WAYS if name.startswith("tiles") else WAYS[1::2]:
        schedule(monkeypatch, forward.Schedule(tile, pieces), programs)
        _, _, (states, _, _) = shards._states(shards_of(args, len(args["weight"])), Emulated(), 0, args)
        found = states[:, : len(rows)] if args["mask"] is not None else states[:, rows]
        assert same_bits(found, exact[:, rows])


@pytest.mark.parametrize("ranks", [2, 8])
def test_states_of_ranks_are_those_of_one(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = CALLS["a shard of one tile, and one without tokens"]
    rows = live(args).nonzero()[:, 0]
    whole = model.linear_logp_states(**args)[:, rows]
    schedule(monkeypatch, forward.Schedule(FEW, 2), 5)
    owner = args["token_ids"][rows] // (640 // ranks)
    parts = []
    for rank in range(ranks):
        own = rank_of(args, rank, ranks)
        if len(own["weight"]) == 0:  # a rank has at least the padding
            own["weight"] = args["weight"][:1]
            own["bias"] = args["bias"][:1]
        _, _, (states, _, _) = shards._states(shards_of(own, 500), Emulated(), 0, own)
        assert same_bits(states[-1, rows][owner == rank], whole[-1, owner == rank])
        parts.append(states[:-1, rows])
    assert same_bits(torch.cat(parts), whole[:-1])


def test_the_splits_of_lse_1_have_other_bits() -> None:
    args = CALLS["more tiles than splits"]
    z = model._Call(args).logits()[:4]
    c = np.full(4, LOG2E, np.float32)

    def row_sums(cut: Shards) -> Any:
        return lse_model.merge(lse_model.split_states(z, c, cut), c).s

    V = z.shape[1]
    ours = row_sums(Shards(V, 8 * 1296))
    assert (ours != row_sums(Shards(V, 8 * 1304))).any()  # another padding
    assert (ours != row_sums(Shards(V, 4 * 8 * 1296))).any()  # shards of another width: two of them here


# Backward


def gradients(args: dict[str, Any], launch: Any, run: Any, **wanted: bool) -> Any:
    gen = torch.Generator().manual_seed(5)
    N = len(args["token_ids"])
    *_, entropy, _, stats = (None, *model.linear_logp(**args)[1:])
    grads = {name: torch.randn(N, generator=gen) for name in ("dlogp", "dentropy", "dlse")}
    given = {"stats": stats, "entropy": entropy, "kept": None, "kept_base": None, **grads}
    names = {f"want_{name}": wanted.get(name, True) for name in ("hidden", "weight", "bias")}
    more = {} if launch is None else {"launch": launch}
    return run(**args | given | names, **more)


@pytest.mark.parametrize("workspace", [None, 1])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "more tiles than splits"])
def test_gradients_are_near_the_model(
    name: str, workspace: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (shards, lse_1):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    args = CALLS[name] | {"workspace_bytes": workspace}
    exact = gradients(args, None, model.linear_logp_bwd)
    for ours, theirs in zip(gradients(args, Device(), shards.linear_logp_bwd), exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-3)
    frozen = gradients(args, Device(), shards.linear_logp_bwd, weight=False, bias=False)
    torch.testing.assert_close(frozen[0].float(), exact[0].float(), rtol=2e-2, atol=2e-3)


def test_shards_are_added_as_a_tree() -> None:
    device = Device()
    pending = Pending(8, 1, 64, torch.device("cpu"))
    leaves = torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(0))
    for leaf in leaves:
        pending.next().copy_(leaf)
        pending.add(device)
    a = [leaves[i] + leaves[i + 1] for i in range(0, 8, 2)]
    assert torch.equal(pending.total(), (a[0] + a[1]) + (a[2] + a[3]))
    assert len(pending.sums) == 4
    chain_of_them = leaves[0]
    for leaf in leaves[1:]:
        chain_of_them = chain_of_them + leaf
    assert not torch.equal(pending.sums[0], chain_of_them)
