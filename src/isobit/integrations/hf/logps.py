"""Log-probabilities of a Hugging Face causal language model, without its logits.

    logp = isobit.integrations.hf.token_logps(model, input_ids, attention_mask)

The model runs as usual, but computes logits for the last position only. The hidden states of all positions go
to `isobit.linear_logp` with the weight of its LM head. What the model does between its hidden states and its
logits is verified, not assumed: see `Head`.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from isobit.frame.contract import ContractError, describe
from isobit.frame.rehearsed import is_rehearsed
from isobit.integrations.hf.adapters import adds_tokens, base_of
from isobit.integrations.hf.errors import HFError, needed
from isobit.layers.fsdp import class_of, in_forward
from isobit.layers.linear import DetLinear
from isobit.numerics import Numerics
from isobit.ops.linear_logp.op import linear_logp

#: Arguments that `token_logps` itself passes to the model.
_RESERVED = ("input_ids", "attention_mask", "labels", "logits_to_keep", "use_cache", "return_dict")

#: Names of a factor on logits in configurations of transformers; it is applied before a softcap.
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")

#: Models whose own logits have been compared with the formula from their configuration.
_compared: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@overload
def token_logps(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = ..., *, temperature: float | Tensor = ...,
    vocab_size: int | None = ..., return_entropy: Literal[False] = ...,
    logits_dtype: torch.dtype | None = ..., workspace_bytes: int | None = ...,
    model_inputs: Mapping[str, Any] | None = ..., numerics: str | Numerics | None = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def token_logps(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = ..., **options: Any
) -> tuple[Tensor, Tensor]: ...
def token_logps(  # type: ignore[misc]  # the second overload takes options as they come
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    return_entropy: bool = False,
    logits_dtype: torch.dtype | None = None,
    workspace_bytes: int | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Any:
    """Log-probability of every token after the first, given those before it, in fp32.

    Args:
        model: a causal LM of transformers (a `PreTrainedModel`), or a `PeftModel` of one, with LoRA or other
            adapters of its layers. Tied heads, heads with a bias, and the softcaps and logit factors of its
            configuration are supported. FSDP2 may shard the model, the head with it or separately. A head
            that is not a plain `nn.Linear`, such as one with a LoRA adapter, is refused.
        input_ids: [B, T], int64 or int32.
        attention_mask: [B, T], nonzero at tokens; padding may be on either side. With padding on the left
            pass `position_ids` too, as for the model itself.
        temperature: divides the logits; a number, or fp32 [B, T - 1].
        vocab_size: how many rows of the head are tokens, `len(tokenizer)`. Rows from there on are padding and
            are ignored. None is all rows, as in the model's own logits.
        return_entropy: also return the entropy of each distribution.
        logits_dtype, workspace_bytes, numerics, backend: as for `isobit.linear_logp`.
        model_inputs: other inputs of the model, such as `position_ids`.

    Returns:
        logp [B, T - 1], or (logp, entropy). A value is 0 where the token, or the position before it, is
        padding. Gradients go to all parameters of the model.

    Raises:
        HFError: the model computes its logits in an unknown way.
        ContractError: invalid arguments.

    Example:
        >>> import torch, transformers, isobit
        >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> logp = isobit.integrations.hf.token_logps(model, torch.tensor([[7, 3, 11, 2]]))
        >>> logp.shape
        torch.Size([1, 3])
        >>> (-logp.mean()).backward()
    """
    inputs, outer, model = dict(model_inputs or {}), model, base_of(model)
    _check_inputs(model, input_ids, attention_mask, inputs)
    head, forward = Head(model), model.forward
    mask = None
    if attention_mask is not None:
        mask = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)

    def logps(states: Tensor) -> Any:
        return head.logps(
            states, input_ids[:, 1:], mask=mask, temperature=temperature, vocab_size=vocab_size,
            return_entropy=return_entropy, logits_dtype=logits_dtype, workspace_bytes=workspace_bytes,
            numerics=numerics, backend=backend,
        )  # fmt: skip

    def whole(**given: Any) -> Any:
        return head.run(forward, logps, **given)

    # Inside the model's forward: there FSDP2 has gathered the model's parameters, and it puts its backward
    # hooks on what this returns. A `PeftModel` may be what was sharded.
    result = in_forward(outer, whole, input_ids=input_ids, attention_mask=attention_mask, **inputs)
    if any(x.dtype not in (torch.float32, torch.float64) for x in (result if return_entropy else (result,))):
        raise _refusal(model, "the output_dtype of its mp_policy would round log-probabilities; make it None")
    return result


def _check_inputs(model: Any, input_ids: Any, attention_mask: Any, inputs: dict[str, Any]) -> None:
    if not isinstance(model, needed("transformers", "token_logps").PreTrainedModel):
        if adds_tokens(model):
            raise _refusal(model, "its adapter puts tokens or keys in front of a prompt, which would be lost")
        hint = "; pass model.get_base_model()" if hasattr(model, "get_base_model") else ""
        raise _refusal(model, f"it is not a transformers.PreTrainedModel{hint}")
    if not (isinstance(input_ids, Tensor) and input_ids.ndim == 2 and input_ids.shape[1] >= 2):
        given = describe(input_ids)
        raise ContractError(f"token_logps(input_ids: {given}): must be [B, T] with T of at least 2")
    if attention_mask is not None and (
        not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape
    ):
        given = describe(attention_mask)
        raise ContractError(f"token_logps(attention_mask: {given}): must be {list(input_ids.shape)}")
    for name in _RESERVED:
        if name in inputs:
            raise ContractError(f"token_logps(model_inputs: {name!r}): it is set by token_logps itself")


class Head:
    """How a model computes logits from its hidden states:

        logits = softcap * tanh(factor * linear(states) / softcap)

    `linear` is the model's output layer, the numbers are from its configuration. Some models do more than
    that, and no attribute says so. Therefore each call checks that the layer reads exactly the states that
    the backbone returned, and the first call of a model compares the model's logits of the last position with
    this formula, applied to the layer's output (one host sync)."""

    def __init__(self, model: Any) -> None:
        self.model, self.linear = model, model.get_output_embeddings()
        config = model.config.get_text_config(decoder=True)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        factors = [getattr(config, name, None) for name in _FACTORS]
        scaling = getattr(config, "logits_scaling", None)
        if scaling is not None:  # a divisor in Granite models, a factor in HyperCLOVA X
            factors.append(scaling if config.model_type.startswith("hyperclovax") else 1.0 / scaling)
        self.factor = next((x for x in factors if x not in (None, 1.0)), None)
        reason = self._why_not()
        if reason is not None:
            raise _refusal(model, reason)

    def _why_not(self) -> str | None:
        model, linear = self.model, self.linear
        if model.config.is_encoder_decoder:
            return "it has an encoder in addition to its decoder"
        if model.base_model is model:
            return "it has no backbone of its own"
        if linear is None:
            return "it has no output layer"
        if class_of(linear) not in (nn.Linear, DetLinear):
            kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
            return (
                f"its head is a {kind}, not a torch.nn.Linear; what an adapter or a wrapper adds would be "
                "lost: merge the adapter, or leave the head out of what it adapts"
            )
        if "forward" in vars(linear):
            return "the forward of its head was replaced on the object"
        hooks = (*linear._forward_hooks.values(), *linear._forward_pre_hooks.values())
        if not all(map(_is_of_fsdp, hooks)):
            return "its head has hooks, which would get other inputs and outputs than in a usual call"
        if not isinstance(self.factor, float | int | None):
            return f"its configuration has {self.factor!r} for a factor of logits"
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            return "its forward has no logits_to_keep, so it makes logits of every position"
        return None

    def logps(self, states: Tensor, token_ids: Tensor, **options: Any) -> Any:
        """`linear_logp` of tokens after these hidden states, with the model's head."""
        weight, bias, kind = self.linear.weight, self.linear.bias, states.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)  # the head would compute in this dtype
            states, weight = states.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        heads = {"bias": bias, "softcap": self.softcap, "logit_scale": self.factor}
        return linear_logp(states, weight, token_ids, **heads, **options)

    def run(self, forward: Callable[..., Any], logps: Callable[[Tensor], Any], **inputs: Any) -> Any:
        """The result of `logps` for the hidden states that the head reads, at all positions but the last.

        It runs inside the one call that the model makes of its head, after the head's own forward: if the
        head is sharded separately, its weight is gathered only there. `forward` is the model's."""
        linear, own, seen = self.linear, self.linear.forward, dict[str, Any]()

        def backbone(module: nn.Module, args: Any, output: Any) -> None:
            seen["states"] = output[0] if isinstance(output, tuple) else output.last_hidden_state

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
            states: Any = seen.get("states")
            read: Any = args[0] if args else None
            if not (_are_last(read, states) and "made" not in seen):
                reason = "its head does not read the last of the states that its backbone returns"
                raise _refusal(self.model, reason)
            return read, states[:, :-1]

        def both(read: Tensor, states: Tensor) -> tuple[Tensor, Any]:
            seen["made"] = own(read)
            return seen["made"], logps(states)

        def after(module: nn.Module, args: Any, output: tuple[Tensor, Any]) -> Tensor:
            made, seen["logps"] = output
            return made

        hooks = (
            self.model.base_model.register_forward_hook(backbone),
            # Before and after FSDP2's hooks, which gather the weight.
            linear.register_forward_pre_hook(before, prepend=True),
            linear.register_forward_hook(after),
        )
        linear.forward = both
        try:
            logits = forward(**inputs, logits_to_keep=1, use_cache=False, return_dict=True).logits
        finally:
            del linear.forward
            for hook in hooks:
                hook.remove()
        if "logps" not in seen:
            raise _refusal(self.model, "its forward does not call its backbone and its head")
        if self.model not in _compared and not is_rehearsed():
            self._compare(seen["made"].detach(), logits.detach())
            _compared.add(self.model)
        return seen["logps"]

    def _compare(self, made: Tensor, logits: Tensor) -> None:
        expected = made.float() if self.factor is None else made.float() * self.factor
        if self.softcap is not None:
            expected = self.softcap * torch.tanh(expected / self.softcap)
        # The model rounds after each of up to three steps; any other operation makes a far larger difference.
        unit = max(torch.finfo(made.dtype).eps, torch.finfo(logits.dtype).eps)
        largest = float(expected.abs().max())
        distance = float((logits.float() - expected).abs().max())
        if not distance <= 8 * unit * largest:
            raise _refusal(
                self.model, f"its logits differ by up to {distance:.3g} from those computed from its "
                f"head and its configuration (factor {self.factor}, softcap {self.softcap})",
            )  # fmt: skip


def check_head(model: Any) -> Head:
    """The head of a model, after its logits have been compared once with what is computed from it."""
    head = Head(model)
    if model not in _compared:
        with torch.no_grad():
            token_logps(model, torch.zeros((1, 2), dtype=torch.int64, device=model.device))
    return head


def _are_last(read: Any, states: Any) -> bool:
    """Whether these are the states of the last position themselves, and not derived from them."""
    if not (isinstance(read, Tensor) and isinstance(states, Tensor) and read.shape[-2] == 1):
        return False
    return read.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()


def _is_of_fsdp(hook: Any) -> bool:
    """Whether FSDP2 has registered a hook; it may be wrapped."""
    while hook is not None:
        if type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp."):
            return True
        hook = getattr(hook, "__wrapped__", None)
    return False


def _refusal(model: Any, reason: str) -> HFError:
    return HFError(f"isobit.integrations.hf.token_logps(model: {type(model).__name__}): {reason}")
