"""What several processes on a CPU share over gloo, and the same on one: a program.

    python tests/ranks_on_cpus.py

It prints JSON: by number of ranks and rank, what each case found. True is: the bits of one rank. Imports take
the longest, so all processes are forked from one that has made them.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import isobit
import ranks_layers
import ranks_models
import ranks_refusals
import ranks_vocabulary
from isobit.parallel import RanksError, row_linear
from ranks_layers import K, N, drawn
from ranks_refusals import told

#: What a rank that has died is in the middle of.
DEATHS = ("row_linear", "linear_logp")


def on_one(place: str) -> None:
    """What ranks are compared with."""
    torch.save(ranks_vocabulary.on_one(), f"{place}/vocabulary")
    ranks_models.on_one(place)


def on_ranks(rank: int, ranks: int, place: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    found: dict[str, Any] = ranks_layers.found(rank, mesh)
    found |= ranks_vocabulary.found(rank, mesh, torch.load(f"{place}/vocabulary"))
    found |= ranks_models.found(rank, mesh, place)
    found["refusals"] = ranks_refusals.found(rank, mesh)
    # Last: a process that has compiled is slower.
    return found | (ranks_layers.compiled(rank, mesh) if ranks == 2 else {})


def deaths(rank: int, ranks: int, when: str) -> dict[str, Any]:
    """The last rank ends when others wait for it: before a call, or between a forward and its backward. They
    must not wait for the time-out."""
    group = dist.group.WORLD
    part = drawn(1, 300, K).chunk(ranks, 1)[rank], drawn(2, N, K).chunk(ranks, 1)[rank]
    hidden, ids = drawn(1, 300, K).requires_grad_(), torch.arange(300) % N
    logp = isobit.linear_logp(hidden, drawn(2, 64, K).chunk(ranks)[rank], ids, group=group)
    row_linear(*part, group=group)
    if rank == ranks - 1:
        os._exit(0)
    begun = time.monotonic()
    calls = {"row_linear": lambda: row_linear(*part, group=group), "linear_logp": logp.sum().backward}
    said = told(calls[when], RanksError)
    return {"said": said, "seconds": time.monotonic() - begun}


def main(rank: int, ranks: int, place: str, death: str | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if ranks == 1:
        on_one(place)
        return
    store = dist.FileStore(f"{place}/store of {ranks} {death}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    found = on_ranks(rank, ranks, place) if death is None else deaths(rank, ranks, death)
    Path(place, str(rank)).write_text(json.dumps(found))
    if death is not None:
        os._exit(0)  # an orderly end would wait for the rank that is no more
    dist.destroy_process_group()


def on(place: str, ranks: int, death: str | None = None) -> list[Any]:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=main, args=(rank, ranks, place, death)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"the processes ended with {[process.exitcode for process in processes]}")
    left = range(ranks - 1) if death is not None else range(ranks)
    return [json.loads(Path(place, str(rank)).read_text()) for rank in left] if ranks > 1 else []


if __name__ == "__main__":
    # What FSDP2 and a compiler import when they are first used.
    torch.compile(torch.nn.Identity(), backend="eager")(torch.ones(1))
    with tempfile.TemporaryDirectory() as place:
        on(place, 1)
        found = {"2": on(place, 2), "4": on(place, 4)}
        print(json.dumps(found | {f"a death in {when}": on(place, 4, when) for when in DEATHS}))
