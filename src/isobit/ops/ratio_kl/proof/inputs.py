"""Inputs of `ratio_kl` that would expose a wrong kernel, and the changes that laws make of them.

Options of a case, besides mask, temperature and ids as in `logp`: `ref` is the form of the reference (logits,
unless it is `logp` or `none`), `ref_dtype` the dtype of its logits, and `old=none` omits old_logp. Data may
be `sharp`: log-probabilities near 0, which make the last bits of a sum visible.
"""

import math

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.ops.ratio_kl import reference
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions, Mutant

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
IGNORE, NAN = -100, float("nan")

#: The two tensors of logits; laws about layouts give each its own.
LOGITS = ("policy_logits", "ref_logits")
OF_LOGITS = ("shifted", "padded", "offset")
LAYOUTS = (*OF_LOGITS, "every other")

#: Distances between policies, alternating over rows. A small kl is accurate only if it is not computed as a
#: difference.
APART = (1e-3, 0.3, 2.0)


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Masked rows hold NaN."""
    dims = dict(case.dims)
    V = dims.pop("V")
    lead = tuple(dims.values())
    N = math.prod(lead)
    gen = torch.Generator().manual_seed(options.seed)
    apart = torch.tensor(APART).repeat(N // len(APART) + 1)[:N]
    if case.data == "edge":
        z, ids = alter.edge_rows(N, V, gen)
        ref = z + apart[:, None] * torch.randn(N, V, generator=gen)
        ref[5::7] = z[5::7]  # the same policy: kl is 0
    else:
        ids = torch.randint(0, V, (N,), generator=gen)
        z, ref = (torch.empty(N, V, dtype=case.dtype, device=device) for _ in "zr")
        if case.data == "constant":
            z.fill_(options.constant)
            ref.fill_(options.constant)
        else:  # drawn on the device: benchmark cases have a billion logits
            drawn = torch.Generator(device).manual_seed(options.seed)
            z.normal_(generator=drawn)
            if case.data == "sharp":  # a few likely tokens; the likeliest has logp near 0
                z *= 6
                ids = z.argmax(-1).cpu()
            ref.normal_(generator=drawn).mul_(0.3).add_(z)
    if options.token is not None:
        ids = torch.full((N,), options.token % V)
    ids = ids.to(case.options.get("ids", torch.int64))
    args: Args = {"ignore_index": IGNORE, "temperature": case.options.get("temperature", 1.0)}
    if case.options.get("each"):  # one temperature per row
        args["temperature"] = 0.5 + 1.5 * torch.rand(N, generator=gen)
    wanted = case.options.get("mask")
    args["mask"] = None if wanted is None else alter.mask_of(wanted, N, ids, IGNORE)
    args |= {"policy_logits": z.to(case.dtype), "token_ids": ids}
    args["ref_logits"] = ref.to(case.options.get("ref_dtype", case.dtype))
    args |= _log_probs(case, args, apart, gen)
    args |= {"ref_logits": None} if case.options.get("ref") else {"ref_logp": None}
    args |= {"ref_logp": None, "return_kl": False} if case.options.get("ref") == "none" else {}
    args |= {"old_logp": None} if case.options.get("old") == "none" else {}
    if wanted is not None:
        dead = ~live_rows(ids, args["mask"], IGNORE)
        for t in (t for t in args.values() if isinstance(t, Tensor) and t.is_floating_point()):
            t[dead.to(t.device)] = NAN
    by_rows = {n: t for n, t in args.items() if isinstance(t, Tensor)}
    args |= {n: t.to(device).reshape(*lead, *t.shape[1:]) for n, t in by_rows.items()}
    if case.layout == "every other":
        return lay_out(args, case.layout)
    return alter.laid_out_some(args, LOGITS, case.layout)


def _log_probs(case: Case, args: Args, apart: Tensor, gen: torch.Generator) -> Args:
    """Log-probabilities under the old policy and under the reference: both near those of the policy, in
    fp32."""
    N, V = args["policy_logits"].shape
    if case.data == "edge":
        tokens = {name: args[name] for name in ("mask", "ignore_index", "temperature")}
        exact, ids = args["policy_logits"].to(F64), args["token_ids"]
        near = reference.formula(exact, None, ids, **tokens)[2]
    else:  # approximately, at little cost: the log-sum-exp of V normal numbers, or of a few sharp ones
        z, temperature = args["policy_logits"], args["temperature"]
        ids = args["token_ids"].clamp(min=0).long()[:, None].to(z.device)
        chosen = z.gather(-1, ids)[:, 0].cpu().to(F64)
        lse = 0.5 / temperature**2 + math.log(V)
        near = torch.full((N,), -1.0, dtype=F64) if case.data == "sharp" else chosen / temperature - lse
        apart = apart.clamp(max=0.3)
    names = ("old_logp", "ref_logp")
    return {name: (near + apart * torch.randn(N, generator=gen)).to(F32) for name in names}


# What laws change


def lay_out(args: Args, layout: str) -> Args:
    """The policy's logits in this layout, the reference's in the next one; or what has one number per row."""
    if layout == "every other":
        return alter.every_other(args, "old_logp", "ref_logp")
    other = OF_LOGITS[(OF_LOGITS.index(layout) + 1) % len(OF_LOGITS)]
    laid = alter.laid_out_some(args, LOGITS[:1], layout)
    return alter.laid_out_some(laid, LOGITS[1:], other)


def rolled(args: Args) -> Args:
    """The vocabulary rolled by one column: the same mathematics, another order of the sums."""
    ids = alter.rolled_ids(args["token_ids"], args["policy_logits"].shape[-1])
    given = [name for name in LOGITS if args[name] is not None]
    return args | {name: args[name].roll(1, -1) for name in given} | {"token_ids": ids}


def reversed_(args: Args) -> Args:
    """The vocabulary reversed: yet another order."""
    ids, V = args["token_ids"], args["policy_logits"].shape[-1]
    given = [name for name in LOGITS if args[name] is not None]
    ids = torch.where((ids >= 0) & (ids < V), V - 1 - ids, ids)
    return args | {name: args[name].flip(-1) for name in given} | {"token_ids": ids}


def padding(args: Args, rows: int) -> Args:
    """Masked rows of NaN to append; they must change nothing."""
    names = [name for name in (*LOGITS, "old_logp", "ref_logp") if args[name] is not None]
    nan = {name: args[name].new_full((rows, *args[name].shape[1:]), NAN) for name in names}
    return nan | alter.token_padding(args, rows, IGNORE)


def _fp32(args: Args) -> Args:
    """With a policy in fp32: next to one in fp64 other inputs may be fp64 too."""
    return args | {"policy_logits": args["policy_logits"].float(), "old_logp": args["old_logp"].float()}


MUTANTS = [
    Mutant("temperature 0", "temperature", lambda a: a | {"temperature": 0.0}),
    Mutant("temperature NaN", "temperature", lambda a: a | {"temperature": NAN}),
    Mutant("three temperatures", "temperature", lambda a: a | {"temperature": torch.ones(3)}),
    Mutant("float mask", "mask", lambda a: a | {"mask": torch.ones_like(a["token_ids"], dtype=F32)}),
    Mutant("V = 0", "policy_logits", lambda a: a | {name: a[name][..., :0] for name in LOGITS}),
    Mutant("two references", "ref_logp", lambda a: a | {"ref_logp": torch.zeros_like(a["old_logp"])}),
    Mutant("no reference", "ref_logits", lambda a: a | {"ref_logits": None}),
    Mutant("old_logp in bf16", "old_logp", lambda a: a | {"old_logp": a["old_logp"].to(BF16)}),
    Mutant("old_logp in fp64", "old_logp", lambda a: _fp32(a) | {"old_logp": a["old_logp"].to(F64)}),
    Mutant(
        "ref_logp in fp64",
        "ref_logp",
        lambda a: _fp32(a) | {"ref_logits": None, "ref_logp": a["old_logp"].to(F64)},
    ),
]
