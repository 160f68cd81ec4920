"""What people use instead of `logp`, and the sizes at which both are timed."""

import math

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
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


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """One read forward, one read and one write backward. Vectors of N are negligible but counted."""
    N = math.prod(v for k, v in dims.items() if k != "V")
    logits = N * dims["V"] * dtype.itemsize
    return Cost(fwd_bytes=logits + N * (8 + 12), bwd_bytes=2 * logits + N * (8 + 16))


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

SERIES = [LOGP]
