"""In which order compiled Hopper kernels add, under the Triton that is installed.

Their PTX is executed on a CPU (`ptx`) and held against the model that docs/numerics/lse_1.md prints.
Controls: the same model in another order must differ.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ptx
import to_ptx
from isobit.frame.launch import Recorder
from isobit.kernels.hopper import logits as hopper_logits
from isobit.kernels.hopper.lse import Slots, splits_of
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from isobit.ops.linear_logp import proof as linear_logp_proof
from isobit.ops.logp import kernels_hopper as logp
from isobit.ops.logp import proof as logp_proof

pytestmark = pytest.mark.compat

f32 = np.float32
PAGE = Path(__file__).parents[1] / "docs" / "numerics" / "lse_1.md"


def model() -> dict[str, Any]:
    """The functions that the page prints."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (text,) = (block for block in blocks if "def row_sums(z, c, " in block)
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    return ptx.fma(*np.broadcast_arrays(*(np.asarray(x, f32) for x in (a, b, c))))


def logits(V: int, rows: int) -> Tensor:
    """Rows of several kinds: plain, wide apart, with lanes of nothing but -inf, shifted far from 0."""
    z = torch.randn(rows, V, generator=torch.Generator().manual_seed(V))
    z[1::4] *= 20
    z[2::4, : V // 2] = -torch.inf
    z[2::4, torch.arange(V) % 8 < 2] = -torch.inf
    z[3::4] += 1000
    return z


@pytest.fixture(scope="module")
def z() -> Tensor:
    return logits(5 * 256 - 44, 32)


def modelled(z: Tensor, scope: dict[str, Any]) -> np.ndarray:
    """Sums of two splits, of two and of three tiles: [splits, 3, rows]."""
    padded = torch.nn.functional.pad(z, (0, 44), value=-torch.inf).numpy()
    with np.errstate(all="ignore"):
        sums = [[scope["split_sums"](row[part], f32(LOG2E), fma, ptx.exp2) for row in padded]
                for part in (slice(0, 512), slice(512, 1280))]  # fmt: skip
    return np.array(sums, f32).transpose(0, 2, 1)


def differing(a: np.ndarray, b: np.ndarray) -> int:
    return int((np.ascontiguousarray(a).view(np.uint32) != np.ascontiguousarray(b).view(np.uint32)).sum())


def folded(z: Tensor, entropy: bool) -> np.ndarray:
    """What `fold_kernel` leaves, in a grid of two splits."""
    N, V = z.shape
    partial, picked = torch.full((2, 3, 128), torch.nan), torch.full((128,), torch.nan)
    ids, scales = torch.full((128,), 700, dtype=torch.int32), torch.full((128,), LOG2E)
    ptx.execute(
        hopper_logits.fold_kernel, (1, 2), partial, picked, z, ids, scales, N, V, z.stride(0), 128, entropy,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert torch.equal(picked[:N], z[:, 700])
    return partial[:, :, :N].numpy()


def test_lanes_and_splits_are_summed_as_the_page_says(z: Tensor) -> None:
    splits = modelled(z, model())
    assert differing(folded(z, entropy=True), splits) == 0
    assert differing(folded(z, entropy=False)[:, :2], splits[:, :2]) == 0


def tree(x: np.ndarray) -> np.ndarray:
    """Neighbours, again and again: what a reduction is from Triton 3.8 on."""
    x = x[:, :, 0] + x[:, :, 1]
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def backwards(x: np.ndarray) -> np.ndarray:
    return np.asarray(model()["lane_sum"](x[::-1]))


@pytest.mark.parametrize("other", [tree, backwards])
def test_another_order_of_a_lane_would_show(z: Tensor, other: Callable[[np.ndarray], np.ndarray]) -> None:
    splits = modelled(z, model())
    scope = model()
    scope["lane_sum"] = other
    changed = modelled(z, scope)
    assert differing(splits[:, 1:], changed[:, 1:]) > 0.25 * changed[:, 1:].size


def summed(ir: str) -> list[int]:
    """How many floats each reduction by addition takes."""
    sizes = []
    for text in ir.split('"tt.reduce"')[1:]:
        result = re.match(r".*?axis = (\d).*?\(\{(.*?)\n *\}\).*?tensor<([\dx]+)x(\w+)", text, re.S)
        assert result, text[:200]
        axis, body, shape, kind = result.groups()
        if "arith.addf" in body:
            assert kind == "f32"
            sizes.append(int(shape.split("x")[int(axis)]))
    return sizes


@pytest.mark.parametrize("kernel", ["forward_kernel", "fold_kernel", "bias_kernel"])
def test_no_sum_of_more_than_two_is_left_to_the_compiler(kernel: str) -> None:
    """Also where tensor cores make the logits, which `ptx` cannot execute."""
    recorder = Recorder()
    for proof in (linear_logp_proof, logp_proof):
        proof.record_hopper(recorder, torch.bfloat16)
    launches = [launch for launch in recorder.launches if launch[0].__name__ == kernel]
    names = launches[0][0].arg_names
    if "ENTROPY" in names:
        launches = [launch for launch in launches if launch[2]["ENTROPY"]]
    recorder.launches = launches[:1]
    ((_, source, options),) = recorder.sources()
    sums = summed(to_ptx.compiled(source, options).asm["ttgir"])
    assert sums and set(sums) == {2}


def test_splits_are_folded_as_the_page_says() -> None:
    """`merge_kernel` returns m and s of rows unchanged."""
    z = logits(34 * 256 - 1, 4)
    N, V = z.shape
    with np.errstate(all="ignore"):
        result = [model()["row_sums"](row, f32(LOG2E), fma, ptx.exp2) for row in z.numpy()]
        m, s, _ = np.array([sums for _, sums in result], f32).T
        own = s * ptx.exp2(-fma(m, f32(LOG2E), -(m * f32(LOG2E))))
    slots = Slots(torch.zeros(N, dtype=torch.int64), None, None, -100, LOG2E, V, False, ptx.execute)
    partial = torch.full((splits_of(V), 3, slots.capacity), torch.nan)
    partial[:, :, :N] = torch.from_numpy(np.array([splits for splits, _ in result], f32).transpose(1, 2, 0))
    picked = torch.zeros(slots.capacity)
    *_, stats = slots.merge(partial, picked, torch.Size([N]), V, 1.0, True, True, True, ptx.execute)
    assert stats is not None
    assert differing(stats.numpy(), np.array([m, own])) == 0


def test_an_infinite_logit_makes_an_infinite_lse() -> None:
    """As in torch: logp and entropy of such a row are NaN, and so is all of a row that holds NaN as well."""
    V, inf, nan = 3 * 256 - 9, torch.inf, torch.nan
    rows = {
        "plain": {}, "first tile": {3: inf}, "last column": {V - 1: inf}, "two": {3: inf, 300: inf},
        "at the token": {5: inf}, "and -inf": {3: inf, 4: -inf, 5: -inf}, "and large": {3: inf, 299: 1e38},
        "one lane": {3: inf, 2: inf, 10: -1e38}, "NaN": {7: nan}, "NaN and inf": {3: inf, 700: nan},
        "NaN and inf in a lane": {8: nan, 16: inf}, "-inf alone": dict.fromkeys(range(V), -inf) | {6: inf},
    }  # fmt: skip
    z = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(0)) * 3
    for row, values in zip(z, rows.values(), strict=True):
        row[list(values)] = torch.tensor(list(values.values()))
    ids = torch.full((len(rows),), 5)
    args = {"logits": z, "token_ids": ids, "mask": None, "ignore_index": -100, "temperature": 0.7}
    flags = {"return_entropy": True, "return_lse": True, "return_stats": False}
    result = logp.logp(ptx.execute, **args, **flags)
    log_p = (z / 0.7).log_softmax(-1)
    truth = (log_p[:, 5], -(log_p.exp() * log_p).sum(-1), (z / 0.7).logsumexp(-1))
    for ours, exact in zip(result[:3], truth, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, exact, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.isposinf(result[2]).sum() == 8  # type: ignore[arg-type]


# Column sums of d-logits


def column_sums(dz: np.ndarray, strides: tuple[int, ...]) -> np.ndarray:
    """16 rows at a time; of those, rows at these distances are added, one distance after the other."""
    total = np.zeros(dz.shape[1], f32)
    for first in range(0, len(dz), 16):
        rows = {r: dz[first + r] if first + r < len(dz) else np.zeros_like(total) for r in range(16)}
        for stride in strides:
            rows = {r: value + rows[r + stride] for r, value in rows.items() if not r & stride}
        total = total + rows[0]
    return total


def gradients(rows: int, columns: int) -> Tensor:
    gen = torch.Generator().manual_seed(columns)
    scale = 2.0 ** torch.randint(-12, 6, (rows, 512), generator=gen)
    return (torch.randn(rows, 512, generator=gen) * scale).bfloat16()


@pytest.mark.parametrize(("rows", "columns"), [(37, 512), (37, 200), (37, 511), (128, 64), (300, 70), (0, 9)])
def test_the_bias_is_summed_as_the_page_says(rows: int, columns: int) -> None:
    """Also where rows fill a step of 128, or end in the middle of the third."""
    dz = gradients(rows + 27, columns)
    dbias, count = torch.full((columns,), torch.nan), torch.tensor([rows], dtype=torch.int32)
    backward.sum_bias(dbias, dz[:, :columns], count, False, ptx.execute)
    exact = dz[:rows].float().numpy()[:, :columns]
    assert differing(dbias.numpy(), column_sums(exact, (8, 2, 1, 4))) == 0
    for other in ((8, 4, 2, 1), (1, 2, 4, 8), (8, 2, 4, 1)) if rows else ():
        assert differing(dbias.numpy(), column_sums(exact, other)) > 0.02 * columns


def test_sums_of_the_bias_go_on_in_the_next_chunk() -> None:
    dz, columns = gradients(512 + 300, 70), 70
    dbias = torch.full((columns,), torch.nan)
    for first, end in ((0, 512), (512, 812)):
        count = torch.tensor([end - first], dtype=torch.int32)
        backward.sum_bias(dbias, dz[first:end, :columns], count, first > 0, ptx.execute)
    assert differing(dbias.numpy(), column_sums(dz.float().numpy()[:, :columns], (8, 2, 1, 4))) == 0
