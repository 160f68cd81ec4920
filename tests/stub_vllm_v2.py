"""The part of `stub_vllm` that is vLLM's V2 model runner: its sampler, and its prompts."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.integrations.vllm import versions as v


class Gathered(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor


def params(temperature: float = 1.0, logprobs: int | None = 0, **other: Any) -> Any:
    """The sampling parameters of a request."""
    values = {
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "logit_bias": None,
        "allowed_token_ids": None, "bad_words": None, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "chosen": [],
    }  # fmt: skip
    return SimpleNamespace(temperature=temperature, logprobs=logprobs, **values | other)


def compute_topk_scores(
    logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, cu_num_logits: Any = None,
    logprob_token_ids_state: Any = None, expanded_idx_mapping: Any = None, max_per_req_token_ids: int = 0,
    logits_mode: bool = False,
) -> Gathered:  # fmt: skip
    others = logits.topk(num_logprobs).indices
    if max_per_req_token_ids:
        others = torch.tensor([logprob_token_ids_state.ids[i] for i in expanded_idx_mapping.tolist()])
    ids = torch.cat((sampled_token_ids[:, None], others), 1)
    values = logits if logits_mode else logits.log_softmax(-1)
    drawn = logits.gather(1, ids[:, :1])
    return Gathered(ids, values.gather(1, ids), (logits >= drawn).sum(1))


class LogprobTokenIdsState:
    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}

    def max_num_token_ids(self, idx_mapping_np: Any) -> int:
        return max(len(self.ids.get(i, ())) for i in idx_mapping_np.tolist())


class SamplingStates:
    def __init__(self) -> None:
        self.given: dict[int, Any] = {}

    def max_num_logprobs(self, idx_mapping_np: Any) -> int:
        wanted = [self.given[i].logprobs for i in idx_mapping_np.tolist()]
        return max(-1 if n is None else n for n in wanted)


class Sampler:
    """Takes the most probable token but two. A temperature and top-k change logits in place."""

    def __init__(self) -> None:
        self.sampling_states, self.logprob_token_ids_state = SamplingStates(), LogprobTokenIdsState()

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.sampling_states.given[req_idx] = sampling_params
        self.logprob_token_ids_state.ids[req_idx] = sampling_params.chosen

    def apply_sampling_params(
        self, logits: Tensor, expanded_idx_mapping: Any, idx_mapping_np: Any, pos: Any, input_ids: Any,
        expanded_local_pos: Any, skip_top_k_top_p: bool = False,
    ) -> Tensor:  # fmt: skip
        self.written = logits.data_ptr()
        for row, i in zip(logits, idx_mapping_np.tolist(), strict=True):
            given = self.sampling_states.given[i]
            row /= given.temperature or 1.0
            if given.top_k > 0:
                row[row < row.topk(given.top_k).values[-1]] = -torch.inf
        return logits

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        places = input_batch.idx_mapping_np
        wanted = self.sampling_states.max_num_logprobs(places)
        chosen = self.logprob_token_ids_state.max_num_token_ids(places)
        processed = self.apply_sampling_params(logits, None, places, None, None, None, skip_top_k_top_p=True)
        sampled, gathered = processed.topk(3).indices[:, 2], None
        if wanted != -1 or chosen:
            gathered = compute_topk_scores(logits, max(wanted, 0), sampled)
        return SimpleNamespace(sampled_token_ids=sampled.view(-1, 1), logprobs_tensors=gathered)


def compute_prompt_logprobs_with_chunking(
    prompt_token_ids: Tensor, prompt_hidden_states: Tensor, logits_fn: Any, num_prompt_logprobs: int,
    logprobs_mode: str = "raw_logprobs",
) -> Gathered:  # fmt: skip
    logits = logits_fn(prompt_hidden_states)
    return compute_topk_scores(logits, num_prompt_logprobs, prompt_token_ids, logits_mode=False)


class PromptLogprobsWorker:
    logprobs_mode = "raw_logprobs"

    def compute_prompt_logprobs(
        self, logits_fn: Any, hidden_states: Tensor, input_batch: Any, all_token_ids: Tensor,
        num_computed_tokens: Any, prompt_lens: Any,
    ) -> Gathered:  # fmt: skip
        return compute_prompt_logprobs_with_chunking(
            all_token_ids, hidden_states, logits_fn, 2, self.logprobs_mode
        )


def runner_class() -> type:
    """A fresh one for each test: isobit replaces its load_model."""

    class GPUModelRunner:
        __module__ = v.GPU_RUNNER_V2

        def __init__(self, vllm_config: Any, model: Any) -> None:
            self.vllm_config, self.given = vllm_config, model

        def load_model(self, load_dummy_weights: bool = False, *args: Any, **kwargs: Any) -> None:
            self.model, self.sampler = self.given, Sampler()
            self.prompt_logprobs_worker = PromptLogprobsWorker()

        def get_model(self) -> Any:
            return self.model

        def profile_run(self) -> None: ...

        def step(self, hidden: Tensor, places: list[int], grammar: str | None = None) -> Any:
            """Of requests in these places of the state."""
            self.logits = self.model.logits(self.model.lm_head, hidden)
            of = {"idx_mapping_np": np.array(places, dtype=np.int32)}
            self.batch = SimpleNamespace(**of, expanded_idx_mapping=torch.tensor(places))
            return self.sample_tokens(grammar).logprobs_tensors

        def sample_tokens(self, grammar_output: str | None) -> Any:
            if grammar_output is not None:
                self.logits[:, ::2] = -torch.inf
            return self.sampler(self.logits, self.batch)

    return GPUModelRunner


def contents() -> dict[str, dict[str, Any]]:
    """Of its modules, by name."""
    return {
        v.GPU_RUNNER_V2: {"GPUModelRunner": runner_class()},
        v.SAMPLER_V2: {"Sampler": Sampler},
        v.STATES_V2: {"SamplingStates": SamplingStates},
        v.LOGPROB_V2: {
            "compute_topk_scores": compute_topk_scores, "LogprobTokenIdsState": LogprobTokenIdsState,
        },
        v.PROMPT_LOGPROB_V2: {
            "PromptLogprobsWorker": PromptLogprobsWorker,
            "compute_prompt_logprobs_with_chunking": compute_prompt_logprobs_with_chunking,
        },
    }  # fmt: skip
