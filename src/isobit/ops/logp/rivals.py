"""What people use instead of `logp`, and the sizes at which both are timed: with all rows live, and with a
tenth of them (`_tenth`), as when only some tokens of a batch are trained on."""

import math
from functools import partial

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import by_rows


def native(args: Args) -> Tensor:
    log_p = (args["logits"].float() / args["temperature"]).log_softmax(-1)
    chosen = log_p.gather(-1, args["token_ids"].long()[..., None]).squeeze(-1)
    return chosen if args["mask"] is None else chosen * args["live"]


def _of_live_rows(args: Args) -> Args:
    """Zeros in masked rows, for rivals that mask afterwards: NaN or an invalid id in such a row
    would be an error there."""
    if args["mask"] is None:
        return args
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    zeros = {"logits": args["logits"].masked_fill(~live[..., None], 0.0)}
    return args | zeros | {"token_ids": args["token_ids"].masked_fill(~live, 0), "live": live.float()}


def _liger(args: Args) -> Tensor:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    return fused_selective_log_softmax(args["logits"], args["token_ids"], args["temperature"], args["mask"])


def _liger_inputs(args: Args) -> Args:
    """Liger needs contiguous [B, T + 1, V] and does not read the last step of each sequence."""
    args = _of_live_rows(args)
    ids, mask, logits = args["token_ids"], args["mask"], args["logits"]
    B, T, V = (ids.shape[:-1].numel(), ids.shape[-1], logits.shape[-1])
    padded = logits.new_zeros(B, T + 1, V)
    padded[:, :-1] = logits.reshape(B, T, V)
    mask = None if mask is None else mask.reshape(B, T)
    return args | {"logits": padded, "token_ids": ids.reshape(B, T), "mask": mask}


def _liger_available(case: Case, device: torch.device) -> str | None:
    return cannot_import("liger_kernel.ops.grpo_loss") or (
        "its kernels need a GPU" if device.type == "cpu" else None
    )


_TAKES = ("temperature", "mask", "ids", "layout")

RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        Rival("native", native, prepare=_of_live_rows, jit=False, takes=_TAKES),
        # A compiled backward frees its buffers, so it cannot run twice after one forward.
        Rival(
            "torch.compile", native, directions=("fwd", "fwd_bwd"), prepare=_of_live_rows, compiled=True,
            takes=_TAKES,
        ),
        Rival(
            "liger", _liger, directions=("fwd",), prepare=_liger_inputs, available=_liger_available,
            takes=("temperature", "mask", "layout"),
        ),
    )
}  # fmt: skip


def _cost(density: float, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Live rows are read once forward and once backward, and the gradient of every row is written. Vectors of
    N are negligible but counted."""
    N, row = math.prod(v for k, v in dims.items() if k != "V"), dims["V"] * dtype.itemsize
    live = N if density == 1 else int(alter.random_mask(density, N).sum())
    return Cost(fwd_bytes=live * row + N * (8 + 12), bwd_bytes=(live + N) * row + N * (8 + 16))


cost = partial(_cost, 1.0)


CASES = [
    Case({"B": 32, "T": 256, "V": 32768}, torch.float16, data="random"),
    Case({"B": 32, "T": 256, "V": 50257}, torch.float16, data="random"),
    Case({"B": 32, "T": 256, "V": 50304}, torch.float16, data="random"),
    Case({"B": 32, "T": 256, "V": 131072}, torch.float16, data="random"),
    Case({"B": 8, "T": 1024, "V": 151936}, torch.bfloat16, data="random"),
    Case({"N": 8, "V": 151936}, torch.bfloat16, data="random"),
]
#: The subset for `--core`: an odd vocabulary, which is slow to read, and an aligned one.
_CORE = [CASES[1], CASES[4]]

LOGP = by_rows(
    "logp",
    cases=CASES,
    cost=cost,
    rivals=RIVALS,
    about="log-probabilities from logits",
    core=[*_CORE, CASES[5]],
    also={"triton": _CORE, "hopper": _CORE},
)

_TENTH = by_rows(
    "logp", CASES[:-1], partial(_cost, 0.1), RIVALS, name="logp_tenth", options={"mask": 0.1}, core=_CORE,
    declared_only=True, also={"triton": _CORE, "hopper": []},
    about="log-probabilities from logits, 10 % of the rows live",
)  # fmt: skip

SERIES = [LOGP, _TENTH]
