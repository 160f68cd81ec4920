"""The output of `isobit info`: versions, device, where isobit is enabled, and the default backend of each
op; of ops that are named, why the others do not serve."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import triton

import isobit
from isobit.check.laws import small_case
from isobit.check.request import small_args
from isobit.check.source_hash import kernel_sha
from isobit.check.stamp import stamp
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import arch_key, triton_cannot_run
from isobit.frame.op import OPS, Op, public_ops
from isobit.integrations.installed import installed_integrations
from isobit.spec.proof import InputOptions
from isobit.spec.proofs import proof_of

#: torch and Triton with which something was tried: `constraints.txt` has the first pair, published results
#: have the second.
TESTED = {"tests": ("2.13.0", "3.7.1"), "GPUs": ("2.11.0", "3.6.0")}


def tested(torch_version: str, triton_version: str) -> str:
    """Which of the tested pairs these versions are. A build such as `2.13.0+cpu` is a 2.13.0."""
    mine = (torch_version.partition("+")[0], triton_version.partition("+")[0])
    pairs = {what: f"torch {pair[0]} with Triton {pair[1]} ({what})" for what, pair in TESTED.items()}
    for what, pair in TESTED.items():
        if pair == mine:
            return f"this pair: {pairs[what]}"
    return f"not this pair, but {', '.join(pairs.values())}: run isobit check"


def info_lines(device: torch.device, try_them: bool, ops: Sequence[str] = ()) -> Iterator[str]:
    """Yields line by line, because some take a while. `try_them` turns isobit on and off in other
    libraries. Of `ops`, what every backend says of a call; without them, of every op what would serve."""
    if device.type == "meta":
        raise ContractError("device 'meta' holds no values, so no backend runs there: choose cpu or cuda")
    known = {"isobit": isobit.__version__, **stamp(device), "arch": arch_key(device)}
    yield from (f"{key:12s}{value}" for key, value in known.items())
    yield f"{'tested':12s}{tested(torch.__version__, triton.__version__)}"
    yield f"{'triton runs':12s}{triton_cannot_run(device) or f'on {device}'}"
    yield from (f"{name:12s}{state}" for name, state in installed_integrations(probe=try_them).items())
    yield ""
    names = list(ops) or sorted(public_ops())
    width = max(map(len, names)) + 1
    for name in names:
        plain = OPS[name].explain(**small_args(OPS[name], device))
        served = f"{plain.backend} (numerics {plain.numerics})"
        yield f"{name + ':':{width}s} {served:34s} kernels {kernel_sha(OPS[name].folder)}"
        if name in ops:
            yield from _reasons(OPS[name], device)
    if not ops:
        yield ""
        yield "why not another backend: isobit info --op NAME"


def _reasons(op: Op, device: torch.device) -> Iterator[str]:
    """What each backend says of a small call in bf16, and in fp64 if there is one."""
    spec = next(p.spec for p in op.contract.params if p.spec is not None)
    for dtype in (d for d in (torch.bfloat16, torch.float64) if d in spec.dtypes):
        args = proof_of(op).make(replace(small_case(proof_of(op)), dtype=dtype), device, InputOptions())
        yield f"  {dtype_name(dtype)} " + str(op.explain(**args)).replace("\n", "\n  ")
