"""The class gdr/1/cpu against golden vectors of a second implementation, which shares no code with its
model."""

from typing import Any

import numpy as np
import pytest
import torch

import isobit
from gated_delta_by_hand import DTYPES, GOLDEN, RESULTS, SCALE, by_hand, exp2
from isobit.numerics import cpu_steps
from isobit.ops.gated_delta_rule import model

ARGUMENTS = ("q", "k", "v", "g", "beta", "initial_state")

#: Powers of two as the golden vectors have them.
EXACT = model.CPU._replace(exp2=exp2)


def golden(name: str) -> dict[str, np.ndarray]:
    stored = np.load(GOLDEN)
    return {key.partition("_")[2]: stored[key] for key in stored if key.startswith(f"{name}_")}


def differing(ours: Any, known: dict[str, np.ndarray]) -> list[int]:
    """How many elements of each result."""
    pairs = zip(ours, (known[name] for name in RESULTS), strict=True)
    return [int((np.ascontiguousarray(a).view(np.int32) != b.view(np.int32)).sum()) for a, b in pairs]


def by_model(known: dict[str, np.ndarray], dtype: torch.dtype, do: model.Arithmetic = EXACT) -> Any:
    q, k, v, g, beta, S = (known[name] for name in ARGUMENTS)
    q, k = model.l2norm(q, dtype), model.l2norm(k, dtype)
    o, end, _ = model.sequence(q, k, v, beta, g, S, SCALE, do, dtype)
    first = slice(0, 64)
    return o, end, model.prepared(k[first], v[first], beta[first], g[first], do, dtype).T


@pytest.mark.parametrize("name", DTYPES)
def test_the_model_equals_the_golden_vectors(name: str) -> None:
    assert differing(by_model(golden(name), DTYPES[name]), golden(name)) == [0, 0, 0]


@pytest.mark.parametrize("name", DTYPES)
def test_so_does_what_wrote_them(name: str) -> None:
    known = golden(name)
    assert [known[name].shape for name in RESULTS] == [(70, 16), (48, 16), (64, 64)]
    assert differing(by_hand(known, DTYPES[name]), known) == [0, 0, 0]


def test_the_backend_for_cpu_tensors_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the op, with the layout of its arguments."""
    known = golden("bf16")
    q, k, v = (torch.from_numpy(known[n]).bfloat16()[None, :, None] for n in ("q", "k", "v"))
    g, beta = (torch.from_numpy(known[n])[None, :, None] for n in ("g", "beta"))
    monkeypatch.setattr(model.gated_delta_rule.__wrapped__, "__defaults__", (EXACT,))  # in place of CPU
    o, end = isobit.gated_delta_rule(
        q, k, v, g, beta, SCALE, torch.from_numpy(known["initial_state"])[None, None], True, True,
        backend="model",
    )  # fmt: skip
    assert end is not None
    assert differing((o[0, :, 0].float().numpy(), end[0, 0].numpy(), known["T"]), known) == [0, 0, 0]


def in_two_roundings(x: Any, y: Any, z: Any) -> Any:
    return x * y + z


@pytest.mark.parametrize(
    ("wrong", "shows"),
    [("steps of 8", "final_state"), ("chunks of 32", "o"), ("another epsilon", "o"), ("two roundings", "T")],
)
def test_another_class_differs(wrong: str, shows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, do = golden("fp16"), EXACT
    if wrong == "steps of 8":
        monkeypatch.setattr(cpu_steps, "GROUP", 8)
    elif wrong == "chunks of 32":
        monkeypatch.setattr(model, "CHUNK", 32)
    elif wrong == "another epsilon":
        monkeypatch.setattr(model, "EPS", np.float32(1e-5))
    else:
        do = EXACT._replace(fma=in_two_roundings)
    counts = dict(zip(RESULTS, differing(by_model(known, DTYPES["fp16"], do), known), strict=True))
    assert counts[shows] > 0
