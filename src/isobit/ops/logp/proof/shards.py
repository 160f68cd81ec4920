"""The class with eight shards of the vocabulary: its cases, and ranks that share them.

The controls of the ranks make the same sums in the ways that are usual elsewhere: a log-sum-exp of the ranks'
own, as `loss_parallel` of PyTorch has it, and shards of another width. Both must have other bits.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.kernels.host.vocab_shards import SHARDS, padded
from isobit.ops.logp.op import logp
from isobit.ranks import Group
from isobit.spec.proof import Args, Case, Control, Shards
from isobit.spec.trial import Trial, cloned

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Cases

#: Shards that end inside a tile or have no tokens, rows that start inside a word, and shards of two splits.
_SMALL = [
    Case({"N": 7, "V": 257}, F32, options={"mask": torch.bool}),
    Case({"N": 0, "V": 7}, F32),
    Case({"B": 2, "T": 4, "V": 1025}, BF16, layout="shifted", options={"padded": 1344}),
    Case({"N": 7, "V": 4099}, F16, layout="offset", options={"mask": torch.uint8, "ids": torch.int32}),
    Case({"N": 3, "V": 135000}, BF16, options={"temperature": 0.7}),
    Case({"N": 3, "V": 1}, BF16),
    Case({"N": 12, "V": 9000}, BF16, layout="every other", options={"mask": torch.bool, "each": True}),
]
_HEAVY = [
    Case({"N": 40, "V": 151936}, BF16, options={"mask": torch.bool}, heavy=True),
    Case({"N": 64, "V": 50257}, F16, options={"temperature": 0.7, "padded": 51200}, heavy=True),
    Case({"N": 20, "V": 300000}, F32, heavy=True),
]
_BITS = [
    Case({"N": 6, "V": 2300}, F32, options={"padded": 2816}),
    Case({"N": 2200, "V": 50257}, F16, data="random", heavy=True),
    # More than 2**31 logits: wrong 32-bit offsets would fail here.
    Case({"N": 16500, "V": 131072}, BF16, data="random", heavy=True, gpu_gb=70),
]
#: On the CPU the model is as quick with many rows as with few, and Triton's interpreter is not.
_MORE_BITS = [
    Case({"N": 40, "V": 5120}, BF16, data="random", options={"each": True}),
    Case({"N": 17, "V": 16501}, F32),
]
_AGREE = [Case({"N": 3, "V": 135000}, BF16, options={"temperature": 0.7})]
CASES = [
    Case({"N": 6, "V": 2300}, F32, data="random", options={"padded": 2816, "mask": torch.bool}),
    Case({"N": 530, "V": 50257}, BF16, data="random", options={"mask": torch.bool, "each": True}, heavy=True),
    Case({"N": 128, "V": 151936}, F16, data="random",
         options={"padded": 152064, "temperature": 0.7, "ids": torch.int32}, heavy=True),
]  # fmt: skip
_MORE_CASES = [
    Case({"N": 90, "V": 9000}, F32, data="random", options={"mask": torch.bool, "temperature": 0.7}),
    Case({"B": 5, "T": 16, "V": 2300}, BF16, data="random",
         options={"padded": 2816, "each": True, "ids": torch.int32}),
]  # fmt: skip


def wider(args: Args) -> Args:
    """Shards of another width: another order of the same sums."""
    P = args["padded_vocab"] or padded(args["logits"].shape[-1])
    return args | {"padded_vocab": P + P // 8 // 64 * 64 + 64}


def differs(controls: Sequence[Control]) -> dict[str, dict[str, Any]]:
    """The fields of the proof that are different in this class."""
    fields = {
        "shards": [VOCABULARY], "controls": [*controls, Control("shards of another width", wider)],
        "agree_cases": _AGREE,
        "memory_cases": [Case({"N": 8, "V": 4099}, F32),
                         Case({"N": 600, "V": 50257}, BF16, data="random", heavy=True)],
    }  # fmt: skip
    kernels = {"cases": _SMALL[:5] + _HEAVY, "bit_cases": _BITS, "shard_cases": CASES}
    model = {"cases": _SMALL, "bit_cases": _MORE_BITS, "shard_cases": _MORE_CASES}
    return {"triton-8x1": fields | kernels, "model-8x1": fields | model}


# Ranks


def _results(trial: Trial, args: Args, cotangents: Sequence[Tensor], **more: Any) -> dict[str, Tensor]:
    mine = cloned(args)
    leaf = mine["logits"].requires_grad_()
    outputs = logp(
        **mine, return_entropy=True, return_lse=True, backend=trial.backend, validate=False, **more
    )
    (grad,) = torch.autograd.grad(outputs, leaf, cotangents)
    results = dict(zip(trial.proof.outputs, (o.detach() for o in outputs), strict=True))
    return results | {"gradient:logits": grad}


def _padded(args: Args) -> int:
    return args["padded_vocab"] or padded(args["logits"].shape[-1])


def _on_a_rank(group: Group, trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The rank's columns of logits that have as many as the padded vocabulary; those behind the last token
    hold NaN."""
    V, P = args["logits"].shape[-1], _padded(args)
    whole = F.pad(args["logits"], (0, P - V), value=math.nan)
    own = whole.tensor_split(group.size, -1)[group.rank]
    given = args | {"logits": own, "padded_vocab": P}
    return _results(trial, given, cotangents, vocab_size=V, group=group)


def _alone(trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    V, P = args["logits"].shape[-1], _padded(args)
    results = _results(trial, args | {"padded_vocab": P}, cotangents)
    return results | {"gradient:logits": F.pad(results["gradient:logits"], (0, P - V))}


def _other_sums(
    trial: Trial, args: Args, cotangents: Sequence[Tensor]
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    ours = _alone(trial, args, cotangents)
    wide = _results(trial, wider(args), cotangents)
    outputs = trial.proof.outputs
    return [
        ("shards of another width", [ours[n] for n in outputs], [wide[n] for n in outputs]),
        ("a log-sum-exp of the ranks' own", [ours["lse"]], [lse_of_ranks(args)]),
    ]


def lse_of_ranks(args: Args) -> Tensor:
    """The log-sum-exp of what each of eight ranks has found alone."""
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    each = args["temperature"]
    divisor = each[..., None] if isinstance(each, Tensor) else each
    width = _padded(args) // SHARDS
    parts = (args["logits"].float() / divisor).split(width, -1)
    return torch.where(live, torch.stack([z.logsumexp(-1) for z in parts]).logsumexp(0), 0.0)


VOCABULARY = Shards(
    "a vocabulary cut into shards", _on_a_rank, _alone,
    spread=dict.fromkeys(("logp", "entropy", "lse")) | {"gradient:logits": -1},
    controls=_other_sums,
)  # fmt: skip
