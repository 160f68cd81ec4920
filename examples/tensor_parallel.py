"""A small MLP whose layers several processes share, and the same one on a single rank: equal bits.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import isobit
from isobit.parallel import DetColwise, DetRowwise

dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 96), torch.nn.SiLU(), torch.nn.Linear(96, 64)
    return torch.nn.Sequential(*layers).bfloat16()


x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
model = parallelize_module(made(), mesh, {"0": DetColwise(), "2": DetRowwise()})
y = model(x)
y.sum().backward()

one, given = made(), x.detach().clone().requires_grad_()  # the same on one rank
isobit.nn.swap_linear(one, numerics="tree8")
alone = one(given)
alone.sum().backward()
print(f"rank {dist.get_rank()}: {torch.equal(y, alone)}, {torch.equal(x.grad, given.grad)}")
dist.destroy_process_group()
