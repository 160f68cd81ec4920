"""Write the kernels as a repository of the Hugging Face Hub (make hub).

    python tools/hub.py build/hub

`kernels.get_kernel` imports such a repository under a name of its own, the `id` of its metadata.json, so that
several versions, and an installed isobit, can be in one process. A module of it must therefore not import
`isobit.frame.op` but `...frame.op`, and a path in a string must begin with the name that the package has. The
namespace of its ops is that name, too (`isobit.frame.call_plan.NAMESPACE`).

There are ops, layers and losses in the repository. Proofs, rivals, the command, `drift` and the integrations
are only in the package; a function that needs them is left out. What this program does not understand is an
error.
"""

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "isobit"
HOME = "https://github.com/isobit/isobit"

#: Folders and files of the package that are in the repository, and names that are not, at any depth.
FOLDERS = ("frame", "kernels", "layers", "losses", "numerics", "ops", "ranks")
FILES = ("__init__.py", "nn.py", "parallel.py", "py.typed")
LEFT_OUT = {"__pycache__", "proof", "proof.py", "rivals", "rivals.py"}

#: Build variants, and the architectures that each declares. Triton compiles for the GPU that it finds.
VARIANTS: dict[str, dict[str, object]] = {
    "torch-cuda": {"type": "cuda", "archs": ["8.0+PTX", "9.0a"]},
    "torch-cpu": {"type": "cpu"},
}

CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
---

# isobit

GPU kernels for RL post-training whose bits do not depend on the batch. This repository is generated from
[isobit]({home}) {version}; that is where the documentation and the source are.

```python
import torch
from kernels import get_kernel

isobit = get_kernel("isobit/isobit", version={major}, trust_remote_code=True)
logp = isobit.logp(torch.randn(4, 1000), torch.tensor([1, 2, 3, 4]))
```

It has the ops, layers and losses of the package, and needs Triton and numpy next to torch. The integrations
with TRL, verl, flash-linear-attention and transformers, the measurement of drift and the `isobit` command are
only in the package.
"""

#: Older versions of `kernels` look for a folder with the name of the kernel.
SHIM = '''"""For versions of `kernels` that look for a folder with the name of the kernel: it is one up."""

import importlib.util
import sys
from pathlib import Path

_ID = "{id}"

if _ID not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_ID, Path(__file__).parent.parent / "__init__.py")
    sys.modules[_ID] = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(sys.modules[_ID])
    except BaseException:
        del sys.modules[_ID]
        raise

__all__ = sys.modules[_ID].__all__
globals().update({{name: getattr(sys.modules[_ID], name) for name in __all__}})
'''


class HubError(Exception):
    """A module that cannot be moved. The message is for people."""


#: A piece of a line, (line, first byte, last byte), and what replaces it.
Edit = tuple[int, int, int, str]


def sources(package: Path = PACKAGE) -> dict[Path, str]:
    """The files of the repository by their path in the package, as they are there."""
    inside = [path for folder in FOLDERS for path in sorted((package / folder).rglob("*")) if path.is_file()]
    files = [path.relative_to(package) for path in [*(package / name for name in FILES), *inside]]
    return {path: (package / path).read_text() for path in files if not LEFT_OUT & set(path.parts)}


def module_name(path: Path) -> str:
    """`isobit.frame.op` for `frame/op.py`, `isobit.frame` for `frame/__init__.py`."""
    parts = path.with_suffix("").parts
    return ".".join(("isobit", *(parts[:-1] if parts[-1] == "__init__" else parts)))


# One module


def moved(path: Path, source: str, modules: set[str]) -> str:
    """A module of the package as it is in the repository, which has these modules."""
    text = without_what_is_left_out(source)
    tree = ast.parse(text)
    docstrings = {id(node) for node in docstrings_of(tree)}
    edits: list[Edit] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(each.name.split(".")[0] == "isobit" for each in node.names):
            raise HubError(
                f"{path}:{node.lineno}: write `from isobit import ...`, which can be made relative"
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "isobit":
            edits.append(relative_import(path, text, node, modules))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops.isobit":
            raise HubError(f"{path}:{node.lineno}: the namespace of the ops is NAMESPACE")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            edits += path_in_a_string(path, text, node, node.value, modules)
    return edited(text, edits)


def docstrings_of(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first.value


def relative_import(path: Path, text: str, node: ast.ImportFrom, modules: set[str]) -> Edit:
    """`from isobit.frame.op import op` in `ops/logp/op.py` becomes `from ...frame.op import op`."""
    assert node.module is not None and node.level == 0
    known = node.module in modules
    if not known or (node.module == "isobit" and any(f"isobit.{n.name}" not in modules for n in node.names)):
        raise HubError(f"{path}:{node.lineno}: {ast.unparse(node)} is not in the repository")
    line = text.splitlines()[node.lineno - 1].encode()
    start = line.index(node.module.encode(), node.col_offset)
    dots = "." * (len(path.parent.parts) + 1)
    return node.lineno, start, start + len(node.module), dots + node.module.removeprefix("isobit").lstrip(".")


def path_in_a_string(
    path: Path, text: str, node: ast.Constant, value: str, modules: set[str]
) -> Iterator[Edit]:
    """`"isobit.numerics.mma"` becomes an expression that begins with the name of the package."""
    if value.startswith("isobit::") or value == "isobit":
        raise HubError(f"{path}:{node.lineno}: {value!r}: the namespace of the ops is NAMESPACE")
    if not re.match(rf"isobit\.({'|'.join(FOLDERS)})\b", value) or " " in value:
        return
    assert node.end_col_offset is not None
    line = text.splitlines()[node.lineno - 1].encode()
    written = line[node.col_offset : node.end_col_offset].decode()
    if value.partition(":")[0] not in modules or written != f'"{value}"':
        raise HubError(f"{path}:{node.lineno}: {value!r}: a path that is not a plain string")
    rest = value.removeprefix("isobit")
    yield node.lineno, node.col_offset, node.end_col_offset, f'(__name__.partition(".")[0] + "{rest}")'


def edited(text: str, edits: list[Edit]) -> str:
    lines = text.splitlines(keepends=True)
    for line, start, end, new in sorted(edits, reverse=True):
        old = lines[line - 1].encode()
        lines[line - 1] = (old[:start] + new.encode() + old[end:]).decode()
    return "".join(lines)


def without_what_is_left_out(text: str) -> str:
    """Without functions and type-checking imports that need a part of the package that is left out, and
    without their names in `__all__`."""
    parts = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - set(FOLDERS) - {"__pycache__"}
    tree, gone, lines = ast.parse(text), set(parts), text.splitlines(keepends=True)
    for node in tree.body:
        removable = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if removable and needs(node, parts):
            gone |= {node.name} if isinstance(node, ast.FunctionDef) else imported_from(node, parts)
            assert node.end_lineno is not None
            for n in range(node.lineno - 1, node.end_lineno):
                lines[n] = ""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            kept = [name for name in names if name not in gone]
            if kept != names:
                assert node.end_lineno is not None
                lines[node.lineno - 1 : node.end_lineno] = [f"__all__ = {json.dumps(kept)}\n"]
            break
    return "".join(lines)


def imported_from(node: ast.AST, parts: set[str]) -> set[str]:
    """The names that it imports from these parts of the package: they are loaded at their first use."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.ImportFrom) and each.module]
    inside = [each for each in found if parts & set(str(each.module).split("."))]
    return {name.asname or name.name for each in inside for name in each.names}


def needs(node: ast.AST, parts: set[str]) -> bool:
    """Whether it imports one of these parts of the package, or names one in a string that is a path."""
    paths: list[str] = []
    for each in ast.walk(node):
        if isinstance(each, ast.ImportFrom) and each.module:
            paths += [each.module, *(f"{each.module}.{name.name}" for name in each.names)]
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            paths.append(each.value)
    return any(re.fullmatch(rf"isobit\.({'|'.join(parts)})(\.\w+)*", path) for path in paths)


# The repository


def identity(files: dict[str, bytes], backend: str) -> str:
    """The id of a build variant. It is made of the contents, so that no two versions have the same."""
    whole = hashlib.sha256(b"".join(name.encode() + b"\0" + files[name] + b"\0" for name in sorted(files)))
    return f"_isobit_{backend}_{whole.hexdigest()[:10]}"


def metadata(files: dict[str, bytes], name: str, version: str, backend: dict[str, object]) -> bytes:
    """metadata.json of a build variant, as `kernels` reads it."""
    digests = {file: base64.b64encode(hashlib.sha256(data).digest()).decode() for file, data in files.items()}
    fields = {
        "name": "isobit",
        "id": name,
        "version": int(version.partition(".")[0]),
        "license": "Apache-2.0",
        "upstream": HOME,
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": dict(sorted(digests.items()))},
    }
    return (json.dumps(fields, indent=2) + "\n").encode()


def write_hub(out: Path, package: Path = PACKAGE) -> dict[str, str]:
    """Write the repository; returns the id of each build variant."""
    source = sources(package)
    modules = {module_name(path) for path in source if path.suffix == ".py"}
    files = {
        str(path): (moved(path, text, modules) if path.suffix == ".py" else text).encode()
        for path, text in source.items()
    }
    version = re.findall(r'^__version__ = "(.+)"$', source[Path("__init__.py")], re.M)[0]
    identities = {}
    shutil.rmtree(out, ignore_errors=True)
    for variant, backend in VARIANTS.items():
        name = identities[variant] = identity(files, str(backend["type"]))
        inside = files | {"isobit/__init__.py": SHIM.format(id=name).encode()}
        inside["metadata.json"] = metadata(inside, name, version, backend)
        for file, data in inside.items():
            place = out / "build" / variant / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
    card = CARD.format(home=HOME, version=version, major=int(version.partition(".")[0]))
    (out / "README.md").write_text(card)
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    return identities


def main() -> int:
    try:
        identities = write_hub(Path(sys.argv[1]))
    except HubError as error:
        print(error, file=sys.stderr)
        return 1
    for variant, identity in identities.items():
        print(f"{sys.argv[1]}/build/{variant}: {identity}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
