"""Attention: what it means at its edges, bad calls, the model, and the checker on attention that is known to
be bad."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isobit
from isobit import ContractError
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.ops.attention import model
from isobit.ops.attention.op import ATTN_1_CPU
from isobit.ops.attention.proof.exact import _steps

BF16, F64 = torch.bfloat16, torch.float64


def inputs(
    B: int, T: int, S: int, H: int = 2, KV: int = 1, D: int = 64, dtype: torch.dtype = BF16
) -> list[Tensor]:
    gen = torch.Generator().manual_seed(T + S)
    return [
        torch.randn(shape, generator=gen).to(dtype) for shape in ((B, T, H, D), (B, S, KV, D), (B, S, KV, D))
    ]


# What it means


def test_a_case_by_hand() -> None:
    """Scores 0 and ln 3: the weights are 1/4 and 3/4."""
    q, k, v = (torch.zeros(1, n, 1, 64, dtype=F64) for n in (1, 2, 2))
    q[..., 0], k[0, 1, 0, 0] = 1.0, 2 * math.log(3)
    v[0, 0, 0, 5], v[0, 1, 0, 5] = 8.0, 4.0
    out, lse = isobit.attention(q, k, v, scale=0.5, return_lse=True)
    assert torch.allclose(out[0, 0, 0, 5], torch.tensor(5.0, dtype=F64)) and out[0, 0, 0, 6] == 0
    assert torch.allclose(lse, torch.full_like(lse, math.log(4)))


@pytest.mark.parametrize("backend", ["model", "reference"])
def test_queries_are_aligned_with_the_last_keys(backend: str) -> None:
    q, k, v = inputs(1, 3, 9)
    out = isobit.attention(q, k, v, backend=backend)
    for t in range(3):
        alone = isobit.attention(q[:, t : t + 1], k[:, : 7 + t], v[:, : 7 + t], backend=backend)
        torch.testing.assert_close(out[:, t : t + 1], alone)


@pytest.mark.parametrize("backend", ["model", "reference"])
def test_queries_before_the_first_key(backend: str) -> None:
    """They see no key if attention is causal, and all keys if it is not."""
    q, k, v = inputs(1, 5, 3)
    out, lse = isobit.attention(q, k, v, return_lse=True, backend=backend)
    assert not out[:, :2].any() and (lse[..., :2] == -math.inf).all() and lse[..., 2:].isfinite().all()
    out, lse = isobit.attention(q, k, v, causal=False, return_lse=True, backend=backend)
    alone = isobit.attention(q[:, :1], k, v, causal=False, backend=backend)
    assert lse.isfinite().all() and torch.equal(out[:, :1], alone) and alone.any()


@pytest.mark.parametrize("backend", ["model", "reference"])
def test_a_window_counts_the_query_itself(backend: str) -> None:
    q, k, v = inputs(1, 4, 9)
    out = isobit.attention(q, k, v, window=1, backend=backend)
    assert torch.equal(out, v[:, 5:].repeat_interleave(2, 2))


@pytest.mark.parametrize("backend", ["model", "reference"])
@pytest.mark.parametrize(("T", "S"), [(0, 5), (3, 0), (0, 0)])
def test_empty_inputs_give_empty_outputs(T: int, S: int, backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(2, T, S))
    out, lse = isobit.attention(q, k, v, return_lse=True, backend=backend)
    assert out.shape == q.shape and not out.any() and bool((lse == -math.inf).all())
    for t, g in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert g.shape == t.shape and not g.any()


def test_with_more_queries_than_keys_the_first_queries_see_no_key() -> None:
    q, k, v = inputs(1, 5, 2)
    out, lse = isobit.attention(q, k, v, return_lse=True)
    assert (
        not out[:, :3].any()
        and bool((lse[..., :3] == -math.inf).all())
        and bool(lse[..., 3:].isfinite().all())
    )


def test_the_lse_has_a_gradient_of_its_own() -> None:
    """dq of the sum of lse is the mean key, dv is 0."""
    q, k, v = (t.requires_grad_() for t in inputs(1, 1, 6, 1, 1, dtype=F64))
    _, lse = isobit.attention(q, k, v, scale=1.0, return_lse=True)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    weights = torch.softmax(q[0, 0] @ k[0, :, 0].T, -1)
    torch.testing.assert_close(dq[0, 0], weights @ k[0, :, 0])
    assert not dv.any()


def test_only_wanted_gradients_are_computed() -> None:
    asked = []

    def watched(**args: Any) -> Any:
        asked.append([args[f"want_{name}"] for name in "qkv"])
        return model.attention_bwd(**args)

    q, k, v = inputs(1, 3, 3)
    with candidate(model.attention, watched):
        isobit.attention(q, k.requires_grad_(), v, backend="candidate").sum().backward()
    assert asked == [[False, True, False]] and k.grad is not None


def test_packed_outputs_have_the_form_of_packed_inputs() -> None:
    q, k, v = (t[0] for t in inputs(1, 7, 7))
    bounds = torch.tensor([0, 3, 7])
    out, lse = isobit.attention(q, k, v, cu_seqlens_q=bounds, return_lse=True)
    assert out.shape == (7, 2, 64) and lse.shape == (2, 7)
    assert torch.equal(out[3:][None], isobit.attention(q[None, 3:], k[None, 3:], v[None, 3:]))
    assert isobit.explain("attention", q, k, v, cu_seqlens_q=bounds).numerics == "attn/1/cpu"


# Bad calls


Q, K, V = inputs(2, 3, 32)
TABLE, ONE = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": K[:1], "v": V[:1]}, "k: [1, 32, 1, 64] bf16): B=2 from q, but B=1"),
        ({"v": V[:, :5]}, "v: [2, 5, 1, 64] bf16): S=5 but S=32 from k"),
        ({"k": K.float()}, "k: [2, 32, 1, 64] fp32): dtype must be that of q, bf16"),
        ({"q": Q[:, :, :, :32], "k": K[..., :32], "v": V[..., :32]}, "D must be 64, 80, 96, 128, 256, is 32"),
        ({"k": K.repeat(1, 1, 3, 1), "v": V.repeat(1, 1, 3, 1)}, "H=2 from q must be a multiple of KV=3"),
        ({"q": Q[:, :, :0]}, "q: [2, 3, 0, 64] bf16): H must be at least 1"),
        ({"q": Q.transpose(2, 3).contiguous().transpose(2, 3)}, "last dimension must be contiguous"),
        ({"window": 0}, "window: 0): must be from 1 (a query's own key) to 2^30"),
        ({"window": 4, "causal": False}, "window: 4): needs causal=True"),
        ({"scale": -1.0}, "scale: -1.0): must be a positive number"),
        ({"softcap": 0.0}, "softcap: 0.0): must be a positive number"),
        ({"softcap": math.nan}, "softcap: nan): must be a positive number"),
        ({"key_start": torch.zeros(3, dtype=torch.int32)}, "must have one row a sequence, 2, not 3"),
        ({"key_start": torch.tensor([0.0, 1.0])}, "key_start: [2] fp32): dtype must be int32 or int64"),
        ({"key_end": torch.tensor([3, 33])}, "key_end: [2] int64): 0 <= key_start <= key_end <= 32"),
        ({"key_start": torch.tensor([3, -1])}, "sequence 1 has -1 and 32"),
        ({"key_start": torch.tensor([3, 9]), "key_end": torch.tensor([5, 8])}, "sequence 1 has 9 and 8"),
        ({"cu_seqlens_k": torch.tensor([0, 3])}, "cu_seqlens_k: [2] int64): needs cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, "packed queries are [N, H, D], or B = 1, but B=2"),
        ({"cu_seqlens_q": torch.tensor([0, 3]), "q": Q[:1]}, "packed keys are [N, KV, D], or B = 1, but B=2"),
        ({"cu_seqlens_q": torch.tensor([0, 2]), "q": Q[0], "k": K[0], "v": V[0]},
         "must end with the number of queries, 3, not 2"),
        ({"cu_seqlens_q": torch.tensor([0, 3]), "q": Q[0], "k": K[0], "v": V[0]},
         "must end with the number of keys, 32, where cu_seqlens_k is not given"),
        ({"cu_seqlens_q": torch.tensor([0, 3]), "cu_seqlens_k": torch.tensor([0, 1, 32]),
          "q": Q[0], "k": K[0], "v": V[0]}, "cu_seqlens_k: [3] int64): N+1=3 but N+1=2"),
        ({"cu_seqlens_q": torch.tensor([0, 3]), "key_end": ONE, "q": Q[0], "k": K[0], "v": V[0]},
         "key_end: [1] int64): packed keys are bounded by cu_seqlens_k"),
        ({"block_table": TABLE, "k": K[:, :24].contiguous(), "v": V[:, :24].contiguous()},
         "a page must hold a multiple of 16 keys, not 24"),
        ({"block_table": TABLE, "k": K[:0], "v": V[:0], "validate": False}, "needs at least one page"),
        ({"block_table": TABLE - 1}, "block_table: [2, 1] int32): [0, 0]=-1 is no page: there are 2"),
        ({"block_table": TABLE, "q": Q.clone().requires_grad_()}, "keys in pages have no gradient"),
    ],
)  # fmt: skip
def test_bad_calls(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as error:
        isobit.attention(**{"q": Q, "k": K, "v": V} | change)
    assert message in str(error.value)


def test_unused_page_numbers_may_be_invalid() -> None:
    table = torch.tensor([[1, -1], [0, 99]], dtype=torch.int32)
    out = isobit.attention(Q, K, V, block_table=table, key_end=torch.tensor([32, 7]))
    assert torch.equal(out[:1], isobit.attention(Q[:1], K[1:], V[1:]))
    assert torch.equal(out[1:], isobit.attention(Q[1:], K[:1, :7], V[:1, :7]))


# The model


def test_a_fused_multiply_add_rounds_once() -> None:
    gen = np.random.default_rng(0)
    x, y, z = (gen.standard_normal(4000).astype(np.float32) for _ in range(3))
    z[:2000] = -(x * y)[:2000]  # the rest is the rounding error of the product
    z[2000:3000] *= np.float32(2.0) ** gen.integers(-60, 60, 1000).astype(np.float32)
    x[0], y[0], z[0] = 1 + 2**-12, 1 + 2**-12, 2.0**-80  # a tie of the product, but for the summand
    x[1], y[1], z[1] = 1 + 2**-12, 1 + 2**-12, -(2.0**-80)
    fused = model.fused(x, y, z)
    for a, b, c, r in zip(x.tolist(), y.tolist(), z.tolist(), fused.tolist(), strict=True):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        near = np.float32(r)
        gaps = [
            abs(Fraction(float(w)) - exact)
            for w in (np.nextafter(near, -np.inf), near, np.nextafter(near, np.inf))
        ]
        assert gaps[1] == min(gaps), (a, b, c)
    assert fused[0] > fused[1]


def test_the_model_takes_the_steps_of_a_tensor_core() -> None:
    """The order is the same, so with other steps it is as near to the truth, and has other bits."""
    q, k, v = inputs(1, 5, 200)
    args: dict[str, Any] = {"q": q, "k": k, "v": v, "causal": True, "return_lse": True}
    args |= dict.fromkeys(("scale", "window", "softcap", "key_start", "key_end"))
    args |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "block_table"))
    hopper = model.CPU._replace(product=_steps)
    out, lse = model.attention(do=hopper, **args)
    exact, exact_lse = isobit.attention(*(t.double() for t in (q, k, v)), return_lse=True)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-3)
    assert lse is not None
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    plain = model.attention(**args)[1]
    assert plain is not None and not torch.equal(lse, plain)


# Known to be bad

SMALL = "B=2 T=5 S=18 H=4 KV=2 D=64 bf16"
BOTH = "B=2 T=9 S=40 H=2 KV=1 D=80 bf16 bounds=both softcap=8.0 window=11"
ROOM = "B=1 T=4 S=140 H=2 KV=1 D=64 bf16 bounds=room"
PACKED = "B=1 T=30 S=30 H=2 KV=1 D=64 bf16 lengths=3+0+20+7 scale=0.2"
PAGED = "B=2 T=2 S=50 H=2 KV=1 D=64 bf16 page=16"
BITS = "B=3 T=5 S=40 H=2 KV=1 D=64 bf16 bounds=both"
CUTS = "B=2 T=41 S=41 H=4 KV=1 D=64 bf16"
LONG = "B=1 T=1 S=1100 H=8 KV=1 D=64 bf16 scale=1.0"


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


def not_from_pages(args: dict[str, Any]) -> str | None:
    return None if args["block_table"] is None else "no pages"


@contextmanager
def candidate(
    forward: Callable[..., Any], backward: Callable[..., Any], when: Callable[[dict[str, Any]], Any] = never
) -> Iterator[None]:
    """A backend named "candidate" that claims the class of the CPU, so that bit laws apply to it."""
    added = {"attention": forward, "attention_bwd": backward}
    backends = {
        name: Backend("candidate", f, str(ATTN_1_CPU), when, False, never) for name, f in added.items()
    }
    for name, backend in backends.items():
        OPS[name].backends.append(backend)
    try:
        yield
    finally:
        for name, backend in backends.items():
            OPS[name].backends.remove(backend)


def only(
    law: str,
    case: str,
    forward: Callable[..., Any] = model.attention,
    backward: Any = model.attention_bwd,
    when: Callable[[dict[str, Any]], Any] = never,
) -> Cell:
    with candidate(forward, backward, when):
        (cell,) = run(
            Request(
                ops=("attention",),
                backends=("candidate",),
                laws=(law,),
                device=torch.device("cpu"),
                case=case,
            )
        )
    return cell


@pytest.mark.parametrize("case", [CUTS, LONG])
def test_pages_that_a_backend_refuses_are_read_by_another_of_its_class(case: str) -> None:
    """And the rest of the law is still tested, though one of its calls is not served."""
    whole, some = only("agree", case), only("agree", case, when=not_from_pages)
    assert (some.status, some.reason) == ("ok", "") and len(some.outputs) == len(whole.outputs)
    broken = only("agree", case, other_borders_when("key_end"), when=not_from_pages)
    assert broken.status == "FAIL"


def test_a_correct_one_passes() -> None:
    cells = [only(law, case) for case in (SMALL, BOTH, ROOM, PACKED) for law in ("accuracy", "gradient")]
    cells += [only("accuracy", PAGED), only("invariant", BITS), only("agree", CUTS), only("agree", LONG)]
    assert [(c.law, c.case, c.reason) for c in cells if c.status != OK] == []


def zeros(**args: Any) -> Any:
    out, lse = model.attention(**args)
    return torch.zeros_like(out), lse


def whole_groups_only(**args: Any) -> Any:
    """Drops the keys after the last whole group of 16."""
    S = args["k"].shape[1] // 16 * 16
    return model.attention(**args | {n: args[n][:, :S] for n in ("k", "v")}, segment=1024)


def without_maximum(**args: Any) -> Any:
    """exp of the scores without subtracting the maximum."""
    q, k, v = (args[n].float().movedim(2, 1) for n in ("q", "k", "v"))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    T, S = q.shape[2], k.shape[2]
    p = (q @ k.mT * q.shape[-1] ** -0.5).exp() * torch.ones(T, S).tril(S - T)
    return (p @ v / p.sum(-1, keepdim=True)).movedim(1, 2).to(args["q"].dtype), p.sum(-1).log()


def with_values_beyond_the_end(**args: Any) -> Any:
    """Multiplies a probability of 0 by whatever follows the keys."""
    out, lse = model.attention(**args)
    beyond = (args["v"].float() * 0).sum(1, keepdim=True).repeat_interleave(2, 2)
    return (out.float() + beyond).to(out.dtype), lse


def wider_window(**args: Any) -> Any:
    return model.attention(**args | {"window": None if args["window"] is None else args["window"] + 1})


def queries_are_the_first(**args: Any) -> Any:
    """Query t sees t + 1 keys, whatever there is in front."""
    T = args["q"].shape[1]
    return model.attention(**args | {n: args[n][:, :T] for n in ("k", "v")})


def queries_see_one_less(**args: Any) -> Any:
    """Causal without the diagonal, but for the first."""
    S = args["k"].shape[1]
    return model.attention(**args | {n: args[n][:, : S - 1] for n in ("k", "v")})


def as_one_sequence(**args: Any) -> Any:
    return model.attention(**args | {"cu_seqlens_q": None})


def next_page(**args: Any) -> Any:
    return model.attention(**args | {"block_table": args["block_table"].roll(1, 1)})


def heads_by_turns(**args: Any) -> Any:
    """Query head h has KV head h mod KV."""
    H, KV = args["q"].shape[2], args["k"].shape[2]
    order = torch.arange(H).view(-1, KV).T.flatten()
    out, lse = model.attention(**args | {"q": args["q"][:, :, order]})
    back = order.argsort()
    return out[:, :, back], lse[:, back]


def split_by_the_batch(**args: Any) -> Any:
    """Few sequences are split over keys, which moves the borders of segments."""
    return model.attention(**args, segment=1024 if len(args["q"]) > 1 else 16, block=16)


def block_by_the_queries(**args: Any) -> Any:
    """A decoding kernel with other blocks."""
    return model.attention(**args, block=16 if args["q"].shape[1] == 1 else 128)


def from_the_tensors_start(**args: Any) -> Any:
    """Segments counted from the padded tensor's first key."""
    first = 0 if args["key_start"] is None else int(args["key_start"][0]) % 16
    return model.attention(**args, segment=16 if first else 1024, block=16 if first else 128)


def other_borders_when(name: str) -> Callable[..., Any]:
    def run(**args: Any) -> Any:
        return model.attention(**args, segment=32 if args[name] is not None else 1024, block=32)

    return run


def never_in_segments(**args: Any) -> Any:
    """One long segment: with a cache, and without one, the same. The class says otherwise."""
    return model.attention(**args, segment=1 << 20)


@pytest.mark.parametrize(
    ("function", "law", "case"),
    [
        (zeros, "accuracy", SMALL),
        (whole_groups_only, "accuracy", SMALL),
        (without_maximum, "accuracy", SMALL),
        (queries_are_the_first, "accuracy", SMALL),
        (queries_see_one_less, "accuracy", SMALL),
        (heads_by_turns, "accuracy", SMALL),
        (wider_window, "accuracy", BOTH),
        (with_values_beyond_the_end, "accuracy", ROOM),
        (as_one_sequence, "accuracy", PACKED),
        (next_page, "accuracy", PAGED),
        (split_by_the_batch, "invariant", BITS),
        (block_by_the_queries, "agree", CUTS),
        (from_the_tensors_start, "agree", CUTS),
        (other_borders_when("key_end"), "agree", CUTS),
        (other_borders_when("cu_seqlens_q"), "agree", CUTS),
        (other_borders_when("block_table"), "agree", LONG),
        (never_in_segments, "agree", LONG),
    ],
)  # fmt: skip
def test_a_bad_one_fails(function: Callable[..., Any], law: str, case: str) -> None:
    cell = only(law, case, function)
    assert cell.status == FAIL, (cell.status, cell.reason)
    assert "Error" not in cell.reason, cell.reason


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The right gradients, but for one."""

    def run(**args: Any) -> Any:
        gradients = dict(zip("qkv", model.attention_bwd(**args), strict=True))
        gradients[name] = change(gradients[name]).to(args["q"].dtype)
        return tuple(gradients.values())

    return run


def without_dlse(**args: Any) -> Any:
    return model.attention_bwd(**args | {"dlse": None})


def without_delta(**args: Any) -> Any:
    return model.attention_bwd(**args | {"out": torch.zeros_like(args["out"])})


def without_the_bend(**args: Any) -> Any:
    """The slope of the cap is left out."""
    gradients = model.attention_bwd(**args)
    straight = model.attention_bwd(**args | {"softcap": None})
    return straight[0], *gradients[1:]


def one_head_of_a_group(**args: Any) -> Any:
    """dk and dv of the first head alone."""
    dq, _, _ = model.attention_bwd(**args)
    group = args["q"].shape[2] // args["k"].shape[2]
    first = torch.zeros_like(args["dout"])
    first[:, :, ::group] = args["dout"][:, :, ::group]
    return dq, *model.attention_bwd(**args | {"dout": first})[1:]


def keys_outside_are_left_over(**args: Any) -> Any:
    dq, dk, dv = model.attention_bwd(**args)
    return dq, torch.where(args["k"].isnan(), 1.0, dk).to(dk.dtype), dv


@pytest.mark.parametrize(
    ("function", "law", "case"),
    [
        (changed("q", lambda g: g * 1.05), "gradient", SMALL),
        (changed("k", lambda g: g * 1.05), "gradient", SMALL),
        (changed("v", lambda g: g * 1.05), "gradient", SMALL),
        (changed("k", lambda g: g * 8.0), "gradient", SMALL),
        (changed("q", torch.zeros_like), "gradient", SMALL),
        (without_dlse, "gradient", SMALL),
        (without_delta, "gradient", SMALL),
        (one_head_of_a_group, "gradient", SMALL),
        (without_the_bend, "gradient", BOTH),
        (keys_outside_are_left_over, "gradient", ROOM),
        (changed("k", lambda g: g * 1.01 if len(g) > 1 else g), "invariant", BITS),
        (changed("v", lambda g: g * (1.01 if g.shape[1] > 45 else 1.0)), "agree", CUTS),
    ],
)  # fmt: skip
def test_a_bad_gradient_fails(function: Callable[..., Any], law: str, case: str) -> None:
    cell = only(law, case, backward=function)
    assert cell.status == FAIL, (cell.status, cell.reason)
    assert "gradient:" in cell.reason, cell.reason
