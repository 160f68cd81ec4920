"""Guards what `linear_logp` computes, on the reference and on the Triton kernels in the interpreter: values
and gradients of every option against fp64, what must not change bits, and masked rows."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import in_interpreter
from isobit import ContractError
from isobit.ops.linear_logp import kernels_triton as kernels
from isobit.ops.linear_logp import kernels_triton_bwd as kernels_bwd
from isobit.ops.linear_logp.op import linear_logp
from linear_logp_calls import (
    BF16,
    CALLS,
    EVERYTHING,
    F32,
    F64,
    OUTPUTS,
    PARTS,
    WHOLE,
    WORKSPACES,
    assert_near,
    assert_same_bits,
    each,
    evaluate,
    infinite_weight,
    make,
    some,
    truth,
    with_a_bad_id,
)  # fmt: skip

pytestmark = pytest.mark.compat

CHILD = """
import sys, torch
from linear_logp_calls import CALLS, bit_calls, evaluate
calls = CALLS | bit_calls()
torch.save({name: evaluate(call, "triton") for name, call in calls.items()}, sys.argv[1])
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Every call above in Triton's interpreter, in a separate process."""
    out = tmp_path_factory.mktemp("interpreted") / "results"
    in_interpreter(CHILD, out)
    result: dict[str, dict[str, Tensor]] = torch.load(out)
    return result


# Values and gradients


@pytest.mark.parametrize("name", CALLS)
def test_reference(name: str) -> None:
    call = CALLS[name]
    assert_near(evaluate(call, "reference"), truth(call), call.hidden.dtype)


@pytest.mark.parametrize("name", CALLS)
def test_kernels(triton: dict[str, dict[str, Tensor]], name: str) -> None:
    assert_near(triton[name], truth(CALLS[name]), CALLS[name].hidden.dtype)


@pytest.mark.parametrize("options", [{}, {"bias": F64, **EVERYTHING}, {"workspace_bytes": 0}])
def test_reference_in_fp64(options: dict[str, Any]) -> None:
    call = make(7, dtype=F64, **options)
    assert_near(evaluate(call, None), truth(call), F64)


def test_gradcheck() -> None:
    """The formula's gradient is PyTorch's; this one is not even PyTorch's."""
    call = make(4, D=3, V=5, dtype=F64, bias=F64, mask=some, temperature=each, softcap=2.0, logit_scale=1.5)
    inputs = [t.requires_grad_() for t in (call.hidden, call.weight, call.bias)]

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return linear_logp(hidden, weight, call.token_ids, bias=bias, return_entropy=True, return_lse=True,
                           **call.options)  # fmt: skip

    assert torch.autograd.gradcheck(run, inputs)


def test_by_hand() -> None:
    """softcap * tanh(logit_scale * z / softcap) / temperature, one row, two tokens."""
    hidden, weight = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.5], [-1.0, 1.0]])
    result, entropy, lse = linear_logp(
        hidden, weight, torch.tensor(1), bias=torch.tensor([0.25, 0.0]), logit_scale=2.0, softcap=4.0,
        temperature=0.5, return_entropy=True, return_lse=True,
    )  # fmt: skip
    z = [4 * math.tanh(2 * x / 4) / 0.5 for x in (2.25, 1.0)]
    total = math.log(sum(map(math.exp, z)))
    assert float(lse) == pytest.approx(total) and float(result) == pytest.approx(z[1] - total)
    assert float(entropy) == pytest.approx(total - sum(math.exp(x - total) * x for x in z))


def test_logits_are_rounded_only_if_asked() -> None:
    hidden, weight = torch.tensor([[1.0]], dtype=BF16), torch.tensor([[1.0], [0.0]], dtype=BF16)
    bias = torch.tensor([1 / 1024, 0.0])  # 1 + 1/1024 is 1 in bf16
    ids = torch.tensor([0])
    whole = linear_logp(hidden, weight, ids, bias=bias)
    cut = linear_logp(hidden, weight, ids, bias=bias, logits_dtype=BF16)
    assert float(cut) == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-7)
    assert float(whole) == pytest.approx(-math.log1p(math.exp(-1 - 1 / 1024)), abs=1e-7)


def test_fp32_products_are_ieee_whatever_pytorch_was_told() -> None:
    before = torch.get_float32_matmul_precision()
    call = make(5, D=64)
    exact = evaluate(call, None)
    torch.set_float32_matmul_precision("medium")
    try:
        assert_near(evaluate(call, None), truth(call), F32)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_same_bits(evaluate(call, None), exact)


# Bits


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("part", PARTS)
def test_a_row_does_not_depend_on_the_others(
    triton: dict[str, dict[str, Tensor]], dtype: str, part: str
) -> None:
    whole = {k: PARTS[part](triton[f"{dtype}: whole"][k]) for k in (*OUTPUTS, "dhidden")}
    assert_same_bits(whole, triton[f"{dtype}: {part}"])


@pytest.mark.parametrize("dtype", WHOLE)
def test_masked_rows_change_no_bit_of_any_gradient(triton: dict[str, dict[str, Tensor]], dtype: str) -> None:
    whole, padded = triton[f"{dtype}: whole"], dict(triton[f"{dtype}: padded"])
    for name in (*OUTPUTS, "dhidden"):
        assert not padded[name][::2].any()
        padded[name] = padded[name][1::2]
    assert_same_bits(padded, whole)


def test_the_control_of_the_above_changes_bits(triton: dict[str, dict[str, Tensor]]) -> None:
    a, b = triton["fp32: whole"]["logp"], triton["control"]["logp"]
    assert not torch.equal(a, b) and torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("workspace_bytes", WORKSPACES[1:])
def test_the_workspace_changes_no_bit(
    triton: dict[str, dict[str, Tensor]], workspace_bytes: int | None
) -> None:
    assert_same_bits(triton[f"workspace {workspace_bytes}"], triton["workspace None"])


def test_a_frozen_head_changes_no_bit(triton: dict[str, dict[str, Tensor]]) -> None:
    assert list(triton["frozen"]) == [*OUTPUTS, "dhidden"]
    assert_same_bits(triton["frozen"], triton["workspace None"])


def test_a_temperature_gives_the_same_bits_as_a_tensor_of_it(triton: dict[str, dict[str, Tensor]]) -> None:
    assert_same_bits(triton["one temperature"], triton["that temperature for all rows"])


def test_the_parts_of_a_backward_fit_the_workspace() -> None:
    for N in (1, 512, 8192, 100_000, 2_000_000):
        for vocab in (1, 256, 50_257, 151_936):
            for itemsize in (2, 4):
                for workspace in (None, 0, 1 << 20, 1 << 26, 1 << 40):
                    slots, width = kernels_bwd.parts(N, vocab, itemsize, workspace)
                    least = 512 * 256 * itemsize
                    allowed = max(least, kernels.SLAB_BYTES if workspace is None else workspace)
                    assert slots % 512 == 0 and width % 256 == 0
                    assert slots * width * itemsize <= allowed
    # One slab where it fits, wide slabs of all rows where they do, else chunks of rows.
    assert kernels_bwd.parts(8192, 151_936, 2, 1 << 40) == (8192, 152_064)
    assert kernels_bwd.parts(8192, 151_936, 2, None) == (8192, 4096)
    assert kernels_bwd.parts(65_536, 151_936, 2, None) == (8192, 4096)


# Masked rows, and invalid ids


def test_rows_that_do_not_count_are_zero(triton: dict[str, dict[str, Tensor]]) -> None:
    call = CALLS["mask"]
    for result in (triton["mask"], evaluate(call, "reference")):
        for name in (*OUTPUTS, "dhidden"):
            assert not result[name][1::3].any() and not result[name][2].any(), name
        assert result["dweight"].isfinite().all()


def test_a_dead_row_has_no_gradient_whatever_the_weight_holds(triton: dict[str, dict[str, Tensor]]) -> None:
    for result in (triton["infinite weight"], evaluate(infinite_weight(), "reference")):
        assert result["dhidden"][1].tolist() == [0.0] * 20


def test_padding_of_the_vocabulary_gets_no_gradient(triton: dict[str, dict[str, Tensor]]) -> None:
    for result in (triton["padded vocabulary"], evaluate(CALLS["padded vocabulary"], "reference")):
        assert not result["dweight"][20:].any() and not result["dbias"][20:].any()


def test_a_bad_id_is_nan_in_its_row_and_no_part_of_the_sums(triton: dict[str, dict[str, Tensor]]) -> None:
    call = with_a_bad_id(CALLS["bias"])
    masked = call.with_options(mask=torch.arange(7) != 3)
    for result, expected in (
        (triton["bad id"], None),
        (evaluate(call, "reference"), evaluate(masked, "reference")),
    ):
        for name in OUTPUTS:
            assert result[name].isnan().tolist() == [i == 3 for i in range(7)]
        assert result["dhidden"].isnan().all(-1).tolist() == [i == 3 for i in range(7)]
        if expected is None:
            assert_near({k: result[k] for k in ("dweight", "dbias")}, truth(masked), F32)
        else:
            assert_same_bits({k: result[k] for k in ("dweight", "dbias")}, expected)


def test_a_bad_id_is_named_with_its_place() -> None:
    call = make(2, 3, vocab_size=30)
    call.token_ids[1, 2] = 31
    with pytest.raises(ContractError) as error:
        evaluate(call, None)
    assert str(error.value) == (
        "linear_logp(token_ids: [2, 3] int64): id 31 at [1, 2] is outside [0, 30) and is not "
        "ignore_index=-100"
    )


def test_a_bad_temperature_is_named_with_its_place() -> None:
    call = make(3, temperature=lambda lead: torch.tensor([1.0, 0.0, -1.0]))
    with pytest.raises(ContractError, match=r"temperature: \[3\] fp32\): 0.0 at \[1\] is not a positive"):
        evaluate(call, None)
    evaluate(call.with_options(mask=torch.tensor([1, 0, 0])), None)  # fine where it is masked
