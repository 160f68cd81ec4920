"""Calls of isobit's ops as a GPU would get them, for the stub of libcuda: what tests of replays replay."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from isobit.frame.op import OPS
from isobit.spec.proofs import proofs
from replay_layers import LAYERS
from replay_shapes import BF16, BOOL, F32, INT32, INT64, Call, Shape, as_launch, shape, tensors_of
from stub_cuda import Memory, clear, differences_but_for_places, launches, ordinary

# What can be replayed


def _linear(M: int, N: int = 512, K: int = 256, **more: Any) -> Call:
    return Call("det_linear", "hopper", {"x": shape(M, K), "weight": shape(N, K), **more})


def _linear_bwd(**more: Any) -> Call:
    given = {"dy": shape(33, 512), "x": shape(33, 256), "weight": shape(512, 256), "operand_dtype": None}
    given |= {"bias_dtype": BF16, "want_x": True, "want_weight": True, "want_bias": True}
    return Call("det_linear_bwd", "hopper", {**given, **more})


def _head(N: int = 5, D: int = 64, V: int = 600, **more: Any) -> Call:
    given = {"hidden": shape(N, D), "weight": shape(V, D), "token_ids": shape(N, dtype=INT64)}
    return Call("linear_logp", "hopper", {**given, **more})


def _head_bwd(N: int = 5, D: int = 64, V: int = 600, **more: Any) -> Call:
    given = _head(N, D, V).given | dict.fromkeys(
        ("bias", "mask", "entropy", "kept", "kept_base", "dentropy", "dlse", "softcap", "logit_scale",
         "logits_dtype", "vocab_size", "padded_vocab", "workspace_bytes", "dhidden_dtype")
    )  # fmt: skip
    given |= {"stats": shape(2, N, dtype=F32), "dlogp": shape(N, dtype=F32), "ignore_index": -100}
    given |= {"temperature": 1.0, "want_hidden": True, "want_weight": True, "want_bias": False}
    given |= {"grad_dtype": None, "shard": 0, "shards": 8}
    return Call("linear_logp_bwd", "hopper", {**given, **more})


def _kept(N: int, V: int) -> dict[str, Any]:
    rows, tiles = -(-N // 128) * 128, -(-V // 256)
    return {"kept": shape(rows, tiles * 256), "kept_base": shape(rows, tiles, 4, dtype=F32)}


def _chunk(N: int = 300, D: int = 64, V: int = 600, **more: Any) -> Call:
    """Rows of a sweep, behind others that wait: 768 columns, and 512 + 384 + 64 rows of memory."""
    given = _head(N, D, V).given | {"memory": shape(960 * 768), "kept_base": shape(384, 3, 4, dtype=F32)}
    given |= {"queued": shape(1, dtype=INT32), "bias": None, "mask": None, "ignore_index": -100}
    return Call("linear_logp_chunk", "hopper", {**given, "temperature": 1.0, "return_entropy": False, **more})


def _chunk_bwd(N: int = 300, D: int = 64, V: int = 600, **more: Any) -> Call:
    given = _chunk(N, D, V).given | _of_rows(N, "entropy", "dlogp") | {"stats": shape(2, N, dtype=F32)}
    given |= {"queue": shape(960, D), "queue_rows": shape(960, dtype=INT32), "dentropy": None}
    given |= {"dhidden": shape(900, D, dtype=F32), "dweight": shape(V, D, dtype=F32), "dbias": None}
    given |= {"first_row": 300, "kept": True, "first": False, "last": False, "postpone": False}
    del given["return_entropy"]
    return Call("linear_logp_chunk_bwd", "hopper", {**given, **more})


def _logits(N: int, V: int, backend: str = "triton", **more: Any) -> Call:
    return Call("logp", backend, {"logits": shape(N, V), "token_ids": shape(N, dtype=INT64), **more})


def _logits_bwd(N: int, V: int, **more: Any) -> Call:
    given = _logits(N, V).given | dict.fromkeys(("mask", "entropy", "dentropy", "dlse", "padded_vocab"))
    given |= {"stats": shape(2, N, dtype=F32), "dlogp": shape(N, dtype=F32), "ignore_index": -100}
    return Call("logp_bwd", "triton", {**given, "temperature": 0.7, **more})


def _pair(N: int, V: int, backend: str = "triton", **more: Any) -> Call:
    given = {"policy_logits": shape(N, V), "ref_logits": shape(N, V), "token_ids": shape(N, dtype=INT64)}
    return Call("ratio_kl", backend, {**given, "old_logp": shape(N, dtype=F32), "return_stats": True, **more})


def _pair_bwd(N: int, V: int, **more: Any) -> Call:
    given = _logits_bwd(N, V).given | {"slopes": shape(2, N, dtype=F32), "policy_logits": shape(N, V)}
    given |= {"dratio": Shape((N,), F32, expanded=True), "dkl": shape(N, dtype=F32), "dlogp": None}
    own = {k: v for k, v in given.items() if k not in ("logits", "dlse", "padded_vocab")}
    return Call("ratio_kl_bwd", "triton", own | more)


def _norm(N: int, D: int, **more: Any) -> Call:
    return Call("rms_norm", "triton", {"x": shape(N, D), "weight": shape(D), "return_rstd": True, **more})


def _norm_bwd(N: int, D: int, **more: Any) -> Call:
    given = {"h": shape(N, D), "weight": shape(D), "rstd": shape(N, dtype=F32), "dout": shape(N, D)}
    given |= {"dsummed": None, "offset": 0.0, "want_h": True, "want_weight": True}
    return Call("rms_norm_bwd", "triton", {**given, **more})


def _rope(N: int, **more: Any) -> Call:
    given = {"q": shape(N, 4, 64), "k": shape(N, 2, 64), "cos": shape(N, 64), "sin": shape(N, 64)}
    return Call("rope", "triton", {**given, "rounding": "hf", **more})


def _rope_bwd(N: int) -> Call:
    given = {"dq_out": shape(N, 4, 64), "dk_out": shape(N, 2, 64), "cos": shape(N, 64), "sin": shape(N, 64)}
    return Call("rope_bwd", "triton", {**given, "rounding": "vllm"})


def _swiglu(N: int, D: int, **more: Any) -> Call:
    given = {"gate": shape(N, D), "up": shape(N, D)}
    return Call("swiglu_bwd" if more else "swiglu", "triton", {**given, **more})


def _sink(N: int, **more: Any) -> Call:
    given = {"x": shape(N, 4, 64), "lse": shape(N, 4, dtype=F32), "sinks": shape(4)}
    return Call("attention_sink_bwd" if more else "attention_sink", "triton", {**given, **more})


def _loss(B: int, T: int, V: int, backend: str = "triton", **more: Any) -> Call:
    given = {
        "policy_logits": shape(B, T, V),
        "ref_logits": shape(B, T, V),
        "old_logp": shape(B, T, dtype=F32),
    }
    given |= {"token_ids": shape(B, T, dtype=INT64), "mask": shape(B, T, dtype=BOOL), "return_kept": True}
    given |= {"rewards": shape(B, dtype=F32), "samples_per_prompt": 2, "beta": 0.1}
    return Call("grpo_loss", backend, {**given, **more})


def _loss_bwd(B: int, T: int, V: int, backend: str = "triton") -> Call:
    given = {"policy_logits": shape(B, T, V), "token_ids": shape(B, T, dtype=INT64), "mask": None}
    given |= {
        "stats": shape(2, B, T, dtype=F32),
        "slope": shape(B, T, dtype=F32),
        "scale": shape(B, dtype=F32),
    }
    given |= {"dloss": shape(dtype=F32), "ignore_index": -100, "temperature": 0.7}
    return Call("grpo_loss_bwd", backend, given)


def _attention(B: int, T: int, S: int, D: int = 128, backend: str = "hopper", **more: Any) -> Call:
    given = {"q": shape(B, T, 4, D), "k": shape(B, S, 2, D), "v": shape(B, S, 2, D)}
    return Call("attention", backend, {**given, **more})


def _pages(sequences: int) -> dict[str, Any]:
    return {"block_table": shape(sequences, 40, dtype=INT32), "key_end": shape(sequences, dtype=INT32)}


def _experts(backend: str, **more: Any) -> Call:
    given = {"x": shape(70, 64), "weight": shape(5, 96, 64), "offsets": shape(6, dtype=INT64)}
    return Call("det_grouped_linear", backend, {**given, **more})


def _experts_bwd(backend: str) -> Call:
    given = _experts(backend).given | {"dy": shape(70, 96), "bias_dtype": F32}
    return Call(
        "det_grouped_linear_bwd", backend, given | dict.fromkeys(("want_x", "want_weight", "want_bias"), True)
    )


def _experts_dw(backend: str) -> Call:
    given = {"x": shape(70, 64), "dy": shape(70, 96), "offsets": shape(6, dtype=INT64)}
    return Call("det_grouped_dw", backend, given)


def _attention_bwd(B: int, T: int, S: int, D: int = 128, backend: str = "triton", **more: Any) -> Call:
    given: dict[str, Any] = dict.fromkeys(
        ("dlse", "scale", "window", "softcap", "key_start", "key_end", "cu_seqlens_q", "cu_seqlens_k",
         "block_table")
    )  # fmt: skip
    given |= _attention(B, T, S, D).given | {"causal": True, "want_q": True, "want_k": True, "want_v": True}
    given |= {"out": shape(B, T, 4, D), "dout": shape(B, T, 4, D), "lse": shape(B, 4, T, dtype=F32)}
    return Call("attention_bwd", backend, {**given, **more})


def _states(backend: str) -> Call:
    """The backward of a gated delta rule: a chunk and a part of one, from a state on."""
    given = {name: shape(1, 66, 2, 64) for name in ("q", "k", "w", "do", "dv")}
    given |= {"g": shape(1, 66, 2, dtype=F32), "scale": 0.1}
    given |= {name: shape(1, 2, 64, 64, dtype=F32) for name in ("h0", "dht")}
    return Call("chunk_gated_delta_rule_bwd_dhu", backend, given)


def _of_rows(N: int, *names: str) -> dict[str, Any]:
    return {name: shape(N, dtype=F32) for name in names}


_ALL: dict[str, Any] = dict.fromkeys(("return_entropy", "return_lse", "return_stats"), True)
_MANY = 16 * 132  # rows from which on a program of logp walks a row: 16 for each SM

CALLS = {
    "linear, few tokens": _linear(33),
    "linear, one token": _linear(1),
    "linear, many tokens": _linear(1100, 1024, 64),
    "linear, bias": _linear(33, bias=shape(512)),
    "linear, many tokens, bias in fp32": _linear(1100, 1024, 64, bias=shape(1024, dtype=F32)),
    "linear, out in fp32": _linear(1100, 1024, 64, out_dtype=F32),
    "linear, sequences": _linear(33).but(x=shape(3, 11, 256)),
    "linear, triton": _linear(33).on("triton"),
    "linear, tree": _linear(1100, 1024, 512).on("hopper-tree8"),
    "linear, tree in parts": _linear(33, 512, 4096, bias=shape(512)).on("hopper-tree8"),
    "linear, tree, triton": _linear(33).on("triton-tree8"),
    "linear backward, tree": _linear_bwd().on("hopper-tree8"),
    "linear backward, tree, triton": _linear_bwd().on("triton-tree8"),
    "linear backward": _linear_bwd(),
    "linear backward, rounded sums": _linear_bwd(operand_dtype=BF16, bias_dtype=None),
    "linear backward, frozen": _linear_bwd(x=None, want_weight=False, want_bias=False, bias_dtype=None),
    "linear backward, triton": _linear_bwd().on("triton"),
    "gemm": Call("det_gemm", "hopper", {"a": shape(3, 40, 64), "b": shape(3, 64, 48)}),
    "gemm, one product": Call("det_gemm", "hopper", {"a": shape(40, 64), "b": shape(64, 48)}),
    "gemm backward, one product": Call("det_gemm_bwd", "hopper", {
        "dc": shape(40, 48), "a": shape(40, 64), "b": shape(64, 48), "want_a": True, "want_b": True,
    }),
    "gemm backward": Call("det_gemm_bwd", "hopper", {
        "dc": shape(3, 40, 48), "a": shape(3, 40, 64), "b": shape(3, 64, 48), "want_a": True, "want_b": True,
    }),
    **{
        f"gemm, {tree}": Call("det_gemm", tree, {"a": shape(3, 40, 64), "b": shape(3, 64, 64)})
        for tree in ("hopper-tree8", "triton-tree8")
    },
    **{
        f"gemm backward, {tree}": Call("det_gemm_bwd", tree, {
            "dc": shape(3, 40, 64), "a": shape(3, 40, 64), "b": shape(3, 64, 64), "want_a": True,
            "want_b": True,
        })
        for tree in ("hopper-tree8", "triton-tree8")
    },
    "gemm_dw": Call("det_gemm_dw", "hopper", {"x": shape(700, 64), "dy": shape(700, 48)}),
    "gemm_dw, on from a start": Call("det_gemm_dw", "hopper", {
        "x": shape(700, 64), "dy": shape(700, 48), "init": shape(48, 64, dtype=F32),
    }),
    "head": _head(),
    "head, many rows": _head(300, V=1100),
    "head, shared splits": _head(5, 1024, 20000),
    "head, mask": _head(mask=shape(5, dtype=BOOL)),
    "head, everything": _head(
        bias=shape(600, dtype=F32), mask=shape(5, dtype=INT64), temperature=shape(5, dtype=F32), **_ALL
    ),
    "head, kept": _head(keep=True, return_stats=True),
    "head backward": _head_bwd(
        bias=shape(600), want_bias=True, mask=shape(5, dtype=BOOL),
        **_of_rows(5, "entropy", "dentropy", "dlse"),
    ),
    "head backward, of a sum": _head_bwd(dlogp=Shape((5,), F32, expanded=True)),
    "head backward, frozen": _head_bwd(want_weight=False),
    "head backward, temperatures of rows": _head_bwd(temperature=shape(5, dtype=F32)),
    "head backward, kept": _head_bwd(**_kept(5, 600)),
    "head backward, padded vocabulary": _head_bwd(vocab_size=500, bias=shape(600, dtype=F32), want_bias=True),
    "head backward, several slabs": _head_bwd(V=1100, workspace_bytes=0),
    "head backward, weight alone": _head_bwd(want_hidden=False),
    "chunk": _chunk(mask=shape(300, dtype=BOOL)),
    "chunk backward": _chunk_bwd(bias=shape(600), dbias=shape(600, dtype=F32)),
    "chunk backward, the last": _chunk_bwd(last=True, mask=shape(300, dtype=BOOL)),
    "chunk backward, in slabs": _chunk_bwd(kept=False, memory=shape(512 * 768 + 960 * 512)),
    "chunk backward, postponed": _chunk_bwd(first=True, last=True, postpone=True, dweight=None),
    "chunk, what was postponed": Call("linear_logp_chunk_dw", "hopper", {
        "memory": shape(448 * 768), "queue": shape(448, 64), "count": shape(1, dtype=INT32),
        "factor": shape(dtype=F32), "vocab": 600,
    }),
    "chunk, rounded": Call("linear_logp_chunk_rounded", "hopper", {
        "sums": shape(300, 64, dtype=F32), "factor": shape(dtype=F32), "dtype": BF16,
    }),
    "logp, few rows": _logits(5, 20000, **_ALL),
    "logp, many rows": _logits(_MANY, 1100, mask=shape(_MANY, dtype=BOOL)),
    "logp, short rows": _logits(5, 1000, temperature=0.7),
    "logp, temperatures of rows": _logits(5, 1000, temperature=shape(5, dtype=F32)),
    "logp backward, temperatures of rows": _logits_bwd(5, 1000, temperature=shape(5, dtype=F32)),
    "ratio_kl, temperatures of rows": _pair(5, 1000, temperature=shape(5, dtype=F32)),
    "grpo_loss, temperatures of rows": _loss(2, 3, 1000, temperature=shape(2, 3, dtype=F32)),
    "logp backward": _logits_bwd(5, 1000, **_of_rows(5, "entropy", "dentropy", "dlse")),
    "logp backward, of a sum": _logits_bwd(
        5, 20000, mask=shape(5, dtype=BOOL), dlogp=Shape((5,), F32, expanded=True)
    ),
    "logp, hopper": _logits(5, 1000, "hopper", **_ALL),
    "ratio_kl, few rows": _pair(5, 20000, return_logp=True, return_entropy=True),
    "ratio_kl, many rows": _pair(_MANY, 1100, mask=shape(_MANY, dtype=BOOL)),
    "ratio_kl, log-probabilities of the reference": _pair(
        5, 1000, ref_logits=None, ref_logp=Shape((5,), F32, expanded=True), return_stats=False
    ),
    "ratio_kl backward, of a sum": _pair_bwd(5, 1000),
    "ratio_kl, hopper": _pair(5, 1000, "hopper", mask=shape(5, dtype=BOOL)),
    "ratio_kl backward, hopper": _pair_bwd(5, 1000).on("hopper"),
    "rms_norm": _norm(33, 256),
    "rms_norm, residual": _norm(5, 2100, residual=shape(5, 2100), return_rstd=False, offset=1.0),
    "rms_norm backward": _norm_bwd(33, 256, dsummed=shape(33, 256)),
    "rms_norm backward, long rows": _norm_bwd(5, 8200),
    "rope": _rope(33),
    "rope backward": _rope_bwd(33),
    "swiglu": _swiglu(33, 1100),
    "swiglu backward": _swiglu(33, 1100, dout=shape(33, 1100), want_gate=True, want_up=True),
    "attention_sink": _sink(33),
    "attention_sink backward": _sink(
        33, dout=shape(33, 4, 64), want_x=True, want_lse=True, want_sinks=True
    ),
    "grpo_loss": _loss(4, 3, 1000),
    "grpo_loss, many rows": _loss(16, 132, 1100, normalizer=shape(dtype=INT64), reduction="sequence_mean"),
    "grpo_loss, boundaries": _loss(
        4, 3, 1000, samples_per_prompt=None, group_boundaries=shape(3, dtype=INT64), return_entropy=True
    ),
    "grpo_loss, nothing optional": _loss(
        4, 3, 1000, ref_logits=None, old_logp=None, mask=None, rewards=None, samples_per_prompt=None,
        beta=0.0, advantages=Shape((4, 3), F32, expanded=True), return_kept=False,
    ),
    "grpo_loss, hopper": _loss(4, 3, 1000, "hopper", rollout_weights=shape(4, 3, dtype=F32)),
    "grpo_loss backward": _loss_bwd(4, 3, 1000),
    "grpo_loss backward, hopper": _loss_bwd(4, 3, 1000, "hopper"),
    "attention": _attention(
        2, 70, 200, 64, key_start=shape(2, dtype=INT32), key_end=shape(2, dtype=INT64), return_lse=True
    ),
    "attention, prefill by triton": _attention(2, 70, 200, 64, "triton", return_lse=True),
    "attention, decoding": _attention(2, 1, 3000, key_end=shape(2, dtype=INT32)),
    "attention, decoding by triton": _attention(
        2, 1, 3000, backend="triton", key_end=shape(2, dtype=INT32)
    ),
    "attention, packed": _attention(1, 300, 300, 64, cu_seqlens_q=shape(4, dtype=INT32)),
    "attention, packed by triton": _attention(
        1, 70, 200, 64, "triton", cu_seqlens_q=shape(4, dtype=INT32), cu_seqlens_k=shape(4, dtype=INT64)
    ),
    "attention, pages": _attention(2, 1, 64, k=shape(90, 64, 2, 128), v=shape(90, 64, 2, 128), **_pages(2)),
    "attention, packed, in pages": _attention(
        1, 9, 64, 64, "triton", cu_seqlens_q=shape(3, dtype=INT32), **_pages(2)
    ),
    "attention backward": _attention_bwd(2, 70, 200, dlse=shape(2, 4, 70, dtype=F32)),
    "attention backward, wide": _attention_bwd(2, 70, 200, 256, "hopper"),
    "attention backward, packed": _attention_bwd(
        1, 70, 70, 64, "hopper", cu_seqlens_q=shape(4, dtype=INT32)
    ),
    "attention backward, hopper": _attention_bwd(2, 70, 200, 64, "hopper", key_end=shape(2, dtype=INT32)),
    **{
        f"attention, softcap on {each}": _attention(2, 70, 200, 64, each, softcap=30.0)
        for each in ("hopper-attn2", "triton-attn2")
    },
    **{
        f"attention backward, softcap on {each}": _attention_bwd(2, 70, 200, 64, each, softcap=30.0)
        for each in ("hopper-attn2", "triton-attn2")
    },
    **{f"experts, {each}": _experts(each, bias=shape(5, 96)) for each in ("hopper", "triton")},
    **{f"experts backward, {each}": _experts_bwd(each) for each in ("hopper", "triton")},
    **{
        f"experts backward without bias, {each}": _experts_bwd(each).but(bias_dtype=None, want_bias=False)
        for each in ("hopper", "triton")
    },
    **{f"experts dw, {each}": _experts_dw(each) for each in ("hopper", "triton")},
    "group_advantages": Call(
        "group_advantages", "triton", {"rewards": shape(8, dtype=F32), "samples_per_prompt": 2}
    ),
    "delta rule": _states("hopper"),
    "delta rule, triton": _states("triton"),
}  # fmt: skip
CALLS |= LAYERS | {
    "head, shards": _head(V=640, padded_vocab=640, **_ALL).on("hopper-8x4"),
    "head backward, shards": _head_bwd(V=640, padded_vocab=640).on("hopper-8x4"),
    "logp, shards": _logits(5, 630, padded_vocab=640, **_ALL).on("triton-8x1"),
    "logp backward, shards": _logits_bwd(5, 640, padded_vocab=640).on("triton-8x1"),
}
CALLS |= {f"{name}, triton": CALLS[name].on("triton") for name in ("gemm", "gemm backward", "gemm_dw")}

#: And what cannot, with the first operator that runs between its launches.
REFUSED = {
    "operand that is rounded": (_linear(33, operand_dtype=BF16).but(x=shape(33, 256, dtype=F32)), "_to_copy"),
    "gradient that is rounded": (_linear_bwd(dy=shape(33, 512, dtype=F32)), "_to_copy"),
    "weight that is rounded": (
        _linear_bwd(operand_dtype=BF16, weight=shape(512, 256, dtype=F32)), "_to_copy",
    ),
    "mask of a stream": (CALLS["gemm_dw"].but(mask=shape(700, dtype=BOOL)), "arange"),
    "sequences of a stream": (CALLS["gemm_dw"].but(cu_seqlens=shape(3, dtype=INT64)), "arange"),
    "no tokens": (_linear(0), "zeros"),
    "head, triton": (_head().on("triton"), "ne"),
    "head backward, triton": (_head_bwd().on("triton"), "ne"),
    "head, shards in triton": (_head(V=640, padded_vocab=640).on("triton-8x4"), "ne"),
    "head backward, shards in triton": (_head_bwd(V=640, padded_vocab=640).on("triton-8x4"), "ne"),
}  # fmt: skip


def without_a_call() -> list[str]:
    """Backends of which calls could be replayed, but there is none above."""
    there = {(call.op, call.backend) for call in (*CALLS.values(), *(call for call, _ in REFUSED.values()))}
    launching = ((op.name, each.name) for op in OPS.values() for each in op.backends if each.launches)
    return [f"{op} on {backend}" for op, backend in launching if (op, backend) not in there]


# Where they run


@contextmanager
def on_hopper() -> Iterator[None]:
    """Ops take tensors of the CPU for those of a Hopper GPU."""
    proofs()  # and with them all kernels: one that is imported below would take itself for interpreted
    with ExitStack() as stack:
        patched = stack.enter_context
        patched(mock.patch("isobit.frame.device.arch_key", lambda device: "sm_90"))
        patched(mock.patch("isobit.frame.device.triton_is_interpreted", lambda: True))
        patched(mock.patch.object(Tensor, "is_cuda", True))
        try:
            yield
        finally:
            for op in OPS.values():
                op.forget()


@contextmanager
def by_entries_alone() -> Iterator[None]:
    """Triton's own ways to a kernel are closed."""
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    closed = AssertionError("this is Triton's way")
    with (
        mock.patch.object(JITFunction, "run", side_effect=closed),
        mock.patch.object(CompiledKernel, "__getitem__", side_effect=closed),
    ):
        yield


class Noted(TorchFunctionMode):
    """Holds all memory that is made inside, so that no two tensors of it share an address. Unlike
    `same_memory` it leaves tensors where they are, and ops do not see it."""

    def __init__(self, given: dict[str, Any]) -> None:
        """Temporary tensors, beside inputs and outputs."""
        super().__init__()
        self._held: dict[int, torch.UntypedStorage] = {}
        self._given = {t.untyped_storage().data_ptr() for t in tensors_of(given)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            self._held[storage.data_ptr()] = storage
        return out

    @property
    def memory(self) -> Memory:
        return Memory([(at, s.nbytes()) for at, s in self._held.items() if at not in self._given])


def differs(call: Call, named: dict[str, Any]) -> dict[str, Any]:
    """How an op's call differs from the ordinary one."""
    clear()
    with Noted(named) as first:
        wanted = call.run(launch=ordinary, **call.bound(named))
    one = [*launches(), as_launch(wanted)]
    clear()
    with Noted(named) as second:
        found = call.declared(**named, backend=call.backend, validate=False)
    other = [*launches(), as_launch(found)]
    return differences_but_for_places(one, first.memory, other, second.memory)
