"""`linear_policy_loss` on Hopper, run on a CPU: the host code of all of it, on a device that does in plain
PyTorch what each kernel does (see `hopper_device`). Its sums are in the orders of the class, so gradients of
chunks can be held to the bits of `linear_logp`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopper_device import Device
from isobit.check.laws import LAWS
from isobit.frame.op import OPS
from isobit.kernels.hopper import product as hopper_product
from isobit.ops.linear_logp import kernels_hopper
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from isobit.ops.linear_logp.op import linear_logp
from isobit.ops.linear_policy_loss import chunk_buffers
from isobit.ops.linear_policy_loss import kernels_hopper as kernels_hopper_chunk
from isobit.ops.linear_policy_loss.op import linear_policy_loss
from isobit.spec.proof import Case
from isobit.spec.trial import Trial
from test_hopper_backward import new_memory_is_nan, on_grid, one_thread  # noqa: F401

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FULL = 1 << 37
LAUNCHERS: dict[str, Callable[..., Any]] = {
    "linear_logp": kernels_hopper.linear_logp, "linear_logp_bwd": backward.linear_logp_bwd,
    "linear_logp_chunk": kernels_hopper_chunk.linear_logp_chunk,
    "linear_logp_chunk_bwd": kernels_hopper_chunk.linear_logp_chunk_bwd,
    "linear_logp_chunk_dw": kernels_hopper_chunk.linear_logp_chunk_dw,
    "linear_logp_chunk_rounded": kernels_hopper_chunk.linear_logp_chunk_rounded,
}  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """CPU tensors are on a Hopper GPU."""
    result = Device()
    monkeypatch.setattr("isobit.frame.device.arch_key", lambda where: "sm_90")
    monkeypatch.setattr("isobit.frame.device.triton_cannot_run", lambda where: None)
    for module in (kernels_hopper, backward, hopper_product):
        monkeypatch.setattr(module, "sm_count", lambda where: 7)
    monkeypatch.setattr(chunk_buffers, "MIN_ROWS", 128)
    for name, launcher in LAUNCHERS.items():

        def run(launcher: Callable[..., Any] = launcher, **args: Any) -> Any:
            return launcher(result, **args)

        backends = [
            replace(b, run=run, launches=False) if b.name == "hopper" else b for b in OPS[name].backends
        ]
        monkeypatch.setattr(OPS[name], "backends", backends)
    yield result
    for name in LAUNCHERS:
        OPS[name].forget()


def tokens_loss(logp: Tensor, entropy: Tensor | None, weights: Tensor, bonus: float = 0.0) -> Any:
    loss = -(weights * logp).sum()
    return loss if not bonus else loss - bonus * entropy.sum()  # type: ignore[union-attr]


def sequence_loss(logp: Tensor, entropy: Tensor | None, advantages: Tensor, mask: Tensor) -> Any:
    means = (logp * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return -(advantages * means).sum(), {"sequences": len(means), "means": means.sum()}


def make(*lead: int, V: int = 300, D: int = 24, dtype: torch.dtype = BF16, seed: int = 0) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(seed)
    hidden = on_grid(torch.randn(*lead, D, generator=gen), 1 / 8).to(dtype)
    weight = on_grid((torch.randn(V, D, generator=gen) + torch.randn(D, generator=gen)) / D**0.5, 1 / 128)
    ids = torch.randint(0, V, lead, generator=gen)
    return {"hidden": hidden, "weight": weight.to(dtype), "token_ids": ids}


def bias_of(V: int, dtype: torch.dtype) -> Tensor:
    return on_grid(torch.randn(V, generator=torch.Generator().manual_seed(1)), 1 / 32).to(dtype)


def workspace_for(rows: int, V: int, D: int) -> int:
    """The smallest workspace for chunks of this many rows."""
    sizes = range(1 << 16, 1 << 30, 1 << 12)
    result = next(n for n in sizes if (chunk_buffers.capacity("hopper", V, D, BF16, n) or 0) >= rows)
    assert chunk_buffers.capacity("hopper", V, D, BF16, result) == rows
    return result


def leaves_of(args: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    return args | {name: args[name].detach().requires_grad_() for name in wanted}


def chunked(
    args: dict[str, Any], loss_fn: Any, inputs: dict[str, Any], wanted: tuple[str, ...],
    upstream: float = 1.0, **options: Any,
) -> tuple[Tensor, dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    mine = leaves_of(args, wanted)
    loss, stats = linear_policy_loss(**mine, loss_fn=loss_fn, inputs=inputs, backend="hopper", **options)
    grads = torch.autograd.grad(loss, [mine[name] for name in wanted], torch.tensor(upstream))
    return loss.detach(), stats, dict(zip(wanted, grads, strict=True))


def unfused(
    args: dict[str, Any], loss_fn: Any, inputs: dict[str, Any], wanted: tuple[str, ...],
    entropy: bool = False, workspace_bytes: int | None = FULL,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """`linear_logp`, with stored probabilities, and the loss on all rows."""
    mine = leaves_of(args, wanted)
    outputs = linear_logp(**mine, backend="hopper", return_entropy=True, workspace_bytes=workspace_bytes)
    returned = loss_fn(outputs[0], outputs[1] if entropy else None, **inputs)
    loss = returned[0] if isinstance(returned, tuple) else returned
    grads = torch.autograd.grad(loss, [mine[name] for name in wanted])
    return loss.detach(), dict(zip(wanted, grads, strict=True))


ALL = ("hidden", "weight", "bias")
MIXED = {"ignore": slice(3, 1300, 11), "bias": F32}
FLAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "a bias": {"bias": BF16},
    "a mask": {"mask": 0.6, "bias": F32},
    "few rows count": {"mask": 0.05},
    "all masked": {"mask": 0.0, "bias": F32},
    "ignored rows": {"ignore": slice(3, 1300, 11), "bias": F32},
    "temperatures": {"temperature": True, "mask": 0.6},
    "fp16": {"dtype": F16, "mask": 0.6},
    "a frozen head": {"wanted": ("hidden",), "mask": 0.6},
    "frozen hidden states": {"wanted": ("weight",), "mask": 0.6},
    "an entropy bonus": {"entropy": True, "mask": 0.6},
}  # fmt: skip


def flat_call(N: int = 1300, **chosen: Any) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    args = make(N, dtype=chosen.get("dtype", BF16))
    gen = torch.Generator().manual_seed(2)
    if "bias" in chosen:
        args["bias"] = bias_of(300, chosen["bias"])
    if "ignore" in chosen:
        args["token_ids"][chosen["ignore"]] = -100
    if "mask" in chosen:
        args["mask"] = torch.rand(N, generator=gen) < chosen["mask"]
        args["hidden"][~args["mask"]] = float("nan")
    if "temperature" in chosen:
        args["temperature"] = (torch.randint(3, 9, (N,), generator=gen) / 4).float()
    wanted = chosen.get("wanted", tuple(name for name in ALL if name in args))
    return args, {"weights": torch.randn(N, generator=gen)}, wanted


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, gradient in expected.items():
        assert gradient.dtype == result[name].dtype and torch.equal(result[name], gradient), name


@pytest.mark.parametrize("rows", [128, 384, 640, 1024])
@pytest.mark.parametrize("name", ["plain", "a mask", "ignored rows"])
def test_chunks_have_the_bits_of_all_rows(device: Device, name: str, rows: int) -> None:
    args, inputs, wanted = flat_call(**FLAT[name])
    workspace = workspace_for(rows, 300, 24)
    loss, _, result = chunked(args, tokens_loss, inputs, wanted, workspace_bytes=workspace)
    chunks = -(-1300 // (rows // 512 * 512 or rows))
    assert device.launched.count("forward_kernel") == device.launched.count("from_probs_kernel") == chunks
    whole, expected = unfused(args, tokens_loss, inputs, wanted)
    assert_same(result, expected)
    torch.testing.assert_close(loss, whole)


@pytest.mark.parametrize("name", [name for name in FLAT if name not in ("plain", "a mask", "ignored rows")])
def test_options_keep_the_bits(device: Device, name: str) -> None:
    args, inputs, wanted = flat_call(**FLAT[name])
    entropy = FLAT[name].get("entropy", False)
    inputs |= {"bonus": 0.1} if entropy else {}
    workspace = workspace_for(384, 300, 24)
    _, _, result = chunked(args, tokens_loss, inputs, wanted, workspace_bytes=workspace, entropy=entropy)
    assert device.launched.count("slab_kernel") == (4 if entropy else 0)
    _, expected = unfused(args, tokens_loss, inputs, wanted, entropy)
    assert_same(result, expected)


# Sequences


def test_sequences_stay_whole_and_have_the_bits_of_all_rows(device: Device) -> None:
    args = make(11, 120)
    gen = torch.Generator().manual_seed(2)
    args["mask"] = torch.rand(11, 120, generator=gen) < 0.7
    inputs = {"advantages": torch.randn(11, generator=gen), "mask": args["mask"]}
    workspace = workspace_for(384, 300, 24)  # three sequences a chunk
    _, stats, result = chunked(args, sequence_loss, inputs, ("hidden", "weight"), workspace_bytes=workspace)
    assert device.launched.count("from_probs_kernel") == 4 and stats["sequences"] == 11
    _, expected = unfused(args, sequence_loss, inputs, ("hidden", "weight"))
    assert_same(result, expected)


BOUNDS = (0, 60, 60, 500, 700, 1000, 1100)  # one is empty, and two do not fit in chunks of 256 rows


@pytest.mark.parametrize("wanted", [("hidden", "weight"), ("hidden",)])
def test_a_sequence_that_does_not_fit_is_computed_twice(device: Device, wanted: tuple[str, ...]) -> None:
    """It alone: gradients of rows of other sequences are those of stored probabilities, its own those of
    logits that are computed again."""
    args, inputs, _ = flat_call(1100, mask=0.8)
    options = {"cu_seqlens": list(BOUNDS), "workspace_bytes": workspace_for(256, 300, 24)}
    _, _, result = chunked(args, tokens_loss, inputs, wanted, **options)
    assert device.launched.count("from_probs_kernel") == 3 and device.launched.count("slab_kernel") == 2
    _, stored = unfused(args, tokens_loss, inputs, ("hidden",))
    _, again = unfused(args, tokens_loss, inputs, ("hidden",), workspace_bytes=None)
    long = torch.zeros(1100, dtype=torch.bool)
    long[60:500] = long[700:1000] = True
    expected = torch.where(long[:, None], again["hidden"], stored["hidden"])
    assert torch.equal(result["hidden"], expected) and not torch.equal(stored["hidden"], again["hidden"])
    if "weight" in wanted:  # where chunks end does not show: a little more memory, the same sequences without
        options["workspace_bytes"] = chunk_buffers.bytes_for(256, 300, 24) + 5000
        _, _, other = chunked(args, tokens_loss, inputs, wanted, **options)
        assert_same(other, result)


@pytest.mark.parametrize("upstream", [1.0, 0.3])
@pytest.mark.parametrize("entropy", [False, True])
def test_rows_that_fit_no_chunk_are_computed_twice_at_once(
    device: Device, entropy: bool, upstream: float
) -> None:
    """In the backward, which knows the gradient of the loss."""
    args, inputs, wanted = flat_call(bias=F32, mask=0.7)
    inputs |= {"bonus": 0.1} if entropy else {}
    options = {"workspace_bytes": 1000, "entropy": entropy}
    _, _, result = chunked(args, tokens_loss, inputs, wanted, upstream, **options)

    def scaled(*results: Any, **given: Any) -> Tensor:
        return tokens_loss(*results, **given) * upstream

    _, expected = unfused(args, scaled, inputs, wanted, entropy, workspace_bytes=1000)
    assert_same(result, expected)


# The gradient of the loss


@pytest.mark.parametrize("rows", [384, 1408])
@pytest.mark.parametrize("upstream", [1.0, 0.3, -2.0, 0.0])
def test_a_factor_is_applied_before_the_one_rounding(device: Device, upstream: float, rows: int) -> None:
    """In all chunks, and where dweight of one chunk waits for it; and again if the graph is retained."""
    args, inputs, wanted = flat_call(bias=BF16, mask=0.7)
    mine = leaves_of(args, wanted)
    leaves = [mine[name] for name in wanted]

    def loss_of(rows: int) -> Tensor:
        call = {"loss_fn": tokens_loss, "inputs": inputs, "workspace_bytes": workspace_for(rows, 300, 24)}
        return linear_policy_loss(**mine, backend="hopper", **call)[0]

    _, *sums = loss_of(384).grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [t.dtype for t in sums] == [F32] * 3
    loss = loss_of(rows)
    result = [torch.autograd.grad(loss, leaves, torch.tensor(upstream), retain_graph=True) for _ in range(2)]
    for ours in result:
        for gradient, total in zip(ours, sums, strict=True):
            assert torch.equal(gradient, (total.view(gradient.shape) * upstream).to(BF16))
    assert bool(device.arguments["sum_kernel"].SCALED) == (rows == 1408)  # the last to be launched


# Laws


def trial(case: Case) -> Trial:
    return Trial(OPS["linear_policy_loss"], "hopper", torch.device("cpu"), case, "sm_90")


def case_of(dims: dict[str, int], rows: int | None = None, **options: Any) -> Case:
    """In fp16, in which another order of a sum is visible more often than in bf16."""
    if rows is not None:
        options["workspace_bytes"] = chunk_buffers.bytes_for(rows, dims["V"], dims["D"])
    return Case(dims, F16, "random", options=options)


LAW_CASES = {
    "flat": case_of({"N": 1100, "D": 24, "V": 300}, 256, bias="own", mask=0.9),
    "lines": case_of({"B": 8, "T": 130, "D": 16, "V": 300}, 384, each=True, mask=0.8),
    "packed": case_of({"N": 1100, "D": 40, "V": 300}, 256, sequences=7),
    "entropy": case_of({"N": 1100, "D": 16, "V": 300}, 256, entropy=True),
    "recomputed": case_of({"N": 1100, "D": 64, "V": 300}, workspace_bytes=1000, bias="own"),
}


def broken(law: str, name: str) -> list[str]:
    """What a law finds wrong."""
    checks = LAWS[law].run(trial(LAW_CASES[name]))
    assert checks
    return [f"{check.output}: {check.message}" for check in checks if not check.passed]


@pytest.mark.parametrize("name", ["lines", "packed"])
def test_the_law_of_bits_holds(device: Device, name: str) -> None:
    assert broken("invariant", name) == []


@pytest.mark.parametrize("name", LAW_CASES)
def test_bits_are_those_of_linear_logp(device: Device, name: str) -> None:
    assert broken("agree", name) == []


def replaced(monkeypatch: pytest.MonkeyPatch, device: Device, name: str, wrong: Callable[..., Any]) -> None:
    """An op with a launcher that is known to be bad."""
    backends = [replace(b, run=wrong) if b.name == "hopper" else b for b in OPS[name].backends]
    monkeypatch.setattr(OPS[name], "backends", backends)


def test_chunks_that_wait_for_nothing_fail_on_bits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that begin with every chunk are the same mathematics, in another order."""

    def hasty(**args: Any) -> Tensor:
        return kernels_hopper_chunk.linear_logp_chunk_bwd(device, **args | {"last": True})

    replaced(monkeypatch, device, "linear_logp_chunk_bwd", hasty)
    messages = broken("agree", "flat")
    assert messages and all(text.startswith("gradient:weight: linear_logp and the loss") for text in messages)


def test_a_queue_of_other_rows_fails(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels_hopper_chunk._move

    def forgetful(out: Tensor, source: Tensor, *counts: Any) -> None:
        if out.data_ptr() == source.data_ptr() and out.shape[1] != 24:  # d-logits, and not hidden states
            return
        right(out, source, *counts)

    monkeypatch.setattr(kernels_hopper_chunk, "_move", forgetful)
    assert "gradient:weight: linear_logp and the loss" in broken("agree", "flat")[-2]


def test_a_kept_row_that_is_computed_again_fails_on_bits(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient has been rounded once less."""

    def again(out: Tensor, block: Any, first: int, launch: Any, queued: Any = None) -> None:
        plain = {"bias": WEIGHTS["bias"], "logits_dtype": None, "dentropy": None}
        packed = hopper_product.pack(WEIGHTS["hidden"], block.rows, launch)
        backward.recompute(out, block._replace(hidden=packed), WEIGHTS["weight"], plain, 0, launch, queued)

    WEIGHTS: dict[str, Tensor] = {}

    def watched(**args: Any) -> Tensor:
        WEIGHTS.update(args)
        return kernels_hopper_chunk.linear_logp_chunk_bwd(device, **args)

    replaced(monkeypatch, device, "linear_logp_chunk_bwd", watched)
    monkeypatch.setattr(kernels_hopper_chunk, "from_probs", again)
    assert any(text.startswith("gradient:hidden") for text in broken("agree", "flat"))
