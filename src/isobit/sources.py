"""Which code determines the numbers of an op, and a hash of it.

A measurement is stale when the code that ran has changed, but not when only a comment, a name, or an unused
function has. The code is found by parsing: the op's own files completely, and of shared files the definitions
whose names it uses, and those that these use. Nothing is imported, so it needs no GPU.

Names that are defined in this code count by the order of their first occurrence, so renaming a variable,
field or function does not change the hash. Other names (`gl.load`, `torch.empty`) count as they are, and so
do the names of keyword arguments.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent

#: Files of an op's folder that determine its numbers, and parts of the package that they may use. Proofs and
#: rivals do not; the frame (op.py, contract.py) and the path from a launcher to the driver (blocks/launch.py
#: and what it uses) affect host times but no number.
_DECIDES = ("op.py", "reference.py", "model.py", "kernels_*.py")
_FOLLOWED = ("blocks", "numerics", "ops")
_DECIDES_NOTHING = ("proof", "rivals", "chart", "launch", "entry", "context", "replay")

#: A file, and which of its statements.
Used = dict[Path, set[int]]


def kernel_sha(folder: str, package: Path = PACKAGE, backend: str | None = None) -> str | None:
    """SHA-256 over the code that determines the numbers of the ops in a folder, without comments, docstrings,
    layout and the names of what is defined there; with `backend`, without the kernels of other backends. None
    if there is no such folder."""
    used = sorted(decisive_code(folder, package, backend).items())
    files = [(path.relative_to(package).as_posix(), path.read_text(), tuple(sorted(i))) for path, i in used]
    return _digest(tuple(files)) if files else None


@lru_cache(maxsize=256)
def _digest(files: tuple[tuple[str, str, tuple[int, ...]], ...]) -> str:
    """The hash of some statements of some files."""
    chosen = [(path, [_parts_of(source)[i].node for i in numbers]) for path, source, numbers in files]
    nodes = [node for _, some in chosen for node in some]
    members = frozenset[str]().union(*map(_members, nodes))
    text = _Text(frozenset(_defined(nodes)), members)
    digest = hashlib.sha256()
    for path, some in chosen:
        digest.update(path.encode())
        for node in some:
            digest.update(f"\n{text.of(node)}".encode())
    return digest.hexdigest()[:16]


def compiled_backends(folder: str, package: Path = PACKAGE) -> list[str]:
    """The backends that have kernels in a folder: hopper for kernels_hopper.py and kernels_hopper_bwd.py."""
    return sorted({path.stem.split("_")[1] for path in (package / "ops" / folder).glob("kernels_*.py")})


def decisive_code(folder: str, package: Path = PACKAGE, backend: str | None = None) -> Used:
    """The code that `kernel_sha` hashes. An op that uses another op includes its whole folder, because that
    op imports its kernels only when they are called."""
    own = package / "ops" / folder
    found: Used = {}
    parts_of: dict[Path, list[_Part]] = {}  # each file is read once, and asked for many names
    pending: list[tuple[Path, str | None]] = [(path, None) for path in _deciding(own, backend)]
    seen = set(pending)
    while pending:
        path, name = pending.pop()
        new: list[tuple[Path, str | None]] = []
        if path not in parts_of:
            parts_of[path] = _parts_of(path.read_text())
            if path.name == "op.py" and path.parent.parent == package / "ops":
                only = backend if path.parent == own else None
                new += [(each, None) for each in _deciding(path.parent, only)]
        parts, mine = parts_of[path], found.setdefault(path, set())
        wanted = {i for i, part in enumerate(parts) if name is None or name in part.names or part.acts}
        for i in wanted - mine:
            mine.add(i)
            new += [(path, used) for used in parts[i].uses]
            for target in parts[i].imports:
                new += _resolved(target, package)
        for each in new:
            if each not in seen:
                seen.add(each)
                pending.append(each)
    return {path: chosen for path, chosen in found.items() if chosen}


def _deciding(folder: Path, backend: str | None) -> list[Path]:
    names = (
        f"kernels_{backend}*.py" if backend and name.startswith("kernels_") else name for name in _DECIDES
    )
    return [path for name in names for path in folder.glob(name)]


def _resolved(target: tuple[str, str], package: Path) -> Iterator[tuple[Path, str | None]]:
    """The file in which a name of a module is defined, if it may affect a number: the module's, or a file of
    that name."""
    module, name = target
    root, *place = module.split(".")
    if root != package.name:
        return
    own_file = [([*place, name], None)] if name else []
    for parts, wanted in (*own_file, (place, name or None)):
        if not parts or parts[0] not in _FOLLOWED or parts[-1].startswith(_DECIDES_NOTHING):
            continue
        there = package.joinpath(*parts)
        for path in (there.with_suffix(".py"), there / "__init__.py"):
            if path.is_file():
                yield path, wanted


@dataclass(frozen=True)
class _Part:
    """A statement of a module, or one name of an import: its node, the names it defines, those it uses, and
    what it imports as (module, name). A statement that `acts` defines nothing and is executed for its
    effect."""

    node: ast.stmt
    names: frozenset[str]
    uses: frozenset[str]
    imports: frozenset[tuple[str, str]]
    acts: bool


@cache
def _parts_of(source: str) -> list[_Part]:
    """Cached: the ops of a report share most of their files."""
    parts = []
    for node in _without_docstring(ast.parse(source).body):
        imported = list(_imports_in(node))
        if isinstance(node, ast.Import | ast.ImportFrom):  # each name counts only where it is used
            none = frozenset[str]()
            for name, (module, what) in imported:
                alone = ast.ImportFrom(module, [ast.alias(what, name)], 0)
                parts.append(_Part(alone, frozenset([name]), none, frozenset([(module, what)]), False))
            continue
        names = frozenset(_defined_by(node))
        uses = frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name)) - names
        parts.append(_Part(node, names, uses, frozenset(t for _, t in imported), not names))
    return parts


def _imports_in(node: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that imports in a statement define, at any depth, each with (module, name) of what it is; the
    name is empty for a module."""
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], (alias.name, "")) for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            yield from ((alias.asname or alias.name, (each.module, alias.name)) for alias in each.names)


def _defined_by(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines, including those inside of an `if` or a `with`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _defined_by(child)  # type: ignore[arg-type]


def _without_docstring(body: list[Any]) -> list[Any]:
    return body[1:] if body and isinstance(_constant_of(body[0]), str) else body


def _constant_of(node: ast.stmt) -> Any:
    return node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None


# Code as text


def _defined(nodes: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements of modules define there."""
    for node in nodes:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            yield from _defined_by(node)


@cache
def _members(node: ast.stmt) -> frozenset[str]:
    """Fields and methods of classes, and what functions store in attributes. Found once, as the names of
    variables are: several ops use most functions."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.ClassDef):
            found.update(name for inner in each.body for name in _defined_by(inner))
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found.add(each.attr)
    return frozenset(found)


@cache
def _variables(function: ast.AST) -> frozenset[str]:
    """Arguments and variables of a function and of functions inside of it, and the names of these."""
    found = set()
    for each in ast.walk(function):
        if isinstance(each, ast.arg):
            found.add(each.arg)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.ClassDef) and each is not function:
            found.add(each.name)
    return frozenset(found)


class _Text:
    """Syntax trees as text: no positions, no docstrings, and no empty fields, which differ between versions
    of Python. Names that are defined here become numbers: those of modules and classes by their first
    occurrence in the whole text, variables by that in their function."""

    def __init__(self, modules: frozenset[str], members: frozenset[str]) -> None:
        self._modules, self._members = modules, members
        self._numbers: dict[tuple[str, str], int] = {}
        self._local: dict[str, int] = {}
        self._variables: frozenset[str] | None = None  # of the enclosing function
        self._in_class = False

    def of(self, node: Any) -> str:
        if isinstance(node, list):
            return f"[{','.join(map(self.of, node))}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if not node._fields:  # a third of them: Load(), Add()
            return f"{type(node).__name__}()"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self._variables is None:
            return self._function(node)
        if isinstance(node, ast.ClassDef) and self._variables is None:
            return self._class(node)
        return self._plain(node, self._fields(node))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        fields = self._fields(node)  # its own name is not one of its variables
        before = self._in_class, self._local, self._variables
        self._in_class, self._local, self._variables = False, {}, _variables(node)
        found = self._plain(node, fields)
        self._in_class, self._local, self._variables = before
        return found

    def _class(self, node: ast.ClassDef) -> str:
        fields = self._fields(node)
        self._in_class = True
        found = self._plain(node, fields)
        self._in_class = False
        return found

    def _plain(self, node: ast.AST, fields: dict[str, Any]) -> str:
        inside = (f"{k}={self.of(v)}" for k, v in fields.items() if v not in (None, []))
        return f"{type(node).__name__}({','.join(inside)})"

    def _fields(self, node: ast.AST) -> dict[str, Any]:
        fields = dict(ast.iter_fields(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            fields |= {"name": self._name(node.name), "body": _without_docstring(fields["body"])}
        elif isinstance(node, ast.Name):
            fields["id"] = self._name(node.id)
        elif isinstance(node, ast.arg):
            fields["arg"] = self._name(node.arg)
        elif isinstance(node, ast.alias):
            fields |= {"name": self._name(node.name), "asname": self._name(node.asname or "")}
        elif isinstance(node, ast.Attribute) and node.attr in self._members:
            fields["attr"] = self._number("member", node.attr)
        return fields

    def _name(self, name: str) -> str:
        if self._variables is not None and name in self._variables:
            return f"variable {self._local.setdefault(name, len(self._local))}"
        if self._in_class and name in self._members:
            return self._number("member", name)
        return self._number("name", name) if name in self._modules else name

    def _number(self, kind: str, name: str) -> str:
        return f"{kind} {self._numbers.setdefault((kind, name), len(self._numbers))}"
