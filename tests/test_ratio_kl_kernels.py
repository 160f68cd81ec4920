"""Guards the kernels of `ratio_kl`: their exponentials against fp64, compiled code against the interpreter
and against that of `logp`, rows that are not numbers, and how gradients are read."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import ptx
import to_ptx
from interpreted import in_interpreter
from isobit import logp, ratio_kl
from isobit.frame.launch import Recorder, run
from isobit.kernels.triton import dependent_launch
from isobit.kernels.triton.exp import exp, k3_and_expm1
from isobit.kernels.triton.interpreter import INTERPRETED
from isobit.ops.logp import kernels_hopper as logp_hopper
from isobit.ops.logp import kernels_triton as logp_triton
from isobit.ops.ratio_kl import kernels_hopper, kernels_triton, proof, reference

pytestmark = pytest.mark.compat

INF, NAN = float("inf"), float("nan")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Exponentials


@triton.jit
def exponentials(out, x, N, BLOCK: tl.constexpr):
    """exp, k3 and expm1 of x into out [3, N]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(x + i, mask=i < N, other=0.0)
    k3, expm1 = k3_and_expm1(given)
    tl.store(out + i, exp(given), mask=i < N)
    tl.store(out + N + i, k3, mask=i < N)
    tl.store(out + 2 * N + i, expm1, mask=i < N)


ENDS = (0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 88.7, 88.8, 128.0, 1e30, -87.0, -103.0, -104.0, -1e30, 1e-30)


def arguments(count: int) -> Tensor:
    """Numbers of all sizes, and the ends. Densest where a formula gives way to another one."""
    gen, quarter = generator(1), count // 4
    near = (torch.rand(quarter, generator=gen) - 0.5) * 2.0 ** -torch.randint(
        0, 40, (quarter,), generator=gen
    )
    around = torch.rand(quarter, generator=gen) * 8 - 4
    far = torch.rand(quarter, generator=gen) * 180 - 90
    halves = (torch.arange(quarter) % 251 - 125 + 0.5) * 0.69314718  # halfway between powers of two
    return torch.cat((torch.tensor(ENDS), near, around, far, halves))


def evaluated(launch: Any, x: Tensor) -> Tensor:
    out = torch.empty(3, len(x))
    launch(exponentials, (-(-len(x) // 512),), out, x, len(x), 512, num_warps=4, enable_fp_fusion=False)
    return out


def ulps(ours: Tensor, exact: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the exact value."""
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(ours.double().numpy() - exact) / unit


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_exponentials_are_as_good_as_they_say(found: dict[str, Any], how: str) -> None:
    x = arguments(1 << 14) if how == "interpreted" else arguments(1 << 10)
    ours = found["exponentials"] if how == "interpreted" else evaluated(ptx.execute, x)
    d = x.double().numpy()
    with np.errstate(all="ignore"):
        series = sum(d**n / np.prod(np.arange(1.0, n + 1)) for n in range(2, 30))
        truth = (np.exp(d), np.where(np.abs(d) < 1.5, series, np.expm1(d) - d), np.expm1(d))
    for name, found_, exact, bound in zip(("exp", "k3", "expm1"), ours, truth, (1.0, 4.0, 2.0), strict=True):
        normal = np.isfinite(exact) & (np.abs(exact) < 3.4e38) & (np.abs(exact) > 1.2e-38)
        assert normal.sum() > 0.9 * len(d), name
        assert ulps(found_[torch.from_numpy(normal)], exact[normal]).max() < bound, name


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_exponentials_at_the_ends(found: dict[str, Any], how: str) -> None:
    x = torch.tensor(ENDS)
    ours = found["exponentials"][:, : len(x)] if how == "interpreted" else evaluated(ptx.execute, x)
    by = {float(a): row for a, row in zip(x, ours.t().tolist(), strict=True)}
    assert by[0.0] == [1.0, 0.0, 0.0] and by[INF] == [INF, INF, INF] and by[-INF] == [0.0, INF, -1.0]
    assert bool(ours[:, 4].isnan().all()) and by[128.0] == [INF] * 3 == by[float(np.float32(1e30))]
    assert by[float(np.float32(-1e30))] == [0.0, float(np.float32(1e30)), -1.0]
    assert np.isfinite(by[float(np.float32(88.7))][0]) and by[float(np.float32(88.8))][0] == INF
    assert 0 < by[-103.0][0] < 1.2e-38 and by[-104.0][0] == 0.0  # subnormal numbers are numbers


def test_compiled_exponentials_have_the_bits_of_the_interpreter(found: dict[str, Any]) -> None:
    """Nothing in them is the device's own."""
    few = torch.arange(0, len(found["arguments"]), 37)
    ours = evaluated(ptx.execute, found["arguments"][few])
    same = ours.view(torch.int32) == found["exponentials"][:, few].view(torch.int32)
    assert bool((same | ours.isnan()).all())


def by_the_page(x: np.ndarray) -> np.ndarray:
    """exp, k3 and expm1 as docs/numerics.md has them, in numpy."""
    f32 = np.float32

    def series(x: np.ndarray) -> np.ndarray:
        total = np.full_like(x, f32(1 / math.factorial(11)))
        for n in range(10, 1, -1):
            total = total * x + f32(1 / math.factorial(n))
        return total

    def exp(x: np.ndarray) -> np.ndarray:
        x = np.clip(x, f32(-150), f32(130))
        n = np.floor(x * f32(math.log2(math.e)) + f32(0.5))
        r = (x - n * f32(0.693359375)) + n * f32(2.12194440e-4)
        h = np.floor(n / 2)
        found = f32(1) + (r + r * r * series(r))
        return found * np.exp2(h).astype(f32) * np.exp2(n - h).astype(f32)

    with np.errstate(all="ignore"):
        near, square, far = np.abs(x) < 1, x * x * series(x), exp(x) - f32(1)
        k3 = far - np.where(x == np.inf, f32(0), x)
        return np.stack((exp(x), np.where(near, square, k3), np.where(near, x + square, far)))


def test_the_page_says_what_is_computed(found: dict[str, Any]) -> None:
    numbers = found["arguments"][~found["arguments"].isnan()]
    ours = found["exponentials"][:, ~found["arguments"].isnan()]
    assert np.array_equal(by_the_page(numbers.numpy()).view(np.int32), ours.numpy().view(np.int32))


# Compiled code, executed


def call(N: int, V: int, **changes: Any) -> dict[str, Any]:
    """Arguments of both ops: likely tokens of sharp policies, so that the last bits of sums are visible."""
    gen = generator(V)
    z = 6 * torch.randn(N, V, generator=gen)
    ref = z + 0.3 * torch.randn(N, V, generator=gen)
    args = {"policy_logits": z.bfloat16(), "ref_logits": ref, "token_ids": z.argmax(-1), "mask": None}
    flags = {f"return_{name}": True for name in ("kl", "logp", "entropy", "stats")}
    return {**args, "ignore_index": -100, "temperature": 0.7, "ref_logp": None, **flags, **changes}


def compiled_logp(kernels: Any, args: dict[str, Any], logits: str) -> tuple[Any, ...]:
    names = ("token_ids", "mask", "ignore_index", "temperature", "return_entropy", "return_stats")
    given = {name: args[name] for name in names} | {"logits": args[logits], "return_lse": False}
    found: tuple[Any, ...] = kernels.logp(ptx.execute, **given)
    return found


BACKENDS = {"triton": (logp_triton, kernels_triton), "hopper": (logp_hopper, kernels_hopper)}


@pytest.mark.parametrize(
    ("backend", "V", "alike"), [("triton", 1025, False), ("triton", 1025, True), ("hopper", 300, False)]
)
def test_compiled_kernels_have_the_bits_of_compiled_logp(backend: str, V: int, alike: bool) -> None:
    """A ratio of exactly 1, and kl the same from logits as from log-probabilities. Alike: policy and
    reference are summed by the same code."""
    of_logp, kernels = BACKENDS[backend]
    args = call(1, V)
    if alike:
        args |= {"ref_logits": args["ref_logits"].bfloat16(), "return_entropy": False}
    own, entropy, _, stats = compiled_logp(of_logp, args, "policy_logits")
    ref = compiled_logp(of_logp, args, "ref_logits")[0]
    ours = kernels.ratio_kl(ptx.execute, **args | {"old_logp": own})
    assert ours[0].tolist() == [1.0]
    for one, other in zip(ours[2:5], (own, entropy, stats), strict=True):
        assert one is other is None or torch.equal(one, other)
    given = kernels.ratio_kl(ptx.execute, **args | {"old_logp": None, "ref_logits": None, "ref_logp": ref})
    assert torch.equal(given[1], ours[1]) and torch.equal(given[0], ours[0])
    expected = reference.ratio_kl(**args | {"old_logp": own})
    for one, other in zip(ours, expected, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_rows_are_finished_early_but_for_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second kernel may start before the first is done, so until it has waited there are no sums."""
    args = call(3, 300, old_logp=None, mask=torch.tensor([1, 0, 1]))
    expected = kernels_triton.ratio_kl(ptx.execute, **args)
    nothing, late = 0x7FC12345, []

    def arrived(block: ptx.Block) -> None:
        words = block.memory.view(np.uint32)
        (where,) = np.nonzero(words == nothing)
        assert len(where) == late[0].numel() and block.registers["%ctaid.x"][0] == 0
        words[where] = late[0].view(torch.int32).numpy().view(np.uint32).reshape(-1)

    def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        assert options["EARLY"] and options.get("launch_pdl", False) == (kernel.__name__ == "finish_rows")
        if kernel.__name__ == "finish_rows":
            sums = given[kernel.arg_names.index("sums")]
            late.append(sums.clone())
            sums.view(torch.int32).fill_(nothing)
        text = ptx.execute(kernel, grid, *given, **options)
        assert "griddepcontrol.launch_dependents" in text  # of `finish_rows` for what an op puts behind it

    monkeypatch.setattr(ptx.Block, "waited", arrived)
    monkeypatch.setattr(dependent_launch, "launches_early", lambda device: True)
    found = kernels_triton.ratio_kl(launch, **args)
    assert len(late) == 1 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_token_of_probability_0_has_the_ratio_1_to_itself_on_hopper() -> None:
    args = call(3, 300, old_logp=None)
    args["policy_logits"][torch.arange(2), args["token_ids"][:2]] = -INF
    args["ref_logits"][0] = args["policy_logits"][0]
    args["token_ids"][2] = 300
    for old_logp in (None, torch.tensor([-INF, -INF, 0.0])):
        ratio, kl, own, *_, slopes = kernels_hopper.ratio_kl(ptx.execute, **args | {"old_logp": old_logp})
        assert own[:2].tolist() == [-INF, -INF] and kl[:2].tolist() == [0.0, INF]
        assert ratio[:2].tolist() == slopes[0, :2].tolist() == [1.0, 1.0] and ratio[2].isnan()


def test_masked_rows_on_hopper() -> None:
    mask = torch.tensor([1, 0, 1, 1])
    args = call(4, 300, mask=mask, old_logp=torch.tensor([NAN, NAN, 0.0, NAN]))
    args["policy_logits"][1] = args["ref_logits"][1] = args["policy_logits"][3] = NAN
    args["token_ids"][3], args["token_ids"][2] = -100, 300
    ratio, kl, own, entropy, stats, slopes = kernels_hopper.ratio_kl(ptx.execute, **args)
    assert ratio[[1, 3]].tolist() == [1.0, 1.0] and not any(t[[1, 3]].any() for t in (kl, own, entropy))
    assert ratio.isnan().tolist() == [True, False, True, False]  # old log-probabilities, for an invalid token
    assert kl.isnan().tolist() == own.isnan().tolist() == [False, False, True, False]
    assert slopes[:, [1, 3]].tolist() == [[1.0, 1.0], [0.0, 0.0]] and stats[:, 1].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("V", [260, 2053])
def test_a_gradient_of_compiled_code(V: int) -> None:
    """Of one program a row, and of three."""
    args = call(2, V, old_logp=None)
    args |= {"policy_logits": args["policy_logits"].float()}
    *_, entropy, stats, slopes = reference.ratio_kl(**args)
    ones = torch.ones(()).expand(2)
    grads = {"dratio": ones, "dkl": torch.tensor([2.0, -1.0]), "dlogp": None, "dentropy": ones}
    given = args | grads | {"stats": stats, "slopes": slopes, "entropy": entropy}
    ours = kernels_triton.ratio_kl_bwd(ptx.execute, **given)
    torch.testing.assert_close(ours, reference.ratio_kl_bwd(**given), rtol=1e-5, atol=1e-6)


# Machine code


def test_the_forward_reads_both_logits_in_vectors_and_fuses_nothing() -> None:
    recorder = Recorder()
    proof.record(recorder, torch.bfloat16)
    for (kernel, _, options), (name, source, compiled) in zip(
        recorder.launches, recorder.sources(), strict=True
    ):
        assert options["enable_fp_fusion"] is False, kernel.__name__
        if name != "sum_parts" or source.signature["ref"] == "constexpr":
            continue
        text = to_ptx.compiled(source, compiled).asm["ptx"]
        sizes = re.findall(r"\bld\.global(?:\.\w+)*?(?:\.v([24]))?\.[bfsu](\d+)", text)
        loads = [int(lanes or 1) * int(bits) // 8 for lanes, bits in sizes]
        both = 1 if options["ALIKE"] else 2  # policy and reference share the code, or each has its own
        assert sum(size >= 8 for size in loads) >= both * 2 * 8  # whole steps and the last one
        unfilled = both * 4 * (1 + 1)  # words that are read by element: as in `logp`
        assert sum(size < 8 for size in loads) <= 4 + unfilled and "fma.rn" not in text


# In the interpreter

STARTS = {
    "numbers": [0.5, -1.0], "+inf": [INF, 0.0], "+inf at the token": [0.0, INF], "NaN": [NAN, 0.0],
    "-inf": [-INF, 0.0], "-inf at the token": [0.0, -INF],
}  # fmt: skip


def infinite_rows(backend: str) -> list[Tensor]:
    """Rows of a policy with every start against plain ones of a reference, and the reverse; and gradients."""
    rows = torch.linspace(-3, 3, 5).repeat(len(STARTS), 1)
    for row, start in zip(rows, STARTS.values(), strict=True):
        row[: len(start)] = torch.tensor(start)
    plain = rows[:1].expand_as(rows)
    z, ref = torch.cat((rows, plain, rows[-1:])).requires_grad_(), torch.cat((plain, rows, rows[-1:]))
    old, ids = torch.full((len(z),), -1.5), torch.ones(len(z), dtype=torch.int64)
    options = {"temperature": 0.7, "backend": backend}
    outputs = ratio_kl(z, ref, ids, old_logp=old, **options)
    itself = logp(z.detach(), ids, **options)
    outputs += tuple(
        ratio_kl(z, None, ids, old_logp=own, return_kl=False, **options) for own in (None, itself)
    )
    grads = [torch.autograd.grad(o.sum(), z, retain_graph=True)[0] for o in outputs]
    return [*(o.detach() for o in outputs), *grads]


def summed_gradients(backend: str) -> list[Tensor]:
    """Gradients that arrive as one number for all rows, as one a sequence, and as one a row."""
    gen = generator(3)
    z, ids = torch.randn(2, 2, 33, generator=gen).requires_grad_(), torch.tensor([[1, 2], [3, -100]])
    found = []
    for shape in ((), (2, 1), (2, 2)):
        ratio, kl, own = ratio_kl(z, z.detach() * 0.9, ids, return_logp=True, backend=backend)
        cotangent = torch.full(shape, 0.3).expand(2, 2)
        found += torch.autograd.grad((ratio, kl, own), z, [cotangent] * 3)
    return found


def interpreted() -> dict[str, Any]:
    x = arguments(1 << 14)
    found: dict[str, Any] = {"arguments": x, "exponentials": evaluated(run, x)}
    found |= {"infinite": infinite_rows("triton"), "summed": summed_gradients("triton")}
    # A vocabulary in splits, three leading dimensions that no two strides walk, few rows.
    z = torch.randn(2, 1, 2, 16390, generator=generator(5)).half().transpose(0, 2)
    ids = torch.randint(0, 16390, (2, 2, 1), generator=generator(6)).transpose(1, 2)
    ids[0, 0, 0] = -100
    own = logp(z, ids, backend="triton")
    odd = own.transpose(0, 2).contiguous().transpose(0, 2)
    found["few"] = ratio_kl(z, None, ids, old_logp=odd, ref_logp=odd, backend="triton")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("interpreted") / "results"
    in_interpreter(Path(__file__), path)
    assert not INTERPRETED.value
    results: dict[str, Any] = torch.load(path)
    return results


def test_rows_with_infinities_are_those_of_the_reference(found: dict[str, Any]) -> None:
    for ours, theirs in zip(found["infinite"], infinite_rows("reference"), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-5, atol=1e-6)
    ratio, kl, *_ = found["infinite"]
    # Two probabilities of 0 are equal: no difference of -inf and -inf is NaN.
    numbers = torch.tensor([True, False, False, False, True, True])
    for to_itself, grad in zip(found["infinite"][2:4], found["infinite"][6:8], strict=True):
        ours = to_itself[: len(STARTS)]
        assert torch.equal(ours == 1, numbers) and torch.equal(ours.isnan(), ~numbers)
        assert grad[: len(STARTS)][numbers].isfinite().all() and grad[len(STARTS) - 1].any()
    assert ratio[: len(STARTS)].isfinite().tolist() == [True, False, False, False, True, True]
    assert kl[[len(STARTS) - 1, 2 * len(STARTS) - 1]].tolist() == [INF, INF] and kl[-1] == 0


def test_gradients_are_read_in_place_wherever_they_lie(found: dict[str, Any]) -> None:
    first, *others = found["summed"]
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, summed_gradients("reference")[0], rtol=1e-5, atol=1e-7)


def test_few_rows_of_any_strides(found: dict[str, Any]) -> None:
    ratio, kl = found["few"]
    assert torch.equal(ratio, torch.ones(2, 1, 2)) and torch.equal(kl, torch.zeros(2, 1, 2))


if __name__ == "__main__":
    torch.save(interpreted(), sys.argv[1])


SEGMENTS = """
import torch
from isobit import ratio_kl
from isobit.ops.ratio_kl import kernels_triton as kernels

kernels.SEGMENT = 4  # 15 rows: four segments, of which one has no unmasked row, and one has no others
gen = torch.Generator().manual_seed(0)
policy, ref = (torch.randn(15, 20500, generator=gen) for _ in range(2))
ids, mask = torch.randint(0, 20500, (15,), generator=gen), torch.arange(15) % 3 == 0
mask[4:8], mask[8:12] = False, True
policy[~mask] = ref[~mask] = float("nan")
plain = ratio_kl(policy, ref, ids, old_logp=-10 * torch.ones(15), mask=mask, backend="reference")
bits = []
# Parts of several rows; that start and end inside rows; of one split; no room for the sums of splits.
for kernels.PARTS_PER_SM, kernels.SPLITS_EACH, room in ((4, 8, 2), (12, 2, 2), (112, 1, 2), (12, 2, 0)):
    kernels.MOST_SUMS = room << 20
    found = ratio_kl(policy, ref, ids, old_logp=-10 * torch.ones(15), mask=mask, backend="triton")
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    bits.append(torch.stack(found))
assert all(torch.equal(bits[0], other) for other in bits[1:])
"""


JOINED = """
import torch
from isobit import logp, ratio_kl
from isobit.kernels.triton.logits import schedule_of
from isobit.ops.ratio_kl import kernels_triton as kernels

V = 2 * 16384 + 3  # three splits, the last one short
assert schedule_of(V).splits == 3 and schedule_of(V).parts == 2
gen = torch.Generator().manual_seed(0)
policy, ref = (torch.randn(2, V, generator=gen).half() for _ in range(2))
ids = torch.tensor([V - 1, 16384])
old, given = logp(policy, ids, backend="triton"), logp(ref, ids, backend="triton")
for sms in (1, 7):
    kernels.sm_count = lambda device: sms
    found = ratio_kl(policy, ref, ids, old_logp=old, backend="triton")
    expected = ratio_kl(policy, None, ids, old_logp=old, ref_logp=given, backend="triton")
    assert torch.equal(found[0], torch.ones(2)) and torch.equal(found[1], expected[1])
"""


def test_a_short_last_split_is_summed_with_the_one_before() -> None:
    in_interpreter(JOINED)


def test_programs_that_share_a_segment_of_rows_leave_none_out() -> None:
    """With as many rows as elsewhere there is one segment, so they are made to be short."""
    in_interpreter(SEGMENTS)
