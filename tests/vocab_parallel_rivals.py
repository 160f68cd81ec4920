"""Log-probabilities over a vocabulary that ranks share, as others compute them: the formulas of Megatron and
verl, and PyTorch's `loss_parallel`. All sum in orders that depend on the ranks; they are references for
accuracy."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def megatron(shards: list[Tensor], ids: Tensor) -> Tensor:
    """logp [N] from the fp32 logits [N, columns] of each rank: a maximum over ranks, the exponentials of each
    rank summed, these sums added one after the other, and the logit of the token from the rank that has
    it."""
    top = torch.stack([z.amax(-1) for z in shards]).amax(0)
    total, own, first = torch.zeros_like(top), torch.zeros_like(top), 0
    for z in shards:
        shifted = z - top[:, None]
        total = total + shifted.exp().sum(-1)
        here = (ids >= first) & (ids < first + z.shape[1])
        at = torch.where(here, ids - first, 0)
        own = own + torch.where(here, shifted.gather(1, at[:, None])[:, 0], 0.0)
        first += z.shape[1]
    return own - total.log()


def entropy_of_ranks(shards: list[Tensor]) -> Tensor:
    """The entropy [N] as verl computes it from such logits: the log-sum-exp minus the mean of the logits,
    each a sum over ranks."""
    top = torch.stack([z.amax(-1) for z in shards]).amax(0)
    exps = [(z - top[:, None]).exp() for z in shards]
    total = sum(e.sum(-1) for e in exps)
    mean = sum((e / total[:, None] * z).sum(-1) for e, z in zip(exps, shards, strict=True))
    made: Tensor = top + torch.as_tensor(total).log() - mean
    return made


def gathered(hidden: Tensor, head: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logp and entropy [N] as verl's test of tensor parallelism computes them, in fp32: every rank has its
    logits from its rows of the head and gathers those of the others, without gradients to them. The gradient
    of hidden states is then that of this rank's logits, to be summed over ranks."""
    own = hidden.float() @ head.float().t() / temperature
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    parts[dist.get_rank()] = own
    z = torch.cat(parts, -1)
    entropy = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    return -F.cross_entropy(z, ids, reduction="none"), entropy


def loss_parallel(logits: Tensor, mesh: Any, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """logp [N] from the columns of the logits that this rank has, and the gradient of a weighed sum with
    respect to these. Its backward must run in its context, too."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    leaf = logits.detach().requires_grad_()
    with loss_parallel():
        nll: Any = F.cross_entropy(DTensor.from_local(leaf, mesh, [Shard(1)]), ids, reduction="none")
        logp: Tensor = -nll.full_tensor()
        (dlogits,) = torch.autograd.grad((logp * weights).sum(), leaf)
    return logp.detach(), dlogits
