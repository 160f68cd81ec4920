"""The backward of `linear_logp` on Hopper, run on a CPU: what its host code puts where, and when.

`launch` is here a device that does with plain PyTorch what each kernel does, on the very memory that the
kernel's tensors and TMA descriptors name. Memory that nobody has written holds NaN, and what a kernel writes
must not overlap with what it reads, because its programs run in any order. So d-logits that lie in dW's
memory, packed rows that lie in dhidden's, and everything that is used before it is written or after it was
written over show in the gradients. How the kernels compute is not tested here.
"""

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hopper_device import Device, described, whole
from isobit.kernels.hopper.lse import COLUMNS
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.det_gemm import kernels_hopper as products
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from isobit.ops.linear_logp import reference
from isobit.ops.linear_logp import slabs as plans
from isobit.ops.linear_logp.slabs import Slab

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Iterator[None]:
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(before[0])
    settings.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More are no faster at this size, and much slower on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Calls


@dataclass(frozen=True)
class Case:
    """A call, and what it is meant to exercise: `slabs`, of which `lent` are stored in dW, and `blocks`."""

    lead: tuple[int, ...] = (200,)
    D: int = 64
    rows: int = 1100  # of the weight
    wanted: tuple[str, ...] = ("hidden", "weight")
    grads: tuple[str, ...] = ("dlogp",)
    dtype: torch.dtype = BF16
    bias: torch.dtype | None = None
    counted: float | None = None  # share of rows that the mask lets count
    ignored: bool = False
    bad: bool = False
    row_temperature: bool = False
    kept: bool = False
    padded: bool = False  # rows of hidden and weight with something between them
    narrow: bool = False  # 32 bits for tokens and mask
    shifted: bool = False  # hidden[:, :-1], and the same for everything with rows
    inside: bool = False  # hidden begins inside a 16-byte word, and is contiguous
    options: dict[str, Any] = field(default_factory=dict)
    sms: int = 132
    block_slots: int | None = None
    slabs: int = 1
    lent: int = 0
    blocks: int = 1


DEFAULTS: dict[str, Any] = {
    "ignore_index": -100, "temperature": 1.0, "softcap": None, "logit_scale": None, "logits_dtype": None,
    "vocab_size": None, "workspace_bytes": None,
}  # fmt: skip


def on_grid(t: Tensor, step: float) -> Tensor:
    """Multiples of the step, so that fp32 sums of products are exact: rounded logits have one answer."""
    return (t / step).round() * step


def spaced(t: Tensor, padded: bool) -> Tensor:
    """The same matrix, with 16 bytes of NaN between its rows."""
    return torch.cat((t, torch.full_like(t[..., :8], NAN)), -1)[..., : t.shape[-1]] if padded else t


def shifted(t: Tensor | None) -> Tensor | None:
    """The same tensor as all but the last column of a larger one."""
    return None if t is None else torch.cat((t, t[:, :1]), 1)[:, :-1]


def good_rows(args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(live rows, those of them that have a token)."""
    ids, V = args["token_ids"], args["vocab_size"] or len(args["weight"])
    live = reference.live_rows(ids, args["mask"], args["ignore_index"])
    return live, live & (ids >= 0) & (ids < V)


def arguments(case: Case) -> dict[str, Any]:
    """Arguments of the backward. Everything that must not be read is NaN."""
    gen = torch.Generator().manual_seed(0)
    args: dict[str, Any] = DEFAULTS | case.options
    V, D, lead = args["vocab_size"] or case.rows, case.D, case.lead

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    hidden = on_grid(randn(*lead, D), 1 / 8)
    # Tokens have a part in common. Without it, a slab's many small d-logits would add up to nothing in dH.
    weight = on_grid((randn(case.rows, D) + randn(D)) / D**0.5, 1 / 128)
    weight[V:] = NAN
    bias = None
    if case.bias is not None:
        bias = on_grid(randn(case.rows), 1 / 32).to(case.bias)
        bias[V:] = NAN
    ids = torch.randint(0, V, lead, generator=gen)
    chance = torch.rand(lead, generator=gen)
    if case.ignored:
        ids[chance < 0.2] = -100
    if case.bad:
        ids[chance > 0.9] = torch.tensor([-5, V, 2**40])[torch.arange(int((chance > 0.9).sum())) % 3]
    mask = None if case.counted is None else torch.rand(lead, generator=gen) < case.counted
    each = {"temperature": torch.rand(lead, generator=gen) + 0.5} if case.row_temperature else {}
    args |= {
        "hidden": hidden.to(case.dtype), "weight": spaced(weight.to(case.dtype), case.padded),
        "token_ids": ids, "bias": bias, "mask": mask, **each,
    }  # fmt: skip
    _, good = good_rows(args)
    _, entropy, _, stats = reference.linear_logp(
        **args | {"return_entropy": True, "return_lse": True, "return_stats": True}
    )
    assert entropy is not None and stats is not None
    args |= {name: randn(*lead) if name in case.grads else None for name in ("dlogp", "dentropy", "dlse")}
    args |= {"entropy": entropy if "dentropy" in case.grads else None, "stats": stats}
    args |= dict(zip(("kept", "kept_base"), kept_of(args) if case.kept else (None, None), strict=True))
    for t in (args[x] for x in ("hidden", "temperature", "entropy", "dlogp", "dentropy", "dlse")):
        if isinstance(t, Tensor):
            t[~good] = NAN
    stats[:, ~good] = NAN
    args["hidden"] = spaced(args["hidden"], case.padded)
    if case.inside:
        args["hidden"] = (
            torch.cat((torch.zeros(1), args["hidden"].flatten())).to(case.dtype)[1:].view(*lead, D)
        )
    if case.narrow:
        args |= {"token_ids": ids.int(), "mask": None if mask is None else mask.int()}
    if case.shifted:
        args |= {name: shifted(args[name]) for name in ("hidden", "token_ids", "mask", "dlogp")}
    return args | {f"want_{x}": x in case.wanted for x in ("hidden", "weight", "bias")}


def kept_of(args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the forward keeps for rows that have a slot: each lane's e in a tile, and its maximum. In a small
    vocabulary every tile is its own split."""
    head, hidden, rows = reference.prepared(args)
    z = head._replace(logit_scale=None).logits(reference.states(hidden, rows, F32))[rows.good]
    tiles = whole(z.shape[1], COLUMNS) // COLUMNS
    scale = torch.as_tensor(LOG2E * (head.logit_scale or 1.0) / rows.temperature).expand(len(rows.ids))
    z = torch.nn.functional.pad(z, (0, tiles * COLUMNS - z.shape[1]), value=-INF).view(-1, tiles, 32, 4, 2)
    m = z.amax((2, 4))
    m[m == -INF] = 0.0
    e = ((z - m[:, :, None, :, None]) * scale[rows.good].view(-1, 1, 1, 1, 1)).exp2()
    slots = whole(len(rows.ids), 128)
    kept = torch.full((slots, tiles * COLUMNS), NAN, dtype=args["hidden"].dtype)
    base = torch.full((slots, tiles, 4), NAN)
    kept[: len(z)], base[: len(z)] = e.flatten(1).to(kept.dtype), m
    return kept, base


def truth(args: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients from the formula in fp64, each with the sum of the sizes of what was added up in it."""
    live, good = good_rows(args)
    N, D = good.numel(), args["hidden"].shape[-1]
    hidden = torch.where(good[..., None], args["hidden"], 0.0).double().view(N, D).requires_grad_()
    weight = args["weight"].double().requires_grad_()
    bias = torch.zeros(len(weight)) if args["bias"] is None else args["bias"]
    bias = bias.double().requires_grad_()
    # A weight of 0 for a one-hot of the row adds nothing, and its gradient is the row's d-logits.
    probe = torch.zeros(len(weight), N, dtype=torch.float64, requires_grad=True)
    options = {name: args[name] for name in DEFAULTS if name != "workspace_bytes"}
    if isinstance(options["temperature"], Tensor):
        options["temperature"] = options["temperature"].double().view(N)
    outputs = reference.formula(
        torch.cat((hidden, torch.eye(N)), 1), torch.cat((weight, probe), 1), args["token_ids"].reshape(N),
        bias, None if args["mask"] is None else args["mask"].reshape(N), **options,
    )  # fmt: skip
    grads = [args[name] for name in ("dlogp", "dentropy", "dlse")]
    zeros = torch.zeros(N, dtype=torch.float64)
    grads = [zeros if g is None else torch.where(good, g, 0.0).double().view(N) for g in grads]
    dh, dw, db, dz = torch.autograd.grad(outputs, (hidden, weight, bias, probe), grads)
    dh[(live & ~good).view(N)] = NAN
    # What rounding loses shrinks with a number only as far as the dtype's smallest normal one.
    size = torch.where(dz == 0.0, 0.0, dz.abs().clamp(min=torch.finfo(args["hidden"].dtype).tiny))
    padding = args["vocab_size"] or len(weight)
    readable = torch.where(torch.arange(len(weight))[:, None] < padding, weight.detach(), 0.0)
    return {
        "hidden": (dh, size.t() @ readable.abs()),
        "weight": (dw, size @ hidden.detach().abs()),
        "bias": (db, size.sum(1)),
    }


def assert_right(result: Tensor | None, exact: Tensor, size: Tensor, case: Case) -> None:
    """Within what rounding to the inputs' dtype allows: d-logits and the result once each, by half a unit in
    the last place, and kept e before them. fp32 adds a twentieth of one such rounding, far more than it needs
    here. What nothing was added up in, such as a masked row, is exactly 0."""
    assert result is not None
    wrong = (result.double().view(exact.shape) - exact).abs()
    bound = (2.05 + case.kept) * torch.finfo(case.dtype).eps / 2 * size
    assert torch.equal(wrong.isnan(), exact.isnan()), "NaN at the wrong places"
    assert bool((wrong[~exact.isnan()] <= bound[~exact.isnan()]).all()), "off by more than rounding"


@dataclass
class Ran:
    gradients: dict[str, Tensor | None]
    launched: list[str]
    plan: tuple[Slab, ...]


def execute(case: Case, args: dict[str, Any], patch: pytest.MonkeyPatch) -> Ran:
    """The backward of a call on a device with this many SMs."""
    for module in (backward, products):
        patch.setattr(module, "sm_count", lambda device: case.sms)
    if case.block_slots is not None:
        patch.setattr(plans, "BLOCK_SLOTS", case.block_slots)
    made: list[tuple[Slab, ...]] = []
    make = backward.slabs

    def watched(*sizes: int) -> tuple[Slab, ...]:
        made.append(make(*sizes))
        return made[-1]

    patch.setattr(backward, "slabs", watched)
    device = Device()
    result = backward.linear_logp_bwd(launch=device, **args)
    return Ran(dict(zip(("hidden", "weight", "bias"), result, strict=True)), device.launched, made[0])


def check(case: Case, patch: pytest.MonkeyPatch, **changes: Any) -> Ran:
    """Run a case, its arguments changed, and compare with the truth."""
    args = arguments(case) | changes
    ran, exact = execute(case, args, patch), truth(args)
    for name, gradient in ran.gradients.items():
        if name in case.wanted:
            assert_right(gradient, *exact[name], case)
        else:
            assert gradient is None
    return ran


# Right


def small(**options: Any) -> dict[str, Any]:
    """Options of a call whose slabs are 512 wide, unless dW lends them more."""
    return {"workspace_bytes": 0} | options


FROZEN: dict[str, Any] = {"lead": (300,), "wanted": ("hidden",), "options": small(), "slabs": 3}
BLOCKS: dict[str, Any] = FROZEN | {"block_slots": 128, "blocks": 3}
LENT: dict[str, Any] = {"lead": (120,), "D": 256, "rows": 3600, "options": small(), "slabs": 4, "lent": 2}
LENT_PADDED: dict[str, Any] = LENT | {"options": small(vocab_size=3500), "slabs": 3}
ALL: dict[str, Any] = {"wanted": ("hidden", "weight", "bias"), "bias": F32}

CASES = {
    "plain": Case(),
    "several slabs": Case(options=small(), slabs=3),
    "one row": Case(lead=(1,)),
    "two tokens in the vocabulary": Case(rows=2),
    "fp16": Case(dtype=F16),
    "mask": Case(counted=0.5),
    "ignored rows": Case(ignored=True, options=small(), slabs=3),
    "masked and ignored rows": Case(counted=0.5, ignored=True, **ALL),
    "32 bits for tokens and mask": Case(narrow=True, counted=0.5),
    "all masked": Case(counted=0.0, options=small(), slabs=3, **ALL),
    "bad tokens": Case(bad=True, ignored=True, counted=0.7, options=small(), slabs=3, **ALL),
    "padded vocabulary": Case(options=small(vocab_size=700), slabs=2, **ALL),
    "odd vocabulary": Case(rows=1025, options=small(), slabs=3, **ALL),
    "bias": Case(bias=BF16, options=small(), slabs=3),
    "entropy and lse": Case(grads=("dlogp", "dentropy", "dlse"), options=small(), slabs=3),
    "entropy alone": Case(grads=("dentropy",), counted=0.5),
    "options of the logits": Case(bias=F32, options={"temperature": 0.7, "logit_scale": 1.5}),
    "rounded logits": Case(bias=F32, options={"logits_dtype": BF16}),
    "row temperature": Case(row_temperature=True, counted=0.5, options=small(), slabs=3),
    "weight alone": Case(wanted=("weight",), counted=0.5, options=small(), slabs=3),
    "bias alone": Case(wanted=("bias",), bias=BF16, counted=0.5, options=small(), slabs=3),
    "shifted": Case(lead=(2, 100), shifted=True, counted=0.5),
    "shifted, frozen": Case(**FROZEN | {"lead": (2, 100), "shifted": True}),
    "rows apart": Case(padded=True, options=small(), slabs=3),
    "rows apart, frozen": Case(padded=True, **FROZEN),
    "inside a word": Case(inside=True),
    "inside a word, frozen": Case(inside=True, **FROZEN),
    "lent": Case(**LENT),
    "lent, masked": Case(counted=0.4, bad=True, ignored=True, **LENT, **ALL),
    "lent, one SM": Case(sms=1, **LENT),
    "lent, odd vocabulary": Case(**LENT | {"rows": 3599}),
    "lent, padded vocabulary": Case(**LENT_PADDED),
    "lent, weight alone": Case(wanted=("weight",), padded=True, **LENT),
    "lent, entropy": Case(grads=("dlogp", "dentropy"), row_temperature=True, **LENT),
    "frozen": Case(**FROZEN),
    "frozen, bad tokens": Case(bad=True, ignored=True, **FROZEN),
    "blocks": Case(**BLOCKS),
    "blocks, bad tokens": Case(bad=True, ignored=True, **BLOCKS),
    "blocks, masked": Case(counted=0.5, **BLOCKS),
    "blocks, few rows masked": Case(counted=0.95, bias=BF16, row_temperature=True, **BLOCKS),
    "blocks, most rows masked": Case(counted=0.1, grads=("dentropy", "dlse"), **BLOCKS),
    "blocks, all masked": Case(counted=0.0, **BLOCKS),
    "blocks, bad tokens, masked": Case(bad=True, ignored=True, counted=0.7, **BLOCKS),
    "blocks of two heights": Case(**BLOCKS | {"lead": (400,), "block_slots": 256, "blocks": 2}),
    "blocks, 7 SMs": Case(counted=0.5, sms=7, **BLOCKS),
    "no blocks where sums run over tokens": Case(lead=(300,), block_slots=128, **ALL),
    "kept": Case(kept=True, counted=0.5, row_temperature=True, options=small(), slabs=3, **ALL),
    "kept, odd vocabulary": Case(kept=True, rows=2305, options={"logit_scale": 1.5, "temperature": 0.7}),
    "kept, but of no use": Case(kept=True, grads=("dlogp", "dentropy")),
    "kept, blocks": Case(kept=True, **BLOCKS),
    "kept, blocks, ignored rows": Case(kept=True, ignored=True, **BLOCKS),
    "kept, blocks, masked": Case(kept=True, counted=0.5, bad=True, **BLOCKS),
    "kept, lent": Case(kept=True, **LENT),
    "kept, lent, padded vocabulary": Case(kept=True, counted=0.5, **LENT_PADDED),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    ran = check(case, monkeypatch)
    assert len(ran.plan) == case.slabs and sum(slab.lent for slab in ran.plan) == case.lent
    recomputed = not case.kept or "dentropy" in case.grads
    assert ran.launched.count("slab_kernel") == (case.slabs * case.blocks if recomputed else 0)
    assert ran.launched.count("from_probs_kernel") == (0 if recomputed else case.slabs * case.blocks)
    assert ran.launched.count("unpack_kernel") == (case.blocks if "hidden" in case.wanted else 0)


def test_gradient_of_a_sum_is_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(counted=0.5)
    check(case, monkeypatch, dlogp=torch.tensor(0.5).expand(case.lead))


def test_no_rows_launch_nothing() -> None:
    args = arguments(Case(**ALL))
    none = {name: args[name][:0] for name in ("hidden", "token_ids", "dlogp")}
    none["stats"] = args["stats"][:, :0]
    device = Device()
    dhidden, *sums = backward.linear_logp_bwd(launch=device, **args | none)
    assert dhidden.shape == (0, 64) and device.launched == []
    assert [t.shape for t in sums] == [(1100, 64), (1100,)] and not any(t.any() for t in sums)


class Allocations(TorchDispatchMode):
    """The most bytes that were alive at a time of those allocated inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for t in made if isinstance(made, tuple) else (made,):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given:
                storage = t.untyped_storage()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return made

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


@pytest.mark.parametrize(("N", "V", "slab_mb"), [(512, 65536, 64), (4096, 32768, 64), (16384, 32768, 256),
                                                 (16384, 16384, 128), (8192, 8192, 64)])  # fmt: skip
@pytest.mark.parametrize("wanted", [("hidden",), ("hidden", "weight")])
def test_memory_is_as_documented(N: int, V: int, slab_mb: int, wanted: tuple[str, ...]) -> None:
    """A slab of 16 KB a row, at least 64 MB and at most the weight's bytes, and fp32 sums of dhidden next to
    the gradients; of 4096 rows with a frozen head."""
    D, MB = 4096, 1 << 20

    def meta(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    args = DEFAULTS | {"hidden": meta(N, D, dtype=BF16), "weight": meta(V, D, dtype=BF16)}
    args |= {"token_ids": meta(N, dtype=torch.int64), "stats": meta(2, N), "dlogp": meta(N)}
    args |= dict.fromkeys(("bias", "mask", "entropy", "kept", "kept_base"))
    args |= {"dentropy": None, "dlse": None} | {
        f"want_{x}": x in wanted for x in ("hidden", "weight", "bias")
    }
    with Allocations() as seen:
        result = backward.linear_logp_bwd(launch=lambda *args, **options: None, **args)
    gradients = sum(g.nbytes for g in result if g is not None)
    rows = N if "weight" in wanted else min(N, 4096)
    bound = (slab_mb if rows == N else 64) * MB + 4 * rows * D + 64 * N
    assert gradients + bound / 2 < seen.most <= gradients + bound


# Wrong: this device notices


def test_new_memory_is_nan() -> None:
    like = torch.zeros(3, dtype=BF16)
    for new in (torch.empty(3), like.new_empty(3), torch.empty_like(like), like.new_empty(3, dtype=F32)):
        assert bool(new.isnan().all())


@pytest.mark.parametrize(("offset", "stride"), [(1, 64), (0, 60)])
def test_tma_needs_alignment(offset: int, stride: int) -> None:
    base = torch.zeros(4 * 64, dtype=BF16)[offset:]
    with pytest.raises(AssertionError):
        described(SimpleNamespace(base=base, shape=[2, 8], strides=[stride, 1]))


def test_processing_blocks_in_ascending_order_would_overwrite_unread_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_order = backward.blocks_of
    monkeypatch.setattr(backward, "blocks_of", lambda *args: in_order(*args)[::-1])
    check(CASES["blocks"], monkeypatch)  # not packed: in any order
    with pytest.raises(AssertionError, match="off by more than rounding"):
        check(CASES["blocks, masked"], monkeypatch)


def test_kept_values_of_another_block_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = backward.blocks_of

    def wrong(*args: Any) -> list[backward.Block]:
        blocks = right(*args)
        return [block._replace(probs=blocks[0].probs, probs_base=blocks[0].probs_base) for block in blocks]

    monkeypatch.setattr(backward, "blocks_of", wrong)
    with pytest.raises(AssertionError, match="off by more than rounding"):
        check(CASES["kept, blocks"], monkeypatch)


@pytest.mark.parametrize("name", ["lent", "kept, lent"])
def test_lent_slab_that_reaches_its_own_rows_overlaps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second is wider by one segment than the memory behind its rows.
    plan = (Slab(0, 2048, True), Slab(2048, 3584, True), Slab(3584, 3600, False))
    monkeypatch.setattr(backward, "slabs", lambda *sizes: plan)
    with pytest.raises(AssertionError, match="overlaps"):
        check(CASES[name], monkeypatch)


def test_slab_that_is_left_out_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    make = backward.slabs
    monkeypatch.setattr(backward, "slabs", lambda *sizes: make(*sizes)[:-1])
    with pytest.raises(AssertionError, match="NaN at the wrong places"):
        check(CASES["weight alone"], monkeypatch)


def test_sums_that_restart_at_every_slab_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = backward.sum_into

    def forgetful(*args: Any, init: Tensor | None = None, **options: Any) -> None:
        right(*args, **options)

    monkeypatch.setattr(backward, "sum_into", forgetful)
    with pytest.raises(AssertionError, match="off by more than rounding"):
        check(CASES["frozen"], monkeypatch)
