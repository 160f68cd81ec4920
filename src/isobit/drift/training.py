"""The same metrics during training, from tensors that trainers have anyway.

    trainer.add_callback(isobit.drift.trl_callback(trainer, every=10))        TRL's GRPOTrainer
    metrics.update(isobit.drift.verl_metrics(batch, step=step, every=10))     verl, after its old log-probs

No model is run. Both compare log-probabilities at which tokens were sampled with those of the trainer before
its first update, on the device where they are.
"""

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from isobit.drift.metrics import batch_metrics, flat
from isobit.frame.contract import ContractError
from isobit.integrations.trl.rollouts import SCORES, ZeroDriftTrainer

#: Keys of a batch of TRL, and of verl: log-probabilities of the trainer, and of the rollout.
TRL_KEYS = "old_per_token_logps", "sampling_per_token_logps"
VERL_KEYS = "old_log_probs", "rollout_log_probs"


def verl_metrics(batch: Any, *, step: int = 0, every: int = 1) -> dict[str, float]:
    """The metrics of a batch of verl, under names that begin with `drift/`. Put this behind the line of a
    trainer that computes `old_log_probs`:

        metrics.update(isobit.drift.verl_metrics(batch, step=self.global_steps, every=10))

    Args:
        batch: a `DataProto`, or its tensors by name: `old_log_probs`, `rollout_log_probs`, `response_mask`.
        step: the number of the step.
        every: metrics for every so many steps; for the others there are none.

    Returns:
        Numbers by name; empty in a step between.

    Raises:
        ContractError: the batch has no log-probabilities of the rollout, or none of the trainer.

    Example:
        >>> import isobit, torch
        >>> logps = torch.tensor([[-1.0, -2.0]])
        >>> batch = {"old_log_probs": logps, "rollout_log_probs": logps + 0.5, "response_mask": logps < 0}
        >>> numbers = isobit.drift.verl_metrics(batch)
        >>> numbers["drift/differ"], numbers["drift/kl"]
        (2, 0.5)
    """
    _checked(every)
    if step % every:
        return {}
    tensors: Mapping[str, Tensor] = getattr(batch, "batch", batch)
    for key in (*VERL_KEYS, "response_mask"):
        if key not in tensors:
            hint = "actor_rollout_ref.rollout.calculate_log_probs=True" if key == VERL_KEYS[1] else key
            raise ContractError(f"drift(batch): no {key} in it: {hint} is needed")
    training, rollout = (tensors[key] for key in VERL_KEYS)
    if training.data_ptr() == rollout.data_ptr():
        raise ContractError(
            "drift(batch): old_log_probs are those of the rollout: with bypass_mode, verl computes no others"
        )
    return flat(batch_metrics(training, rollout, tensors["response_mask"]))


def trl_callback(trainer: Any, *, every: int = 10) -> Any:
    """A callback that logs the metrics of a GRPO trainer of TRL, under names that begin with `drift/`:

        trainer.add_callback(isobit.drift.trl_callback(trainer, every=10))

    TRL must have both log-probabilities. It has them if vLLM generates, with
    `vllm_importance_sampling_correction` (the default), or under `isobit.integrations.trl.zero_drift`.

    Args:
        trainer: a `trl.GRPOTrainer`.
        every: log the first generation of every so many steps.

    Returns:
        A `transformers.TrainerCallback`. Its `seconds` is the time that all metrics so far have taken.

    Raises:
        ContractError: such a trainer has no log-probabilities of its rollouts.

    Example:
        >>> import isobit
        >>> trainer.add_callback(isobit.drift.trl_callback(trainer))  # doctest: +SKIP
    """
    _checked(every)
    _check_trainer(trainer)

    class Drift(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds, self.next = 0.0, 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            scores = getattr(trainer, SCORES)
            ours = getattr(scores, "__self__", None)
            if isinstance(ours, ZeroDriftTrainer):  # it compares them anyway, and TRL's batch has only one
                ours.heard = self._log
                return

            def scored(inputs: Any) -> Any:
                batch = scores(inputs)
                if all(batch.get(key) is not None for key in TRL_KEYS):
                    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
                    self._log(batch[TRL_KEYS[0]], batch[TRL_KEYS[1]], mask)
                return batch

            setattr(trainer, SCORES, scored)

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            ours = getattr(getattr(trainer, SCORES), "__self__", None)
            if isinstance(ours, ZeroDriftTrainer):
                ours.heard = None
            else:
                vars(trainer).pop(SCORES, None)

        def _log(self, training: Tensor, rollout: Tensor, mask: Tensor) -> None:
            if not trainer.model.training or trainer.state.global_step < self.next:
                return
            start, self.next = time.perf_counter(), trainer.state.global_step + every
            # vLLM gives NaN to a token that it could not score.
            mask = mask.bool() & ~rollout.isnan()
            for name, value in flat(batch_metrics(*self._of_all_processes(training, rollout, mask))).items():
                trainer._metrics["train"][name].append(value)
            self.seconds += time.perf_counter() - start

        @staticmethod
        def _of_all_processes(*tensors: Tensor) -> list[Tensor]:
            accelerator = trainer.accelerator
            if accelerator.num_processes == 1:
                return list(tensors)
            return [accelerator.gather(accelerator.pad_across_processes(x, dim=1)) for x in tensors]

    return Drift()


def _checked(every: int) -> None:
    if type(every) is not int or every < 1:
        raise ContractError(f"drift(every: {every!r}): an integer from 1 on")


def _check_trainer(trainer: Any) -> None:
    if not hasattr(trainer, SCORES) or not hasattr(trainer, "_metrics"):
        raise ContractError(f"drift(trainer: {type(trainer).__name__}): not a GRPOTrainer of TRL 1.16")
    ours = isinstance(getattr(getattr(trainer, SCORES), "__self__", None), ZeroDriftTrainer)
    theirs = getattr(trainer, "use_vllm", False) and trainer.vllm_importance_sampling_correction
    if not ours and not theirs:
        raise ContractError(
            "drift(trainer): it does not compare its rollouts: let vLLM generate, with "
            "vllm_importance_sampling_correction=True, or call isobit.integrations.trl.zero_drift before"
        )
