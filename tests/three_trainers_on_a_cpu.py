"""Log-probabilities of the same tokens by `token_logps`, TRL and verl, of one model under `zero_drift`: a
program for the environment `.parity`.

    PYTHONPATH=src .parity/bin/python tests/three_trainers_on_a_cpu.py

TRL is a real GRPO trainer under `trl.enable()`. verl is the model's own forward as verl's workers patch it,
under `verl.enable()`, by each of the functions that isobit replaces. Both have the sequences in one batch,
with padding; `token_logps` has them one by one, as an engine is compared with it. It prints JSON: how many
log-probabilities of completions have other bits, and of how many, by case.
"""

import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM
from verl.models.transformers import monkey_patch

import isobit
import trl_rollouts_on_a_cpu as rollouts
from head_by_rows import head_by_rows
from isobit.integrations.hf import token_logps, zero_drift

TEMPERATURE, PROMPT, LENGTHS = 0.8, 5, (11, 8, 10)


def sequences() -> tuple[Tensor, Tensor]:
    """(ids, mask): prompts of one length, and completions with padding behind them."""
    ids = torch.randint(0, 16, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return ids.masked_fill(~mask, rollouts.tokenizer().pad_token_id), mask.long()


def by_token_logps(model: Any, ids: Tensor) -> list[Tensor]:
    rows = [ids[i : i + 1, :n] for i, n in enumerate(LENGTHS)]
    return [token_logps(model, row, temperature=TEMPERATURE)[0, PROMPT - 1 :] for row in rows]


def by_trl(trainer: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
    logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, ids.shape[1] - PROMPT)
    return [row[: n - PROMPT] for row, n in zip(logps, LENGTHS, strict=True)]


@contextlib.contextmanager
def patched_by_verl(model: Any, impl: str) -> Iterator[None]:
    before = Qwen2ForCausalLM.forward
    # verl looks for a class that TRL, which is in this environment, had in older versions.
    without_trl = mock.patch.object(monkey_patch, "is_trl_available", lambda: False)
    with contextlib.redirect_stdout(io.StringIO()), without_trl:
        monkey_patch.apply_monkey_patch(
            model, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend=impl
        )
    try:
        assert Qwen2ForCausalLM.forward is not before
        yield
    finally:
        Qwen2ForCausalLM.forward = before


def by_verl(model: Any, ids: Tensor, mask: Tensor, impl: str) -> list[Tensor]:
    """At a position verl has the log-probability of the token after it."""
    with patched_by_verl(model, impl):
        output = model(ids, attention_mask=mask, temperature=TEMPERATURE, return_dict=True)
    logps = output.log_probs.view(ids.shape)
    return [row[PROMPT - 1 : n - 1] for row, n in zip(logps, LENGTHS, strict=True)]


def different(ours: list[Tensor], wanted: list[Tensor]) -> list[int]:
    pairs = [(a.float(), b) for a, b in zip(ours, wanted, strict=True)]
    assert all(a.shape == b.shape and float((a - b).abs().max()) < 0.5 for a, b in pairs)
    return [sum(int((a != b).sum()) for a, b in pairs), sum(b.numel() for _, b in pairs)]


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    ids, mask = sequences()
    with tempfile.TemporaryDirectory() as folder, head_by_rows():
        trainer = rollouts.trainer(folder)
        # TRL gives its model another forward, so verl has a model of its own.
        model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        with zero_drift(model), zero_drift(trainer.model.eval()):
            wanted = by_token_logps(model, ids)
            with isobit.integrations.trl.enable() as on:
                found["TRL"] = by_trl(trainer, ids, mask)
            assert (on.served, on.passed) == (1, {})
            with isobit.integrations.verl.enable() as on:
                for impl in ("torch", "triton"):
                    found[f"verl, {impl}"] = by_verl(model, ids, mask, impl)
            assert (on.served, on.passed) == (2, {})
            found["control: TRL's own"] = by_trl(trainer, ids, mask)
            found["control: verl's own"] = by_verl(model, ids, mask, "torch")
    found = {name: different(logps, wanted) for name, logps in found.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
