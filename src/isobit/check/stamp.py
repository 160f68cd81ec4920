"""The origin of a result: machine, versions, and the exact source that produced it."""

import datetime
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton

from isobit.check.source_hash import PACKAGE, compiled_backends, kernel_sha, ranks_sha


def stamp(
    device: torch.device, commit: str | None = None, ops: Iterable[str] = (), with_ranks: bool = False
) -> dict[str, Any]:
    """The stamp of every result file. `source_sha` hashes the package's own files, so that a result can be
    matched to its source even without git; `commit` names it there, or ISOBIT_COMMIT in the environment.
    `kernels` hashes the code that determines the numbers of each of these folders of ops, so that other
    changes do not make a result stale; `backends` does it for each backend alone. `with_ranks` adds `ranks`,
    for results that depend on how several ranks compute: hashes of that code, of folders that have such."""
    folders = sorted(set(ops))
    kernels = {folder: kernel_sha(folder) for folder in folders}
    backends = {
        folder: {name: kernel_sha(folder, backend=name) for name in compiled_backends(folder)}
        for folder in folders
    }
    shared = {folder: sha for folder in folders if with_ranks and (sha := ranks_sha(folder)) is not None}
    return {
        "gpu": gpu_name(device),
        "driver": _driver(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or os.environ.get("ISOBIT_COMMIT") or _commit(),
        "source_sha": source_sha(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **({"kernels": kernels, "backends": backends} if folders else {}),
        **({"ranks": shared} if shared else {}),
    }


def why_stale(stamp: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] = ()) -> str | None:
    """Why a result with this stamp is not valid for the current kernels; None if it is. With the `rows` of a
    benchmark only the backends count that it timed: other portable kernels do not change Hopper's times."""
    if "kernels" not in stamp:
        if stamp["source_sha"] == source_sha():
            return None
        return f"it was measured at commit {stamp['commit']}, before results had kernel hashes"
    timed = {row.get("backend") for row in rows if row["impl"].startswith("isobit")}
    changed = [
        folder for folder, sha in stamp["kernels"].items()
        if kernel_sha(folder) != sha and not _unchanged(folder, timed, stamp.get("backends", {}))
    ]  # fmt: skip
    if changed:
        return f"the kernels of {', '.join(changed)} have changed since {stamp['commit']}"
    shared = [folder for folder, sha in stamp.get("ranks", {}).items() if ranks_sha(folder) != sha]
    return f"how ranks compute {', '.join(shared)} has changed since {stamp['commit']}" if shared else None


def _unchanged(folder: str, backends: set[str | None], known: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether all of these backends have the hash that is known of them. False if nothing was timed."""
    hashes = known.get(folder, {})
    return bool(backends) and all(
        name is not None and name in hashes and hashes[name] == kernel_sha(folder, backend=name)
        for name in backends
    )


def gpu_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"none ({device.type})"


def results_folder(device: torch.device) -> str:
    """`h200` for an NVIDIA H200, `cpu` without a GPU: the folder of its results."""
    if device.type != "cuda":
        return device.type
    name = gpu_name(device).lower().replace("nvidia", "").replace("amd", "").replace("geforce", "")
    return "_".join(name.split()) or "cuda"


def source_sha() -> str:
    """SHA-256 over the package's Python and JSON files, by relative path."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(query) or "unknown"


def _commit() -> str:
    """The commit of the checkout that contains the package, with `+` if its files differ from it."""
    commit = _first_line(["git", "-C", str(PACKAGE), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return "unknown"
    changed = _first_line(["git", "-C", str(PACKAGE), "status", "--porcelain", "--", str(PACKAGE)])
    return commit + ("+" if changed else "")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""
