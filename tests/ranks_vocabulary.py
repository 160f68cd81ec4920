"""Log-probabilities over a vocabulary that ranks share: the calls of one rank, for ranks in turn and for the
processes of `ranks_on_cpus.py`, and what these find."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import isobit
from isobit.parallel import column_linear, row_linear
from vocab_parallel_rivals import gathered, loss_parallel

N, D, V, P = 12, 24, 1150, 1152
WEIGHTS = torch.linspace(-1, 1, N)

#: By result, the dimension along which ranks have parts; None: each has all of it.
OF_HEAD = (None, None, None, 0, 0)
OF_LOGITS = (None, None, None, -1)


def tensors() -> dict[str, Any]:
    """Of `linear_logp`. Behind the last token there is NaN."""
    gen = torch.Generator().manual_seed(3)
    weight, bias = torch.full((P, D), torch.nan), torch.full((P,), torch.nan)
    weight[:V], bias[:V] = torch.randn(V, D, generator=gen) / 5, torch.randn(V, generator=gen)
    ids = torch.randint(0, V, (N,), generator=gen)
    ids[4] = -100
    hidden = torch.randn(N, D, generator=gen).bfloat16()
    return {"hidden": hidden, "weight": weight.bfloat16(), "token_ids": ids, "bias": bias}


def logits(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Of `logp`, likewise."""
    gen = torch.Generator().manual_seed(3)
    z = torch.full((N, P), torch.nan)
    z[:, :V] = 3 * torch.randn(N, V, generator=gen)
    ids = torch.randint(0, V, (N,), generator=gen)
    ids[4] = -100
    ids[5:8] = torch.tensor([0, P // 2, V - 1])
    return {"logits": z.to(dtype), "token_ids": ids, "temperature": 0.7}


def of_head(rank: int, ranks: int, **options: Any) -> list[Tensor]:
    """logp, entropy, dhidden, and the rank's rows of dweight and dbias."""
    args = tensors()
    args |= {name: args[name].tensor_split(ranks)[rank] for name in ("weight", "bias")}
    leaves = [args[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    given = {"vocab_size": V, "padded_vocab": P, "return_entropy": True} | options
    logp, entropy = isobit.linear_logp(**args, **given)
    grads = torch.autograd.grad(logp.sum() * 0.3 + (entropy * torch.arange(N)).sum(), leaves)
    return [logp.detach(), entropy.detach(), *grads]


def of_loss(rank: int, ranks: int, **options: Any) -> list[Tensor]:
    """The same of a loss that uses log-probabilities and entropies. Without a group it takes the rows of
    tokens alone; then gradients get zeros for the others."""
    args, rows = tensors(), slice(V)
    if "group" in options:
        rows, options = slice(rank * P // ranks, (rank + 1) * P // ranks), options | {"vocab_size": V}
    args |= {name: args[name][rows] for name in ("weight", "bias")}
    leaves = [args[name].requires_grad_() for name in ("hidden", "weight", "bias")]

    def loss_fn(logp: Tensor, entropy: Tensor, weights: Tensor) -> Any:
        return (weights * logp - 0.1 * entropy).sum(), {"logp": logp.sum()}

    given: dict[str, Any] = {"loss_fn": loss_fn, "inputs": {"weights": WEIGHTS}}
    loss, sums = isobit.linear_policy_loss(**args, **given, entropy=True, padded_vocab=P, **options)
    dhidden, *own = torch.autograd.grad(loss * 1.5, leaves)
    if "group" not in options:
        own = [torch.cat([t, t.new_zeros(P - V, *t.shape[1:])]) for t in own]
    return [loss.detach(), sums["logp"], dhidden, *own]


def of_logits(rank: int, ranks: int, **options: Any) -> list[Tensor]:
    """logp, entropy, lse, and the gradient of the rank's columns. Without a group as of a loss."""
    args = logits()
    own = args["logits"].tensor_split(ranks, -1)[rank] if "group" in options else args["logits"][:, :V]
    leaf = own.clone().requires_grad_()
    flags = {"return_entropy": True, "return_lse": True, "padded_vocab": P}
    outputs = isobit.logp(**args | {"logits": leaf}, **flags, **options)
    (grad,) = torch.autograd.grad(sum((x * WEIGHTS).sum() for x in outputs), leaf)
    if "group" not in options:
        grad = torch.nn.functional.pad(grad, (0, P - V))
    return [*(x.detach() for x in outputs), grad]


def same(
    found: list[Tensor], whole: list[Tensor], dims: tuple[int | None, ...], rank: int, ranks: int
) -> bool:
    """Whether this rank has its part of the results of one."""
    parts = [
        t if dim is None else t.tensor_split(ranks, dim)[rank] for t, dim in zip(whole, dims, strict=True)
    ]
    pairs = zip(found, parts, strict=True)
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs
    )


# Processes


def on_one() -> dict[str, list[Tensor]]:
    """What processes are compared with. Of DTensors there is no padding that they know of."""
    args = tensors()
    weight = args["weight"].requires_grad_()
    logp = isobit.linear_logp(**args, vocab_size=V, padded_vocab=P)
    (dweight,) = torch.autograd.grad(logp.sum(), weight)
    return {
        "linear_logp": of_head(0, 1), "linear_policy_loss": of_loss(0, 1), "logp": of_logits(0, 1),
        "linear_logp, DTensors": [logp.detach(), dweight],
    }  # fmt: skip


def found(rank: int, mesh: DeviceMesh, one: dict[str, list[Tensor]]) -> dict[str, bool]:
    ranks, group = mesh.size(), dist.group.WORLD

    def equal(name: str, ours: list[Tensor], dims: tuple[int | None, ...]) -> dict[str, bool]:
        return {name: same(ours, one[name], dims, rank, ranks)}

    return (
        equal("linear_logp", of_head(rank, ranks, group=group), OF_HEAD)
        | equal("linear_policy_loss", of_loss(rank, ranks, group=group), OF_HEAD)
        | equal("logp", of_logits(rank, ranks, group=group, vocab_size=V), OF_LOGITS)
        | equal("linear_logp, DTensors", _of_dtensors(rank, mesh), (None, 0))
        | {"logp, DTensor": _dtensor_of_logits(rank, mesh, one["logp"][0])}
        | {"no rows": _no_rows(rank, ranks), "verl's comparison": all(map(_as_verl, VERL))}
        | ({"loss_parallel is no closer": _beside_loss_parallel(rank, mesh)} if ranks == 2 else {})
    )


def _of_dtensors(rank: int, mesh: DeviceMesh) -> list[Tensor]:
    """logp and the rank's rows of dweight: with a group, and with hidden states on the mesh."""
    args = tensors()
    own: dict[str, Any] = {
        name: DTensor.from_local(args[name].tensor_split(mesh.size())[rank], mesh, [Shard(0)])
        for name in ("weight", "bias")
    }
    leaf = own["weight"].requires_grad_()
    logp = isobit.linear_logp(**args | own, vocab_size=V, group=mesh)
    logp.sum().backward()
    spread = DTensor.from_local(args["hidden"], mesh, [Replicate()])
    assert torch.equal(isobit.linear_logp(**args | own | {"hidden": spread}, vocab_size=V), logp)
    assert isinstance(leaf.grad, DTensor) and leaf.grad.placements == (Shard(0),)
    return [logp.detach(), leaf.grad.to_local()]


def _dtensor_of_logits(rank: int, mesh: DeviceMesh, logp: Tensor) -> bool:
    args = logits()
    own = args["logits"].tensor_split(mesh.size(), -1)[rank].clone().requires_grad_()
    leaf = DTensor.from_local(own, mesh, [Shard(-1)])
    made = isobit.logp(leaf, args["token_ids"], temperature=0.7, vocab_size=V)
    made.sum().backward()
    by_group = own.detach().clone().requires_grad_()
    options: dict[str, Any] = {"temperature": 0.7, "vocab_size": V, "group": dist.group.WORLD}
    isobit.logp(by_group, args["token_ids"], **options).sum().backward()
    assert own.grad is not None and by_group.grad is not None
    return torch.equal(made, logp) and torch.equal(own.grad, by_group.grad)


def _no_rows(rank: int, ranks: int) -> bool:
    """Every function with no tokens at all: empty results, gradients of weights that are zero, no hang."""
    group, ids = dist.group.WORLD, torch.empty(0, dtype=torch.int64)
    x, weight = torch.empty(0, D).bfloat16(), torch.ones(P // ranks, D).bfloat16()
    given: dict[str, Any] = {"vocab_size": V, "group": group}

    def differentiated(*leaves: Tensor, call: Any) -> bool:
        for leaf in leaves:
            leaf.requires_grad_()
        grads = torch.autograd.grad(call(*leaves).sum(), leaves)
        return all(g.shape == t.shape and not g.any() for g, t in zip(grads, leaves, strict=True))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return isobit.linear_policy_loss(x, weight, ids, loss_fn=torch.sum, inputs={}, **given)[0]

    layers = [
        differentiated(x.clone(), weight.clone(), call=lambda x, w: layer(x, w, group=group, **more))
        for layer in (column_linear, row_linear) for more in ({}, {"sequence_dim": 0})
    ]  # fmt: skip
    return all(layers) and all([
        differentiated(x.clone(), weight.clone(), call=lambda x, w: isobit.linear_logp(x, w, ids, **given)),
        differentiated(x.clone(), weight.clone(), call=loss),
        differentiated(torch.empty(0, P // ranks), call=lambda z: isobit.logp(z, ids, **given)),
    ])  # fmt: skip


# verl's own test of tensor parallelism (test_special_linear_cross_entropy_tp.py): with the LM head cut over
# ranks, log-probabilities and entropies, and gradients of hidden states and of a rank's rows of the head, are
# those of plain PyTorch in fp32 on logits that are gathered. Its draws, its temperature, its tolerances; two
# of its sizes, in which tokens and hidden sizes are a 64th, and vocabularies an 8th and a 16th.

VERL = ((24, 32, 4032), (22, 64, 6400))
TEMPERATURE = 1.5
OUTPUTS, GRADIENTS = {"atol": 1e-4, "rtol": 1e-4}, {"atol": 1e-2, "rtol": 1e-4}


def _as_verl(sizes: tuple[int, int, int]) -> bool:
    """By `linear_logp`, and by `logp` of a product of this rank."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    tokens, columns, vocab = sizes
    gen = torch.Generator().manual_seed(sum(sizes))

    def drawn(*shape: int, most: float = 0.5) -> Tensor:
        return ((torch.rand(*shape, generator=gen) * 2 - 1) * most).bfloat16()

    hidden, head = drawn(tokens, columns).requires_grad_(), drawn(vocab, columns)
    own = head.tensor_split(ranks)[rank].clone().requires_grad_()
    ids = torch.randint(0, vocab, (tokens,), generator=gen)
    grads = [drawn(tokens, most=1.0).float(), drawn(tokens).float()]

    def results(outputs: Any, whole: bool = False) -> list[Tensor]:
        dhidden, dhead = torch.autograd.grad(outputs, (hidden, own), grads)
        if not whole:  # of this rank's part of the vocabulary
            dist.all_reduce(dhidden)
        return [*(x.detach() for x in outputs), dhidden, dhead]

    options: dict[str, Any] = {"temperature": TEMPERATURE, "return_entropy": True, "group": group}
    theirs = results(gathered(hidden, own, ids, TEMPERATURE))
    z = hidden.float() @ own.float().t()
    for ours in (
        results(isobit.linear_logp(hidden, own, ids, **options), whole=True),
        results(isobit.logp(z, ids, **options)),
    ):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(a, b, **(OUTPUTS if i < 2 else GRADIENTS))
    # A gradient that is missing cannot hide behind the tolerance of its elements.
    return all(float(t.float().abs().max()) > 0.05 for t in theirs)


def _beside_loss_parallel(rank: int, mesh: DeviceMesh) -> bool:
    """PyTorch's own way, for logits in bf16, is no closer to the truth than ours, without the padding."""
    args, half = tensors(), V // 2  # DTensor cuts an even vocabulary evenly
    live = args["token_ids"] >= 0
    own = args["weight"][:V][rank * half : (rank + 1) * half].float()
    z = (args["hidden"][live].float() @ own.t()).bfloat16().float()
    theirs, dlogits = loss_parallel(z, mesh, args["token_ids"][live], WEIGHTS[live])
    their_dhidden = torch.zeros(N, D)
    their_dhidden[live] = dlogits.bfloat16().float() @ own
    their_dhidden = their_dhidden.bfloat16()  # as the layers of the ranks return it
    dist.all_reduce(their_dhidden)
    leaf = args["hidden"].clone().requires_grad_()
    options: dict[str, Any] = {"vocab_size": V, "padded_vocab": P, "group": dist.group.WORLD}
    ours = isobit.linear_logp(leaf, args["weight"].tensor_split(2)[rank], args["token_ids"], **options)
    (dhidden,) = torch.autograd.grad((ours * WEIGHTS).sum(), leaf)
    hidden = args["hidden"].double().requires_grad_()
    log_p = (hidden @ args["weight"][:V].double().t()).log_softmax(-1)[live]
    exact = log_p.gather(1, args["token_ids"][live, None])[:, 0]
    (exact_dhidden,) = torch.autograd.grad((exact * WEIGHTS[live]).sum(), hidden)
    return bool(
        (ours[live] - exact).abs().max() <= (theirs - exact).abs().max()
        and (dhidden - exact_dhidden).norm() <= (their_dhidden - exact_dhidden).norm()
        and (theirs - exact).abs().max() < 0.05  # it is the same quantity
    )
