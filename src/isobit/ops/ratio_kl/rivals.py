"""What people use instead of `ratio_kl`, and the sizes at which both are timed.

Six series: from the logits of a reference, and from its log-probabilities (`_given`), with all rows counting,
half of them (`_half`) and a tenth (`_tenth`). Liger's GRPO loss takes log-probabilities of a reference, so it
is timed where isobit gets them as well and reads as many bytes.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.ops.ratio_kl import reference
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import Series, by_rows
from isobit.spec.truth import ROWS, cotangent_like, spread_evenly

# Rivals


def native(args: Args) -> tuple[Tensor, Tensor]:
    temperature = args["temperature"]

    def chosen(logits: Tensor) -> Tensor:
        log_p = (logits.float() / temperature).log_softmax(-1)
        return log_p.gather(-1, args["token_ids"].long()[..., None]).squeeze(-1)

    logp, ref = chosen(args["policy_logits"]), args["ref_logp"]
    if ref is None:
        with torch.no_grad():
            ref = chosen(args["ref_logits"])
    old = logp.detach() if args["old_logp"] is None else args["old_logp"]
    d = ref - logp
    ratio, kl = (logp - old).exp(), d.exp() - d - 1
    if args["mask"] is None:
        return ratio, kl
    return torch.where(args["live"], ratio, 1.0), torch.where(args["live"], kl, 0.0)


def zeros_in_masked_rows(args: Args, live: Tensor) -> Args:
    """For rivals that mask afterwards: NaN or an invalid id in a masked row would be an error there."""
    zeros = {"token_ids": args["token_ids"].masked_fill(~live, 0)}
    for name in ("policy_logits", "ref_logits", "old_logp", "ref_logp"):
        if args[name] is not None:
            dead = ~live[..., None] if args[name].ndim > live.ndim else ~live
            zeros[name] = args[name].masked_fill(dead, 0.0)
    return args | zeros


def _of_live_rows(args: Args) -> Args:
    if args["mask"] is None:
        return args
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    return zeros_in_masked_rows(args, live) | {"live": live}


def _liger(args: Args) -> Tensor:
    """ratio + kl: the loss for an advantage of -1 with beta = 1, where no ratio is clipped."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    loss: Tensor = triton_grpo_loss(
        logits=args["policy_logits"], old_logp=args["old_logp"], ref_logp=args["ref_logp"],
        completion_ids=args["token_ids"], advantages=args["advantages"], completion_mask=args["mask"],
        temperature=args["temperature"], beta=1.0, eps_low=1.0, eps_high=1e9, inplace=False,
    )[0]  # fmt: skip
    return loss


def with_last_step(logits: Tensor) -> Tensor:
    """Liger needs contiguous [B, T + 1, V] and does not read the last step of each sequence."""
    B, T, V = logits.shape
    padded = logits.new_zeros(B, T + 1, V)
    padded[:, :-1] = logits
    return padded


def _liger_inputs(args: Args) -> Args:
    args = _of_live_rows(args)
    padded = with_last_step(args["policy_logits"])
    advantages = torch.full((len(padded),), -1.0, dtype=torch.float32, device=padded.device)
    return args | {"policy_logits": padded, "advantages": advantages}


def liger_available(case: Case, device: torch.device) -> str | None:
    if "B" not in case.dims:
        return "takes sequences, not rows"
    return cannot_import("liger_kernel.transformers.grpo_loss") or (
        "its kernels need a GPU" if device.type == "cpu" else None
    )


_TAKES = ("temperature", "mask", "ids", "old", "ref", "ref_dtype", "layout")

NATIVE = Rival("native", native, prepare=_of_live_rows, jit=False, takes=_TAKES)
# A compiled backward frees its buffers, so it cannot run twice after one forward.
COMPILED = Rival(
    "torch.compile", native, directions=("fwd", "fwd_bwd"), prepare=_of_live_rows, compiled=True, takes=_TAKES
)
LIGER = Rival(
    "liger", _liger, prepare=_liger_inputs, available=liger_available,
    takes=("temperature", "mask", "ref", "layout"),
)  # fmt: skip


# The truth


@dataclass(frozen=True)
class Sampled:
    """Truth in fp64: ratio and kl of some live rows, and the gradient of their logits with the same
    cotangent for both."""

    args: Args

    @cached_property
    def rows(self) -> Tensor:
        ids = self.args["token_ids"]
        live = live_rows(ids, self.args["mask"], self.args["ignore_index"]).reshape(-1).nonzero()[:, 0]
        return live[spread_evenly(len(live), ROWS, ids.device)]

    @cached_property
    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, lead = self.rows, self.args["token_ids"].ndim
        exact = {k: v for k, v in self.args.items() if k != "return_kl"} | {"mask": None}
        for name, value in exact.items():
            if isinstance(value, Tensor):
                some = value.reshape(-1, *value.shape[lead:])[rows]
                exact[name] = some.double() if some.is_floating_point() else some
        every = torch.empty(self.args["token_ids"].numel(), dtype=torch.float32, device=rows.device)
        cotangent = cotangent_like(every)[rows].double()
        with torch.enable_grad():  # forwards are judged under no_grad
            leaf = exact["policy_logits"].requires_grad_()
            ratio, kl, *_ = reference.formula(**exact)
            assert kl is not None
            (gradient,) = torch.autograd.grad((ratio, kl), leaf, (cotangent, cotangent))
        return ratio.detach(), kl.detach(), gradient

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        """The error of the sum of both, if that is all that a rival returns."""
        if len(self.rows) == 0:
            return None
        ratio, kl, gradient = self.truth
        pairs = []
        if direction != "bwd":
            outputs = result if direction == "fwd" else result[:-1]
            known = (ratio, kl) if len(outputs) == 2 else (ratio + kl,)
            pairs += [(o.reshape(-1)[self.rows], t) for o, t in zip(outputs, known, strict=True)]
        if direction != "fwd":
            V, given = gradient.shape[-1], result[-1]
            if given.shape != self.args["policy_logits"].shape:  # liger has one more step per sequence
                given = given[:, :-1]
            pairs.append((given.reshape(-1, V)[self.rows], gradient))
        errors = [(ours.detach().double() - exact).abs().max() for ours, exact in pairs]
        return float(torch.stack(errors).max())  # NaN if any is NaN


# Cost


@lru_cache
def live_count(N: int, density: float) -> int:
    """How many rows of a case count."""
    if density == 1:
        return N
    return int(alter.random_mask(density, N).sum())


def cost(density: float, given: bool, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Forward reads both logits of live rows, backward the policy's; the gradient of every row is
    written. Vectors of N are negligible but counted."""
    rows = [size for name, size in dims.items() if name != "V"]
    N, row = torch.Size(rows).numel(), dims["V"] * dtype.itemsize
    live = live_count(N, density)
    return Cost(fwd_bytes=live * row * (1 if given else 2) + 40 * N, bwd_bytes=(live + N) * row + 40 * N)


# Series

DENSITIES = {"": 1.0, "_half": 0.5, "_tenth": 0.1}


def about(given: bool, density: float) -> str:
    """What kind of call it is."""
    reference = "log-probabilities of the reference given" if given else "logits of policy and reference"
    return reference if density == 1 else f"{reference}, {100 * density:g} % of the rows live"


CASES = [
    Case({"B": 32, "T": 256, "V": 32768}, torch.float16, data="random"),
    Case({"B": 32, "T": 256, "V": 50257}, torch.float16, data="random"),
    Case({"B": 32, "T": 256, "V": 131072}, torch.float16, data="random"),
    Case({"B": 8, "T": 1024, "V": 151936}, torch.bfloat16, data="random"),
]
#: The subset for `--core`: an odd vocabulary, which is slow to read, and an aligned one.
_CORE = [CASES[1], CASES[3]]


def _series(given: bool, suffix: str, density: float) -> Series:
    options = {"ref": "logp"} if given else {}
    name = f"ratio_kl{'_given' if given else ''}{suffix}"
    rivals = (NATIVE, LIGER) if given else (NATIVE, COMPILED)
    plain = name == "ratio_kl"
    return by_rows(
        "ratio_kl", CASES, partial(cost, density, given), {rival.name: rival for rival in rivals}, name=name,
        judge=Sampled, about=about(given, density),
        options=options | ({} if density == 1 else {"mask": density}), core=_CORE,
        also={"triton": _CORE, "hopper": _CORE if plain else []},
    )  # fmt: skip


SERIES = [_series(given, *density) for given in (False, True) for density in DENSITIES.items()]
