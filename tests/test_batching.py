"""Continuous batching of transformers with models under `zero_drift`, on a CPU: the log-probabilities of what
`generate_batch` samples have the bits of one forward of one row."""

import copy
import logging
import pickle
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

import isobit
from head_by_rows import head_by_rows
from hf_models import V, made
from isobit.integrations.hf import HFError, batching, paged, token_logps, zero_drift
from isobit.integrations.hf.trial import differing

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

NEW, TEMPERATURE = 6, 0.8

#: The last prompt begins with the first two pages of the second.
LENGTHS = (5, 40, 17, 1, 24)


@pytest.fixture(scope="module", autouse=True)
def _quiet_on_a_cpu() -> Iterator[None]:
    logger = logging.getLogger("ContinuousBatchingLogger")
    logger.disabled = True  # it warns of what a CPU lacks
    with head_by_rows():
        yield
    logger.disabled = False


@pytest.fixture(scope="module")
def model() -> Any:
    model = made("Qwen3")
    zero_drift(model)
    return model


def prompts() -> list[list[int]]:
    ids = torch.randint(3, V, (len(LENGTHS), 40), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [row[:length] for row, length in zip(ids, LENGTHS, strict=True)]
    return [*rows, rows[1][:32] + rows[0]]


def settings(**options: Any) -> ContinuousBatchingConfig:
    given = {"page_size": 16, "num_blocks": 48, "max_batch_tokens": 64, "return_logprobs": True, "seed": 0}
    return ContinuousBatchingConfig(**given | options)


def rollouts(
    model: Any, given: list[list[int]], sample: bool = True, new: int = NEW, **options: Any
) -> list[Any]:
    config = GenerationConfig(
        max_new_tokens=new, do_sample=sample, temperature=TEMPERATURE if sample else None, eos_token_id=-1
    )
    found = model.generate_batch(
        given, generation_config=config, continuous_batching_config=settings(**options)
    )
    outputs = [found[name] for name in sorted(found, key=lambda name: int(name.partition("_")[2]))]
    assert all(each.error is None and len(each.generated_tokens) == new for each in outputs)
    return outputs


@torch.no_grad()
def trained(model: Any, output: Any, temperature: float = TEMPERATURE) -> Tensor:
    """Log-probabilities of what was generated, by one forward of its row."""
    ids = torch.tensor([output.prompt_ids + output.generated_tokens])
    return token_logps(model, ids, temperature=temperature)[0, -len(output.generated_tokens) :]


def differ(model: Any, outputs: list[Any], temperature: float = TEMPERATURE) -> int:
    """Of how many tokens the log-probability has other bits."""
    pairs = ((torch.tensor(each.logprobs), trained(model, each, temperature)) for each in outputs)
    return sum(differing(a, b) for a, b in pairs)


class Seen:
    """Counts the calls of attention that read pages in place, those of gathered keys, and their sizes."""

    def __init__(self, **options: Any) -> None:
        self.paged = self.gathered = 0
        self.attention = partial(isobit.attention, **options)

    def __call__(self, q: Tensor, *args: Any, **options: Any) -> Any:
        self.paged += "block_table" in options
        self.gathered += "cu_seqlens_k" in options
        return self.attention(q, *args, **options)


# Bits


@pytest.mark.parametrize(
    ("options", "paged_calls"),
    [({}, True), ({"max_batch_tokens": 16}, True), ({"max_blocks_per_request": 0}, False)],
    ids=["pages", "chunks of prompts", "gathered keys"],
)
def test_rollouts_have_the_bits_of_one_forward(
    model: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], paged_calls: bool
) -> None:
    seen = Seen()
    monkeypatch.setattr(paged, "attention", seen)
    outputs = rollouts(model, prompts(), **options)
    assert (seen.paged > 0) is paged_calls and seen.gathered > 0
    assert differ(model, outputs) == 0
    assert model.config._attn_implementation == "isobit"


def test_tokens_are_those_of_generate_in_any_order(model: Any) -> None:
    given = prompts()
    outputs = rollouts(model, given, sample=False)
    assert differ(model, outputs, temperature=1.0) == 0
    backwards = rollouts(model, given[::-1], sample=False, max_requests_per_batch=2)[::-1]
    for prompt, one, other in zip(given, outputs, backwards, strict=True):
        assert one.prompt_ids == other.prompt_ids == prompt
        assert one.generated_tokens == other.generated_tokens and one.logprobs == other.logprobs
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        assert one.generated_tokens == alone[0, len(prompt) :].tolist()


def test_a_prefix_is_shared_and_changes_no_bit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last prompt begins with two pages of another one, which has been computed before."""
    first, own = set[int](), paged.plan_of

    def plan_of(given: dict[str, Any], cache: Any, padded: bool) -> Any:
        first.update(given["position_ids"][0, given["cu_seq_lens_q"][:-1].long()].tolist())
        return own(given, cache, padded)

    monkeypatch.setattr(paged, "plan_of", plan_of)
    given = prompts()
    outputs = rollouts(model, [given[1], given[-1]], max_batch_tokens=40)
    assert 32 in first and differ(model, outputs) == 0  # of a prompt that continues one in the cache
    first.clear()
    rollouts(model, [given[1], given[-1]], max_batch_tokens=40, allow_block_sharing=False)
    assert 32 not in first


def test_requests_that_wait_and_branch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If pages run out, a request gives its own back and is computed again later. Several answers to one
    prompt share its pages."""
    module = import_module("transformers.generation.continuous_batching.offloading_manager")
    own, waited = module.OffloadingManager.offload_requests, list[bool]()

    def offload(manager: Any) -> bool:
        waited.append(own(manager))
        return waited[-1]

    monkeypatch.setattr(module.OffloadingManager, "offload_requests", offload)
    assert differ(model, rollouts(model, prompts(), new=30, num_blocks=11)) == 0
    assert any(waited)
    config = GenerationConfig(
        max_new_tokens=NEW, do_sample=True, temperature=TEMPERATURE, eos_token_id=-1, num_return_sequences=3
    )
    found = model.generate_batch(prompts()[:2], config, continuous_batching_config=settings())
    assert len(found) == 6 and differ(model, list(found.values())) == 0
    assert len({tuple(each.generated_tokens) for each in found.values()}) > 2


@pytest.mark.parametrize("sizes", [{}, {"max_blocks_per_request": 0}], ids=["pages", "gathered keys"])
def test_room_in_a_graph_changes_no_bit(
    model: Any, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    """A CUDA graph has room for more tokens, requests and keys than there are. This is the same without the
    graph. The keys do not end where the last request ends, which is checked on CPU tensors only."""
    own, seen = batching.Engine.create, Seen(validate=False)

    def create(engine: Any) -> Any:
        processor = own(engine)
        processor.model_runner.pad_inputs = True
        return processor

    monkeypatch.setattr(batching.Engine, "create", create)
    monkeypatch.setattr(paged, "attention", seen)
    outputs = rollouts(
        model,
        prompts()[:5],
        **sizes,
        max_requests_per_batch=8,
        q_padding_interval_size=16,
        kv_padding_interval_size=64,
    )
    assert seen.gathered > 0 and differ(model, outputs) == 0


def test_windows_and_softcaps() -> None:
    """Gemma 2 has layers with a window and others, and softcaps of scores and logits."""
    model = made("Gemma2")
    with zero_drift(model):
        assert differ(model, rollouts(model, prompts(), max_batch_tokens=24)) == 0


@pytest.mark.parametrize("padded", [False, True])
def test_keys_in_a_window_keep_their_place_in_a_segment(padded: bool) -> None:
    """Three requests, a window of 20 keys. Two have dropped keys. A key is its position here."""
    past, queries = torch.tensor([2000, 0, 1500]), torch.tensor([3, 5, 1])
    kept = [range(1981, 2003), range(5), range(1481, 1501)]  # of each request
    gathered = torch.tensor([key for each in kept for key in each])
    starts = torch.cat((torch.zeros(1), queries.cumsum(0))).int()
    ends = torch.tensor([0, 22, 27, 47]).int()
    given = {
        "input_ids": torch.zeros(1, 9), "block_table": None, "read_index": [gathered],
        "position_ids": torch.cat([p + torch.arange(q) for p, q in zip(past, queries, strict=True)])[None],
        "cu_seq_lens_q": starts, "cu_seq_lens_k": {paged.SLIDING: ends},
    }  # fmt: skip
    cache = type("Cache", (), {"cache_allocators": {paged.SLIDING: type("Allocator", (), {"index": 0})}})
    plan = paged.plan_of(given, cache, padded)
    keys = plan.keys[paged.SLIDING]
    assert keys.source is not None and keys.lengths.tolist() == [22, 5, 20]
    moved, bounds = gathered[keys.source].tolist(), keys.ends.tolist()
    for each, start, end in zip(kept, bounds, bounds[1:], strict=False):
        assert moved[end - len(each) : end] == [*each]
        assert (end - start - each[-1] - 1) % paged.SEGMENT == 0  # the last key is where it was
    assert len(bounds) == len(plan.starts) == (5 if padded else 4)


def test_heads_that_attention_does_not_have() -> None:
    model = made("Llama", head_dim=16)
    with zero_drift(model):
        assert differ(model, rollouts(model, prompts()[:3])) == 0


def test_without_isobit_bits_differ(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: attention by torch on the same keys; and transformers' own log-probabilities."""

    def by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> Tensor:
        parts = [
            t.tensor_split(options[name].tolist()[1:-1])
            for t, name in ((q, "cu_seqlens_q"), (k, "cu_seqlens_k"), (v, "cu_seqlens_k"))
        ]
        rows = []
        for one in zip(*parts, strict=True):
            T, S = len(one[0]), len(one[1])
            mask = torch.ones(T, S).tril(S - T).bool()
            heads = (t.transpose(0, 1)[None] for t in one)
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=scale, enable_gqa=True
            )
            rows.append(out[0].transpose(0, 1))
        return torch.cat(rows)

    with monkeypatch.context() as patched:
        patched.setattr(paged, "attention", by_torch)
        assert differ(model, rollouts(model, prompts(), max_blocks_per_request=0)) > 0
    monkeypatch.setattr(batching, "check_head", lambda model: None)
    outputs = rollouts(model, prompts()[:3])
    assert differ(model, outputs) > 0
    close = [torch.tensor(each.logprobs) - trained(model, each) for each in outputs]
    assert all(each.abs().max() < 0.1 for each in close)


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent.parent / "examples" / "continuous_batching.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--requests", "3", "--tokens", "4"])
    assert runpy.run_path(str(path))["main"]() == 0
    *_, as_it_is, without_drift = capsys.readouterr().out.splitlines()
    assert as_it_is.startswith("as it is ")
    assert without_drift.split()[:4] == ["zero_drift", "0", "12", "0.0e+00"]


# On, off, and what is refused


def test_a_manager_can_be_kept_and_a_copy_has_its_own(model: Any) -> None:
    copied, given = copy.deepcopy(model), prompts()[:2]
    assert vars(copied)[batching.MAKES].model() is copied
    loaded = pickle.loads(pickle.dumps(vars(model)[batching.MAKES]))
    with pytest.raises(HFError, match=r"call zero_drift\(model\) again first"):
        loaded()
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    options = {"generation_config": config, "continuous_batching_config": settings()}
    for _ in range(2):
        found = copied.generate_batch(given, **options, persistent_manager=True)
        assert copied.config._attn_implementation == "isobit"
        assert differ(copied, list(found.values()), temperature=1.0) == 0
    assert batching.engine_of(vars(copied)[batching.KEPT]) is not None
    zero_drift(copied).disable()
    assert batching.MAKES not in vars(copied) and batching.KEPT not in vars(copied)
    assert batching.MAKES in vars(model)


def test_a_forward_beside_a_manager_is_refused(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=-1)
    with (
        model.continuous_batching_context_manager(config, continuous_batching_config=settings()),
        pytest.raises(HFError, match="this forward is not one of the manager's: stop the manager first"),
    ):
        model(torch.tensor([[5, 6, 7]]))
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, V)


def test_an_error_in_the_loop_is_raised(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.model.layers[0].self_attn, "attention_dropout", 0.5)
    model.train()
    with pytest.raises(HFError, match=r"dropout=0\.5 of Qwen3Attention of layer 0"):
        monkeypatch.setattr(model.model.layers[0].self_attn, "training", True)
        monkeypatch.setattr(model, "eval", lambda: model)
        rollouts(model, prompts()[:1])
    model.eval()
    assert model.config._attn_implementation == "isobit"


def test_a_cache_that_does_not_fit_leaves_the_model_as_it_was(model: Any) -> None:
    with pytest.raises(MemoryError):
        rollouts(model, prompts()[:1], num_blocks=10**12)
    assert model.config._attn_implementation == "isobit"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"default_compile_level": 1, "max_blocks_per_request": 0}, None),
        ({"varlen_compile_config": CompileConfig()}, "compiled code rounds in other places than eager code"),
        ({"per_request_processors": True}, "return_logprobs needs one temperature for all requests"),
    ],
    ids=["nothing to compile", "compiled", "several temperatures"],
)
def test_refusals(model: Any, options: dict[str, Any], told: str | None) -> None:
    if told is None:
        assert differ(model, rollouts(model, prompts()[:1], **options)) == 0
        return
    with pytest.raises(HFError, match=f"continuous batching of Qwen3ForCausalLM: {told}"):
        rollouts(model, prompts()[:1], **options)
    assert model.config._attn_implementation == "isobit"


def test_models_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Mistral")
    kept = model.init_continuous_batching(
        GenerationConfig(eos_token_id=-1), settings(auto_switch_to_flash=False)
    )
    with zero_drift(model):
        monkeypatch.setattr(model, batching.KEPT, kept, raising=False)
        with pytest.raises(HFError, match="it has a manager from before zero_drift: call destroy_cached"):
            rollouts(model, prompts()[:1])
        monkeypatch.delattr(model, batching.KEPT)
        monkeypatch.delattr("transformers.generation.continuous_batching.cache.ATTN_TYPE_TO_ALLOCATOR")
        with pytest.raises(HFError, match=r"it has sliding windows, of which transformers .* loses keys"):
            rollouts(model, prompts()[:1])
        assert batching.why_not(model.float(), settings()) == (
            "its cache would be torch.float32; cast the model to bf16 or fp16"
        )
