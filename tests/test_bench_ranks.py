"""The suite of what one of several ranks computes, on a CPU with tiny layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.suites import ranks as suite
from isobit.bench.cases import suite_of
from isobit.bench.runner import run
from isobit.parallel import in_turn, row_linear
from isobit.spec.series import Pool

pytestmark = pytest.mark.filterwarnings("ignore:isobit. det_gemm")  # that it is slow here is known
CPU = torch.device("cpu")


def args(name: str, M: int = 6, N: int = 32, K: int = 64, ranks: int = 2) -> dict[str, Any]:
    (series,) = (one for one in suite_of("ranks").series if one.name == name)
    return series.make(suite._case(M, N, K, ranks), Pool(CPU))[0]


def test_every_kind_of_layer_is_timed_next_to_the_product_of_its_shard() -> None:
    wanted = {f"8b-{layer}{more}" for layer in ("qkv", "o", "head") for more in ("", "-training")}
    whole = suite_of("ranks")
    few = replace(whole, series=[one for one in whole.series if one.name in wanted])
    rows = run(few, device="cpu", repetitions=2, skip_check=True, say=lambda t: None)["rows"]
    assert [row["impl"] for row in rows] == ["isobit", "torch.mm"] * 6 and {
        row["op"] for row in rows
    } == wanted
    for row in rows[::2]:
        assert 0 < row["max_abs"] < 0.03
        assert (row["sent_mb"] > 0) == (row["op"] != "8b-qkv")  # columns exchange nothing without gradients
    assert {one.name.removesuffix("-training") for one in whole.series} == {
        f"{model}-{layer}" for model, layers in suite.MODELS.items() for layer in layers
    }


def test_the_widths_are_those_of_the_models() -> None:
    """By the number of parameters that is published: with as many layers, an embedding, and norms."""
    for model, layers, hidden, parameters in (
        ("8b", 32, 4096, 8_030_261_248),
        ("70b", 80, 8192, 70_553_706_496),
    ):
        sizes = {layer: sum(parts) * K for layer, (_, parts, K) in suite.MODELS[model].items()}
        head = sizes.pop("head")
        assert layers * (sum(sizes.values()) + 2 * hidden) + 2 * head + hidden == parameters
    dims = [case.dims for case in suite_of("ranks").series[0].cases]
    assert [(d["R"], d["M"]) for d in dims] == [(R, M) for R in (1, 2, 4, 8) for M in (8, 72, 512, 8192)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_are_those_of_the_page(size: int) -> None:
    """docs/parallel.md: of n elements by all-to-all and all-gather; or gathered whole, up to 64 KB."""
    for M, N in ((520, 32), (6, 32)):
        given, n = args("8b-o", M=M, N=N, ranks=size), M * N
        expected = (4 * n + 2 * n) * (size - 1) // size if 4 * n > 1 << 16 else 4 * n * (size - 1)
        assert suite.sent("row", given, "fwd") == (expected if size > 1 else 0)


def test_the_group_has_zeros_in_the_places_of_others() -> None:
    """With other ranks whose tokens are 0, a real group gives the same."""
    given = args("8b-o", M=520, ranks=4)

    def on_a_rank(group: Any) -> torch.Tensor:
        return row_linear(given["x"] * (group.rank == 0), given["weight"], group=group)

    ours, (theirs, *_) = suite.row(given), in_turn(4, on_a_rank)
    own = len(ours) // 4
    assert torch.equal(ours[:own], theirs[:own]) and not ours[own:].any() and theirs[own:].any()
