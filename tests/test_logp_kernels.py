"""Guards the Triton kernels of `logp` from outside: their host side, how they walk rows, and that their
machine code is what it claims to be."""

import inspect
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import to_ptx
from interpreted import in_interpreter
from isobit import logp
from isobit.check.runner import OK
from isobit.frame.launch import Recorder
from isobit.frame.op import OPS
from isobit.kernels.host.rows import row_strides
from isobit.kernels.triton import logits as triton_logits
from isobit.ops.logp import kernels_triton as kernels
from isobit.ops.logp import proof

pytestmark = pytest.mark.compat


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# In the interpreter


#: The check is in the quick interpreter by itself.
CHECK = """
import json, sys
from isobit.check.request import Request
from isobit.check.runner import run
asked = Request(ops=("logp",), backends=("triton",), laws=("accuracy", "gradient"), case=sys.argv[1])
print(json.dumps([(cell.law, cell.status, cell.reason) for cell in run(asked)]))
"""


@pytest.mark.parametrize("case", ["N=20 V=257 bf16 temperature=0.7", "N=20 V=17000 fp32 mask=bool"])
def test_the_kernels_compute_logp_and_its_gradient(case: str) -> None:
    """Rows in one piece and in several. All other cases are in the whole check, which takes minutes."""
    assert json.loads(in_interpreter(CHECK, case, quick=False)) == [
        ["accuracy", OK, ""],
        ["gradient", OK, ""],
    ]


# The kernels' host side


def test_the_order_of_the_sums_is_a_function_of_v_alone() -> None:
    assert list(inspect.signature(triton_logits.order_of).parameters) == ["V"]
    for V in (1, 1024, 1025, 50257, 151936, 300_000):
        tile = triton_logits.order_of(V)
        assert tile.split == (tile.unroll * 2**tile.log_block) * tile.steps


class Launches:
    """Replaces `launch.run`, and records all arguments."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.made.append((kernel.__name__, grid, dict(zip(kernel.arg_names, args, strict=False)) | options))


def launches_of_forward(N: int, V: int, **options: Any) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    z = torch.empty(N, V, dtype=options.get("dtype", torch.bfloat16), device="meta")
    launches = Launches()
    args: dict[str, Any] = {"logits": z, "token_ids": torch.empty(N, dtype=torch.int64, device="meta")}
    args |= {"mask": None, "ignore_index": -100, "temperature": 1.0}
    kernels.logp(launches, **args, return_entropy=False, return_lse=False, return_stats=True)
    return launches.made


@pytest.mark.parametrize("V", [7, 1024, 1025, 50257, 151936])
def test_rows_and_sms_choose_the_schedule_and_never_the_order(
    monkeypatch: pytest.MonkeyPatch, V: int
) -> None:
    orders, schedules = set(), set()
    for sms, N in itertools.product((1, 132), (1, 16, 4096)):
        monkeypatch.setattr(triton_logits, "sm_count", lambda device, sms=sms: sms)
        made = launches_of_forward(N, V)
        name, grid, given = made[0]
        orders.add(tuple(given[k] for k in ("WORD", "LOG_BLOCK", "UNROLL", "STEPS")))
        schedules.add(name)
        splits = -(-V // triton_logits.order_of(V).split)
        assert grid == ((N,) if name == "logp_rows" else (N, splits))
        assert [m[0] for m in made] in (["logp_rows"], ["logp_splits", "logp_merge"])
    assert len(orders) == 1
    assert schedules == ({"logp_rows"} if V <= 1025 else {"logp_rows", "logp_splits"})


def test_no_kernel_may_fuse_a_product_and_a_sum() -> None:
    recorder = Recorder()
    proof.record(recorder, torch.bfloat16)
    assert recorder.launches
    for kernel, _, options in recorder.launches:
        assert options["enable_fp_fusion"] is False, kernel.__name__


def test_words() -> None:
    """Elements in 16 bytes if rows may start or end inside such a word, else 1."""

    def word_of(z: Tensor) -> int:
        return triton_logits.word_of(z, row_strides(z.shape[:-1], [z])[2])

    for dtype, word in ((torch.bfloat16, 8), (torch.float16, 8), (torch.float32, 4)):
        assert word_of(torch.empty(4, 50257, dtype=dtype, device="meta")) == word
        assert word_of(torch.empty(4, 151936, dtype=dtype, device="meta")) == 1
        # Multiples of a word, but not of the 16 that kernels are specialised on.
        assert word_of(torch.empty(4, 50264, dtype=dtype, device="meta")) == word
        assert word_of(torch.empty(4, 64, dtype=dtype)[:, :63]) == word  # rows end inside a word
        assert word_of(torch.empty(4, 69, dtype=dtype)[:, :64]) == word  # rows start inside a word
        assert word_of(torch.empty(2, 3, 64, dtype=dtype)[:, :-1]) == 1
        assert word_of(torch.empty(4, 65, dtype=dtype)[:, 1:]) == 1  # the tensor itself starts inside one


def everyother(*shape: int) -> Tensor:
    return torch.zeros(*shape, 2)[..., 0]


def backward_launch(lead: tuple[int, ...], **given: Tensor) -> dict[str, Any]:
    """The arguments that the backward passes to its kernel."""
    launches = Launches()
    z, ids = torch.randn(*lead, 8, generator=generator()), torch.zeros(lead, dtype=torch.int64)
    args: dict[str, Any] = {"logits": z, "token_ids": ids, "mask": None, "ignore_index": -100}
    args |= {
        "stats": everyother(2, *lead),
        "entropy": everyother(*lead),
        "temperature": everyother(*lead) + 1,
    }
    kernels.logp_bwd(launches, **args | {"dlogp": None, "dentropy": None, "dlse": None} | given)
    _factors, (_, _, made) = launches.made  # of the temperatures; the backward itself
    return made


def test_the_backward_hands_contiguous_rows_to_its_kernel() -> None:
    """The kernel walks them with stride 1, but hooks may restore what was saved with any stride."""
    made = backward_launch((4,), dlogp=torch.ones(4))
    for name in ("stats", "entropy", "dlogits", "scales", "inverses"):
        assert made[name].is_contiguous(), name


@pytest.mark.parametrize("lead", [(4,), (3, 4), (2, 3, 4)])
def test_the_backward_reads_gradients_where_they_are(lead: tuple[int, ...]) -> None:
    """One number for all rows, which is the gradient of a sum, or one for each."""
    ones, each = torch.ones(()).expand(lead), torch.ones(lead)
    made = backward_launch(lead, dlogp=ones, dentropy=each, dlse=ones)
    assert [made[name].data_ptr() for name in ("dlogp", "dentropy")] == [ones.data_ptr(), each.data_ptr()]
    assert [made[f"{name}_s{i}"] for name in ("dlogp", "dlse", "dkl") for i in "oi"] == [0] * 6
    assert 1 in (made["dentropy_so"], made["dentropy_si"])


def test_a_gradient_with_incompatible_strides_is_copied_and_the_logits_are_not() -> None:
    odd, z = torch.ones(4, 3, 2).permute(2, 1, 0), torch.zeros(2, 3, 5, 8)[:, :, :-1]
    made = backward_launch((2, 3, 4), dlogp=odd, logits=z)
    assert made["dlogp"].is_contiguous() and made["dlogp"].data_ptr() != odd.data_ptr()
    assert made["logits"].data_ptr() == z.data_ptr()


# Rows


def brute_force(lead: Sequence[int], t: Tensor) -> list[int]:
    """Storage offset of every row, by indexing."""
    index = itertools.product(*(range(size) for size in lead))
    return [sum(i * s for i, s in zip(at, t.stride(), strict=False)) for at in index]


def walked(inner: int, N: int, outer_stride: int, inner_stride: int) -> list[int]:
    """The same as the kernels compute it (`row_offset`)."""
    return [row // inner * outer_stride + row % inner * inner_stride for row in range(N)]


VIEWS = {
    "0-d": lambda: torch.empty(7),
    "1-d": lambda: torch.empty(5, 7),
    "1-d strided": lambda: torch.empty(10, 9)[::2, :7],
    "1-d expanded": lambda: torch.empty(7).expand(5, 7),
    "2-d": lambda: torch.empty(3, 5, 7),
    "2-d shifted": lambda: torch.empty(3, 6, 7)[:, :-1],
    "2-d transposed": lambda: torch.empty(5, 3, 7).transpose(0, 1),
    "3-d": lambda: torch.empty(2, 3, 4, 7),
    "3-d shifted": lambda: torch.empty(2, 3, 5, 7)[:, :, :-1],
    "3-d cut in front": lambda: torch.empty(2, 4, 4, 7)[:, :3],
    "3-d ones": lambda: torch.empty(1, 4, 1, 7),
    "3-d expanded": lambda: torch.empty(1, 3, 4, 7).expand(2, 3, 4, 7),
    "4-d": lambda: torch.empty(2, 3, 2, 4, 7),
    "4-d with a one": lambda: torch.empty(2, 3, 1, 4, 7)[:, :2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_rows_are_read_in_place(view: str) -> None:
    z = VIEWS[view]()
    lead = z.shape[:-1]
    ids = torch.empty(lead, dtype=torch.int64)
    inner, (z2, ids2, none), strides = row_strides(lead, (z, ids, None))
    assert z2.data_ptr() == z.data_ptr() and ids2.data_ptr() == ids.data_ptr() and none is None
    assert strides[4:] == [0, 0]
    for t, (outer_stride, inner_stride) in ((z, strides[:2]), (ids, strides[2:4])):
        assert walked(inner, lead.numel(), outer_stride, inner_stride) == brute_force(lead, t)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_any_view_are_indexed_in_order(seed: int) -> None:
    """Random permutations and cuts of three tensors at once: copied or not, every row is where it belongs."""
    gen = generator(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=gen))

    rank = draw(2, 5)
    lead = tuple(draw(1, 4) for _ in range(rank))

    def view(tail: tuple[int, ...]) -> Tensor:
        order = torch.randperm(rank, generator=gen).tolist()
        sizes = [lead[d] + draw(0, 2) for d in order]
        t = torch.arange(math.prod(sizes) * math.prod(tail)).reshape(*sizes, *tail)
        t = t.permute(*(order.index(d) for d in range(rank)), *range(rank, rank + len(tail)))
        return t[tuple(slice(0, n) for n in lead)]

    given = (view((3,)), view(()), view(()))
    inner, found, strides = row_strides(lead, given)
    for k, (t, original) in enumerate(zip(found, given, strict=True)):
        offsets = walked(inner, math.prod(lead), *strides[2 * k : 2 * k + 2])
        rows = torch.as_strided(t, (int(t.untyped_storage().nbytes() // 8 - t.storage_offset()),), (1,))[
            offsets
        ]
        first = original[..., 0] if original.ndim > rank else original
        assert rows.tolist() == first.reshape(-1).tolist()


def test_only_incompatible_strides_are_copied() -> None:
    z = torch.empty(2, 3, 4, 5, 7).permute(2, 0, 3, 1, 4)
    _, (copied,), strides = row_strides(z.shape[:-1], [z])
    assert copied.is_contiguous() and copied.data_ptr() != z.data_ptr() and len(strides) == 2


# Machine code


@pytest.fixture(scope="module")
def ptx() -> dict[tuple[str, int], str]:
    """PTX for sm_90 by kernel and V, as compiled on any machine."""
    recorder = Recorder()
    proof.record(recorder, torch.bfloat16)
    found: dict[tuple[str, int], str] = {}
    for (kernel, args, _), (name, source, options) in zip(recorder.launches, recorder.sources(), strict=True):
        V = dict(zip(kernel.arg_names, args, strict=False)).get("V")
        if V is not None and (name, V) not in found:  # factors of temperatures have rows only
            done = to_ptx.compiled(source, options)
            found[name, V] = done.asm["ptx"]
    return found


def bytes_per_access(ptx: str, what: str) -> list[int]:
    """Sizes of the global loads (`ld`) or stores (`st`) of a kernel."""
    found = re.findall(rf"\b{what}\.global(?:\.\w+)*?(?:\.v([24]))?\.[bfsu](\d+)", ptx)
    return [int(lanes or 1) * int(bits) // 8 for lanes, bits in found]


@pytest.mark.parametrize("V", [50257, 151936])
@pytest.mark.parametrize("kernel", ["logp_rows", "logp_splits"])
def test_the_forward_reads_in_vectors(ptx: dict[tuple[str, int], str], kernel: str, V: int) -> None:
    loads = bytes_per_access(ptx[kernel, V], "ld")
    tile = triton_logits.order_of(V)
    assert sum(size >= 8 for size in loads) >= 2 * tile.unroll  # a whole step and the last one
    # By element: the chosen token's logit, the row's mask and temperature; the word behind a whole step, and
    # once the one that a row does not fill. A thread holds four elements a tile. Nothing that grows with V.
    unfilled = 4 * (1 + 1) if V % 8 else 0
    assert sum(size < 8 for size in loads) <= 4 + unfilled


@pytest.mark.parametrize("V", [50257, 151936])
def test_the_backward_reads_and_writes_whole_words(ptx: dict[tuple[str, int], str], V: int) -> None:
    loads, stores = (bytes_per_access(ptx["logits_gradient", V], what) for what in ("ld", "st"))
    # Live rows, and masked rows, which are only written.
    assert loads.count(16) >= triton_logits.BWD_UNROLL and stores.count(16) >= 2 * triton_logits.BWD_UNROLL
    assert sum(size < 16 for size in stores) == 2  # the first and the last word of a row, by element


def test_sums_are_not_contracted_into_fused_operations(ptx: dict[tuple[str, int], str]) -> None:
    """A fused multiply-add rounds once where the code rounds twice, and the compiler would decide where. The
    remaining ones are in the polynomial inside log2, the same number in every kernel that takes one
    logarithm."""
    fused = {key: len(re.findall(r"\bfma\.rn", text)) for key, text in ptx.items()}
    for V in (50257, 151936):
        assert fused["logp_splits", V] == 0
        assert fused["logp_rows", V] == fused["logp_merge", V]


def test_the_control_of_the_above_fuses() -> None:
    recorder = Recorder()
    proof.record(recorder, torch.bfloat16)
    name, source, options = next(s for s in recorder.sources() if s[0] == "logp_splits")
    done = to_ptx.compiled(source, options | {"enable_fp_fusion": True})
    assert "fma.rn" in done.asm["ptx"], name


def test_the_public_function_takes_the_arguments_of_the_op_in_their_order() -> None:
    public = list(inspect.signature(logp).parameters)
    of_op = [name for name in public if name not in ("vocab_size", "group")]  # those are for ranks
    assert [n for n in OPS["logp"].contract.names if n in public] == of_op
