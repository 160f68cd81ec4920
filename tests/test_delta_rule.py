"""The backward recurrence of delta-rule states: against autograd through the forward, bad calls, and the
checker on recurrences that are known to be bad."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit import ContractError
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.ops.delta_rule import kernels_hopper, kernels_triton, reference
from isobit.ops.delta_rule.kernels_hopper import Buffers
from isobit.ops.delta_rule.op import DHU_TRITON_1

NAME = "chunk_gated_delta_rule_bwd_dhu"
dhu = isobit.chunk_gated_delta_rule_bwd_dhu
F64 = torch.float64


def inputs(
    B: int, T: int, H: int, HV: int, K: int, V: int, mode: str, C: int, v_first: bool
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(T)

    def drawn(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=gen, dtype=F64)

    args: dict[str, Any] = {"q": drawn(B, T, H, K), "k": drawn(B, T, H, K), "w": drawn(B, T, HV, K)}
    args |= {"do": drawn(B, T, HV, V), "dv": drawn(B, T, HV, V)}
    args["g"] = -drawn(B, T, HV).abs() if "g" in mode else None
    args["gk"] = -drawn(B, T, HV, K).abs() if "k" in mode else None
    args["h0"] = args["dht"] = drawn(B, HV, *((V, K) if v_first else (K, V))) if "h" in mode else None
    return args | {"scale": 0.7, "chunk_size": C, "state_v_first": v_first}


def by_autograd(args: dict[str, Any], b: int, exp: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """(dh, dh0, dv2) of one batch element: gradients of a forward that is affine in u and the first state."""
    q, k, w, do, dv = (args[n][b].repeat_interleave(args["w"].shape[2] // args[n].shape[2], 1).movedim(1, 0)
                       for n in ("q", "k", "w", "do", "dv"))  # fmt: skip
    g, gk, C = args["g"], args["gk"], args["chunk_size"]
    HV, T, K = k.shape
    u = torch.zeros_like(dv).requires_grad_()
    first = torch.zeros(HV, K, dv.shape[-1], dtype=F64).requires_grad_()
    state, ends, loss = first, [], torch.zeros((), dtype=F64)
    for s in range(0, T, C):
        e = min(s + C, T)
        v_new = u[:, s:e] - w[:, s:e] @ state
        loss = loss + (dv[:, s:e] * v_new).sum()
        gate, decay = torch.ones(HV, e - s, 1, dtype=F64), torch.zeros(HV, 1, 1, dtype=F64)
        if g is not None:
            own = g[b, s:e].T[..., None]
            gate, decay = exp(own), own[:, -1:]
            v_new_gated = exp(own[:, -1:] - own) * v_new
        else:
            v_new_gated = v_new
        if gk is not None:
            decay = decay + gk[b, e - 1][..., None]
        loss = loss + args["scale"] * (do[:, s:e] * ((gate * q[:, s:e]) @ state)).sum()
        state = exp(decay) * state + k[:, s:e].mT @ v_new_gated
        state.retain_grad()
        ends.append(state)
    if args["dht"] is not None:
        loss = loss + ((args["dht"][b].mT if args["state_v_first"] else args["dht"][b]) * state).sum()
    loss.backward()
    zero = torch.zeros_like(first)
    dh = torch.stack([zero if end.grad is None else end.grad for end in ends])
    dh0 = zero if first.grad is None else first.grad
    if args["state_v_first"]:
        dh, dh0 = dh.mT, dh0.mT
    assert u.grad is not None
    return dh, dh0, u.grad.movedim(0, 1)


@pytest.mark.parametrize("exp2", [True, False])
@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "K", "V", "mode", "C", "v_first"),
    [
        (2, 100, 1, 2, 16, 24, "gh", 64, False),
        (1, 70, 2, 4, 20, 16, "gkh", 32, True),
        (2, 64, 1, 1, 16, 16, "kh", 16, False),
        (1, 33, 1, 3, 16, 8, "", 16, True),
    ],
)
def test_gradients_match_autograd(
    B: int, T: int, H: int, HV: int, K: int, V: int, mode: str, C: int, v_first: bool, exp2: bool
) -> None:
    args = inputs(B, T, H, HV, K, V, mode, C, v_first)
    dh, dh0, dv2 = dhu(**args, use_exp2=exp2)
    for b in range(B):
        wanted = by_autograd(args, b, torch.exp2 if exp2 else torch.exp)
        torch.testing.assert_close(dh[b], wanted[0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dv2[b], wanted[2], rtol=1e-12, atol=1e-13)
        if dh0 is not None:
            torch.testing.assert_close(dh0[b], wanted[1], rtol=1e-12, atol=1e-13)


def test_a_packed_sequence_has_the_result_it_has_alone() -> None:
    args = inputs(1, 62, 1, 2, 16, 8, "g", 16, False)
    bounds, states = torch.tensor([0, 5, 5, 45, 62]), torch.randn(4, 2, 16, 8, dtype=F64)
    whole = dhu(**args | {"h0": states, "dht": states}, cu_seqlens=bounds)
    at = 0
    for s in range(4):
        first, end = bounds[s : s + 2].tolist()
        one = args | {n: args[n][:, first:end] for n in ("q", "k", "w", "do", "dv", "g")}
        one |= {"h0": states[s : s + 1], "dht": states[s : s + 1]}
        dh, dh0, dv2 = dhu(**one)
        assert dh0 is not None and whole[1] is not None
        assert torch.equal(dh, whole[0][:, at : at + dh.shape[1]])
        assert torch.equal(dh0[0], whole[1][s]) and torch.equal(dv2, whole[2][:, first:end])
        at += dh.shape[1]
    assert at == whole[0].shape[1]


def test_an_empty_sequence_passes_its_gradient_on() -> None:
    args = inputs(1, 0, 1, 2, 16, 8, "gh", 16, False)
    dh, dh0, dv2 = dhu(**args)
    assert dh.shape == (1, 0, 2, 16, 8) and dv2.numel() == 0 and dh0 is not None
    assert torch.equal(dh0, args["dht"])
    assert dh0.data_ptr() != args["dht"].data_ptr()  # who adds to a result does not change an argument


def test_older_argument_names_and_arguments_without_effect() -> None:
    args = inputs(1, 20, 1, 1, 16, 8, "h", 16, True)
    del args["state_v_first"]
    old, new = (dhu(**args, **given) for given in ({"transpose_state_layout": True}, {"state_v_first": True}))
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))  # type: ignore[arg-type]
    assert torch.equal(dhu(**args, state_v_first=True, use_graph=True)[0], new[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([1, 20])}, "cu_seqlens: [2] int64): must begin with 0, not 1"),
        ({"cu_seqlens": torch.tensor([0, 12, 7, 20])}, "must not descend: [1]=12, [2]=7"),
        ({"cu_seqlens": torch.tensor([0, 19])}, "must end with the number of tokens, 20, not 19"),
        ({"cu_seqlens": torch.tensor([0.0, 20.0])}, "cu_seqlens: [2] fp32): dtype must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 20]), "chunk_indices": torch.zeros(3, 2).long()},
         "chunk_indices: [3, 2] int64): must be (sequence, chunk of it) of each of the 2 chunks"),
        ({"cu_seqlens": torch.tensor([0, 4, 20]), "chunk_offsets": torch.tensor([0, 2])},
         "chunk_offsets: [2] int64): must be the first chunk of every sequence"),
        ({"cu_seqlens": torch.tensor([0, 20]), "chunk_offsets": torch.tensor([0, 2, 3])},
         "chunk_offsets: [3] int64): must have one element a sequence, 1, or one more"),
        ({"chunk_size": 8}, "chunk_size: 8): must be 16, 32 or 64"),
        ({"scale": float("nan")}, "scale: nan): must be a finite number, -1e38 to 1e38"),
        ({"scale": float("-inf")}, "scale: -inf): must be a finite number, -1e38 to 1e38"),
        ({"scale": 1e39}, "scale: 1e+39): must be a finite number, -1e38 to 1e38"),
        ({"w": torch.zeros(1, 20, 0, 16, dtype=F64), "do": torch.zeros(1, 20, 0, 8, dtype=F64),
          "dv": torch.zeros(1, 20, 0, 8, dtype=F64), "g": None}, "fp64): HV must be at least 1"),
        ({"state_v_first": True, "transpose_state_layout": False},
         "transpose_state_layout: False): contradicts state_v_first=True, of which it is the older name"),
    ],
)  # fmt: skip
def test_bad_calls(change: dict[str, Any], message: str) -> None:
    args = inputs(1, 20, 1, 1, 16, 8, "g", 16, False)
    with pytest.raises(ContractError) as error:
        dhu(**args | change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"cu_seqlens": torch.tensor([0, 4, 20])},
        {"cu_seqlens": torch.tensor([0, 4, 20], dtype=torch.int32), "chunk_offsets": torch.tensor([0, 1])},
        {"transpose_state_layout": True, "h0": torch.zeros(1, 1, 8, 16)},
        {"use_graph": True, "use_exp2": False},
    ],
)
def test_explain_takes_what_the_function_takes(given: dict[str, Any]) -> None:
    args = inputs(1, 20, 1, 1, 16, 8, "g", 16, False) | {"scale": None} | given
    dhu(**args)
    assert isobit.explain(NAME, **args).backend == "reference"
    positional = [args[name] for name in ("q", "k", "w", "do", "dv")]
    assert isobit.explain(NAME, *positional, **given).backend == "reference"


def test_explain_refuses_what_the_function_refuses() -> None:
    args = inputs(1, 20, 1, 1, 16, 8, "g", 16, True)
    for call in (dhu, lambda **given: isobit.explain(NAME, **given)):
        with pytest.raises(ContractError, match="transpose_state_layout: False"):
            call(**args, transpose_state_layout=False)
        with pytest.raises(ContractError, match=r"cu_seqlens: \[1, 2\]"):
            call(**args, cu_seqlens=torch.tensor([[0, 20]]))


def test_h0_may_have_any_strides() -> None:
    """Nobody reads it."""
    args = inputs(1, 20, 1, 1, 16, 8, "gh", 16, False)
    turned = args["h0"].mT.contiguous().mT
    assert not turned.is_contiguous()
    for found, known in zip(dhu(**args | {"h0": turned}), dhu(**args), strict=True):
        assert found is not None and known is not None
        assert torch.equal(found, known) and found.stride() == known.stride()


@pytest.mark.parametrize("name", ["g", "gk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gates_are_fp64_beside_fp64_only(name: str, dtype: torch.dtype) -> None:
    """A kernel computes in fp32, and would not compile with others."""
    args = inputs(1, 20, 1, 1, 16, 8, "gk", 16, False)
    args |= {n: args[n].to(dtype) for n in ("q", "k", "w", "do", "dv")}
    args |= {n: args[n].float() for n in ("g", "gk") if n != name}
    with pytest.raises(ContractError, match=rf"{name}: .* fp64\): dtype must be fp32, or fp64 if q is"):
        dhu(**args)
    dhu(**args | {name: args[name].float()})


# Where it rounds

#: Numbers whose products and sums are exact in fp32, so that nothing but roundings to bf16 can differ.
CHILD = """
import torch, isobit
gen = torch.Generator().manual_seed(0)
def drawn(*shape): return torch.randint(-3, 4, shape, generator=gen).bfloat16() / 4
q, k, w = drawn(1, 40, 1, 16), drawn(1, 40, 1, 16), drawn(1, 40, 2, 16)
do, dv = drawn(1, 40, 2, 8), drawn(1, 40, 2, 8)
dht = drawn(1, 2, 16, 8).float() + 1 / 256  # nine bits: more than bf16 has
options = {"h0": dht, "dht": dht, "scale": 0.5, "chunk_size": 16}
found = [isobit.chunk_gated_delta_rule_bwd_dhu(q, k, w, do, dv, **options, backend=backend)
         for backend in ("triton", "reference")]
assert all(torch.equal(a, b) for a, b in zip(*found))
"""


#: Offsets of chunks between other numbers.
STRIDED = """
import torch, isobit
args = [torch.ones(1, 70, 1, 16) / 4 for _ in range(5)]
packed = {"cu_seqlens": torch.tensor([0, 30, 70]), "chunk_size": 16, "backend": "triton"}
offsets = torch.tensor([0, 9, 2, 9, 5, 9])[::2]
found = [isobit.chunk_gated_delta_rule_bwd_dhu(*args, **packed, chunk_offsets=each)[0]
         for each in (offsets, None)]
assert torch.equal(*found)
"""


def test_offsets_of_chunks_may_have_any_stride() -> None:
    in_interpreter(STRIDED)


@pytest.mark.compat
def test_kernels_round_where_the_op_says() -> None:
    """A state that meets K unrounded is nearer to the truth, so accuracy does not tell."""
    in_interpreter(CHILD)


# Known to be bad

CASE = "B=2 T=40 H=1 HV=2 K=16 V=24 fp32 mode=ght chunk=16"
PACKED = "B=1 T=77 H=1 HV=1 K=16 V=16 fp32 mode=gkh chunk=16 lengths=5+40+32"
BITS = "B=3 T=40 H=1 HV=1 K=48 V=16 fp32 mode=kht chunk=16"
AGREE = "B=1 T=90 H=1 HV=2 K=32 V=16 fp32 mode=ght chunk=16 lengths=30+0+59+1"


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(function: Callable[..., Any]) -> Iterator[None]:
    """A backend named "candidate" that claims a numerics class, so that bit laws apply to it."""
    backend = Backend("candidate", function, str(DHU_TRITON_1), never, False, never)
    OPS[NAME].backends.append(backend)
    try:
        yield
    finally:
        OPS[NAME].backends.remove(backend)


def only(function: Callable[..., Any], law: str, case: str | None) -> Cell:
    with candidate(function):
        request = Request(
            ops=(NAME,), backends=("candidate",), laws=(law,), device=torch.device("cpu"), case=case
        )
        (cell,) = run(request)
    return cell


def one_by_one(**args: Any) -> tuple[Any, ...]:
    """Correct, and the same bits whatever the batch: each sequence in a call of its own."""
    if args["cu_seqlens"] is not None:
        bounds = args["cu_seqlens"].tolist()
        places = [(0, first, end) for first, end in pairwise(bounds)]
    else:
        places = [(b, 0, args["q"].shape[1]) for b in range(args["q"].shape[0])]
    found = []
    for s, (b, first, end) in enumerate(places):
        names = [n for n in ("q", "k", "w", "do", "dv", "g", "gk") if args[n] is not None]
        one = args | {n: args[n][b : b + 1, first:end] for n in names}
        one |= {n: args[n][s : s + 1] for n in ("h0", "dht") if args[n] is not None}
        found.append(reference.dhu(**one | {"cu_seqlens": None, "chunk_indices": None}))
    packed = args["cu_seqlens"] is not None
    dh, dh0, dv2 = zip(*found, strict=True)
    return torch.cat(dh, int(packed)), None if dh0[0] is None else torch.cat(dh0), torch.cat(dv2, int(packed))


def changed(**change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The correct one with some arguments changed on the way."""

    def run(**args: Any) -> Any:
        return one_by_one(**args | {n: f(args[n]) for n, f in change.items() if args[n] is not None})

    return run


def no_decay(**args: Any) -> Any:
    """Gates that reach dv2 and q, and not the state."""
    dh, _, dv2 = one_by_one(**args)
    return dh, one_by_one(**args | {"g": None, "gk": None})[1], dv2


def whole_chunks_only(**args: Any) -> Any:
    """Drops what is left after the last whole chunk."""
    T = args["q"].shape[1] // args["chunk_size"] * args["chunk_size"]
    short = args | {n: args[n][:, :T] for n in ("q", "k", "w", "do", "dv", "g", "gk") if args[n] is not None}
    dh, dh0, dv2 = one_by_one(**short)
    more = torch.nn.functional.pad(dv2, (0, 0, 0, 0, 0, args["q"].shape[1] - T))
    return torch.cat((dh, dh[:, -1:]), 1), dh0, more


def without_the_last_state(**args: Any) -> Any:
    return one_by_one(**args | {"dht": None})


def zeros(**args: Any) -> Any:
    return tuple(torch.zeros_like(t) for t in one_by_one(**args))


def state_of_the_start(**args: Any) -> Any:
    """dh of a chunk is the gradient at its start instead of its end."""
    dh, dh0, dv2 = one_by_one(**args)
    return torch.cat((dh0[:, None].to(dh.dtype), dh[:, :-1]), 1), dh0, dv2


def as_one_sequence(**args: Any) -> Any:
    """Lets the state of a packed sequence reach the one before."""
    dh, dh0, _ = one_by_one(**args)
    whole = args | {"cu_seqlens": None, "chunk_indices": None, "h0": args["h0"][:1], "dht": None}
    return dh, dh0, one_by_one(**whole)[2]


def dependent_on_the_batch(**args: Any) -> Any:
    """Sums features in another order when there is more than one sequence."""
    dh, dh0, dv2 = one_by_one(**args)
    return (dh, dh0 * 1.0000002, dv2) if len(args["q"]) > 2 else (dh, dh0, dv2)


def dependent_on_the_place(**args: Any) -> Any:
    dh, dh0, dv2 = one_by_one(**args)
    if args["cu_seqlens"] is not None:
        dv2 = torch.cat((dv2[:, :1], dv2[:, 1:] * 1.0000002), 1)
    return dh, dh0, dv2


def test_a_correct_one_passes() -> None:
    cells = [only(one_by_one, "accuracy", case) for case in (CASE, PACKED)]
    cells += [only(one_by_one, "invariant", BITS), only(one_by_one, "agree", AGREE)]
    assert [(c.law, c.reason) for c in cells if c.status != OK] == []


@pytest.mark.parametrize(
    ("function", "law", "case"),
    [
        (zeros, "accuracy", CASE),
        (whole_chunks_only, "accuracy", CASE),
        (no_decay, "accuracy", CASE),
        (without_the_last_state, "accuracy", CASE),
        (state_of_the_start, "accuracy", CASE),
        (changed(scale=lambda s: s * 1.001), "accuracy", CASE),
        (changed(g=lambda g: g * 1.001), "accuracy", CASE),
        (changed(w=torch.neg), "accuracy", CASE),
        (as_one_sequence, "accuracy", PACKED),
        (dependent_on_the_batch, "invariant", BITS),
        (dependent_on_the_place, "agree", AGREE),
    ],
)
def test_a_bad_one_fails(function: Callable[..., Any], law: str, case: str) -> None:
    cell = only(function, law, case)
    assert cell.status == FAIL, (cell.status, cell.reason)


@pytest.mark.parametrize("module", [kernels_triton, kernels_hopper])
def test_thousands_of_sequences_fit_into_a_grid(module: Any) -> None:
    """CUDA allows 2^31 - 1 programs along the first dimension, and 65535 along the others."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    grids = {}

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        grids[kernel] = grid

    S, HV = 4000, 32
    args: dict[str, Any] = {name: empty(1, S, HV, 128) for name in ("q", "k", "w", "do", "dv")}
    args |= {"cu_seqlens": empty(S + 1, dtype=torch.int32), "chunk_indices": empty(S, 2, dtype=torch.int32)}
    args |= dict.fromkeys(("g", "gk", "h0", "dht", "chunk_offsets"))
    args |= {"scale": 1.0, "state_v_first": False, "chunk_size": 64, "use_exp2": True}
    module.dhu(launch=launch, **args, **({"sms": 132} if module is kernels_hopper else {}))
    programs = {kernels_triton: S * HV * 4, kernels_hopper: 132}[module]
    assert grids[module.dhu_kernel] == (programs,)


@pytest.mark.parametrize(("heads", "stages"), [(1, 3), (48, 3), (55, 2), (66, 2), (512, 2)])
def test_the_ring_is_shorter_where_most_sms_have_a_program(heads: int, stages: int) -> None:
    """On an H200 with two programs a head: what was measured as faster."""
    for K, expected in ((128, stages), (64, 4), (256, 1)):
        assert kernels_hopper.stages_of(Buffers(K, states=0), 2 * heads, 132) == expected


@pytest.mark.parametrize(("has_g", "has_gk"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("states", [0, 1, 2])
def test_three_stages_do_not_fit_with_both_gates_and_a_state(states: int, has_g: bool, has_gk: bool) -> None:
    stages = 2 if has_g and has_gk and states else 3
    assert kernels_hopper.stages_of(Buffers(128, states, has_g, has_gk), 2, 132) == stages
