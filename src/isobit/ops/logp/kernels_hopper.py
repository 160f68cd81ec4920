"""`logp` in the order of class lse/1, the one in which `linear_logp` folds logits that it never stores.

It is here so that a fused and an unfused path can agree bit for bit: logits of `det_gemm` in fp32, read by
the kernel of `isobit.blocks.hopper_logits`, go through the same functions. The triton backend reads faster;
this one serves when it is asked for by name.
"""

from typing import Any

from torch import Tensor

from isobit.blocks import hopper_logits
from isobit.blocks.launch import Launch, run


def why_not(args: dict[str, Any]) -> str | None:
    return hopper_logits.why_not("logits", args["logits"])


def logp(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats), as the triton backend returns them."""
    logits, options = args["logits"], ("token_ids", "mask", "ignore_index", "temperature")
    slots = hopper_logits.slots_of(logits.shape[-1], *(args[name] for name in options), launch)
    flags = {name: args[f"return_{name}"] for name in ("entropy", "lse", "stats")}
    return hopper_logits.results(logits, slots, launch, **flags)
