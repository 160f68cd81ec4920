"""Class lse/8x4 of `linear_logp` on the CPU, operation by operation: the backend for CPU tensors, and what
kernels are compared with.

Products are those of a Hopper GPU bit for bit (`isobit.numerics`), sums over the vocabulary those of
`isobit.kernels.host.lse_model`. The calls may hold some of the shards of the vocabulary only: `shard` is the
first of them, and `shards` their number.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.kernels.host import lse_model
from isobit.kernels.host.logprob import Rows
from isobit.kernels.host.lse_model import CPU, Arithmetic
from isobit.kernels.host.token_stream import SEGMENT
from isobit.kernels.host.vocab_shards import SHARDS, SPLITS_PER_SHARD, Shards, shards_of
from isobit.numerics import canonical, chain, cut, segments
from isobit.ops.linear_logp.shard_calls import Scaled, scaled, vocabulary_of

Array = np.ndarray


def why_not(args: dict[str, Any]) -> str | None:
    if args["hidden"].dtype not in (torch.bfloat16, torch.float16):
        return "the model multiplies bf16 and fp16 only"
    if args["softcap"] is not None:
        return "softcap is not supported in class lse/8x4"
    if args["logit_scale"] is not None and args["logit_scale"] <= 0:
        return "logit_scale must be positive: otherwise maxima would become minima"
    return None


class _Call:
    """The rows of a call that are live and have a valid token, and the shards that are here. All of it is on
    the CPU."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.cut: Shards = shards_of(args, vocabulary_of(args))
        hidden, ids = args["hidden"].cpu(), args["token_ids"].cpu()
        mask, temperature = args["mask"], args["temperature"]
        each = temperature.cpu() if isinstance(temperature, Tensor) else temperature
        mask = None if mask is None else mask.cpu()
        self.rows = Rows.of(ids, mask, args["ignore_index"], 1.0, self.cut.V, torch.float32)
        good = self.rows.good
        self.hidden = hidden.reshape(ids.numel(), hidden.shape[-1])[good]
        self.weight = args["weight"].cpu()[: self.cut.columns]
        bias = args["bias"]
        self.bias = None if bias is None else bias.cpu()[: self.cut.columns].float()
        self.tokens = self.rows.ids[good].long().numpy() - self.cut.column
        of_rows: Scaled = scaled(each, args["logit_scale"], good)
        self.c, self.factor = of_rows.scales.numpy(), of_rows.factor
        self.narrow = args["logits_dtype"]

    def logits(self) -> Array:
        z = chain(self.hidden, self.weight.t())
        if self.bias is not None:
            z = canonical(z + self.bias)
        if self.narrow is not None:
            z = z.to(self.narrow).float()
        return z.numpy()

    def of_good(self, t: Tensor | None) -> Array | None:
        """One number per row, of live rows."""
        return None if t is None else t.cpu().reshape(-1)[self.rows.good].numpy()


def linear_logp_states(do: Arithmetic = CPU, **args: Any) -> Tensor:
    """[12 shards + 1, capacity]: (m, s, t) of every split that is here, and the logit of the row's token."""
    call = _Call(args)
    N = args["token_ids"].numel()
    out = np.zeros((3 * call.cut.splits + 1, -(-N // 128) * 128), np.float32)
    good, z = call.rows.good.numpy(), call.logits()
    states = lse_model.split_states(z, call.c, call.cut, do)
    inside = (call.tokens >= 0) & (call.tokens < z.shape[1])
    picked = np.zeros(len(z), np.float32)
    picked[inside] = z[inside, call.tokens[inside]]
    out[:-1, :N][:, good] = states.reshape(3 * call.cut.splits, len(z))
    out[-1, :N][good] = picked
    return torch.from_numpy(out).to(args["hidden"].device)


def linear_logp_merged(do: Arithmetic = CPU, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats) from the states [ranks, 12 shards + 1, capacity] of all shards."""
    ids, states, V = args["token_ids"].cpu(), args["states"].cpu(), args["vocab"]
    shape, N, device = ids.shape, ids.numel(), args["states"].device
    mask, temperature = args["mask"], args["temperature"]
    rows = Rows.of(ids, None if mask is None else mask.cpu(), args["ignore_index"], 1.0, V, torch.float32)
    each = temperature.cpu() if isinstance(temperature, Tensor) else temperature
    own = scaled(each, args["logit_scale"], rows.good)
    here = states[:, :, :N][:, :, rows.good]
    owner = rows.ids[rows.good].long() // (args["padded_vocab"] // len(states))
    picked = here[owner, -1, torch.arange(here.shape[2])].numpy()
    parts = here[:, :-1].reshape(SHARDS * SPLITS_PER_SHARD, 3, here.shape[2]).numpy()
    with np.errstate(all="ignore"):
        sums = lse_model.merge(parts, own.scales.numpy(), do)
        results = (sums.logp(picked), sums.entropy(), sums.lse(), sums.stats(own.factor))
    fill = rows.fill(torch.float32)
    blank = (fill, fill, fill, torch.stack((fill, torch.ones_like(fill))))
    wanted = (True, args["return_entropy"], args["return_lse"], args["return_stats"])

    def whole(found: Array, rest: Tensor) -> Tensor:
        out = rest.clone()
        out[..., rows.good] = torch.from_numpy(np.ascontiguousarray(found))
        return out.reshape(*rest.shape[:-1], *shape).to(device)

    of_all = (whole(found, rest) for found, rest in zip(results, blank, strict=True))
    return tuple(out if want else None for out, want in zip(of_all, wanted, strict=True))


def linear_logp(do: Arithmetic = CPU, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats) with all shards here."""
    states = linear_logp_states(do, **args)[None]
    V = vocabulary_of(args)
    return linear_logp_merged(
        do, **args | {"states": states, "vocab": V, "padded_vocab": shards_of(args, V).P}
    )


def linear_logp_bwd(grad_dtype: torch.dtype | None = None, **args: Any) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias). With some shards, dhidden is their part of the tree, in fp32."""
    call, hidden, weight = _Call(args), args["hidden"], args["weight"]
    want_hidden, want_weight, want_bias = (args[f"want_{x}"] for x in ("hidden", "weight", "bias"))
    good = call.rows.good
    stats = args["stats"].cpu().reshape(2, -1)[:, good].numpy()
    entropy, dlogp, dentropy, dlse = (
        call.of_good(args[name]) for name in ("entropy", "dlogp", "dentropy", "dlse")
    )
    with np.errstate(all="ignore"):
        z = call.logits()
        w = lse_model.weights(stats, entropy, dlogp, dentropy, dlse, call.c, call.factor)
        d = lse_model.dlogits(z, call.tokens, w, call.c, args["dentropy"] is not None)
    dz = torch.from_numpy(d).to(hidden.dtype)
    dhidden = dweight = dbias = None
    if want_hidden:
        dtype = args["dhidden_dtype"] or grad_dtype or hidden.dtype
        sums = [_part(dz[:, a:b], call.weight[a:b]) for a, b in call.cut.bounds()]
        while len(sums) > 1:
            sums = [canonical(one + other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
        rest = call.rows.fill(torch.float32)[:, None]
        whole = rest.expand(-1, hidden.shape[-1]).clone()
        whole[good] = sums[0]
        dhidden = whole.to(dtype).view(hidden.shape).to(hidden.device)
    if want_weight:
        own = _over_rows(dz, call.hidden)
        dweight = weight.new_zeros(weight.shape, dtype=grad_dtype or weight.dtype)
        dweight[: call.cut.columns] = own.to(dweight.dtype).to(weight.device)
    if want_bias:
        bias = args["bias"]
        dbias = bias.new_zeros(bias.shape, dtype=grad_dtype or bias.dtype)
        dbias[: call.cut.columns] = _column_sums(dz.float()).to(dbias.dtype).to(bias.device)
    return dhidden, dweight, dbias


def _part(dz: Tensor, weight: Tensor) -> Tensor:
    """dhidden of a shard: a chain for every 512 of its columns, folded in order."""
    return segments(dz, weight, cut([len(weight)], SEGMENT))


def _over_rows(dz: Tensor, hidden: Tensor) -> Tensor:
    return segments(dz.t(), hidden, cut([len(hidden)], SEGMENT))


def _column_sums(dz: Tensor) -> Tensor:
    """16 rows at a time. Of these, row r is added to r + 8, then to r + 2, r + 1 and r + 4."""
    total = torch.zeros(dz.shape[1], dtype=torch.float32)
    for first in range(0, len(dz), 16):
        rows = torch.zeros(16, dz.shape[1], dtype=torch.float32)
        rows[: len(dz) - first] = dz[first : first + 16]
        left = list(range(16))
        for stride in (8, 2, 1, 4):
            left = [r for r in left if not r & stride]
            for r in left:
                rows[r] = rows[r] + rows[r + stride]
        total = canonical(total + rows[0])
    return total
