"""A fresh process in which a model generates for the first time.

    python benchmarks/suites/warmup/first_use.py '{"model": "llama", "batch": 8, "length": 512}'

The checkout is on PYTHONPATH, and the caller gives it an empty cache of kernels. It prints as JSON for how
many seconds the first tokens waited, and how many kernels were compiled, before them and by them. With
`processes`, `isobit.warmup` comes first, and its seconds count. Loading and computing do not: the same tokens
are generated once more, and that time is subtracted.
"""

import json
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

import isobit
from benchmarks.suites.train_step import LLAMA
from benchmarks.suites.zero_drift import QWEN
from isobit.integrations.hf import zero_drift

MODELS = {"llama": LLAMA, "qwen3": QWEN}
#: New tokens: a prompt, and steps with a cache.
TOKENS = 4


class Compiled:
    """How many kernels were not found in the cache on disk."""

    def __init__(self) -> None:
        self.count = 0
        triton.knobs.compilation.listener = self._looked

    def _looked(self, *, cache_hit: bool, **about: Any) -> None:
        self.count += not cache_hit


def first_use(given: dict[str, Any], device: torch.device) -> dict[str, float]:
    """`wait_s`, the `kernels` that were compiled, and how many of them by the first tokens (`compiled`)."""
    config = replace(MODELS[given["model"]], **given.get("sizes", {}))
    model: Any = config.build(device, torch.bfloat16, 0).eval()
    model.config.use_cache = True
    zero_drift(model)
    ids = torch.ones(given["batch"], given["length"], dtype=torch.int64, device=device)
    waited, kernels = 0.0, 0
    if given.get("processes"):
        warmed = isobit.warmup(
            model, batch=given["batch"], lengths=given["length"], processes=given["processes"], quiet=True
        )
        waited, kernels = warmed.seconds, warmed.kernels
    compiled = Compiled()
    first = _seconds(model, ids)
    compiled_by_tokens = compiled.count
    waited += max(0.0, first - _seconds(model, ids))
    return {"wait_s": waited, "kernels": kernels + compiled_by_tokens, "compiled": compiled_by_tokens}


def _seconds(model: Any, ids: Tensor) -> float:
    begin = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
    )
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(first_use(json.loads(sys.argv[1]), where)))
