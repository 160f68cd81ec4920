"""Inputs that would expose a wrong `linear_logp`: hidden states with many kinds of logits, rows and parts of
the vocabulary that do not count, other layouts, and calls that must be refused."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.ops.linear_logp.op import kept_bytes, vocabulary
from isobit.spec import inputs as alter
from isobit.spec.inputs import INF, NAN
from isobit.spec.proof import Args, Case, InputOptions, Mutant

IGNORE = -100

#: Workspace for all probabilities of any case here.
FULL = 1 << 37

#: Hidden states as a view with gaps, at every alignment, and starting inside a 16-byte word, with gaps and
#: without; the weight with a larger row stride; d-logits in the narrowest possible slabs.
LAYOUTS = ("shifted", "padded", "offset", "inside", "apart", "narrow slabs", "every other")


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Masked rows hold NaN, and so do padding rows of the weight."""
    dims, chosen = dict(case.dims), case.options
    V, D = dims.pop("V"), dims.pop("D")
    lead, vocab = tuple(dims.values()), chosen.get("vocab", V)
    N = math.prod(lead)
    gen = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(0, vocab, (N,), generator=gen)
    if case.data == "edge":
        hidden, weight = (t.to(device, case.dtype) for t in _edge(ids, D, V, vocab, gen))
    else:  # drawn on the device: benchmark cases have a billion elements
        there = torch.Generator(device).manual_seed(options.seed)
        hidden, weight = (torch.empty(n, D, dtype=case.dtype, device=device) for n in (N, V))
        for t in (hidden, weight):
            t.normal_(generator=there) if case.data == "random" else t.fill_(options.constant)
        weight.mul_(D**-0.5)
    if options.token is not None:
        ids = torch.full((N,), options.token % vocab)
    args: Args = {"bias": _bias(case, V, ids, gen), "mask": None}
    args["temperature"] = chosen.get("temperature", 1.0)
    if chosen.get("each"):  # one temperature per row
        args["temperature"] = 0.5 + 1.5 * torch.rand(N, generator=gen)
    if chosen.get("mask"):
        args["mask"] = alter.mask_of(chosen["mask"], N, ids, IGNORE)
        dead = ~live_rows(ids, args["mask"], IGNORE)
        hidden[dead.to(device)] = NAN
        if chosen.get("each"):
            args["temperature"][dead] = NAN
    weight[vocab:] = NAN
    by_rows = {"token_ids": ids.to(chosen.get("ids", torch.int64)), "hidden": hidden}
    by_rows |= {n: args[n] for n in ("mask", "temperature") if isinstance(args[n], Tensor)}
    args |= {n: t.to(device).reshape(*lead, *t.shape[1:]) for n, t in by_rows.items()}
    args["bias"] = None if args["bias"] is None else args["bias"].to(device)
    names = ("softcap", "logit_scale", "logits_dtype", "workspace_bytes")
    args |= {"weight": weight, "ignore_index": IGNORE}
    args |= {name: chosen.get(name) for name in names} | {"vocab_size": chosen.get("vocab")}
    args["padded_vocab"] = chosen.get("padded")
    return lay_out(args, case.layout)


def _edge(ids: Tensor, D: int, V: int, vocab: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Kinds of rows that plain randn never produces, alternating, with the chosen token at the critical
    place. The first feature has the same weight in every token, so that its value in a hidden state shifts
    all logits."""
    hidden, weight = torch.randn(len(ids), D, generator=gen), torch.randn(V, D, generator=gen) / D**0.5
    if D > 1:
        weight[:, 0] = 1.0
    last = vocab - 1
    toward = weight / weight.square().sum(-1, keepdim=True)  # adding one of these adds 1 to the token's logit
    for i in range(len(ids)):
        kind = i % 8
        if kind == 1:  # most of the probability in the last column: exposes a dropped tail
            hidden[i] += 12.0 * toward[last]
            ids[i] = last
        elif kind in (2, 3):  # exp overflows, or underflows, without max-subtraction
            hidden[i, 0] = 200.0 if kind == 2 else -200.0
        elif kind == 4:  # one logit dominates, so its logp is tiny
            hidden[i] += 40.0 * toward[ids[i]]
        elif kind == 5:  # ties
            hidden[i] = 0.0
            ids[i] = last
        elif kind == 6:
            hidden[i] *= 20.0
        elif kind == 7:
            hidden[i] *= 2.0**-10
    return hidden, weight


def _bias(case: Case, V: int, ids: Tensor, gen: torch.Generator) -> Tensor | None:
    """Includes banned tokens (-inf), unless rounding the logits or a cap would make them finite."""
    wanted = case.options.get("bias")
    if wanted is None:
        return None
    bias = torch.randn(V, generator=gen)
    if not {"logits_dtype", "softcap"} & set(case.options):
        banned = torch.arange(V) % 7 == 3
        banned[ids] = False
        bias[banned] = -INF
    bias[case.options.get("vocab", V) :] = INF
    return bias.to(case.dtype if wanted == "own" else wanted)


def keeps(args: Args) -> bool:
    """Whether all probabilities fit. Kernels that keep them do not use them for the gradient of the entropy.
    So the entropy is detached here if they fit."""
    if args["workspace_bytes"] is None:
        return False
    return kept_bytes(args["token_ids"].numel(), vocabulary(args)) <= args["workspace_bytes"]


# Changes that must change nothing


def lay_out(args: Args, layout: str) -> Args:
    """The same values with other strides and alignments and NaN in between, or with another workspace."""
    if layout == "dense":
        return args
    if layout == "narrow slabs":  # kept probabilities need no slabs, and their gradients have other bits
        return args if keeps(args) else args | {"workspace_bytes": 1}
    if layout == "every other":  # tensors with one number per row, with a stride of 2
        return alter.every_other(args)
    return alter.laid_out_some(args, ("weight",) if layout == "apart" else ("hidden",), layout)


def padding(args: Args, rows: int) -> Args:
    """Masked rows of NaN to append; they must change nothing."""
    nan = args["hidden"].new_full((rows, args["hidden"].shape[-1]), NAN)
    return {"hidden": nan, **alter.token_padding(args, rows, IGNORE)}


def maskable(args: Args, rows: int) -> Args:
    """The same rows with ids that would count without a mask."""
    result = padding(args, rows)
    return result | {"token_ids": torch.zeros_like(result["token_ids"])}


def schedules(args: Args) -> dict[str, Args]:
    """Other slab sizes for d-logits. Kept probabilities need no slabs, and have other bits."""
    everything = 2 * args["token_ids"].numel() * vocabulary(args)  # the whole vocabulary in 16 bits
    sizes = () if keeps(args) else (1, everything // 5, everything // 2)
    return {f"workspace_bytes={n}": {"workspace_bytes": n} for n in sizes}


# Changes that must change bits


def rolled_vocabulary(args: Args) -> Args:
    """Every token shifted by one column: the same mathematics, another order of the sums over the
    vocabulary."""
    V = vocabulary(args)

    def rolled(t: Tensor | None) -> Tensor | None:
        return None if t is None else torch.cat([t[:V].roll(1, 0), t[V:]])

    moved = alter.rolled_ids(args["token_ids"], V)
    return args | {"weight": rolled(args["weight"]), "bias": rolled(args["bias"]), "token_ids": moved}


def other_groups_of_features(args: Args) -> Args:
    return args | {name: alter.in_other_groups(args[name], -1) for name in ("hidden", "weight")}


# Calls that must be refused


def _with(what: str, name: str, value: Any) -> Mutant:
    """The call with another value of one argument; a function gets the arguments."""
    return Mutant(what, name, lambda args: args | {name: value(args) if callable(value) else value})


def _no_features(args: Args) -> Args:
    return args | {name: args[name][..., :0] for name in ("hidden", "weight")}


MUTANTS = [
    _with("temperature 0", "temperature", 0.0),
    _with("temperature NaN", "temperature", NAN),
    _with("a negative softcap", "softcap", -1.0),
    _with("an infinite logit_scale", "logit_scale", INF),
    _with("logits in fp64", "logits_dtype", torch.float64),
    _with("no vocabulary", "vocab_size", 0),
    _with("a vocabulary larger than the weight", "vocab_size", lambda a: len(a["weight"]) + 1),
    _with("a padded vocabulary that is too small", "padded_vocab", lambda a: vocabulary(a) // 64 * 64 - 64),
    _with("a padded vocabulary of odd words", "padded_vocab", lambda a: 64 * vocabulary(a) + 8),
    _with("a negative workspace", "workspace_bytes", -1),
    _with("a float mask", "mask", lambda a: torch.ones_like(a["token_ids"], dtype=torch.float32)),
    _with("a mask that is too short", "mask", lambda a: a["token_ids"][1:] > 0),
    _with("an integer weight", "weight", lambda a: a["weight"].int()),
    _with("a weight of another dtype", "weight", lambda a: alter.in_other_dtype(a["weight"])),
    _with("a weight with one dimension", "weight", lambda a: a["weight"][0]),
    _with("a weight without rows", "weight", lambda a: a["weight"][:0]),
    Mutant("no features", "weight", _no_features),
    _with("a short bias", "bias", lambda a: a["weight"][1:, 0].clone()),
    _with("a bias in two dimensions", "bias", lambda a: a["weight"].clone()),
    _with("an integer bias", "bias", lambda a: a["weight"][:, 0].int()),
    _with("a bias of another dtype", "bias", lambda a: alter.in_other_dtype(a["weight"][:, 0])),
    _with("a bias on another device", "bias", lambda a: a["weight"][:, 0].to("meta")),
    _with("temperatures for too few rows", "temperature", lambda a: a["hidden"][1:, 0].float()),
    _with("integer temperatures", "temperature", lambda a: a["token_ids"].clone()),
    _with("an ignore_index that ids cannot hold", "ignore_index", 2**70),
]
