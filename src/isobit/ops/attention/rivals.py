"""The sizes at which `attention` is timed, and what must be moved and computed there."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.bench.series import by_rows
from isobit.check.proof import Args, Case, Cost
from isobit.ops.attention.proof.inputs import BY_TOKEN
from isobit.ops.attention.proof.truth import formula

BF16 = torch.bfloat16


@dataclass(frozen=True)
class _OneHead:
    """The last head of the last batch element in fp64: heads do not meet in any forward sum."""

    known: Tensor

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        if direction != "fwd":
            return None
        return float((result[0][-1:, -self.known.shape[1] :, -1:].double() - self.known).abs().max())


def _judge(args: Args) -> _OneHead | None:
    """At most so many queries that their scores fit."""
    if args["cu_seqlens_q"] is not None or args["block_table"] is not None:
        return None
    some = 1024 if args["causal"] else args["q"].shape[1]
    one = args | {n: args[n][-1:, :, -1:].double() for n in BY_TOKEN}
    one["q"] = one["q"][:, -some:]
    return _OneHead(formula(one)[0])


def _cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """q, k and v read once and out written once; backward reads those and dout, and writes three gradients.
    Products count for the keys that a causal query sees: two forward, five backward."""
    B, T, S, H, KV, D = (dims[name] for name in ("B", "T", "S", "H", "KV", "D"))
    rows, keys = B * T * H * D * dtype.itemsize, B * S * KV * D * dtype.itemsize
    seen = T * S - T * (T - 1) // 2
    flops = 2 * B * H * seen * D
    return Cost(
        fwd_bytes=2 * rows + 2 * keys,
        bwd_bytes=4 * rows + 4 * keys,
        fwd_flops=2 * flops,
        bwd_flops=5 * flops,
    )


def _case(B: int, T: int, S: int, H: int, KV: int, D: int, **options: Any) -> Case:
    dims = {"B": B, "T": T, "S": S, "H": H, "KV": KV, "D": D}
    return Case(dims, BF16, data="random", options=options)


TRAINING = [
    _case(8, 1024, 1024, 32, 8, 128),
    _case(4, 2048, 2048, 32, 8, 128),
    _case(2, 8192, 8192, 32, 8, 128),
    _case(1, 16384, 16384, 32, 8, 128),
    _case(4, 4096, 4096, 16, 8, 64),
    _case(1, 16384, 16384, 32, 8, 128, window=4096),
]
DECODING = [
    _case(B, T, S, 8 * group, 8, 128)
    for S in (4096, 32768)
    for B in (1, 16, 64)
    for group in (1, 4, 8)
    for T in (1, 4)
]

SERIES = [
    by_rows("attention", TRAINING, _cost, {}, judge=_judge, core=TRAINING[1:3]),
    by_rows(
        "attention",
        DECODING,
        _cost,
        {},
        name="attention_decode",
        judge=_judge,
        core=DECODING[2:3],
        inputs=(),
        directions=("fwd",),
    ),
]
