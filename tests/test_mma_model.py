"""The model of the tensor cores: equal to what a GPU computed, to a second model that shares no code with it,
and to the model that docs/numerics/products.md prints. Each comparison has controls that must differ."""

import doctest
import functools
import json
import re
import runpy
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.compiler import ASTSource

import capture_mma as capture
import to_ptx
from capture_mma import CONTROLS, DTYPES, bits
from isobit.frame.contract import ContractError
from isobit.numerics import (
    CHAIN16,
    NUMERICS,
    SEG16_512,
    Step,
    chain,
    cut,
    known_numerics,
    mma,
    segments,
    step,
    tree,
)

ROOT = Path(__file__).parents[1]
NAN = 0x7FFFFFFF
MINUS_ZERO = -(1 << 31)


def golden(name: str, kind: str) -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """(category, a, b, c, d) of every tile, b as rows."""
    stored = np.load(ROOT / "tests" / "golden" / f"mma_{name}.npz")
    types = {"a": DTYPES[name], "b": DTYPES[name], "c": torch.float32, "d": torch.float32}
    parts = [torch.from_numpy(stored[f"{kind}_{key}"]).view(dtype) for key, dtype in types.items()]
    return list(zip(map(str, stored[f"{kind}_names"]), *parts, strict=True))


def drawn(name: str) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(category, a, b, c) of every step that a capture compares, b as rows."""
    for category, *inputs in capture.step_tiles(DTYPES[name]):
        types = (DTYPES[name], DTYPES[name], torch.float32)
        a, b, c = (x.to(dtype) for x, dtype in zip(inputs, types, strict=True))
        yield category, a, b, c


def everything(name: str) -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    return golden(name, "step") + golden(name, "chain")


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x.contiguous()), bits(y.contiguous()))


def differing(x: Tensor, y: Tensor) -> float:
    return (bits(x.contiguous()) != bits(y.contiguous())).double().mean().item()


# What a GPU computed


@pytest.mark.parametrize("name", DTYPES)
def test_the_model_equals_the_golden_vectors(name: str) -> None:
    tiles = everything(name)
    assert len(tiles) > 60 and sum(d.numel() for *_, d in tiles) > 3900
    wrong = [category for category, a, b, c, d in tiles if not same(chain(a, b.t(), c), d)]
    assert not wrong


@pytest.mark.parametrize("name", DTYPES)
def test_the_golden_vectors_hold_what_is_hard(name: str) -> None:
    d = torch.cat([d.flatten() for *_, d in everything(name)])
    kinds = {
        "nan": d.isnan(),
        "inf": d == float("inf"),
        "-inf": d == -float("inf"),
        "zero": bits(d) == 0,
        "subnormal": (d != 0) & (d.abs() < 2.0**-126),
    }
    assert all(found.sum() > 20 for found in kinds.values())
    stored = np.load(ROOT / "tests" / "golden" / f"mma_{name}.npz")
    origin = json.loads(str(stored["stamp"]))
    assert {"gpu", "driver", "torch", "triton", "date"} <= set(origin) and "H200" in origin["gpu"]
    assert not (bits(d) == MINUS_ZERO).any()


@pytest.mark.parametrize("control", CONTROLS)
def test_a_model_that_is_wrong_in_one_constant_differs(control: str) -> None:
    like = CONTROLS[control]
    assert any(not same(chain(a, b.t(), c, like=like), d) for _, a, b, c, d in everything("bf16"))


@pytest.mark.parametrize("name", DTYPES)
def test_the_model_of_trees_equals_leaves_that_a_gpu_computed(name: str) -> None:
    """Golden vectors of tree8: an H200 computed the leaves, and fp32 additions are the same everywhere."""
    trees = list(capture.trees(everything(name)))
    assert {a.shape[1] for _, a, _, _ in trees} == {8 * 16, 8 * 512} and len(trees) >= 26
    assert not [category for category, a, b, d in trees if not same(tree(a, b.t()), d)]
    d = torch.cat([d.flatten() for *_, d in trees])
    assert all(found.sum() > 20 for found in (d.isnan(), d.isinf(), d.isfinite() & (d != 0)))


def one_chain(a: Tensor, b: Tensor) -> Tensor:
    return chain(a, b.t())


def leaves_in_turn(a: Tensor, b: Tensor) -> Tensor:
    leaf = a.shape[1] // 8
    sums = [chain(a[:, k : k + leaf], b[:, k : k + leaf].t()) for k in range(0, 8 * leaf, leaf)]
    return functools.reduce(torch.add, sums)


def leaves_that_end_elsewhere(a: Tensor, b: Tensor) -> Tensor:
    a, b = (torch.cat([x[:, 8:], x[:, :8]], 1) for x in (a, b))
    return tree(a, b.t())


@pytest.mark.parametrize("wrong", [one_chain, leaves_in_turn, leaves_that_end_elsewhere])
def test_trees_of_another_order_differ(wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = [(bits(wrong(a, b)) != bits(d))[d.isfinite()] for _, a, b, d in capture.trees(everything("bf16"))]
    assert torch.cat(found).sum() > 100


@pytest.mark.parametrize("name", DTYPES)
def test_another_grouping_differs(name: str) -> None:
    normal = next(tile for tile in golden(name, "chain") if "normal" in tile[0])
    _, a, b, _, d = normal
    assert same(chain(a, b.t()), d)
    groups = torch.arange(512).view(32, 16)
    reordered = groups.flip(0).flatten()
    assert differing(chain(a[:, reordered], b[:, reordered].t()), d) > 0.5
    shifted = [torch.cat([x.new_zeros(len(x), 8), x], 1) for x in (a, b)]
    assert differing(chain(shifted[0], shifted[1].t()), d) > 0.5


# A second model, in whole numbers, one output at a time


def parts(x: float, least: int) -> tuple[Fraction, int | None]:
    """Value and exponent of a finite number; zero has no exponent."""
    return Fraction(x), None if x == 0 else max(int(np.frexp(x)[1]) - 1, least)


def slow_step(a: list[float], b: list[float], c: float, least: int) -> int:
    """The bits of one step, by the text of the specification."""
    with np.errstate(invalid="ignore"):
        special = [float(np.float64(x) * np.float64(y)) for x, y in zip(a, b, strict=True)] + [c]
    if any(np.isnan(p) for p in special) or {np.inf, -np.inf} <= set(special):
        return NAN
    if np.inf in special or -np.inf in special:
        return 0x7F800000 if np.inf in special else 0xFF800000
    terms = [parts(c, -126)]
    for (x, ex), (y, ey) in [(parts(x, least), parts(y, least)) for x, y in zip(a, b, strict=True)]:
        terms.append((x * y, None if ex is None or ey is None else ex + ey))
    top = max([e for _, e in terms if e is not None] + [-133])
    total = sum(int(value * Fraction(2) ** (25 - top)) for value, _ in terms)  # int() cuts toward zero
    size = abs(total) * Fraction(2) ** (top - 25)
    sign = 0x80000000 if total < 0 else 0
    if size >= 2**128:
        return sign | 0x7F800000
    exponent = max(int(np.frexp(float(size))[1]) - 1, -126) if size else -126
    fraction = int(size / Fraction(2) ** (exponent - 23))  # 2^23 and more if normal
    return sign | (exponent + 126 << 23) + fraction if fraction else 0  # no zero has a sign


@pytest.mark.parametrize("name", DTYPES)
def test_the_model_equals_a_model_in_whole_numbers(name: str) -> None:
    dtype, least = DTYPES[name], -126 if name == "bf16" else -14
    draw, checked = capture.Draw(5), 0
    blank, blank_c = torch.zeros(12, 16, dtype=dtype), torch.zeros(12, 12)
    top = {"bf16": 0x7F80, "fp16": 0x7C00}[name]
    tiny = (draw.bits(blank, 1.0, 0, top // 2) for _ in range(2))
    mixes = [
        (*(draw.bits(blank, 1.0, 0, 0x7FFF) for _ in range(2)), draw.bits(blank_c, 1.0, 0, NAN)),
        (*(draw.bits(blank, 1.0, 0, top - 1) for _ in range(2)), draw.bits(blank_c, 1.0, 0, 0x7F7FFFFF)),
        (*(draw.bits(blank, 0.3, 0, top - 1) for _ in range(2)), draw.bits(blank_c, 0.5, 0, 0x7F7FFFFF)),
        (*tiny, draw.bits(blank_c, 1.0, 0, 1 << 23)),
        *((draw.spread((12, 16), *w).to(dtype), draw.spread((12, 16), *w).to(dtype), blank_c)
          for w in ((-75, -66), (-80, -76), (-3, 3), (60, 64), (-14, 8))),
    ]  # fmt: skip
    for a, b, c in mixes:
        found = bits(step(a, b.t(), c))
        for m in range(12):
            for n in range(12):
                want = slow_step(a[m].double().tolist(), b[n].double().tolist(), c[m, n].item(), least)
                assert int(found[m, n]) & 0xFFFFFFFF == want, (m, n)
                checked += 1
    assert checked == 9 * 144


# The model that the page prints


@pytest.mark.parametrize("name", DTYPES)
def test_the_printed_model_equals_the_golden_vectors_and_the_model(name: str) -> None:
    page = (ROOT / "docs" / "numerics" / "products.md").read_text()
    (text,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def mma(" in block)
    scope: dict[str, Any] = {}
    exec(text, scope)
    unseen = [(*tile, chain(tile[1], tile[2].t(), tile[3])) for tile in drawn(name)]
    for category, a, b, c, d in golden(name, "step") + unseen:
        shapes = (a[:, None, :], b[None, :, :], c)
        found = scope["mma"](*(x.double().numpy() for x in shapes), -126 if name == "bf16" else -14)
        assert same(torch.from_numpy(found), d), category


# Facts, one by one


def one_step(products: list[tuple[float, float]], c: float) -> int:
    a, b = (torch.tensor([x]).bfloat16() for x in zip(*products, strict=True))
    return int(bits(step(a, b.t(), torch.tensor([[c]])))) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("products", "c", "result"),
    [
        ([(0.0, 1.0)], -0.0, 0x00000000),  # -0 does not survive a step
        ([(-0.0, 1.0)] * 16, -0.0, 0x00000000),
        ([(3.0, 5.0), (-3.0, 5.0)], 0.0, 0x00000000),
        ([(0.0, 1e38)], 1e-45, 0x00000001),  # a zero product hides nothing, however large its factor
        ([(2.0**-75, 2.0**-75)], 0.0, 0x00000000),  # 2^-150
        ([(2.0**-75, -(2.0**-75))], 0.0, 0x00000000),  # -2^-150: its sign is lost with it
        ([(2.0**-75, -(2.0**-75))] * 15, -(2.0**-149), 0x80000008),  # -8.5 * 2^-149
        ([(2.0**-75, 2.0**-74)], 0.0, 0x00000001),
        ([(2.0**-75, -(2.0**-74))], 0.0, 0x80000001),
        ([(2.0**64, 2.0**64)], 0.0, 0x7F800000),  # 2^128
        ([(2.0**64, 2.0**64), (2.0**64, -(2.0**64))], 1.0, 0x00000000),  # no infinity on the way; 1.0 is lost
        ([(float("inf"), 0.0)], 0.0, NAN),
        ([(float("inf"), 1.0)], -float("inf"), NAN),
        ([(float("inf"), 1.0)], -3.0e38, 0x7F800000),
        ([(1.0, 1.0)], float("nan"), NAN),
        ([(1.0, 1.0)], 2.0**25, 0x4C000000),  # 2^25 + 1 is cut
        ([(1.0, 1.0)], -(2.0**24), 0xCB7FFFFF),
        ([(1.5, 1.5)] + [(2.0**-13, 2.0**-13)] * 15, 0.0, 0x40100000),  # 2^-26 under 2^0: each is cut to 0
        ([(1.5, 1.5)] + [(2.0**-13, 2.0**-12)] * 15, 0.0, 0x40100001),  # 2^-25: each is kept
    ],
)
def test_one_step(products: list[tuple[float, float]], c: float, result: int) -> None:
    assert one_step(products, c) == result


# What follows for products


def test_an_output_depends_on_its_row_and_column_alone() -> None:
    a, b = rand(70, 1100), rand(1100, 530, seed=1)  # more than one block in every dimension
    whole = chain(a, b)
    assert same(whole[65:67], chain(a[65:67], b)) and same(whole[:, 300:301], chain(a, b[:, 300:301]))
    assert same(whole, chain(b.t(), a.t()).t())
    strided = torch.full((70, 2200), float("nan"), dtype=torch.bfloat16)
    strided[:, ::2] = a
    assert same(whole[:3], chain(strided[:3, ::2], b))


def test_the_order_inside_a_group_is_free_and_zero_groups_add_nothing() -> None:
    a, b = rand(8, 256), rand(8, 256, seed=1)
    whole = chain(a, b.t())
    inside = torch.cat([g + torch.randperm(16) for g in range(0, 256, 16)])
    assert same(whole, chain(a[:, inside], b[:, inside].t()))
    for before, after in ((48, 0), (0, 48)):
        wide = [torch.nn.functional.pad(x, (before, after)) for x in (a, b)]
        assert same(whole, chain(wide[0], wide[1].t()))


def test_zero_groups_add_nothing_to_any_result() -> None:
    zeros = torch.zeros(64, 48).bfloat16()
    for category, a, b, c in drawn("bf16"):
        once = chain(a, b.t(), c)
        assert same(once, chain(zeros, zeros.t(), once)), category
        assert not (bits(once) == MINUS_ZERO).any(), category


def test_a_chain_can_be_carried_on_at_multiples_of_16_only() -> None:
    a, b = rand(16, 256), rand(256, 16, seed=1)
    whole, start = chain(a, b), rand(16, 16, seed=2).float()
    for k in (0, 16, 144, 256):
        assert same(whole, chain(a[:, k:], b[k:], chain(a[:, :k], b[:k])))
    assert differing(whole, chain(a[:, 136:], b[136:], chain(a[:, :136], b[:136]))) > 0.3
    assert differing(chain(a, b, start), chain(a, b) + start) > 0.1  # a sum added later is another sum


def test_an_incomplete_group_is_filled_with_zeros() -> None:
    a, b = rand(5, 100), rand(100, 7, seed=1)
    padded = chain(torch.nn.functional.pad(a, (0, 12)), torch.nn.functional.pad(b, (0, 0, 0, 12)))
    assert same(chain(a, b), padded)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_products(sizes: tuple[int, int, int]) -> None:
    M, N, K = sizes
    a, b = torch.ones(M, K).half(), torch.ones(K, N).half()
    assert same(chain(a, b), torch.full((M, N), float(K)))
    assert same(segments(a, b, cut([K], 512)), torch.full((M, N), float(K)))
    start = torch.full((M, N), -0.0)
    assert K or same(chain(a, b, start), start)


def test_inputs_are_left_alone() -> None:
    a, b, c = rand(3, 40).requires_grad_(), rand(40, 3).requires_grad_(), torch.ones(3, 3)
    out = chain(a, b, c)
    assert torch.equal(c, torch.ones(3, 3)) and not out.requires_grad
    assert same(segments(a, b, [(0, 40)], c), c + chain(a, b)) and torch.equal(c, torch.ones(3, 3))


# Segments


def test_segments_are_chains_folded_in_order() -> None:
    a, b, start = rand(6, 1300), rand(1300, 5, seed=1), rand(6, 5, seed=2).float()
    bounds = cut([1300], 512)
    assert bounds == [(0, 512), (512, 1024), (1024, 1300)]
    p, q, r = (chain(a[:, i:j], b[i:j]) for i, j in bounds)
    assert same(segments(a, b, bounds), p + q + r) and same(segments(a, b, bounds, start), start + p + q + r)
    backwards = segments(a, b, bounds[::-1])
    assert same(backwards, r + q + p) and differing(backwards, p + q + r) > 0.05
    assert differing(segments(a, b, bounds), chain(a, b)) > 0.5


def test_calls_can_be_cut_where_segments_begin() -> None:
    lengths = [700, 3, 512, 90]
    a, b = rand(4, sum(lengths)), rand(sum(lengths), 4, seed=1)
    whole = segments(a, b, cut(lengths, 512))

    def in_two(k: int, left: list[int], right: list[int]) -> Tensor:
        first = segments(a[:, :k], b[:k], cut(left, 512))
        return segments(a[:, k:], b[k:], cut(right, 512), first)

    assert same(whole, in_two(703, lengths[:2], lengths[2:]))  # between sequences
    assert same(whole, in_two(512, [512], [188, 3, 512, 90]))  # inside one, after 512 rows of it
    assert not same(whole, in_two(640, [640], [60, 3, 512, 90]))
    assert not same(whole, segments(a, b, cut([sum(lengths)], 512)))  # where sequences begin matters


def test_long_sums_are_more_accurate_in_segments() -> None:
    a, b = rand(8, 16384).abs(), rand(16384, 8, seed=1).abs()
    truth = a.double() @ b.double()
    errors = [
        ((x - truth) / truth).abs().mean().item() for x in (chain(a, b), segments(a, b, cut([16384], 512)))
    ]
    assert errors[0] > 20 * errors[1]


# Names and errors


def test_classes_are_found_by_name() -> None:
    assert {"chain16", "seg16/512", "lse/triton-1", "none"} <= set(NUMERICS)
    assert known_numerics("chain16") is CHAIN16 and known_numerics(SEG16_512) is SEG16_512
    assert CHAIN16 == "chain16" and str(CHAIN16) == "chain16" and CHAIN16 in {"chain16"}
    assert CHAIN16 != SEG16_512 and CHAIN16 != 16
    with pytest.raises(ContractError, match=r"'chain8'; known: chain16, seg16/512, .*none"):
        known_numerics("chain8")


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: chain(torch.ones(2, 3), rand(3, 2)), r"a: \[2, 3\] fp32\): dtype must be bf16 or fp16"),
        (lambda: chain(rand(2, 3), rand(3, 2).half()), r"b: \[3, 2\] fp16\): does not fit a: \[2, 3\] bf16"),
        (lambda: chain(rand(2, 3), rand(2, 3)), "does not fit a"),
        (lambda: chain(rand(2, 3), rand(3)), "must be a matrix on the CPU"),
        (lambda: chain(rand(2, 3), rand(3, 2), torch.ones(2, 3)), r"c: \[2, 3\] fp32\): must be \[2, 2\]"),
        (lambda: step(rand(2, 17), rand(17, 2), torch.ones(2, 2)), "at most 16 k; use chain"),
        (lambda: segments(rand(2, 3), rand(3, 2), [(0, 4)]), r"\(0, 4\)\): must lie in \[0, 3\]"),
    ],
)  # fmt: skip
def test_wrong_calls_say_what_is_wrong(call: Any, rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        call()


def test_the_examples_run() -> None:
    result = doctest.testmod(mma)
    assert result.attempted > 5 and not result.failed


# Capturing again


@pytest.mark.compat
@pytest.mark.parametrize(
    ("block", "instruction"), [*zip(capture.KERNELS, ("wgmma", "mma.sync"), strict=True)]
)
def test_the_capture_uses_both_instructions(block: tuple[int, int], instruction: str) -> None:
    side, warps = block
    types = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "d": "*fp32", "K": "i32"}
    source = ASTSource(
        capture._tile,
        {**types, "SIDE": "constexpr", "BLOCK": "constexpr"},
        {(5,): capture.SIDE, (6,): side},
    )
    compiled = to_ptx.compiled(source, {"num_warps": warps})
    assert capture.instructions(compiled.asm) == instruction
    assert re.search(r"k16\b", compiled.asm["ptx"]) and not re.search(r"m\d+n\d+k8\b", compiled.asm["ptx"])


def test_the_capture_would_notice_every_control() -> None:
    noticed: set[str] = set()
    for _, a, b, c in drawn("bf16"):
        found = chain(a, b.t(), c)
        left = {name: like for name, like in CONTROLS.items() if name not in noticed}
        noticed |= {name for name, like in left.items() if not same(chain(a, b.t(), c, like=like), found)}
    assert noticed == set(CONTROLS)


def test_captured_tiles_are_kept_where_wrong_models_show(tmp_path: Path) -> None:
    a, b, c = rand(64, 16), rand(64, 16, seed=1), torch.zeros(64, 64)
    d = chain(a, b.t(), c)
    capture.save(tmp_path / "tiles.npz", [("normal", a, b, c, d)], {"gpu": "none"})
    stored = np.load(tmp_path / "tiles.npz")
    a, b, c, d = (torch.from_numpy(stored[f"step_{key}"][0]) for key in "abcd")
    a, b, c = a.view(torch.bfloat16), b.view(torch.bfloat16), c.view(torch.float32)
    assert d.shape == (8, 8) and torch.equal(bits(chain(a, b.t(), c)), d)
    for like in (Step(fraction_bits=24), Step(products=8)):
        assert (bits(chain(a, b.t(), c, like=like)) != d).any()


@pytest.mark.parametrize(("flipped", "in_trees"), [(0, 0), (1, 0), (0, 1)])
def test_a_capture_compares_and_saves(
    flipped: int,
    in_trees: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def gpu(a: Tensor, b: Tensor, c: Tensor, *_: Any) -> tuple[Tensor, str]:
        d = chain(a[0], b[0].t(), c[0])
        bits(d)[0, 0] ^= flipped
        return d[None], "model"

    def kernels(a: Tensor, b: Tensor, *_: Any) -> Tensor:
        d = tree(a, b.t())
        bits(d)[0, 0] ^= in_trees
        return d

    few = list(capture.step_tiles(torch.bfloat16))[:2]
    monkeypatch.setattr(capture, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(capture, "stamp", lambda device: {"gpu": "none"})
    monkeypatch.setattr(capture, "run", gpu)
    monkeypatch.setattr(capture, "run_tree", kernels)
    monkeypatch.setattr(capture, "tree_backends", lambda device: ["kernels"])
    monkeypatch.setattr(capture, "step_tiles", lambda dtype: few)
    monkeypatch.setattr(capture, "chain_tiles", lambda dtype: [])
    folder = tmp_path / "not" / "there"
    monkeypatch.setattr("sys.argv", ["capture", "--save", str(folder)])
    assert capture.main() == flipped + in_trees
    assert sorted(path.name for path in folder.iterdir()) == ["mma_bf16.npz", "mma_fp16.npz"]
    verdict = "does not keep chain16: 8 of" if flipped else "keeps chain16: 0 of"
    printed = capsys.readouterr().out
    assert verdict in printed
    # A flipped bit of a tile is in its tree too: the leaves are what the GPU computed.
    assert ("keeps tree8: 0 of" in printed) == (flipped == in_trees == 0)


def test_without_a_gpu_there_is_nothing_to_capture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capture, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("sys.argv", ["capture"])
    assert capture.main() == 2 and "no GPU" in capsys.readouterr().err


# The example


def test_the_example_of_drift_sees_none_in_det_linear(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "batch_drift.py"))
    assert example["main"]() == 0
    printed = capsys.readouterr().out
    assert "det_linear: the same bits in every line" in printed and "numerics chain16" in printed
