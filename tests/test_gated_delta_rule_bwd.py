"""Gradients of the gated delta rule: against autograd and FLA's tolerances, what is kept for them, and the
checker on gradients that are known to be bad."""

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.ops.gated_delta_rule import kernels_triton_bwd, model, model_bwd, reference
from isobit.ops.gated_delta_rule.op import GDR_1_CPU

NAME = "gated_delta_rule"
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
BF16, F64 = torch.bfloat16, torch.float64


def inputs(
    T: int, HV: int = 2, K: int = 16, V: int = 16, dtype: torch.dtype = BF16, sequences: int = 1
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(T)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    wide = torch.promote_types(dtype, torch.float32)
    q, k = (torch.nn.functional.normalize(drawn(1, T, 1, K), dim=-1).to(dtype) for _ in range(2))
    args = {"q": q, "k": k, "v": drawn(1, T, HV, V).to(dtype)}
    args["g"] = torch.nn.functional.logsigmoid(drawn(1, T, HV)).to(wide) / 4
    args["beta"] = drawn(1, T, HV).sigmoid().to(wide)
    args["initial_state"] = drawn(sequences, HV, K, V).to(wide) / 4
    return args


def gradients(function: Callable[..., Any], args: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """With random incoming gradients, which depend on the sizes alone."""
    leaves = {n: args[n].detach().clone().requires_grad_() for n in NAMES if args.get(n) is not None}
    outputs = function(**args | leaves, **options)
    gen = torch.Generator().manual_seed(1)
    given = [torch.randn(o.shape, generator=gen).to(o.dtype) for o in outputs]
    return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), given), strict=True))


def ours(**args: Any) -> Any:
    return isobit.gated_delta_rule(**args, output_final_state=True)


def relative_errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Root mean squares, as in FLA's tests."""
    return {
        n: float((found[n].double() - t).square().mean().sqrt() / t.square().mean().sqrt())
        for n, t in truth.items()
    }


# The gradient


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_qk_l2norm_in_kernel": True},
        {"cu_seqlens": torch.tensor([0, 3, 3, 70])},
    ],
    ids=["plain", "normalized", "packed"],
)
def test_the_reference_is_autograd_of_the_recurrence(options: dict[str, Any]) -> None:
    args = inputs(70, dtype=F64, sequences=3 if "cu_seqlens" in options else 1)
    args |= {"q": args["q"] * 3, "k": args["k"] * (2 if "use_qk_l2norm_in_kernel" in options else 1)}
    found = gradients(ours, args, scale=0.3, **options)
    truth = gradients(reference.formula, args, scale=0.3, **options)
    for name in truth:
        torch.testing.assert_close(found[name], truth[name], rtol=1e-9, atol=1e-11)


def eager_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The chunked form as plain PyTorch computes it: products of 16-bit tensors, states and gates in fp32."""
    low, HV = v.dtype, v.shape[2]

    def product(a: Tensor, b: Tensor) -> Tensor:
        """Of 16-bit tensors, in both directions, whatever this CPU has instructions for."""
        return (a.to(low).float() @ b.to(low).float()).to(low)

    q, k, v = (t[0].transpose(0, 1) for t in (q.repeat_interleave(HV, 2), k.repeat_interleave(HV, 2), v))
    S, rows, g, b = initial_state[0], [], g[0].T[..., None], beta[0].T[..., None]
    for first in range(0, v.shape[1], 64):
        c = slice(first, first + 64)
        G = g[:, c].cumsum(1)
        d = (G - G.mT).tril().exp().tril()
        A = (b[:, c] * product(k[:, c], k[:, c].mT) * d).tril(-1)
        T = torch.linalg.inv(torch.eye(A.shape[-1]) + A)
        w = product(T, b[:, c] * G.exp() * k[:, c])
        new = product(T, b[:, c] * v[:, c]) - product(w, S)
        inside = product(product(q[:, c], k[:, c].mT) * d, new)
        rows.append(scale * (product(q[:, c] * G.exp(), S) + inside))
        S = G[:, -1:].exp() * S + product((k[:, c] * (G[:, -1:] - G).exp()).mT, new).float()
    return torch.cat(rows, 1).transpose(0, 1)[None], S[None]


def test_errors_are_within_flas_tolerances_and_below_those_of_16_bit_tensors() -> None:
    args = inputs(150, K=64, V=64)
    wide = {name: t.double() for name, t in args.items()}
    truth = gradients(reference.formula, wide, scale=0.125)
    errors = relative_errors(gradients(ours, args, scale=0.125), truth)
    plain = relative_errors(gradients(eager_chunks, args, scale=0.125), truth)
    for name, error in errors.items():
        assert error < (0.02 if name in ("g", "beta") else 0.008), (name, error)
        assert error < plain[name], (name, error, plain[name])


#: Kernels in the interpreter, with two value heads per key head and two tiles of K, against the model.
KERNELS = """
import torch, isobit
torch.manual_seed(0)
T, HV, K, V = 70, 2, 80, 48
q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, K), dim=-1).bfloat16() for _ in range(2))
args = {"q": 3 * q, "k": 2 * k, "v": torch.randn(1, T, HV, V).bfloat16(), "beta": torch.rand(1, T, HV)}
bounds = torch.tensor([0, 66, 66, 70])
def gradients(backend, **more):
    leaves = {n: t.clone().requires_grad_() for n, t in (args | more).items()}
    o, state = isobit.gated_delta_rule(
        **leaves, use_qk_l2norm_in_kernel=True, output_final_state=True, cu_seqlens=bounds, backend=backend
    )
    (o.float().square().sum() + state.square().sum()).backward()
    return {n: t.grad for n, t in leaves.items()}
more = {"g": -torch.rand(1, T, HV), "initial_state": torch.randn(3, HV, K, V)}
by_kernels, by_model = gradients("triton", **more), gradients("model", **more)
for name in by_model:
    assert torch.equal(by_kernels[name], by_model[name]), name
"""


@pytest.mark.compat
def test_kernels_have_the_bits_of_the_model() -> None:
    in_interpreter(KERNELS)


def test_the_inverse_is_all_that_is_kept_besides_arguments() -> None:
    args, kept = inputs(70), []
    args |= {name: args[name].requires_grad_() for name in NAMES}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(**args)
    known = {t.data_ptr() for t in args.values()}
    rest = [t for t in kept if t.data_ptr() not in known]
    assert [tuple(t.shape) for t in rest] == [(1, 70, 2, 64)]
    assert rest[0].nbytes == 2 * 64 * 70 * 2  # 128 bytes for every token and value head


def test_there_is_no_second_derivative() -> None:
    q = inputs(5)["q"].requires_grad_()
    o, _ = ours(**inputs(5) | {"q": q})
    (dq,) = torch.autograd.grad(o.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        dq.float().sum().backward()


# The pattern that Triton miscompiles


def _loaded(node: ast.expr, names: dict[str, ast.expr]) -> bool:
    """Whether an operand comes from memory: a load, `tile`, or a transposed view of one."""
    if isinstance(node, ast.Name):
        return node.id in names and _loaded(names[node.id], names)
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if called == "tl.trans":
        return _loaded(node.args[0], names)  # type: ignore[attr-defined]
    return called in ("tl.load", "tile")


def left_operands(source: str) -> Iterator[tuple[str, bool]]:
    """(left operand of a product, whether it comes from memory) in all functions."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {
            n.targets[0].id: n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "product":
                yield ast.unparse(node.args[0]), _loaded(node.args[0], names)


def test_no_result_of_a_product_is_a_left_operand() -> None:
    """On Hopper, Triton before 3.7.1 miscompiles such products where the result is transposed, which is why
    FLA's backward refuses to run there."""
    found = dict(left_operands(inspect.getsource(kernels_triton_bwd)))
    assert len(found) > 8 and all(found.values()), [name for name, loaded in found.items() if not loaded]
    bad = "def f(q, k):\n    s = product(tl.load(q), k, z)\n    return product(tl.trans(s), k, z)"
    assert dict(left_operands(bad)) == {"tl.load(q)": True, "tl.trans(s)": False}


# Known to be bad

ONE = "B=1 T=66 H=1 HV=1 K=16 V=16 bf16"
PACKED = "B=1 T=71 H=1 HV=1 K=48 V=16 fp16 mode=gh lengths=5+0+66"


@contextmanager
def candidate(backward: Callable[..., Any]) -> Iterator[None]:
    """A backend named "candidate" whose forward is the class's."""

    def never(args: dict[str, Any]) -> None:
        """No reason not to serve."""

    added = {NAME: model.gated_delta_rule, f"{NAME}_bwd": backward}
    backends = {n: Backend("candidate", f, str(GDR_1_CPU), never, False, never) for n, f in added.items()}
    for name, backend in backends.items():
        OPS[name].backends.append(backend)
    try:
        yield
    finally:
        for name, backend in backends.items():
            OPS[name].backends.remove(backend)


def only(backward: Callable[..., Any], law: str, case: str) -> Cell:
    with candidate(backward):
        request = Request(
            ops=(NAME,), backends=("candidate",), laws=(law,), device=torch.device("cpu"), case=case
        )
        (cell,) = run(request)
    return cell


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_gradient_fails(name: str) -> None:
    def wrong(**args: Any) -> tuple[Tensor | None, ...]:
        found = dict(zip(NAMES, model_bwd.gated_delta_rule_bwd(**args), strict=True))
        own = found[name]
        return tuple((found | {name: None if own is None else own * 1.1}).values())

    cell = only(wrong, "gradient", ONE)
    assert cell.status == FAIL and cell.reason.startswith(f"gradient:{name}: "), cell.reason


def without_the_last_state(**args: Any) -> tuple[Tensor | None, ...]:
    return model_bwd.gated_delta_rule_bwd(**args | {"dfinal_state": None})


def into_the_sequence_before(**args: Any) -> tuple[Tensor | None, ...]:
    """Chunks of packed sequences that are summed over their ends: dg of a sequence's last chunk takes in that
    of the next one."""
    found = list(model_bwd.gated_delta_rule_bwd(**args))
    if args["cu_seqlens"] is not None and found[3] is not None:
        bounds = args["cu_seqlens"].tolist()
        found[3][:, bounds[0] : bounds[1]] += found[3][:, bounds[1] : bounds[1] + 1]
    return tuple(found)


def by_the_recurrence(**args: Any) -> tuple[Tensor | None, ...]:
    """Accurate, and another order."""
    from isobit.ops.gated_delta_rule import reference_bwd

    return reference_bwd.gated_delta_rule_bwd(**args)


def test_the_class_passes_as_a_candidate() -> None:
    for law, case in (("gradient", ONE), ("agree", PACKED)):
        cell = only(model_bwd.gated_delta_rule_bwd, law, case)
        assert cell.status == OK, cell.reason


@pytest.mark.parametrize(
    ("function", "law", "case"),
    [
        (without_the_last_state, "gradient", ONE),
        (into_the_sequence_before, "agree", PACKED),
        (by_the_recurrence, "agree", PACKED),
    ],
)
def test_bad_computations_fail(function: Callable[..., Any], law: str, case: str) -> None:
    assert only(function, law, case).status == FAIL
