"""`causal_conv1d`, `delta_gates` and `rms_norm_gated`: kernels known to be bad must fail, each on its law;
states in slots; integers that point nowhere; and the modules of transformers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import isobit
from interpreted import in_interpreter
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.kernels.host import row_stream
from isobit.ops.causal_conv1d import model as conv
from isobit.ops.delta_gates import model as gates
from isobit.ops.rms_norm_gated import model as norm

CPU = torch.device("cpu")
BF16 = torch.bfloat16
BITS = {
    "causal_conv1d": "B=9 T=5 D=40 fp32 random",
    "delta_gates": "N=9 H=7 fp32 random",
    "rms_norm_gated": "N=30 D=300 fp32 random",
}
AGREE = {
    "causal_conv1d": "B=3 T=6 D=33 fp32 random",
    "delta_gates": "N=300 H=3 fp32 random",
    "rms_norm_gated": "N=290 D=20 fp32 random",
}
PLAIN = {
    "causal_conv1d": "B=2 T=9 D=33 fp32 state=False bias=False",
    "rms_norm_gated": "N=7 D=33 fp32 offset",
}
MODELS: dict[str, Any] = {"causal_conv1d": conv, "delta_gates": gates, "rms_norm_gated": norm}

Run = Callable[..., Any]


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(op: str, forward: Run | None = None, backward: Run | None = None) -> Iterator[None]:
    """The op with a backend "candidate" of another class."""
    given = {
        op: forward or getattr(MODELS[op], op),
        f"{op}_bwd": backward or getattr(MODELS[op], f"{op}_bwd"),
    }
    with ExitStack() as stack:
        for name, function in given.items():
            backend = Backend("candidate", function, "test/rows", never, False, never)
            OPS[name].backends.append(backend)
            stack.callback(OPS[name].backends.remove, backend)
        if op == "causal_conv1d":
            backend = Backend("candidate", conv.causal_conv1d_update, "test/rows", never, False, never)
            OPS["causal_conv1d_update"].backends.append(backend)
            stack.callback(OPS["causal_conv1d_update"].backends.remove, backend)
        yield


def only(op: str, law: str, case: str) -> Cell:
    (cell,) = run(Request(ops=(op,), backends=("candidate",), laws=(law,), device=CPU, case=case))
    return cell


@pytest.mark.parametrize("op", MODELS)
def test_a_correct_kernel_passes(op: str) -> None:
    with candidate(op):
        found = [only(op, "invariant", BITS[op]), only(op, "agree", AGREE[op])]
    assert [(c.law, c.reason) for c in found if c.status != OK] == []


# Wrong in one thing


def newest_first(**args: Any) -> Any:
    """The terms from a token's own input to the oldest."""
    kept = conv.sums

    def sums(history: Any, args: dict[str, Any]) -> Any:
        w = conv.array(args["weight"])
        n = len(history) - w.shape[1] + 1
        z = np.zeros((n, len(w)), np.float32) + (0 if args["bias"] is None else conv.array(args["bias"]))
        for k in reversed(range(w.shape[1])):
            z = z + history[k : k + n] * w[:, k]
        return z

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "sums", sums)
        made = conv.causal_conv1d(**args)
    assert conv.sums is kept
    return made


def no_history(**args: Any) -> Any:
    """The state of a sequence is not read."""
    return conv.causal_conv1d(**args | {"initial_state": None})


def from_the_padding(**args: Any) -> Any:
    return conv.causal_conv1d(**args | {"first": None})


def by_torch(**args: Any) -> Any:
    """Sums over rows as PyTorch makes them."""
    with pytest.MonkeyPatch.context() as patch:
        for each in (conv, gates, norm):
            patch.setattr(each, "over_rows", lambda terms: torch.from_numpy(terms).sum(0).numpy())
        return _backwards(args)(**args)


def _backwards(args: dict[str, Any]) -> Run:
    found: Run = (
        conv.causal_conv1d_bwd if "cu_seqlens" in args
        else gates.delta_gates_bwd if "A_log" in args else norm.rms_norm_gated_bwd
    )  # fmt: skip
    return found


def of_the_batch(**args: Any) -> Any:
    """PyTorch's own functions, whose bits on a CPU depend on how many elements there are: the last
    one of a tensor is made to differ here."""
    g, beta = gates.delta_gates(**args)
    g.view(-1)[-1:] = torch.nextafter(g.view(-1)[-1:], torch.tensor(0.0))
    return g, beta


def mean_by_torch(**args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "_means", lambda terms: terms.cumsum(1)[:, -1:] / np.float32(terms.shape[1]))
        return norm.rms_norm_gated(**args)


def without_eps(**args: Any) -> Any:
    return norm.rms_norm_gated(**args | {"eps": 1e-3})


@pytest.mark.parametrize(
    ("op", "law", "case", "wrong"),
    [
        ("causal_conv1d", "agree", AGREE["causal_conv1d"], {"forward": newest_first}),
        ("causal_conv1d", "agree", AGREE["causal_conv1d"], {"forward": no_history}),
        (
            "causal_conv1d",
            "agree",
            "B=4 T=9 D=24 fp16 W=3 first=True bias=False",
            {"forward": from_the_padding},
        ),
        ("causal_conv1d", "agree", AGREE["causal_conv1d"], {"backward": by_torch}),
        ("delta_gates", "invariant", BITS["delta_gates"], {"forward": of_the_batch}),
        ("delta_gates", "agree", AGREE["delta_gates"], {"backward": by_torch}),
        ("rms_norm_gated", "agree", AGREE["rms_norm_gated"], {"forward": mean_by_torch}),
        ("rms_norm_gated", "agree", AGREE["rms_norm_gated"], {"backward": by_torch}),
        ("rms_norm_gated", "accuracy", PLAIN["rms_norm_gated"], {"forward": without_eps}),
    ],
)
def test_a_wrong_kernel_fails(op: str, law: str, case: str, wrong: dict[str, Run]) -> None:
    with candidate(op, **wrong):
        cell = only(op, law, case)
    assert cell.status == FAIL, cell.reason


def test_the_order_of_rows_is_groups_and_a_tree() -> None:
    rows = torch.randn(50, 3).numpy()
    groups = [rows[i : i + 16] for i in range(0, 50, 16)]
    sums = []
    for group in groups:
        total = np.zeros(3, np.float32)
        for row in group:
            total = total + row
        sums.append(total)
    assert (row_stream.over_rows(rows) == (sums[0] + sums[1]) + (sums[2] + sums[3])).all()
    assert (row_stream.over_rows(rows[:0]) == 0).all()


# States in slots


def states() -> dict[str, Any]:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 1, 8).to(BF16), torch.randn(8, 4).to(BF16)
    return {"x": x, "state": torch.randn(5, 3, 8).to(BF16), "weight": weight}


@pytest.mark.parametrize(
    ("slots", "reason"),
    [([0, 5], r"must be from 0 to 4, but \[1\]=5"), ([3, -1], r"\[1\]=-1"), ([2, 2], "no two sequences")],
)
def test_slots_that_do_not_exist_are_an_error(slots: list[int], reason: str) -> None:
    args = states()
    before = args["state"].clone()
    with pytest.raises(isobit.ContractError, match=reason):
        isobit.causal_conv1d_update(**args, slots=torch.tensor(slots))
    assert torch.equal(args["state"], before)


def test_without_the_check_they_give_nan_and_write_nothing() -> None:
    args = states()
    before = args["state"].clone()
    out = isobit.causal_conv1d_update(**args, slots=torch.tensor([7, 3]), validate=False)
    assert bool(out[0].isnan().all()) and not bool(out[1].isnan().any())
    assert torch.equal(args["state"][[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": torch.zeros(5, 2, 8, dtype=BF16)}, r"state.*must hold W - 1 = 3 inputs, not 2"),
        ({"state": torch.zeros(5, 3, 8)}, r"state.*dtype must be that of x, bf16"),
        ({"state": torch.zeros(1, 3, 8, dtype=BF16)}, r"state.*has 1 slots for 2 sequences"),
        ({"weight": torch.zeros(8, 5, dtype=BF16)}, r"weight.*2, 3 or 4 taps, not 5"),
        ({"activation": "relu"}, r"activation.*'silu' or None"),
        ({"bias": torch.zeros(8)}, r"bias.*dtype must be that of weight"),
    ],
)
def test_wrong_states_are_an_error(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(isobit.ContractError, match=reason):
        isobit.causal_conv1d_update(**states() | change)


def test_no_gradient_goes_through_a_state() -> None:
    args = states()
    args["x"].requires_grad_()
    out = isobit.causal_conv1d_update(**args)
    with pytest.raises(RuntimeError, match="has no gradient, because it writes into the state"):
        out.float().sum().backward()


HOSTILE = """
import torch, isobit
torch.manual_seed(0)
x, weight = torch.randn(1, 20, 8), torch.randn(8, 4)
state = torch.randn(3, 3, 8)
big = 2**62
for bounds in ([0, 5, 9, 20], [0, 9, 5, 20], [-big, big, 0, 3], [20, 20, 20, 20], [7, big, -1, big]):
    cu = torch.tensor(bounds)
    leaf = x.clone().requires_grad_()
    out, final = isobit.causal_conv1d(leaf, weight, activation="silu", initial_state=state, cu_seqlens=cu,
        return_final_state=True, validate=False, backend="triton")
    out.sum().backward()
    print(bool(out.isfinite().all() and final.isfinite().all() and leaf.grad.isfinite().all()))
for first in ([3, 0], [-big, big], [40, -40]):
    x = torch.randn(2, 10, 8)
    out = isobit.causal_conv1d(x, weight, first=torch.tensor(first), validate=False, backend="triton")
    print(bool(out.isfinite().all()))
held = torch.randn(4, 3, 8)
before = held.clone()
slots = torch.tensor([big, -1, 2])
x = torch.randn(3, 1, 8)
out = isobit.causal_conv1d_update(x, held, weight, slots=slots, validate=False, backend="triton")
same = torch.equal(held[[0, 1, 3]], before[[0, 1, 3]])
print(bool(out[:2].isnan().all() and out[2].isfinite().all() and same))
"""


def test_no_integer_makes_a_kernel_read_elsewhere() -> None:
    """What is outside a tensor is mostly not finite, or the process ends."""
    assert in_interpreter(HOSTILE).split() == ["True"] * 9


# Programs at the ends of a sequence

ENDS = """
import torch, isobit
torch.manual_seed(0)
x, dout, weight = torch.randn(1, 40, 4), torch.randn(1, 40, 4), torch.randn(4, 4)
for bounds in ([0, 13, 35, 40], [0, 13, 34, 40], [0, 14, 35, 40], [0, -100, 40]):
    given = {"activation": "silu", "cu_seqlens": torch.tensor(bounds), "validate": False}
    results = []
    for backend in ("triton", "model"):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = isobit.causal_conv1d(*leaves, **given, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    print(all(torch.equal(*pair) for pair in zip(*results)) or bounds[1] < 0)
"""


def test_programs_inside_a_sequence_end_where_it_does() -> None:
    """In the interpreter programs take 16 rows. Of three taps before a row and three rows after it, the one
    from row 16 on is inside [13, 35); those that are a row shorter have an edge. A wrong bound reads nothing
    outside."""
    assert in_interpreter(ENDS).split() == ["True"] * 4


# transformers


def test_they_compute_what_the_modules_of_transformers_do() -> None:
    module = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next", reason="needs Qwen3-Next"
    )
    torch.manual_seed(0)
    theirs = module.Qwen3NextRMSNormGated(64).to(BF16)
    theirs.weight.data += 0.2 * torch.randn(64).to(BF16)
    x, gate = torch.randn(50, 64).to(BF16), torch.randn(50, 64).to(BF16)
    ours = isobit.rms_norm_gated(x, theirs.weight.detach(), gate)
    assert (ours == theirs(x, gate)).double().mean() > 0.99
    weight, mixed = torch.randn(64, 4).to(BF16), torch.randn(2, 9, 64).to(BF16)
    expected = F.silu(F.conv1d(mixed.float().mT, weight.float()[:, None], padding=3, groups=64)[..., :9]).mT
    assert (
        isobit.causal_conv1d(mixed, weight, activation="silu") == expected.to(BF16)
    ).double().mean() > 0.99
    a, A_log, dt_bias = torch.randn(9, 4).to(BF16), torch.randn(4), torch.randn(4)
    g, beta = isobit.delta_gates(a, a, A_log, dt_bias)
    torch.testing.assert_close(g, -A_log.exp() * F.softplus(a.float() + dt_bias))
    assert torch.equal(beta, a.sigmoid())
