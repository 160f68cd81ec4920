"""Calls of `rms_norm` whose kernels are held to the model, in Triton's interpreter: prints what differs."""

import json
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import isobit
from isobit.frame import launch
from isobit.ops.rms_norm import kernels_triton, kernels_triton_bwd
from isobit.spec import inputs as alter

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

#: (shape, dtype, dtype of the weight, layout, options): every kernel and branch, several numbers of steps,
#: tiles of several rows and of one, whole chunks and not.
CALLS: dict[str, tuple[tuple[int, ...], torch.dtype, torch.dtype, str, dict[str, Any]]] = {
    "one number": ((3, 1), F32, F32, "dense", {}),
    "tiles of rows": ((35, 100), BF16, BF16, "dense", {"cast": "after", "offset": 1.0}),
    "tiles of rows, apart": ((35, 64), BF16, F32, "apart", {"residual": True}),
    "many short rows": ((1100, 3), F32, F32, "dense", {"residual": True}),
    "two dimensions of rows": ((2, 9, 40), F16, F16, "shifted", {"residual": True, "offset": 0.5}),
    "three dimensions of rows": ((2, 3, 5, 16), F32, F32, "dense", {}),
    "a whole chunk": ((5, 1024), F16, F32, "dense", {"residual": True}),
    "chunks": ((18, 2100), BF16, BF16, "offset", {}),
    "chunks, after": ((5, 2100), BF16, F32, "dense", {"residual": True, "cast": "after"}),
    "steps": ((116, 2100), BF16, BF16, "dense", {}),
    "steps, rows in registers": ((100, 5200), BF16, BF16, "offset", {"residual": True}),
    "steps of tiles": ((2000, 100), BF16, F32, "apart", {"residual": True}),
    "many sums": ((132, 1030), F32, F32, "dense", {}),
    "long gradients": ((17, 8200), BF16, F32, "dense", {"residual": True}),
    "long rows": ((2, 16400), F16, F16, "dense", {"offset": 1.0}),
    "long rows and a residual": ((1, 16390), BF16, BF16, "padded", {"residual": True, "cast": "after"}),
}


def step(name: str, backend: str) -> dict[str, Tensor]:
    shape, dtype, weight_dtype, layout, options = CALLS[name]
    gen = torch.Generator().manual_seed(len(name))

    def rows() -> Tensor:
        return alter.laid_out((2 * torch.randn(shape, generator=gen)).to(dtype), layout)

    options = dict(options)
    x, weight = rows().requires_grad_(), torch.randn(shape[-1], generator=gen).to(weight_dtype)
    weight[0] = -0.0  # stays one, unless there is an offset
    weight.requires_grad_()
    residual = rows().requires_grad_() if options.pop("residual", False) else None
    found = isobit.rms_norm(x, weight, residual=residual, backend=backend, **options)  # type: ignore[call-overload]
    results = found if isinstance(found, tuple) else (found,)
    torch.autograd.backward(results, [rows() for _ in results])
    named = dict(zip(("out", "summed"), results, strict=False)) | {"dx": x.grad, "dweight": weight.grad}
    return named if residual is None else named | {"dresidual": residual.grad}


def main() -> None:
    launched: dict[str, list[str]] = {}
    inner, wrong = launch.run, []
    cpu = torch.device("cpu")
    assert kernels_triton_bwd.steps_of(116, 16, 2100, cpu) == 4
    assert kernels_triton_bwd.steps_of(100, 16, 5200, cpu) == 4 and kernels_triton_bwd.PREFETCHED < 5200
    assert kernels_triton_bwd.steps_of(2000, 256, 100, cpu) == 2
    for name in CALLS:
        names = launched.setdefault(name, [])

        def noted(kernel: Any, grid: Any, *args: Any, names: list[str] = names, **options: Any) -> None:
            names.append(kernel.__name__)
            inner(kernel, grid, *args, **options)

        ours = _noting(name, noted)
        for what, theirs in step(name, "model").items():
            bits = torch.int16 if theirs.element_size() == 2 else torch.int32
            differ = int((ours[what].contiguous().view(bits) != theirs.contiguous().view(bits)).sum())
            if differ:
                wrong.append(f"{name}: {differ} of {what}")
    print(json.dumps({"wrong": wrong, "launched": launched}))


def _noting(name: str, noted: Any) -> dict[str, Tensor]:
    """A step on the kernels, every launch noted."""
    with (
        mock.patch.object(kernels_triton.rms_norm, "__defaults__", (noted,)),
        mock.patch.object(kernels_triton_bwd.rms_norm_bwd, "__defaults__", (noted,)),
    ):
        return step(name, "triton")


if __name__ == "__main__":
    main()
