"""Guards what no law states about `logp`: values worked out by hand, rows that are not numbers, shapes and
strides, and autograd's bookkeeping."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit import ContractError, logp
from isobit.frame.op import OPS

INF, NAN = float("inf"), float("nan")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = generator(seed)
    z = torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)
    return z, torch.randint(0, shape[-1], shape[:-1], generator=gen)


def everything(z: Tensor, ids: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return logp(z, ids, return_entropy=True, return_lse=True, **options)


def plain(z: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Written once more, with none of our own code in it."""
    z = z / temperature
    log_p = torch.log_softmax(z, -1)
    entropy = torch.distributions.Categorical(logits=z).entropy()
    return log_p.gather(-1, ids[..., None])[..., 0], entropy, torch.logsumexp(z, -1)


# Values


def test_values_worked_out_by_hand() -> None:
    # exp(z) = 1, 2, 5: probabilities 1/8, 2/8, 5/8.
    z = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log().expand(3, 3)
    found, entropy, lse = everything(z, torch.arange(3))
    assert found.tolist() == pytest.approx([math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)], abs=1e-14)
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropy.tolist() == pytest.approx([expected] * 3, abs=1e-14)
    assert lse.tolist() == pytest.approx([math.log(8)] * 3, abs=1e-14)


def test_temperature_divides_the_logits() -> None:
    # exp(z / 2) = 1, 3: probabilities 1/4, 3/4; an int is a number too.
    z = 2 * torch.tensor([1.0, 3.0], dtype=torch.float64).log()
    for temperature in (2, 2.0):
        found, entropy, lse = everything(z, torch.tensor(1), temperature=temperature)
        assert float(found) == pytest.approx(math.log(3 / 4), abs=1e-14)
        assert float(lse) == pytest.approx(math.log(4), abs=1e-14)
        assert float(entropy) == pytest.approx(math.log(4) - 0.75 * math.log(3), abs=1e-14)


def test_one_column_is_certain() -> None:
    for dtype in FLOATS:
        found, entropy, lse = everything(torch.tensor([[-3.5], [1e4]], dtype=dtype), torch.zeros(2).long())
        assert found.tolist() == entropy.tolist() == [0.0, 0.0]
        assert lse.tolist() == torch.tensor([-3.5, 1e4], dtype=dtype).tolist()


@pytest.mark.parametrize("shift", [1e4, -1e4, 2.0**20])
def test_a_common_shift_changes_no_bit_of_logp_and_entropy(shift: float) -> None:
    z = torch.randint(-8, 9, (5, 33), generator=generator()).float()  # exact in fp32, shifted or not
    ids = torch.arange(5)
    for a, b in zip(everything(z, ids)[:2], everything(z + shift, ids)[:2], strict=True):
        assert torch.equal(a, b)


def test_a_dominating_logit_leaves_a_tiny_logp_with_its_digits() -> None:
    z = torch.zeros(1, 5, dtype=torch.float64)
    z[0, 2] = 16.0
    assert float(logp(z, torch.tensor([2]))) == pytest.approx(-math.log1p(4 * math.exp(-16)), rel=1e-8)
    # In fp32 the sum 1 + 4 exp(-16) is rounded once, and nothing else is.
    assert float(logp(z.float(), torch.tensor([2]))) == pytest.approx(-4 * math.exp(-16), abs=2**-24)
    assert float(logp(z.float(), torch.tensor([0]))) == pytest.approx(-16.0, rel=1e-7)


# Rows that are not plain numbers


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("low", [-INF, None])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_banned_tokens_are_as_if_they_were_not_there(
    dtype: torch.dtype, low: float | None, temperature: float
) -> None:
    banned = torch.finfo(dtype).min if low is None else low
    z = torch.tensor([[banned, 0.5, banned, 2.0, banned]], dtype=dtype, requires_grad=True)
    rest = torch.tensor([[0.5, 2.0]], dtype=dtype, requires_grad=True)
    found = everything(z, torch.tensor([3]), temperature=temperature)
    expected = everything(rest, torch.tensor([1]), temperature=temperature)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    sum(found).sum().backward()
    sum(expected).sum().backward()
    assert torch.equal(z.grad[:, [1, 3]], rest.grad)
    assert z.grad[0, [0, 2, 4]].tolist() == [0.0, 0.0, 0.0]


def test_a_banned_token_that_is_chosen_has_logp_minus_infinity() -> None:
    z = torch.tensor([[-INF, 1.0, 2.0]], requires_grad=True)
    found = logp(z, torch.tensor([0]))
    assert found.tolist() == [-INF]
    found.sum().backward()
    p = torch.softmax(z.detach()[0, 1:], -1)
    assert torch.allclose(z.grad, torch.cat([torch.ones(1), -p])[None])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("extreme", ["min", "max"])
def test_a_row_full_of_an_extreme_is_uniform(dtype: torch.dtype, extreme: str) -> None:
    z = torch.full((1, 4), getattr(torch.finfo(dtype), extreme), dtype=dtype, requires_grad=True)
    found, entropy = logp(z, torch.tensor([1]), return_entropy=True)
    assert found.tolist() == pytest.approx([-math.log(4)]) and entropy.tolist() == pytest.approx(
        [math.log(4)]
    )
    found.sum().backward()
    assert z.grad.tolist() == [[-0.25, 0.75, -0.25, -0.25]]


@pytest.mark.parametrize(
    "row",
    [
        [0.0, NAN, 1.0],
        [NAN, 0.0, 1.0],
        [0.0, INF, 1.0],
        [INF, 0.0, 1.0],
        [0.0, INF, -INF],
        [-INF, -INF, -INF],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_is_not_a_distribution_is_nan_and_alone(row: list[float], dtype: torch.dtype) -> None:
    z, ids = torch.zeros(3, 3, dtype=dtype), torch.zeros(3, dtype=torch.long)
    z[0], z[2] = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-1.0, 0.0, 4.0])
    clean = z.clone().requires_grad_()
    z[1] = torch.tensor(row)
    z.requires_grad_()
    for a, b in zip(everything(z, ids)[:2], everything(clean, ids)[:2], strict=True):
        assert a.isnan().tolist() == [False, True, False] and torch.equal(a[::2], b[::2])
        pairs = ((a, z), (b, clean))
        da, db = (torch.autograd.grad(x.sum(), y, retain_graph=True)[0] for x, y in pairs)
        assert da[1].isnan().all() and torch.equal(da[::2], db[::2])


# Ids


def test_int32_and_int64_ids_give_the_same_bits() -> None:
    z, ids = batch(6, 9)
    for a, b in zip(everything(z, ids), everything(z, ids.int()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.float32])
def test_other_ids_are_rejected(dtype: torch.dtype) -> None:
    z, ids = batch(6, 9)
    with pytest.raises(ContractError, match=r"^logp\(token_ids: \[6\] \w+\): dtype must be int32 or int64"):
        logp(z, ids.to(dtype))


@pytest.mark.parametrize("bad", [-1, 9, 2**31 - 1])
def test_a_bad_id_is_named_with_its_place(bad: int) -> None:
    z, ids = batch(2, 3, 9)
    ids[1, 2] = bad
    with pytest.raises(ContractError) as error:
        logp(z, ids)
    assert str(error.value) == (
        f"logp(token_ids: [2, 3] int64): id {bad} at [1, 2] is outside [0, 9) and is not ignore_index=-100"
    )


def test_a_bad_id_in_a_masked_row_is_fine() -> None:
    z, ids = batch(4, 9)
    ids[1], ids[2] = 99, -7
    mask = torch.tensor([1, 0, 1, 1])
    found = logp(z, ids, mask=mask, ignore_index=-7)
    assert found[1:3].tolist() == [0.0, 0.0] and (found[[0, 3]] != 0).all()


def test_a_bad_id_without_a_dimension() -> None:
    with pytest.raises(ContractError, match=r"id 9 at \[\] is outside \[0, 9\)"):
        logp(torch.zeros(9), torch.tensor(9))


def test_an_unchecked_bad_id_is_nan_in_its_row_alone() -> None:
    z, ids = batch(3, 9)
    ids[1] = 9
    z.requires_grad_()
    outputs = everything(z, ids, validate=False)
    sum(o.sum() for o in outputs).backward()
    for t in (*outputs, z.grad[:, 0]):
        assert t.isnan().tolist() == [False, True, False]


def test_ignore_index_may_be_a_token_of_the_vocabulary() -> None:
    z, _ = batch(3, 5)
    z.requires_grad_()
    outputs = everything(z, torch.tensor([0, 2, 4]), ignore_index=2)
    sum(o.sum() for o in outputs).backward()
    for t in (*outputs, z.grad.abs().sum(-1)):
        assert (t == 0).tolist() == [False, True, False]


@pytest.mark.parametrize("ignore_index", [2**31, 2**40, -(2**31) - 1])
def test_an_ignore_index_that_int32_ids_cannot_hold_does_not_wrap_around(ignore_index: int) -> None:
    """2**40 is 0 in 32 bits: token 0 would be ignored without a word."""
    z, ids = torch.zeros(1, 3), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ContractError, match=rf"^logp\(ignore_index: {ignore_index}\): "):
        logp(z, ids, ignore_index=ignore_index)
    assert float(logp(z, ids.long(), ignore_index=ignore_index)) == pytest.approx(-math.log(3))


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF, 10**400, 1e-45], ids=lambda t: str(t)[:5])
def test_a_temperature_that_cannot_divide_fp32_is_rejected(temperature: float) -> None:
    with pytest.raises(ContractError, match=r"^logp\(temperature: .*\): must be a positive"):
        logp(torch.zeros(2, 3), torch.zeros(2).long(), temperature=temperature)


# Masks


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.bool, [True, False, True]),
        (torch.uint8, [255, 0, 1]),
        (torch.int8, [-128, 0, 1]),
        (torch.int16, [256, 0, -1]),  # 256 is 0 in a byte
        (torch.int32, [1 << 16, 0, 7]),
        (torch.int64, [1 << 32, 0, -5]),
    ],
)
def test_any_nonzero_mask_counts(dtype: torch.dtype, values: list[int]) -> None:
    z, ids = batch(3, 5)
    z[1] = NAN  # not read, so it can leak neither forward nor backward
    z.requires_grad_()
    outputs = everything(z, ids, mask=torch.tensor(values, dtype=dtype))
    sum(o.sum() for o in outputs).backward()
    for t in (*outputs, z.grad.abs().sum(-1)):
        assert (t == 0).tolist() == [False, True, False] and bool(t.isfinite().all())


# Shapes and strides


def strided(how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, ids and mask whose leading dimensions no two strides can walk."""
    gen = generator(3)
    if how == "permuted":
        z = torch.randn(2, 3, 4, 5, 7, generator=gen).permute(2, 0, 3, 1, 4)
    elif how == "cut":
        z = torch.randn(5, 4, 6, 4, 9, generator=gen)[:4, :2, :5, :3, 1:8]
    else:
        z = torch.randn(4, 1, 5, 1, 7, generator=gen).expand(4, 2, 5, 3, 7)
    ids = torch.randint(0, 7, (3, 5, 2, 4), generator=gen).permute(3, 2, 1, 0)
    return z, ids, torch.rand(4, 2, 5, 6, generator=gen)[..., ::2] < 0.7


@pytest.mark.parametrize("how", ["permuted", "cut", "expanded"])
def test_strides_do_not_matter(how: str) -> None:
    results = []
    for dense in (False, True):
        z, ids, mask = (t.contiguous() if dense else t for t in strided(how))
        leaf = z.detach().requires_grad_()
        outputs = everything(leaf, ids, mask=mask, temperature=0.7)
        (grad,) = torch.autograd.grad(sum(o.sum() for o in outputs), leaf)
        results.append((*outputs, grad))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3), (2, 3, 1, 2)])
def test_any_leading_shape_is_rows(lead: tuple[int, ...]) -> None:
    z, ids = batch(*lead, 11)
    rows = everything(z.reshape(-1, 11), ids.reshape(-1))
    for found, expected in zip(everything(z, ids), rows, strict=True):
        assert found.shape == lead and torch.equal(found.reshape(-1), expected)


@pytest.mark.parametrize("lead", [(0,), (3, 0), (0, 2, 4)])
def test_no_rows(lead: tuple[int, ...]) -> None:
    z = torch.zeros(*lead, 5, requires_grad=True)
    mask = torch.ones(lead, dtype=torch.bool)
    outputs = everything(z, torch.zeros(lead, dtype=torch.long), mask=mask)
    assert [o.shape for o in outputs] == [lead] * 3
    sum(o.sum() for o in outputs).backward()
    assert z.grad.shape == z.shape


# What comes back


def test_the_forms_of_the_result() -> None:
    z, ids = batch(4, 6)
    out, entropy, lse = everything(z, ids)
    alone = logp(z, ids)
    assert isinstance(alone, Tensor) and torch.equal(alone, out)
    for options, expected in (
        ({"return_entropy": True}, (out, entropy)),
        ({"return_lse": True}, (out, lse)),
        ({"return_entropy": True, "return_lse": True}, (out, entropy, lse)),
    ):
        found = logp(z, ids, **options)
        assert isinstance(found, tuple) and len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_are_fp32_and_gradients_have_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    z, ids = batch(4, 6, dtype=dtype)
    z.requires_grad_()
    outputs = everything(z, ids)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {o.dtype for o in outputs} == {wide}
    sum(o.sum() for o in outputs).backward()
    assert z.grad.dtype == dtype


def test_results_own_their_memory() -> None:
    """Writing into one result must not change another, nor what the backward saved."""
    z, ids = batch(4, 6)
    gradients = []
    for write in (False, True):
        leaf = z.clone().requires_grad_()
        out, entropy, lse = everything(leaf, ids)
        if write:
            with torch.no_grad():
                out.zero_()
                lse.zero_()
        gradients.append((entropy.detach(), torch.autograd.grad(entropy.sum() + lse.sum(), leaf)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_options_are_by_name_only() -> None:
    z, ids = batch(4, 6)
    with pytest.raises(TypeError):
        logp(z, ids, None)
    with pytest.raises(TypeError):
        logp(z, ids, temp=1.0)


# Gradients


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_in_fp64(temperature: float, masked: bool) -> None:
    z, ids = batch(2, 3, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]]) if masked else None
    if masked:
        ids[1, 2] = -100

    def call(z: Tensor) -> tuple[Tensor, ...]:
        return everything(z, ids, mask=mask, temperature=temperature)

    assert torch.autograd.gradcheck(call, z.requires_grad_(), check_batched_grad=False)


@pytest.mark.parametrize("used", [s for n in (1, 2, 3) for s in itertools.combinations(range(3), n)])
@pytest.mark.parametrize("banned", [False, True])
def test_gradients_through_any_of_the_outputs(used: tuple[int, ...], banned: bool) -> None:
    z, ids = batch(6, 9, dtype=torch.float64)
    if banned:  # PyTorch's own entropy is NaN at -inf, so a number that is as good as it
        z[:, 3], ids[ids == 3] = -1e5, 4
    weights = torch.randn(3, 6, generator=generator(1), dtype=torch.float64)

    def gradient(function: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        leaf = z.clone().requires_grad_()
        outputs = function(leaf, ids, temperature=1.3)
        return torch.autograd.grad(sum((outputs[i] * weights[i]).sum() for i in used), leaf)[0]

    torch.testing.assert_close(gradient(everything), gradient(plain), rtol=1e-12, atol=1e-14)


def test_a_second_derivative_is_refused_by_name() -> None:
    z, ids = batch(4, 6)
    z.requires_grad_()
    (grad,) = torch.autograd.grad(logp(z, ids).sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^isobit\.logp has no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("victim", ["logits", "token_ids", "mask"])
def test_writing_into_an_input_before_the_backward_is_caught(victim: str) -> None:
    z, ids = batch(4, 6)
    args = {"logits": z.requires_grad_() * 1.0, "token_ids": ids, "mask": torch.ones(4, dtype=torch.bool)}
    out = logp(**args)
    with torch.no_grad():
        args[victim].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_can_be_kept_and_walked_twice() -> None:
    z, ids = batch(4, 6)
    z.requires_grad_()
    out = logp(z, ids, return_entropy=True)[1].sum()
    (first,) = torch.autograd.grad(out, z, retain_graph=True)
    (second,) = torch.autograd.grad(out, z)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, z)


def test_a_gradient_under_vmap() -> None:
    """Inside vmap a tensor does not say that it requires grad; the backward has what it needs anyway."""
    z, ids = batch(4, 6)
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    torch.func.vmap(lambda row, token: logp(row, token))(a, ids).sum().backward()
    logp(b, ids).sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_a_gradient_of_the_entropy_needs_the_entropy() -> None:
    z, ids = torch.randn(2, 5), torch.tensor([0, 1])
    with pytest.raises(ContractError, match=r"logp_bwd\(entropy: None\): is required with dentropy"):
        OPS["logp_bwd"](
            logits=z, token_ids=ids, mask=None, stats=torch.ones(2, 2), entropy=None, dlogp=None,
            dentropy=torch.ones(2), dlse=None, ignore_index=-100, temperature=1.0, padded_vocab=None,
            backend="reference",
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_traced_call_serves_other_sizes() -> None:
    z, ids = torch.randn(3, 7), torch.tensor([0, 1, 2])
    # Deprecated, and still in use: a trace must not freeze the path that one size took.
    traced = torch.jit.trace(lambda z, ids: logp(z, ids), (z, ids), check_trace=False)
    more, ids = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 4])
    assert torch.equal(traced(more, ids), logp(more, ids))


def test_gradients_in_a_batch() -> None:
    z, ids = torch.randn(2, 5, requires_grad=True), torch.tensor([0, 1])
    out = logp(z, ids)
    both = torch.autograd.grad(out, z, torch.eye(2), is_grads_batched=True, retain_graph=True)[0]
    assert torch.equal(both[1], torch.autograd.grad(out, z, torch.tensor([0.0, 1.0]))[0])
