"""Attention with sinks: it is the softmax with one more logit, layers of GPT-OSS get it, and kernels that are
known to be bad fail."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isobit
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.ops.attention_sink import proof, reference
from isobit.spec.proof import InputOptions

CPU = torch.device("cpu")
PLAIN = "N=7 H=3 D=64 bf16 sinks=fp32"
BITS = "N=40 H=4 D=256 fp32 random"
Run = Callable[..., Any]


def with_a_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The softmax over scores and sink, causal, in fp64."""
    T = q.shape[1]
    z = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    z = z.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    z = torch.cat([z, sinks[None, :, None, None].expand(*z.shape[:3], 1)], -1)
    return torch.einsum("bhts,bshd->bthd", z.softmax(-1)[..., :-1], v)


def test_is_a_softmax_with_one_more_logit() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v, cotangent = (torch.randn(2, 9, 3, 64, generator=gen).bfloat16() for _ in range(4))
    sinks = torch.randn(3, generator=gen)
    ours = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    x, lse = isobit.attention(*ours[:3], return_lse=True)
    out = isobit.attention_sink(x, lse.transpose(-1, -2), ours[3])
    out.backward(cotangent)
    right = [t.double().requires_grad_() for t in (q, k, v, sinks)]
    truth = with_a_column(*right)
    truth.backward(cotangent.double())
    pairs = [(out, truth), *((a.grad, b.grad) for a, b in zip(ours, right, strict=True))]
    for found, expected in pairs:
        assert (found.double() - expected).norm() < 0.006 * expected.norm()


def test_a_token_has_the_bits_of_its_batch() -> None:
    q, k, v = (torch.randn(3, 9, 4, 64).bfloat16() for _ in range(3))
    sinks = torch.randn(4)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x, lse = isobit.attention(q, k, v, return_lse=True)
        return isobit.attention_sink(x, lse.transpose(-1, -2), sinks)

    assert torch.equal(attend(q, k, v)[1:2, 8:], attend(q[1:2, 8:], k[1:2], v[1:2]))


def test_layers_of_gpt_oss_have_their_sinks() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    isobit.integrations.hf.register_attention()
    config = GptOssConfig(
        hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = GptOssAttention(config, 1).bfloat16()  # full attention
    layer.sliding_window = None
    torch.nn.init.normal_(layer.sinks)
    hidden, angles = torch.randn(2, 6, 128).bfloat16(), torch.randn(6, 32)
    cos, sin = (t[None].bfloat16() for t in (angles.cos(), angles.sin()))
    hides = torch.full((6, 6), -torch.inf).triu(1)[None, None].bfloat16()
    with torch.no_grad():
        theirs, _ = layer(hidden, position_embeddings=(cos, sin), attention_mask=hides)
        config._attn_implementation = "isobit"
        ours, _ = layer(hidden, position_embeddings=(cos, sin), attention_mask=None)
        layer.sinks.fill_(-torch.inf)
        without, _ = layer(hidden, position_embeddings=(cos, sin), attention_mask=None)
    assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert (ours - without).norm() > 0.05 * theirs.norm()  # sinks matter here


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(
    forward: Run = reference.attention_sink, backward: Run = reference.attention_sink_bwd
) -> Iterator[None]:
    """`attention_sink` with a backend "candidate" of another class."""
    with ExitStack() as stack:
        for name, function in (("attention_sink", forward), ("attention_sink_bwd", backward)):
            backend = Backend("candidate", function, "test/rows", never, False, never)
            OPS[name].backends.append(backend)
            stack.callback(OPS[name].backends.remove, backend)
        yield


def only(law: str, case: str | None) -> Cell:
    given = Request(ops=("attention_sink",), backends=("candidate",), laws=(law,), device=CPU, case=case)
    (cell,) = run(given)
    return cell


def test_a_correct_kernel_passes() -> None:
    with candidate():
        found = [only("accuracy", PLAIN), only("gradient", PLAIN)]
    assert [(c.law, c.reason) for c in found if c.status != OK] == []


def no_share_for_the_sink(**args: Any) -> Tensor:
    return args["x"].clone()


def without_the_last_element(**args: Any) -> Tensor:
    out = reference.attention_sink(**args)
    out[..., -1:] = 0.0
    return out


def nan_where_no_key_is_seen(**args: Any) -> Tensor:
    share = torch.sigmoid(args["lse"] - args["sinks"].to(args["lse"].dtype))
    share = torch.where(args["lse"] == -torch.inf, torch.nan, share)
    return (args["x"].float() * share[..., None]).to(args["x"].dtype)


@pytest.mark.parametrize("bad", [no_share_for_the_sink, without_the_last_element, nan_where_no_key_is_seen])
def test_a_wrong_result_fails(bad: Run) -> None:
    with candidate(bad):
        assert only("accuracy", PLAIN).status == FAIL


@pytest.mark.parametrize("which", range(3))
def test_a_wrong_gradient_of_one_input_fails(which: int) -> None:
    def bad(**args: Any) -> tuple[Tensor | None, ...]:
        made = list(reference.attention_sink_bwd(**args))
        if made[which] is not None:
            made[which] = 1.01 * made[which]
        return tuple(made)

    with candidate(backward=bad):
        assert only("gradient", PLAIN).status == FAIL


def depends_on_the_batch(**args: Any) -> tuple[Tensor | None, ...]:
    """Sums the elements of a head in an order that depends on the number of rows."""
    made = list(reference.attention_sink_bwd(**args))
    if made[1] is not None:
        order = 1 if len(args["x"]) % 2 else -1
        x, g = (args[n].float()[..., ::1].roll(order, -1) for n in ("x", "dout"))
        dot = torch.zeros_like(args["lse"])
        for d in range(x.shape[-1]):
            dot = dot + x[..., d] * g[..., d]
        s = torch.sigmoid(args["lse"] - args["sinks"].float())
        made[1] = dot * s * (1 - s)
    return tuple(made)


def test_an_order_that_depends_on_the_batch_fails() -> None:
    with candidate(backward=depends_on_the_batch):
        assert only("invariant", BITS).status == FAIL


def test_the_class_in_pytorch_is_the_model_with_its_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels on a GPU are compared with there."""
    case = next(case for case in proof.PROOF.agree_cases if case.dtype == torch.float16)
    args = proof.make(case, CPU, InputOptions())
    cotangents = [torch.randn(args["x"].shape).half()]
    expected = proof.exact(args, cotangents)
    monkeypatch.setattr(torch, "exp", lambda t: torch.from_numpy(np.exp(t.numpy())))
    found = proof.in_torch(args, cotangents)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name][1]) for name in found)


def test_its_control_is_the_same_sum_in_another_order() -> None:
    """Elements that are only moved would differ in any order."""
    control = proof.PROOF.controls[0]  # type: ignore[index]
    case = next(case for case in proof.PROOF.agree_cases if case.dtype == torch.float16)
    args = proof.make(case, CPU, InputOptions())
    dout = torch.randn(args["x"].shape).half()
    before = proof.exact(args, [dout])["gradient:lse"][1]
    after = proof.exact(control.change(args), control.cotangents([dout]))["gradient:lse"][1]
    assert control.of == ("lse",)
    assert 0 < int((before != after).sum()) < before.numel()
    assert torch.allclose(before, after, atol=1e-4)
