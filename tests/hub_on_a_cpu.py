"""The repository for the Hugging Face Hub, loaded by `kernels` next to the package: a program of test_hub.py.

    TRITON_INTERPRET=1 PYTHONPATH=src:.parity/hub python tests/hub_on_a_cpu.py REPOSITORY

Prints, as JSON, what was loaded and which ops gave other bits than those of the package.
"""

import importlib.util
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import kernels
import torch
from kernels._rust import Digest, DigestAlgorithm, Metadata
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def tensors(results: Any) -> list[Tensor]:
    return [r for r in (results if isinstance(results, tuple) else (results,)) if isinstance(r, Tensor)]


#: Functions over ops.
OVER_OPS = ("linear_policy_loss", "gated_delta_rule_step")


def call(op: Any, args: dict[str, Any], **controls: Any) -> list[Tensor]:
    """Results of an op, and the gradients of its differentiable arguments."""
    given = {
        name: v.detach().clone().requires_grad_(name in op.differentiable) if isinstance(v, Tensor) else v
        for name, v in args.items()
    }
    run = op.function if op.name in OVER_OPS else op
    if "state" in given and not isinstance(given["state"], Tensor):  # of the class of this op's own package
        own = import_module(op.function.__module__.rpartition(".")[0] + ".state").DeltaState
        given["state"] = own.from_tensors({n: t.clone() for n, t in given["state"].tensors().items()})
    results = tensors(run(**given, **controls))
    if op.differentiable:
        sum(r.double().sum() for r in results if r.requires_grad).backward()
    return [*results, *(given[name].grad for name in op.differentiable if given.get(name) is not None)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    equal = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True)]
    return bool(equal) and all(equal)


def main() -> None:
    kernel = kernels.get_local_kernel(Path(sys.argv[1]))
    said: dict[str, Any] = {"id": kernel.__name__, "alone": "isobit" not in sys.modules}
    place = Path(str(kernel.__file__)).parent
    said["variant"] = place.name
    for variant in place.parent.iterdir():  # raises an error if a file is missing, changed or unknown
        actual = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
        Metadata.read_from_file(variant / "metadata.json").digest.validate(actual)
    for file in sorted(place.rglob("*.py")):
        path = file.relative_to(place).with_suffix("").parts
        path = path[:-1] if path[-1] == "__init__" else path
        if path != ("isobit",):
            import_module(".".join((kernel.__name__, *path)))
    said["still_alone"] = "isobit" not in sys.modules

    import isobit
    from isobit.check.request import small_args
    from isobit.frame.op import public_ops

    said["lacks"] = sorted(set(isobit.__all__) - set(kernel.__all__))
    said["more"] = sorted(set(kernel.__all__) - set(isobit.__all__))
    said["nn_lacks"] = sorted(set(isobit.nn.__all__) - set(kernel.nn.__all__))
    said["missing"] = [name for name in kernel.__all__ if not hasattr(kernel, name)]
    said["compared"], said["differ"] = [], []
    torch.manual_seed(0)
    for name, op in public_ops().items():
        args = small_args(op, torch.device("cpu"))
        ways: list[dict[str, Any]] = [{}]
        # Its kernels in Triton's interpreter. They are named by a path in a string.
        ways += [{"backend": "triton"}] if name == "linear_logp" else []
        for controls in ways:
            assert kernel.OPS[name] is not op
            said["compared"].append(name)
            if not same(call(kernel.OPS[name], args, **controls), call(op, args, **controls)):
                said["differ"].append(f"{name} {controls}")
    namespaces = {getattr(op.torch_op, "namespace", None) for op in kernel.OPS.values() if "_bwd" in op.name}
    said["namespaces"] = sorted(map(str, namespaces))

    with FakeTensorMode() as mode:  # as torch.compile traces it
        x, ids = mode.from_tensor(torch.randn(3, 9)), mode.from_tensor(torch.tensor([1, 2, 3]))
        said["traced"] = [list(kernel.logp(x, ids).shape), list(isobit.logp(x, ids).shape)]

    # As older versions load it: by a file in a folder with its name, under a name that they choose.
    spec = importlib.util.spec_from_file_location("chosen", place / "isobit" / "__init__.py")
    assert spec is not None and spec.loader is not None
    older = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older)
    said["older"] = older.logp is kernel.logp and older.__all__ == kernel.__all__
    print(json.dumps(said))


main()
