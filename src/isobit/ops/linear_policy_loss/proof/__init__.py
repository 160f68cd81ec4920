"""The proof of `linear_policy_loss`. Inputs are in `inputs.py`, the truth in `truth.py`, bit laws in
`bits.py`."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.ops.linear_logp.proof import PROOF as OF_ROWS
from isobit.ops.linear_logp.proof import memory as memory_of_rows
from isobit.ops.linear_logp.proof import record_triton
from isobit.ops.linear_logp.proof.shards import BACKENDS as WITH_SHARDS
from isobit.ops.linear_policy_loss import chunk_buffers
from isobit.ops.linear_policy_loss.op import declared
from isobit.ops.linear_policy_loss.proof import bits, inputs, ranks, truth
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Kernels, Proof

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

MB = 1 << 20


def judged(args: Args, outputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The loss. Its sums are the caller's business."""
    return outputs[:1]


# Memory


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients: the workspace, and fp32 sums of dweight and dhidden. If
    nothing is kept, as much as `linear_logp`, plus the memory of those sums."""
    sizes = dict(case.dims)
    V, D = sizes.pop("V"), sizes.pop("D")
    N = math.prod(sizes.values())
    of_rows, of_loss = memory_of_rows(case, backend, direction), 128 * N + MB
    if direction == "fwd":
        return of_rows + of_loss
    given = case.options.get("workspace_bytes")
    room, sums = chunk_buffers.CHUNK_BYTES if given is None else given, 4 * V * D + 4 * N * D
    if backend == "triton":
        return of_rows + (given or 0) + of_loss
    if backend == "reference":  # a few temporaries per chunk, and converted weights
        rows = min(N, max(1, room // (4 * V)))
        return 4 * 14 * rows * V + 3 * 4 * V * D + 4 * 4 * N * D + sums + of_loss
    if chunk_buffers.capacity("hopper", V, D, case.dtype, room) is None:
        return of_rows + room + 4 * V * D + of_loss
    return min(room, chunk_buffers.bytes_for(chunk_buffers.slots_of(N), V, D)) + sums + of_loss


# Kernels


def _call(dtype: torch.dtype, N: int, D: int, V: int, full: bool) -> Args:
    """Arguments of both directions of a chunk: no optional ones, or all."""
    args: Args = {"hidden": _empty(N, D, dtype=dtype), "weight": _empty(V, D, dtype=dtype)}
    args |= {"token_ids": _empty(N, dtype=torch.int64), "ignore_index": -100, "temperature": 1.0}
    args |= {"bias": None, "mask": None}
    if full:
        args |= {"bias": _empty(V), "mask": _empty(N, dtype=torch.bool), "temperature": _empty(N)}
    return args


def _empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def record_hopper(launch: Any, dtype: torch.dtype) -> None:
    """A chunk that is kept, in the middle and at the end; and one whose logits are recomputed, because the
    entropy has a gradient or because it does not fit. All rows at once are covered by `linear_logp`."""
    from isobit.ops.linear_policy_loss import kernels_hopper as kernels_hopper_chunk

    narrow = F16 if dtype == F32 else dtype  # tensor cores take no fp32: the second dtype is fp16 here
    N, D, V = 4096, 2048, 131072
    for full in (False, True):
        args = _call(narrow, N, D, V, full)
        again = 2 * N if full else 0
        shared = chunk_buffers.ChunkBuffers.of("hopper", args["hidden"], V, N, again, True, 0)._asdict()
        own = args | shared | {"queued": _empty(1, dtype=torch.int32)}
        kernels_hopper_chunk.linear_logp_chunk(launch, **own, return_entropy=full)
        own |= {"stats": _empty(2, N), "entropy": _empty(N), "dlogp": _empty(N), "dentropy": None}
        own |= {"dhidden": _empty(2 * N, D), "dweight": _empty(V, D), "dbias": _empty(V) if full else None}
        own |= {"first_row": 0, "kept": True, "first": not full, "last": full, "postpone": False}
        kernels_hopper_chunk.linear_logp_chunk_bwd(launch, **own)
        left = {"memory": shared["memory"], "queue": shared["queue"], "count": own["queued"], "vocab": V}
        kernels_hopper_chunk.linear_logp_chunk_dw(launch, **left, factor=_empty())
        sums = own["dbias"][:-1] if full else own["dweight"]
        kernels_hopper_chunk.linear_logp_chunk_rounded(launch, sums=sums, factor=_empty(), dtype=narrow)
        if dtype != BF16:
            return  # its branches are the same
    kernels_hopper_chunk.linear_logp_chunk_bwd(launch, **own | {"dentropy": _empty(N)})
    kernels_hopper_chunk.linear_logp_chunk_bwd(launch, **own | {"kept": False, "last": False})


def memory_with_shards(case: Case, backend: str, direction: str) -> int:
    """That of `linear_logp`, and of the loss."""
    return OF_ROWS.of(backend).memory(case, backend, direction) + 128 * case.dims["N"] + MB


# Cases


def _rows(count: int, V: int) -> int:
    """A workspace for this many rows of the reference, in fp32, and for none on other backends."""
    return 4 * V * count


_SMALL = [
    Case({"N": 40, "D": 48, "V": 120}, BF16, options={"workspace_bytes": _rows(16, 120)}),
    Case({"B": 4, "T": 9, "D": 40, "V": 100}, F16, layout="shifted",
         options={"each": True, "ids": torch.int32, "entropy": True, "workspace_bytes": _rows(20, 100)}),
    Case({"N": 0, "D": 8, "V": 7}, F32),
    Case({"N": 40, "D": 24, "V": 90}, F32, layout="every other",
         options={"mask": torch.bool, "bias": "own", "temperature": 0.7, "sequences": 5,
                  "workspace_bytes": _rows(12, 90)}),
    Case({"B": 3, "T": 16, "D": 16, "V": 72}, BF16, options={"mask": 0.25, "bias": F32}),
    Case({"N": 1, "D": 8, "V": 1}, BF16, options={"bias": "own"}),
    Case({"N": 17, "D": 33, "V": 65}, BF16, layout="offset",
         options={"mask": torch.int16, "bias": "own", "workspace_bytes": 1}),
]  # fmt: skip


def _heavy(dims: dict[str, int], dtype: torch.dtype, rows: int | None = None, **options: Any) -> Case:
    """A case for a GPU, with a workspace for chunks of `rows` rows on Hopper."""
    if rows is not None:
        options["workspace_bytes"] = chunk_buffers.bytes_for(rows, dims["V"], dims["D"])
    return Case(dims, dtype, "random", options=options, heavy=True, gpu_gb=16)


_HEAVY = [
    _heavy({"N": 3000, "D": 256, "V": 5003}, BF16, 1024, mask=torch.bool, bias="own"),
    _heavy({"B": 5, "T": 700, "D": 128, "V": 8208}, F16, 1408, each=True, entropy=True),
    _heavy({"N": 4000, "D": 64, "V": 3000}, BF16, 1024, sequences=4, bias=F32, temperature=0.7),
]

_IGNORED = [Case({"B": 3, "T": 16, "D": 16, "V": 72}, BF16, options={"mask": alter.BY_IDS})]

_BITS = [
    Case({"N": 1300, "D": 136, "V": 1000}, BF16, "random", options={"bias": "own", "mask": 0.9}),
    _heavy({"N": 4500, "D": 512, "V": 3000}, BF16, 1024, mask=torch.bool, bias="own"),
    _heavy({"B": 9, "T": 500, "D": 136, "V": 50257}, F16, 1152, each=True, mask=0.8),
    _heavy({"N": 6000, "D": 256, "V": 9000}, BF16, 1280, sequences=7, entropy=True),
]

#: For the classes with shards, which have one chunk, and the kernels of `linear_logp`.
_OF_SHARDS: dict[str, Any] = {
    "cases": [_SMALL[0], _SMALL[4]] + _HEAVY[:1],
    "bit_cases": [
        Case({"N": 200, "D": 64, "V": 600}, F16, "random", options={"bias": "own", "mask": 0.9}),
        *_BITS[1:2],
    ],
    "agree_cases": [Case({"N": 40, "D": 24, "V": 300}, BF16, "random", options={"bias": "own"}), *_BITS[1:2]],
    "memory": memory_with_shards,
    "memory_cases": [Case({"N": 64, "D": 64, "V": 120}, BF16, data="random")],
    "shards": [ranks.VOCABULARY],
    "shard_cases": [
        Case({"N": 70, "D": 24, "V": 500}, BF16, "random",
             options={"mask": torch.bool, "bias": "own", "padded": 640, "sequences": 3}),
        Case({"B": 4, "T": 11, "D": 16, "V": 130}, F16, "random",
             options={"entropy": True, "each": True, "workspace_bytes": 1}),
        _heavy({"N": 3000, "D": 256, "V": 50257}, BF16, mask=torch.bool, bias="own"),
    ],
}  # fmt: skip

PROOF = Proof(
    op=declared,
    op_class="logprob",
    outputs=("loss",),
    make=inputs.make,
    formula=truth.formula,
    scale=truth.scale,
    controls=(),
    padding=inputs.padding,
    layouts=inputs.LAYOUTS,
    lay_out=inputs.lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY + _IGNORED,
    bit_cases=_BITS,
    memory_cases=[
        Case({"N": 64, "D": 64, "V": 120}, BF16, data="random", options={"workspace_bytes": _rows(16, 120)}),
        _heavy({"N": 8192, "D": 2048, "V": 50257}, BF16, 2048),
        _heavy({"N": 8192, "D": 2048, "V": 50257}, BF16, workspace_bytes=256 * MB),
        _heavy({"B": 4, "T": 3000, "D": 1024, "V": 32768}, BF16, 2048, mask=torch.bool, bias="own"),
    ],
    mutants=inputs.MUTANTS,
    bad_value=lambda args: (alter.one_bad_id(args, len(args["weight"]))[0], None),
    hints=("cu_seqlens", "workspace_bytes"),
    kernels={
        "hopper": Kernels(record_hopper, targets=(("cuda", 90, 32),)),
        "triton": Kernels(record_triton),  # those of `linear_logp`
    },
    agree_cases=[*_BITS, _heavy({"N": 4000, "D": 512, "V": 50257}, BF16, workspace_bytes=64 * MB)],
    positive=("D", "V"),
    judged=judged,
    invariant=bits.invariant,
    also=bits.equal_to_linear_logp,
    slow=("model-8x4",),
    differs=dict.fromkeys(WITH_SHARDS, _OF_SHARDS),
)

PROOFS = [PROOF]
