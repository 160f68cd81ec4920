"""`linear_logp` for trainers: casts inputs as trainers do, and gradients back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.vocab_shards import SHARDS
from isobit.ops.linear_logp.op import backward, forward

#: Arguments of `linear_logp` that are always the same.
_FIXED: dict[str, Any] = {
    "mask": None, "ignore_index": -100, "logits_dtype": None, "vocab_size": None, "padded_vocab": None,
    "workspace_bytes": None,
}  # fmt: skip


@dataclass
class Call:
    """One call of a trainer, with the options of `linear_logp` that it uses."""

    options: dict[str, Any]  # temperature, softcap, logit_scale, return_entropy
    backend: str | None  # None is the first that can serve
    #: A context in which the given parameters are gathered.
    gather: Callable[..., AbstractContextManager[Any]] = lambda *parameters: nullcontext()

    def why_not(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
        """Why the backend that was requested by name cannot serve, or None."""
        if self.backend is None:
            return None
        inputs = _cast(_compute_dtype(hidden), hidden, weight, bias)
        return forward.backend_named(self.backend).when({**_FIXED, **self.options, **inputs})

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(logp, entropy), in fp32."""
        return _LogProbs.apply(hidden, weight, bias, token_ids, self)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which the trainer's own matrix product would compute."""
    kind = hidden.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else hidden.dtype


class _LogProbs(torch.autograd.Function):
    """`linear_logp` that casts its inputs itself. This is not left to autograd, for two reasons: gradients of
    fp32 parameters under autocast stay in fp32, and the backward has to gather a weight that ZeRO-3 has
    sharded again after the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.call = _compute_dtype(hidden), call
        with torch.autocast(hidden.device.type, enabled=False):
            logp, entropy, _, stats, *_ = forward(
                **_cast(ctx.dtype, hidden, weight, bias), token_ids=token_ids, **_FIXED, **call.options,
                return_lse=False, return_stats=True, keep=False, backend=call.backend,
            )  # fmt: skip
        entropy = entropy if call.options["return_entropy"] else None
        ctx.save_for_backward(hidden, weight, bias, token_ids, stats, entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, dlogp: Tensor | None, dentropy: Tensor | None) -> Any:
        hidden, weight, bias, token_ids, stats, entropy = ctx.saved_tensors
        wants = dict(zip(("hidden", "weight", "bias"), ctx.needs_input_grad, strict=False))
        options = {name: value for name, value in ctx.call.options.items() if name != "return_entropy"}
        with ctx.call.gather(weight, bias), torch.autocast(hidden.device.type, enabled=False):
            gradients = backward(
                **_cast(ctx.dtype, hidden, weight, bias), token_ids=token_ids, stats=stats, entropy=entropy,
                kept=None, kept_base=None, dlse=None, **_FIXED, **options,
                dlogp=None if dlogp is None else dlogp.contiguous(),
                dentropy=None if dentropy is None else dentropy.contiguous(),
                **{f"want_{name}": want for name, want in wants.items()},
                grad_dtype=None if ctx.dtype == torch.float64 else torch.float32, dhidden_dtype=None,
                shard=0, shards=SHARDS, backend=ctx.call.backend,
            )  # fmt: skip
        inputs = zip(gradients, (hidden, weight, bias), wants.values(), strict=True)
        return *(g.to(x.dtype) if want else None for g, x, want in inputs), None, None


def _cast(dtype: torch.dtype, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Any]:
    cast = None if bias is None else bias.detach().to(dtype)
    return {"hidden": hidden.detach().to(dtype), "weight": weight.detach().to(dtype), "bias": cast}
