"""What people use instead of `linear_policy_loss`, and the shapes at which both are timed.

N tokens in sequences of 1024, with D features and a vocabulary of V; a clipped policy loss, its value and the
gradients of hidden states and weight. Three series:

    linear_policy_loss         with a workspace of 1.3 GiB
    linear_policy_loss_more    the same for few rows, few features, and many chunks
    linear_policy_loss_small   with 256 MB

The baseline is G, one bare matrix product of that size, as for `linear_logp`. The loss needs three such
products, or four if logits are computed twice.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from isobit.ops.linear_logp import reference
from isobit.ops.linear_logp.op import linear_logp
from isobit.ops.linear_logp.rivals import BASELINE, bare_product, cost_of_training, filled_weight, native
from isobit.ops.linear_policy_loss.op import declared, linear_policy_loss
from isobit.ops.linear_policy_loss.proof.inputs import make as make_rows
from isobit.spec.options import known_options
from isobit.spec.proof import Args, Case
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.trial import cloned
from isobit.spec.truth import ROWS, cotangent_like, spread_evenly

SHAPES = ((4096, 2048, 131072), (8192, 4096, 151936), (16384, 4096, 128256))

#: Few rows, few features, a number of rows that is no multiple of a segment, and many chunks.
MORE = (
    (1024, 2560, 102400), (4096, 896, 151936), (6000, 4096, 151936), (28672, 2560, 102400),
    (65536, 2560, 102400),
)  # fmt: skip

#: Tokens per sequence, for rivals that need it.
LENGTH = 1024

GIB, MB = 1 << 30, 10**6
LARGE, SMALL = 1331 << 20, 256 * MB


def terms(logp: Tensor, old_logp: Tensor, advantages: Tensor) -> Tensor:
    """-min(r A, clip(r, 0.8, 1.2) A) of every token, r = exp(logp - old_logp)."""
    ratio = torch.exp(logp - old_logp)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def clipped(
    logp: Tensor, entropy: Tensor | None, old_logp: Tensor, advantages: Tensor, tokens: int
) -> Tensor:
    return terms(logp, old_logp, advantages).sum() / tokens


def make(case: Case, pool: Pool) -> list[Args]:
    args = make_rows(case, pool.device, pool.inputs)
    N = args["token_ids"].numel()
    gen = torch.Generator(pool.device).manual_seed(pool.inputs.seed)
    with torch.no_grad():
        now = linear_logp(args["hidden"], args["weight"], args["token_ids"])
    old_logp = now + 0.1 * torch.randn(N, generator=gen, device=pool.device)
    each = torch.randn(-(-N // LENGTH), generator=gen, device=pool.device)
    given = {"old_logp": old_logp, "advantages": each.repeat_interleave(LENGTH)[:N], "tokens": N}
    args |= {"loss_fn": clipped, "inputs": given}
    size = args["hidden"].nbytes + args["weight"].nbytes
    return [args, *(cloned(args) for _ in range(copies_for(size, pool.device) - 1))]


# Rivals


def _of_logp(logp: Callable[[Args], Tensor], args: Args) -> Tensor:
    """The loss from log-probabilities of all tokens."""
    return clipped(logp(args), None, **args["inputs"])


def _native(args: Args) -> Tensor:
    return native(args | {"logit_scale": None, "softcap": None})


TRL = "trl.kernels.chunked_logprob"


@cache
def _trl_kernels(module: str) -> Any:
    """TRL's file of chunked log-probabilities, loaded without TRL: its backward imports a file of the
    trainers, which need packages that the kernels do not. It takes one function from there, which gathers the
    weight if DeepSpeed has distributed it, and otherwise does nothing."""
    trl, kernels, name = module.split(".")
    found = find_spec(trl)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {trl!r}", name=trl)
    path = Path(found.submodule_search_locations[0], kernels, f"{name}.py")
    if not path.is_file():
        raise ModuleNotFoundError(f"this TRL has no {path}")
    package = "isobit_without_trl"
    modules = {name: ModuleType(name) for name in (package, f"{package}.kernels", f"{package}.trainer")}
    utils = modules[f"{package}.trainer.utils"] = ModuleType(f"{package}.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *parameters: nullcontext()  # type: ignore[attr-defined]
    spec = spec_from_file_location(f"{package}.kernels.chunked_logprob", path)
    assert spec is not None and spec.loader is not None
    loaded = modules[spec.name] = module_from_spec(spec)
    sys.modules.update(modules)  # its backward looks for them there
    spec.loader.exec_module(loaded)
    return loaded


def _trl(args: Args) -> Tensor:
    """Computes tiles of 4096 x 32768 logits, and again in the backward."""
    hidden, weight, ids = (args[name] for name in ("hidden", "weight", "token_ids"))
    function = _trl_kernels(TRL).ChunkedLogProbFunction
    out: Tensor = function.apply(hidden, weight, None, ids, 1.0, 32768, None, 1.0, ())[0]
    return out


def _needs_trl(case: Case, device: torch.device) -> str | None:
    return "its kernels need a GPU" if device.type == "cpu" else cannot_import(TRL, _trl_kernels)


def _liger(args: Args) -> Tensor:
    """Computes gradients in the forward, sequence by sequence; the same terms and divisor."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    given, rows = args["inputs"], (-1, min(LENGTH, len(args["hidden"])))
    ids = args["token_ids"].view(rows)
    loss_fn = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")
    loss, _ = loss_fn(
        args["hidden"].view(*ids.shape, -1), args["weight"], ids, torch.ones_like(ids),
        given["advantages"].view(rows)[:, 0], old_per_token_logps=given["old_logp"].view(rows),
    )  # fmt: skip
    out: Tensor = loss
    return out


def _needs(module: str, case: Case, device: torch.device) -> str | None:
    return "its kernels need a GPU" if device.type == "cpu" else cannot_import(module)


def _rivals(*more: Rival) -> dict[str, Rival]:
    bare = Rival(BASELINE, bare_product, directions=None, prepare=filled_weight, jit=False, takes=None)
    return {rival.name: rival for rival in (bare, *more)}


_FREE: dict[str, Any] = {"directions": None, "takes": ("workspace_bytes",)}

_OTHERS = (
    Rival("native", partial(_of_logp, _native), jit=False, **_FREE),
    Rival("torch.compile", partial(_of_logp, _native), compiled=True, **_FREE),
    Rival("liger", _liger, available=partial(_needs, "liger_kernel.chunked_loss"), graph=False, **_FREE),
    Rival("trl", partial(_of_logp, _trl), available=_needs_trl, graph=False, **_FREE),
)  # fmt: skip


# The truth


@dataclass(frozen=True)
class Sampled:
    """Truth in fp64: the loss, and the gradient of some hidden states. Errors are relative: that of the loss
    to the size of its terms, that of a gradient to its largest element."""

    args: Args

    def _terms(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(terms of the loss, hidden states as leaves) of some rows."""
        given = self.args["inputs"]
        hidden = self.args["hidden"][rows].double().requires_grad_()
        logp, *_ = reference.formula(hidden, self.args["weight"].double(), self.args["token_ids"][rows])
        own = (given[name][rows].double() for name in ("old_logp", "advantages"))
        return terms(logp, *own) / given["tokens"], hidden

    @cached_property
    def loss(self) -> tuple[float, float]:
        """The loss, and the sum of the absolute values of its terms."""
        everyone = torch.arange(len(self.args["hidden"]), device=self.args["hidden"].device)
        total = size = 0.0
        with torch.no_grad():
            for rows in everyone.split(512):
                terms, _ = self._terms(rows)
                total, size = total + float(terms.sum()), size + float(terms.abs().sum())
        return total, size

    @cached_property
    def gradient(self) -> tuple[Tensor, Tensor]:
        hidden = self.args["hidden"]
        rows = spread_evenly(len(hidden), ROWS, hidden.device)
        terms, leaves = self._terms(rows)
        dloss = cotangent_like(torch.empty((), device=hidden.device)).double()
        return rows, torch.autograd.grad(terms.sum() * dloss, leaves)[0]

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        loss, dhidden = result[0], result[1]
        if loss.ndim:  # a bare product has no loss
            return None
        total, size = self.loss
        rows, exact = self.gradient
        of_gradient = float((dhidden[rows].double() - exact).abs().max() / exact.abs().max())
        of_loss = abs(float(loss.detach()) - total) / size
        return max(of_loss, of_gradient) if of_gradient == of_gradient else of_gradient


# Series


def _cases(shapes: Sequence[tuple[int, int, int]]) -> list[Case]:
    return [Case({"N": N, "D": D, "V": V}, torch.bfloat16, data="random") for N, D, V in shapes]


def _call(args: Args, backend: str | None) -> Tensor:
    return linear_policy_loss(**args, backend=backend)[0]


def _series(
    name: str, shapes: Sequence[tuple[int, int, int]], workspace_bytes: int, rivals: dict[str, Rival],
    about: str,
) -> Series:  # fmt: skip
    cases = _cases(shapes)
    return Series(
        op=declared, name=name, cases=cases, make=make, call=_call, cost=cost_of_training, judge=Sampled,
        rivals=rivals, inputs=("hidden", "weight"), options={"workspace_bytes": workspace_bytes},
        takes=tuple(known_options(declared)), directions=("fwd_bwd",), against=BASELINE, copy=False,
        core=cases[:2], about=about,
    )  # fmt: skip


_COMPILED = [rival for rival in _OTHERS if rival.compiled]

SERIES = (
    _series("linear_policy_loss", SHAPES, LARGE, _rivals(*_OTHERS), "loss and gradients"),
    _series("linear_policy_loss_more", MORE, LARGE, _rivals(*_COMPILED), "the same for other shapes"),
    _series("linear_policy_loss_small", SHAPES, SMALL, _rivals(), "the same with 256 MB of workspace"),
)
