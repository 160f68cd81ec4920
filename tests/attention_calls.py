"""Calls of the attention kernels in Triton's interpreter, with segments and blocks so small that few keys
cross their borders, held against the numpy model and against each other.

Run as a program under TRITON_INTERPRET=1, with the name of a function here.
"""

import sys
from typing import Any

import torch
from torch import Tensor

import isobit
from isobit.numerics import cpu_steps
from isobit.ops.attention import kernels_triton, kernels_triton_bwd, model
from isobit.ops.attention.proof.bits import cancelling

BF16, F16 = torch.bfloat16, torch.float16
NOTHING = dict.fromkeys(
    ("scale", "window", "softcap", "key_start", "key_end", "cu_seqlens_q", "cu_seqlens_k", "block_table")
)


def made(
    B: int, T: int, S: int, H: int, KV: int, D: int, dtype: torch.dtype = BF16, **given: Any
) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(S)
    q, k, v = (torch.randn(s, generator=gen).to(dtype) for s in ((B, T, H, D), (B, S, KV, D), (B, S, KV, D)))
    return {"q": q, "k": k, "v": v, "causal": True, "return_lse": True, **NOTHING, **given}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(what: str, ours: Any, other: Any) -> None:
    for name, a, b in zip(("out", "lse"), ours, other, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (what, name, int((a != b).sum()))


#: Small segments: borders at 16, 32, 48, ... and at 32, 64, ...
BORDERS: dict[str, dict[str, Any]] = {
    "dense": made(2, 20, 50, 2, 1, 64),
    "window": made(1, 9, 75, 2, 1, 64, window=15),
    "bounds and a cap": made(
        2, 3, 70, 3, 1, 80, F16, softcap=3.0, key_start=ints(5, 40), key_end=ints(70, 41)
    ),
    "a cap of class attn/2": made(1, 3, 70, 2, 1, 64, softcap=3.0, tangent=2),
    "every query sees all": made(1, 5, 40, 2, 2, 64, causal=False),
    "fewer keys than queries": made(1, 7, 40, 1, 1, 64, key_end=ints(3)),
}


def borders() -> None:
    """Prefill and decoding, in several runs of segments, have the bits of the model."""
    for what, args in BORDERS.items():
        wanted = model.attention(segment=32, block=16, **args)
        for split in (False, True):
            same(
                f"{what}, split={split}",
                kernels_triton.attention(segment=32, block=16, split=split, **args),
                wanted,
            )
        kernels_triton.MANY_PROGRAMS = 1  # all segments in one run
        same(f"{what}, one run", kernels_triton.attention(segment=32, block=16, split=True, **args), wanted)
        kernels_triton.MANY_PROGRAMS = 1024
    args = BORDERS["dense"]
    ours = kernels_triton.attention(segment=32, block=16, **args)[1]
    assert ours is not None
    for segment, block in ((64, 16), (32, 32)):  # another order would have been noticed
        other = model.attention(segment=segment, block=block, **args)[1]
        assert other is not None and not torch.equal(ours, other), (segment, block)


def gradients() -> None:
    """The backward has the bits of the model, on sums that nearly cancel, so that another order would be
    visible."""
    cases = {
        "more queries than a tile has": made(1, 70, 70, 2, 1, 64),
        "queries behind other keys": made(1, 20, 150, 2, 1, 64, window=140),
        "bounds and a cap": made(
            2, 30, 40, 2, 1, 80, F16, softcap=3.0, key_start=ints(5, 9), key_end=ints(40, 37)
        ),
        "a cap of class attn/2": made(1, 30, 40, 2, 1, 64, softcap=3.0, tangent=2),
        "packed": made(1, 40, 40, 2, 1, 64, cu_seqlens_q=ints(0, 3, 3, 31, 40)),
        "every query sees all": made(1, 20, 9, 2, 1, 64, causal=False),
    }
    shown: set[str] = set()
    for what, args in cases.items():
        args["k"][..., 0] = (
            4.0  # the gradients of a query's scores add up to 0, and so does this feature of dq
        )
        out, lse = model.attention(**args)
        assert lse is not None
        gen = torch.Generator().manual_seed(1)
        given = [torch.randn(t.shape, generator=gen).to(t.dtype) for t in (out, lse)]
        args, (dout, dlse) = cancelling(args, given)
        out, lse = model.attention(**args)
        call = args | {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        call |= dict.fromkeys(("want_q", "want_k", "want_v"), True)
        ours, wanted = kernels_triton_bwd.attention_bwd(**call), model.attention_bwd(**call)
        for name, a, b in zip("qkv", ours, wanted, strict=True):
            assert a is not None and b is not None
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), (what, name, int((a != b).sum()))
        cpu_steps.GROUP = 8  # the control: other steps
        other = model.attention_bwd(**call)
        cpu_steps.GROUP = 16
        shown |= {name for name, a, b in zip("qkv", wanted, other, strict=True) if bool((a != b).any())}
    assert shown == set("qkv"), shown


def any_strides() -> None:
    """What the forward left is read in whatever order its numbers lie."""
    args = made(2, 5, 5, 2, 1, 64)
    out, lse = model.attention(**args)
    assert lse is not None
    call = {n: v for n, v in args.items() if n != "return_lse"} | {"out": out, "lse": lse, "dlse": None}
    call |= {"dout": torch.randn_like(out), **dict.fromkeys(("want_q", "want_k", "want_v"), True)}
    wanted = kernels_triton_bwd.attention_bwd(**call)
    for name in ("out", "lse", "dout"):
        moved = call[name].transpose(0, 1).contiguous().transpose(0, 1)
        assert not moved.is_contiguous()
        for a, b in zip(kernels_triton_bwd.attention_bwd(**call | {name: moved}), wanted, strict=True):
            assert a is not None and b is not None and torch.equal(a, b), name


def tiles() -> None:
    """Which rows share a tile changes nothing: one query at a time is all at once."""
    args = made(1, 40, 40, 3, 1, 64)
    out, lse = kernels_triton.attention(segment=32, block=16, **args)
    assert lse is not None
    for t in (0, 15, 16, 31, 32, 39):
        one = args | {"q": args["q"][:, t : t + 1], "k": args["k"][:, : t + 1], "v": args["v"][:, : t + 1]}
        alone = kernels_triton.attention(segment=32, block=16, **one)
        same(f"query {t}", alone, (out[:, t : t + 1], lse[..., t : t + 1].contiguous()))


def any_integers() -> None:
    """Unchecked integers cause no access outside the tensors, and affect no other sequence."""
    values = (-(2**31), 2**31 - 1, 7, -5)
    wild = {"key_start": ints(*values), "key_end": ints(*reversed(values))}
    args = made(4, 2, 40, 2, 1, 64, **wild)
    args["key_start"][0], args["key_end"][0] = 3, 30
    good = made(4, 2, 40, 2, 1, 64)
    alone = {n: good[n][:1] for n in ("q", "k", "v")} | {"key_start": ints(3), "key_end": ints(30)}
    assert torch.equal(call(args)[:1], call(good | alone))
    paged = made(2, 2, 32, 2, 1, 64) | {"key_end": ints(64, 2**31 - 1)}
    call(paged | {"block_table": torch.tensor([[-1, 2**31 - 1], [2**30, -(2**31)]], dtype=torch.int32)})
    for cuts in (ints(*values), ints(5, 4, 3, 2, 1), torch.tensor(values, dtype=torch.int64) * (1 << 20)):
        call(made(1, 20, 20, 2, 1, 64, cu_seqlens_q=cuts))
        call(made(1, 5, 20, 2, 1, 64, cu_seqlens_q=cuts, cu_seqlens_k=cuts.flip(0)))


def call(args: dict[str, Any]) -> Tensor:
    """Forward and backward, without validating the integers."""
    given = {n: v for n, v in args.items() if n != "return_lse"}
    if args["block_table"] is not None:
        return isobit.attention(**given, backend="triton", validate=False)
    leaves = {n: given[n].detach().requires_grad_() for n in ("q", "k", "v")}
    out = isobit.attention(**given | leaves, backend="triton", validate=False)
    torch.autograd.grad(out.sum(), list(leaves.values()))
    return out.detach()


def far_apart() -> None:
    """Sequences, or keys, more than 2^31 elements apart, with strides that fit in 32 bits. Memory is
    committed only where it is touched."""
    args = made(3, 2, 12, 2, 1, 64)
    for far, axis in ((2**30 + 64, 0), (2**28, 1)):
        moved = {}
        for name in ("q", "k", "v") if axis == 0 else ("k", "v"):
            t = args[name][: 1 if axis else None]
            strides = [*t.stride()[:axis], far, *t.stride()[axis + 1 :]]
            memory = torch.empty((t.shape[axis] - 1) * far + t.numel(), dtype=t.dtype)
            moved[name] = memory.as_strided(t.shape, strides).copy_(t)
        near = args | {n: args[n][: 1 if axis else None] for n in ("q", "k", "v")}
        same(f"axis {axis}", kernels_triton.attention(**near | moved), kernels_triton.attention(**near))


def not_a_number() -> None:
    """NaN in a query, a key or a value is not lost on the way, and stays in its head and sequence."""
    for name in ("q", "k", "v"):
        args = made(2, 2, 40, 2, 2, 64)
        clean = kernels_triton.attention(segment=32, block=16, **args)[0]
        args[name] = args[name].clone()
        args[name][1, 1, 1] = float("nan")
        for split in (False, True):
            out = kernels_triton.attention(segment=32, block=16, split=split, **args)[0]
            assert bool(out[1, 1, 1].isnan().all()), (name, split)
            assert torch.equal(out[0], clean[0]) and torch.equal(out[1, :, 0], clean[1, :, 0]), (
                name,
                split,
            )


if __name__ == "__main__":
    globals()[sys.argv[1]]()
