"""Which code decides the numbers of an op, and a hash of it.

A measurement speaks for the code that ran, so it is stale when that code has changed, and not when a comment
has, or a name, or a function that the op does not use. What an op uses is found by reading: its own files in
whole, and of files that it shares with others the definitions whose names it uses, and those that these use.
Nothing is imported, so it needs no GPU.

Names that this code itself defines count by their first places: a renamed variable leaves the hash as it is.
Names of others (`gl.load`, `torch.empty`) count as they are.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent

#: Files of an op's folder that decide its numbers, and parts of the package that they may rest on. What
#: proves or times an op decides nothing; the frame (op.py, contract.py) decides host times and no number.
_DECIDES = ("op.py", "reference.py", "model.py", "kernels_*.py")
_FOLLOWED = ("blocks", "numerics", "ops")
_DECIDES_NOTHING = ("proof", "rivals", "chart")

#: A file, and which of its statements.
Used = dict[Path, set[int]]


def kernel_sha(folder: str, package: Path = PACKAGE) -> str | None:
    """SHA-256 over what decides the numbers of the ops in a folder, without comments, docstrings, layout and
    the names of what is defined there. None if there is no such folder."""
    used = sorted(decisive_code(folder, package).items())
    files = [(path.relative_to(package).as_posix(), path.read_text(), tuple(sorted(i))) for path, i in used]
    return _digest(tuple(files)) if files else None


@lru_cache(maxsize=256)
def _digest(files: tuple[tuple[str, str, tuple[int, ...]], ...]) -> str:
    """Of some statements of some files."""
    chosen = [(path, [_parts_of(source)[i] for i in numbers]) for path, source, numbers in files]
    own = frozenset[str]().union(*(part.defined for _, parts in chosen for part in parts))
    places: dict[str, str] = {}

    def written(name: str) -> str:
        return places.setdefault(name, f"own {len(places)}") if name in own else name

    digest = hashlib.sha256()
    for path, parts in chosen:
        digest.update(path.encode())
        for part in parts:
            digest.update(f"\n{_form(part.node, written)}".encode())
    return digest.hexdigest()[:16]


def decisive_code(folder: str, package: Path = PACKAGE) -> Used:
    """What `kernel_sha` hashes. An op that another is made of brings its whole folder, because it imports its
    kernels only when they are called."""
    found: Used = {}
    pending: list[tuple[Path, str | None]] = [(path, None) for path in _deciding(package / "ops" / folder)]
    seen = set(pending)
    while pending:
        path, name = pending.pop()
        parts, mine = _parts_of(path.read_text()), found.setdefault(path, set())
        wanted = {i for i, part in enumerate(parts) if name is None or name in part.names or part.acts}
        new: list[tuple[Path, str | None]] = []
        if path.name == "op.py" and path.parent.parent == package / "ops":
            new += [(each, None) for each in _deciding(path.parent)]
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


def _deciding(folder: Path) -> list[Path]:
    return [path for name in _DECIDES for path in folder.glob(name)]


def _resolved(target: tuple[str, str], package: Path) -> Iterator[tuple[Path, str | None]]:
    """Where a name of a module is, as far as it may decide a number: in its file, or a file of its own."""
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
    """A statement of a module, or one name of an import: what it is, the names that it defines in the module
    and anywhere (arguments, variables, fields), those that it uses, and what it imports, (module, name). One
    that `acts` defines nothing: it is there for what it does."""

    node: ast.AST
    names: frozenset[str]
    defined: frozenset[str]
    uses: frozenset[str]
    imports: frozenset[tuple[str, str]]
    acts: bool


@cache
def _parts_of(source: str) -> list[_Part]:
    """Parsed once: the ops of a report share most of their files."""
    parts = []
    for node in _without_docstring(ast.parse(source).body):
        imported = list(_imports_in(node))
        if isinstance(node, ast.Import | ast.ImportFrom):  # each name counts where it is used
            none = frozenset[str]()
            for name, (module, what) in imported:
                alone = ast.ImportFrom(module, [ast.alias(what, name)], 0)
                parts.append(_Part(alone, frozenset([name]), none, none, frozenset([(module, what)]), False))
            continue
        names = frozenset(_defined_by(node))
        uses = frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name)) - names
        defined = frozenset(_defined_in(node))
        parts.append(_Part(node, names, defined, uses, frozenset(t for _, t in imported), not names))
    return parts


def _defined_in(node: ast.AST) -> Iterator[str]:
    """Names that a statement defines, however deep: functions, classes, arguments, variables, fields."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.arg):
            yield each.arg
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr


def _imports_in(node: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that imports in a statement, however deep, make known, each with (module, name) of what it
    is; the name is empty for a module."""
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], (alias.name, "")) for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            yield from ((alias.asname or alias.name, (each.module, alias.name)) for alias in each.names)


def _defined_by(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines there, those inside of an `if` or a `with` among them."""
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


#: Where a node of the tree has a name.
_NAMED = {"id", "arg", "attr", "name", "asname"}


def _form(node: Any, written: Callable[[str], str]) -> str:
    """A tree as text, names as they are `written`: no lines and columns, no docstrings, and nothing that is
    empty, which other versions of Python write in other ways."""
    if isinstance(node, list):
        return f"[{','.join(_form(each, written) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        fields["body"] = _without_docstring(fields["body"])
    named = {k: written(v) if k in _NAMED and isinstance(v, str) else v for k, v in fields.items()}
    inside = (f"{k}={_form(v, written)}" for k, v in named.items() if v not in (None, []))
    return f"{type(node).__name__}({','.join(inside)})"
