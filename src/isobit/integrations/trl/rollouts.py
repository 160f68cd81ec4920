"""A GRPO trainer of TRL whose rollouts have the bits of its training.

    isobit.integrations.trl.zero_drift(trainer)
    trainer.train()

The trainer generates by transformers' continuous batching, and its model is under `zero_drift`. What TRL does
with rollouts of vLLM is done here with these: the log-probability at which each token was sampled is compared
with that of the trainer, and the difference and the ratio are logged under TRL's names. TRL computes neither
if transformers generates. Nothing else changes in the trainer: no loss is corrected, since the ratio is 1.

Or vLLM generates, in the process of the trainer (`vllm_mode="colocate"`), with isobit inside:

    isobit.integrations.vllm.enable()  # before the trainer makes its engine
    trainer = trl.GRPOTrainer(...)
    isobit.integrations.trl.zero_drift(trainer)

Then TRL itself compares, and its correction multiplies by 1. The engine has the weights that TRL copies into
it at every step.

TRL pads prompts on the left and passes no positions. Those of a prompt then begin behind its padding, while a
rollout begins at 0. Rotary embeddings differ then, and so do bits. So positions are counted from the first
token of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from isobit.integrations import hf
from isobit.integrations.hf.batching import recording
from isobit.integrations.rounding import Rounding
from isobit.integrations.trl.logps import TRLError, enable
from isobit.integrations.vllm.workers import options_of
from isobit.layers.classes import class_given
from isobit.numerics import CHAIN16

DIFFERENCE, RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"

#: Methods of a trainer that are used here.
GENERATES, SCORES = "_generate_single_turn", "_generate_and_score_completions"
COMPUTES = "_get_per_token_logps_and_entropies"

#: An attribute of a trainer that this is on for.
ON = "_isobit_zero_drift"


def zero_drift(
    trainer: Any, *, numerics: Any = None, rounding: Rounding | None = None, lengths: int | Sequence[int] = ()
) -> "ZeroDriftTrainer":
    """Give rollouts of a GRPO trainer the bits of its training, and log how far they are apart. Call this
    before `trainer.train()`.

    It includes `enable()`, and `isobit.integrations.hf.zero_drift` of the model and, if there is one, of the
    reference. A generation costs one more forward, as in TRL with vLLM, unless TRL computes log-probabilities
    of the old policy anyway.

    Args:
        trainer: a `trl.GRPOTrainer` with a model in bf16 or fp16, and with
            `use_transformers_continuous_batching=True`, or with `use_vllm=True, vllm_mode="colocate"` and an
            engine that was made after `isobit.integrations.vllm.enable()`.
        numerics: numerics classes of linear layers, as for `isobit.integrations.hf.zero_drift`.
        rounding: where the model rounds, as there: "vllm" if the engine has
            `isobit.integrations.vllm.enable(rounding="vllm")`.
        lengths: tokens of prompts with answers, for which kernels are compiled in parallel beforehand, as by
            `isobit.warmup` with the trainer's batch. Kernels for pages of a cache are compiled when the first
            answers are generated.

    Returns:
        An object whose `disable()` restores the trainer and its model; the end of a with-block does so too.

    Raises:
        TRLError: the trainer generates in another way, or is another one.
        HFError: the model cannot be served.

    Example:
        >>> import isobit
        >>> isobit.integrations.trl.zero_drift(trainer)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        {'sampling/importance_sampling_ratio/max': 1.0, ...}
    """
    reason = _why_not(trainer)
    if reason is not None:
        raise TRLError(f"isobit.integrations.trl.zero_drift({type(trainer).__name__}): {reason}")
    return ZeroDriftTrainer(trainer, numerics, rounding, lengths)


def _why_not(trainer: Any) -> str | None:
    if not isinstance(trainer, import_module("trl").GRPOTrainer):
        return "it is not a trl.GRPOTrainer; others take isobit.integrations.hf.zero_drift(trainer.model)"
    lacking = [name for name in (GENERATES, SCORES, COMPUTES, "_metrics") if not hasattr(trainer, name)]
    if lacking:
        return f"TRL {import_module('trl').__version__} has no {lacking[0]}; 1.16 is tested"
    if not trainer.use_vllm and not getattr(trainer, "use_transformers_continuous_batching", False):
        return "set use_transformers_continuous_batching=True in its GRPOConfig"
    if trainer.args.cast_lm_head_to_fp32:
        return "cast_lm_head_to_fp32=True; isobit keeps logits of a 16-bit head in fp32 anyway"
    if vars(trainer).get(ON) is not None:
        return "it is on already; call disable() first"
    return _why_not_vllm(trainer) if trainer.use_vllm else None


def _why_not_vllm(trainer: Any) -> str | None:
    """The same for a trainer that generates by vLLM."""
    if trainer.vllm_mode != "colocate":
        return f"vllm_mode={trainer.vllm_mode!r}: the engine of another process was not tried; set 'colocate'"
    if getattr(trainer.model, "peft_config", None):
        return "with an adapter TRL gives vLLM merged weights, which have other bits than the trainer's"
    llm = trainer.vllm_generation.llm
    options = options_of(llm)
    if options is None:
        return "its engine is without isobit: call isobit.integrations.vllm.enable() before it is made"
    if (options.logprobs, options.logits_dtype) != ("linear_logp", "float32"):
        return "its engine has other log-probabilities: call enable() without logprobs and logits_dtype"
    dtype = llm.llm_engine.model_config.dtype
    if dtype != trainer.model.dtype:
        return f"its engine has {dtype}, as the checkpoint, and the model {trainer.model.dtype}"
    return None


def _check_classes(ours: dict[str, str], engine: Any) -> None:
    """Of linear layers, here and in the engine, which was made before."""
    for name, own in ours.items():
        theirs = class_given(engine.classes, name) or str(CHAIN16)
        if own.partition("/")[0] != theirs.partition("/")[0]:
            raise TRLError(
                f"isobit.integrations.trl.zero_drift: {name} is of class {own}, and of class {theirs} in the "
                "engine: give isobit.integrations.vllm.enable(numerics=...) the same map"
            )


def _check_rounding(ours: str, theirs: str) -> None:
    if ours != theirs:
        raise TRLError(
            f"isobit.integrations.trl.zero_drift: the model has rounding={ours!r}, and the engine "
            f"rounding={theirs!r}: give zero_drift(trainer, rounding={theirs!r})"
        )


class ZeroDriftTrainer:
    """The result of `zero_drift`. `print` it to see by what the model is computed; `disable()`, or the end of
    a with-block, restores the trainer and the model."""

    def __init__(
        self, trainer: Any, numerics: Any, rounding: Rounding | None, lengths: int | Sequence[int] = ()
    ) -> None:
        self.trainer = trainer
        #: Gets the log-probabilities of each generation: by the trainer, by the rollout, and their mask.
        self.heard: Callable[[Tensor, Tensor, Tensor], None] | None = None
        size = trainer.args.per_device_train_batch_size
        with ExitStack() as undo:  # of what was done, if the rest fails
            models = [trainer.model] if trainer.ref_model is None else [trainer.model, trainer.ref_model]
            handles = [
                undo.enter_context(
                    hf.zero_drift(
                        model,
                        numerics=numerics,
                        rounding=rounding,
                        batch=size,
                        lengths=lengths,
                        train=not reference,
                    )
                )
                for reference, model in enumerate(models)
            ]
            self.model: hf.ZeroDrift = handles[0]
            if trainer.use_vllm:
                engine: Any = options_of(trainer.vllm_generation.llm)
                _check_rounding(self.model.rounding, engine.rounding)
                _check_classes(self.model.classes, engine)
            self.logps = undo.enter_context(enable())
            for model in models:
                hook = model.register_forward_pre_hook(with_positions, with_kwargs=True)
                undo.callback(hook.remove)
            if not trainer.use_vllm:
                config = trainer.continuous_batching_config
                undo.callback(setattr, config, "return_logprobs", config.return_logprobs)
                config.return_logprobs = True
            self._own_generate, self._own_score = getattr(trainer, GENERATES), getattr(trainer, SCORES)
            for name, ours in ((ON, self), *self._methods()):
                undo.callback(delattr, trainer, name)
                setattr(trainer, name, ours)
            self._undo = undo.pop_all()

    def _methods(self) -> list[tuple[str, Any]]:
        """Of the trainer, that are replaced. With vLLM TRL has log-probabilities, and compares them itself if
        it corrects the loss."""
        if not self.trainer.use_vllm:
            return [(GENERATES, self._generate), (SCORES, self._score)]
        return [] if self.trainer.vllm_importance_sampling_correction else [(SCORES, self._score)]

    def disable(self) -> None:
        """Restore the trainer and its model. Does nothing the second time."""
        self._undo.close()

    def __enter__(self) -> "ZeroDriftTrainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def __repr__(self) -> str:
        return repr(self.model)

    def _generate(self, *args: Any, **options: Any) -> tuple[list[list[int]], list[list[float]]]:
        """Replaces a method of TRL, and returns log-probabilities too, as that does with vLLM."""
        with recording() as outputs, _without_casts(self.trainer.args):
            tokens, _ = self._own_generate(*args, **options)
        # TRL returns the lists of the outputs themselves.
        logps = {id(each.generated_tokens): each.logprobs for each in outputs}
        if not all(id(each) in logps for each in tokens):
            version = import_module("trl").__version__
            raise TRLError(f"isobit.integrations.trl: TRL {version} copies what is generated; 1.16 is tested")
        return tokens, [logps[id(each)] for each in tokens]

    def _score(self, inputs: Any) -> dict[str, Any]:
        """Replaces a method of TRL. It puts what `_generate` returns into the batch."""
        mode = "train" if self.trainer.model.training else "eval"
        batch = self._own_score(inputs)
        logps = batch.get("old_per_token_logps")
        if logps is None:
            logps = self._logps(batch, mode)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        self._log(mode, (logps - batch["sampling_per_token_logps"])[mask.bool()])
        if self.heard is not None:
            self.heard(logps, batch["sampling_per_token_logps"], mask)
        return batch

    def _logps(self, batch: dict[str, Any], mode: str) -> Tensor:
        """Log-probabilities of the answers, by the trainer."""
        args, answers = self.trainer.args, batch["completion_ids"]
        ids = torch.cat((batch["prompt_ids"], answers), 1)
        mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
        size = args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size
        with torch.no_grad():
            logps, *_ = getattr(self.trainer, COMPUTES)(
                self.trainer.model, ids, mask, answers.shape[1], batch_size=size
            )
        return logps

    def _log(self, mode: str, difference: Tensor) -> None:
        """The metrics that TRL logs with vLLM, of all processes."""
        gather, metrics = self.trainer.accelerator.gather, self.trainer._metrics[mode]
        if difference.numel() == 0:
            difference = difference.new_zeros(1)
        distance, ratio = difference.abs(), difference.exp()
        found = {
            f"{DIFFERENCE}/mean": gather(distance.mean()).mean(),
            f"{DIFFERENCE}/max": gather(distance.max()).max(),
            f"{RATIO}/min": gather(ratio.min()).min(),
            f"{RATIO}/mean": gather(ratio.mean()).mean(),
            f"{RATIO}/max": gather(ratio.max()).max(),
        }
        for name, value in found.items():
            metrics[name].append(value.item())


@contextmanager
def _without_casts(args: Any) -> Iterator[None]:
    """With `bf16=True` TRL casts the whole model before it generates, and never back: the frequencies of its
    rotary embeddings and adapters in fp32 would be rounded for good. The model has 16 bits already."""
    before = {name: getattr(args, name) for name in ("bf16", "fp16")}
    vars(args).update(dict.fromkeys(before, False))
    try:
        yield
    finally:
        vars(args).update(before)


def with_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook of a model: positions from the first token of each row, where none are given."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and kwargs.get("position_ids") is None:
        kwargs = kwargs | {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}
    return args, kwargs
