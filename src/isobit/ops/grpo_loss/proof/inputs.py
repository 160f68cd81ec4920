"""Inputs of `grpo_loss` that would expose a wrong kernel, and the changes that laws make of them.

Logits, tokens and log-probabilities are those of `ratio_kl`, with its options. In addition: `by` is the
source of advantages (one per sequence, unless it is `tokens`, `samples` or `bounds`), `weights` adds rollout
weights, `reduction`, `normalizer` (a number, or `tensor`) and `clip_high` are as in the op. beta is 0.1, and
0 without a reference. With `far` the first sequence, or group of two, has advantage 0, and ratios that
overflow.
"""

from dataclasses import replace

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.ops.ratio_kl import reference
from isobit.ops.ratio_kl.proof import inputs as rows
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions, Mutant

F32, NAN = torch.float32, float("nan")

LAYOUTS = rows.LAYOUTS

#: Arguments with one number per token.
_OF_TOKENS = ("token_ids", "mask", "old_logp", "ref_logp", "advantages", "rollout_weights")

_OWN = ("by", "weights", "reduction", "normalizer", "far", "clip_high")

#: A log-probability of the old policy with which any ratio overflows, in fp64 too.
FAR = -1000.0


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Masked tokens hold NaN; an edge case has a sequence with only such
    tokens."""
    B, T = case.dims["B"], case.dims["T"]
    theirs = {name: value for name, value in case.options.items() if name not in _OWN}
    args = rows.make(replace(case, options=theirs), device, options)
    args["beta"] = 0.1 if args.pop("return_kl", True) else 0.0
    args |= {"clip_low": 0.2, "clip_high": case.options.get("clip_high", 0.28), "eps": 1e-6}
    if args["mask"] is not None and case.data == "edge":
        args["mask"][1:2] = 0
    gen = torch.Generator().manual_seed(options.seed + 1)
    each = torch.randn(B, generator=gen)
    args |= {"rewards": None, "advantages": None, "rollout_weights": None}
    args |= {"samples_per_prompt": None, "group_boundaries": None, "normalizer": None}
    by = case.options.get("by", "sequences")
    if by == "sequences":
        if case.data == "edge" and T > 0:
            each = each.abs() * _towards_the_clip(args).cpu()
        args["advantages"] = each.to(device)[:, None].expand(B, T)
    elif by == "tokens":
        args["advantages"] = torch.randn(B, T, generator=gen).to(device)
    else:
        args["rewards"] = (100 + each).to(device)
        args |= groups_of(by, B, device)
    if case.options.get("far"):
        _overflow(args)
    if case.options.get("weights"):
        args["rollout_weights"] = (2 * torch.rand(B, T, generator=gen)).to(device)
    args["reduction"] = case.options.get("reduction", "token_mean")
    normalizer = case.options.get("normalizer")
    args["normalizer"] = torch.tensor(7, device=device) if normalizer == "tensor" else normalizer
    if case.options.get("mask") is not None:
        dead = ~live_rows(args["token_ids"], args["mask"], args["ignore_index"])
        for name, t in args.items():
            if isinstance(t, Tensor) and t.is_floating_point() and t.shape[:2] == dead.shape:
                args[name] = t.contiguous() if name == "advantages" else t
                args[name][dead] = NAN
    return args


def _overflow(args: Args) -> None:
    """In place. A group whose rewards are equal has advantages of 0, and so has a group of one."""
    first = 2 if args["samples_per_prompt"] == 2 else 1
    if args["rewards"] is not None:
        args["rewards"][:first] = args["rewards"][0]
    else:
        args["advantages"] = args["advantages"].clone()
        args["advantages"][:first] = 0.0
    if args["old_logp"] is not None:
        args["old_logp"][:first] = FAR


def _towards_the_clip(args: Args) -> Tensor:
    """A sign per sequence: alternately one with which its farthest ratio is not clipped, and one with which
    it is."""
    names = ("old_logp", "mask", "ignore_index", "temperature")
    exact = {name: args[name] for name in names}
    ratio = reference.formula(args["policy_logits"].double(), None, args["token_ids"], **exact)[0]
    far = ratio.log().gather(1, ratio.log().abs().argmax(1, keepdim=True))[:, 0]
    turns = torch.where(torch.arange(len(far), device=far.device) % 2 == 1, 1.0, -1.0)
    return torch.where(far < 0, -turns, turns).float()


def groups_of(by: str, B: int, device: torch.device) -> Args:
    """Two samples per prompt, or one prompt if their number is odd; or groups of one, of two, and of the
    rest."""
    if by == "samples":
        return {"samples_per_prompt": max(B, 1) if B % 2 else 2, "group_boundaries": None}
    bounds = sorted({min(n, B) for n in (0, 1, 3, B)})
    return {"samples_per_prompt": None, "group_boundaries": torch.tensor(bounds, device=device)}


# What laws change


def lay_out(args: Args, layout: str) -> Args:
    """Logits in this layout; in one of the layouts the arguments per token are transposed."""
    laid = rows.lay_out(args, layout)
    if layout == "every other":
        return alter.laid_out_some(laid, ("advantages", "rollout_weights", "rewards"), "strided")
    return alter.laid_out_some(laid, _OF_TOKENS if layout == "padded" else (), "transposed")


def padding(args: Args, sequences: int) -> Args:
    """Masked sequences of NaN to append; they must change nothing."""
    result = {}
    for name in (*rows.LOGITS, *_OF_TOKENS, "rewards", "temperature"):
        given = args[name]
        if isinstance(given, Tensor):
            fill = NAN if given.is_floating_point() else args["ignore_index"] if name == "token_ids" else 0
            result[name] = given.new_full((sequences, *given.shape[1:]), fill)
    return result


def _with(**changes: object) -> Mutant:
    name, value = next(iter(changes.items()))
    return Mutant(f"{name} = {value}", name, lambda args: args | changes)


MUTANTS = [
    _with(beta=-0.1),
    _with(beta=NAN),
    _with(clip_low=-0.2),
    _with(clip_high=NAN),
    _with(reduction="mean"),
    _with(normalizer=0.0),
    _with(normalizer=float("inf")),
    _with(eps=0.0),
    _with(samples_per_prompt=2),  # in addition to advantages
    _with(temperature=0.0),
    Mutant("no reference", "ref_logits", lambda a: a | {"ref_logits": None}),
    Mutant("two references", "ref_logp", lambda a: a | {"ref_logp": torch.zeros_like(a["old_logp"])}),
    Mutant("two of rewards and advantages", "advantages", lambda a: a | {"rewards": a["old_logp"][:, 0]}),
    Mutant("none of rewards and advantages", "rewards", lambda a: a | {"advantages": None}),
    Mutant("rewards without groups", "samples_per_prompt", lambda a: _rewards(a)),
    Mutant(
        "rewards with two kinds of groups",
        "group_boundaries",
        lambda a: _rewards(a, samples_per_prompt=1, group_boundaries=[0, len(a["token_ids"])]),
    ),
    Mutant("groups that do not divide", "samples_per_prompt", lambda a: _rewards(a, samples_per_prompt=3)),
    Mutant("groups of none", "samples_per_prompt", lambda a: _rewards(a, samples_per_prompt=0)),
    Mutant("boundaries of another batch", "group_boundaries", lambda a: _rewards(a, group_boundaries=[0, 3])),
    Mutant("no boundaries", "group_boundaries", lambda a: _rewards(a, group_boundaries=[])),
    Mutant("half a boundary", "group_boundaries", lambda a: _rewards(a, group_boundaries=[0, 1.5, 4])),
    Mutant("float boundaries", "group_boundaries", lambda a: _rewards(a, group_boundaries=a["old_logp"][0])),
    Mutant("a normalizer a token", "normalizer", lambda a: a | {"normalizer": a["old_logp"]}),
    Mutant("a float mask", "mask", lambda a: a | {"mask": torch.ones_like(a["token_ids"], dtype=F32)}),
    Mutant("one step of advantages", "advantages", lambda a: a | {"advantages": a["old_logp"][:, :1]}),
    Mutant("V = 0", "policy_logits", lambda a: a | {name: a[name][..., :0] for name in rows.LOGITS}),
]


def _rewards(args: Args, **groups: object) -> Args:
    return args | {"advantages": None, "rewards": args["old_logp"][:, 0].clone()} | groups
