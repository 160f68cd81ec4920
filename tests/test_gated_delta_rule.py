"""The gated delta rule: rows of a chunk in the model and in the kernels, bad calls, and the checker on
computations that are known to be bad."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit import ContractError
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.ops.gated_delta_rule import model, model_bwd, reference
from isobit.ops.gated_delta_rule.op import GDR_1_CPU

NAME = "gated_delta_rule"
CHUNK = model.CHUNK
F64 = torch.float64


def inputs(
    T: int, HV: int = 1, K: int = 16, V: int = 16, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(T)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, K, generator=gen), dim=-1) for _ in range(2))
    args: dict[str, Any] = {"q": q.to(dtype), "k": k.to(dtype)}
    args["v"] = torch.randn(1, T, HV, V, generator=gen).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    args["g"] = -torch.rand(1, T, HV, generator=gen).to(wide) / 4
    args["beta"] = torch.rand(1, T, HV, generator=gen).to(wide)
    return args


def arrays(args: dict[str, Any]) -> list[np.ndarray]:
    """q, k, v, beta and g of a chunk, [heads, rows, ...]."""
    place, heads = model.Place(0, 0, slice(0, CHUNK)), args["v"].shape[2]
    return [model.by_heads(args[n], place, heads) for n in ("q", "k", "v", "beta", "g")]


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.int32)


# Rows


@pytest.mark.parametrize("do", [model.CPU, model.hopper()], ids=["cpu", "hopper"])
def test_a_row_needs_the_rows_before_it_alone(do: model.Arithmetic) -> None:
    """All 64 rows of a chunk in the arithmetic of a CPU, some in that of a tensor core."""
    given = arrays(inputs(CHUNK))
    S = np.random.default_rng(0).standard_normal((1, 16, 16), np.float32)
    whole = model.chunk(*given, S, 0.25, do=do)
    for t in range(CHUNK) if do is model.CPU else (0, 15, 16, 40, 62):
        part = model.chunk(*(x[:, : t + 1] for x in given), S, 0.25, do=do)
        for found, known in ((part.o, whole.o), (part.v_new, whole.v_new)):
            assert np.array_equal(bits(found[:, t]), bits(known[:, t])), t
        row = model.inverse_row(
            model.system(given[1], given[3], whole.prepared.g2, do, torch.bfloat16)[:, t, :t],
            whole.prepared.T[:, :t], t, do,
        )  # fmt: skip
        assert np.array_equal(bits(row), bits(whole.prepared.T[:, t])), t


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, 1e-40])
def test_later_rows_reach_no_earlier_one(value: float) -> None:
    given = arrays(inputs(CHUNK))
    S = np.random.default_rng(0).standard_normal((1, 16, 16), np.float32)
    whole = model.chunk(*given, S, 0.25)
    for t in (0, 15, 16, 62):
        changed = [x.copy() for x in given]
        for x in changed:
            x[:, t + 1 :] = value
        with np.errstate(all="ignore"):
            found = model.chunk(*changed, S, 0.25).o
        assert np.array_equal(bits(found[:, : t + 1]), bits(whole.o[:, : t + 1]))


#: The same on the kernels: the first rows of a chunk alone, and with other values behind them.
ROWS = """
import torch, isobit
torch.manual_seed(0)
T = 66
q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, 16), dim=-1).bfloat16() for _ in range(2))
args = {"q": q, "k": k, "v": torch.randn(1, T, 1, 16).bfloat16(), "g": -torch.rand(1, T, 1) / 4}
args |= {"beta": torch.rand(1, T, 1)}
def computed(args): return isobit.gated_delta_rule(**args, backend="triton")[0]
whole = computed(args)
assert torch.equal(whole, isobit.gated_delta_rule(**args, backend="model")[0])
for n in (1, 40, 64):
    assert torch.equal(computed({name: t[:, :n] for name, t in args.items()}), whole[:, :n]), n
for n, value in ((17, float("nan")), (63, -float("inf"))):
    changed = {name: t.clone() for name, t in args.items()}
    for t in changed.values():
        t[:, n:] = value
    assert torch.equal(computed(changed)[:, :n], whole[:, :n]), (n, value)
"""


@pytest.mark.compat
def test_kernels_give_a_row_the_bits_of_the_whole_chunk() -> None:
    in_interpreter(ROWS)


def test_chunks_are_the_recurrence() -> None:
    """In fp64 the steps of a chunk, without roundings, are the recurrence to the last digits."""
    args = inputs(100, HV=2, dtype=F64)
    q, k = (args[n].repeat_interleave(2, 2)[0].transpose(0, 1) for n in ("q", "k"))
    v, beta, g = args["v"][0].transpose(0, 1), args["beta"][0].T[..., None], args["g"][0].T[..., None]
    S, rows = torch.zeros(2, 16, 16, dtype=F64), []
    for first in range(0, 100, CHUNK):
        c = slice(first, min(first + CHUNK, 100))
        G = g[:, c].cumsum(1)
        d = (G - G.mT).exp().tril()
        A = (beta[:, c] * (k[:, c] @ k[:, c].mT) * d).tril(-1)
        T = torch.linalg.inv(torch.eye(A.shape[-1], dtype=F64) + A)
        v_new = T @ (beta[:, c] * v[:, c]) - T @ (beta[:, c] * G.exp() * k[:, c]) @ S
        rows.append(G.exp() * (q[:, c] @ S) + (q[:, c] @ k[:, c].mT * d) @ v_new)
        S = G[:, -1:].exp() * S + (k[:, c] * (G[:, -1:] - G).exp()).mT @ v_new
    o, final = isobit.gated_delta_rule(**args, scale=1.0, output_final_state=True)
    torch.testing.assert_close(o[0].transpose(0, 1), torch.cat(rows, 1), rtol=1e-10, atol=1e-12)
    assert final is not None
    torch.testing.assert_close(final[0], S, rtol=1e-10, atol=1e-12)


def test_the_norm_of_a_row_is_a_tree_of_halves() -> None:
    args = inputs(5, K=48)
    long = args | {"q": args["q"] * 3, "k": args["k"] * 5}
    norms = {n: torch.from_numpy(model.l2norm(long[n].float().numpy(), torch.bfloat16)) for n in ("q", "k")}
    by_hand = args | {n: t.bfloat16() for n, t in norms.items()}
    found, _ = isobit.gated_delta_rule(**long, use_qk_l2norm_in_kernel=True)
    assert torch.equal(found, isobit.gated_delta_rule(**by_hand)[0])


def test_an_empty_sequence_returns_its_state() -> None:
    args = inputs(0)
    state = torch.randn(1, 1, 16, 16)
    for backend in ("model", "reference"):
        o, final = isobit.gated_delta_rule(
            **args, initial_state=state, output_final_state=True, backend=backend
        )
        assert o.numel() == 0 and final is not None and torch.equal(final, state)
        assert final.data_ptr() != state.data_ptr()


# Bad calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 32}, "chunk_size: 32): must be 64"),
        ({"use_gate_in_kernel": True}, "use_gate_in_kernel: True): is not served: pass g = "),
        ({"use_beta_sigmoid_in_kernel": True}, "is not served: pass beta after its sigmoid"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval: True): is not served"),
        ({"cu_seqlens": torch.tensor([0, 12, 7, 20])}, "must not descend: [1]=12, [2]=7"),
        ({"cu_seqlens": torch.tensor([0, 19])}, "must end with the number of tokens, 20, not 19"),
        ({"initial_state": torch.zeros(2, 1, 16, 16)}, "must have one state a sequence, 1, not 2"),
        ({"initial_state": torch.zeros(1, 1, 16, 8)}, "states must be [K, V] = [16, 16]"),
        ({"v": torch.zeros(1, 20, 1, 16)}, "dtype must be that of q, bf16"),
        ({"beta": torch.zeros(1, 20, 1, dtype=F64)}, "dtype must be fp32 or that of q"),
        ({"scale": float("nan")}, "scale: nan): must be a finite number, -1e38 to 1e38"),
    ],
)
def test_bad_calls(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as error:
        isobit.gated_delta_rule(**inputs(20) | change)
    assert message in str(error.value)


def test_other_sizes_are_served_without_a_class() -> None:
    args = inputs(5, K=20)
    assert isobit.explain(NAME, **args).backend == "reference"
    with pytest.raises(isobit.UnsupportedError, match="multiples of 16"):
        isobit.gated_delta_rule(**args, numerics="gdr/1/cpu")


# Known to be bad

BITS = "B=2 T=20 H=1 HV=1 K=64 V=64 fp16 mode=gh"
ONE = "B=1 T=66 H=1 HV=1 K=16 V=16 bf16"
AGREE = "B=1 T=70 H=1 HV=1 K=48 V=16 bf16 mode=gh"
PACKED = "B=1 T=71 H=1 HV=1 K=48 V=16 fp16 mode=gh lengths=5+0+66"


@contextmanager
def candidate(function: Callable[..., Any]) -> Iterator[None]:
    """A backend named "candidate" that claims the class, so that bit laws apply to it. What it keeps for the
    backward, and the backward, are the class's."""

    def never(args: dict[str, Any]) -> None:
        """No reason not to serve."""

    def served(**args: Any) -> tuple[Tensor | None, ...]:
        o, final, *_ = function(**args)
        return o, final, model.inverses(args, model.CPU) if args["return_inverse"] else None

    added = {NAME: served, f"{NAME}_bwd": model_bwd.gated_delta_rule_bwd}
    backends = {n: Backend("candidate", f, str(GDR_1_CPU), never, False, never) for n, f in added.items()}
    for name, backend in backends.items():
        OPS[name].backends.append(backend)
    try:
        yield
    finally:
        for name, backend in backends.items():
            OPS[name].backends.remove(backend)


def only(function: Callable[..., Any], law: str, case: str) -> Cell:
    with candidate(function):
        request = Request(
            ops=(NAME,), backends=("candidate",), laws=(law,), device=torch.device("cpu"), case=case
        )
        (cell,) = run(request)
    return cell


def the_recurrence(**args: Any) -> tuple[Tensor, Tensor | None]:
    """Accurate, and the same bits whatever the batch: token by token, as engines decode."""
    wide = {n: t.double() for n, t in args.items() if isinstance(t, Tensor) and t.is_floating_point()}
    o, final = reference.formula(**args | wide)
    return o.to(args["q"].dtype), final.float() if args["output_final_state"] else None


def low_states(**args: Any) -> tuple[Tensor, Tensor | None]:
    """Carries the state in 16 bits."""
    parts, state = [], args["initial_state"]
    for first in range(0, args["q"].shape[1], CHUNK):
        names = [n for n in ("q", "k", "v", "g", "beta") if args[n] is not None]
        part = args | {n: args[n][:, first : first + CHUNK] for n in names}
        o, state, _ = model.gated_delta_rule(**part | {"initial_state": state, "output_final_state": True})
        assert state is not None
        state = state.to(args["q"].dtype).float()
        parts.append(o)
    return torch.cat(parts, 1), state


def from_the_first_token_of_the_call(**args: Any) -> tuple[Tensor, Tensor | None]:
    """Packed sequences whose chunks begin at multiples of 64 of the call."""
    if args["cu_seqlens"] is None:
        return model.gated_delta_rule(**args)[:2]
    bounds, parts, finals = args["cu_seqlens"].tolist(), [], []
    for s in range(len(bounds) - 1):
        state, at = args["initial_state"][s : s + 1], bounds[s]
        while at < bounds[s + 1]:
            end = min((at // CHUNK + 1) * CHUNK, bounds[s + 1])
            one = args | {n: args[n][:, at:end] for n in ("q", "k", "v", "g", "beta")}
            one |= {"cu_seqlens": None, "initial_state": state, "output_final_state": True}
            o, state, _ = model.gated_delta_rule(**one)
            parts.append(o)
            at = end
        finals.append(state)
    return torch.cat(parts, 1), torch.cat(finals)


def spills_later_rows(**args: Any) -> tuple[Tensor, Tensor | None]:
    """Multiplies the zeros of a triangle by later rows, whatever these hold."""
    plain = model.Arithmetic(model.CPU.product, model.CPU.fma, model.CPU.exp2)
    kept = model.triangular
    model.triangular = lambda left, right, acc, do, dtype: do.product(left, right, acc, dtype)
    try:
        return model.gated_delta_rule(do=plain, **args)[:2]
    finally:
        model.triangular = kept


def test_the_class_passes_as_a_candidate() -> None:
    for law, case in (("invariant", BITS), ("agree", AGREE), ("agree", PACKED)):
        cell = only(model.gated_delta_rule, law, case)
        assert cell.status == OK, cell.reason


@pytest.mark.parametrize(
    ("function", "law", "case"),
    [
        (the_recurrence, "agree", AGREE),
        (low_states, "agree", AGREE),
        (from_the_first_token_of_the_call, "agree", PACKED),
        (spills_later_rows, "invariant", BITS),
    ],
)
def test_bad_computations_fail(function: Callable[..., Any], law: str, case: str) -> None:
    accurate = only(function, "accuracy", ONE)
    assert accurate.status == OK, accurate.reason
    assert only(function, law, case).status == FAIL


def test_broken_kernels_fail() -> None:
    """The kernels themselves, in the interpreter. As they are they pass: these are cases of the check."""
    program = Path(__file__).parent / "broken_delta_kernels.py"
    cells = ("spilled", "invariant", BITS, "descending", "agree", AGREE)
    found = json.loads(in_interpreter(program, *cells, quick=False))
    assert found["statuses"] == [FAIL, FAIL]
    right, rounded_twice = found["inverse"]
    assert right == 0 and rounded_twice > 100
