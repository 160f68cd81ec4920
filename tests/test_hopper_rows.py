"""The rows that Hopper kernels work on: what is packed, what is left blank, and what a bad token may reach.

The kernels that do this are plain Triton, so the interpreter runs them here, in one child process.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from interpreted import in_interpreter

pytestmark = pytest.mark.compat

NAN = float("nan")


def interpreted() -> dict[str, Any]:
    """Everything that the tests below check, computed with Triton in its interpreter."""
    from isobit.frame.launch import run
    from isobit.kernels.hopper.lse import COLUMNS, Slots
    from isobit.kernels.hopper.product import pack
    from isobit.kernels.host.temperature import LOG2E
    from isobit.ops.linear_logp import kernels_hopper_bwd as backward

    V, N = 256, 6
    tokens = torch.tensor([5, 1000, -100, 7, -3, 9])  # 1 and 4 are no tokens of this vocabulary
    mask = torch.tensor([1, 1, 1, 1, 1, 0])  # neither is counted: 2, by its token, and 5
    results: dict[str, Any] = {}

    def slots_of(ids: torch.Tensor, mask: torch.Tensor | None, packed: bool) -> Slots:
        return Slots(ids, mask, None, -100, LOG2E, V, packed, run)

    slots = slots_of(tokens, mask, True)
    results["packed"] = [slots.rows[:4].tolist(), slots.ids[:4].tolist(), slots.count.item()]
    strided = torch.stack((tokens, tokens + 1), 1)[:, 0]
    results["strided"] = slots_of(strided, mask[:, None].expand(N, 2)[:, 0], True).ids[:4].tolist()
    own = slots_of(tokens, mask, False)
    results["in place"] = [own.rows[:7].tolist(), own.ids[:7].tolist(), own.count.item()]

    out = torch.full((N, 8), 8.0)
    slots.blank(out, run)
    results["blank"] = out[:, 0].tolist()

    # Sums of one split in which every logit of a row was the row's own number.
    partial = torch.zeros(1, 3, slots.capacity)
    partial[0, 0, :2], partial[0, 1, :2] = torch.tensor([2.0, 3.0]), float(V)
    picked = torch.full((slots.capacity,), NAN)
    picked[:2] = torch.tensor([2.0, 3.0])
    logp, _, lse, stats = slots.merge(partial, picked, tokens.shape, V, 1.0, False, True, True, run)
    assert lse is not None and stats is not None
    results["logp"], results["lse"] = logp.tolist(), lse.tolist()
    results["stats"] = stats.tolist()

    # Three splits with maxima that rise, fall and are missing, from logits of which most are banned.
    logits = torch.tensor([1.0, -2.0, 0.5, 7.0, 6.5, 3.0, -float("inf"), -float("inf")])
    splits = (logits[:3], logits[3:6], logits[6:])
    three = Slots(torch.tensor([3]), None, None, -100, LOG2E, 600, True, run)
    partial = torch.zeros(3, 3, three.capacity)
    for i, z in enumerate(splits):
        u = (z - z.max().clamp(min=-1e9)) * LOG2E
        e = u.exp2()
        partial[i, :, 0] = torch.stack((z.max(), e.sum(), (e * u.clamp(min=-1000)).sum()))
    merged = three.merge(partial, logits[3].expand(three.capacity), torch.Size([1]), 600, 1.0, True, True,
                         False, run)  # fmt: skip
    log_p = logits.log_softmax(0)
    truth = (log_p[3], -(log_p.exp() * log_p.clamp(min=-1000)).sum(), logits.logsumexp(0))
    results["merged"] = [[float(x) for x in merged[:3]], [float(x) for x in truth]]  # type: ignore[arg-type]

    # More splits than are loaded at a time, of a row among others: a split is a stretch of its logits.
    many = torch.randn(33, 5, generator=torch.Generator().manual_seed(3)) * 4
    longer = Slots(torch.full((200,), 7), None, None, -100, LOG2E, 33 * COLUMNS, True, run)
    partial = torch.full((33, 3, longer.capacity), NAN)
    partial[:, 0, :200] = many.amax(1)[:, None]
    u = (many - many.amax(1, keepdim=True)) * LOG2E
    partial[:, 1, :200], partial[:, 2, :200] = u.exp2().sum(1)[:, None], (u.exp2() * u).sum(1)[:, None]
    picked = torch.full((longer.capacity,), many[0, 0].item())
    merged = longer.merge(partial, picked, torch.Size([200]), 33 * COLUMNS, 1.0,
                          True, True, False, run)  # fmt: skip
    log_p = many.flatten().log_softmax(0)
    truth = (log_p[0], -(log_p.exp() * log_p).sum(), many.logsumexp((0, 1)))
    results["many"] = [[x[150].item() for x in merged[:3]], [x.item() for x in truth]]  # type: ignore[index]

    # Rows in place, of which whole parts of 64 do not count, through several rounds of 4096.
    some = torch.full((9000,), -100)
    some[[0, 130, 131, 4095, 4096, 8999]] = 5
    some[700] = 1000  # no token, but it counts
    listed = Slots(some, None, None, -100, LOG2E, V, False, run, list_parts=True)
    results["listed"] = listed.listed[: listed.listed[0] + 2].tolist()
    results["listed in place"] = [listed.count.item(), (listed.ids != -2).nonzero()[:, 0].tolist()]
    partial = torch.full((1, 3, listed.capacity), NAN)
    picked = torch.full((listed.capacity,), NAN)
    counted = (some != -100).nonzero()[:, 0]
    partial[0, :, counted] = torch.tensor([2.0, float(V), 0.0])[:, None]
    picked[counted] = 2.0
    outputs = listed.merge(partial, picked, some.shape, V, 1.0, True, True, True, run)
    results["dead"] = [x[..., some == -100].unique(dim=-1).tolist() for x in outputs if x is not None]
    results["alive"] = [x[counted[1]].item() for x in outputs[:3] if x is not None]
    results["no token"] = [x[700].isnan().item() for x in outputs[:3] if x is not None]

    # Slots of a plain batch that takes several programs.
    plain = Slots(torch.arange(1200) % V, None, None, -100, LOG2E, V, False, run)
    there = torch.arange(1200)
    results["plain"] = [
        torch.equal(plain.rows[:1200].long(), there), torch.equal(plain.ids[:1200].long(), there % V),
        plain.rows[1200:].unique().tolist(), plain.ids[1200:].unique().tolist(), plain.count.item(),
    ]  # fmt: skip

    # d-logits from stored probabilities: a gap, and a lane that saw only -inf, below a maximum of -150.
    args = {
        "entropy": None, "dlogp": torch.ones(1).expand(N), "dentropy": None, "dlse": None,
        "stats": torch.tensor([[-150.0], [1.0]]).expand(2, N),
    }  # fmt: skip
    weights, counts = backward.weigh(slots, slots.capacity, args, N, V, 1.0, run)
    each = args | {"dlogp": torch.ones(N)}
    results["one number"] = torch.equal(weights, backward.weigh(slots, 128, each, N, V, 1.0, run)[0])
    probs = torch.zeros(slots.capacity, V, dtype=torch.bfloat16)
    base = torch.zeros(slots.capacity, 1, 4)
    probs[:, 1], base[:, 0, 0] = 1.0, -150.0
    probs[2:] = float("inf")  # gaps may hold anything
    dz = torch.full((slots.capacity, V), NAN, dtype=torch.bfloat16)
    (block,) = backward.blocks_of(dz, slots, weights, counts, probs, base, slots.capacity)
    backward.from_probs(dz, block, 0, run)
    results["dz"] = [dz.isnan().sum().item(), dz[:2, [1, 5, 7]].tolist(), dz[2:].abs().max().item()]

    # The same in place, after three rows of others; and its column sums, continued from existing ones.
    behind = torch.cat((probs.new_full((3, V), 7.0), probs))
    own = block._replace(probs=behind)
    backward.from_probs(behind, own, 0, run, torch.tensor([3], dtype=torch.int32))
    results["dz behind"] = [torch.equal(behind[3:], dz), behind[:3].unique().tolist()]
    sums = torch.ones(V)
    backward.sum_bias(sums, dz, slots.count, True, run)
    results["sums"] = sums[[1, 5, 7, 9]].tolist()

    # 130 of 300 rows, in blocks of 128 and all together.
    some = torch.where(torch.arange(300) % 300 < 130, 5, -100)
    taken = Slots(some, None, None, -100, LOG2E, V, True, run)
    of_300 = args | {"dlogp": torch.ones(300), "stats": torch.ones(2, 300)}
    results["counts"] = [
        backward.weigh(taken, height, of_300, 300, V, 1.0, run)[1].tolist() for height in (128, 384)
    ]

    # Rows whose length is no multiple of 16 bytes, packed for TMA.
    source = torch.arange(5 * 12).reshape(5, 12).bfloat16()
    into = torch.full((64,), -1, dtype=torch.int32)
    into[:2] = torch.tensor([3, 1])
    dense = pack(source, into)
    results["pack"] = [dense[:3].tolist(), dense.stride(0) * 2 % 16, source[[3, 1]].tolist()]
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(in_interpreter(Path(__file__)))
    return result


def test_packed_rows_are_live_and_have_a_token(results: dict[str, Any]) -> None:
    assert results["packed"] == [[0, 3, -1, -1], [5, 7, -2, -2], 2]
    assert results["strided"] == [5, 7, -2, -2]  # whatever the strides of tokens and mask


def test_rows_in_place_say_which_of_them_are_live(results: dict[str, Any]) -> None:
    rows, ids, count = results["in place"]
    assert rows == [0, 1, 2, 3, 4, 5, -1] and count == 6
    assert ids == [5, 1000, -2, 7, -1, -2, -2]


def test_what_has_no_slot_is_zero_or_nan(results: dict[str, Any]) -> None:
    assert results["blank"] == pytest.approx([8.0, NAN, 0.0, 8.0, NAN, 0.0], nan_ok=True)


def test_results_go_back_to_the_rows_they_are_of(results: dict[str, Any]) -> None:
    log_v = torch.tensor(256.0).log().item()
    assert results["logp"] == pytest.approx([-log_v, NAN, 0, -log_v, NAN, 0], nan_ok=True)
    assert results["lse"] == pytest.approx([2 + log_v, NAN, 0, 3 + log_v, NAN, 0], nan_ok=True)
    assert results["stats"] == [
        [2.0, 0.0, 0.0, 3.0, 0.0, 0.0],
        pytest.approx([256.0, 0.0, 0.0, 256.0, 0.0, 0.0]),
    ]


def test_splits_are_brought_to_one_maximum(results: dict[str, Any]) -> None:
    merged, truth = results["merged"]
    assert merged == pytest.approx(truth, rel=1e-6)
    merged, truth = results["many"]
    assert merged == pytest.approx(truth, rel=1e-5)


def test_parts_with_a_live_row_are_listed(results: dict[str, Any]) -> None:
    assert results["listed"] == [6, 0, 2, 10, 63, 64, 140, 142]
    assert results["listed in place"] == [9000, [0, 130, 131, 700, 4095, 4096, 8999]]


def test_unwritten_sums_are_not_read(results: dict[str, Any]) -> None:
    assert results["dead"] == [[0.0], [0.0], [0.0], [[0.0], [1.0]]]
    log_v = torch.tensor(256.0).log().item()
    assert results["alive"] == pytest.approx([-log_v, log_v, 2 + log_v]) and all(results["no token"])


def test_every_program_fills_its_slots(results: dict[str, Any]) -> None:
    assert results["plain"] == [True, True, [-1], [-2], 1200]


def test_holes_and_empty_lanes_reach_no_gradient(results: dict[str, Any]) -> None:
    nans, (first, second), holes = results["dz"]
    assert nans == 0 and holes == 0
    assert first == [-1.0, 1.0, 0.0] and second == [-1.0, 0.0, 1.0]


def test_probabilities_may_lie_behind_others_and_become_d_logits_in_place(results: dict[str, Any]) -> None:
    assert results["dz behind"] == [True, [7.0]]


def test_sums_go_on_from_those_that_are_there(results: dict[str, Any]) -> None:
    assert results["sums"] == [-1.0, 2.0, 2.0, 1.0]


def test_a_gradient_that_all_rows_share_is_read_where_it_is(results: dict[str, Any]) -> None:
    assert results["one number"]


def test_blocks_know_how_many_of_their_slots_are_taken(results: dict[str, Any]) -> None:
    assert results["counts"] == [[128, 2, 0], [130]]


def test_packed_rows_can_be_read_by_tma(results: dict[str, Any]) -> None:
    (first, second, hole), apart, expected = results["pack"]
    assert [first, second] == expected and not any(hole) and apart == 0


if __name__ == "__main__":
    print(json.dumps(interpreted()))
