"""The sampler of vLLM's V2 model runner, with the log-probabilities of `scores.Scores`.

It draws by one kernel that adds noise to logits, and has kernels of its own for log-probabilities. It is told
that no request wants any, and they are added to what it returns. Filters, penalties and temperatures other
than 0 and 1 change logits in place. Only then are they copied.
"""

from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from isobit.integrations.vllm import versions as v
from isobit.integrations.vllm.scores import Scores, Temperatures


def serve(runner: Any, scores: Scores) -> None:
    _Sampler(runner.sampler, scores)
    _serve_prompts(runner.prompt_logprobs_worker, scores)


class _Sampler:
    """Replaces functions of one engine's sampler."""

    def __init__(self, sampler: Any, scores: Scores) -> None:
        self.sampler, self.scores = sampler, scores
        self.given: dict[int, Any] = {}  # the sampling parameters of requests, by their place in vLLM's state
        self.last: tuple[bytes, Temperatures] | None = None
        self.gather = import_module(v.LOGPROB_V2).compute_topk_scores
        self.sample, self.add, self.apply = (
            type(sampler).__call__,
            sampler.add_request,
            sampler.apply_sampling_params,
        )
        self.most, self.most_chosen = (
            sampler.sampling_states.max_num_logprobs,
            sampler.logprob_token_ids_state.max_num_token_ids,
        )
        # A call looks at the class, not at the object.
        sampler.__class__ = type("Sampler", (type(sampler),), {"__call__": self._as_method()})
        sampler.add_request, sampler.apply_sampling_params = self._add, self._apply
        sampler.sampling_states.max_num_logprobs = lambda places: _NONE
        sampler.logprob_token_ids_state.max_num_token_ids = lambda places: 0

    def _as_method(self) -> Callable[..., Any]:
        def call(sampler: Any, logits: Tensor, input_batch: Any) -> Any:
            return self._sample(logits, input_batch)

        return call

    def _sample(self, logits: Tensor, batch: Any) -> Any:
        """Instead of Sampler.__call__."""
        output = self.sample(self.sampler, logits, batch)
        places = batch.idx_mapping_np
        most, chosen = self.most(places), self.most_chosen(places)
        if most == _NONE and not chosen:
            return output
        ids = output.sampled_token_ids.view(-1)
        gathered = self.gather(
            logits, max(most, 0), ids, None, logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping, max_per_req_token_ids=chosen, logits_mode=True,
        )  # fmt: skip
        temperatures = self._temperatures(places, logits.device)
        output.logprobs_tensors = self.scores.scored(gathered, logits, ids, temperatures)
        return output

    def _add(self, req_idx: int, *more: Any) -> None:
        """Instead of Sampler.add_request; the last argument are the parameters of the request."""
        self.given[req_idx], self.last = more[-1], None
        self.add(req_idx, *more)

    def _apply(
        self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: Any, *more: Any, **options: Any
    ) -> Tensor:
        """Instead of Sampler.apply_sampling_params."""
        if any(map(_changes_logits, map(self.given.get, idx_mapping_np.tolist()))):
            logits = logits.clone()
        result: Tensor = self.apply(logits, expanded_idx_mapping, idx_mapping_np, *more, **options)
        return result

    def _temperatures(self, places: Any, device: torch.device) -> Temperatures:
        key = places.tobytes()
        if self.last is None or self.last[0] != key:
            each = [self.given[i].temperature for i in places.tolist()]
            self.last = key, Temperatures(each, device)
        return self.last[1]


#: vLLM's NO_LOGPROBS.
_NONE = -1


def _changes_logits(params: Any) -> bool:
    """Whether the sampler writes to the logits of a request with these parameters. In dummy runs there is no
    request."""
    return params is not None and not (
        params.temperature in (0.0, 1.0)
        and params.top_k <= 0
        and params.top_p == 1.0
        and params.min_p == 0.0
        and not params.min_tokens
        and not params.logit_bias
        and not params.allowed_token_ids
        and not params.bad_words
        and params.presence_penalty == params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
    )


def _serve_prompts(worker: Any, scores: Scores) -> None:
    """Replace the function that scores the tokens of a prompt, which have temperature 1. The worker calls it
    by its name in a module, which other engines use too: so this engine's has another dictionary of names."""
    method = type(worker).compute_prompt_logprobs
    theirs = method.__globals__["compute_topk_scores"]

    def scored(logits: Tensor, num_logprobs: int, ids: Tensor, *more: Any, **options: Any) -> Any:
        gathered = theirs(logits, num_logprobs, ids, *more, **options | {"logits_mode": True})
        return scores.scored(gathered, logits, ids, Temperatures([1.0], logits.device))

    names = {**method.__globals__, "compute_topk_scores": scored}
    chunks = "compute_prompt_logprobs_with_chunking"
    names[chunks] = _with_names(names[chunks], names)
    worker.compute_prompt_logprobs = _with_names(method, names).__get__(worker)


def _with_names(function: Any, names: dict[str, Any]) -> Any:
    made = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
