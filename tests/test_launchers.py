"""Between the launches of a call there are allocations and views, and nothing else. So a call can be recorded
and made again as nothing but its launches, and no launch waits for a kernel of PyTorch's."""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import JITFunction

import isobit.kernels
import isobit.ops
from isobit.frame.launch import Recorder
from isobit.kernels.host.token_stream import Stream
from isobit.ops.det_gemm import kernels_hopper as products
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from isobit.spec.proofs import proofs

pytestmark = pytest.mark.compat

BF16, F32 = torch.bfloat16, torch.float32

ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}


class Noticed(TorchDispatchMode):
    """Names of the ops inside that are neither an allocation nor a view."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        a_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if schema.name not in ALLOCATIONS and not a_view:
            self.ops.append(schema.name)
        return func(*args, **kwargs or {})


def between_launches(call: Callable[[Recorder], Any]) -> list[str]:
    recorder = Recorder()
    with Noticed() as noticed:
        call(recorder)
    assert recorder.launches
    return noticed.ops


def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("op", [name for name, proof in proofs().items() if "hopper" in proof.kernels])
def test_nothing_runs_between_the_launches_that_a_proof_records(op: str) -> None:
    assert between_launches(lambda launch: proofs()[op].kernels["hopper"].record(launch, BF16)) == []


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_nothing_runs_between_the_launches_of_attention(dtype: torch.dtype) -> None:
    kernels = proofs()["attention"].kernels["triton"]
    assert between_launches(lambda launch: kernels.record(launch, dtype)) == []


def both_passes(launch: Recorder, lead: tuple[int, ...] = (300,), **changes: Any) -> None:
    """A forward of `linear_logp` and its backward, with these arguments other than usual."""
    D, V = 64, 1100
    none = ("bias", "mask", "logit_scale", "logits_dtype", "vocab_size", "workspace_bytes", "entropy")
    args = dict.fromkeys((*none, "dentropy", "dlse")) | {
        "hidden": empty(*lead, D, dtype=BF16), "weight": empty(V, D, dtype=BF16), "ignore_index": -100,
        "token_ids": empty(*lead, dtype=torch.int64), "temperature": 1.0, "dlogp": empty(*lead),
        "stats": empty(2, *lead), "keep": False,
        **dict.fromkeys(("return_entropy", "return_lse", "return_stats", "want_hidden", "want_weight"), True),
        "want_bias": "bias" in changes,
    } | changes  # fmt: skip
    *_, kept, kept_base = forward.linear_logp(launch=launch, **args)
    backward.linear_logp_bwd(launch=launch, **args | {"kept": kept, "kept_base": kept_base})


USUAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient of a sum": {"lead": (2, 150), "dlogp": empty().expand(2, 150), "dlse": empty().expand(2, 150)},
    "mask": {"mask": empty(300, dtype=torch.bool)},
    "whole numbers for a mask": {"mask": empty(300, dtype=torch.int64)},
    "bias": {"bias": empty(1100)},
    "padded vocabulary": {"vocab_size": 1000, "bias": empty(1100)},
    "kept": {"keep": True, "workspace_bytes": 1 << 40},
    "several slabs": {"workspace_bytes": 0},
    "frozen head, several blocks of rows": {"lead": (9000,), "want_weight": False},
    "frozen head, mask": {"lead": (9000,), "want_weight": False, "mask": empty(9000, dtype=torch.bool)},
    "weight alone": {"want_hidden": False},
    "sequences": {"lead": (3, 40)},
    "rows apart": {"hidden": empty(300, 72, dtype=BF16)[:, :64]},
    "one row": {"lead": (1,)},
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_nothing_runs_between_the_launches_of_linear_logp(name: str) -> None:
    assert between_launches(lambda launch: both_passes(launch, **USUAL[name])) == []


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("Z", [1, 3])
def test_nothing_runs_between_the_launches_of_a_sum_over_tokens(Z: int, some: bool) -> None:
    tables = Stream(*(empty(n, dtype=torch.int32) for n in (128, 2, 2, 1)))
    x, dy = empty(Z, 100, 64, dtype=BF16), empty(Z, 100, 48, dtype=BF16)
    init = empty(Z, 48, 64)
    stream = tables if some and Z == 1 else None
    assert between_launches(lambda launch: products.token_product(x, dy, stream, init, launch)) == []


@pytest.mark.parametrize(
    ("changes", "op"),
    [
        ({"token_ids": empty(600, dtype=torch.int64)[::2]}, "aten::clone"),
        ({"lead": (2, 150), "hidden": empty(2, 151, 64, dtype=BF16)[:, :-1]}, "aten::clone"),
    ],
)
def test_a_copy_between_launches_is_noticed(changes: dict[str, Any], op: str) -> None:
    """Tensors that kernels cannot read in place are copied."""
    assert op in between_launches(lambda launch: both_passes(launch, **changes))


def test_arithmetic_between_launches_is_noticed() -> None:
    def call(launch: Recorder) -> None:
        count = empty(1, dtype=torch.int32)
        both_passes(launch)
        count = (count + 63) // 64
        count.zero_()

    assert between_launches(call) == ["aten::add", "aten::floor_divide", "aten::zero_"]


def kernels_of_the_package() -> set[str]:
    """Modules and names of all kernels that a launcher can launch."""
    there: set[str] = set()
    for package in (isobit.ops, isobit.kernels):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "kernels" in found.name:
                members = vars(import_module(found.name)).values()
                fns = [one.fn for one in members if isinstance(one, JITFunction)]
                there |= {f"{fn.__module__}:{fn.__name__}" for fn in fns if fn.__name__.endswith("_kernel")}
    return there - {"isobit.ops.attention.kernels_hopper_decode:wait_for_previous_kernel"}  # part of others


def test_proofs_record_every_kernel() -> None:
    """So the law `compile` compiles it, whether or not a machine has a GPU."""
    recorder = Recorder()
    for proof in proofs().values():
        for backend, kernels in proof.kernels.items():
            for dtype in (BF16, torch.float16, *([] if "hopper" in backend else [F32])):
                kernels.record(recorder, dtype)
    recorded = {f"{kernel.fn.__module__}:{kernel.fn.__name__}" for kernel, _, _ in recorder.launches}
    there = kernels_of_the_package()
    assert len(there) > 60 and there - recorded == set()
