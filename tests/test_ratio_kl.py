"""Guards what no law states about `ratio_kl`: values worked out by hand, rows that are not numbers, what the
call refuses and returns, and autograd's bookkeeping."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from isobit import ContractError, logp, ratio_kl
from isobit.kernels.host.k3 import k3
from isobit.ops.ratio_kl import reference

INF, NAN = float("inf"), float("nan")
F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(policy, reference, ids)."""
    gen = generator(seed)
    z, ref = (torch.randn(shape, generator=gen, dtype=F64).to(dtype) for _ in "zr")
    return z, ref, torch.randint(0, shape[-1], shape[:-1], generator=gen)


def everything(z: Tensor, ref: Tensor | None, ids: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return ratio_kl(z, ref, ids, return_logp=True, return_entropy=True, **options)


# Values


def test_values_worked_out_by_hand() -> None:
    # Probabilities 1/8, 2/8, 5/8 of the policy, 1/4, 2/4, 1/4 of the reference; the old policy had 1/4.
    z = torch.tensor([1.0, 2.0, 5.0], dtype=F64).log().expand(3, 3)
    ref = torch.tensor([1.0, 2.0, 1.0], dtype=F64).log().expand(3, 3)
    old = torch.full((3,), 0.25, dtype=F64).log()
    ratio, kl, own, _ = everything(z, ref, torch.arange(3), old_logp=old)
    assert ratio.tolist() == pytest.approx([0.5, 1.0, 2.5], abs=1e-14)
    # With q / p = 2, 2, 2/5: kl = q / p - 1 - log(q / p).
    assert kl.tolist() == pytest.approx([x - 1 - math.log(x) for x in (2, 2, 0.4)], abs=1e-14)
    assert own.tolist() == pytest.approx([math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)], abs=1e-14)


def test_the_mean_of_kl_under_the_policy_is_the_divergence() -> None:
    """What k3 estimates: sum over tokens of p (q / p - 1 - log(q / p)) = KL(policy || reference)."""
    z, ref, _ = batch(7, dtype=F64)
    ids = torch.arange(7)
    _, kl, own, _ = everything(z.expand(7, 7), ref.expand(7, 7), ids)
    p, log_q = own.exp(), ref.log_softmax(-1)
    assert float((p * kl).sum()) == pytest.approx(float((p * (own - log_q)).sum()), rel=1e-12)
    assert (kl >= 0).all()


def test_temperature_divides_both_logits() -> None:
    z, ref, ids = batch(4, 9, dtype=F64)
    old = torch.randn(4, generator=generator(1), dtype=F64)
    found = everything(z, ref, ids, old_logp=old, temperature=0.5)
    for one, other in zip(found, everything(2 * z, 2 * ref, ids, old_logp=old), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_k3_keeps_its_digits(dtype: torch.dtype) -> None:
    """Against whole numbers: for d = 2^-k the series is d^2/2 (1 + d/3 + d^2/12 + ...)."""
    eps = torch.finfo(dtype).eps
    for exponent, sign in itertools.product(range(1, 40), (1, -1)):
        d = sign * 2.0**-exponent
        terms = [d ** (n - 2) * 2 / math.factorial(n) for n in range(2, 25)]
        expected = d * d / 2 * math.fsum(terms)
        assert float(k3(torch.tensor(d, dtype=dtype))) == pytest.approx(expected, rel=2 * eps)


def test_k3_at_the_ends() -> None:
    d = torch.tensor([0.0, -0.0, INF, -INF, NAN, 100.0, -100.0, 1.0, -1.0])
    found = k3(d).tolist()
    assert found[:4] == [0.0, 0.0, INF, INF] and math.isnan(found[4]) and found[5:7] == [INF, 99.0]
    assert found[7:] == pytest.approx([math.e - 2, math.exp(-1)], rel=2e-7)


def test_identical_policies_have_zero_kl() -> None:
    z, _, ids = batch(5, 33)
    ratio, kl = ratio_kl(z, z.clone(), ids)
    assert ratio.tolist() == [1.0] * 5 and kl.tolist() == [0.0] * 5


def test_a_ratio_that_overflows_is_infinite() -> None:
    z, _, ids = batch(3, 5)
    ratio, kl = ratio_kl(z, None, ids, old_logp=torch.full((3,), -200.0), ref_logp=torch.full((3,), 200.0))
    assert ratio.tolist() == [INF] * 3 and kl.tolist() == [INF] * 3


def test_an_overflow_that_the_loss_clips_is_in_no_gradient() -> None:
    """0 * inf would be NaN: the gradient of a ratio that a loss has replaced by its bound is 0."""
    z, _, ids = batch(3, 5)
    z.requires_grad_()
    far = torch.tensor([0.0, -200.0, 0.0])
    ratio, kl = ratio_kl(z, None, ids, old_logp=far, ref_logp=-far)
    assert ratio[1] == kl[1] == INF
    (torch.minimum(ratio, ratio.clamp(max=1.2)) + kl.clamp(max=10.0)).sum().backward()
    assert not z.grad[1].any() and bool(z.grad.isfinite().all()) and bool(z.grad[::2].any())


# Rows that are not plain numbers


def test_a_banned_token_that_is_chosen() -> None:
    z = torch.tensor([[-INF, 1.0, 2.0]], requires_grad=True)
    ref, ids = torch.zeros(1, 3), torch.tensor([0])
    ratio, kl = ratio_kl(z, ref, ids, old_logp=torch.tensor([-1.0]))
    assert ratio.tolist() == [0.0] and kl.tolist() == [INF]
    (grad,) = torch.autograd.grad(ratio.sum(), z)
    assert grad.tolist() == [[0.0] * 3]  # a ratio of 0 has no slope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_banned_token_has_the_ratio_1_to_itself(dtype: torch.dtype) -> None:
    """-inf - -inf was NaN, in the ratio and in its gradient."""
    z = torch.tensor([[-INF, 1.0, 2.0], [0.5, 1.0, 2.0]], dtype=dtype, requires_grad=True)
    ids = torch.tensor([0, 0])
    for old_logp in (None, logp(z.detach(), ids)):
        ratio, kl, own, _ = everything(z, z.detach().clone(), ids, old_logp=old_logp)
        assert own[0] == -INF and ratio.tolist() == [1.0, 1.0] and kl.tolist() == [0.0, 0.0]
        (grad,) = torch.autograd.grad(ratio.sum() + kl.sum(), z, retain_graph=True)
        assert torch.equal(grad, torch.autograd.grad(own.sum(), z)[0]) and grad.isfinite().all()
    exact = reference.formula(z, z.detach(), ids)
    (truth,) = torch.autograd.grad(exact[0].sum() + exact[1].sum(), z)
    torch.testing.assert_close(grad, truth)


def test_a_token_that_the_reference_bans() -> None:
    z, _, ids = batch(1, 3)
    ref = torch.zeros(1, 3).index_fill_(1, ids, -INF)
    z.requires_grad_()
    _, kl, own, _ = everything(z, ref, ids)
    assert kl.tolist() == [INF]
    (grad,) = torch.autograd.grad(kl.sum(), z, retain_graph=True)
    assert torch.equal(grad, torch.autograd.grad(own.sum(), z)[0])  # the slope is 1 - 0


@pytest.mark.parametrize("where", ["policy", "reference", "old", "temperature"])
def test_what_is_not_a_number_stays_in_its_row(where: str) -> None:
    z, ref, ids = batch(3, 5)
    options = {"old_logp": torch.zeros(3), "temperature": torch.ones(3), "validate": False}
    clean = everything(z, ref, ids, **options)
    broken = {
        "policy": z,
        "reference": ref,
        "old": options["old_logp"],
        "temperature": options["temperature"],
    }
    broken[where][1] = NAN
    found = everything(z, ref, ids, **options)
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[::2], other[::2])
    expected = {"policy": [True] * 4, "reference": [False, True, False, False]}
    expected |= {"old": [True, False, False, False], "temperature": [True] * 4}
    assert [bool(o[1].isnan()) for o in found] == expected[where]


# Masked rows


@pytest.mark.parametrize("ref", ["logits", "logp", "none"])
def test_masked_rows_are_1_and_0_and_have_no_gradient(ref: str) -> None:
    z, logits, ids = batch(2, 3, 5)
    old, given = torch.zeros(2, 3), torch.zeros(2, 3)
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    ids[1, 0] = -100
    for t in (z, logits, old, given):
        t[0, 1] = t[1, 0] = NAN
    z.requires_grad_()
    options: dict[str, Any] = {"old_logp": old, "mask": mask, "return_kl": ref != "none"}
    options["ref_logp"] = given if ref == "logp" else None
    ratio, *rest = everything(z, logits if ref == "logits" else None, ids, **options)
    dead = torch.tensor([[False, True, False], [True, False, False]])
    assert torch.equal(ratio[dead], torch.ones(2)) and all((o[dead] == 0).all() for o in rest)
    assert all(bool(o.isfinite().all()) for o in (ratio, *rest))
    sum(o.sum() for o in (ratio, *rest)).backward()
    assert bool(z.grad.isfinite().all()) and not z.grad[dead].any()
    assert bool((z.grad[~dead] != 0).any(-1).all())


def test_no_rows() -> None:
    for lead in ((0,), (3, 0)):
        z = torch.zeros(*lead, 5, requires_grad=True)
        outputs = everything(z, torch.zeros(*lead, 5), torch.zeros(lead, dtype=torch.long))
        assert [o.shape for o in outputs] == [torch.Size(lead)] * 4
        sum(o.sum() for o in outputs).backward()
        assert z.grad.shape == z.shape


# References


def test_references_are_one_of_two() -> None:
    z, ref, ids = batch(3, 5)
    said = r"^ratio_kl\(ref_logp: \[3\] fp32\): is given in addition to ref_logits"
    with pytest.raises(ContractError, match=said):
        ratio_kl(z, ref, ids, ref_logp=torch.zeros(3))
    with pytest.raises(
        ContractError, match=r"^ratio_kl\(ref_logits: None\): a kl needs it, or ref_logp; with"
    ):
        ratio_kl(z, None, ids)
    with pytest.raises(ContractError, match=r"^ratio_kl\(ref_logp: "):  # also where neither would be read
        ratio_kl(z, ref, ids, ref_logp=torch.zeros(3), return_kl=False)


def test_without_kl_no_reference_is_read() -> None:
    z, ref, ids = batch(3, 5)
    alone = ratio_kl(z, None, ids, return_kl=False)
    assert isinstance(alone, Tensor)
    for given in ({"ref_logits": ref.fill_(NAN)}, {"ref_logits": None, "ref_logp": torch.full((3,), NAN)}):
        assert torch.equal(ratio_kl(z, token_ids=ids, return_kl=False, **given), alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_policy_and_reference_may_differ_in_dtype_and_strides(dtype: torch.dtype) -> None:
    z, ref, ids = batch(2, 3, 7)
    ref = ref.to(dtype)
    apart = torch.full((2, 4, 9), NAN, dtype=dtype)[:, :-1, 1:8].copy_(ref)
    for one, other in zip(everything(z, ref, ids), everything(z, apart, ids), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)
    given = everything(z, None, ids, ref_logp=logp(ref, ids).float())
    torch.testing.assert_close(given[1], everything(z, ref, ids)[1], rtol=1e-5, atol=1e-6)


def test_policy_and_reference_may_not_differ_in_v() -> None:
    z, ref, ids = batch(3, 5)
    with pytest.raises(
        ContractError, match=r"^ratio_kl\(ref_logits: \[3, 4\] fp32\): V=4 but V=5 from policy"
    ):
        ratio_kl(z, ref[:, :4].contiguous(), ids)


# Refusals


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64, torch.int64])
@pytest.mark.parametrize("name", ["old_logp", "ref_logp"])
def test_log_probabilities_are_fp32(name: str, dtype: torch.dtype) -> None:
    z, _, ids = batch(3, 5)
    given = {"ref_logp": torch.zeros(3)} | {name: torch.zeros(3, dtype=dtype)}
    with pytest.raises(ContractError, match=rf"^ratio_kl\({name}: \[3\] \w+\): dtype must be fp32"):
        ratio_kl(z, None, ids, **given)
    if dtype == F64:
        assert ratio_kl(z.double(), None, ids, **given)[0].dtype == F64


@pytest.mark.parametrize("name", ["ref_logits", "old_logp", "ref_logp", "temperature"])
def test_gradients_go_to_the_policy_alone(name: str) -> None:
    z, ref, ids = batch(3, 5)
    args: dict[str, Any] = {"ref_logits": ref, "old_logp": torch.zeros(3), "temperature": torch.ones(3)}
    if name == "ref_logp":
        args |= {"ref_logits": None, "ref_logp": torch.zeros(3)}
    args[name] = args[name].clone().requires_grad_()
    for policy in (z, z.clone().requires_grad_()):
        with pytest.raises(ContractError, match=rf"^ratio_kl\({name}: .*no gradient goes to it; detach"):
            ratio_kl(policy, token_ids=ids, **args)
    with torch.no_grad():
        ratio_kl(z, token_ids=ids, **args)


def test_a_bad_id_is_named_with_its_place_or_poisons_its_row() -> None:
    z, ref, ids = batch(3, 5)
    ids[1] = 5
    with pytest.raises(ContractError, match=r"^ratio_kl\(token_ids: \[3\] int64\): id 5 at \[1\] is outside"):
        ratio_kl(z, ref, ids)
    z.requires_grad_()
    outputs = everything(z, ref, ids, validate=False)  # also without old_logp, where ratio is 1 elsewhere
    sum(o.sum() for o in outputs).backward()
    for t in (*outputs, z.grad[:, 0]):
        assert t.isnan().tolist() == [False, True, False]


def test_options_are_by_name_only() -> None:
    z, ref, ids = batch(3, 5)
    with pytest.raises(TypeError):
        ratio_kl(z, ref, ids, torch.zeros(3))


# What comes back


def test_the_forms_of_the_result() -> None:
    z, ref, ids = batch(4, 6)
    ratio, kl, own, entropy = everything(z, ref, ids)
    for kl_, logp_, entropy_ in itertools.product((True, False), repeat=3):
        asked = {"return_kl": kl_, "return_logp": logp_, "return_entropy": entropy_}
        found = ratio_kl(z, ref, ids, **asked)
        wanted = [o for o, w in ((kl, kl_), (own, logp_), (entropy, entropy_)) if w]
        several = found if isinstance(found, tuple) else (found,)
        assert isinstance(found, tuple) == bool(wanted) and len(several) == 1 + len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(several, (ratio, *wanted), strict=True))


def test_results_own_their_memory() -> None:
    """Writing into one result must not change another, nor what the backward saved."""
    z, ref, ids = batch(4, 6)
    gradients = []
    for write in (False, True):
        leaf = z.clone().requires_grad_()
        ratio, kl, own, entropy = everything(leaf, ref, ids)
        if write:
            with torch.no_grad():
                for t in (ratio, kl, own):
                    t.zero_()
        gradients.append(torch.autograd.grad((ratio + kl + own + entropy).sum(), leaf)[0])
    assert torch.equal(*gradients)


def test_on_policy_has_the_gradient_of_logp() -> None:
    z, _, ids = batch(4, 6)
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    ratio = ratio_kl(a, None, ids, return_kl=False)
    assert ratio.tolist() == [1.0] * 4
    weights = torch.randn(4, generator=generator(2))
    (ratio * weights).sum().backward()
    (logp(b, ids) * weights).sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_gradcheck_in_fp64() -> None:
    z, ref, ids = batch(2, 3, 5, dtype=F64)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    ids[1, 2] = -100
    options = {"old_logp": ref[..., 1], "mask": mask, "temperature": 0.7}
    for logits, given in ((ref, None), (None, ref[..., 0])):

        def call(z: Tensor, logits: Tensor | None = logits, given: Tensor | None = given) -> Any:
            return everything(z, logits, ids, ref_logp=given, **options)

        assert torch.autograd.gradcheck(call, z.requires_grad_(), check_batched_grad=False)


@pytest.mark.parametrize("used", [s for n in (1, 2, 3) for s in itertools.combinations(range(4), n)])
def test_gradients_through_any_of_the_outputs(used: tuple[int, ...]) -> None:
    z, ref, ids = batch(6, 9, dtype=F64)
    weights, old = torch.randn(5, 6, generator=generator(1), dtype=F64).split((4, 1))

    def plain(z: Tensor) -> tuple[Tensor, ...]:
        own = z.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        d = ref.log_softmax(-1).gather(-1, ids[:, None])[:, 0] - own
        entropy = torch.distributions.Categorical(logits=z).entropy()
        return (own - old[0]).exp(), d.exp() - 1 - d, own, entropy

    def gradient(function: Any) -> Tensor:
        leaf = z.clone().requires_grad_()
        outputs = function(leaf)
        return torch.autograd.grad(sum((outputs[i] * weights[i]).sum() for i in used), leaf)[0]

    ours = gradient(lambda leaf: everything(leaf, ref, ids, old_logp=old[0]))
    torch.testing.assert_close(ours, gradient(plain), rtol=1e-12, atol=1e-14)


def test_a_second_derivative_is_refused_by_name() -> None:
    z, ref, ids = batch(4, 6)
    z.requires_grad_()
    (grad,) = torch.autograd.grad(ratio_kl(z, ref, ids)[0].sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^isobit\.ratio_kl has no second derivative"):
        grad.sum().backward()


def test_transforms_of_torch_func() -> None:
    z, ref, ids = batch(4, 6)

    def loss(row: Tensor, other: Tensor, token: Tensor) -> Tensor:
        ratio, kl = ratio_kl(row, other, token)
        return ratio + kl

    each = torch.func.vmap(torch.func.grad(loss))(z, ref, ids)
    leaf = z.clone().requires_grad_()
    loss(leaf, ref, ids).sum().backward()
    assert torch.equal(each, leaf.grad)


def test_what_serves_is_explained() -> None:
    z, ref, ids = batch(3, 5)
    found = isobit.explain("ratio_kl", z, ref, ids)
    assert (found.backend, found.numerics) == ("reference", "none")
    assert list(found.reasons) == ["triton", "hopper", "reference"]
    with pytest.raises(isobit.UnsupportedError, match="ref_logits are fp64; the kernels compute in fp32"):
        ratio_kl(z, ref.double(), ids, backend="triton")
