"""Functions that are right but for one thing that tests of kernels seldom try. Each must fail the law that is
there for it, in a case for a CPU. They wrap isobit's own functions, so that nothing else can be wrong; the
wrapper alone passes."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit as package
import plain_ops
from candidate_faults import check, fault
from commands import Isobit
from isobit.spec.inputs import incoming, mask_in

Function = Callable[..., Any]


def around(
    op: str, before: Callable[[dict[str, Any]], Any] | None = None, after: Function | None = None
) -> Function:
    """A function of isobit, with `before(arguments)`, which may change them, and `after(outputs, arguments)`
    in place of its outputs."""
    function = getattr(package, op)

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        if before is not None:
            before(given)
        outputs = function(**given)
        return outputs if after is None else after(outputs, given)

    controls = ("validate", "numerics", "backend")
    params = [p for p in inspect.signature(function).parameters.values() if p.name not in controls]
    call.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    return call


def of_each(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Every output with a gradient changed; others, such as a dictionary of statistics, as they are."""
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    changed = tuple(change(o) if isinstance(o, Tensor) and o.requires_grad else o for o in several)
    return changed if isinstance(outputs, tuple) else changed[0]


# Attention: decoding, long caches, wide windows


def scaled_where(condition: Callable[[dict[str, Any]], bool], factor: float) -> Function:
    """Attention whose out is off by a factor in some calls."""

    def scaled(outputs: Any, given: dict[str, Any]) -> Any:
        if not condition(given):
            return outputs
        return (outputs[0] * factor, outputs[1]) if isinstance(outputs, tuple) else outputs * factor

    return around("attention", None, scaled)


def one_key_less(given: dict[str, Any]) -> None:
    if (given.get("window") or 0) >= 64:
        given["window"] -= 1


def decodes(given: dict[str, Any]) -> bool:
    return given["q"].ndim == 4 and given["q"].shape[1] == 1


DECODING, LONG = "B=2 T=1 S=18 H=4 KV=2 D=64 bf16", "B=1 T=2 S=1030 H=1 KV=1 D=64 bf16"
WINDOW = "B=1 T=3 S=150 H=1 KV=1 D=64 fp16 window=64"
BACKWARDS = "B=2 T=7 S=3 H=2 KV=1 D=64 bf16 causal=False"


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (scaled_where(decodes, 1.5), DECODING),
        (scaled_where(lambda a: a["block_table"] is None and a["k"].shape[-3] > 1024, 1.01), LONG),
        (around("attention", one_key_less), WINDOW),
        (scaled_where(lambda a: not a["causal"] and a["q"].shape[1] > a["k"].shape[1], 0.0), BACKWARDS),
    ],
)
def test_attention_that_is_wrong_only_for_such_calls_is_found(wrong: Function, case: str) -> None:
    check(wrong, "accuracy", op="attention", case="B=2 T=5 S=18 H=4 KV=2 D=64 bf16")
    check(around("attention"), "accuracy", op="attention", case=case)
    assert "0:out: " in fault(wrong, "accuracy", op="attention", case=case)


CUT = "B=2 T=3 S=12 H=2 KV=1 D=80 fp16 softcap=4.0 window=7"


def test_a_query_alone_must_have_the_bits_that_it_has_among_others() -> None:
    check(around("attention"), "invariant", op="attention", case=CUT)
    one_off = scaled_where(decodes, 1 + 2.0**-8)
    assert "query 0 of 3 alone: " in fault(one_off, "invariant", op="attention", case=CUT)


# Gradients that are not contiguous


class _AsIfContiguous(torch.autograd.Function):
    """Reads its incoming gradient from the first address on, as many kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        there = g.untyped_storage().nbytes() // g.element_size() - g.storage_offset()
        read = torch.as_strided(g, (min(there, g.numel()),), (1,), g.storage_offset())
        out = g.new_zeros(g.numel())
        out[: read.numel()] = read
        return out.view(g.shape)


class _ContiguousAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        if not g.is_contiguous():
            raise RuntimeError("expected a contiguous gradient")
        return g


SMALL = {
    "logp": "B=2 S=2 T=5 V=33 fp32",
    "rms_norm": "B=2 T=3 H=4 D=64 bf16",
    "attention": "B=2 T=5 S=18 H=4 KV=2 D=64 bf16",
    "ratio_kl": "N=4 V=33 fp32 mask=bool",
    "linear_logp": "N=32 D=48 V=272 bf16",
    "det_gemm": "M=20 K=192 N=64 bf16",
    "det_linear": "M=20 K=192 N=64 bf16 bias=fp32",
}


@pytest.mark.parametrize("op", SMALL)
def test_a_backward_that_reads_any_gradient_as_contiguous_is_found(op: str) -> None:
    case = SMALL[op]
    check(around(op), "gradient", op=op, case=case)
    wrong = around(op, None, lambda o, given: of_each(o, _AsIfContiguous.apply))
    assert "expanded gradient:" in fault(wrong, "gradient", op=op, case=case)
    raising = around(op, None, lambda o, given: of_each(o, _ContiguousAlone.apply))
    text = fault(raising, "gradient", op=op, case=case)
    assert "out.sum().backward() raises RuntimeError: expected a contiguous gradient" in text


@pytest.mark.parametrize("layout", ["transposed", "sliced"])
def test_every_kind_of_gradient_is_given(layout: str) -> None:
    """A backward that is wrong for this one alone."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 0 if g.stride() == incoming(torch.zeros_like(g), layout).stride() else g

    for op in ("logp", "rms_norm"):
        wrong = around(op, None, lambda o, given: of_each(o, Wrong.apply))
        assert f"{layout} gradient:" in fault(wrong, "gradient", op=op, case=SMALL[op])


def test_a_gradient_of_one_output_among_several_is_found() -> None:
    wrong = around("attention", None, lambda o, given: (o[0], _AsIfContiguous.apply(o[1])))
    text = fault(wrong, "gradient", op="attention", case=SMALL["attention"])
    assert "expanded gradient:q" in text


# Masks and strides


def only_ones(given: dict[str, Any]) -> None:
    given["mask"] = None if given.get("mask") is None else given["mask"] == 1


def low_byte(given: dict[str, Any]) -> None:
    given["mask"] = None if given.get("mask") is None else given["mask"].to(torch.int8)


MASKED = {
    "logp": "B=2 T=10 V=1000 fp32 mask=int64",
    "ratio_kl": "N=7 V=1025 fp32 offset ref=logp mask=int64",
    "grpo_loss": "B=3 T=2 V=65 fp32 shifted by=tokens mask=int64 ref=logp reduction=sum normalizer=tensor",
    "linear_logp": "N=17 D=33 V=65 bf16 offset mask=int32 bias=own",
    "linear_policy_loss": "N=17 D=33 V=65 bf16 offset mask=int16 bias=own workspace_bytes=1",
    "det_gemm_dw": "T=1100 K=20 N=8 bf16 padded mask=int64 sequences=4",
}


@pytest.mark.parametrize("change", [only_ones, low_byte])
@pytest.mark.parametrize("op", MASKED)
def test_a_mask_is_not_ones_and_zeros_alone(op: str, change: Callable[..., Any]) -> None:
    assert "beyond the bound" in fault(around(op, change), "accuracy", op=op, case=MASKED[op])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_masks_have_the_values_that_their_dtype_has(dtype: torch.dtype) -> None:
    live = torch.arange(40) % 4 != 3
    mask, limits = mask_in(dtype, live), torch.iinfo(dtype)
    assert mask.dtype == dtype and torch.equal(mask != 0, live)
    wanted = {value for value in (256, 2, -1, 127) if limits.min <= value <= limits.max}
    assert wanted <= set(mask.tolist())


STRIDED = {
    "logp": ("accuracy", "N=20 V=1030 bf16 every other mask=bool each=True"),
    "ratio_kl": ("accuracy", "N=10 V=257 bf16 every other temperature=0.7 ref_dtype=fp32"),
    "grpo_loss": ("invariant", "B=9 T=1 V=3030 fp32 random reduction=sum"),
    "linear_logp": ("accuracy", "N=20 D=24 V=130 fp32 every other mask=bool bias=own temperature=0.7"),
    "det_gemm_dw": ("invariant", "T=1300 K=32 N=24 bf16 mask=uint8 sequences=4 init=True"),
}
LOST = {"token_ids": torch.zeros_like, "mask": lambda mask: None, "temperature": lambda temperature: 1.0}


@pytest.mark.parametrize(
    ("op", "name"),
    [("logp", name) for name in LOST]
    + [("ratio_kl", "token_ids"), ("grpo_loss", "token_ids"), ("linear_logp", "token_ids")]
    + [("linear_logp", "mask"), ("det_gemm_dw", "mask")],
)
def test_what_has_one_number_per_row_may_have_any_stride(op: str, name: str) -> None:
    def loses(given: dict[str, Any]) -> None:
        if isinstance(given.get(name), Tensor) and not given[name].is_contiguous():
            given[name] = LOST[name](given[name])

    law, case = STRIDED[op]
    text = fault(around(op, loses), law, op=op, case=case)
    assert law == "accuracy" or "layout every other: " in text


# Results of earlier calls, and numbers that overflow


def test_a_buffer_that_only_calls_without_gradients_share_is_found() -> None:
    buffers: dict[Any, Tensor] = {}

    def shared(out: Tensor, given: dict[str, Any]) -> Tensor:
        if out.requires_grad:
            return out
        return buffers.setdefault(out.shape, torch.empty_like(out)).copy_(out)

    case = SMALL["logp"]
    check(around("logp"), "repeatable", op="logp", case=case)
    text = fault(alone(around("logp", None, shared)), "repeatable", op="logp", case=case)
    assert "logp of two calls is the same memory" in text


def alone(function: Function) -> Function:
    """Without flags for more outputs."""
    made: Any = function
    params = inspect.signature(function).parameters.values()
    made.__signature__ = inspect.Signature([p for p in params if not p.name.startswith("return_")])
    return function


def test_a_result_that_is_an_argument_is_found() -> None:
    wrong = around("logp", None, lambda out, given: out if out.requires_grad else given["temperature"])
    text = fault(alone(wrong), "repeatable", op="logp", dims={"N": 5, "V": 30}, options={"each": True})
    assert "logp is the memory of its input temperature" in text


def test_a_later_call_that_writes_into_an_earlier_result_is_found() -> None:
    """Its storages differ, so that only the numbers show it."""
    kept: list[Tensor] = []

    def overwrites(out: Tensor, given: dict[str, Any]) -> Tensor:
        if not out.requires_grad:
            for earlier in kept:
                if earlier.shape == out.shape:
                    earlier.copy_(out)
            kept.append(out)
        return out

    text = fault(alone(around("logp", None, overwrites)), "repeatable", op="logp", case=SMALL["logp"])
    assert "logp of an earlier call was overwritten by a later one" in text


def test_a_loss_of_0_times_inf_is_found() -> None:
    """A plain function takes rewards, and no reference: its case has equal rewards in a group."""
    case = "B=4 T=1 V=17 fp32 by=samples ref=none far=True"
    check(around("grpo_loss", None, lambda o, given: o[0]), "accuracy", "gradient", op="grpo_loss", case=case)
    assert "0:loss: " in fault(plain_ops.naive_grpo_loss, "accuracy", op="grpo_loss", case=case)


def test_so_it_is_if_it_takes_advantages() -> None:
    """The case is also made without the rewards that such a function does not take."""

    def naive(
        policy_logits: Tensor,
        ref_logits: Tensor | None,
        token_ids: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        clip_high: float = 0.2,
    ) -> Tensor:
        ratio = (plain_ops.logp(policy_logits, token_ids) - old_logp).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1 + clip_high) * advantages).mean()

    case = "B=4 T=1 V=17 fp32 ref=none far=True"
    assert "0:loss: " in fault(naive, "accuracy", op="grpo_loss", case=case)


# Memory, and how errors are shown


def log_softmax(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The function of docs/check_my_kernel.md."""
    return torch.log_softmax(logits.float(), -1).gather(-1, token_ids.long()[..., None])[..., 0]


def test_memory_is_judged_where_its_law_is_named() -> None:
    assert "fwd: " in fault(log_softmax, "memory")


def test_the_function_of_the_page_passes_all_laws(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the command line, which says what memory it takes, and sets its errors against torch's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    page, path = tmp_path / "page.html", tmp_path / "check.json"
    files = ("--html", str(page), "--json", str(path))
    done = isobit(
        "check", "--op", "logp", "--candidate", "test_wrong_candidates:log_softmax", "--device", "cpu", *files
    )
    assert done.code == 0, done
    assert "memory, not judged without --law memory [N=8 V=50257 fp32]" in done.out
    assert ": no farther than torch" in done.out and "100%" not in done.out
    cases = json.loads(path.read_text())["candidates"][0]["cases"]
    memory, accuracy = (
        [o for c in cases if c["law"] == law for o in c["outputs"]] for law in ("memory", "accuracy")
    )
    assert [o["output"] for o in memory] == ["fwd", "fwd_bwd"]
    assert all(o["passed"] and o["max_abs"] > o["atol"] > 0 for o in memory)
    assert accuracy and {o["slack_used"] for o in accuracy} == {0.0}
    assert "memory, not judged without --law memory" in page.read_text()
    assert "no farther than torch" in page.read_text() and "width:100" not in page.read_text()
