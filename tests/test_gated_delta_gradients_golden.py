"""Gradients of the class gdr/1/cpu against golden vectors of a second implementation, which shares no code
with its model."""

import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isobit
from gated_delta_by_hand import exp2
from gated_delta_gradients_by_hand import CASES, GOLDEN, Case, by_hand, drawn
from isobit.numerics import cpu_steps
from isobit.ops.gated_delta_rule import model, model_bwd

ARGUMENTS = ("q", "k", "v", "g", "beta", "initial_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")

#: Powers of two as the golden vectors have them.
EXACT = model.CPU._replace(exp2=exp2)


def differing(ours: dict[str, np.ndarray], name: str) -> dict[str, int]:
    """How many elements of each gradient that the case has."""
    stored = np.load(GOLDEN)
    known = {key.partition("_")[2]: stored[key] for key in stored if key.startswith(f"{name}_")}
    assert set(ours) == set(known)
    return {n: int((x.view(np.int32) != known[n].view(np.int32)).sum()) for n, x in ours.items()}


def arguments(case: Case) -> dict[str, Any]:
    """In the layout of the op; `do` and `dfinal_state` too."""
    args = {name: torch.from_numpy(x) for name, x in drawn(case).items()}
    given = {name: args[name].to(case.dtype)[None, :, None] for name in ("q", "k")}
    given |= {name: args[name].to(case.dtype).transpose(0, 1)[None] for name in ("v", "do")}
    given |= {name: args[name].T[None] for name in ("g", "beta")}
    given |= {"initial_state": args["h0"][None], "dfinal_state": args["dht"][None]}
    return given if case.full else given | {"g": None, "dfinal_state": None}


def as_golden(gradients: tuple[Tensor | None, ...]) -> dict[str, np.ndarray]:
    """Those that there are, in the layout of the golden vectors."""
    found = {}
    for name, x in zip(GRADIENTS, gradients, strict=True):
        if x is not None:
            own = x[0] if name == "dh0" else x[0, :, 0] if name in ("dq", "dk") else x[0].transpose(0, 1)
            found[name] = own.float().contiguous().numpy()
    return found


def by_model(name: str, module: Any = model_bwd) -> dict[str, np.ndarray]:
    case = CASES[name]
    args = arguments(case)
    found = module.gated_delta_rule_bwd(
        EXACT, **args, **{f"want_{n}": args[n] is not None for n in ARGUMENTS}, scale=case.scale,
        use_qk_l2norm_in_kernel=case.full, state_v_first=False, cu_seqlens=None,
    )  # fmt: skip
    return as_golden(found)


@pytest.mark.parametrize("name", CASES)
def test_the_model_equals_the_golden_vectors(name: str) -> None:
    counts = differing(by_model(name), name)
    assert ("dg" in counts) == CASES[name].full and set(counts.values()) == {0}, counts


@pytest.mark.parametrize("name", CASES)
def test_so_does_what_wrote_them(name: str) -> None:
    counts = differing(by_hand(CASES[name], drawn(CASES[name])), name)
    assert set(counts.values()) == {0}, counts


def test_the_backend_for_cpu_tensors_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the op and autograd."""
    case = CASES["fp16"]
    args = arguments(case)
    leaves = {name: args[name].requires_grad_() for name in ARGUMENTS}
    for function in (model.gated_delta_rule, model_bwd.gated_delta_rule_bwd):
        monkeypatch.setattr(function.__wrapped__, "__defaults__", (EXACT,))  # in place of CPU
    outputs = isobit.gated_delta_rule(
        **leaves, scale=case.scale, output_final_state=True, use_qk_l2norm_in_kernel=True, backend="model"
    )
    found = torch.autograd.grad(outputs, list(leaves.values()), (args["do"], args["dfinal_state"]))
    assert differing(as_golden(found), "fp16") == dict.fromkeys(GRADIENTS, 0)


#: What is wrong, in which case, and the gradients that show it; texts of the model, and what replaces each.
WRONG = {
    ("heads from the last", "fp16", "dq dk"): ("[:, each]", "[:, -1 - each]"),
    ("y' of all heads after m of all", "fp16", "dk"): (
        "for each in range(terms[0].shape[0] // heads):\n        for term in terms:",
        "for term in terms:\n        for each in range(terms[0].shape[0] // heads):",
    ),
    ("p in fp32", "bf16", "dv dh0"): (
        "return call.rounded(call.product(transposed(p), c.dout) * call.scale)",
        "return call.product(transposed(p), c.dout) * call.scale",
    ),
    ("dv_new by a fused multiply-add, as in dhu/1", "fp16", "dv dh0"): (
        "x = x * to_the_end(c, call)[..., None]",
        "x = call.do.fma(x, to_the_end(c, call)[..., None], inner_values(c, call))",
        "call.rounded(x + inner_values(c, call))",
        "call.rounded(x)",
    ),
    ("no low", "bf16", "dh0"): ("low = call.rounded(y - high)", "low = np.zeros_like(high)"),
    ("D begins a chain, as in dhu/1", "bf16", "dh0"): (
        "D + call.product(transposed(c.q), low)",
        "call.product(transposed(c.q), low, D)",
    ),
    ("D by a fused multiply-add, as in dhu/1", "bare", "dh0"): (
        "D + call.product(transposed(c.q), c.dout) * call.scale",
        "call.do.fma(call.product(transposed(c.q), c.dout), call.scale, D)",
    ),
    ("dr in fp32", "bf16", "dk dbeta"): ("drb = call.rounded(dr)", "drb = dr"),
    ("dr rounded for dbeta", "bf16", "dbeta"): ("tile_sums(dr * c.v)", "tile_sums(drb * c.v)"),
    ("M in fp32", "bf16", "dk dg"): ("M = call.rounded(N * c.beta[..., None])", "M = N * c.beta[..., None]"),
    ("M after its transpose", "fp16", "dk"): (
        "product(transposed(M), c.k, product(M, c.k, on_k))",
        "product(M, c.k, product(transposed(M), c.k, on_k))",
    ),
    ("D in fp32", "bf16", "dk dg"): ("exp2(c.g2), call.rounded(D)", "exp2(c.g2), D"),
    ("other brackets", "bf16", "dg"): (
        "of_q - of_k - c.beta * from_s",
        "of_q - (of_k + c.beta * from_s)",
    ),
    ("tiles from the last", "fp16", "dg dbeta"): ("for part in parts:", "for part in parts[::-1]:"),
    ("neighbours first", "bf16", "dg dbeta"): (
        "x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]",
        "x[..., ::2] + x[..., 1::2]",
    ),
    ("the norm's sum by tiles", "fp16", "dk"): ("halved(y * dy, -1)", "added(tile_sums(y * dy))"),
    ("the norm's n rounded", "fp16", "dq dk"): (
        "y = x * r[..., None]",
        "y = rounded(x * r[..., None], dtype)",
    ),
}


@pytest.mark.parametrize(("wrong", "name", "shows"), WRONG)
def test_another_class_differs(wrong: str, name: str, shows: str) -> None:
    texts, source = WRONG[wrong, name, shows], inspect.getsource(model_bwd)
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert source.count(old) == 1
        source = source.replace(old, new)
    changed = ModuleType(model_bwd.__name__)
    exec(source, changed.__dict__)
    counts = differing(by_model(name, changed), name)
    assert all(counts[gradient] > 0 for gradient in shows.split()), counts


@pytest.mark.parametrize("name", CASES)
def test_steps_of_8_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_steps, "GROUP", 8)
    counts = differing(by_model(name), name)
    assert counts["dbeta"] > 0 and counts["dh0"] > 0, counts
