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
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Temperatures:
    """Of the rows of a batch, as numbers of Python: rounded to fp32 they would give other bits. What the
    device needs of them is copied once for a batch, not at every step."""

    def __init__(self, each: Sequence[float], device: torch.device) -> None:
        self.each, self._device = [t if t >= GREEDY else 1.0 for t in each], device

    @cached_property
    def others(self) -> list[tuple[float, Tensor]]:
        """Each but that of the first row, and which rows have it."""
        _, *others = dict.fromkeys(self.each)
        return [(t, self._copied([u == t for u in self.each])) for t in others]

    @cached_property
    def column(self) -> Tensor:
        """[rows, 1] in fp32."""
        return self._copied(self.each)[:, None]

    def _copied(self, values: Sequence[float]) -> Tensor:
        pinned = self._device.type == "cuda"  # a copy from other memory waits for the device
        return torch.tensor(values, pin_memory=pinned).to(self._device, non_blocking=True)


class Scores:
    """Of one engine. It replaces a function of the model's last layer, which computes logits, and one of the
    runner, which says whether a grammar has changed them."""

    def __init__(
        self, processor: Any, head: Any, logits_dtype: torch.dtype, count: Callable[[str], None]
    ) -> None:
        self.count, self.vocabulary, self.dtype = count, processor.org_vocab_size, logits_dtype
        self.has_grammar = False
        self.numerics, self.stored = _stored(head.weight)
        processor.forward = self._logits

    def watch_grammars(self, runner: Any) -> None:
        theirs = runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            self.has_grammar = grammar_output is not None
            return theirs(grammar_output)

        runner.sample_tokens = sample_tokens

    def _logits(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
        """Instead of LogitsProcessor.forward: logits of the real vocabulary, in fp32 or rounded."""
        self.count("isobit.det_linear")
        source = Source(hidden_states, lm_head.weight, embedding_bias)
        logits = det_linear(*source, out_dtype=self.dtype)
        if logits.shape[-1] != self.vocabulary:
            logits = logits[..., : self.vocabulary]
        setattr(logits, _SOURCE, source)
        return logits

    def scored(self, gathered: Any, logits: Tensor, ids: Tensor, temperatures: Temperatures) -> Any:
        """What vLLM has gathered from logits, with log-probabilities in their place. `ids` are the drawn
        tokens."""
        if len(temperatures.each) not in (1, len(logits)):
            rows, requests = len(logits), len(temperatures.each)
            raise v.refusal(f"{rows} rows of logits for {requests} requests, and not one for each")
        several = gathered.logprobs.shape[1] > 1
        values, lse = self._of(logits, ids, temperatures, several)
        values = values[:, None]
        if several:
            others = gathered.logprobs.float() / temperatures.column - lse[:, None]
            values = torch.where(gathered.logprob_token_ids == ids[:, None], values, others)
        return gathered._replace(logprobs=values)

    def _of(
        self, logits: Tensor, ids: Tensor, temperatures: Temperatures, with_lse: bool
    ) -> tuple[Tensor, ...]:
        """(logp, lse) of rows; lse only if it is wanted. One call for each temperature: a tensor of them is
        divided by in fp32, and a number in fp64."""
        results = self._at(logits, ids, temperatures.each[0], None, with_lse)
        for one, mask in temperatures.others:
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
