"""Everything that affects bits is written once: constants and functions that several Triton kernels share."""

import re
from pathlib import Path

from isobit.kernels.host import token_stream as stream
from isobit.kernels.triton import interpreter
from isobit.kernels.triton import logits as triton_logits
from isobit.kernels.triton import rows as triton_rows
from isobit.kernels.triton import tiles as triton_tiles
from isobit.ops.det_gemm import kernels_triton as products
from isobit.ops.linear_logp import kernels_triton as linear
from isobit.ops.linear_logp import kernels_triton_bwd as linear_bwd
from isobit.ops.logp import kernels_triton as logp
from isobit.ops.ratio_kl import kernels_triton as ratio_kl

SOURCE = Path(stream.__file__).parents[1]


def test_kernels_have_the_segments_of_the_stream() -> None:
    assert triton_tiles.SEGMENT.value == stream.SEGMENT
    assert products.SEGMENT is linear_bwd.SEGMENT is triton_tiles.SEGMENT


def test_log2_of_e_is_written_once() -> None:
    found = [p.name for p in SOURCE.rglob("*.py") if re.search(r"log2\(math\.e\)|1\.4426950", p.read_text())]
    assert found == ["temperature.py"]


def test_ops_round_scale_sum_and_weigh_rows_by_the_same_functions() -> None:
    assert linear.rounded is interpreter.rounded
    for name in ("own_or", "row_results"):
        assert getattr(linear, name) is getattr(logp, name) is getattr(triton_rows, name)
        assert getattr(ratio_kl, name) is getattr(triton_rows, name)
    assert linear_bwd.row_weights is triton_logits.row_weights is triton_rows.row_weights
    for name in ("split_sums", "fold"):
        assert getattr(ratio_kl, name) is getattr(triton_logits, name) is getattr(triton_rows, name)
    for name in ("row_sums", "merged_sums", "schedule_of", "gradient_of"):
        assert getattr(logp, name) is getattr(triton_logits, name)
    for name in ("schedule_of", "gradient_of"):
        assert getattr(ratio_kl, name) is getattr(triton_logits, name)
