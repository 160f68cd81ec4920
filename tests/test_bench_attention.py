"""The benchmark of `attention`: sizes, operations, rivals that do the same work, and goals."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalBias

from isobit.bench.cases import series_of
from isobit.bench.goals import summary
from isobit.bench.implementations import calls_of
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.bench.suites import goals_of
from isobit.frame.op import known_op
from isobit.ops.attention import model, rivals
from isobit.spec.proof import Case
from isobit.spec.series import Pool

OP = known_op("attention")
CPU = torch.device("cpu")
SERIES = {one.name: one for one in series_of(OP)}
#: One feature represents all.
PACKED = SERIES["attention_packed"].cases[0].dims | {"H": 1, "KV": 1, "D": 1}


def arguments(T: int, S: int) -> dict[str, Any]:
    case = Case({"B": 2, "T": T, "S": S, "H": 4, "KV": 2, "D": 64}, torch.bfloat16, data="random")
    return SERIES["attention"].make(case, Pool(CPU))[0]


def test_what_is_declared() -> None:
    several = ("", "_wide", "_packed", "_window", "_softcap")
    kinds = [f"attention{kind}{back}" for kind in several for back in ("", "_bwd")]
    decoding = ["attention_decode", "attention_paged", "attention_room"]
    assert list(SERIES) == [*kinds, "attention_few_heads_bwd", *decoding]
    assert {case.dims["D"] for case in SERIES["attention_wide"].cases} == {256}
    assert {case.dims["KV"] for case in SERIES["attention_few_heads_bwd"].cases} == {1, 2}
    for name, series in SERIES.items():
        backward = name.endswith("_bwd")
        assert series.directions == (("bwd",) if backward else ("fwd",))
        assert series.inputs == (("q", "k", "v") if backward else ())
        of_torch = {"flash", "flex"} | (set() if "window" in name else {"cudnn"})
        of_vllm = {"fa3", "fa3:one split"}
        if "softcap" in name or name in decoding[1:]:
            of_torch = set()
        alone = name in ("attention_decode", "attention_few_heads_bwd")
        assert set(series.rivals) == of_torch | (set() if alone else of_vllm)
        variants = {"no softcap", "attn/1"} if "softcap" in name else {"one segment"}
        variants = {"exact sizes"} if name == "attention_room" else variants
        forward_only = backward and "softcap" not in name
        none = forward_only or name in decoding[:2]
        assert set(series.variants) == (set() if none else variants)
    sizes = [tuple(case.dims.values()) for case in SERIES["attention"].cases]
    assert sizes[0] == (8, 1024, 1024, 32, 8, 128) and sizes[-1] == (4, 4096, 4096, 16, 8, 64)
    assert {D for *_, D in sizes} == {64, 128}
    assert {case.dims["D"] for case in SERIES["attention_softcap"].cases} == {64, 96, 128}
    args = SERIES["attention_packed"].make(Case(PACKED, torch.bfloat16, data="random"), Pool(CPU))[0]
    lengths = args["cu_seqlens_q"].diff().tolist()
    assert (
        args["cu_seqlens_q"][0] == 0
        and len(lengths) == 40
        and sum(lengths) == 32768
        and min(lengths) < 64
        and max(lengths) > 1024
    )
    sizes = [tuple(case.dims.values()) for case in SERIES["attention_decode"].cases]
    assert len(set(sizes)) == 36 and (64, 4, 32768, 64, 8, 128) in sizes


@pytest.mark.parametrize(
    ("T", "S", "change"),
    [(17, 17, None), (5, 17, None), (1, 17, None), (170, 170, rivals.packed),
     (17, 17, rivals.windowed), (40, 40, rivals.windowed), (7, 17, rivals.windowed),
     (1, 40, rivals.windowed)],
)  # fmt: skip
def test_seen_counts_visible_pairs(T: int, S: int, change: Any) -> None:
    """By the count of operations, by the mask of FlexAttention, and by the model."""
    args = arguments(T, S)
    args = args if change is None else change(args)
    mask, *_ = rivals.sees(args)
    each = mask(0, 0, torch.arange(T)[:, None], torch.arange(S)[None])
    assert int(each.sum()) == rivals.seen(T, S, change)
    if change is not rivals.packed:
        assert torch.equal(each, torch.from_numpy(model._sees(args, T, S)))


@pytest.mark.parametrize(("T", "S"), [(9, 9), (1, 9), (4, 9)])
def test_rivals_compute_the_same(T: int, S: int) -> None:
    """On whatever SDPA has on a CPU."""
    args = arguments(T, S)
    judge = rivals.OneHead(args)
    for rival in (rivals.CUDNN, rivals.FLASH):
        prepared = rival.prepare(args)
        assert prepared["k"].shape == (2, 2, S, 64) and prepared["k"].is_contiguous()
        assert (prepared["mask"] is None) == (T != 4)
        if isinstance(prepared["mask"], CausalBias):  # what it stands for
            prepared["mask"] = prepared["mask"]._materialize(CPU)
        found = rivals.sdpa(SDPBackend.MATH, prepared)
        assert found.shape == args["q"].shape
        error = judge.error("fwd", (found,))
        assert error is not None and error < 0.03
        assert judge.error("fwd", (1.1 * found,)) > 0.03
    assert isinstance(rivals.FLASH.prepare(args)["mask"], CausalBias) == (T == 4)


def test_gradients_are_judged_wherever_heads_are() -> None:
    args = arguments(9, 9)
    judge = rivals.OneHead(args)

    def wrong(given: dict[str, Any]) -> Tensor:
        return 1.2 * rivals.sdpa(SDPBackend.MATH, given)

    right = partial(rivals.sdpa, SDPBackend.MATH)
    for function, largest in ((right, 0.03), (wrong, None)):
        (call,) = calls_of(function, [rivals.CUDNN.prepare(args)], ("q", "k", "v"), "bwd")
        error = judge.error("bwd", call())
        assert error is not None and (error < largest if largest else error > 0.03), error
    (call,) = calls_of(lambda a: SERIES["attention"].call(a, None), [args], ("q", "k", "v"), "bwd")
    error = judge.error("bwd", call())
    assert error is not None and error < 0.03


def test_one_segment_has_other_bits() -> None:
    args = arguments(2, 1100)
    ours, other = SERIES["attention"].call(args, None), rivals.one_segment(args)
    assert not torch.equal(ours, other)
    assert torch.equal(other, model.attention(segment=2048, return_lse=False, **args)[0])
    short = arguments(2, 900)
    assert torch.equal(SERIES["attention"].call(short, None), rivals.one_segment(short))


def test_room_in_a_table_changes_nothing_but_its_width() -> None:
    """1024 keys where 32768 are possible, with their lengths on the device."""
    given = arguments(1, 33)
    paged, roomy = rivals.paged(given), rivals.with_room(given)
    assert roomy["block_table"].shape == (2, 32 * 3) and paged["block_table"].shape == (2, 3)
    assert roomy["key_end"].tolist() == [33, 33]
    series = SERIES["attention_room"]
    assert {32 * case.dims["S"] for case in series.cases} == {32768}
    wide, exact = series.call(roomy, None), rivals.exact_sizes(roomy)
    assert torch.equal(wide, exact) and torch.equal(exact, series.call(paged, None))
    beyond = roomy["block_table"].clone()
    beyond[:, :1] = beyond[:, 1:2]  # the comparison can fail
    assert not torch.equal(rivals.exact_sizes(roomy | {"block_table": beyond}), wide)


def test_packed_sequences_have_bounds() -> None:
    found = rivals._bounds(rivals.packed(arguments(1600, 1600)))
    assert (found["longest"], found["shortest"]) == (79, 1)
    assert rivals._bounds(rivals.windowed(arguments(9, 9)))["longest"] == 9


def test_it_can_be_timed() -> None:
    """Every series in small."""
    report = run("attention", device="cpu", repetitions=2, skip_check=True, say=lambda text: None)
    assert {row["op"] for row in report["rows"]} == set(SERIES)
    variants = {f"isobit:{name}" for name in ("one segment", "no softcap", "attn/1", "exact sizes")}
    assert {row["impl"] for row in report["rows"]} == {"isobit", "copy"} | variants
    without = ("attention_packed", "attention_packed_bwd", "attention_paged", "attention_room")
    # Without its softcap a call has another truth.
    judged = [row for row in report["rows"] if row["op"] not in without and "isobit" in row["impl"]]
    judged = [row for row in judged if "no softcap" not in row["impl"]]
    assert all(row["max_abs"] < 0.05 for row in judged) and report["summary"] == []


# Goals

CASE = "B=4 T=2048 S=2048 H=32 KV=8 D=128 bf16"
WIDE = "B=4 T=2048 S=2048 H=16 KV=8 D=256 bf16"
FEW = "B=1 T=32768 S=32768 H=8 KV=1 D=128 bf16"
CACHE = "B=16 T=1 S=32768 H=32 KV=8 D=128 bf16"


def rows(op: str, direction: str, case: str = CASE, **ms: float) -> list[dict[str, Any]]:
    kind = {"op": op, "case": case, "direction": direction, "method": "graph"}
    return [
        dict.fromkeys(ROW) | kind | {"impl": name.replace("_", " "), "ms": each} for name, each in ms.items()
    ]


def met(found: list[dict[str, Any]]) -> dict[tuple[str, str], bool]:
    entries = summary(found, None, goals_of("attention"))
    return {(entry["what"], entry["against"]): entry["met"] for entry in entries if entry["cells"]}


def test_goals() -> None:
    fast = rows("attention", "fwd", isobit=1.0, cudnn=0.91, flash=1.51, **{"isobit:one_segment": 0.98})
    names = [("forward", "cudnn"), ("forward", "flash"), ("segments", "isobit:one segment")]
    assert met(fast) == dict.fromkeys(names, True)
    slow = rows("attention", "fwd", isobit=1.0, cudnn=0.89, flash=1.49, **{"isobit:one_segment": 0.96})
    assert met(slow) == dict.fromkeys(names, False)
    backward = [("backward", "cudnn"), ("backward", "flash")]
    assert met(rows("attention_bwd", "bwd", isobit=1, cudnn=0.71, flash=1.21)) == dict.fromkeys(
        backward, True
    )
    assert met(rows("attention_bwd", "bwd", isobit=1, cudnn=0.69, flash=1.19)) == dict.fromkeys(
        backward, False
    )
    for op, case, what in (
        ("attention_wide_bwd", WIDE, ("backward, D = 256", "cudnn")),
        ("attention_few_heads_bwd", FEW, ("backward, few KV heads", "cudnn")),
    ):
        least = 0.90 if case == WIDE else 0.95
        for cudnn, reached in ((least + 0.01, True), (least - 0.01, False)):
            assert met(rows(op, "bwd", case, isobit=1, cudnn=cudnn))[what] == reached
    assert met(rows("attention_wide", "fwd", WIDE, isobit=1, cudnn=0.89)) == {
        ("forward, D = 256", "cudnn"): False
    }
    best, copy = (
        ("decoding", "the best rival"),
        ("decoding, bandwidth, 256 MB and more", "copy"),
    )
    many = partial(rows, "attention_decode", "fwd")
    assert met(many(CACHE, isobit=1, cudnn=2.0, flex=0.93, copy=0.86)) == {best: True, copy: True}
    assert met(many(CACHE, isobit=1, cudnn=0.91, flash=2.0, copy=0.84)) == {best: False, copy: False}
    short = CACHE.replace("32768", "4096").replace("B=16", "B=1")
    assert met(many(short, isobit=1, cudnn=0.95, copy=0.1)) == {best: True}
    capped = partial(rows, "attention_softcap_bwd", "bwd", isobit=1.0)
    key = ("softcap", "isobit:no softcap")
    assert met(capped(**{"isobit:no_softcap": 0.75}))[key]
    assert not met(capped(**{"isobit:no_softcap": 0.73}))[key]
    fa3 = "fa3, the best of its splits"
    for op, case, what, least in (
        ("attention", CASE, "forward, D = 128", 0.93),
        ("attention", CASE.replace("D=128", "D=256"), "forward, D = 256", 0.85),
        ("attention_paged", CACHE, "decoding from pages of 16", 0.98),
    ):
        times = partial(rows, op, "fwd", case, isobit=1.0)
        assert met(times(fa3=least + 0.01, **{"fa3:one_split": 3.0})) == {(what, fa3): True}
        assert met(times(fa3=3.0, **{"fa3:one_split": least - 0.01})) == {(what, fa3): False}
    room = partial(rows, "attention_room", "fwd", CACHE.replace("32768", "1024"), isobit=1.1)
    key = ("decoding, 1k keys of 32k possible", "isobit:exact sizes")
    assert met(room(fa3=1.0, **{"isobit:exact_sizes": 1.001}))[key]
    assert not met(room(fa3=1.0, **{"isobit:exact_sizes": 0.99}))[key]
    uneven = many(CACHE, isobit=1, cudnn=1.2) + many(short, isobit=1, cudnn=0.79)
    assert met(uneven) == {best: False}
