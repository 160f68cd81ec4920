"""Notices on a CPU what would make the host wait for a GPU."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: What reads a tensor on the host, and what has a size that only values tell.
WAITING = frozenset({
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "lift_fresh", "masked_select",
    "nonzero", "unique_consecutive", "unique_dim",
})  # fmt: skip


class NoWaiting(TorchDispatchMode):
    """An error for every operation that reads values of a tensor, or copies numbers of the host to the
    device. Tensors that are created without a device are on no device here, so that a copy of one is
    refused by PyTorch. `outside` excludes a function: an op, whose backend for a CPU reads what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = False

    def __enter__(self) -> "NoWaiting":
        self.default = torch.device("meta")
        self.default.__enter__()
        self.read = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}
        for name, method in self.read.items():
            setattr(torch.Tensor, name, self.refused(name, method))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self.read.items():
            setattr(torch.Tensor, name, method)
        self.default.__exit__(*error)

    def refused(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **options: Any) -> Any:
            assert self.silent, f"the host waits: {name}"
            return method(*args, **options)

        return run

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            before, self.silent = self.silent, True
            try:
                with torch.device("cpu"):
                    return function(*args, **options)
            finally:
                self.silent = before

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_values = func is torch.ops.aten.repeat_interleave.Tensor or (
            name in ("index", "index_put", "index_put_")
            and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        )
        assert self.silent or not (name in WAITING or by_values), f"the host waits: {func}"
        return func(*args, **(kwargs or {}))
