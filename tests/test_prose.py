"""Guards what pages say: commands, flags, symbols, make targets and anchors that they name are there.

Files that they name are looked up by tests/test_repo.py."""

import ast
import importlib.util
import inspect
import json
import re
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import isobit
from isobit.bench.cases import series_of
from isobit.cli.main import app
from isobit.frame.op import public_ops
from publish import tables
from publish.declared import render_declared

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
CHANGELOG = ROOT / "CHANGELOG.md"  # it names what was there once
TODAY = [page for page in PAGES if page != CHANGELOG]

#: Finds what is wrong in the text of a page.
Check = Callable[[str], Iterator[str]]


def code(text: str) -> Iterator[str]:
    """Everything that a page formats as code: lines of blocks, joined if they end in a backslash, and
    `spans`."""
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.M | re.S):
        yield from re.sub(r"\\\n\s*", " ", block).splitlines()
    yield from spans(text)


def spans(text: str) -> Iterator[str]:
    rest = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.M | re.S)
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", rest))


def wrong(check: Check, pages: list[Path]) -> list[str]:
    return [f"{page.relative_to(ROOT)}: {found}" for page in pages for found in check(page.read_text())]


# Commands and flags

COMMANDS: dict[str, set[str]] = {
    name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
#: Of scripts and modules with a parser of their own, by their source.
OTHER_FLAGS = {
    flag
    for source in (
        source for folder in ("src", "tools", "examples") for source in (ROOT / folder).rglob("*.py")
    )
    for flag in re.findall(r'"(--[a-z][\w-]+)"', source.read_text())
}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
#: A script or a module that is run, and its arguments.
RAN = re.compile(r"\s*(?:\S*python3? )(?:-m )?((?:isobit|publish)\.[\w.]+|[\w./]+\.py)\b(.*)")


def own_flags(script: str) -> set[str] | None:
    """Those of a script, or of a module of the package; None if it is neither."""
    if script.startswith(("isobit.", "publish.")):
        spec = importlib.util.find_spec(script) if is_module(script) else None
        path = Path(spec.origin) if spec and spec.origin else None
    else:
        path = ROOT / script
    if path is None or not path.is_file():
        return None
    return {"--help", *re.findall(r'add_argument\(\s*(?:"-\w", )?"(--[a-z][\w-]+)"', path.read_text())}


def bad_flags(text: str) -> Iterator[str]:
    """Flags that their `isobit` command or their script does not have; alone in a span, flags of none."""
    for line in code(text):
        line = line.split(" #")[0]
        called = re.match(r"\s*(?:\.venv/bin/|python -m )?isobit ([a-z]\w*)\b(.*)", line)
        if called and called[1] not in COMMANDS:
            yield f"isobit {called[1]}"
        elif called:
            given = called[2].partition(" | ")[0]  # a command after a pipe has its own flags
            yield from (
                f"isobit {called[1]} {f}" for f in FLAG.findall(given) if f not in COMMANDS[called[1]]
            )
        elif ran := RAN.match(line):
            flags = own_flags(ran[1])
            given = ran[2].partition(" | ")[0]
            yield from (f"{ran[1]} {f}" for f in FLAG.findall(given) if flags is not None and f not in flags)
        elif line.startswith("--"):
            known = OTHER_FLAGS.union(*COMMANDS.values())
            yield from (flag for flag in FLAG.findall(line) if flag not in known)


def test_commands_and_flags_exist() -> None:
    assert {"check", "bench", "report", "info"} <= set(COMMANDS) and "--candidate" in COMMANDS["check"]
    assert not wrong(bad_flags, TODAY)


# Symbols


#: The op of docs/dev/adding_an_op.md, which tests/test_repo.py adds to a copy of the package.
GUIDE = "weighted_sum"


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None  # looked up, not imported: some act on import
    except ModuleNotFoundError:
        return False


def resolves(name: str) -> bool:
    """Whether `isobit.a.b` is a module, or an attribute of one."""
    parts = name.split(".")
    end = next(end for end in range(len(parts), 0, -1) if is_module(".".join(parts[:end])))
    if end == len(parts):
        return True
    found = importlib.import_module(".".join(parts[:end]))
    for part in parts[end:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def bad_symbols(text: str) -> Iterator[str]:
    for line in code(text):
        for name in re.findall(r"(?<![\w./-])isobit(?:\.[A-Za-z_]\w*)+", line):
            if not re.search(rf"\.(py|json|html|md)$|\b{GUIDE}\b", name) and not resolves(name):
                yield name


def test_symbols_exist() -> None:
    assert not wrong(bad_symbols, TODAY)


# Names without `isobit.` before them

#: What names may come from. Not this file: it has names that do not exist. Results have names of cases.
NAMING = [
    path
    for folder in ("src", "tools", "benchmarks", "examples", "tests", "results")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".js", ".css", ".json", ".c", ".txt", ".html"} and path != Path(__file__)
]
NAMING += [ROOT / name for name in ("Makefile", "pyproject.toml", ".ci/run")]
FILE = re.compile(r"\.(py|json|html|md|js|css|svg|txt|toml)$")
WORD = re.compile(r"[A-Za-z_]\w*")


@cache
def words() -> set[str]:
    texts = (text for path in NAMING for text in (str(path.relative_to(ROOT)), path.read_text()))
    # The names of some series are put together.
    series = {one.name for op in public_ops().values() for one in series_of(op)}
    return {word for text in texts for word in WORD.findall(text)} | series


#: Modules of the package that pages call by their own name.
MODULES = {"drift", "losses", "nn", "testing", "numerics", "integrations"}

#: Names of others, and names that only an explanation uses.
NOT_OURS = {
    "nn.Linear": "of PyTorch, not of `isobit.nn`",
    "main_grad": "a buffer of the reader's own training loop",
}


def bad_names(text: str) -> Iterator[str]:
    """Words in spans that occur nowhere in the code, and `module.name` that the module does not have."""
    for span in spans(text):
        for name in re.findall(r"(?<![\w./-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", span):
            head = name.partition(".")[0]
            unknown = [word for word in name.split(".") if word not in words()]
            if head in MODULES and head != name and not FILE.search(name):
                unknown += [] if resolves(f"isobit.{name}") else [name]
            if unknown and name not in NOT_OURS:
                yield name


@cache
def takes() -> dict[str, set[str]]:
    """Parameters by function, and fields by class; of functions of one name, those of any."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                rest = ["**"] if node.args.kwarg else []
                found.setdefault(node.name, set()).update([arg.arg for arg in given], rest)
            elif isinstance(node, ast.ClassDef):
                fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
                inits = [each for each in node.body if getattr(each, "name", "") == "__init__"]
                names = [each.id for each in fields if isinstance(each, ast.Name)]
                names += [arg.arg for each in inits if isinstance(each, ast.FunctionDef)
                          for arg in (*each.args.args, *each.args.kwonlyargs)]  # fmt: skip
                found.setdefault(node.name, set()).update(names or ["**"])
    for name in public_ops():  # made from their declarations, with options that all ops have
        found[name] = set(inspect.signature(getattr(isobit, name)).parameters)
    return found


def bad_keywords(text: str) -> Iterator[str]:
    """Keyword arguments of calls in spans that the function of this package does not have."""
    for span in spans(text):
        try:
            calls = [node for node in ast.walk(ast.parse(span.strip())) if isinstance(node, ast.Call)]
        except SyntaxError:  # not Python; its words are looked up all the same
            continue
        for call in calls:
            name = ast.unparse(call.func)
            known = takes().get(name.rpartition(".")[2], {"**"})
            if name.startswith("torch.") or "**" in known:
                continue
            yield from (f"{name}({k.arg}=)" for k in call.keywords if k.arg and k.arg not in known)


def test_names_and_keywords_exist() -> None:
    assert not wrong(bad_names, TODAY)
    assert not wrong(bad_keywords, TODAY)
    pages = " ".join(page.read_text() for page in TODAY)
    assert [name for name in NOT_OURS if name not in pages] == []


# Make targets


def bad_targets(text: str) -> Iterator[str]:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in code(text):
        called = re.match(r"make ([a-z-]+)\b", line)
        if called and called[1] not in known:
            yield f"make {called[1]}"


def test_make_targets_exist() -> None:
    assert not wrong(bad_targets, TODAY)


# Anchors


def anchors(page: Path) -> set[str]:
    """Headings of a page as GitHub and the site name them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        times = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.add(f"{slug}-{times}" if times else slug)
    return found


def bad_anchors(page: Path) -> Iterator[str]:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", text):
        there = page.parent / target if target else page
        if not there.is_file() or anchor not in anchors(there):
            yield f"{target}#{anchor}"


def test_anchors_exist() -> None:
    assert not [f"{page.relative_to(ROOT)}: {found}" for page in PAGES for found in bad_anchors(page)]


# The site


SITE = runpy.run_path(str(ROOT / "tools" / "site" / "conf.py"))


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = [page for group in SITE["navigation"]().values() for page in group]
    pages = [str(page.relative_to(ROOT).with_suffix("")) for page in PAGES]
    assert sorted(listed) == sorted(pages)
    groups = {page: SITE["group_of"](page) for page in ("docs/logp", "docs/dev/laws", "docs/numerics/lse_1")}
    assert list(groups.values()) == ["Ops", "Contributing", "Promises and numerics"]


def test_everything_public_is_in_the_api_reference() -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "api").glob("*.md")]
    filled = "\n".join(SITE["api"].filled(page) for page in pages)
    modules = set(re.findall(r"<!-- api:([\w.]+) -->", "".join(pages)))
    assert {f"isobit.{name}" for name in MODULES - {"integrations"}} | {"isobit"} <= modules
    assert {f"isobit.integrations.{name}" for name in isobit.integrations.__all__} <= modules
    for name in (*(f"isobit.{op}" for op in public_ops()), "isobit.nn.DetLinear", "isobit.losses.grpo",
                 "isobit.testing.check", "isobit.integrations.trl.enable",
                 "isobit.drift.measure"):  # fmt: skip
        assert re.search(rf"^````{{py:\w+}} {re.escape(name)}\(", filled, re.M), name


def test_docstrings_become_markdown() -> None:
    shown = SITE["api"]._markdown(
        "What, of [*, V] and `a_b`.\n\n    y = a * b\n\nArgs:\n    x, y: one\n        two.\n"
        "\nReturns:\n    z_1.\n\nExample:\n    >>> 1 + 1\n    2"
    )
    assert shown.split("\n") == [
        "What, of \\[\\*, V\\] and `a_b`.", "", "```text", "y = a * b", "```", "", "", "**Args**", "",
        "- `x`, `y`: one", "  two.", "", "", "**Returns**", "", "z\\_1.", "", "", "**Example**", "",
        "```pycon", ">>> 1 + 1", "2", "```", "",
    ]  # fmt: skip


# Links


def file_names(text: str) -> Iterator[str]:
    """Links whose text is the name of a page. A reader wants its title."""
    yield from re.findall(r"\[[^\]\[]*\w\.md[^\]\[]*\]\([^)]*\)", text)


def test_links_have_titles() -> None:
    assert not wrong(file_names, PAGES)


# Figures


def test_figures_in_sentences_are_measured() -> None:
    report = json.loads((ROOT / "results" / "h200" / "train_step.json").read_text())
    rows = {(row["op"], row["impl"]): row for row in report["rows"] if row["case"] == "B=8 T=2048 bf16"}
    measured = []
    for op in ("qwen2.5-0.5b", "llama-3-8b-4-layers"):
        both = rows[op, "isobit:head"], rows[op, "plain"]
        figures = [row["peak_mb"] / 1000 for row in both] + [row["ms"] for row in both]
        measured.append(tuple(f"{figure:.0f}" for figure in figures))
    said = re.compile(r"(\d+) GB instead of (\d+) GB.*?(\d+) ms instead of (\d+)")
    for page in ("README.md", "docs/trl.md"):
        assert said.findall((ROOT / page).read_text().replace("\n", " ")) == measured, page


# Generated tables


def test_generated_tables_are_looked_at_before_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `make lint`, a first step of CI: once more here would cost ten seconds. That a stale page is found
    is shown in tests/test_publish_tables.py."""
    monkeypatch.chdir(ROOT)
    assert {Path("README.md"), Path("docs/benchmarks.md")} <= set(tables.marked_pages())
    _, _, lint = (ROOT / "Makefile").read_text().partition("\nlint: $(READY)\n")
    assert "\t$(PUBLISH).tables --check\n" in lint.partition("\n\n")[0] + "\n"
    for place in (".ci/run", ".github/workflows/test.yml"):
        assert re.search(r"^[ -]*(?:run: )?make lint\b", (ROOT / place).read_text(), re.M), place


def test_every_op_has_its_declaration_on_a_page() -> None:
    found = [name for page in PAGES for name in re.findall(r"^<!-- op:(\w+) -->$", page.read_text(), re.M)]
    assert sorted(found) == sorted(public_ops())


def test_a_declaration_is_shown_as_it_is(tmp_path: Path) -> None:
    shown = render_declared("logp", tmp_path)
    assert "| `logits` | [\\*, V] | bf16, fp16, fp32, fp64 |   |" in shown
    assert "| `temperature` | [\\*] or a number | fp32, fp64 | `1.0` |" in shown
    assert "| `triton` | `lse/triton-1` | - | - |" in shown and "`isobit check --op logp`" in shown
    cases = [{"law": law, "status": status} for law, status in (("agree", "ok"), ("agree", "fail"))]
    mine = {"op": "logp", "candidate": "hopper", "numerics": "lse/1", "fail": 1, "cases": cases}
    stamp: dict[str, Any] = {"gpu": "G", "commit": "abc", "date": "2026-01-02T03:04:05Z", "kernels": {}}
    report = {"stamp": stamp, "candidates": [mine, mine | {"op": "another"}]}
    (tmp_path / "check_logp.json").write_text(json.dumps(report))
    shown = render_declared("logp", tmp_path)
    assert "| `hopper` | `lse/1` | agree 1 | 1 |" in shown and "on G, commit abc, 2026-01-02. Cells" in shown
    stamp["kernels"] = {"logp": "of other kernels"}
    (tmp_path / "check_logp.json").write_text(json.dumps(report))
    assert "2026-01-02. The kernels have changed since. Cells" in render_declared("logp", tmp_path)
    with pytest.raises(ValueError, match="op:nothing: no such op; known: attention, "):
        render_declared("nothing", tmp_path)


def test_checks_of_an_op_may_be_in_several_files(tmp_path: Path) -> None:
    def write(name: str, commit: str, *held: tuple[str, str, int], kernels: str = "") -> None:
        stamp = {"gpu": "G", "commit": commit, "date": "2026-01-02T03:04:05Z"}
        stamp |= {"kernels": {"logp": kernels} if kernels else {}}
        found = [
            {"op": op, "candidate": backend, "numerics": "none", "ok": ok, "fail": 1,
             "cases": [{"law": "agree", "status": "ok"}] * ok}
            for op, backend, ok in held
        ]  # fmt: skip
        (tmp_path / name).write_text(json.dumps({"stamp": stamp, "candidates": found}))

    def line() -> str:
        return next(one for one in tables.render_proven(tmp_path).splitlines() if "| `logp` |" in one)

    assert line() == "| `logp` | - | - | - |"
    write("check_logp_more.json", "new", ("logp", "reference", 4), ("logp", "hopper", 9), ("other", "a", 8))
    assert line() == "| `logp` | 13 cells held, 2 failed | - | - |"
    write("check_logp.json", "abc", ("logp", "hopper", 3))  # it goes before others with the same backend
    assert line() == "| `logp` | 7 cells held, 2 failed | - | - |"
    shown = render_declared("logp", tmp_path)
    assert (
        "| `hopper` | `none` | agree 3 | 1 |" in shown and "| `reference` | `none` | agree 4 | 1 |" in shown
    )
    assert "on G, commit abc, 2026-01-02; commit new, 2026-01-02. Cells" in shown
    write("check_logp_more.json", "new", ("logp", "reference", 4), kernels="of other kernels")
    assert line() == "| `logp` | 7 cells held, 2 failed † | - | - |"
    assert "2026-01-02. The kernels have changed since. Cells" in render_declared("logp", tmp_path)


def test_what_was_proven_has_accesses_and_times(tmp_path: Path) -> None:
    stamp: dict[str, Any] = {"kernels": {}}
    runs = [{"op": op, "calls": 5, "errors": 1} for op in ("--control logp", "logp", "logp")]
    (tmp_path / "memcheck_logp.json").write_text(json.dumps({"stamp": stamp, "runs": runs}))
    rows = [{"op": "logp", "case": case, "impl": impl} for case in "abb" for impl in ("isobit", "copy")]
    (tmp_path / "logp.json").write_text(json.dumps({"stamp": stamp, "rows": rows}))
    assert "| `logp` | - | 10 calls, 2 errors | 2 cases |\n" in tables.render_proven(tmp_path)


def test_an_op_that_came_after_the_check_of_its_folder_is_not_proven(tmp_path: Path) -> None:
    found = [{"op": "swiglu", "candidate": "triton", "ok": 3, "fail": 0}]
    (tmp_path / "check_swiglu.json").write_text(json.dumps({"stamp": {"kernels": {}}, "candidates": found}))
    lines = tables.render_proven(tmp_path)
    assert "| `swiglu` | 3 cells held, 0 failed | - | - |\n| `swiglu_packed` | - | - | - |\n" in lines


# That all of it can fail


@pytest.mark.parametrize(
    ("check", "good", "bad", "found"),
    [
        (bad_flags, "`isobit check --op logp`", "`isobit check --opp logp`", ["isobit check --opp"]),
        (bad_flags, "```\nisobit bench --core \\\n  --resume\n```\n",
         "```\nisobit bench --core \\\n  --resumed\n```\n", ["isobit bench --resumed"]),
        (bad_flags, "`isobit info`", "`isobit inform`", ["isobit inform"]),
        (bad_flags, "`--law NAME`, `--save`", "`--no-such-flag`", ["--no-such-flag"]),
        (bad_flags, "`pytest --durations=30`", "`isobit report --durations`", ["isobit report --durations"]),
        (bad_symbols, "`isobit.nn.swap_linear(model)`", "`isobit.nn.swap_linears(model)`",
         ["isobit.nn.swap_linears"]),
        (bad_symbols, "```\npython -m publish.tables\n```\n", "```\npython -m isobit.bench.no\n```\n",
         ["isobit.bench.no"]),
        (bad_symbols, "`isobit.html`", "`isobit.no_such_op`", ["isobit.no_such_op"]),
        (bad_flags, "`python tools/compat.py --cheap`", "`python tools/compat.py --nope`",
         ["tools/compat.py --nope"]),
        (bad_flags, "```\n.venv/bin/python tools/compat.py --triton 3\n```\n",
         "```\n.venv/bin/python tools/compat.py --resume\n```\n", ["tools/compat.py --resume"]),
        (bad_flags, "`python -m publish.tables --check`", "`python -m publish.tables --op x`",
         ["publish.tables --op"]),
        (bad_names, "`token_logps`", "`token_logpz`", ["token_logpz"]),
        (bad_names, "`token_logps(model, ids)`", "`token_logps(modelz, ids)`", ["modelz"]),
        (bad_names, "`losses.truncated_weights(x)`", "`losses.nope(x)`", ["losses.nope"]),
        (bad_names, "`losses.truncated_weights`", "`losses.swap_linear`", ["losses.swap_linear"]),
        (bad_names, "`nn.swap_linear`, `docs/losses.md`", "`swap_linearz(x)`", ["swap_linearz"]),
        (bad_keywords, "`swap_linear(model)`", "`swap_linear(nope=1)`", ["swap_linear(nope=)"]),
        (bad_keywords, "`isobit.logp(..., backend=\"hopper\")`", "`isobit.logp(x, softcaps=f(1))`",
         ["isobit.logp(softcaps=)"]),
        (bad_targets, "`make docs`", "```\nmake doc   what\n```\n", ["make doc"]),
        (file_names, "[Numerics](docs/numerics.md#a)", "[docs/numerics.md](docs/numerics.md#a)",
         ["[docs/numerics.md](docs/numerics.md#a)"]),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(check: Check, good: str, bad: str, found: list[str]) -> None:
    assert list(check(good)) == [] and list(check(bad)) == found


def test_an_anchor_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b/1`: c\n## Use\n## Use\n[x](#a-b1-c) [y](#use-1) [z](#used) [w](page.md#no)\n")
    assert list(bad_anchors(page)) == ["#used", "page.md#no"]
