"""What people use instead of `rope`, and the sizes at which both are timed."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from isobit.ops.rope import reference
from isobit.ops.rope.op import forward
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import by_rows
from isobit.spec.truth import Truth, truth_of

BF16 = torch.bfloat16


def eager(args: Args) -> tuple[Tensor, Tensor]:
    """As Hugging Face's models compute it."""
    return reference.formula(**args)


def _liger(args: Args) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_rope

    # It takes [B, H, T, D], and rotates in place: the copy that keeps q and k is a part of its time.
    q, k = (args[n].transpose(1, 2).clone() for n in ("q", "k"))
    q, k = liger_rope(q, k, args["cos"], args["sin"])
    return q.transpose(1, 2), k.transpose(1, 2)


def _liger_available(case: Case, device: torch.device) -> str | None:
    if case.options.get("rounding", "hf") != "hf":
        return "it has one rounding"
    return cannot_import("liger_kernel.transformers.functional") or (
        "its kernels need a GPU" if device.type == "cpu" else None
    )


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("eager", eager, jit=False, takes=("layout", "rounding")),
        # A compiled backward frees its buffers, so it cannot run twice after one forward.
        Rival(
            "torch.compile", eager, directions=("fwd", "fwd_bwd"), compiled=True, takes=("layout", "rounding")
        ),
        Rival("liger", _liger, directions=("fwd",), available=_liger_available, takes=("layout",)),
    )
}


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """One read and one write of q and k, and one read of cos and sin; the same backward."""
    tokens = math.prod(size for name, size in dims.items() if name not in "HGDR")
    heads = (dims["H"] + dims["G"]) * dims["D"]
    nbytes = tokens * (2 * heads + 2 * dims["R"]) * dtype.itemsize
    return Cost(fwd_bytes=nbytes, bwd_bytes=nbytes)


def _of_queries(args: Args) -> Truth | None:
    """The truth of the first output, which has no gradient of k; but that is computed too."""
    known = truth_of(forward, args, ("q",))
    return None if known is None else replace(known, taken=2)


def _case(B: int, T: int, H: int, G: int, D: int = 128) -> Case:
    return Case({"B": B, "T": T, "H": H, "G": G, "D": D, "R": D}, BF16, data="random")


#: Heads of Qwen3 0.6B, Qwen3 4B and Llama 3 8B, and a Llama 3 70B.
HEADS = ((16, 8), (32, 8), (64, 8))
CASES = [_case(*tokens, *heads) for heads in HEADS for tokens in ((1, 1), (64, 1), (1, 4096), (8, 4096))]

SERIES = [
    by_rows(
        "rope", CASES, cost, RIVALS, about="T tokens of B sequences", judge=_of_queries,
        core=[_case(8, 4096, 32, 8), _case(1, 4096, 32, 8), _case(64, 1, 32, 8)],
    )
]  # fmt: skip
