"""FLA's `chunk_gated_delta_rule` by isobit, forward and backward. FLA is real, in both versions; what is
passed on ends in a stand-in for FLA's kernels, which need a GPU."""

import inspect
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import isobit
from fla_versions import VERSIONS, imported_from
from isobit import ContractError
from isobit.bench.cases import suite_of
from isobit.bench.check_gate import CheckFailed
from isobit.integrations import fla, fla_whole
from isobit.spec.series import Pool
from isobit.spec.truth import cotangent_like

NAMES = ("q", "k", "v", "g", "beta")


@pytest.fixture(scope="module", params=VERSIONS)
def imported(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """FLA's module with the function."""
    with imported_from(request.param, fla_whole.MODULE) as module:
        yield module


@pytest.fixture
def module(imported: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The same, not checked yet, with kernels that run here: sevens."""

    class Kernels:
        @staticmethod
        def apply(q: Any, k: Any, v: Any, *rest: Any) -> Any:
            return torch.full_like(v, 7.0), None

    monkeypatch.setattr(imported, "ChunkGatedDeltaRuleFunction", Kernels)
    monkeypatch.setattr(fla, "_fla", None)
    yield imported
    fla.disable()


def inputs(dtype: torch.dtype = torch.float32, T: int = 70, **changed: Any) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(1, T, 1, 16, generator=gen), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(1, T, 2, 16, generator=gen).to(dtype)
    g, beta = -torch.rand(1, T, 2, generator=gen), torch.rand(1, T, 2, generator=gen)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta} | changed


def gradients(function: Any, args: dict[str, Any], more: tuple[str, ...] = ()) -> list[torch.Tensor]:
    """Of all outputs and inputs."""
    leaves = {n: args[n].detach().clone().requires_grad_() for n in (*NAMES, *more)}
    outputs = [t for t in function(**args | leaves) if t is not None]
    total = sum((t.float() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in outputs)
    return [*outputs, *torch.autograd.grad(total, list(leaves.values()))]  # type: ignore[arg-type]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("backend", "dtype"), [("reference", torch.float32), ("model", torch.bfloat16)])
def test_a_call_has_the_bits_of_isobit_in_both_directions(
    module: types.ModuleType, backend: str, dtype: torch.dtype
) -> None:
    state = torch.ones(2, 2, 16, 16)
    args = inputs(dtype) | {
        "initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True,
        "state_v_first": True, "cu_seqlens": torch.tensor([0, 3, 70]), "scale": 0.5,
    }  # fmt: skip
    expected = gradients(lambda **given: isobit.gated_delta_rule(**given, backend=backend), args)
    with fla.enable("reference", whole=backend) as on:
        assert equal(gradients(module.chunk_gated_delta_rule, args), expected)
        short = inputs(dtype, T=3)
        o, none = module.chunk_gated_delta_rule(*(short[n] for n in NAMES), 0.5)
    assert none is None and torch.equal(o, isobit.gated_delta_rule(**short, scale=0.5, backend=backend)[0])
    assert (on.served, on.passed) == (2, {})
    assert (module.chunk_gated_delta_rule(**args)[0] == 7.0).all() and on.served == 2


def test_it_computes_what_fla_does(module: types.ModuleType) -> None:
    """FLA's own recurrence, in plain PyTorch."""
    naive = import_module("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    args = inputs(T=5)
    wide = {n: args[n].repeat_interleave(2, 2) for n in ("q", "k")}  # it has no groups
    expected, _ = naive(**{"v": args["v"], "g": args["g"], "beta": args["beta"]} | wide)
    with fla.enable("reference", whole="reference"):
        found, _ = module.chunk_gated_delta_rule(**args)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("which", ["both", "gate", "sigmoid"])
def test_gates_that_layers_leave_to_the_kernel(module: types.ModuleType, which: str, doubled: bool) -> None:
    gate, sigmoid = which in ("both", "gate"), which in ("both", "sigmoid")
    if doubled and not sigmoid:
        return
    A_log, dt_bias = torch.tensor([0.3, -0.4]), torch.tensor([0.1, 0.2])
    raw = inputs(T=5) | {"A_log": A_log, "dt_bias": dt_bias}
    own = {"use_gate_in_kernel": gate, "use_beta_sigmoid_in_kernel": sigmoid, "allow_neg_eigval": doubled}

    def plain(A_log: Any, dt_bias: Any, **args: Any) -> Any:
        if gate:
            args["g"] = -A_log.exp() * F.softplus(args["g"] + dt_bias)
        if sigmoid:
            args["beta"] = args["beta"].sigmoid() * (2.0 if doubled else 1.0)
        return isobit.gated_delta_rule(**args, backend="reference")

    more = ("A_log", "dt_bias") if gate else ()
    expected = gradients(lambda **args: plain(**{"A_log": A_log, "dt_bias": dt_bias} | args), raw, more)
    with fla.enable("reference", whole="reference") as on:
        found = gradients(lambda **args: module.chunk_gated_delta_rule(**args, **own), raw, more)
        torch.testing.assert_close(found, expected)
    assert (on.served, on.passed) == (1, {})


def test_what_is_not_served_goes_on_by_name(module: types.ModuleType) -> None:
    args, half = inputs(T=5), torch.zeros(1, 5, 2, 16, dtype=torch.float16)
    cases = {
        "cp_context: context parallelism is not served": {"cp_context": object()},
        "chunk_size=32 of chunk_gated_delta_rule is not 64": {"chunk_size": 32},
        "v is fp16 and q is fp32": {"v": half},
        "g is fp64 and q is fp32": {"g": args["g"].double()},
        "transpose_state_layout is not an argument that isobit knows": {"transpose_state_layout": True},
        "allow_neg_eigval=True comes without use_beta_sigmoid_in_kernel": {"allow_neg_eigval": True},
        "use_gate_in_kernel=True comes without A_log": {"use_gate_in_kernel": True},
        "chunk_indices comes without cu_seqlens": {"chunk_indices": torch.tensor([[0, 0]])},
    }
    with fla.enable("reference", whole="reference") as on:
        entry = fla_whole.registry(import_module("fla").__version__)._backends["isobit"]
        for reason, changed in cases.items():
            with pytest.warns(UserWarning, match=f"own kernels serve chunk_gated_delta_rule here: {reason}"):
                assert entry.verify(fla_whole.NAME, **args | changed) == (False, reason)
        assert entry.verify("recompute_w_u_fwd", args["k"])[0] is False
        assert (module.chunk_gated_delta_rule(**args, chunk_size=32)[0] == 7.0).all()
        with pytest.raises(ContractError, match="HV=2 but HV=3 from v"):
            two = torch.zeros(1, 5, 2, 16)
            module.chunk_gated_delta_rule(**args | {"q": two, "k": two, "v": torch.zeros(1, 5, 3, 16)})
    assert on.served == 0 and sum(on.passed.values()) == len(cases) + 1


def test_a_gpu_backend_on_a_cpu_says_why(module: types.ModuleType) -> None:
    with (
        fla.enable("reference", whole="hopper") as on,
        pytest.warns(UserWarning, match=r"need an NVIDIA Hopper GPU \(sm_90\); the tensors are on cpu"),
    ):
        assert (module.chunk_gated_delta_rule(**inputs(torch.bfloat16, T=5))[0] == 7.0).all()
    assert on.served == 0


def test_on_and_off(module: types.ModuleType) -> None:
    registry = fla_whole.registry(import_module("fla").__version__)
    before = dict(registry._backends), getattr(registry, "_active", None)
    fla.enable("reference", whole="reference")
    order = [each.backend_type for each in registry._get_sorted_backends()]
    assert order == ["triton_ascend", "isobit", "flash_qla"]
    with pytest.raises(isobit.UnsupportedError, match=r"enable\(whole=None\): it is already enabled with wh"):
        fla.enable("reference")
    fla.disable()
    assert (dict(registry._backends), getattr(registry, "_active", None)) == before
    with fla.enable("reference"):
        assert dict(registry._backends) == before[0]  # only where it is wanted
    with pytest.raises(ContractError, match="unknown backend"):
        fla.enable("reference", whole="cuda")


def test_another_function_is_refused(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.chunk_gated_delta_rule

    def refused(match: str) -> None:
        with pytest.raises(fla.FLAError, match=match):
            fla.enable("reference", whole="reference")
        assert fla.SWITCH.patch is None

    monkeypatch.setattr(module, fla_whole.NAME, lambda q, k, v: None)
    refused(r"found chunk_gated_delta_rule\(q, k, v\)")
    monkeypatch.setattr(module, fla_whole.NAME, inspect.unwrap(right))
    refused("does not use the backends")
    monkeypatch.delattr(module, fla_whole.NAME)
    refused("has no chunk_gated_delta_rule")


def test_the_benchmark_of_a_layer_times_isobit_and_compares_with_fp64(module: types.ModuleType) -> None:
    """All but the clock, in both directions; the stand-in for FLA's kernels is not taken for right."""
    for series in (one for one in suite_of("fla").series if one.name == "layer"):
        args = series.make(series.small[0], Pool(torch.device("cpu")))[0]
        judge = series.judge(args)
        leaves = {n: t.requires_grad_() for n, t in args.items()}
        o = series.call(leaves, None)
        gradients = torch.autograd.grad(o, list(leaves.values()), cotangent_like(args["v"]))
        assert 0 < judge.error("fwd_bwd", (o, *gradients)) < 0.1
        with pytest.raises(CheckFailed, match="fla: o of a layer is"):
            judge.error("fwd", (series.rivals["fla"].function(args),))
