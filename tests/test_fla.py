"""isobit inside FLA: its registry, on and off, and refusals.

FLA is real, in both versions, from the folders that `make parity` makes. Its kernels need a GPU, so calls end
in isobit's reference or in a stand-in for FLA's kernel; `test_fla_attention.py` runs these too, in Triton's
interpreter.
"""

import inspect
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import fla_pytest
import isobit
from fla_versions import ROOT, VERSIONS, forget_fla, imported_from
from isobit import ContractError
from isobit.integrations import fla

NAME = "chunk_gated_delta_rule_bwd_dhu"

Calls = dict[str, Any]


@pytest.fixture(scope="module", params=VERSIONS)
def imported(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """The module of FLA that has the function."""
    with imported_from(request.param, "fla.ops.common.chunk_delta_h") as module:
        yield module


@pytest.fixture
def module(imported: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The same, not checked yet, with a kernel that runs here: sevens."""

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            def launch(**given: Any) -> None:
                given["dv2"].fill_(7.0)

            return launch

    monkeypatch.setattr(imported, "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", Kernel())
    monkeypatch.setattr(fla, "_fla", None)
    yield imported
    fla.disable()


def is_old() -> bool:
    """0.5.2 by its form, whatever it says."""
    return "fla.backends" not in sys.modules


def registry() -> Any:
    if is_old():
        return sys.modules["fla.ops.common.backends"].common_registry
    return sys.modules["fla.backends"]._operation_registries["common"]


def call(**changed: Any) -> Calls:
    gen = torch.Generator().manual_seed(0)
    q, k, w, do, dv = (0.3 * torch.randn(1, 100, 2, 16, generator=gen) for _ in range(5))
    return {"q": q, "k": k, "w": w, "do": do, "dv": dv, "scale": 0.5} | changed


def by_fla(results: Any) -> bool:
    return bool((results[2] == 7.0).all())


# On and off


def test_a_call_of_fla_returns_the_bits_of_isobit(module: types.ModuleType) -> None:
    dht = torch.ones(1, 2, 16, 16)
    args = call(g=-torch.rand(1, 100, 2), h0=torch.zeros_like(dht), dht=dht, chunk_size=32)
    assert by_fla(getattr(module, NAME)(**args))
    with fla.enable("reference") as on:
        found = getattr(module, NAME)(**args)
        expected = isobit.chunk_gated_delta_rule_bwd_dhu(**args)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        positional = getattr(module, NAME)(*[args[name] for name in ("q", "k", "w", "do", "dv", "g")])
        assert not by_fla(positional) and positional[1] is None
    assert (on.served, on.passed, on.backend) == (2, {}, "reference")
    assert repr(on) == "<isobit.integrations.fla: 2 calls served by reference, 0 passed on>"
    assert by_fla(getattr(module, NAME)(**args)) and on.served == 2


def test_every_op_of_fla_calls_the_one_function(module: types.ModuleType) -> None:
    """A module that has the name calls it through the registry, however early it was imported."""
    root = Path(str(module.__file__)).parents[3]
    calls = re.compile(rf"= {NAME}\(")
    found = (path for path in root.rglob("*.py") if calls.search(path.read_text()))
    callers = [".".join(path.relative_to(root).with_suffix("").parts) for path in found]
    old = ["comba.chunk", "delta_rule.chunk", "gated_delta_rule.chunk", "gdn2.chunk_bwd", "kda.chunk_bwd"]
    new = ["precond_gated_delta_rule.chunk", "precond_kda.chunk"]
    assert sorted(callers) == [f"fla.ops.{name}" for name in (old if is_old() else old + new)]
    for name in callers:
        assert getattr(import_module(name), NAME) is getattr(module, NAME)


def test_the_registry_is_as_before_and_other_backends_stand_behind(module: types.ModuleType) -> None:
    def state() -> Any:
        return dict(registry()._backends), getattr(registry(), "_active", None)

    before = state()
    fla.enable("reference")
    order = [backend.backend_type for backend in registry()._get_sorted_backends()]
    assert order == ["triton_ascend", "isobit", "intracard_cp", "tilelang"]
    assert registry().get_active().backend_type == "isobit"
    fla.disable()
    assert state() == before
    fla.disable()
    assert state() == before


def test_other_functions_of_the_registry_are_left_alone(module: types.ModuleType) -> None:
    with fla.enable("reference") as on:
        backend = registry()._backends["isobit"]
        assert backend.verify("chunk_fwd_h", torch.ones(1)) == (False, f"isobit has {NAME} alone")
        assert getattr(backend, "chunk_fwd_h", None) is None
    assert (on.served, on.passed) == (0, {})


def test_enabling_twice_has_no_further_effect(module: types.ModuleType) -> None:
    first, second = fla.enable("reference"), fla.enable("reference")
    getattr(module, NAME)(**call())
    assert first.served == second.served == 1
    told = (
        r"enable\(backend='triton'\): it is already enabled with backend='reference'; call disable\(\) first$"
    )
    with pytest.raises(ContractError, match=told):
        fla.enable("triton")
    fla.disable()
    assert by_fla(getattr(module, NAME)(**call()))
    assert fla.enable("reference").served == 0  # counts start at 0 again


def is_on() -> bool:
    return "isobit" in registry()._backends


def test_a_block_restores_what_was_before_it(module: types.ModuleType) -> None:
    with fla.enable("reference"):
        with fla.enable("reference"):
            assert is_on()
        assert is_on()
    assert not is_on()
    fla.enable("reference")
    with fla.enable("reference"):
        pass
    assert is_on()
    fla.disable()
    with fla.enable("reference"):
        fla.disable()
        assert not is_on()
        later = fla.enable("reference")
    assert is_on()  # the block that is left is not the one that turned this on
    fla.disable()
    with pytest.raises(ContractError, match=r"it has been disabled; call enable\(\) again"), later:
        pass
    with pytest.raises(RuntimeError, match="mine"), fla.enable("reference"):
        raise RuntimeError("mine")
    assert not is_on()


def test_a_block_that_is_left_leaves_those_of_other_threads(module: types.ModuleType) -> None:
    first = fla.enable("reference")
    first.__enter__()
    second = fla.enable("reference")
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_on()
    second.__exit__(None, None, None)
    assert not is_on()


class Slow(int):
    """A number that lets other threads run while it is added to."""

    def __add__(self, other: int) -> "Slow":
        time.sleep(1e-4)
        return Slow(int(self) + other)


def test_calls_of_many_threads_are_all_counted(module: types.ModuleType) -> None:
    with fla.enable("reference") as on:
        patch = registry()._backends["isobit"].patch
        patch.served, patch.passed["a reason"] = Slow(0), Slow(1)

        def work() -> None:
            for _ in range(10):
                patch.count_served()
                patch.count_passed("a reason")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (on.served, on.passed) == (40, {"a reason": 41})


def test_gradients_that_fla_computes_have_no_graph(module: types.ModuleType) -> None:
    args = call()
    args["q"].requires_grad_()
    with fla.enable("reference"):
        assert not getattr(module, NAME)(**args)[0].requires_grad


# Calls that are passed on to FLA


def test_calls_that_isobit_does_not_serve_go_on_with_a_reason(module: types.ModuleType) -> None:
    indices = torch.tensor([[0, 0], [0, 1]])
    cases: dict[str, Calls] = {
        "dv is fp16 and q is fp32": call(dv=torch.zeros(1, 100, 2, 16, dtype=torch.float16)),
        "g is bf16 and not fp32": call(g=torch.zeros(1, 100, 2, dtype=torch.bfloat16)),
        "gk is fp64 and not fp32": call(gk=torch.zeros(1, 100, 2, 16, dtype=torch.float64)),
        "chunk_size=128 is not 16, 32 or 64": call(chunk_size=128),
        "chunk_indices comes without cu_seqlens": call(chunk_indices=indices),
    }
    if not is_old():
        cases["use_graph=True needs results in FLA's own static buffers"] = call(use_graph=True)
        cases["chunk_offsets is of a graph, whose chunk_indices are padded"] = call(
            cu_seqlens=torch.tensor([0, 100, 100]), chunk_offsets=torch.tensor([0, 2, 2]),
            chunk_indices=torch.tensor([[0, 0], [0, 1], [-1, 0]]),
        )  # fmt: skip
    with fla.enable("reference") as on:
        for reason, args in cases.items():
            with pytest.warns(UserWarning, match=f"FLA's own kernel serves {NAME} here: {reason}"):
                assert by_fla(getattr(module, NAME)(**args))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # each reason warns once
            assert all(by_fla(getattr(module, NAME)(**args)) for args in cases.values())
        getattr(module, NAME)(**call())
    assert on.passed == dict.fromkeys(cases, 2) and on.served == 1
    on.passed.clear()
    assert len(on.passed) == len(cases)  # it was a copy


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_backend_that_can_serve_nothing_says_so_at_once(module: types.ModuleType, backend: str) -> None:
    said = rf"(?i)backend '{backend}' can serve no call here: .* cpu.*enable\('reference'\) for CPU tensors"
    with pytest.warns(UserWarning, match=said):
        fla.enable(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fla.enable(backend)  # it is on already
        fla.disable()
        fla.enable("reference")
        fla.disable()
        with pytest.raises(UserWarning, match=said):
            fla.enable(backend)
    assert "isobit" not in registry()._backends and fla.SWITCH.patch is None


def test_a_gpu_that_is_not_in_use_is_not_started(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(fla, "default_device", lambda: pytest.fail("it was looked at"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fla.enable():
            pass


def test_a_backend_that_cannot_run_says_why(module: types.ModuleType) -> None:
    with pytest.warns(UserWarning, match="can serve no call here"):
        on = fla.enable()
    with (
        on,
        pytest.warns(UserWarning, match=r"need an NVIDIA Hopper GPU \(sm_90\); the tensors are on cpu"),
    ):
        assert by_fla(getattr(module, NAME)(**call()))
    assert on.backend == "hopper" and on.served == 0 and sum(on.passed.values()) == 1


def test_a_broken_call_is_an_error_and_not_passed_on(module: types.ModuleType) -> None:
    with fla.enable("reference") as on, pytest.raises(ContractError, match=r"w: .*HV=3 must be a multiple"):
        getattr(module, NAME)(**call(**dict.fromkeys(("w", "do", "dv"), torch.zeros(1, 100, 3, 16))))
    assert (on.served, on.passed) == (0, {})


def test_an_error_in_the_verifier_is_raised(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fla, "why_not", broken)
    with fla.enable("reference"), pytest.raises(ZeroDivisionError):
        getattr(module, NAME)(**call())


# Refusals


def refused(match: str) -> None:
    with pytest.raises(fla.FLAError, match=match):
        fla.enable("reference")
    assert "isobit" not in registry()._backends and fla.SWITCH.patch is None


def test_other_versions_are_refused(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("0.5.1", "0.6.1", "0.7.0"):
        monkeypatch.setattr(sys.modules["fla"], "__version__", other)
        refused(
            rf"found version {other} \(isobit supports 0\.5\.2 and 0\.6\.0: pip install fla-core==0\.6\.0\)$"
        )
    monkeypatch.setattr(sys.modules["fla"], "__version__", "0.6.0" if is_old() else "0.5.2")
    refused("backend registry|found " + NAME)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda p: [*p, p[-1].replace(name="extra")], r"extra"),
        (lambda p: p[:-1], r"chunk_size=64"),
        (lambda p: [p[1], p[0], *p[2:]], r"k, q, w"),
        (lambda p: [*p[:9], p[9].replace(default=1.0), *p[10:]], r"scale=1\.0"),
        (lambda p: [*p[:10], p[10].replace(name="transpose"), *p[11:]], r"transpose=False"),
    ],
)
def test_another_signature_is_refused(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, change: Any, found: str
) -> None:
    whole = inspect.signature(getattr(module, NAME))
    given = whole.replace(parameters=change(list(whole.parameters.values())))

    def other(*args: Any, **kwargs: Any) -> Any:
        return getattr(module, NAME)(*args, **kwargs)

    other.__signature__ = given  # type: ignore[attr-defined]
    monkeypatch.setattr(module, NAME, other)
    refused(
        rf"found {NAME}\(.*{found}.*\) in version .*, but isobit needs {NAME}"
        r"\(q, k, w, do, dv, g=None, gk=None, h0=None"
    )


def test_another_registry_is_refused(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        kept = registry()._backends
        patch.setattr(registry(), "_backends", list(kept))
        refused("the backend registry of .* is unknown: BackendRegistry")
    home = sys.modules["fla.ops.backends" if is_old() else "fla.backends"]
    with monkeypatch.context() as patch:
        patch.delattr(home, "BaseBackend")
        refused("the backend registry of .* is unknown: AttributeError.*BaseBackend")
    monkeypatch.delattr(module, NAME)
    refused(f"has no {NAME} in fla.ops.common.chunk_delta_h")


def test_a_function_that_asks_no_backend_is_refused(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with FLA_DISABLE_BACKEND_DISPATCH=1, which is read while FLA is imported."""
    monkeypatch.setattr(module, NAME, inspect.unwrap(getattr(module, NAME)))
    refused(f"{NAME} of version .* does not use the backends .* FLA_DISABLE_BACKEND_DISPATCH=1 set")


def test_a_backend_that_comes_first_is_refused(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ascend = registry()._backends["triton_ascend"]
    monkeypatch.setattr(type(ascend), "is_available", classmethod(lambda cls: True))
    monkeypatch.setattr(type(ascend), NAME, lambda self, **kwargs: None)
    refused(f"another backend of FLA serves {NAME} before isobit's")


def test_a_check_is_made_again_for_another_function(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fla.enable("reference"):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(module, NAME, inspect.unwrap(getattr(module, NAME)))
        refused("does not use the backends")
    with fla.enable("reference"):
        assert not by_fla(getattr(module, NAME)(**call()))


def test_an_unknown_backend_is_refused(module: types.ModuleType) -> None:
    with pytest.raises(ContractError, match="unknown backend; known: hopper, triton, reference"):
        fla.enable("cuda")


def test_without_fla_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_fla()
    monkeypatch.setattr(fla, "_fla", None)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if ".parity" not in p])
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install fla-core==0\.6\.0$") as found:
        fla.enable()
    assert found.value.name == "fla"


def test_a_missing_dependency_of_fla_is_not_reported_as_fla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fla, "_fla", None)
    forget_fla()
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        fla.enable()


def test_the_example_of_the_page_runs(module: types.ModuleType, capsys: Any) -> None:
    page = (ROOT / "docs" / "fla.md").read_text()
    ((code, output),) = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", page, re.S)
    exec(code, {})
    assert capsys.readouterr().out == output and not is_on()


# FLA's own tests with isobit inside


@pytest.mark.parametrize("status", [0, 1])
def test_a_run_of_tests_ends_with_the_counts(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any, status: int
) -> None:
    def tests(arguments: list[str]) -> int:
        assert arguments == ["tests/ops/test_gdn.py", "-x"]
        with pytest.warns(UserWarning):
            getattr(module, NAME)(**call(chunk_size=128))
        getattr(module, NAME)(**call())
        return status

    monkeypatch.setattr(pytest, "main", tests)
    assert fla_pytest.main(["tests/ops/test_gdn.py", "--backend", "reference", "-x"]) == status
    assert capsys.readouterr().out.splitlines() == [
        f"isobit (reference) served 1 call of {NAME}",
        "FLA's own kernel served 1: chunk_size=128 is not 16, 32 or 64",
    ]
    assert not is_on()


def test_a_run_of_tests_that_isobit_served_nothing_of_fails(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(pytest, "main", lambda arguments: 0)
    assert fla_pytest.main([]) == 1
    assert "FAILED: isobit has served no call" in capsys.readouterr().out
    monkeypatch.setattr(pytest, "main", lambda arguments: 5)
    assert fla_pytest.main([]) == 5


def test_states_of_the_forward_where_they_are_wanted(module: types.ModuleType) -> None:
    k, w, u = (0.3 * torch.randn(1, 100, 2, 16) for _ in range(3))
    with fla.enable("reference", states="reference") as on:
        found = module.chunk_gated_delta_rule_fwd_h(k, w, u, output_final_state=True)
        expected = isobit.chunk_gated_delta_rule_fwd_h(k, w, u, output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        with pytest.raises(isobit.UnsupportedError, match=r"enable\(states=None\): it is already enabled"):
            fla.enable("reference")
        served = on.served
        assert served == 1 and registry().get_active().verify("chunk_gated_delta_rule_fwd_h", k, w, u)[0]
        with pytest.warns(UserWarning, match="FLA's own kernel serves"):
            for changed, why in (({"chunk_size": 32}, "is not 64"), ({"g": u[..., 0].half()}, "g is fp16")):
                one = registry().get_active().verify("chunk_gated_delta_rule_fwd_h", k, w, u, **changed)
                assert not one[0] and why in one[1]
