"""Chunks of rows of `linear_logp` on Hopper, run on a CPU: what waits in the queue, and what the sums are of.

As in `test_hopper_backward`, `launch` is a device that does in plain PyTorch what each kernel does, memory
that nobody has written holds NaN, and what a kernel writes must not overlap with what it reads.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_device import Device, described
from isobit.kernels.hopper import product as products
from isobit.kernels.host.token_stream import SEGMENT
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from isobit.ops.linear_logp import reference
from isobit.ops.linear_policy_loss import chunk_buffers
from isobit.ops.linear_policy_loss import kernels_hopper as chunk
from isobit.ops.linear_policy_loss.chunk_buffers import ChunkBuffers
from test_hopper_backward import Allocations, arguments, good_rows, new_memory_is_nan, one_thread, truth  # noqa: F401
from test_hopper_backward import Case as Call

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """A call, where its chunks end, and which of them do not fit."""

    call: Call
    ends: tuple[int, ...]
    recomputed: tuple[int, ...] = ()
    workspace_bytes: int = 0


@dataclass
class Watched(Device):
    """And of which hidden states the sums were made that a tensor begins with."""

    summed: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        super().__call__(kernel, grid, *args, **options)
        named = self.arguments[kernel.__name__]
        if (
            kernel.__name__ == "sum_kernel"
            and self.summed is not None
            and named.out.data_ptr() == self.summed.data_ptr()
        ):
            self.rows.append(described(named.b_desc)[: int(named.K)].clone())


@dataclass
class Chunked:
    logp: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]
    device: Watched
    waited: list[int]


def run_chunks(case: Case, args: dict[str, Any]) -> Chunked:
    """Every chunk forward, then backward, as `linear_policy_loss` does it."""
    ends, wanted = (0, *case.ends), case.call.wanted
    sizes = [b - a for a, b in pairwise(ends)]
    kept = max((n for i, n in enumerate(sizes) if i not in case.recomputed), default=0)
    again = max((sizes[i] for i in case.recomputed), default=0)
    hidden, weight = args["hidden"], args["weight"]
    sums = [x for x in ("weight", "bias") if x in wanted]
    queues = bool(sums) and len(sizes) > 1
    memory = ChunkBuffers.of(
        "hopper", hidden, len(weight), kept, again, queues, case.workspace_bytes
    )._asdict()
    like = {"hidden": hidden, "weight": weight, "bias": args["bias"]}
    result = {x: torch.empty(like[x].shape, dtype=F32) for x in wanted}
    device, queued = Watched(summed=result.get("weight")), torch.zeros(1, dtype=torch.int32)
    outputs, waited = [], []
    for i, (start, end) in enumerate(pairwise(ends)):
        rows = slice(start, end)
        names = ("hidden", "token_ids", "mask", "temperature", "dlogp", "dentropy")
        own = {x: t[rows] if isinstance(t := args[x], Tensor) else t for x in names}
        own |= {"weight": weight, "bias": args["bias"], "ignore_index": -100}
        both = memory | {"queued": queued}
        if i in case.recomputed:
            plain = dict.fromkeys(("softcap", "logit_scale", "logits_dtype", "vocab_size"))
            plain |= {"return_entropy": True, "return_lse": False, "return_stats": True, "keep": False}
            logp, entropy, _, stats, *_ = forward.linear_logp(device, **own | plain)
        else:
            logp, entropy, stats = chunk.linear_logp_chunk(device, **own | both, return_entropy=True)
        outputs.append((logp, entropy))
        queued = chunk.linear_logp_chunk_bwd(
            device, **own | both, stats=stats, entropy=entropy,
            **{f"d{x}": result.get(x) for x in ("hidden", "weight", "bias")},
            first_row=start, kept=i not in case.recomputed, first=i == 0, last=end == ends[-1],
            postpone=False,
        )  # fmt: skip
        waited.append(int(queued))
    logp, entropy = (torch.cat(part) for part in zip(*outputs, strict=True))
    return Chunked(logp, entropy, result, device, waited)


def check(case: Case, patch: pytest.MonkeyPatch) -> Chunked:
    for module in (forward, backward, products):
        patch.setattr(module, "sm_count", lambda device: 7)
    args = arguments(case.call)
    chunked, exact = run_chunks(case, args), truth(args)
    for name, (right, size) in exact.items():
        if name in case.call.wanted:
            wrong = (chunked.gradients[name].double() - right).abs()
            bound = (1.05 + 1) * torch.finfo(case.call.dtype).eps / 2 * size + 1e-7
            assert torch.equal(wrong.isnan(), right.isnan()), name
            assert bool((wrong <= bound)[~right.isnan()].all()), name
    live, good = good_rows(args)
    plain = args | {"return_entropy": True, "return_lse": False, "return_stats": False}
    logp, entropy, *_ = reference.linear_logp(**plain)
    for result, expected in ((chunked.logp, logp), (chunked.entropy, entropy)):
        torch.testing.assert_close(result[good], expected[good], rtol=1e-4, atol=1e-4)
        assert not result[~live].any() and bool(result[live & ~good].isnan().all())
    if "weight" in case.call.wanted:  # all live rows, in their order, in whole segments but the last
        taken = chunked.device.rows
        assert torch.equal(torch.cat(taken), args["hidden"][good]) and len(taken) == len(case.ends)
        assert all(len(rows) % SEGMENT == 0 for rows in taken[:-1]) and max(chunked.waited) < SEGMENT
    return chunked


ALL: dict[str, Any] = {"wanted": ("hidden", "weight", "bias"), "bias": F32, "rows": 300, "D": 24}
MANY = Call(lead=(1300,), **ALL)
LONG = Call(lead=(700,), **ALL | {"rows": 600})  # a slab of 512 columns, and one of the rest
CASES = {
    "one chunk": Case(Call(lead=(200,), **ALL), (200,)),
    "one row": Case(Call(lead=(1,), **ALL), (1,)),
    "chunks of one row": Case(Call(lead=(3,), **ALL), (1, 2, 3)),
    "whole segments": Case(MANY, (512, 1024, 1300)),
    "anywhere": Case(MANY, (100, 700, 701, 1300)),
    "the queue is never full": Case(Call(lead=(400,), **ALL), (100, 200, 300, 400)),
    "a segment is completed by one row": Case(MANY, (511, 512, 1023, 1300)),
    "masked": Case(replace(MANY, counted=0.5, ignored=True), (400, 401, 900, 1300)),
    "a chunk of masked rows": Case(replace(MANY, counted=0.02), (40, 80, 1300)),
    "all masked": Case(replace(MANY, counted=0.0), (400, 1300)),
    "bad tokens": Case(replace(MANY, bad=True, counted=0.7), (600, 1300)),
    "fp16": Case(replace(MANY, dtype=F16), (600, 1300)),
    "row temperature": Case(replace(MANY, row_temperature=True, counted=0.6), (600, 1300)),
    "entropy": Case(replace(MANY, grads=("dlogp", "dentropy"), counted=0.6), (600, 1300)),
    "frozen head": Case(replace(MANY, wanted=("hidden",), counted=0.6), (600, 1300)),
    "frozen hidden states": Case(replace(MANY, wanted=("weight",), counted=0.6), (600, 1300)),
    "bias alone": Case(replace(MANY, wanted=("bias",)), (600, 1300)),
    "no bias": Case(Call(lead=(1300,), rows=300, D=24), (600, 1300)),
    "rows apart": Case(replace(MANY, padded=True), (600, 1300)),
    "inside a word": Case(replace(MANY, inside=True), (600, 1300)),
    "recomputed": Case(replace(LONG, counted=0.9), (100, 500, 700), (1,)),
    "recomputed, first": Case(LONG, (400, 700), (0,)),
    "recomputed, last": Case(LONG, (300, 700), (1,)),
    "recomputed, in a large workspace": Case(LONG, (300, 700), (1,), 1 << 30),
    "recomputed, alone": Case(replace(LONG, lead=(300,)), (300,), (0,)),
    "recomputed, frozen": Case(replace(LONG, wanted=("hidden",)), (300, 700), (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_chunks_have_the_gradients_of_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(CASES[name], monkeypatch)


# Memory


def meta(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("N", "D", "V"), [(4096, 2048, 131072), (8192, 4096, 151936), (16384, 4096, 128256), (5000, 896, 50257)]
)
@pytest.mark.parametrize("entropy", [False, True])
def test_a_chunk_takes_what_the_workspace_has(
    N: int, D: int, V: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory between chunks, and all that is allocated for one of as many rows as fit."""
    for module in (forward, backward, products):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    rows = chunk_buffers.capacity("hopper", V, D, BF16, chunk_buffers.CHUNK_BYTES)
    assert rows is not None and rows >= 3072
    args = {"hidden": meta(rows, D, dtype=BF16), "weight": meta(V, D, dtype=BF16), "bias": None, "mask": None}
    args |= {"token_ids": meta(rows, dtype=torch.int64), "ignore_index": -100, "temperature": 1.0}
    sums = {"dhidden": meta(N, D), "dweight": meta(V, D), "dbias": None}
    rest = {"stats": meta(2, rows), "entropy": meta(rows), "dlogp": meta(rows)}
    rest |= {"dentropy": meta(rows) if entropy else None, "first_row": 0, "kept": True, "postpone": False}
    with Allocations() as seen:
        memory = ChunkBuffers.of(
            "hopper", args["hidden"], V, rows, 0, True, chunk_buffers.CHUNK_BYTES
        )._asdict()
        own = args | memory | {"queued": meta(1, dtype=torch.int32)}
        chunk.linear_logp_chunk(lambda *args, **options: None, **own, return_entropy=entropy)
        last = {"first": False, "last": False}
        chunk.linear_logp_chunk_bwd(lambda *args, **options: None, **own | sums | rest | last)
    assert 0.9 * chunk_buffers.CHUNK_BYTES < seen.most <= chunk_buffers.CHUNK_BYTES
