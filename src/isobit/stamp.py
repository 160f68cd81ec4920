"""Where a result comes from: machine, versions, and the exact source that produced it."""

import ast
import datetime
import hashlib
import platform
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

_PACKAGE = Path(__file__).parent


#: Files of an op's folder that decide its numbers, and parts of the package that they may rest on. What
#: proves or times an op decides nothing; the frame (op.py, contract.py) decides host times and no number.
_DECIDES = ("op.py", "reference.py", "model.py", "kernels_*.py")
_FOLLOWED = ("blocks", "numerics", "ops")
_DECIDES_NOTHING = ("proof", "rivals", "chart")


def stamp(device: torch.device, commit: str | None = None, ops: Iterable[str] = ()) -> dict[str, Any]:
    """The stamp of every result file. `source_sha` hashes the package's own files, so that a result can be
    matched to its source also where there is no git; `commit` names it there. `kernels` hashes what decides
    the numbers of each of these folders of ops, so that a change elsewhere makes no number stale."""
    folders = sorted(set(ops))
    return {
        "gpu": gpu_name(device),
        "driver": _driver(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or _commit(),
        "source_sha": source_sha(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **({"kernels": {folder: kernel_sha(folder) for folder in folders}} if folders else {}),
    }


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
    for path in sorted(_PACKAGE.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kernel_sha(folder: str, package: Path = _PACKAGE) -> str | None:
    """SHA-256 over the files that decide the numbers of the ops in a folder: its own, and those of blocks,
    numerics and other ops that they import. None if there is no such folder."""
    files = decisive_files(folder, package)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16] if files else None


def decisive_files(folder: str, package: Path = _PACKAGE) -> list[Path]:
    """What `kernel_sha` hashes, found by reading imports: nothing is imported, so it needs no GPU. An op that
    another is made of brings its whole folder, because it imports its kernels only when they are called."""
    pending = _deciding(package / "ops" / folder)
    found: set[Path] = set()
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imported(path, package)
            pending += _deciding(path.parent) if path.name == "op.py" else []
    return sorted(found)


def _deciding(folder: Path) -> list[Path]:
    return [path for name in _DECIDES for path in folder.glob(name)]


def _imported(path: Path, package: Path) -> Iterator[Path]:
    """Files of the package that a file imports anywhere in it, as far as they may decide a number."""
    for name in _imported_names(path.read_text()):
        root, *parts = name.split(".")
        if root != package.name or not parts or parts[0] not in _FOLLOWED:
            continue
        if parts[-1].startswith(_DECIDES_NOTHING):
            continue
        place = package.joinpath(*parts)
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


@cache
def _imported_names(source: str) -> set[str]:
    """Parsed once: the ops of a report share most of their files."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(query) or "unknown"


def _commit() -> str:
    """The commit of the checkout the package lies in, with `+` when its files differ from it."""
    commit = _first_line(["git", "-C", str(_PACKAGE), "rev-parse", "--short=12", "HEAD"])
    if not commit:
        return "unknown"
    changed = _first_line(["git", "-C", str(_PACKAGE), "status", "--porcelain", "--", str(_PACKAGE)])
    return commit + ("+" if changed else "")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""
