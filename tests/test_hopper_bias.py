"""A bias of `linear_logp` on Hopper: read two at a time while the product is under way, with the bits of one
number after another. Both kernels that add it, run on a CPU by their own code."""

from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hopper_device
from gluon_on_a_cpu import Device, in_order
from isobit.kernels.hopper import bias as hopper_bias
from isobit.kernels.hopper import lse as hopper_lse
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.kernels.hopper.bias import in_words
from isobit.kernels.hopper.pipeline import gl
from isobit.ops.attention import model
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp import kernels_hopper_bwd as backward
from test_hopper_backward import new_memory_is_nan, one_thread  # noqa: F401

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KINDS = {gl.bfloat16: BF16, gl.float16: F16}


def one_by_one(pipe, acc, bias, first, V, stage, phase, WHICH):  # type: ignore[no-untyped-def]
    """What `multiply_add` should give."""
    acc, stage, phase = pipe.multiply(acc, pipe.steps, stage, phase, WHICH)
    column = columns_from(first)  # type: ignore[name-defined]  # noqa: F821
    number = gl.load(bias + column, mask=column < V, other=0.0)
    return as_lanes(acc) + number.to(gl.float32), stage, phase  # type: ignore[name-defined]  # noqa: F821


def launch(plainly: bool, plain: Any, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    """The kernels with a bias on the CPU, all others in plain PyTorch."""
    if kernel not in (forward.forward_kernel, backward.slab_kernel):
        return plain(kernel, grid, *args, **options)
    device = Device(model.CPU._replace(product=lambda a, b, acc, _: model.CPU.product(a, b, acc, BF16)), 2)

    def store(desc: Any, where: Any, buffer: Any) -> None:
        row, column = map(int, where)
        rest = desc.tensor[row:, column:][: buffer.value.shape[0], : buffer.value.shape[1]]
        rest.copy_(torch.from_numpy(buffer.value)[: rest.shape[0], : rest.shape[1]])

    module = forward if kernel is forward.forward_kernel else backward
    scope = device.scope(
        module, hopper_bias, hopper_lse, hopper_pipe,
        tma=SimpleNamespace(store_wait=lambda left: None), tma_store=store,
        gdc_launch_dependents=lambda: None,
    )  # fmt: skip
    if plainly:
        scope["multiply_add"] = FunctionType(one_by_one.__code__, scope)
    names = kernel.arg_names
    given = [KINDS.get(value, value) if name == "ROUND" else value
             for name, value in zip(names, in_order(kernel, args, options), strict=True)]  # fmt: skip
    return device.run(scope, kernel, given)


def biases(V: int, dtype: torch.dtype, first: int) -> Tensor:
    """From this element of memory on. Some banned, some tiny, zeros of both signs."""
    bias = torch.randn(V, generator=torch.Generator().manual_seed(V))
    bias[5::31] = -torch.inf
    bias[6::17] *= 2.0**-20
    bias[7::19], bias[8::19] = 0.0, -0.0
    memory = torch.full((first + V,), torch.nan, dtype=dtype)
    memory[first:] = bias
    return memory[first:]


def arguments(N: int, D: int, V: int, bias: Tensor, **options: Any) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(N)
    vocab = options.get("vocab_size") or V
    dtype = bias.dtype if bias.dtype != F32 else BF16
    hidden = torch.randn(N, D, generator=gen).to(dtype)
    weight = (torch.randn(V, D, generator=gen) / D**0.5).to(dtype)
    ids = torch.randint(0, vocab, (N,), generator=gen)
    ids[::9] = -100
    ids[1] = vocab - 1
    weight[vocab:] = torch.nan
    names = ("softcap", "logit_scale", "logits_dtype", "vocab_size", "workspace_bytes", "mask")
    args = dict.fromkeys(names) | {"hidden": hidden, "weight": weight, "token_ids": ids, "bias": bias}
    return args | {"ignore_index": -100, "temperature": 0.7} | options


#: Rows, features, columns, dtype of the bias, its first element, options. A product of one step, of as many
#: as the ring has stages, of more; tiles of 64 and of 128 rows.
CASES: dict[str, tuple[Any, ...]] = {
    "whole tiles": (70, 64, 512, BF16, 0, {}),
    "fp32": (70, 72, 512, F32, 0, {}),
    "fp16": (20, 264, 300, F16, 0, {}),
    "in the middle of a word": (70, 72, 514, BF16, 1, {}),
    "fp32 in the middle of a word": (20, 72, 514, F32, 1, {}),
    "fp16 in the middle of a word": (20, 72, 514, F16, 1, {}),
    "an odd vocabulary": (70, 328, 771, BF16, 0, {}),
    "an odd vocabulary in the middle of a word": (20, 8, 257, F16, 3, {}),
    "padding": (70, 72, 520, BF16, 0, {"vocab_size": 509}),
    "padding of fp32": (20, 72, 520, F32, 1, {"vocab_size": 511}),
    "even with padding": (20, 72, 520, F16, 2, {"vocab_size": 258}),
    "one column": (20, 8, 1, BF16, 0, {}),
    "rounded": (70, 72, 300, BF16, 0, {"logits_dtype": BF16}),
    "fp16, rounded": (20, 72, 300, F16, 0, {"logits_dtype": F16, "logit_scale": 0.5}),
}


def forwards(args: dict[str, Any], plainly: bool, keep: bool) -> list[Tensor]:
    flags = dict.fromkeys(("return_entropy", "return_lse", "return_stats"), True)
    result = forward.linear_logp(partial(launch, plainly, hopper_device.Device()), **args, **flags, keep=keep)
    return [t for t in result if t is not None]


def backwards(args: dict[str, Any], outputs: list[Tensor], plainly: bool, entropy: bool) -> list[Tensor]:
    N = len(args["hidden"])
    given = {"entropy": outputs[1], "stats": outputs[3], "kept": None, "kept_base": None, "dlse": None}
    given |= {"dlogp": torch.linspace(-1, 1, N), "dentropy": torch.linspace(1, 0, N) if entropy else None}
    wanted = dict.fromkeys(("want_hidden", "want_weight", "want_bias"), True)
    slab_bytes = 3 * 128 * 512 * 2  # several slabs
    call = args | given | wanted | {"workspace_bytes": slab_bytes}
    result = backward.linear_logp_bwd(partial(launch, plainly, hopper_device.Device()), **call)
    return [t for t in result if t is not None]


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_words_give_the_bits_of_numbers(name: str, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forward, backward):
        monkeypatch.setattr(module, "sm_count", lambda device: 1)  # few SMs take tiles of 128 rows
    N, D, V, dtype, first, options = CASES[name]
    args = arguments(N, D, V, biases(V, dtype, first), **options)
    plain, ours = (forwards(args, plainly, keep) for plainly in (True, False))
    live = args["token_ids"] != -100
    assert plain[0][live].isfinite().any()
    same(ours, plain)
    if not keep:
        both = (backwards(args, plain, plainly, "rounded" in name) for plainly in (True, False))
        same(*both)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_a_bias_is_copied_only_if_words_need_it(dtype: torch.dtype) -> None:
    memory = torch.randn(40).to(dtype)
    for first, size, V, copied in (
        (0, 12, 12, False), (2, 12, 12, False), (1, 12, 12, True), (0, 13, 13, True), (0, 13, 11, False),
        (0, 13, 12, False), (3, 13, 11, True), (0, 1, 1, True),
    ):  # fmt: skip
        bias = memory[first : first + size]
        result = in_words(bias, V)
        assert (result.data_ptr() != bias.data_ptr()) is copied
        assert torch.equal(result[:V], bias[:V]) and len(result) >= V + V % 2
        assert result.data_ptr() % (2 * result.element_size()) == 0
