"""On a Hopper GPU: gradients_kernel against the Triton kernels, bit by bit, run to run, and the time of both.

    PYTHONPATH=src python tests/chunk_gradients_on_a_gpu.py            (about a minute)
"""
import itertools
import sys

import torch
from isobit.frame.launch import run
from isobit.ops.gated_delta_rule import kernels_hopper as KH, kernels_hopper_gradients as KG
from isobit.ops.gated_delta_rule import kernels_triton as KT, kernels_triton_bwd as KB

NAMES = ("dq", "dk", "dv", "dbeta", "dgate", "dlast")


def made(B, T, H, group, normed=True, gated=True, v_first=False, bounds=None, dtype=torch.bfloat16, seed=0):
    gen, HV, K = torch.Generator("cuda").manual_seed(seed), H * group, 128
    r = lambda *s: torch.randn(*s, generator=gen, device="cuda")
    q, k = (r(B, T, H, K) if normed else torch.nn.functional.normalize(r(B, T, H, K), dim=-1) for _ in range(2))
    args = dict(q=q.to(dtype), k=k.to(dtype), v=r(B, T, HV, K).to(dtype), do=r(B, T, HV, K).to(dtype))
    args["g"] = torch.nn.functional.logsigmoid(r(B, T, HV)) / 4 if gated else None
    args["beta"] = r(B, T, HV).sigmoid()
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cuda")
    kn = KT.l2norm(args["k"]) if normed else args["k"]
    g2 = KT.gates(args["g"], cu, run) if gated else None
    _, _, T_b = KH.prepare(kn, args["v"], args["beta"], g2, cu, True)
    S = B if cu is None else len(bounds) - 1
    return args | dict(inverse=T_b, cu_seqlens=cu, scale=K**-0.5, state_v_first=v_first, initial_state=None,
                       dfinal_state=r(S, HV, K, K) if seed % 2 else None, use_qk_l2norm_in_kernel=normed,
                       want_initial_state=False, **{f"want_{n}": True for n in ("q", "k", "v", "g", "beta")})


def inputs_of(args):
    kept = []
    def inside(*given):
        kept.append(given)
        return KB.gradients(*given)
    KH.gated_delta_rule_bwd(inside=inside, **args)
    return kept[0]


def timed(fn, n=20):
    fn(); torch.cuda.synchronize()
    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
    a.record()
    for _ in range(n):
        fn()
    b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) / n * 1e3


def compare(label, args, repeats=5):
    given = inputs_of(args)
    cu = args["cu_seqlens"]
    right = KB.gradients(*given)
    bad = {}
    for _ in range(repeats):
        found = KH.gradients(*given)
        for n, a, b in zip(NAMES, found, right):
            if a is None:
                continue
            if n == "dlast" and cu is not None:  # tiles without a chunk are not written
                ends = cu.tolist(); used = []
                for s, (x, y) in enumerate(zip(ends, ends[1:])):
                    used += [x // 64 + s + c for c in range(-(-(y - x) // 64))]
                a, b = a[used], b[used]
            if cu is not None and n != "dlast":  # nor are rows of no sequence
                end = int(cu[-1])
                a, b = (a[:, :end], b[:, :end])
            wrong = int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())
            if wrong:
                bad[n] = max(bad.get(n, 0), wrong)
    print(f"{label:60} {'equal' if not bad else 'DIFFER ' + str(bad)}", flush=True)
    return given


def times():
    for B, T, H, group in ((4, 8192, 32, 1), (1, 8192, 16, 1), (1, 64, 1, 1), (1, 8192, 16, 2), (1, 8192, 2, 16)):
        given = compare(f"B={B} T={T} H={H} group={group}", made(B, T, H, group), repeats=20)
        t, h = timed(lambda: KB.gradients(*given)), timed(lambda: KH.gradients(*given))
        tokens = B * T * H * group
        moved = tokens * 2 * (5 * 128 + 64) + tokens // group * 2 * 128 * 6 + tokens // 64 * 2 * 128 * 128 * 2
        print(f"    triton {t:8.1f} us   one kernel {h:8.1f} us   {moved / h / 1e6:.2f} TB/s", flush=True)


def bits():
    for normed, gated, v_first, group in itertools.product((True, False), (True, False), (False, True), (1, 2)):
        compare(f"dense normed={normed} gated={gated} v_first={v_first} group={group}",
                made(2, 1000, 4, group, normed, gated, v_first, seed=1))
    for group, dtype in itertools.product((1, 2), (torch.bfloat16, torch.float16)):
        compare(f"packed group={group} {dtype}", made(1, 3000, 8, group, bounds=[0, 3, 3, 70, 134, 1000, 1063, 2999, 3000], dtype=dtype))


if __name__ == "__main__":
    times()
    if "times" not in sys.argv[1:]:
        bits()
