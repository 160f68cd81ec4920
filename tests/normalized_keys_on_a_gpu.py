"""On a Hopper GPU: rows of k that are divided by their norm where their system is solved, and rows of q where
outputs are computed, next to kernels of their own, in bits and in time.

    PYTHONPATH=src python tests/normalized_keys_on_a_gpu.py

A minute. Exits with 1 if a bit differs.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from isobit.frame.launch import run
from isobit.ops.gated_delta_rule import kernels_triton
from isobit.ops.gated_delta_rule.kernels_hopper import gated_delta_rule, prepare
from isobit.ops.gated_delta_rule.kernels_hopper_outputs import outputs

INTEGERS = {2: torch.int16, 4: torch.int32}


def us(call: Callable[[], object], calls: int = 20) -> float:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / calls * 1e3


def same(x: Tensor, y: Tensor) -> bool:
    integer = INTEGERS[x.element_size()]
    return torch.equal(x.view(integer), y.view(integer))


def compared(
    what: str, names: tuple[str, ...], end: int, together: Callable[[], Any], apart: Callable[[], Any],
    repeats: int = 20,
) -> bool:  # fmt: skip
    """Prints both times. Whether a bit differs: of the first `end` rows, and of whole final states."""
    right, differ = apart(), set()
    for _ in range(repeats):
        for name, own, other in zip(names, together(), right, strict=True):
            if name != "final":
                own, other = own[:, :end], other[:, :end]
            if not same(own, other):
                differ.add(name)
    found = f"{', '.join(sorted(differ))} DIFFER" if differ else "equal"
    print(f"{found:10} {what}: apart {us(apart):.1f} us, together {us(together):.1f}", flush=True)
    return bool(differ)


def parts(
    B: int, T: int, H: int, HV: int, K: int, bounds: list[int] | None, dtype: torch.dtype, v_first: bool
) -> bool:
    """The kernels that divide k and q, each by itself."""
    gen = torch.Generator("cuda").manual_seed(T)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = ((drawn(B, T, H, K) * torch.exp2(2 * drawn(B, T, H, 1))).to(dtype) for _ in range(2))
    v, beta = drawn(B, T, HV, 128).to(dtype), drawn(B, T, HV).sigmoid()
    q[:, 5] = 0.0
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
    g2, end = kernels_triton.gates(logsigmoid(drawn(B, T, HV)) / 4, cu, run), (bounds or [T])[-1]
    sequences = B if bounds is None else len(bounds) - 1
    state = drawn(sequences, HV, *((128, K) if v_first else (K, 128)))
    what = f"B={B} T={T} H={H} HV={HV} K={K} {str(dtype)[6:]}"

    rest = (v, beta, g2, cu, True)
    bad = compared(
        f"k {what}", ("k", "u", "w", "T"), end,
        lambda: prepare(k, *rest, run, True), lambda: prepare(kernels_triton.l2norm(k), *rest),
    )  # fmt: skip
    own_k, u, w, _ = prepare(k, *rest, run, True)
    more = (own_k, w, u, g2, state, cu, K**-0.5, v_first, True, run)
    own_q = kernels_triton.l2norm(q)
    bad |= compared(
        f"q {what}", ("o", "final"), end,
        lambda: outputs(q, *more, True), lambda: outputs(kernels_triton.l2norm(q), *more),
    )  # fmt: skip
    print(f"{'':10} q {what}: without a norm {us(lambda: outputs(own_q, *more)):.1f} us", flush=True)
    return bad


def whole(B: int, T: int, H: int) -> bool:
    """The forward, and how long it takes without norms."""
    gen = torch.Generator("cuda").manual_seed(T)
    q, k, v = (torch.randn(B, T, H, 128, generator=gen, device="cuda").bfloat16() for _ in range(3))
    g, beta = (torch.randn(B, T, H, generator=gen, device="cuda") for _ in range(2))
    args: dict[str, Any] = {
        "v": v, "g": logsigmoid(g) / 4, "beta": beta.sigmoid(), "initial_state": None, "cu_seqlens": None,
        "scale": 128**-0.5, "state_v_first": False, "output_final_state": True, "return_inverse": True,
    }  # fmt: skip

    def forward(q: Tensor, k: Tensor, normed: bool) -> Any:
        return gated_delta_rule(q=q, k=k, use_qk_l2norm_in_kernel=normed, **args)

    own_q, own_k = kernels_triton.l2norm(q), kernels_triton.l2norm(k)
    what = f"forward B={B} T={T} H={H}"
    bad = compared(
        what, ("o", "final", "T"), T,
        lambda: forward(q, k, True),
        lambda: forward(kernels_triton.l2norm(q), kernels_triton.l2norm(k), False),
    )  # fmt: skip
    print(f"{'':10} {what}: without norms {us(lambda: forward(own_q, own_k, False)):.1f} us", flush=True)
    return bad


def main() -> int:
    bf16, fp16, bounds = torch.bfloat16, torch.float16, [0, 3, 3, 70, 134, 1000, 1063, 2999, 2999]
    bad = False
    for B, T, H, HV, K, packed, dtype, v_first in (
        (4, 8192, 32, 32, 128, None, bf16, False),
        (1, 8192, 16, 16, 128, None, bf16, False),
        (1, 4096, 16, 32, 128, None, bf16, True),
        (1, 4096, 16, 32, 128, None, fp16, False),
        (2, 1000, 4, 8, 64, None, bf16, False),
        (2, 1000, 4, 8, 64, None, fp16, True),
        (1, 3000, 8, 16, 128, bounds, bf16, False),
        (1, 3000, 8, 16, 128, bounds, fp16, True),
    ):
        bad |= parts(B, T, H, HV, K, packed, dtype, v_first)
    return int(bad | whole(4, 8192, 32))


if __name__ == "__main__":
    sys.exit(main())
