"""Guards everything around `linear_logp`: errors of wrong calls, autograd's bookkeeping, PyTorch's machinery,
what is kept for a backward, and the machine code of the Triton kernels."""

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
import to_ptx
from isobit import ContractError, UnsupportedError
from isobit.frame.launch import Recorder
from isobit.frame.op import CONTROLS, OPS
from isobit.ops.linear_logp import kernels_triton as kernels
from isobit.ops.linear_logp import kernels_triton_bwd as kernels_bwd
from isobit.ops.linear_logp import op
from isobit.ops.linear_logp.op import KEPT_ROWS, backward, forward, kept_bytes, kept_sizes, linear_logp
from isobit.ops.linear_logp.slabs import SLAB_BYTES
from linear_logp_calls import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    NAN,
    OUTPUTS,
    Call,
    assert_same_bits,
    each,
    evaluate,
    make,
    some,
    truth,
)  # fmt: skip

# Wrong calls


def wrong(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: dict[str, Any] = {"hidden": torch.zeros(4, 3), "weight": torch.zeros(5, 3),
                            "token_ids": torch.zeros(4, dtype=torch.int64)} | changes  # fmt: skip
    return tuple(args.pop(name) for name in ("hidden", "weight", "token_ids")), args


ROWS = torch.ones(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(4, 2)}, r"weight: \[5, 3\] fp32\): D=3 but D=2 from hidden"),
        ({"hidden": torch.zeros(3, 4).t()}, r"hidden: .*last dimension must be contiguous"),
        ({"hidden": torch.zeros(4, 3, dtype=torch.int64)}, r"hidden: .*dtype must be floating point"),
        ({"weight": torch.zeros(5, 3, dtype=torch.int8)}, r"weight: .*dtype must be floating point"),
        ({"weight": torch.zeros(5, 3, dtype=BF16)}, r"weight: .*dtype must be that of hidden, fp32"),
        ({"weight": torch.zeros(15)}, r"weight: \[15\] fp32\): needs 2 dimension"),
        ({"weight": torch.zeros(0, 3)}, r"weight: \[0, 3\] fp32\): V must be at least 1"),
        ({"weight": torch.zeros(5, 0), "hidden": torch.zeros(4, 0)}, r"weight: .*D must be at least 1"),
        ({"weight": torch.zeros(5, 3, device="meta")}, r"weight: .*is on meta but hidden is on cpu"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, r"token_ids: .*leading shape=\[3\]"),
        ({"token_ids": torch.zeros(4)}, r"token_ids: .*dtype must be int32 or int64"),
        ({"bias": torch.zeros(4)}, r"bias: \[4\] fp32\): V=4 but V=5 from weight"),
        ({"bias": torch.zeros(5, dtype=F16)}, r"bias: .*dtype must be that of hidden, fp32, or fp32"),
        ({"bias": torch.zeros(5, device="meta")}, r"bias: .*is on meta"),
        ({"mask": ROWS}, r"mask: .*dtype must be bool or integer"),
        ({"mask": torch.ones(5).bool()}, r"mask: .*leading shape=\[5\]"),
        ({"temperature": 0.0}, r"temperature: 0.0\): must be a positive number"),
        ({"temperature": NAN}, r"temperature: nan\): must be a positive number"),
        ({"temperature": torch.ones(3)}, r"temperature: \[3\] fp32\): leading shape"),
        ({"temperature": ROWS.double()}, r"temperature: \[4\] fp64\): dtype must be fp32"),
        ({"temperature": ROWS.clone().requires_grad_()}, r"temperature: \[4\] fp32\): no gradient goes to"),
        ({"softcap": -1.0}, r"softcap: -1.0\): must be a positive number"),
        ({"logit_scale": INF}, r"logit_scale: inf\): must be a number"),
        ({"logits_dtype": F32}, r"logits_dtype: torch.float32\): must be bf16, fp16 or None"),
        ({"vocab_size": 6}, r"vocab_size: 6\): must be 1 to V=5"),
        ({"vocab_size": 0}, r"vocab_size: 0\): must be 1 to V=5"),
        ({"workspace_bytes": -1}, r"workspace_bytes: -1\): must not be negative"),
        ({"token_ids": torch.zeros(4, dtype=torch.int32), "ignore_index": 2**40}, r"ignore_index: .*hold"),
        (
            {"backend": "cublas"},
            r"unknown backend; known: hopper, triton, hopper-8x4, triton-8x4, model-8x4, reference",
        ),
        ({"hidden": None}, r"hidden: None\): is required"),
    ],
)  # fmt: skip
def test_a_wrong_call_raises_an_error_with_the_rule(changes: dict[str, Any], message: str) -> None:
    positional, named = wrong(**changes)
    with pytest.raises(ContractError, match=message):
        linear_logp(*positional, **named)


def test_a_backend_that_cannot_serve_says_why() -> None:
    positional, _ = wrong()
    with pytest.raises(UnsupportedError, match="need an NVIDIA Hopper GPU"):
        linear_logp(*positional, backend="hopper")
    explained = str(isobit.explain("linear_logp", *positional, softcap=1.0))
    assert re.search(r"hopper +its kernels need an NVIDIA Hopper GPU.*; the tensors are on cpu", explained)
    assert re.search(r"reference +serves this call", explained)
    doubles = (t.double() if t.is_floating_point() else t for t in positional)
    with pytest.raises(UnsupportedError, match="inputs are fp64"):
        linear_logp(*doubles, backend="triton")


def test_an_option_that_hopper_does_not_serve_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobit.frame.device.arch_key", lambda device: "sm_90")
    monkeypatch.setattr("isobit.frame.device.triton_cannot_run", lambda device: None)
    why_not = lambda args: "softcap is triton's" if args["softcap"] else None  # noqa: E731
    monkeypatch.setattr("isobit.ops.linear_logp.kernels_hopper.why_not", why_not)
    positional, _ = wrong()
    assert isobit.explain("linear_logp", *positional).backend == "hopper"
    explained = isobit.explain("linear_logp", *positional, softcap=1.0)
    assert explained.backend == "reference" and explained.reasons["hopper"] == "softcap is triton's"


CONTROLLED = {p.name for p in CONTROLS}

#: A backward with no option, no gradient, and everything but the bias wanted.
NOTHING: dict[str, Any] = {
    **dict.fromkeys(p.name for p in backward.contract.params if p.optional and p.name not in CONTROLLED),
    "ignore_index": -100,
    "temperature": 1.0,
    "want_hidden": True,
    "want_weight": True,
    "want_bias": False,
    "shard": 0,
    "shards": 8,
}


def test_a_backward_checks_its_required_arguments() -> None:
    call = make(4)
    given = {"hidden": call.hidden, "weight": call.weight, "token_ids": call.token_ids} | NOTHING
    given |= {"stats": torch.ones(2, 4), "dlogp": torch.ones(4)}
    with pytest.raises(ContractError, match=r"entropy: None\): is required with dentropy"):
        backward(**given | {"dentropy": torch.ones(4)})
    with pytest.raises(ContractError, match=r"bias: None\): is required with want_bias"):
        backward(**given | {"want_bias": True})
    for name in given:  # a missing argument is an error, not a default
        with pytest.raises(ContractError, match=rf"linear_logp_bwd\({name}: None\): is required"):
            backward(**{k: v for k, v in given.items() if k != name})


# What comes back


def test_the_forms_of_the_result() -> None:
    call = make(4)
    args = (call.hidden, call.weight, call.token_ids)
    out, entropy, lse = linear_logp(*args, return_entropy=True, return_lse=True)
    alone = linear_logp(*args)
    assert isinstance(alone, Tensor) and torch.equal(alone, out)
    for options, expected in (({"return_entropy": True}, (out, entropy)), ({"return_lse": True}, (out, lse))):
        result = linear_logp(*args, **options)
        assert isinstance(result, tuple) and len(result) == 2
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_results_are_fp32_and_gradients_have_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    result = evaluate(make(4, dtype=dtype, bias=F32), None)
    wide = F64 if dtype == F64 else F32
    assert {result[name].dtype for name in OUTPUTS} == {wide}
    assert [result[name].dtype for name in ("dhidden", "dweight", "dbias")] == [dtype, dtype, F32]


@pytest.mark.parametrize(
    "wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("weight", "bias")]
)
def test_only_gradients_that_are_wanted_are_computed(
    monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...]
) -> None:
    asked: list[tuple[bool, ...]] = []
    plain = backward.backends[-1]

    def spy(**args: Any) -> Any:
        asked.append(tuple(args[f"want_{name}"] for name in ("hidden", "weight", "bias")))
        return plain.run(**args)

    monkeypatch.setattr(backward, "backends", [replace(plain, run=spy)])
    call = make(4, bias=F32)
    result = evaluate(replace(call, wanted=wanted), None)
    assert asked == [tuple(name in wanted for name in ("hidden", "weight", "bias"))]
    everything = plain.run  # by the plain backend, with everything wanted
    monkeypatch.setattr(backward, "backends", [replace(plain, run=everything)])
    assert_same_bits(result, evaluate(call, None))


def test_a_frozen_weight_launches_no_kernel_for_its_gradient() -> None:
    def launched(hidden: bool, weight: bool, bias: bool) -> list[str]:
        recorder = Recorder()
        record(recorder, 600, 64, 600, BF16, wants=(hidden, weight, bias))
        return [kernel.__name__ for kernel, _, _ in recorder.launches[2:]]

    assert launched(True, False, False) == ["dlogits_tile", "dhidden_tile"]
    assert launched(False, True, False) == ["dlogits_tile", "dweight_tile"]
    assert launched(True, True, True) == ["dlogits_tile", "dhidden_tile", "dweight_tile", "dweight_tile"]


def test_hidden_states_are_read_in_place() -> None:
    recorder = Recorder()
    view = torch.empty(3, 6, 8, device="meta")[:, :-1]
    record(recorder, 15, 8, 9, F32, hidden=view)
    assert all(args[0] is view for kernel, args, _ in recorder.launches if kernel.__name__ == "logp_splits")


# Autograd


def test_a_second_derivative_is_refused_by_name() -> None:
    call = make(4)
    hidden = call.hidden.requires_grad_()
    out = linear_logp(hidden, call.weight, call.token_ids)
    (grad,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^isobit\.linear_logp has no second derivative"):
        grad.sum().backward()


def test_a_graph_can_be_kept_and_walked_twice() -> None:
    call = make(4)
    hidden = call.hidden.requires_grad_()
    out = linear_logp(hidden, call.weight, call.token_ids, workspace_bytes=10**9).sum()
    (first,) = torch.autograd.grad(out, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(out, hidden)
    assert torch.equal(first, second)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_gradients_through_any_of_the_outputs(used: tuple[int, ...]) -> None:
    call = make(5, dtype=F64, softcap=2.0)
    zeros = tuple(g if i in used else torch.zeros_like(g) for i, g in enumerate(call.cotangents))
    expected = truth(replace(call, cotangents=zeros))
    leaves = [t.requires_grad_() for t in (call.hidden, call.weight)]
    outputs = linear_logp(*leaves, call.token_ids, softcap=2.0, return_entropy=True, return_lse=True)
    result = torch.autograd.grad([outputs[i] for i in used], leaves, [call.cotangents[i] for i in used])
    for grad, name in zip(result, ("dhidden", "dweight"), strict=True):
        torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14)


# PyTorch's machinery


@pytest.mark.parametrize("workspace_bytes", [None, 10**9])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_opcheck(dtype: torch.dtype, workspace_bytes: int | None) -> None:
    call = make(2, 3, dtype=dtype, bias=F32, mask=some)
    tensors = [t.requires_grad_() for t in (call.hidden, call.weight, call.bias)]
    hidden, weight, bias = tensors

    def opcheck(name: str, **args: Any) -> None:
        result = OPS[name]
        torch.library.opcheck(result.torch_op, result.contract.to_torch(result.bind(args)))

    flags = {"return_entropy": True, "return_lse": True, "return_stats": True}
    memory = {"keep": workspace_bytes is not None, "workspace_bytes": workspace_bytes}
    given = {"hidden": hidden, "weight": weight, "token_ids": call.token_ids, "bias": bias}
    opcheck("linear_logp", **given, mask=call.options["mask"], **flags, **memory)
    rows = torch.ones(2, 3)
    opcheck("linear_logp", **given, temperature=rows, **flags, **memory)
    args = {name: t.detach() for name, t in given.items()}
    args = NOTHING | args | {"stats": torch.ones(2, 2, 3), "entropy": rows, "dlogp": rows, "dentropy": rows}
    for wants in ((True, True, True), (False, True, False), (True, False, False)):
        wanted = dict(zip(("want_hidden", "want_weight", "want_bias"), wants, strict=True))
        opcheck("linear_logp_bwd", **args | wanted)


@pytest.mark.parametrize("workspace_bytes", [None, 10**9])
def test_compiled(workspace_bytes: int | None) -> None:
    def step(call: Call) -> tuple[Tensor, ...]:
        outputs = linear_logp(
            call.hidden, call.weight, call.token_ids, bias=call.bias, mask=call.options["mask"],
            temperature=call.options["temperature"], softcap=3.0, return_entropy=True,
            workspace_bytes=workspace_bytes,
        )  # fmt: skip
        return outputs

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (6, 11):
        results = []
        for run in (step, compiled):
            call = make(n, bias=F32, mask=some, temperature=each)
            leaves = [t.requires_grad_() for t in (call.hidden, call.weight, call.bias)]
            outputs = run(call)
            results.append((*outputs, *torch.autograd.grad(sum(o.sum() for o in outputs), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_changes_nothing() -> None:
    call = make(5)
    expected = evaluate(call, None)
    with torch.autocast("cpu", dtype=BF16):
        assert_same_bits(evaluate(call, None), expected)


# Kept probabilities


def test_probabilities_are_kept_only_where_they_fit_and_a_backward_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    plain = forward.backends[-1]

    def spy(**args: Any) -> Any:
        asked.append(args["keep"])
        return plain.run(**args)

    monkeypatch.setattr(forward, "backends", [replace(plain, run=spy)])
    call = make(4)
    needed = kept_bytes(4, 33)
    assert needed == KEPT_ROWS * (256 * 2 + 16) + SLAB_BYTES  # and a slab
    for requires_grad, workspace in ((True, needed), (True, needed - 1), (True, None), (False, needed)):
        hidden = call.hidden.detach().requires_grad_(requires_grad)
        linear_logp(hidden, call.weight, call.token_ids, workspace_bytes=workspace)
    with torch.no_grad():
        linear_logp(hidden.requires_grad_(), call.weight, call.token_ids, workspace_bytes=needed)
    linear_logp(hidden, call.weight, call.token_ids, workspace_bytes=needed, backend="reference")
    assert asked == [True] + [False] * 5


def test_sizes_of_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the frame's before a backend is chosen, so they depend on nothing that it cannot know."""
    args: dict[str, Any] = {"hidden": torch.empty(2, 70, 8, dtype=BF16),
                            "weight": torch.empty(300, 8, dtype=BF16), "vocab_size": None,
                            "softcap": None}  # fmt: skip
    nothing = {"R": 0, "C": 0, "G": 0}
    assert kept_sizes(args) == nothing  # no Hopper GPU
    monkeypatch.setattr(op, "hopper_cannot_run", lambda device: None)
    assert kept_sizes(args) == {"R": 256, "C": 512, "G": 2}
    assert kept_sizes(args | {"vocab_size": 256}) == {"R": 256, "C": 256, "G": 1}
    for other in ({"softcap": 1.0}, {"hidden": torch.empty(2, 70, 8)}):
        assert kept_sizes(args | other) == nothing


# Machine code


def record(
    launch: Recorder, N: int, D: int, V: int, dtype: torch.dtype, full: bool = False,
    wants: tuple[bool, bool, bool] = (True, True, True), hidden: Tensor | None = None,
) -> None:  # fmt: skip
    """Forward and backward on meta tensors: without options, or with all of them."""

    def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    hidden = empty(N, D, dtype=dtype) if hidden is None else hidden
    lead = hidden.shape[:-1]
    args = NOTHING | {p.name: p.default for p in forward.contract.params}
    args |= {"hidden": hidden, "weight": empty(V, D, dtype=dtype)}
    args |= {"token_ids": empty(*lead, dtype=torch.int64), "return_entropy": full, "return_lse": full}
    args["return_stats"] = True
    args["bias"] = empty(V) if full or wants[2] else None
    args |= zip(("want_hidden", "want_weight", "want_bias"), wants, strict=True)
    if full:
        args |= {"mask": empty(*lead, dtype=torch.bool), "temperature": empty(*lead)}
        args |= {"softcap": 30.0, "logit_scale": 2.0, "logits_dtype": BF16}
    logp, entropy, lse, stats = kernels.linear_logp(launch, **args)
    args |= {"stats": stats, "entropy": entropy, "dlogp": logp, "dentropy": entropy, "dlse": lse}
    kernels_bwd.linear_logp_bwd(launch, **args)


@pytest.fixture(scope="module")
def compiled_for_hopper() -> list[tuple[str, torch.dtype, Any]]:
    found = []
    for dtype in (BF16, F32):
        recorder = Recorder()
        record(recorder, 1, 1, 1, dtype, wants=(True, True, False))  # sizes of 1 become constants
        for name, source, options in recorder.sources():
            done = to_ptx.compiled(source, options)
            found.append((name, dtype, done))
    return found


@pytest.mark.compat
def test_every_sum_is_one_chain_of_the_right_steps(
    compiled_for_hopper: list[tuple[str, torch.dtype, Any]],
) -> None:
    for name, dtype, done in compiled_for_hopper:
        chains = 0 if name == "logp_fold" else 1
        assert done.asm["ttir"].count("tt.dot ") == chains, name
        matrix = re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k(\d+)", done.asm["ptx"])
        assert set(matrix) == ({"16"} if dtype == BF16 and chains else set()), name  # fp32: never TF32
        # Known to run once, a loop would make the bias the start of its chain.
        if name in ("logp_splits", "dlogits_tile"):
            assert "scf.for" in done.asm["ttir"]


@pytest.mark.compat
def test_no_kernel_may_fuse_a_product_and_a_sum() -> None:
    recorder = Recorder()
    record(recorder, 1000, 64, 5000, BF16, full=True)
    assert {options["enable_fp_fusion"] for _, _, options in recorder.launches} == {False}


@pytest.mark.compat
def test_the_order_over_the_vocabulary_is_a_function_of_v_alone() -> None:
    orders = set()
    for N in (1, 100, 70_000):
        recorder = Recorder()
        record(recorder, N, 64, 151_936, BF16)
        kernel, args, options = recorder.launches[0]
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        orders.add(tuple(given[k] for k in ("n_splits", "ROWS", "COLS", "K", "num_warps")))
    assert len(orders) == 1


# The public function


def test_it_takes_the_arguments_of_the_op_in_their_order() -> None:
    public = [name for name in inspect.signature(linear_logp).parameters if name != "group"]
    assert [n for n in OPS["linear_logp"].contract.names if n in public] == public


def test_it_is_exported() -> None:
    assert isobit.linear_logp is linear_logp and "linear_logp" in isobit.__all__


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": "x"}, {"weight": torch.tensor(1.0)}, {"bias": [1.0]},
        {"workspace_bytes": "1G"}, {"vocab_size": "a"},
    ],
)  # fmt: skip
def test_bad_input_is_refused_whatever_the_workspace(change: dict[str, Any]) -> None:
    good = {"hidden": torch.randn(3, 4), "weight": torch.randn(5, 4), "token_ids": torch.tensor([1, 2, 3])}
    with pytest.raises(ContractError):
        linear_logp(**(good | {"workspace_bytes": 1} | change))


def test_explain_takes_the_arguments_of_the_call() -> None:
    hidden, weight, ids = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([1, 2, 3])
    assert (
        isobit.explain("linear_logp", hidden, weight, ids, temperature=torch.ones(3)).backend == "reference"
    )
