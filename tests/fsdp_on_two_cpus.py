"""A model that FSDP2 shards over two processes on a CPU, and the same model whole: a program.

    python tests/fsdp_on_two_cpus.py

It prints JSON: by case, how far log-probabilities and gradients of the sharded model are from those of the
whole one. The two processes have batches of their own, and gradients are the mean of both.
"""

import json
import multiprocessing
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which FSDP2 imports at its first forward
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import isobit
from isobit.integrations.hf import token_logps
from isobit.integrations.logprobs import Call
from isobit.nn import DetLinear, in_forward, swap_linear

V, D, WORLD = 53, 16, 2
BF16 = torch.bfloat16


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, **{"tie_word_embeddings": False} | options,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model.eval()


def ids_of(rank: int) -> Tensor:
    return torch.randint(0, V, (2, 7), generator=torch.Generator().manual_seed(rank))


def sharded(model: Any, head: str, **options: Any) -> Any:
    """The head with the root, on its own, or with the norm before it."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if head == "own":
        fully_shard(model.lm_head, **options)
    elif head == "group":
        fully_shard([model.model.norm, model.lm_head], **options)
    assert isinstance(model.lm_head, FSDPModule) == (head != "root")
    fully_shard(model, **options)
    assert isinstance(model.lm_head.weight, DTensor)
    return model


def weighed(logp: Tensor, entropy: Tensor) -> Tensor:
    return (torch.linspace(-1, 1, logp.numel()).view(logp.shape) * logp).sum() + 0.3 * entropy.sum()


def mean_gradients(model: Any, backward: Any) -> dict[str, Tensor]:
    """Of the whole model, over the batches of all ranks."""
    for rank in range(WORLD):
        (backward(model, rank) / WORLD).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gathered(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys() and all(bool(x.any()) for x in theirs.values())
    return max(float((ours[name] - x).abs().max() / x.abs().max()) for name, x in theirs.items())


# Log-probabilities


def from_logits(model: Any, rank: int) -> Tensor:
    """By the model's own logits."""
    ids = ids_of(rank)
    log_p = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1)
    return weighed(log_p.gather(-1, ids[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1))


def logps(rank: int, head: str, steps: int = 2, tied: bool = False, **options: Any) -> list[float]:
    """Several steps, because FSDP2 behaves otherwise after the first."""
    theirs, model = made(tie_word_embeddings=tied), made(tie_word_embeddings=tied)
    sharded(model, head, **options)
    expected, distances = mean_gradients(theirs, from_logits), []
    for _ in range(steps):
        model.zero_grad()
        with torch.no_grad():
            old = token_logps(model, ids_of(rank), temperature=0.7)
        found = token_logps(model, ids_of(rank), temperature=0.7, return_entropy=True)
        assert torch.equal(old, found[0]) and not old.requires_grad
        loss = weighed(*found)
        loss.backward()
        exact = from_logits(theirs, rank)
        distances += [float(abs(loss - exact) / abs(exact)), distance(gathered(model), expected)]
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    return distances


def own_loop(rank: int, head: str, how: str) -> list[float]:
    """As in docs/own_loop.md: `linear_logp`, or a loss directly; or the replacements inside of trainers."""
    theirs, model = made(), sharded(made(), head)

    def loss(model: Any, rank: int) -> Tensor:
        ids, weights = ids_of(rank), torch.linspace(-1, 1, 12).view(2, 6)

        def at_the_head(states: Tensor) -> Tensor:
            weight, targets = model.lm_head.weight, ids[:, 1:]
            if how == "linear_logp":
                return (weights * isobit.linear_logp(states, weight, targets)).sum()
            if how == "seam":
                options = {"temperature": 1.0, "softcap": None, "logit_scale": None, "return_entropy": False}
                return (weights * Call(options, None)(states, weight, None, targets)[0]).sum()
            given = {"advantages": weights, "normalizer": 1}
            return isobit.linear_policy_loss(
                states, weight, targets, loss_fn=isobit.losses.dapo, inputs=given
            )[0]

        def policy(ids: Tensor) -> Tensor:
            return in_forward(model.lm_head, at_the_head, model.model(ids).last_hidden_state[:, :-1])

        return in_forward(model, policy, ids)

    expected = mean_gradients(theirs, loss)
    loss(model, rank).backward()
    return [distance(gathered(model), expected)]


def rounded_outputs(rank: int) -> str:
    model = sharded(made(), "root", mp_policy=MixedPrecisionPolicy(output_dtype=BF16))
    return told(lambda: token_logps(model, ids_of(rank)))


# Layers


def layers(rank: int, head: str, first: str) -> dict[str, Any]:
    """Swapped before or after: the bits of the whole swapped model, and its gradients."""
    theirs, model = made().to(BF16), made().to(BF16)
    swap_linear(theirs)
    if first == "swap":
        swap = swap_linear(model)
        classes = {name: type(layer) for name, layer in sharded(model, head).named_modules()}
    else:
        classes = {name: type(layer) for name, layer in sharded(model, head).named_modules()}
        swap = swap_linear(model)
    assert len(swap.swapped) == 15 and not swap.skipped and isinstance(model.lm_head, DetLinear)

    def loss(model: Any, rank: int) -> Tensor:
        logits = model(ids_of(rank)).logits.float()
        return (logits.log_softmax(-1) * torch.linspace(-1, 1, V)).sum()

    ours = model(ids_of(rank)).logits
    loss(model, rank).backward()
    same = torch.equal(ours, theirs(ids_of(rank)).logits)
    far = distance(gathered(model), mean_gradients(theirs, loss))
    swap.undo()
    plain = not any(isinstance(layer, DetLinear) for layer in model.modules())
    back = plain and (first == "swap" or all(type(x) is classes[n] for n, x in model.named_modules()))
    again = bool(torch.isfinite(model(ids_of(rank)).logits).all())
    return {"bits": same, "gradients": far, "undone": back and again and isinstance(model, FSDPModule)}


# Calls that are not served


def told(call: Any) -> str:
    try:
        call()
    except isobit.ContractError as error:
        return str(error)
    return ""


def refusals(rank: int) -> dict[str, str]:
    model = sharded(made(), "own")
    hidden, ids = torch.zeros(3, D), torch.zeros(3, dtype=torch.int64)
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    spread = distribute_tensor(hidden, mesh, [Replicate()])
    linear = swap_linear(nn.Linear(D, V).to(BF16))._layers[0]
    weight, cut = torch.zeros(V, D), model.lm_head.weight
    own, half, mine = weight[: 32 - 11 * rank].to(BF16), hidden.to(BF16), ids + rank
    group = {"vocab_size": V, "group": dist.group.WORLD}
    fn, classed = {"loss_fn": isobit.losses.dapo}, {"numerics": "lse/8x4/cpu"}
    return {
        "weight": told(lambda: isobit.linear_logp(hidden, cut, ids)),
        "padded": told(lambda: isobit.linear_logp(hidden, cut, ids, padded_vocab=64)),
        "class": told(lambda: isobit.linear_logp(hidden, cut, ids, **classed)),
        "loss of a class": told(lambda: isobit.linear_policy_loss(hidden, cut, ids, **fn, **classed)),
        "other tokens": told(lambda: isobit.linear_logp(half, own, mine, **group)),
        "other states": told(lambda: isobit.linear_logp(half + rank, own, ids, **group)),
        "hidden": told(lambda: isobit.linear_logp(spread, weight, ids)),
        "logits": told(lambda: isobit.logp(spread, ids)),
        "layer": told(lambda: linear(spread.bfloat16())),
        "loss": told(lambda: isobit.linear_policy_loss(hidden, cut, ids, **fn)),
    }  # fmt: skip


def main(rank: int, place: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{place}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    half = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    found: dict[str, Any] = {
        "with the root": logps(rank, "root"), "on its own": logps(rank, "own"),
        "with the norm": logps(rank, "group"),
        "with a root that is sharded between": logps(rank, "root", reshard_after_forward=True),
        "on its own, kept": logps(rank, "own", reshard_after_forward=False),
        "tied, with the root": logps(rank, "root", tied=True),
        "in bf16": logps(rank, "own", steps=1, mp_policy=half),
        "rounded": rounded_outputs(rank), "refusals": refusals(rank),
    }  # fmt: skip
    for head in ("root", "own", "group"):
        for how in ("linear_logp", "loss", "seam"):
            found[f"{how}, {head}"] = own_loop(rank, head, how)
    for first in ("swap", "shard"):
        found |= {f"{first} first, {head}": layers(rank, head, first) for head in ("root", "own")}
    Path(place, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # so that imports, which take the longest, are made once
    with tempfile.TemporaryDirectory() as place:
        ranks = [fork.Process(target=main, args=(rank, place)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"the processes ended with {[process.exitcode for process in ranks]}")
        print(json.dumps([json.loads(Path(place, str(rank)).read_text()) for rank in range(WORLD)]))
