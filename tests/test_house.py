"""Guards the house: what stands at the top, how long files are, and what the wheel takes along. That no
imports go in a circle is a contract of import-linter (`make lint`)."""

import ast
import os
import re
import subprocess
from pathlib import Path

import isobit

ROOT = Path(__file__).parent.parent
PACKAGE = Path(isobit.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
#: Where else code is. Only the package is in the wheel.
OUTSIDE = ("benchmarks", "examples", "tests", "tools")


def length(path: Path) -> int:
    return len(path.read_text().splitlines())


# Where things are


def test_four_files_stand_at_the_top() -> None:
    """What users import. Everything else is in a room."""
    there = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert there - {"__main__.py", "py.typed"} == {"__init__.py", "nn.py", "parallel.py", "testing.py"}


def test_no_file_is_too_long_to_read() -> None:
    """Kernels may be longer: they read top to bottom, and a part of one in another file does not."""
    files = [*SOURCES, *(path for folder in OUTSIDE for path in (ROOT / folder).rglob("*.py"))]
    assert len(SOURCES) > 200 and len(files) > 300
    long = {
        str(path.relative_to(PACKAGE if path in SOURCES else ROOT)): length(path)
        for path in files
        if length(path) > (900 if path.name.startswith("kernels_") else 500)
    }
    assert not long


def test_no_module_imports_a_private_name_of_another() -> None:
    """What a second module uses belongs to the first one's names: a reader of it must see that."""
    private = [
        f"{path.relative_to(ROOT)}: {each.module}.{alias.name}"
        for path in (ROOT / "src").rglob("*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("isobit")
        for alias in each.names if alias.name.startswith("_") and not alias.name.startswith("__")
    ]  # fmt: skip
    assert private == []


# The wheel


def test_the_wheel_has_the_package_and_nothing_else() -> None:
    targets = re.findall(
        r"^\[tool\.hatch\.build.*?(?=^\[|\Z)", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    sdist = 'only-include = ["src/isobit", "README.md", "CHANGELOG.md"]'
    assert [each.strip().split("\n") for each in targets] == [
        ["[tool.hatch.build.targets.wheel]", 'packages = ["src/isobit"]'],
        ["[tool.hatch.build.targets.sdist]", sdist],
    ]
    # What measures and publishes this project is outside, and the package does not know of it.
    folders = {path.relative_to(PACKAGE).parts[0] for path in SOURCES if path.parent != PACKAGE}
    assert not folders & {*OUTSIDE, "publish", "suites"}
    modules = {path.stem for folder in ("tools", "tools/publish") for path in (ROOT / folder).glob("*.py")}
    outside = {*OUTSIDE, "publish", *modules} - {"__init__"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.partition(".")[0] for name in names} & outside, path


def test_processes_of_make_keep_the_bytecode_of_what_they_import() -> None:
    """Without it each of hundreds of processes compiled PyTorch anew: a third of the time of the tests."""
    makefile = f"include {ROOT / 'Makefile'}\nvariables:\n\t@env\n"
    done = subprocess.run(
        ["make", "--no-print-directory", "-f", "-", "variables"], input=makefile, capture_output=True,
        text=True, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "KEPT": "1"},
    )  # fmt: skip
    there = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert "KEPT" in there and "PYTHONDONTWRITEBYTECODE" not in there
