"""Guards what no law states about `rope` and `swiglu`: the functions of transformers themselves, kernels in
the interpreter, tables that are expanded, gradients of one output, messages, and what is timed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit import ContractError, rope, swiglu
from isobit.kernels.host.words import rows_in_words

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


# The functions of transformers


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_bits_of_transformers_and_of_its_autograd(dtype: torch.dtype) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    hidden = draw(2, 9, 64, dtype=dtype)
    cos, sin = Qwen3RotaryEmbedding(config)(hidden, torch.arange(9)[None])
    q, k = (draw(2, heads, 9, 16, dtype=dtype, seed=heads).requires_grad_() for heads in (4, 2))
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    ours = tuple(t.transpose(1, 2) for t in rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin))
    given = [draw(*o.shape, dtype=dtype, seed=7) for o in theirs]
    given[0][0, :, 3] = -0.0
    found = [(*out, *torch.autograd.grad(out, (q, k), given)) for out in (ours, theirs)]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*found, strict=True))
    fused, _ = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rounding="vllm")
    assert torch.equal(fused.transpose(1, 2), theirs[0]) == (dtype == F32)  # 16 bits show the roundings


def test_the_mlp_of_transformers() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    mlp = Qwen3MLP(Qwen3Config(hidden_size=32, intermediate_size=48)).bfloat16()
    x = draw(5, 32, dtype=BF16)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    assert torch.equal(mlp(x), mlp.down_proj(swiglu(gate, up)))
    once = (F.silu(gate.float()) * up.float()).bfloat16()
    assert not torch.equal(swiglu(gate, up), once)


# Kernels


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(in_interpreter(Path(__file__).parent / "rope_calls.py"))
    return found


def test_rope_has_the_bits_of_eager_code(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["rope"]) == 7
    assert {name: counts for name, counts in interpreted["rope"].items() if any(counts)} == {}


def test_swiglu_differs_from_eager_code_by_its_exp_alone(interpreted: dict[str, Any]) -> None:
    """In 16 bits almost nowhere: elsewhere a rounding would be in another place."""
    assert interpreted["swiglu"]["bf16"] < 0.001 and interpreted["swiglu"]["fp16"] < 0.005
    assert interpreted["swiglu"]["fp32"] < 0.6


def words(*tensors: Tensor, offsets: tuple[int, ...] = ()) -> tuple[int | None, list[int], int]:
    inner, _, strides, word = rows_in_words(tensors[0].shape[:-1], tensors, *offsets)
    return inner, strides, word


def test_rows_are_read_in_the_largest_words_that_fit() -> None:
    whole = torch.empty(6, 64, dtype=BF16)
    assert words(whole, offsets=(64,)) == (None, [0, 8], 8)
    assert words(whole, offsets=(64, 12)) == (None, [0, 16], 4)
    assert words(whole.float(), offsets=(64,)) == (None, [0, 16], 4)
    assert words(*torch.empty(6, 66, dtype=BF16).chunk(2, -1), offsets=(33,))[2] == 1
    assert words(torch.empty(3, 5, 64, dtype=BF16)[:, :-1], offsets=(64,)) == (4, [40, 8], 8)


# Shapes and gradients


def test_tables_of_one_sequence_are_expanded() -> None:
    q, k = draw(2, 5, 4, 8), draw(2, 5, 2, 8)
    cos, sin = draw(5, 8, seed=1), draw(5, 8, seed=2)
    whole = rope(q, k, cos.expand(2, 5, 8).clone(), sin.expand(2, 5, 8).clone())
    for tables in ((cos, sin), (cos[None], sin), (cos.expand(2, 5, 8), sin[None])):
        assert all(torch.equal(a, b) for a, b in zip(rope(q, k, *tables), whole, strict=True))
    assert str(isobit.explain("rope", q, k, cos, sin)).startswith("rope: reference (numerics rope/1)")


def test_columns_behind_the_tables_pass_through() -> None:
    q = draw(3, 2, 10)
    out, _ = rope(q, q, draw(3, 4), draw(3, 4))
    assert torch.equal(out[..., 4:], q[..., 4:]) and not torch.equal(out[..., :4], q[..., :4])
    out, _ = rope(q, q[:, :0], draw(3, 0), draw(3, 0))
    assert torch.equal(out, q) and out.data_ptr() != q.data_ptr()


def test_gradients_of_one_output_or_of_one_input() -> None:
    q, k, cos, sin = draw(3, 2, 8), draw(3, 1, 8), draw(3, 8), draw(3, 8)
    q.requires_grad_()
    rope(q, k, cos, sin)[0].sum().backward()
    alone = q.grad
    assert alone is not None and k.grad is None
    k.requires_grad_()
    dq, dk = torch.autograd.grad(rope(q, k, cos, sin)[0].sum(), (q, k))
    assert torch.equal(dq, alone) and not dk.any() and dk.shape == k.shape
    with pytest.raises(ContractError, match="no gradient goes to it; detach"):
        rope(q, k, cos.requires_grad_(), sin)


def test_neither_queries_nor_keys_are_kept() -> None:
    held: list[tuple[int, ...]] = []
    q, k, cos, sin = draw(3, 2, 8).requires_grad_(), draw(3, 1, 8), draw(3, 8), draw(3, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.shape) or t, lambda t: t):  # type: ignore[func-returns-value]
        rope(q, k, cos, sin)
    assert held == [(3, 8), (3, 8)]


# Messages

Q, T = draw(3, 2, 8), draw(3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rope(Q, Q, T[:, :3], T[:, :3]), "rope(cos: [3, 3] fp32): R must be even, and at most D=8"),
        (lambda: rope(Q, Q, T, T[:, :4]), "rope(sin: [3, 4] fp32): R=4 but R=8 from cos"),
        (lambda: rope(Q, Q, T[:2], T), "rope(cos: [2, 8] fp32): leading shape=[2] but"),
        (lambda: rope(Q, Q.bfloat16(), T, T), "rope(k: [3, 2, 8] bf16): dtype must be that of q, fp32"),
        (lambda: rope(Q, Q, T, T.half()), "rope(sin: [3, 8] fp16): dtype must be that of q, fp32"),
        (lambda: rope(Q, Q, T, T, rounding="none"), "rope(rounding: 'none'): must be 'hf' or 'vllm'"),  # type: ignore[arg-type]
        (lambda: swiglu(T, T.half()), "swiglu(up: [3, 8] fp16): dtype must be that of gate, fp32"),
        (lambda: swiglu(T, T[:, :4]), "swiglu(up: [3, 4] fp32): D=4 but D=8 from gate"),
        (
            lambda: swiglu(T[:, ::2], T[:, ::2]),
            "swiglu(gate: [3, 4] fp32): last dimension must be contiguous",
        ),
        (lambda: swiglu(T, T, numerics="swiglu/1"), "swiglu/1"),
    ],
)
def test_messages(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ContractError, match=re.escape(message)):
        call()


# Bench


@pytest.mark.parametrize("op", ["rope", "swiglu"])
def test_what_is_timed(op: str) -> None:
    from isobit.bench.cases import series_of
    from isobit.bench.suites import goals_of
    from isobit.frame.op import known_op

    series, *_ = series_of(known_op(op))
    assert set(series.rivals) == {"eager", "torch.compile", "liger"} and len(goals_of(op)) == 4
    dims = {"N": 1000, "D": 64} if op == "swiglu" else {"B": 10, "T": 100, "H": 6, "G": 2, "D": 8, "R": 8}
    cost = series.cost(dims, BF16)
    assert cost.fwd_bytes == (6 * 64000 if op == "swiglu" else 4 * 64000 + 4 * 8000)
    assert cost.bwd_bytes == (10 * 64000 if op == "swiglu" else cost.fwd_bytes)


def test_no_kernel_contracts_a_product_with_a_sum() -> None:
    """Every launch says so, or nvcc's default would move roundings."""
    from isobit.ops.rope import proof as of_rope
    from isobit.ops.swiglu.proof import packed as of_packed
    from isobit.ops.swiglu.proof import plain as of_swiglu

    said: list[Any] = []
    for proof in (of_rope, of_swiglu, of_packed):
        proof.record(lambda kernel, grid, *args, **options: said.append(options), BF16)
    assert len(said) == 15 and all(options["enable_fp_fusion"] is False for options in said)
    assert all(triton.next_power_of_2(o["TILE"] * o["HALF"]) <= 1024 for o in said if "TILE" in o)
