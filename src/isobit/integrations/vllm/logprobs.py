"""Log-probabilities of a rollout's tokens: those of `isobit.linear_logp`, at the temperature of each request.

vLLM rounds logits to the dtype of the model, and takes their log-softmax. Here the LM head keeps its fp32
sums, or rounds them if `linear_logp` is asked to. vLLM's sampler draws from them, and after it the
log-probability of each drawn token is computed: from these logits by `isobit.logp` where that has the bits of
`linear_logp` (class lse/1), else from the hidden states. They are of the whole distribution, whatever top-k,
top-p, penalties or a grammar have left of it.

The ids and ranks of a request that wants the k most probable tokens are vLLM's, from the same logits. Their
values are logit / temperature - lse, which may differ from `linear_logp` in the last bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobit.integrations.vllm import versions as v
from isobit.ops.det_gemm import det_linear
from isobit.ops.linear_logp import linear_logp
from isobit.ops.linear_logp.op import forward as linear_logp_op
from isobit.ops.logp import logp

#: What `enable` takes: whose log-probabilities an engine returns, and in which dtype it has logits for them.
KINDS = ("linear_logp", "log_softmax")
DTYPES = {None: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

#: A request with a temperature below this is greedy, and has the log-probabilities of temperature 1, as in
#: vLLM.
GREEDY = 1e-5


class Source(NamedTuple):
    """What logits were computed from; an attribute of their tensor."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def serve(
    runner: Any, model: Any, refused: dict[str, str], logits_dtype: torch.dtype, count: Callable[[str], None]
) -> str | None:
    """Replace the log-probabilities of an engine; or why that cannot be done."""
    processors = [m for m in model.modules() if type(m) is v.find(v.LOGITS, "LogitsProcessor")]
    head = getattr(model, "lm_head", None)
    if len(processors) != 1 or not isinstance(head, nn.Module):
        return "it has no LM head of a known kind"
    for name, module in model.named_modules():
        if module in (head, processors[0]) and name in refused:
            return f"{name} is left to vLLM"
    _LogProbs(runner, processors[0], head, logits_dtype, count)
    return None


class _LogProbs:
    """Of one engine. It replaces functions of three objects: of the model's last layer, which computes
    logits; of the sampler; and of the runner, which says whether a grammar has changed the logits."""

    def __init__(
        self, runner: Any, processor: Any, head: Any, logits_dtype: torch.dtype, count: Callable[[str], None]
    ) -> None:
        self.runner, self.count, self.vocabulary = runner, count, processor.org_vocab_size
        self.dtype = logits_dtype
        self.has_grammar = False
        self.numerics, self.stored = _stored(head.weight)
        sampler = runner.sampler
        self.sample, self.gather = sampler.forward, sampler.gather_logprobs
        self.gather_chosen, self.sample_tokens = sampler.gather_specific_token_logprobs, runner.sample_tokens
        processor.forward, runner.sample_tokens = self._logits, self._sample_tokens
        sampler.forward, sampler.gather_logprobs = self._sample, self._of_prompt
        sampler.compute_logprobs = _unchanged

    def _logits(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
        """Instead of LogitsProcessor.forward: logits of the real vocabulary, in fp32 or rounded."""
        self.count("isobit.det_linear")
        source = Source(hidden_states, lm_head.weight, embedding_bias)
        logits = det_linear(*source, out_dtype=self.dtype)
        if logits.shape[-1] != self.vocabulary:
            logits = logits[..., : self.vocabulary]
        setattr(logits, _SOURCE, source)
        return logits

    def _sample_tokens(self, grammar_output: Any) -> Any:
        """Instead of GPUModelRunner.sample_tokens."""
        self.has_grammar = grammar_output is not None
        return self.sample_tokens(grammar_output)

    def _sample(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        """Instead of Sampler.forward. vLLM's own changes fp32 logits, and so gets a copy of them if they are
        needed afterwards. Others it copies itself."""
        wanted, chosen = sampling_metadata.max_num_logprobs, sampling_metadata.logprob_token_ids
        options = predict_bonus_token, logprobs_mode_override
        if wanted is None and not chosen:
            return self.sample(logits, sampling_metadata, *options)
        none = replace(sampling_metadata, max_num_logprobs=None, logprob_token_ids=None)
        own = logits.clone() if self.dtype == torch.float32 else logits
        output = self.sample(own, none, *options)
        ids = output.sampled_token_ids.flatten().long()
        gathered = self.gather_chosen(logits, chosen, ids) if chosen else self.gather(logits, wanted, ids)
        output.logprobs_tensors = self._scored(gathered, logits, ids, self._temperatures(len(logits)))
        return output

    def _of_prompt(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Instead of Sampler.gather_logprobs, which vLLM calls for the tokens of a prompt, with logits here.
        They have temperature 1, as in vLLM."""
        gathered = self.gather(logprobs, num_logprobs, token_ids)
        return self._scored(gathered, logprobs, token_ids, [1.0])

    def _temperatures(self, rows: int) -> list[float]:
        """Of the requests, as numbers of Python: rounded to fp32 they would give other bits."""
        requests, ids = self.runner.requests, self.runner.input_batch.req_ids
        each = [requests[i].sampling_params.temperature for i in ids]
        if len(each) != rows:
            raise v.refusal(f"{rows} rows of logits for {len(each)} requests, and not one for each")
        return [t if t >= GREEDY else 1.0 for t in each]

    def _scored(self, gathered: Any, logits: Tensor, ids: Tensor, temperatures: list[float]) -> Any:
        """What vLLM has gathered, with log-probabilities in place of logits."""
        several = gathered.logprobs.shape[1] > 1
        values, lse = self._of(logits, ids, temperatures, several)
        values = values[:, None]
        if several:
            divisor = torch.tensor(temperatures, device=logits.device)[:, None]
            others = gathered.logprobs.float() / divisor - lse[:, None]
            values = torch.where(gathered.logprob_token_ids == ids[:, None], values, others)
        return gathered._replace(logprobs=values)

    def _of(
        self, logits: Tensor, ids: Tensor, temperatures: Sequence[float], with_lse: bool
    ) -> tuple[Tensor, ...]:
        """(logp, lse) of rows; lse only if it is wanted. One call for each temperature: a tensor of them is
        divided by in fp32, and a number in fp64."""
        first, *rest = dict.fromkeys(temperatures)
        results = self._at(logits, ids, first, None, with_lse)
        for one in rest:
            mask = torch.tensor([t == one for t in temperatures], device=logits.device)
            own = self._at(logits, ids, one, mask, with_lse)
            results = tuple(torch.where(mask, a, b) for a, b in zip(own, results, strict=True))
        return results if with_lse else (*results, results[0])

    def _at(
        self, logits: Tensor, ids: Tensor, temperature: float, mask: Tensor | None, with_lse: bool
    ) -> tuple[Tensor, ...]:
        if self.stored and not self.has_grammar:
            self.count("isobit.logp")
            result: Any = logp(
                logits, ids, mask=mask, temperature=temperature, return_lse=with_lse, numerics=self.numerics
            )
        else:
            self.count("isobit.linear_logp")
            source = getattr(logits, _SOURCE)
            result = linear_logp(
                source.hidden, source.weight, ids, bias=source.bias, mask=mask, temperature=temperature,
                vocab_size=self.vocabulary, return_lse=with_lse,
                logits_dtype=None if self.dtype == torch.float32 else self.dtype,
            )  # fmt: skip
        return result if with_lse else (result,)


_SOURCE = "isobit_source"


def _stored(weight: Tensor) -> tuple[str | None, bool]:
    """(class of `isobit.logp`, whether it has the bits of `linear_logp` on stored logits). On a CPU
    `linear_logp` has no class: there bits of `logp` on the logits of `det_linear` are those of a row."""
    own = linear_logp_op.explain(
        hidden=weight[:1], weight=weight, token_ids=torch.zeros(1, dtype=torch.int64, device=weight.device)
    ).numerics
    return ("lse/1", True) if own == "lse/1" else (None, weight.device.type == "cpu")


def _unchanged(logits: Tensor) -> Tensor:
    """Instead of Sampler.compute_logprobs: what is gathered from these logits is scored later."""
    return logits
