"""Classes with eight shards of the vocabulary: their cases, their exact bits, and ranks that share them.

The controls of the ranks make the same sums in the ways that are usual elsewhere: dhidden one rank after the
other, as a ring does; a log-sum-exp of the ranks' own, as `loss_parallel` of PyTorch has it; and shards of
another width. All must have other bits.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.kernels.host import lse_model
from isobit.kernels.host.vocab_shards import SHARDS, padded
from isobit.ops.attention.proof.exact import arithmetic
from isobit.ops.linear_logp import model_shards
from isobit.ops.linear_logp.op import backward, forward, linear_logp, vocabulary
from isobit.ops.linear_logp.proof import inputs
from isobit.ranks import Group
from isobit.spec.proof import Args, Case, Control, Sample, Shards
from isobit.spec.trial import Trial, cloned

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MB = 1 << 20

BACKENDS = ("hopper-8x4", "triton-8x4", "model-8x4")

# Cases

_SMALL = [
    Case({"N": 32, "D": 48, "V": 272}, BF16),
    Case({"N": 20, "D": 24, "V": 520}, BF16, layout="every other",
         options={"mask": torch.bool, "bias": "own", "temperature": 0.7, "padded": 640}),
    Case({"N": 9, "D": 8, "V": 1}, F16, options={"bias": "own"}),
    Case({"N": 0, "D": 8, "V": 7}, BF16),
    Case({"B": 2, "T": 9, "D": 72, "V": 2300}, F16, layout="shifted",
         options={"each": True, "ids": torch.int32, "vocab": 2250, "padded": 2304}),
    Case({"N": 17, "D": 16, "V": 704}, BF16, layout="apart",
         options={"workspace_bytes": 1, "logit_scale": 0.5, "logits_dtype": BF16, "mask": torch.int32}),
]  # fmt: skip

#: What only the portable kernels take.
_PORTABLE = [
    Case({"N": 17, "D": 16, "V": 90}, F32, layout="padded", options={"softcap": 3.0, "logit_scale": 1.5}),
]


def _heavy(N: int, D: int, V: int, dtype: torch.dtype, data: str = "random", **options: Any) -> Case:
    return Case({"N": N, "D": D, "V": V}, dtype, data, options=options, heavy=True, gpu_gb=16)


_HEAVY = [
    _heavy(80, 4096, 1000, BF16, "edge", bias="own", temperature=0.7),
    _heavy(208, 512, 50257, BF16, logits_dtype=BF16, bias="own"),
    _heavy(1, 896, 151936, BF16, padded=152064),
]
_BITS = [
    Case({"N": 70, "D": 40, "V": 1000}, F16, "random", options={"bias": "own"}),
    _heavy(530, 896, 151936, F16, temperature=0.7, mask=torch.bool),
]
_AGREE = [
    Case({"N": 120, "D": 24, "V": 300}, BF16, options={"bias": "own", "padded": 384}),
    _heavy(300, 512, 50257, BF16, temperature=0.7),
]

#: A vocabulary whose shards end inside a tile, one that has shards without tokens, and larger ones.
CASES = [
    Case({"N": 90, "D": 40, "V": 2300}, BF16, "random",
         options={"bias": "own", "mask": torch.bool, "each": True, "ids": torch.int32, "vocab": 2250}),
    Case({"N": 50, "D": 24, "V": 500}, F16, "random",
         options={"padded": 640, "temperature": 0.7, "logit_scale": 0.5, "logits_dtype": F16,
                  "workspace_bytes": 1}),
    _heavy(530, 1024, 50257, BF16, bias="own", mask=torch.bool),
    _heavy(128, 2048, 151936, F16, padded=152064),
]  # fmt: skip
_PORTABLE_RANKS = [
    Case({"N": 40, "D": 16, "V": 500}, F32, "random", options={"softcap": 3.0, "logit_scale": 1.5}),
]


def wider(args: Args) -> Args:
    """Shards of another width: another order of the same sums."""
    P = args["padded_vocab"] or padded(vocabulary(args))
    return args | {"padded_vocab": P + P // 8 // 64 * 64 + 64}


CONTROLS = [
    Control("the vocabulary rolled by one column", inputs.rolled_vocabulary),
    Control("another order of the groups of 16 features", inputs.other_groups_of_features),
    Control("the vocabulary rolled, in dhidden", inputs.rolled_vocabulary, lambda cotangents: cotangents),
    Control("shards of another width", wider),
    Control("shards of another width, in dhidden", wider, lambda cotangents: cotangents),
]


def differs(memory: Callable[[Case, str, str], int]) -> dict[str, dict[str, Any]]:
    """The fields of the proof that are different in these classes."""
    fields = {
        "cases": _SMALL + _HEAVY, "bit_cases": _BITS, "agree_cases": _AGREE, "controls": CONTROLS,
        "memory": partial(_memory, memory), "also": None, "batch_sizes": (1, 7, 64, 65),
        "memory_cases": [Case({"N": 64, "D": 64, "V": 300}, BF16, data="random"),
                         _heavy(4096, 2048, 50257, BF16)],
        "shards": [VOCABULARY], "shard_cases": CASES,
    }  # fmt: skip
    portable = fields | {"cases": _SMALL[::4] + _SMALL[1:2] + _PORTABLE + _HEAVY,
                         "shard_cases": CASES + _PORTABLE_RANKS}  # fmt: skip
    return dict.fromkeys(("hopper-8x4", "model-8x4"), fields | {"exact": exact}) | {"triton-8x4": portable}


def _memory(of_lse_1: Callable[[Case, str, str], int], case: Case, backend: str, direction: str) -> int:
    """As in the other classes, the states of 32 splits, and up to four sums of dhidden."""
    N, D, V = (case.dims[name] for name in "NDV")
    if backend == "model-8x4":
        return 64 * MB + 512 * (N * D + V * D + N * V)
    states = 4 * (97 * -(-N // 128) * 128)
    return of_lse_1(case, backend.removesuffix("-8x4"), direction) + states + 4 * 4 * N * D


# Exact bits

#: Rows that are compared with the model.
ROWS = 16


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """logp and lse of a few rows, with the device's own exp2 and log2. (There is no model of its division, by
    which the entropy and gradients go.) With two rows, the controls changed no bit on an H200: another order
    moves a sum by less than the logarithm shows, in most rows."""
    of_device = arithmetic(args["hidden"].device)
    do = lse_model.Arithmetic(of_device.fma, of_device.exp2, of_device.log2)
    N = args["token_ids"].numel()
    rows = list(range(0, N, max(1, N // ROWS)))[:ROWS]
    one: Args = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in args.items()}
    one["hidden"] = one["hidden"].flatten(0, -2)[rows]
    for name in ("token_ids", "mask", "temperature"):
        if isinstance(one[name], Tensor):
            one[name] = one[name].flatten()[rows]
    one |= {"return_entropy": False, "return_lse": True, "return_stats": False}
    logp, _, lse, _ = model_shards.linear_logp(do=do, **one)
    assert logp is not None and lse is not None
    return {"logp": ((rows,), logp), "lse": ((rows,), lse)}


# Ranks


def whole_rows(args: Args) -> Args:
    """The call with a weight of as many rows as the padded vocabulary; those behind the last token hold
    NaN."""
    V = vocabulary(args)
    P = args["padded_vocab"] or padded(V)

    def filled(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        width = (0, P - V) if t.ndim == 1 else (0, 0, 0, P - V)
        return F.pad(t[:V], width, value=math.nan)

    more = {"weight": filled(args["weight"]), "bias": filled(args["bias"])}
    return args | more | {"vocab_size": V, "padded_vocab": P}


def _results(trial: Trial, args: Args, cotangents: Sequence[Tensor], **more: Any) -> dict[str, Tensor]:
    mine = cloned(args)
    leaves = [name for name in trial.leaves(args) if mine[name] is not None]
    for name in leaves:
        mine[name].requires_grad_()
    outputs = linear_logp(
        **mine, return_entropy=True, return_lse=True, backend=trial.backend, validate=False, **more
    )
    grads = torch.autograd.grad(outputs, [mine[name] for name in leaves], cotangents)
    results = dict(zip(trial.proof.outputs, (o.detach() for o in outputs), strict=True))
    return results | {f"gradient:{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _on_a_rank(group: Group, trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    whole = whole_rows(args)
    rows = whole["padded_vocab"] // group.size
    own = slice(group.rank * rows, (group.rank + 1) * rows)
    part = {name: None if whole[name] is None else whole[name][own] for name in ("weight", "bias")}
    return _results(trial, whole | part, cotangents, group=group)


def _alone(trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    return _results(trial, whole_rows(args), cotangents)


def _other_sums(
    trial: Trial, args: Args, cotangents: Sequence[Tensor]
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    whole, ours = whole_rows(args), _alone(trial, args, cotangents)
    wide = _results(trial, wider(whole), cotangents)
    outputs = trial.proof.outputs
    return [
        ("shards of another width", [ours[n] for n in outputs], [wide[n] for n in outputs]),
        ("a log-sum-exp of the ranks' own", [ours["lse"]], [lse_of_ranks(whole, ours["lse"])]),
        dhidden_in_turn(trial, whole, ours["entropy"], cotangents),
    ]


def lse_of_ranks(whole: Args, ours: Tensor) -> Tensor:
    """The log-sum-exp of what each of eight ranks has found alone; 0 where ours is, in masked rows."""
    V, P = whole["vocab_size"], whole["padded_vocab"]
    spans = [(i * P // SHARDS, min((i + 1) * P // SHARDS, V)) for i in range(SHARDS)]
    with torch.no_grad():
        own = [linear_logp(**whole | columns_of(whole, a, b), return_lse=True, validate=False)[1]
               for a, b in spans if a < b]  # fmt: skip
    return torch.where(ours == 0, 0.0, torch.stack(own).logsumexp(0))


def dhidden_in_turn(
    trial: Trial, whole: Args, entropy: Tensor | None, cotangents: Sequence[Tensor | None]
) -> tuple[str, list[Tensor], list[Tensor]]:
    """dhidden of eight ranks as a tree, and one rank after the other."""
    parts = parts_of_dhidden(trial, whole, entropy, cotangents)
    in_order = parts[0]
    for part in parts[1:]:
        in_order = in_order + part
    return "dhidden of one rank after the other", [_as_tree(parts)], [in_order]


def sum_of_dhidden(
    trial: Trial, whole: Args, entropy: Tensor | None, cotangents: Sequence[Tensor | None]
) -> Tensor:
    """dhidden in fp32, before it is rounded."""
    return _as_tree(parts_of_dhidden(trial, whole, entropy, cotangents))


def _as_tree(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def columns_of(whole: Args, first: int, end: int) -> Args:
    bias = None if whole["bias"] is None else whole["bias"][first:end]
    ids = torch.where(whole["token_ids"] == inputs.IGNORE, inputs.IGNORE, 0)
    none = {"vocab_size": None, "padded_vocab": None}
    return {"weight": whole["weight"][first:end], "bias": bias, "token_ids": ids, **none}


def parts_of_dhidden(
    trial: Trial, whole: Args, entropy: Tensor | None, cotangents: Sequence[Tensor | None]
) -> list[Tensor]:
    """The fp32 sums of eight ranks."""
    with torch.no_grad():
        *_, stats, _, _ = forward(**whole, return_stats=True, backend=trial.backend, validate=False)
    grads = dict(zip(("dlogp", "dentropy", "dlse"), cotangents, strict=True))
    rows, made = whole["padded_vocab"] // SHARDS, []
    for i in range(SHARDS):
        own = slice(i * rows, (i + 1) * rows)
        part = {name: None if whole[name] is None else whole[name][own] for name in ("weight", "bias")}
        dhidden, _, _ = backward(
            **whole | part, **grads, stats=stats, entropy=entropy, kept=None, kept_base=None,
            want_hidden=True, want_weight=False, want_bias=False, grad_dtype=None, dhidden_dtype=F32, shard=i,
            shards=1, backend=trial.backend, validate=False,
        )  # fmt: skip
        made.append(dhidden)
    return made


_OF_ALL = ("logp", "entropy", "lse", "gradient:hidden")
VOCABULARY = Shards(
    "a vocabulary cut into shards", _on_a_rank, _alone,
    spread=dict.fromkeys(_OF_ALL) | {"gradient:weight": 0, "gradient:bias": 0},
    controls=_other_sums,
)  # fmt: skip
