"""The log-probabilities of an engine. `scores` computes them; `sampler_v1` and `sampler_v2` connect it with
the samplers of vLLM's two model runners.

One product of the LM head serves the sampler and the log-probabilities, and nothing waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from isobit.integrations.vllm import sampler_v1, sampler_v2
from isobit.integrations.vllm import versions as v
from isobit.integrations.vllm.scores import Scores


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
    scores = Scores(processors[0], head, logits_dtype, count)
    scores.watch_grammars(runner)
    (sampler_v2 if v.is_v2(runner) else sampler_v1).serve(runner, scores)
    return None
