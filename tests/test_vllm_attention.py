"""Attention in vLLM: pages, groups of requests, memory that vLLM gives, and what a graph replays. A stub of
vLLM: `make engines` runs the real one."""

import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
import stub_vllm as stub
from isobit.frame import op as frame_op
from isobit.integrations import vllm
from isobit.integrations.vllm import attention as paged
from isobit.integrations.vllm.groups import groups_of
from isobit.ops.attention import into, kernels_triton, op

PAGE = 16


def served(window: Any = (-1, -1)) -> Any:
    made = paged.Served()
    made.head_size, made.scale, made.sliding_window, made.logits_soft_cap = 64, 0.1, window, 0
    return made


def ints(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch_of(lengths: list[int], queries: list[int]) -> Any:
    """vLLM's description of a batch: the keys of each request, and how many of them are new."""
    starts = ints([sum(queries[:i]) for i in range(len(queries) + 1)])
    width = -(-max(lengths) // PAGE)
    return SimpleNamespace(
        num_reqs=len(lengths), num_actual_tokens=sum(queries), max_query_len=max(queries),
        max_seq_len=max(lengths), query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=ints(lengths), seq_lens_cpu_upper_bound=ints(lengths),
        block_table=torch.arange(len(lengths) * width, dtype=torch.int32).flip(0).view(-1, width),
        causal=True,
    )  # fmt: skip


class Rollout:
    """Requests with random queries, keys and values; keys and values that are not new only in the cache."""

    def __init__(self, lengths: list[int], queries: list[int]) -> None:
        self.batch, self.queries = batch_of(lengths, queries), queries
        self.sequences = [torch.randn(2, n, 1, 64).bfloat16() for n in lengths]
        self.q = torch.randn(sum(queries), 2, 64).bfloat16()
        new = [kv[:, kv.shape[1] - n :] for kv, n in zip(self.sequences, queries, strict=True)]
        self.k, self.v = torch.cat(new, 1)
        pages = int(self.batch.block_table.max()) + 1
        self.cache = torch.full((pages, 1, PAGE, 128), torch.nan).bfloat16()
        for pages_of, (k, v) in zip(self.batch.block_table.tolist(), self.sequences, strict=True):
            for i in range(len(k)):
                self.cache[pages_of[i // PAGE], :, i % PAGE] = torch.cat((k[i], v[i]), -1)

    def run(self, impl: Any, padding: int = 0, **changes: Any) -> Tensor:
        metadata = SimpleNamespace(**vars(self.batch), groups=groups_of(self.batch))
        vars(metadata).update(changes)
        out = torch.full((len(self.q) + padding, 2, 64), 7.0).bfloat16()
        assert impl.forward(None, self.q, self.k, self.v, self.cache, metadata, out) is out
        return out

    def wanted(self, window: int | None = None) -> Tensor:
        """Each request by itself."""
        rows = zip(self.q.split(self.queries), self.sequences, strict=True)
        made = [
            isobit.attention(q[None], k[None], v[None], scale=0.1, window=window)[0] for q, (k, v) in rows
        ]
        return torch.cat(made)


@pytest.mark.parametrize(
    ("given", "window"), [((-1, -1), None), (-1, None), (None, None), ((6, 0), 7), (7, 7)]
)
def test_pages_and_windows(given: Any, window: int | None) -> None:
    rollout = Rollout([20, 9], [3, 5])
    out = rollout.run(served(given), padding=1)
    assert torch.equal(out[:8], rollout.wanted(window)) and (out[8] == 7).all()


def test_other_kinds_of_attention_are_refused() -> None:
    rollout, impl = Rollout([5], [5]), served((6, 0))
    assert not impl.forward(None, rollout.q, rollout.k, rollout.v, None, None, rollout.q.clone()).any()
    rollout.run(impl, sliding_window=(6, 0))  # as vLLM 0.26 says it
    for name, value in (
        ("use_cascade", True), ("causal", False), ("dynamic_causal", torch.ones(2)),
        ("sliding_window", (-1, -1)),
    ):  # fmt: skip
        with pytest.raises(vllm.VLLMError):
            rollout.run(impl, **{name: value})


# Groups


@pytest.mark.parametrize(
    ("lengths", "queries", "kinds"),
    [
        ([20, 5, 33], [1, 1, 1], ["decoding"]),
        ([20, 5, 33, 7, 6], [1, 1, 3, 7, 6], ["decoding", "chunks", "prompts"]),
        ([20, 5, 7], [1, 1, 7], ["decoding", "prompts"]),
        ([20, 33], [1, 4], ["decoding", "chunks"]),
        ([4, 6], [4, 6], ["prompts"]),
        ([4, 6], [3, 1], ["chunks"]),  # not in vLLM's order
        ([1, 3], [1, 3], ["decoding", "prompts"]),  # a prompt of one token
    ],
)
def test_groups(lengths: list[int], queries: list[int], kinds: list[str]) -> None:
    """Each kind in one call, and with the bits of a request alone."""
    rollout, impl, calls = Rollout(lengths, queries), served(), []
    impl.count = calls.append
    groups = groups_of(rollout.batch)
    assert ["prompts" if g.prompts else "chunks" if g.starts is not None else "decoding" for g in groups] == (
        kinds
    )
    tokens = [i for group in groups for i in range(group.tokens.start, group.tokens.stop)]
    assert tokens == list(range(sum(queries)))
    if "prompts" in kinds:  # they read no pages
        for pages in rollout.batch.block_table[groups[-1].requests].tolist():
            rollout.cache[pages] = torch.nan
    assert torch.equal(rollout.run(impl), rollout.wanted())
    assert calls == ["isobit.attention"] * len(kinds)


def test_without_lengths_on_the_host_no_request_is_taken_for_a_prompt() -> None:
    rollout = Rollout([20, 5, 7], [1, 1, 7])
    rollout.batch.seq_lens_cpu_upper_bound = None
    assert [group.prompts for group in groups_of(rollout.batch)] == [False, False]
    rollout.batch.seq_lens_cpu_upper_bound = ints([21, 6, 8])  # not more than
    assert [group.prompts for group in groups_of(rollout.batch)] == [False, False]
    assert torch.equal(rollout.run(served()), rollout.wanted())


def test_a_graph_is_one_call_that_depends_on_no_length() -> None:
    """vLLM captures it for the largest length, with padding, and replays it with others: host code sees the
    same shapes."""
    seen = []
    for lengths, table in (([20, 5, 0, 0], 8), ([64, 64, 64, 64], 8)):
        batch = batch_of([max(1, n) for n in lengths], [1] * 4)
        batch.seq_lens, batch.block_table = ints(lengths), torch.full((4, table), 99, dtype=torch.int32)
        batch.max_seq_len = 128
        (group,) = groups_of(batch)
        seen.append((group.requests, group.tokens, group.starts, group.keys))
    assert seen[0] == seen[1] == (slice(0, 4), slice(0, 4), None, None)


def test_rows_that_are_padding_get_zeros() -> None:
    rollout = Rollout([20, 5, 9], [1, 1, 1])
    rollout.batch.seq_lens[1] = 0
    rollout.batch.block_table[1] = -(1 << 30)
    out = rollout.run(served())
    assert torch.equal(out[[0, 2]], rollout.wanted()[[0, 2]]) and not out[1].any()


# The backend for GPUs


def test_graphs_are_those_of_decoding_and_pages_are_those_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, module in stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    try:
        backend = import_module("isobit.integrations.vllm.flash_attention").Backend
        builder = backend.get_builder_cls()("a spec")
        assert builder._cudagraph_support.name == "UNIFORM_SINGLE_TOKEN_DECODE"
        assert builder.spec == "a spec" and builder.reorder_batch_threshold == 1
        made = builder.build(0, batch_of([20, 5], [1, 5]))
        assert len(made.groups) == 2 and made.schedule is False
        assert [backend.get_preferred_block_size(n) for n in (16, 128)] == [64, 128]
    finally:
        stub.remove()


# Memory that the caller has


@pytest.mark.parametrize("launches", [True, False])
def test_results_are_written_to_the_memory_that_is_given(
    monkeypatch: pytest.MonkeyPatch, launches: bool
) -> None:
    """By a launcher itself, which is chosen once for calls of one form."""
    seen, choices = [], []

    def run(**args: Any) -> Any:
        seen.append(args)
        args.get("out", torch.empty_like(args["q"])).fill_(3.0)
        return torch.full_like(args["q"], 3.0), None

    def choose(*given: Any) -> Any:
        choices.append(given)
        return replace(op.forward.backend_named("model"), run=run, launches=launches)

    monkeypatch.setattr(frame_op, "choose", choose)
    op.forward.forget()
    q, k = torch.randn(2, 3, 2, 64).bfloat16(), torch.randn(2, 9, 1, 64).bfloat16()
    memory = torch.zeros(10, 2, 64).bfloat16()
    out = memory[2:8].view(2, 3, 2, 64)
    for _ in range(2):
        into.attention_into(out, q, k, k, window=4)
    packed = q.view(6, 2, 64)
    into.attention_into(memory[2:8], packed, packed, packed, cu_seqlens_q=ints([0, 6]))
    assert len(choices) == 2 and (out == 3).all() and not memory[:2].any() and not memory[8:].any()
    for args in seen:
        assert (args.pop("out").data_ptr() == out.data_ptr()) if launches else ("out" not in args)
        assert set(args) == {p.name for p in op.forward.own_params} and args["q"].ndim == 4
    assert [args["window"] for args in seen] == [4, 4, None]
    op.forward.forget()


def test_memory_of_another_form_is_refused() -> None:
    q = torch.randn(1, 3, 2, 64).bfloat16()
    for out in (q.float(), q[:, :2], torch.empty(1, 3, 2, 128).bfloat16()[..., ::2]):
        with pytest.raises(
            isobit.ContractError, match=r"attention\(out: .*must be contiguous and like the result"
        ):
            into.attention_into(out, q, q, q)


def test_a_group_that_begins_elsewhere_compiles_nothing() -> None:
    """Its lengths and its table may begin at any multiple of four bytes."""
    for kernel in (kernels_triton.prefill_kernel, kernels_triton.segments_kernel, kernels_triton.fold_kernel):
        bounds = {"key_start", "key_end", "cu_q", "cu_k", "table"} & set(kernel.arg_names)
        assert len(bounds) in (2, 5)
        assert all(param.do_not_specialize for param in kernel.params if param.name in bounds)
