"""Guards what no law states about `det_gemm` and `det_linear`: bits against the arithmetic model, shapes and
strides, errors, which gradients are computed and how, and PyTorch's machinery."""

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import isobit
from isobit import ContractError, UnsupportedError, det_gemm, det_gemm_dw, det_linear
from isobit.frame.op import OPS
from isobit.numerics import chain, cut, segments
from isobit.ops.det_gemm import model

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(ints), b.contiguous().view(ints))


class Watch(TorchDispatchMode):
    """Sees which of our ops run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "isobit":
            self.seen.append(func._schema.name.removeprefix("isobit::"))
        return func(*args, **(kwargs or {}))


# Bits


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 1, 1), (3, 16, 5), (2, 17, 40), (33, 200, 7), (1, 1030, 9)])
def test_a_product_is_one_chain_and_one_rounding(dtype: torch.dtype, M: int, K: int, N: int) -> None:
    a, b = randn(M, K, dtype=dtype), randn(K, N, dtype=dtype, seed=1)
    exact = chain(a, b)
    for out_dtype in (None, BF16, F16, F32):
        assert same_bits(det_gemm(a, b, out_dtype=out_dtype), exact.to(out_dtype or dtype))


@pytest.mark.parametrize("bias_dtype", [BF16, F32])
def test_a_bias_joins_the_sum_before_the_rounding(bias_dtype: torch.dtype) -> None:
    x, weight, bias = randn(9, 70), randn(50, 70, seed=1), randn(50, dtype=bias_dtype, seed=2)
    exact = chain(x, weight.t()) + bias.float()
    assert same_bits(det_linear(x, weight, bias), exact.bfloat16())
    assert same_bits(det_linear(x, weight, bias, out_dtype=F32), exact)
    rounded_first = (det_linear(x, weight).float() + bias.float()).bfloat16()
    assert not same_bits(det_linear(x, weight, bias), rounded_first)  # the control


def test_a_row_is_the_same_alone_and_the_order_of_k_is_not_free() -> None:
    a, b = randn(40, 300), randn(300, 20, seed=1)
    whole = det_gemm(a, b, out_dtype=F32)
    for rows in (slice(7, 8), slice(3, 20), torch.randperm(40)):
        assert same_bits(det_gemm(a[rows], b, out_dtype=F32), whole[rows])
    assert not same_bits(det_gemm(a.flip(1), b.flip(0), out_dtype=F32), whole)  # the control


@pytest.mark.parametrize("out_dtype", [BF16, F16, F32])
def test_infinities_and_nan_have_the_bits_of_the_gpu(out_dtype: torch.dtype) -> None:
    a = torch.tensor([[INF, 1.0], [NAN, 1.0], [INF, INF], [-INF, 1.0]], dtype=BF16)
    b = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=BF16)
    out = det_gemm(a, b, out_dtype=out_dtype)
    nan, ints = (0x7FFFFFFF, torch.int32) if out_dtype == F32 else (0x7FFF, torch.int16)
    assert out[[0, 2, 3], 0].tolist() == [INF, INF, -INF]
    assert out.view(ints)[[0, 1, 1, 2], [1, 0, 1, 1]].tolist() == [nan] * 4  # 0 * inf is NaN too
    biased = det_linear(a, b.t(), torch.full((2,), -INF), out_dtype=out_dtype)
    assert biased.view(ints)[0].tolist() == [nan, nan]


def test_the_model_warns_once_that_it_is_slow() -> None:
    from isobit.ops.det_gemm.model import _warn_that_it_is_slow

    _warn_that_it_is_slow.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            det_gemm(randn(2, 3), randn(3, 2))
    assert len(said) == 1 and "exact bits of a Hopper GPU" in str(said[0].message)


# Shapes and strides


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 2), (0,), (2, 0)])
def test_any_leading_shape(lead: tuple[int, ...]) -> None:
    a, b = randn(*lead, 4, 20), randn(*lead, 20, 6, seed=1)
    c = det_gemm(a, b)
    assert list(c.shape) == [*lead, 4, 6] and c.is_contiguous()
    matrices = zip(a.reshape(-1, 4, 20), b.reshape(-1, 20, 6), c.reshape(-1, 4, 6), strict=True)
    assert all(same_bits(z, det_gemm(x, y)) for x, y, z in matrices)
    x, weight = randn(*lead, 20), randn(6, 20, seed=1)
    y = det_linear(x, weight)
    assert list(y.shape) == [*lead, 6]
    assert same_bits(y.reshape(-1, 6), det_linear(x.reshape(-1, 20), weight))


@pytest.mark.parametrize(("M", "K", "N"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (1, 0, 1)])
def test_empty_sizes(M: int, K: int, N: int) -> None:
    a, b = randn(M, K).requires_grad_(), randn(K, N, seed=1).requires_grad_()
    c = det_gemm(a, b)
    assert list(c.shape) == [M, N] and not c.any() and c.dtype == BF16
    c.sum().backward()
    assert a.grad is not None and b.grad is not None and a.grad.shape == a.shape and b.grad.shape == b.shape
    bias = randn(N, dtype=F32, seed=2).requires_grad_()
    y = det_linear(a, b.t(), bias)
    if K == 0:
        assert same_bits(y.detach(), bias.detach().bfloat16().expand(M, N))
    y.sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [M] * N
    assert list(det_gemm_dw(randn(M, K), randn(M, N)).shape) == [N, K]


def views(t: Tensor) -> dict[str, Tensor]:
    """The same values, elsewhere."""
    rows, cols = t.shape[-2:]
    wide = t.new_full((*t.shape[:-2], 2 * rows, cols + 3), NAN)
    wide[..., ::2, 1 : cols + 1] = t
    spread = t.new_full((*t.shape, 3), NAN)
    spread[..., 1] = t
    return {
        "transposed": t.mT.contiguous().mT,
        "every other row of a wider one": wide[..., ::2, 1 : cols + 1],
        "columns apart": spread[..., 1],
    }


@pytest.mark.parametrize("lead", [(), (2,)])
def test_strides_change_no_bit(lead: tuple[int, ...]) -> None:
    a, b = randn(*lead, 20, 50), randn(*lead, 50, 30, seed=1)
    expected = det_gemm(a, b)
    for name, view in views(a).items():
        assert same_bits(det_gemm(view, b), expected), name
    for name, view in views(b).items():
        assert same_bits(det_gemm(a, view), expected), name


def test_the_warning_points_at_the_callers_line() -> None:
    model._warn_that_it_is_slow.cache_clear()
    with pytest.warns(UserWarning, match="exact bits of a Hopper GPU") as seen:
        det_gemm(randn(2, 3).requires_grad_(), randn(3, 2))
    assert [w.filename for w in seen] == [__file__]


def test_operands_are_read_in_place() -> None:
    """What a backend gets is a view: transposed, sliced and expanded operands, one to four dimensions."""
    from isobit.ops.det_gemm.calls import matrices, rows

    x = randn(6, 4, 8)
    for t in (x, x.mT, x[:, 1:3], x[0], x[0].t(), x[:, :, ::2], x[None], x[:1].expand(5, 4, 8)):
        assert matrices(t).data_ptr() == t.data_ptr() and matrices(t).ndim in (2, 3)
    for t in (x, x[0], x[0, 0], x[:, ::2][:, :1], x[0].t(), torch.ones((), dtype=BF16).expand(6, 4, 1)):
        assert rows(t).data_ptr() == t.data_ptr() and rows(t).ndim == 2


# Errors


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: det_gemm(randn(2, 3), randn(3, 2, dtype=F16)),
         "det_gemm(b: [3, 2] fp16): dtype must be that of a, bf16"),
        (lambda: det_gemm(randn(2, 3, dtype=F32), randn(3, 2)),
         "det_gemm(a: [2, 3] fp32): dtype must be 16-bit floating point (bf16, fp16)"),
        (lambda: det_gemm(torch.ones(2, 3).int(), randn(3, 2)),
         "det_gemm(a: [2, 3] int32): dtype must be 16-bit floating point (bf16, fp16)"),
        (lambda: det_gemm(randn(3), randn(3, 2)),
         "det_gemm(a: [3] bf16): needs at least 2 dimension(s) [*, M, K], has 1"),
        (lambda: det_gemm(randn(2, 3), randn(4, 2)), "det_gemm(b: [4, 2] bf16): K=4 but K=3 from a"),
        (lambda: det_gemm(randn(2, 3), randn(3, 2), out_dtype=torch.float64),
         "det_gemm(out_dtype: torch.float64): must be bf16, fp16, fp32 or None (the inputs')"),
        (lambda: det_gemm(randn(2, 3), randn(3, 2), out_dtype="bf16"),  # type: ignore[arg-type]
         "det_gemm(out_dtype: 'bf16'): must be dtype, not str"),
        (lambda: det_gemm(randn(2, 3), randn(3, 2).to("meta")),
         "det_gemm(b: [3, 2] bf16): is on meta but a is on cpu"),
        (lambda: det_linear(randn(2, 3), randn(4, 3, dtype=F16)),
         "det_linear(weight: [4, 3] fp16): dtype must be that of x, bf16"),
        (lambda: det_linear(randn(2, 3), randn(4, 5)), "det_linear(weight: [4, 5] bf16): K=5 but K=3 from x"),
        (lambda: det_linear(randn(2, 3), randn(4, 3), randn(3)),
         "det_linear(bias: [3] bf16): N=3 but N=4 from weight"),
        (lambda: det_linear(randn(2, 3), randn(4, 3), randn(4, dtype=F16)),
         "det_linear(bias: [4] fp16): dtype must be that of x, bf16, or fp32"),
        (lambda: det_linear(randn(2, 3), randn(4, 3), randn(4).double()),
         "det_linear(bias: [4] fp64): dtype must be floating point up to fp32 (bf16, fp16, fp32)"),
        (lambda: det_gemm(randn(2, 3), randn(3, 2), numerics="chain8"),
         "det_gemm(numerics: 'chain8'): unknown numerics class on cpu; known: chain16, none, tree8"),
        (lambda: det_gemm_dw(randn(2, 3), randn(2, 3), numerics="chain16"),
         "det_gemm_dw(numerics: 'chain16'): unknown numerics class on cpu; known: seg16/512, none"),
        (lambda: det_gemm(randn(2, 3), randn(3, 2), backend="cublas"),
         "det_gemm(backend='cublas'): unknown backend; known: hopper, triton, model, hopper-tree8, "
         "triton-tree8, model-tree8"),
    ],
)  # fmt: skip
def test_wrong_calls(call: Any, expected: str) -> None:
    with pytest.raises(ContractError) as error:
        call()
    assert str(error.value) == expected


def test_backends_that_cannot_serve_here_say_why() -> None:
    a, b = randn(2, 3), randn(3, 2)
    with pytest.raises(
        UnsupportedError, match=r"need an NVIDIA Hopper GPU \(sm_90\); the tensors are on cpu"
    ):
        det_gemm(a, b, backend="hopper")
    with pytest.raises(UnsupportedError, match="its numerics class here is 'none', not 'chain16'"):
        det_gemm(a, b, backend="triton", numerics="chain16")
    assert same_bits(det_gemm(a, b, numerics="chain16"), det_gemm(a, b, backend="model"))


def test_what_keeps_the_hopper_kernels_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.frame import device as devices

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "arch_key", lambda device: "sm_80")
    assert devices.hopper_cannot_run(gpu) == (
        "its kernels need an NVIDIA Hopper GPU (sm_90); the tensors are on sm_80"
    )
    monkeypatch.setattr(devices, "arch_key", lambda device: "sm_90")
    assert devices.hopper_cannot_run(gpu) is None
    monkeypatch.setattr(devices, "gluon_cannot_import", lambda: "no Gluon")
    assert devices.hopper_cannot_run(gpu) == "no Gluon"


def test_the_model_serves_other_devices_by_name_only() -> None:
    model = OPS["det_linear"].backend_named("model")
    elsewhere = {"x": torch.empty(2, 3, device="meta")}
    assert model.why_not(elsewhere, torch.device("meta")) == (
        "it computes on the CPU, thousands of times slower: select it by name to compare bits"
    )
    assert model.not_by_default({"x": torch.empty(2, 3)}) is None


def test_the_classes_follow_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.ops.det_gemm import op

    def classes(name: str, arch: str) -> list[str]:
        monkeypatch.setattr(op, "arch_key", lambda device: arch)
        device = torch.device("cuda", 0)
        ops = ("det_gemm", "det_linear", "det_gemm_dw", "det_gemm_bwd")
        return [OPS[name_of].backends[i].numerics_on(device) for name_of in ops
                for i, b in enumerate(OPS[name_of].backends) if b.name == name]  # fmt: skip

    hopper = ["chain16", "chain16", "seg16/512", "chain16"]
    assert classes("hopper", "sm_90") == classes("triton", "sm_90") == classes("model", "sm_90") == hopper
    assert classes("triton", "sm_80") == [f"{c}/sm_80" for c in hopper]
    assert classes("triton", "gfx942")[0] == "chain16/gfx942"
    assert OPS["det_gemm"].backend_named("triton").numerics_on(torch.device("cpu")) == "none"


# Gradients


def test_gradients_are_our_own_products() -> None:
    x, weight = randn(3, 200, 40).requires_grad_(), randn(24, 40, seed=1).requires_grad_()
    bias, dy = randn(24, dtype=F32, seed=2).requires_grad_(), randn(3, 200, 24, seed=3)
    dx, dw, db = torch.autograd.grad(det_linear(x, weight, bias), (x, weight, bias), dy)
    with torch.no_grad():
        rows, flat = dy.reshape(600, 24), x.reshape(600, 40)
        assert same_bits(dx.reshape(600, 40), chain(rows, weight).bfloat16())
        exact = segments(rows.t(), flat, cut([600], 512))
        assert same_bits(dw, exact.bfloat16()) and same_bits(exact, det_gemm_dw(x, dy))
        assert same_bits(db, segments(rows.t(), torch.ones(600, 1).bfloat16(), cut([600], 512))[:, 0])
    a, b, dc = randn(2, 600, 8).requires_grad_(), randn(2, 8, 5, seed=1).requires_grad_(), randn(2, 600, 5)
    da, db = torch.autograd.grad(det_gemm(a, b), (a, b), dc)
    for z in range(2):
        assert same_bits(da[z], chain(dc[z], b[z].detach().t()).bfloat16())
        assert same_bits(db[z], segments(a[z].detach().t(), dc[z], cut([600], 512)).bfloat16())


@pytest.mark.parametrize("out_dtype", [None, F32])
def test_gradients_are_near_the_truth(out_dtype: torch.dtype | None) -> None:
    x, weight, bias = randn(40, 64, dtype=F16), randn(32, 64, dtype=F16, seed=1), randn(32, dtype=F16, seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    dy = randn(40, 32, dtype=out_dtype or F16, seed=3)
    result = torch.autograd.grad(det_linear(x, weight, bias, out_dtype=out_dtype), leaves, dy)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    rounded = dy.half().double()  # an fp32 gradient is rounded to the operands' dtype first
    truth = torch.autograd.grad(torch.nn.functional.linear(*exact), exact, rounded)
    for ours, true, leaf in zip(result, truth, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        torch.testing.assert_close(ours.double(), true, rtol=2**-10, atol=1e-3)


@pytest.mark.parametrize(
    ("needs", "products"),
    [
        ((True, False, False), ["product"]),
        ((False, True, False), ["token_product"]),
        ((False, False, True), ["token_product"]),
        ((True, True, True), ["product", "token_product", "token_product"]),
    ],
)
def test_only_what_needs_a_gradient_costs_one(
    needs: tuple[bool, ...], products: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = (randn(5, 8), randn(3, 8), randn(3))
    leaves = [t.requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    y = det_linear(*leaves)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert any(t.data_ptr() == leaves[0].data_ptr() for t in saved) is needs[1]  # x is saved for dW alone
    made: list[str] = []
    for name in ("product", "token_product"):
        run = getattr(model, name)
        monkeypatch.setattr(
            model, name, lambda *a, run=run, name=name, **k: made.append(name) or run(*a, **k)
        )
    y.sum().backward()
    assert made == products and [t.grad is not None for t in leaves] == list(needs)


def test_a_forced_backend_and_a_class_bind_the_gradients() -> None:
    for bound in ({"backend": "model"}, {"numerics": "chain16"}, {"backend": "model", "numerics": "chain16"}):
        leaves = [t.requires_grad_() for t in (randn(5, 8), randn(3, 8), randn(3))]
        det_linear(*leaves, **bound).sum().backward()
        a, b = leaves[0], leaves[1].t()
        det_gemm(a, b, **bound).sum().backward()
        assert all(t.grad is not None for t in leaves)


@pytest.mark.parametrize("name", ["det_gemm", "det_linear"])
def test_second_derivatives_say_why_there_is_none(name: str) -> None:
    x, weight = randn(4, 8).requires_grad_(), randn(3, 8).requires_grad_()
    out = det_linear(x, weight) if name == "det_linear" else det_gemm(x, weight.t())
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    for leaf in (x, weight):
        with pytest.raises(RuntimeError, match=f"^isobit.{name} has no second derivative: "):
            torch.autograd.grad(dx.float().sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^isobit.det_gemm_dw is a gradient and has none of its own"):
        det_gemm_dw(x, x).sum().backward()


# PyTorch's machinery


def operands(requires_grad: bool = True) -> list[Tensor]:
    result = [randn(2, 5, 24), randn(7, 24, seed=1), randn(7, dtype=F32, seed=2)]
    return [t.requires_grad_(requires_grad) for t in result]


def test_opcheck() -> None:
    x, weight, bias = operands()

    def opcheck(name: str, **args: Any) -> None:
        result = OPS[name]
        torch.library.opcheck(result.torch_op, result.contract.to_torch(result.bind(args)))

    opcheck("det_linear", x=x, weight=weight, bias=bias, out_dtype=F32)
    opcheck("det_linear", x=x.float(), weight=weight.float(), bias=bias, operand_dtype=BF16)
    transposed = weight.t().contiguous().t()
    opcheck("det_linear", x=x, weight=transposed, numerics="chain16", backend="model")
    opcheck("det_gemm", a=x, b=x.detach().mT, out_dtype=F16)
    x, weight, bias = operands(requires_grad=False)
    mask, cu = torch.ones(2, 5).int(), torch.tensor([0, 3, 10])
    opcheck("det_gemm_dw", x=x, dy=x, mask=mask, cu_seqlens=cu, init=torch.ones(24, 24), validate=True)
    wanted = {"want_a": True, "want_b": True}
    opcheck("det_gemm_bwd", dc=x.float(), a=x, b=x.new_ones(2, 24, 24), **wanted)
    wanted = {"want_x": True, "want_weight": True, "want_bias": True}
    wide = {"x": x.float(), "weight": weight.float(), "operand_dtype": BF16, "bias_dtype": F32}
    opcheck("det_linear_bwd", dy=randn(2, 5, 7), **wide, **wanted)


def test_gradients_of_fp32_tensors_are_rounded_to_operand_dtype() -> None:
    """As autocast does. The dtype of the gradient is that of the tensor."""
    x, weight, bias = (t.detach().float().requires_grad_() for t in operands())
    y = det_linear(x, weight, bias, operand_dtype=BF16)
    y.backward(randn(*y.shape).to(BF16))
    for t in (x, weight, bias):
        assert t.grad is not None and t.grad.dtype == F32 and torch.equal(t.grad, t.grad.to(BF16).float())


def test_one_compiled_graph_serves_every_number_of_rows() -> None:
    torch._dynamo.reset()

    def step(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = det_linear(x, weight, bias)
        return det_gemm(y, y.mT, out_dtype=F32, numerics="chain16")

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    _, weight, bias = operands()
    for attempt, M in enumerate((5, 9, 70)):
        rows = randn(2, M, 24, seed=M).requires_grad_()
        with torch.compiler.set_stance("fail_on_recompile" if attempt else "default"):
            result = compiled(rows, weight, bias)
            grads = torch.autograd.grad(result.sum(), (rows, weight, bias))
        expected = step(rows, weight, bias)
        for a, b in zip(grads, torch.autograd.grad(expected.sum(), (rows, weight, bias)), strict=True):
            assert same_bits(a, b)
        assert same_bits(result, expected)
    torch._dynamo.reset()


def test_autocast_changes_nothing_inside() -> None:
    x, weight, bias = operands(requires_grad=False)
    with torch.autocast("cpu", dtype=BF16):
        inside = det_linear(x, weight, bias, out_dtype=F32)
        with pytest.raises(ContractError, match=r"^det_linear\(x: \[2, 5, 24\] fp32\)"):
            det_linear(x.float(), weight, bias)
    assert same_bits(inside, det_linear(x, weight, bias, out_dtype=F32))


def test_meta_tensors_have_shapes() -> None:
    y = det_linear(torch.empty(4, 8, dtype=BF16, device="meta"), torch.empty(3, 8, dtype=BF16, device="meta"))
    assert list(y.shape) == [4, 3] and y.dtype == BF16 and y.device.type == "meta"


@pytest.mark.parametrize("name", ["det_gemm", "det_linear", "det_gemm_dw"])
def test_the_public_functions_take_the_arguments_of_their_ops_in_order(name: str) -> None:
    public = [each for each in inspect.signature(getattr(isobit, name)).parameters if each != "group"]
    assert [*public, "prefer"] == OPS[name].contract.names
