"""Attention of FLA on a CPU, in Triton's interpreter, plain and with isobit inside: a program.

    TRITON_INTERPRET=1 PYTHONPATH=<a folder with FLA> python tests/fla_on_a_cpu.py CASE...

It prints JSON: by case, how far gradients with isobit are from FLA's own, relative to their largest element,
and what isobit has counted.
"""

import builtins
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.autotuner import Autotuner

import isobit
from isobit.bench.cases import suite_of
from isobit.check.interpreter import quick_interpreter
from isobit.ops.gated_delta_rule.rivals.calls import RIVALS_OF_TRAINING, refused_by_fla
from isobit.spec.series import Pool

assert "fla" not in sys.modules  # importing isobit has not imported it
inside = isobit.integrations.fla


class Step(int):
    """A loop's variable, which FLA's kernels cast. In the interpreter it is a number of Python's."""

    def to(self, dtype: Any) -> "Step":
        return self


def steps(*bounds: Any) -> Iterator[Step]:
    return map(Step, builtins.range(*bounds))


def prepare_fla() -> Any:
    """FLA's ops, without what the interpreter lacks: a clock to tune by, and tensors as loop variables."""
    warnings.simplefilter("ignore")
    Autotuner._bench = lambda self, *args, **kwargs: [1.0, 1.0, 1.0]
    import fla.ops

    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = steps  # type: ignore[attr-defined]
    return fla.ops


def gradients(function: Any, kda: bool, packed: bool) -> tuple[Tensor, ...]:
    """With an initial state, a gradient of the last one, and for GDN value heads that share q and k."""
    T, H, HV, K, V = 38, 1, 1 if kda else 2, 16, 8
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    q, k = (F.normalize(normal(1, T, H, K), dim=-1) for _ in range(2))
    g = F.logsigmoid(normal(1, T, HV, K) if kda else normal(1, T, HV))
    bounds = torch.tensor([0, 3, 3, 38]) if packed else None
    S = 1 if bounds is None else len(bounds) - 1
    h0 = normal(S, HV, V, K) if packed else normal(S, HV, K, V)
    leaves = [t.requires_grad_() for t in (q, k, normal(1, T, HV, V), g, normal(1, T, HV).sigmoid(), h0)]
    outputs = function(
        *leaves[:5], initial_state=h0, output_final_state=True, cu_seqlens=bounds, state_v_first=packed,
        chunk_size=32,
    )  # fmt: skip
    return torch.autograd.grad(outputs, leaves, [normal(*o.shape) for o in outputs])


def distance(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def compare(function: Any, *backends: str, **options: bool) -> dict[str, Any]:
    """By backend: the distance, calls served, calls passed on by reason. "off" is after all of them."""
    plain, found = gradients(function, **options), {}
    for backend in backends:
        with inside.enable(backend) as on:
            ours = gradients(function, **options)
        found[backend] = [distance(ours, plain), on.served, dict(on.passed)]
    return found | {"off": distance(gradients(function, **options), plain)}


def broken(function: Any) -> dict[str, Any]:
    """FLA continues with what isobit returns, so an error of it is visible in the gradients."""
    right = inside.chunk_gated_delta_rule_bwd_dhu

    def wrong(*args: Any, **kwargs: Any) -> Any:
        dh, dh0, dv2 = right(*args, **kwargs)
        return 1.1 * dh, dh0, dv2

    inside.chunk_gated_delta_rule_bwd_dhu = wrong
    try:
        return compare(function, "reference", kda=False, packed=False)
    finally:
        inside.chunk_gated_delta_rule_bwd_dhu = right


def timed(op: str) -> dict[str, Any]:
    """The benchmark of an op but for the clock. By direction: the distances of both, and how many results."""
    found: dict[str, Any] = {}
    for series in (one for one in suite_of("fla").series if one.name == op):
        (direction,) = series.directions
        (args,) = series.make(series.small[0], Pool(torch.device("cpu")))
        judge = series.judge(args)
        rival = series.rivals["fla"]
        ours, theirs = series.call(dict(args), None), rival.function(rival.prepare(dict(args)))
        found[direction] = [judge.error(direction, ours), judge.error(direction, theirs), len(ours)]
    return found


def pieces() -> list[Any]:
    """FLA's training and its pieces: the distance of outputs, whether the gradients that the pieces leave as
    they are agree, whether all have them, and why FLA refuses its backward here."""
    rivals = RIVALS_OF_TRAINING
    gen = torch.Generator().manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, 38, 1, 16, generator=gen), dim=-1) for _ in range(3))
    g, beta = -torch.rand(1, 38, 1, generator=gen), torch.rand(1, 38, 1, generator=gen)
    args = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    args |= {"scale": 0.3, "initial_state": None, "use_qk_l2norm_in_kernel": True}
    found = []
    for name in ("fla", "fla_pieces"):
        leaves = {n: args[n].clone().requires_grad_() for n in ("q", "k", "v", "g", "beta")}
        prepared = rivals[name].prepare(args) | leaves
        o = rivals[name].function(prepared)
        found.append((o, dict(zip(leaves, torch.autograd.grad(o.sum(), leaves.values()), strict=True))))
    (o, own), (same, other) = found
    equal = [torch.equal(own[n], other[n]) for n in ("v", "q")]
    return [distance((same,), (o,)), equal, refused_by_fla()]


CASES = {
    "gdn": lambda ops: compare(ops.chunk_gated_delta_rule, "reference", "hopper", kda=False, packed=False),
    "gdn packed": lambda ops: compare(
        ops.chunk_gated_delta_rule, "reference", "triton", kda=False, packed=True
    ),
    "kda packed": lambda ops: compare(ops.chunk_kda, "reference", kda=True, packed=True),
    "gdn broken": lambda ops: broken(ops.chunk_gated_delta_rule),
    "bench": lambda ops: timed("chunk_gated_delta_rule"),
    "pieces": lambda ops: pieces(),
}


def main(*cases: str) -> None:
    ops = prepare_fla()
    with quick_interpreter():
        print(json.dumps({case: CASES[case](ops) for case in cases}))


if __name__ == "__main__":
    main(*sys.argv[1:])
