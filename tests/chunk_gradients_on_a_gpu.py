"""On a Hopper GPU: the one kernel of a chunk's gradients against those of Triton, in bits and in time.

    PYTHONPATH=src python tests/chunk_gradients_on_a_gpu.py [times] [bits]

Without an argument both: three minutes, most of which Triton compiles. Exits with 1 if a bit differs. `isobit
check` compares small calls with the model; here are large ones, each repeated.
"""

import sys
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from isobit.frame.launch import run
from isobit.ops.gated_delta_rule import kernels_hopper, kernels_triton, kernels_triton_bwd

K = 128
NAMES = ("dq", "dk", "dv", "dbeta", "dgate", "dlast")

#: With an empty sequence, chunks of all kinds of lengths, and a row of no sequence at the end.
PACKED = [0, 3, 3, 70, 134, 1000, 1063, 2999, 2999]


def inputs(
    B: int, T: int, H: int, group: int, mode: str = "gn", v_first: bool = False,
    bounds: list[int] | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:  # fmt: skip
    """What the backward gives the kernels inside a chunk. g: gates; n: rows are normalized."""
    gen, HV, normed = torch.Generator("cuda").manual_seed(T), H * group, "n" in mode

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    q, k = (drawn(B, T, H, K) if normed else normalize(drawn(B, T, H, K), dim=-1) for _ in range(2))
    v, do = (drawn(B, T, HV, K).to(dtype) for _ in range(2))
    q, k, beta = q.to(dtype), k.to(dtype), drawn(B, T, HV).sigmoid()
    g = logsigmoid(drawn(B, T, HV)) / 4 if "g" in mode else None
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
    own_k = kernels_triton.l2norm(k) if normed else k
    g2 = None if g is None else kernels_triton.gates(g, cu, run)
    *_, inverse = kernels_hopper.prepare(own_k, v, beta, g2, cu, True)
    kept: list[tuple[Any, ...]] = []

    def inside(*given: Any) -> tuple[Any, ...]:
        kept.append(given)
        return kernels_triton_bwd.gradients(*given)

    kernels_hopper.gated_delta_rule_bwd(
        inside=inside, q=q, k=k, v=v, g=g, beta=beta, inverse=inverse, do=do, dfinal_state=None,
        initial_state=None, cu_seqlens=cu, scale=K**-0.5, state_v_first=v_first,
        use_qk_l2norm_in_kernel=normed, want_initial_state=False,
        **{f"want_{n}": True for n in ("q", "k", "v", "g", "beta")},
    )  # fmt: skip
    return kept[0]


def wrong(given: tuple[Any, ...], bounds: list[int] | None, repeats: int) -> list[str]:
    """The results that differ in a bit, in any of so many calls."""
    right = kernels_triton_bwd.gradients(*given)
    found: list[str] = []
    for _ in range(repeats):
        for name, own, other in zip(NAMES, kernels_hopper.gradients(*given), right, strict=True):
            if own is None:
                continue
            if bounds is not None:  # what belongs to no sequence is not written
                tiles = [
                    first // 64 + n + c
                    for n, (first, end) in enumerate(pairwise(bounds))
                    for c in range(-(-(end - first) // 64))
                ]
                here = (tiles,) if name == "dlast" else (slice(None), slice(0, bounds[-1]))
                own, other = own[here], other[here]
            if not torch.equal(own.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
                found.append(name)
    return sorted(set(found))


def us(call: Callable[[], object], calls: int = 20) -> float:
    call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / calls * 1e3


def bits() -> bool:
    cases: list[dict[str, Any]] = [
        {"B": 2, "T": 1000, "H": 4, "group": group, "mode": mode, "v_first": v_first}
        for group, mode, v_first in product((1, 2), ("gn", "g", "n", ""), (False, True))
    ]
    cases += [
        {"B": 1, "T": 3000, "H": 8, "group": group, "bounds": PACKED, "dtype": dtype}
        for group, dtype in product((1, 2), (torch.bfloat16, torch.float16))
    ]
    bad = False
    for case in cases:
        differ = wrong(inputs(**case), case.get("bounds"), 5)
        bad |= bool(differ)
        print(f"{', '.join(differ) + ' DIFFER' if differ else 'equal':20} {case}", flush=True)
    return bad


def times() -> bool:
    bad = False
    for B, T, H, group in (
        (4, 8192, 32, 1),
        (1, 8192, 16, 1),
        (1, 64, 1, 1),
        (1, 8192, 16, 2),
        (1, 8192, 2, 16),
    ):
        given = inputs(B, T, H, group)
        differ = wrong(given, None, 20)
        bad |= bool(differ)
        triton = us(lambda given=given: kernels_triton_bwd.gradients(*given))  # type: ignore[misc]
        hopper = us(lambda given=given: kernels_hopper.gradients(*given))  # type: ignore[misc]
        what = f"{', '.join(differ)} DIFFER" if differ else "equal"
        print(
            f"{what:20} B={B} T={T} H={H} x {group}: Triton {triton:.0f} us, one kernel {hopper:.0f}",
            flush=True,
        )
    return bad


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["times", "bits"]
    sys.exit(sum({"times": times, "bits": bits}[name]() for name in wanted))
