"""`logp` in the summation order of class lse/1, the one that `linear_logp` uses for logits that it never
stores.

With it a fused and an unfused path can agree bit for bit: fp32 logits of `det_gemm`, read by the kernel of
`isobit.kernels.hopper.logits`, go through the same functions. The triton backend is faster; this one is used
only if it is requested by name.
"""

from typing import Any

from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.hopper import logits as hopper_logits


def why_not(args: dict[str, Any]) -> str | None:
    return hopper_logits.why_not("logits", args["logits"])


def logp(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats), as the triton backend returns them."""
    logits, options = args["logits"], ("token_ids", "mask", "ignore_index", "temperature")
    slots = hopper_logits.slots_of(logits.shape[-1], *(args[name] for name in options), launch)
    flags = {name: args[f"return_{name}"] for name in ("entropy", "lse", "stats")}
    return hopper_logits.results(logits, slots, launch, **flags)
