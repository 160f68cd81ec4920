"""The API reference of the site, from signatures and docstrings.

A line `<!-- api:isobit.losses -->` on a page is replaced by the public functions and classes of that module:
those in its `__all__`, or those that it defines. Docstrings are plain text with `code`, sections (`Args:`,
`Returns:`, `Example:`) and indented formulas; here they become Markdown.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import reduce
from operator import or_
from types import ModuleType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

MARKER = re.compile(r"^<!-- api:([\w.]+) -->$", re.M)
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples|Attributes|Yields):$")


def filled(page: str) -> str:
    """The page with its markers replaced."""
    return MARKER.sub(lambda mark: "\n".join(_module(importlib.import_module(mark[1]))), page)


def public(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that a module offers, by name."""
    own = [name for name, what in vars(module).items() if getattr(what, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]
    offered = {name: getattr(module, name) for name in names}
    return {name: what for name, what in offered.items() if inspect.isfunction(what) or inspect.isclass(what)}


def _module(module: ModuleType) -> Iterator[str]:
    offered = public(module)
    if module.__name__ != "isobit" and module.__doc__:
        yield f"## `{module.__name__}`\n"
    ordered = sorted(offered, key=lambda name: (inspect.isclass(offered[name]), name.lower()))
    for name in ordered:
        yield from _entry(f"{module.__name__}.{name}", offered[name])


def _entry(path: str, what: Any) -> Iterator[str]:
    is_class = inspect.isclass(what)
    level = "##" if path.count(".") == 1 else "###"
    yield f"{level} {path.rpartition('.')[2]}\n"
    plain = is_class and issubclass(what, BaseException)
    yield f"````{{py:{'class' if is_class else 'function'}}} {path}{'' if plain else _signature(what)}\n"
    yield f"{_markdown(inspect.getdoc(what) or '')}\n````\n"
    if is_class and not plain:
        for name, method in vars(what).items():
            if not name.startswith("_") and inspect.isfunction(method) and method.__doc__:
                yield f"````{{py:method}} {path}.{name}{_signature(method)}\n"
                yield f"{_markdown(inspect.getdoc(method) or '')}\n````\n"


def _signature(what: Any) -> str:
    try:
        signature = inspect.signature(what)
    except (TypeError, ValueError):
        return "()"
    own = [
        one.replace(annotation=_plain(one.annotation))
        for name, one in signature.parameters.items()
        if name != "self"
    ]
    text = str(signature.replace(parameters=own, return_annotation=_plain(signature.return_annotation)))
    text = re.sub(r"<[^>]*>", "...", text)  # defaults that are objects
    return re.sub(r"\b(?:torch|typing|collections\.abc|isobit(?:\.\w+)*)\.(?=[A-Za-z_])", "", text)


def _plain(hint: Any) -> Any:
    """A type without the shapes and dtypes of a contract, which docstrings have too."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _plain(args[0])
    if origin in (Union, UnionType):
        return reduce(or_, map(_plain, args))
    if origin is tuple:
        return tuple[tuple(one if one is ... else _plain(one) for one in args)]  # type: ignore[misc]
    return hint


def _markdown(doc: str) -> str:
    """A docstring as Markdown."""
    out: list[str] = []
    section, lines = "", doc.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        if heading := SECTION.match(line):
            section = heading[1]
            out += ["", f"**{section}**", ""]
            at += 1
        elif line.startswith("    ") or (section and not line.strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            block = inspect.cleandoc("\n".join(["", *lines[at:end]])).splitlines()
            out += [*_block(section, block), ""]
            at = end
        else:
            out.append(_escaped(line))
            at += 1
    return "\n".join(out)


def _block(section: str, lines: list[str]) -> Iterator[str]:
    if section in ("Args", "Attributes", "Raises"):
        for line in lines:
            if (entry := re.match(r"([\w*, ]+?): (.*)", line)) and not line.startswith(" "):
                names = ", ".join(f"`{name.strip()}`" for name in entry[1].split(","))
                yield f"- {names}: {_escaped(entry[2])}"
            else:
                yield f"  {_escaped(line.strip())}" if line.strip() else ""
    elif section in ("Returns", "Yields"):
        yield from (_escaped(line.strip()) for line in lines)
    else:  # an example, or a formula
        yield from (f"```{'pycon' if section else 'text'}", *lines, "```")


def _escaped(text: str) -> str:
    """Text in which only `code` is markup."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<>\[\]|#$~^])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
