"""The sampler of vLLM's V1 model runner, with the log-probabilities of `scores.Scores`.

Its forward is called without a wish for log-probabilities, and these are added to what it returns, so it
takes no log-softmax. It changes fp32 logits in place, and they are needed afterwards. The division by the
temperature, which every sampled batch has, is therefore done out of place, which reads and writes as much.
Only if something else changes them, a penalty for example, they are copied.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.integrations.vllm.scores import GREEDY, Scores, Temperatures


def serve(runner: Any, scores: Scores) -> None:
    _Sampler(runner, scores)


class _Sampler:
    """Replaces functions of one engine's sampler."""

    def __init__(self, runner: Any, scores: Scores) -> None:
        self.runner, self.scores = runner, scores
        self.last: tuple[Any, Temperatures] | None = None
        sampler = runner.sampler
        self.sample, self.gather = sampler.forward, sampler.gather_logprobs
        self.gather_chosen, self.process = (
            sampler.gather_specific_token_logprobs,
            sampler.apply_logits_processors,
        )
        sampler.forward, sampler.gather_logprobs = self._sample, self._of_prompt
        sampler.compute_logprobs = _unchanged
        sampler.apply_logits_processors, sampler.apply_temperature = self._process, _divided
        filters = getattr(sampler, "topk_topp_sampler", None)
        if filters is not None:  # in another mode it takes a log-softmax that nobody reads
            filters.logprobs_mode = "raw_logprobs"

    def _sample(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        """Instead of Sampler.forward."""
        wanted, chosen = sampling_metadata.max_num_logprobs, sampling_metadata.logprob_token_ids
        options = predict_bonus_token, logprobs_mode_override
        if wanted is None and not chosen:
            return self.sample(logits, sampling_metadata, *options)
        none = replace(sampling_metadata, max_num_logprobs=None, logprob_token_ids=None)
        output = self.sample(logits, none, *options)
        ids = output.sampled_token_ids.flatten().long()
        gathered = self.gather_chosen(logits, chosen, ids) if chosen else self.gather(logits, wanted, ids)
        temperatures = self._temperatures(sampling_metadata, logits.device)
        output.logprobs_tensors = self.scores.scored(gathered, logits, ids, temperatures)
        return output

    def _of_prompt(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Instead of Sampler.gather_logprobs, which vLLM calls for the tokens of a prompt, with logits here.
        They have temperature 1, as in vLLM."""
        gathered = self.gather(logprobs, num_logprobs, token_ids)
        return self.scores.scored(gathered, logprobs, token_ids, Temperatures([1.0], logprobs.device))

    def _process(self, logits: Tensor, sampling_metadata: Any, predict_bonus_token: bool) -> Tensor:
        """Instead of Sampler.apply_logits_processors. Logits of another dtype are a copy already."""
        if self.scores.dtype == torch.float32 and _changes_logits(sampling_metadata):
            logits = logits.clone()
        result: Tensor = self.process(logits, sampling_metadata, predict_bonus_token)
        return result

    def _temperatures(self, metadata: Any, device: torch.device) -> Temperatures:
        """vLLM makes new metadata when requests come, go or change places."""
        if self.last is None or self.last[0] is not metadata:
            requests, ids = self.runner.requests, self.runner.input_batch.req_ids
            each = [requests[i].sampling_params.temperature for i in ids]
            self.last = metadata, Temperatures(each, device)
        return self.last[1]


def _unchanged(logits: Tensor) -> Tensor:
    """Instead of Sampler.compute_logprobs: what is gathered from these logits is scored later."""
    return logits


def _divided(logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
    """Instead of Sampler.apply_temperature, which divides in place."""
    if not all_random:
        temp = torch.where(temp < GREEDY, 1.0, temp)
    return logits / temp[:, None]


#: Of vLLM's own processors that are always there: what has an element for each request that uses them.
_USERS = {"LogitBiasLogitsProcessor": "biases", "MinTokensLogitsProcessor": "min_toks"}


def _changes_logits(metadata: Any) -> bool:
    """Whether `apply_logits_processors` would write to logits."""
    return bool(
        metadata.allowed_token_ids_mask is not None
        or metadata.bad_words_token_ids
        or not metadata.no_penalties
        or getattr(metadata, "thinking_budget_state_holder", None) is not None
        or not all(map(_is_idle, metadata.logitsprocs.non_argmax_invariant))
    )


def _is_idle(processor: Any) -> bool:
    users = _USERS.get(type(processor).__name__)
    return users is not None and not getattr(processor, users, True)
