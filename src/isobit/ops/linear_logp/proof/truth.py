"""The truth of `linear_logp`, and bounds on the errors of its classes.

Errors are counted in units of 2^-23 and follow the computation. A logit is a chain of products, and
`chain_error` bounds the error of each: it grows with D, because every step truncates. Roundings of a logit to
16 bits are monotone, so its error becomes the distance between the rounded ends of its interval, which is 0
for most logits. From errors e of the logits follow

    lse      log sum_v p e^e            and the roundings of a log-sum-exp, as in `logp`
    logp     e of the token, and that of lse
    entropy  sum_v p |log p + H| e
    p        p (e^(e + error of lse) - 1)

and from those the error of a d-logit. The kernels round d-logits to the inputs' dtype, to nearest, which adds
half an eps of it to each: 2^-8 of it in bf16, 2^-11 in fp16, none in fp32. Products carry the errors of
d-logits on, times the sizes of their other factor, and add those of their own chains. Kept probabilities have
been rounded in the same way before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.numerics import cut
from isobit.ops.linear_logp import reference
from isobit.ops.linear_logp.op import vocabulary
from isobit.ops.linear_logp.proof.inputs import keeps
from isobit.spec.error_bounds import SEGMENT, UNIT, chain_error, narrow_dtype, segment_error
from isobit.spec.proof import Args

#: Relative error of the kernels' tanh in units: exp2 has 2^-22, and a division follows.
TANH = 8.0

FP32 = torch.finfo(torch.float32)


def formula(args: Args) -> tuple[Tensor, ...]:
    left = ("workspace_bytes", "padded_vocab")
    logp, entropy, lse = reference.formula(**{k: v for k, v in args.items() if k not in left})
    return logp, constant(entropy, logp) if keeps(args) else entropy, lse


def constant(x: Tensor, like: Tensor) -> Tensor:
    """x without a gradient, but still in the autograd graph of another tensor."""
    return x.detach() + 0.0 * like


@dataclass
class Errors:
    """Rows of logits in fp64 after all transformations, and the error bound of each."""

    hidden: Tensor  # [N, D], zeros in masked rows
    weight: Tensor  # [vocab, D]
    live: Tensor  # [N]
    token: Tensor  # [N, 1]
    z: Tensor  # [N, vocab]
    error: Tensor  # of z
    rate: Tensor  # dz by the sum of products
    rate_error: Tensor

    @property
    def top(self) -> Tensor:
        return self.z.amax(-1, keepdim=True)


def finite(x: Tensor) -> Tensor:
    """0 in place of inf and NaN: banned tokens have probability 0, so their errors do not matter."""
    return torch.where(x.isfinite(), x, 0.0)


def errors_of(args: Args) -> Errors:
    vocab = vocabulary(args)
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"]).flatten()
    hidden = torch.where(live[:, None], args["hidden"].flatten(0, -2), 0.0)
    weight = args["weight"][:vocab]
    error, z = chain_error(hidden, weight.mT)
    rate, rate_error = z.new_ones(()), z.new_zeros(())
    if args["bias"] is not None:
        z = z + args["bias"][:vocab]
        error = error + finite(z).abs()
    if (narrow := args["logits_dtype"]) is not None:
        low, high = ((z + sign * error * UNIT).to(narrow).double() for sign in (-1, 1))
        z, error = z.to(narrow).double(), (high - low) / UNIT
    if (factor := args["logit_scale"]) is not None:
        z, rate = z * factor, rate * factor
        error = error * abs(factor) + finite(z).abs()
    if (cap := args["softcap"]) is not None:
        z = cap * torch.tanh(z / cap)
        slope = 1 - (z / cap) ** 2
        error = error * slope + TANH * z.abs()
        rate_error = rate.abs() * (2 + 2 * z.abs() / cap**2 * error)
        rate = rate * slope
    temperature: Tensor | float = args["temperature"]
    if isinstance(temperature, Tensor):
        temperature = torch.where(live, temperature.flatten(), 1.0)[:, None]
    token = torch.where(live, args["token_ids"].flatten(), 0).long()[:, None]
    result = (z / temperature, error / temperature, rate / temperature, rate_error / temperature)
    return Errors(hidden, weight, live, token, *result)


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Bounds on the errors of outputs and gradients, in units."""
    rows = errors_of(args)
    shape = outputs[0].shape
    logp, entropy, lse = (o.reshape(-1, 1) for o in outputs)
    lse = torch.where(rows.live[:, None], lse, rows.z.logsumexp(-1, keepdim=True))
    log_p = (rows.z - lse).clamp(min=-1000.0)
    p = log_p.exp()
    log_v = math.log(len(rows.weight)) + 4.0  # sums of V terms, and exp2/log2 with errors of some units
    # Exponents are differences from a maximum, times log2(e) / temperature: a common shift adds no error.
    e = rows.error + 3 * finite(rows.top - rows.z)
    lse_error = torch.log1p((p * torch.expm1(e * UNIT)).sum(-1, keepdim=True)) / UNIT + log_v
    moment = (log_p + entropy).abs() * e + 2 * e.square() * UNIT
    entropy_error = (p * moment).sum(-1, keepdim=True) + entropy.abs() + 2 * log_v
    sizes = {
        "logp": e.gather(-1, rows.token) + lse_error + logp.abs(),
        "entropy": entropy_error,
        "lse": lse_error + rows.top.abs() + lse.abs(),
    }
    sizes = {name: size.reshape(shape) for name, size in sizes.items()}
    if not cotangents:
        return sizes
    # d-logits, and their errors
    g_logp, g_entropy, g_lse = (torch.where(rows.live, g.flatten(), 0.0)[:, None] for g in cotangents)
    if keeps(args):
        g_entropy = torch.zeros_like(g_entropy)
    at_token = torch.zeros_like(p).scatter_(-1, rows.token, g_logp)
    dz = p * (g_lse - g_logp - g_entropy * (log_p + entropy)) + at_token
    weight = g_logp.abs() + g_lse.abs() + g_entropy.abs() * (log_p.abs() + entropy)
    p_error = p * torch.expm1((e + lse_error + log_p.abs() + log_v) * UNIT) / UNIT
    error = (p_error + FP32.tiny / FP32.eps) * weight  # GPUs flush subnormal numbers to 0
    error += p * g_entropy.abs() * (e + lse_error + entropy_error) + 2 * at_token.abs()
    error = error * rows.rate.abs() + dz.abs() * rows.rate_error
    dz = dz * rows.rate
    error += _narrowed(rows, args, dz, error, weight * p.amax(-1, keepdim=True))
    return sizes | _products(rows, args, dz, error)


def _narrowed(rows: Errors, args: Args, dz: Tensor, error: Tensor, kept: Tensor) -> Tensor | float:
    """Error from rounding d-logits to the inputs' dtype, in units; `kept` is the size of the d-logit of a
    row's largest probability."""
    narrow = narrow_dtype(rows.hidden, rows.weight)
    if narrow is None:
        return 0.0
    held = torch.finfo(narrow)
    added = (held.eps / 2 * (dz.abs() + error * UNIT) + held.smallest_normal * held.eps / 2) / UNIT
    if keeps(args):
        added = 2 * added + held.smallest_normal * held.eps / 2 * kept * rows.rate.abs() / UNIT
    return added


def _products(rows: Errors, args: Args, dz: Tensor, error: Tensor) -> dict[str, Tensor]:
    """Errors of the gradients. dhidden is one chain over the vocabulary in one class and segments in the
    other; the chain's bound holds for both. All is doubled, because a result is rounded again: an error of d
    may round to the other neighbour."""
    vocab, V = len(rows.weight), len(args["weight"])
    error = torch.where(rows.live[:, None], error, 0.0)
    dhidden = chain_error(dz, rows.weight)[0] + error @ rows.weight.abs()
    stream, count = rows.live.nonzero()[:, 0], int(rows.live.sum())
    left, wrong, bounds = dz[stream].mT, error[stream].mT, cut([count], SEGMENT)
    sizes = {"gradient:hidden": 2 * dhidden.reshape(args["hidden"].shape)}
    for name, right in (("weight", rows.hidden[stream]), ("bias", dz.new_ones(count, 1))):
        of_rows = segment_error(left, right, bounds, None) + wrong @ right.abs()
        whole = of_rows.new_zeros(V, of_rows.shape[1])  # the padding of the vocabulary has no gradient
        whole[:vocab] = 2 * of_rows
        sizes[f"gradient:{name}"] = whole if name == "weight" else whole[:, 0]
    return sizes
