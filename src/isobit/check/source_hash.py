"""Which code determines the numbers of an op, and a hash of it.

A measurement is stale when the code that ran has changed, but not when a comment, a name, an unused function
or the place of a function has. The code is found by parsing: the op's own files completely, and of shared
files the definitions whose names it uses, and those that these use. Nothing is imported, so it needs no GPU.

Names that are defined in this code, and the files they are in, do not count. What counts is the graph: each
definition is a text in which such names are references. The hash of a definition begins as that of its text
without references, and is refined in rounds: with the hashes of what it refers to. Fields and parameters are
refined by where they occur. So to swap two fields in one place changes the hash, to rename one does not.
Other names (`gl.load`, `torch.empty`) count as they are.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent

#: Parts of the package that an op's files may use. The frame affects host times but no number.
_FOLLOWED = ("kernels", "numerics", "ops", "ranks")
#: Files that determine no number: in an op's folder, and what asks whether ranks make the same call. All
#: other files of a folder count, whoever imports them: many are imported at the first call, by a path in a
#: string.
_DECIDES_NOTHING = ("proof", "rivals", "__init__", "agreement")

#: Enough for a change to reach everything that depends on it through this many definitions.
_ROUNDS = 12

#: A file, and which of its statements.
Used = dict[Path, set[int]]
#: A reference: ("name", a name of the module), ("word", a field or parameter of any class or function), or
#: ("member", "base.attribute"), where the base may be an imported module.
Ref = tuple[str, str]


@dataclass(frozen=True)
class _Tree:
    """The package as it is now: what is found out about it holds for as long as no file of it changes."""

    package: Path
    content: str
    files: frozenset[Path] = field(compare=False)


def _tree(package: Path) -> _Tree:
    paths = sorted(path for name in _FOLLOWED for path in (package / name).rglob("*.py"))
    content = hashlib.sha256()
    for path in paths:
        source = path.read_bytes()
        content.update(f"{path}:{len(source)}:".encode() + source)
    return _Tree(package, content.hexdigest(), frozenset(paths))


def kernel_sha(folder: str, package: Path = PACKAGE, backend: str | None = None) -> str | None:
    """SHA-256 over the code that determines the numbers of the ops in a folder in one process, without
    comments, docstrings, layout, paths and the names of what is defined there; with `backend`, without the
    kernels of other backends. None if there is no such folder."""
    return _sha_of(folder, _tree(package), backend)


def ranks_sha(folder: str, package: Path = PACKAGE) -> str | None:
    """The same with the code that several ranks share a call by. None if the folder has none: it changes no
    number of a single process, so only checks of ranks depend on it."""
    tree = _tree(package)
    if not any(_of_ranks(path, tree) for path in (package / "ops" / folder).glob("*.py")):
        return None
    return _sha_of(folder, tree, ranks=True)


@lru_cache(maxsize=256)
def _sha_of(folder: str, tree: _Tree, backend: str | None = None, ranks: bool = False) -> str | None:
    used = _decisive_code(folder, tree, backend, ranks)
    files = tuple((path, path.read_text(), tuple(sorted(chosen))) for path, chosen in sorted(used.items()))
    return _digest(files, tree) if files else None


@lru_cache(maxsize=256)
def _digest(files: tuple[tuple[Path, str, tuple[int, ...]], ...], tree: _Tree) -> str:
    """The hash of some statements of some files."""
    parts = {path: _parts_of(source) for path, source, _ in files}
    texts = {(path, i): _text_of(parts[path][i]) for path, _, chosen in files for i in chosen}
    words = frozenset[str]().union(*(text.words for text in texts.values()))
    owners = {(path, name): parts[path][i] for path, i in texts for name in texts[path, i].names}
    graph = {
        key: [(i, _reference(piece, key[0], owners, words, tree)) for i, piece in text.pieces]
        for key, text in texts.items()
        if not text.imported
    }
    # Every round goes through all pieces. So what is referred to has a number, and a definition a list of its
    # pieces in which only the references are replaced.
    number: dict[Any, int] = {}
    rows: list[list[str]] = []
    places: dict[int, list[tuple[int, int]]] = {}  # of a word: definition, and first token there
    references: list[list[tuple[int, int]]] = []  # of a definition: place in its row, and what is there
    for row, pieces in enumerate(graph.values()):
        rows.append([p if isinstance(p, str) else "?" for _, p in pieces])
        references.append([])
        for at, (i, piece) in enumerate(pieces):
            if isinstance(piece, tuple):
                known = number.setdefault(piece, len(number))
                references[row].append((at, known))
                if piece[0] == "word":
                    places.setdefault(known, []).append((row, i))
    # A name of a statement that defines several is also its position there.
    defined = [
        (number["name", path, name], row, n)
        for row, (path, i) in enumerate(graph)
        for n, name in enumerate(texts[path, i].names)
        if ("name", path, name) in number
    ]
    colours, refined = ["?"] * len(number), [""] * len(rows)
    for _ in range(_ROUNDS):
        for row, (pieces_of_row, those) in enumerate(zip(rows, references, strict=True)):
            for at, known in those:
                pieces_of_row[at] = colours[known]
            refined[row] = _sha("\x1f".join(pieces_of_row))
        for known, where in places.items():
            colours[known] = _sha("".join(sorted([f"{i}:{refined[row]}" for row, i in where])))
        for known, row, n in defined:
            colours[known] = f"{refined[row]}.{n}"
    return _sha("".join(sorted(refined)))[:16]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _reference(
    token: str | Ref,
    path: Path,
    owners: dict[tuple[Path, str], "_Part"],
    words: frozenset[str],
    tree: _Tree,
) -> Any:
    """A token as text, or as the key of what it refers to."""
    if isinstance(token, str):
        return token
    kind, name = token
    if kind == "member":
        base, _, attribute = name.partition(".")
        module = _module_file(path, base, owners, tree)
        if module is None:
            return ("word", attribute) if attribute in words else attribute
        return ("name", module, attribute) if (module, attribute) in owners else "of the package"
    if kind == "word":
        return token if name in words else name
    for _ in range(8):  # through files that only import it
        if (path, name) not in owners:
            return name
        part = owners[path, name]
        if not isinstance(part.node, ast.Import | ast.ImportFrom):  # a function may import something, too
            return ("name", path, name)
        (target,) = part.imports
        if target[0].split(".")[0] != tree.package.name:
            return ".".join(filter(None, target))
        places = [place for place in _resolved(target, tree) if place[1] is not None]
        if not places:  # a module, or the frame, whose names do not count either
            return "of the package"
        path, name = places[0][0], str(places[0][1])
    return name


def _module_file(path: Path, name: str, owners: dict[tuple[Path, str], "_Part"], tree: _Tree) -> Path | None:
    """The file that a name stands for, if it is an imported module of the package."""
    if (path, name) not in owners:
        return None
    part = owners[path, name]
    if not isinstance(part.node, ast.Import | ast.ImportFrom):
        return None
    (target,) = part.imports
    return next((file for file, wanted in _resolved(target, tree) if wanted is None), None)


def compiled_backends(folder: str, package: Path = PACKAGE) -> list[str]:
    """The backends that have kernels in a folder: hopper for kernels_hopper.py and kernels_hopper_bwd.py."""
    return sorted(_backends_in(package / "ops" / folder))


def _backends_in(folder: Path) -> set[str]:
    return {path.stem.split("_")[1] for path in folder.glob("kernels_*.py")}


def decisive_code(
    folder: str, package: Path = PACKAGE, backend: str | None = None, ranks: bool = False
) -> Used:
    """The code that `kernel_sha` hashes, or `ranks_sha`. An op that uses another op includes its whole
    folder, because that op imports its kernels only when they are called."""
    return _decisive_code(folder, _tree(package), backend, ranks)


def _decisive_code(folder: str, tree: _Tree, backend: str | None, ranks: bool) -> Used:
    ops = tree.package / "ops"
    own = ops / folder
    found: Used = {}
    parts_of: dict[Path, list[_Part]] = {}  # each file is read once, and asked for many names
    pending: list[tuple[Path, str | None]] = [(path, None) for path in _deciding(own, tree, backend, ranks)]
    seen = set(pending)
    while pending:
        path, name = pending.pop()
        new: list[tuple[Path, str | None]] = []
        if path not in parts_of:
            parts_of[path] = _parts_of(path.read_text())
            if path.name == "op.py" and path.parent.parent == ops:
                only = backend if path.parent == own else None
                new += [(each, None) for each in _deciding(path.parent, tree, only, ranks)]
        parts, mine = parts_of[path], found.setdefault(path, set())
        wanted = {i for i, part in enumerate(parts) if name is None or name in part.names or part.acts}
        for i in wanted - mine:
            mine.add(i)
            new += [(path, used) for used in parts[i].uses]
            for target in parts[i].imports:
                new += _resolved(target, tree)
        for each in new:
            if each not in seen:
                seen.add(each)
                pending.append(each)
    return {path: chosen for path, chosen in found.items() if chosen}


def _deciding(folder: Path, tree: _Tree, backend: str | None, ranks: bool) -> list[Path]:
    """The files of an op's folder that determine its numbers; with `backend`, without those that have another
    one's name in theirs: not kernels_triton_bwd.py or plans_triton.py, if it is hopper."""
    others = _backends_in(folder) - {backend} if backend else set()
    return [
        path for path in folder.glob("*.py")
        if not path.stem.startswith(_DECIDES_NOTHING) and others.isdisjoint(path.stem.split("_"))
        and (ranks or not _of_ranks(path, tree))
    ]  # fmt: skip


@lru_cache(maxsize=4096)
def _of_ranks(path: Path, tree: _Tree) -> bool:
    """Whether a file of an op's folder is about ranks: it uses `isobit.ranks`, or another such file. The
    declaration is not, though it may name one."""
    package, pending, seen = tree.package, [path], set[Path]()
    while pending:
        each = pending.pop()
        if each.parent == package / "ranks":
            return True
        if each.name != "op.py" and each.parents[1] == package / "ops" and each not in seen:
            seen.add(each)
            targets = {target for part in _parts_of(each.read_text()) for target in part.imports}
            pending += [found for target in targets for found, _ in _resolved(target, tree)]
    return False


@lru_cache(maxsize=1 << 14)
def _resolved(target: tuple[str, str], tree: _Tree) -> tuple[tuple[Path, str | None], ...]:
    """The file in which a name of a module is defined, if it may affect a number: the module's, or a file of
    that name."""
    module, name = target
    root, *place = module.split(".")
    if root != tree.package.name:
        return ()
    own_file = [([*place, name], None)] if name else []
    places: list[tuple[Path, str | None]] = []
    for parts, wanted in (*own_file, (place, name or None)):
        if not parts or parts[0] not in _FOLLOWED or parts[-1].startswith(_DECIDES_NOTHING):
            continue
        there = tree.package.joinpath(*parts)
        places += [
            (path, wanted) for path in (there.with_suffix(".py"), there / "__init__.py") if path in tree.files
        ]
    return tuple(places)


@dataclass(frozen=True)
class _Part:
    """A statement of a module, or one name of an import: its node, the names it defines, those it uses, and
    what it imports as (module, name). A statement that `acts` defines nothing and is executed for its
    effect."""

    node: ast.stmt
    names: tuple[str, ...]
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
            for name, target in imported:
                parts.append(_Part(node, (name,), none, frozenset([target]), False))
            continue
        names = tuple(dict.fromkeys(_defined_by(node)))
        uses = frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name)) - set(names)
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
    """Names that a statement of a module defines, including those inside an `if` or a `with`."""
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


# A statement as text with references


@dataclass(frozen=True, eq=False)
class _Text:
    """The text of a statement: pieces of it, and references between them, each with the number of its first
    token. `names` are those it defines, `words` its fields and parameters. Of an import only what it
    `imported` counts, where it is used."""

    names: tuple[str, ...]
    pieces: list[tuple[int, str | Ref]]
    words: frozenset[str]
    imported: bool


_text_cache: dict[int, tuple[_Part, _Text]] = {}


def _text_of(part: _Part) -> _Text:
    known = _text_cache.get(id(part))
    if known is None:
        imported = isinstance(part.node, ast.Import | ast.ImportFrom)
        writer = _Writer()
        if not imported:
            writer.write(part.node)
        text = _Text(part.names, _pieces(writer.tokens), frozenset(_words(part.node)), imported)
        known = _text_cache[id(part)] = (part, text)  # the part too: its id stays its own
    return known[1]


def _pieces(tokens: list[str | Ref]) -> list[tuple[int, str | Ref]]:
    """All text between two references is one piece: there are ten times as many tokens, and every round of
    every hash goes through them."""
    pieces: list[tuple[int, str | Ref]] = []
    for is_text, run in groupby(enumerate(tokens), key=lambda each: isinstance(each[1], str)):
        found = list(run)
        pieces += [(found[0][0], "\x1f".join(str(text) for _, text in found))] if is_text else found
    return pieces


def _words(node: ast.stmt) -> Iterator[str]:
    """Fields and methods of classes, parameters of functions, and what is stored in attributes."""
    for each in ast.walk(node):
        if isinstance(each, ast.ClassDef):
            yield from (name for inner in each.body for name in _defined_by(inner))
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            yield each.attr
        elif isinstance(each, ast.arg):
            yield each.arg


def _variables(function: ast.AST) -> set[str]:
    """Arguments and variables of a function and of functions inside it, and the names of these."""
    names = set()
    for each in ast.walk(function):
        if isinstance(each, ast.arg):
            names.add(each.arg)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.ClassDef) and each is not function:
            names.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            names.update(name for name, _ in _imports_in(each))
    return names


class _Writer:
    """Writes a syntax tree: no positions, no docstrings, and no empty fields, which differ between versions
    of Python. Variables of a function count by their first occurrence in it."""

    def __init__(self) -> None:
        self.tokens: list[str | Ref] = []
        self._local: dict[str, int] = {}
        self._variables: set[str] | None = None  # of the outermost function
        self._in_class = False

    def write(self, node: Any) -> None:
        if isinstance(node, list):
            for each in node:
                self.write(each)
            self.tokens.append("]")
        elif not isinstance(node, ast.AST):
            self.tokens.append(repr(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self._variables is None:
            self._name(node.name)
            before = self._in_class, self._local, self._variables
            self._in_class, self._local, self._variables = False, {}, _variables(node)
            self._fields(node, {"name"})
            self._in_class, self._local, self._variables = before
        elif isinstance(node, ast.ClassDef) and self._variables is None:
            self._name(node.name)
            self._in_class = True
            self._fields(node, {"name"})
            self._in_class = False
        else:
            self._fields(node, set())

    def _fields(self, node: ast.AST, without: set[str]) -> None:
        self.tokens.append(type(node).__name__)
        for name, value in ast.iter_fields(node):
            if value is None or value == [] or name in without:
                continue
            self.tokens.append(name)
            if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.write(_without_docstring(value))
            elif isinstance(node, ast.Attribute) and name == "attr":
                base = node.value.id if isinstance(node.value, ast.Name) else ""
                own = self._variables is not None and base in self._variables
                self.tokens.append(("word", value) if own or not base else ("member", f"{base}.{value}"))
            elif isinstance(node, ast.keyword) and name == "arg":
                self.tokens.append(("word", value))
            elif isinstance(node, ast.arg) and name == "arg":
                self._name(value)
                self.tokens.append(("word", value))
            elif isinstance(node, ast.ImportFrom | ast.Import):
                self.tokens.append("import")  # what is imported counts where it is used
            elif isinstance(value, str) and name in ("id", "name", "asname"):
                self._name(value)
            else:
                self.write(value)
        self.tokens.append(")")

    def _name(self, name: str) -> None:
        if self._variables is not None and name in self._variables:
            self.tokens.append(f"variable {self._local.setdefault(name, len(self._local))}")
        elif self._in_class:
            self.tokens.append(("word", name))
        else:
            self.tokens.append(("name", name))
