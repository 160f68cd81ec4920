"""Guards the house rules that no kernel test would notice: what an import does, where things are, what the
documents point at, and that examples run."""

import ast
import contextlib
import doctest
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import isobit
from interpreted import in_interpreter
from isobit.check.laws import LAWS
from isobit.check.request import small_args
from isobit.frame import device
from isobit.frame.op import OPS, public_ops
from isobit.numerics import NUMERICS
from shots import SHOTS

ROOT = Path(__file__).parent.parent
PACKAGE = Path(isobit.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
PUBLIC_OPS = sorted(public_ops())
PUBLIC_FUNCTIONS = [name for name in isobit.__all__ if inspect.isfunction(getattr(isobit, name))]


def in_a_fresh_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked_files() -> list[Path]:
    """Files under version control, or everything outside hidden folders where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        listed = [name for name in done.stdout.split("\0") if name] if done.returncode == 0 else []
    except OSError:
        listed = []
    if listed:
        return [path for name in listed if (path := ROOT / name).is_file()]
    found = (path for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [path for path in found if not path.relative_to(ROOT).parts[0].startswith(".")]


def documents() -> list[Path]:
    """Every page for people, also those not yet under version control."""
    return sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})


# Importing


@pytest.fixture(scope="module")
def loaded() -> dict[str, str]:
    """Modules of this package that an import of it loads, and their files. It sets nothing, and takes no
    device. The rest is there when it is used."""
    code = """
import os, sys, torch
def state():
    return (dict(os.environ), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads(), torch.initial_seed(),
            torch.is_grad_enabled(), {k: id(v) for k, v in vars(torch.Tensor).items()},
            {k: id(v) for k, v in vars(torch.nn.functional).items()})
before = state()
import isobit
assert state() == before, "the import has changed something"
assert not torch.cuda.is_initialized()
assert not {'transformers', 'trl', 'fla'} & set(sys.modules)  # so nothing is registered there
print(*(f'{n}={m.__file__}' for n, m in sys.modules.items() if n.split('.')[0] == 'isobit'))
assert 'isobit.integrations' not in sys.modules
assert isobit.integrations.trl.enable and 'isobit.integrations.fla' not in sys.modules
from isobit.integrations import verl; from isobit import *; integrations.hf.zero_drift
import isobit.cli.main; assert 'torch._dynamo' not in sys.modules  # it takes two seconds
"""
    return dict(line.split("=", 1) for line in in_a_fresh_process(code).split())


def test_an_import_loads_no_kernels_and_no_proofs(loaded: dict[str, str]) -> None:
    assert "isobit.ops.logp.op" in loaded
    kernels = {f"isobit.{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}" for path in SOURCES
               if re.search(r"^import triton|^from triton", path.read_text(), re.M)}  # fmt: skip
    assert "isobit.ops.logp.kernels_triton" in kernels  # the rule above finds what it is meant to find
    assert not kernels & set(loaded)
    proofs = [name for name in loaded if re.search(r"\.(check|bench|proof|rivals|cli)\b", name)]
    assert not proofs  # a user pays for no proof


def test_an_import_is_light(loaded: dict[str, str]) -> None:
    lines = {file: len(Path(file).read_text().splitlines()) for file in loaded.values()}
    of_ops = sum(count for file, count in lines.items() if "/isobit/ops/" in file)
    folders = len([path for path in (PACKAGE / "ops").iterdir() if (path / "op.py").is_file()])
    assert sum(lines.values()) - of_ops <= 3000 and of_ops <= 420 * folders  # declarations, and no more


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def environment_reads(tree: ast.Module) -> Iterator[int]:
    """Lines that read the environment while the module is imported: outside function bodies."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # Decorators and defaults are evaluated by the import, the body is not.
            pending += [*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            continue
        if isinstance(node, ast.Lambda):
            continue
        named = (
            node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        )
        if named in ("environ", "environb", "getenv", "getenvb"):
            yield node.lineno
        pending += ast.iter_child_nodes(node)


def test_no_module_reads_the_environment_while_it_is_imported() -> None:
    found = [
        f"{p.relative_to(PACKAGE)}:{n}" for p in SOURCES for n in environment_reads(ast.parse(p.read_text()))
    ]
    assert not found


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("import os\nX = os.environ.get('X')", [2]),
        ("from os import getenv\nX = getenv('X')", [2]),
        ("class A:\n    x = os.environ['X']", [2]),
        ("def f(x=os.getenv('X')): ...", [1]),
        ("@g(os.environ)\ndef f(): ...", [1]),
        ("if os.environ: pass", [1]),
        ("def f():\n    return os.environ", []),
        ("f = lambda: os.environ", []),
        ("class A:\n    def f(self):\n        return os.getenv('X')", []),
    ],
)
def test_environment_reads_are_found(code: str, reads: list[int]) -> None:
    assert list(environment_reads(ast.parse(code))) == reads


# Where things are


def test_every_op_that_people_call_is_exported() -> None:
    assert PUBLIC_OPS
    for name in PUBLIC_OPS:
        assert name in isobit.__all__ and getattr(isobit, name) is OPS[name].function


def test_everything_exported_is_there() -> None:
    assert sorted(set(isobit.__all__)) == sorted(isobit.__all__)
    assert all(hasattr(isobit, name) for name in isobit.__all__)


def test_the_readme_names_everything_that_people_call() -> None:
    text = (ROOT / "README.md").read_text()
    errors_and_types = {"OPS", "ContractError", "Explanation", "UnsupportedError"}
    names = {*isobit.__all__, "testing", "numerics"} - errors_and_types
    assert [name for name in sorted(names) if not re.search(rf"\bisobit\.{name}\b", text)] == []


#: The ways that run on a CPU: plain PyTorch whose formula is the truth, or the exact arithmetic of a class.
CPU_WAYS = {"reference.py", "model.py"}


def test_every_op_folder_has_a_declaration_a_proof_and_a_cpu_way() -> None:
    folders = [p for p in (PACKAGE / "ops").iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert {p.name for p in folders} >= {"logp", "det_gemm"}
    for folder in folders:
        files = {p.name for p in folder.iterdir()}
        assert "op.py" in files and {"proof.py", "proof"} & files and CPU_WAYS & files, folder.name
        assert any(op.folder == folder.name for op in public_ops().values()), folder.name


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_the_cpu_way_of_an_op_serves_cpu_tensors(name: str) -> None:
    op = OPS[name]
    ways = {way.removesuffix(".py") for way in CPU_WAYS if (PACKAGE / "ops" / op.folder / way).is_file()}
    assert op.explain(**small_args(op, torch.device("cpu"))).backend in ways
    assert ways <= {backend.name for backend in op.backends}


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_hopper_backends_serve_their_small_case(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a check on a Hopper GPU would report all of their laws as unsupported, whatever other cases there
    are."""
    monkeypatch.setattr(device, "arch_key", lambda of: "sm_90")
    monkeypatch.setattr(device, "triton_cannot_run", lambda of: None)
    op = OPS[name]
    for backend in op.backends:
        if backend.name.startswith("hopper"):
            args = small_args(op, torch.device("cpu"), backend.name)
            assert backend.when({p.name: p.default for p in op.own_params} | args) is None, backend.name


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_every_numerics_class_is_known_and_on_a_page(name: str) -> None:
    page = " ".join(page.read_text() for page in documents() if page.name != "CHANGELOG.md")
    for op in (op for op in OPS.values() if op.package == OPS[name].package):
        for backend in op.backends:
            numerics = backend.numerics_on(torch.device("cpu"))
            assert numerics in NUMERICS and f"`{numerics}`" in page, (name, backend.name)


# Examples


@pytest.mark.parametrize("name", PUBLIC_FUNCTIONS)
def test_public_functions_have_an_example_that_runs(name: str) -> None:
    function = getattr(isobit, name)
    assert "Example:" in (function.__doc__ or "")
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name)
    assert test.examples and any(example.want for example in test.examples)
    output: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=output.append)
    assert result.failed == 0, "".join(output)


def test_there_are_public_functions() -> None:
    assert {"logp", "explain"} <= set(PUBLIC_FUNCTIONS)


def blocks(page: str) -> list[tuple[str, str | None]]:
    """(Python, what it prints or None) of every example on a page: a plain block after one is its output."""
    found = re.findall(r"```python\n(.*?)```\n(?:```\n(.*?)```\n)?", (ROOT / page).read_text(), re.S)
    return [(code, output or None) for code, output in found]


#: Pages whose Python another test runs, or that print a model of a class, which has a test of its own.
RUN_ELSEWHERE = {
    "docs/trl.md": "tests/test_trl.py",
    "docs/verl.md": "tests/test_verl.py",
    "docs/fla.md": "tests/test_fla.py",
    "docs/lora.md": "tests/test_lora.py",
    "docs/check_my_kernel.md": "tests/test_candidate.py",
    "docs/check_any_function.md": "tests/test_testing_rows_command.py",
    "docs/dev/adding_an_op.md": "tests/test_repo.py",
    "docs/dev/laws.md": "tests/test_checker.py",
    "docs/numerics/lse_triton_1.md": "tests/test_numerics.py",
    "docs/numerics/lse_1.md": "tests/test_hopper_order.py",
    "docs/numerics/products.md": "tests/test_mma_model.py",
    "docs/numerics/rms_norm.md": "tests/test_rms_norm.py",
    "docs/numerics/checked.md": "tests/test_repo.py",
}

WITH_EXAMPLES = sorted(
    name for page in documents() if blocks(name := str(page.relative_to(ROOT))) and name not in RUN_ELSEWHERE
)


def run_blocks(page: str) -> str:
    """Run the examples of a page one after another: each may use what those before it made. Returns all that
    they print."""
    scope, everything = dict[str, Any](), ""
    for code, output in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="isobit: det_gemm")  # that the model is slow is known
            exec(code, scope)
        assert output is None or printed.getvalue() == output
        everything += printed.getvalue()
    return everything


@pytest.mark.parametrize("page", [page for page in WITH_EXAMPLES if page != "README.md"])
def test_examples_on_pages_run(page: str) -> None:
    run_blocks(page)


def test_the_readme_shows_drift_and_its_end() -> None:
    shown = dict(
        re.findall(r"^(PyTorch|isobit): +(\d+) of 64 ratios are not 1$", run_blocks("README.md"), re.M)
    )
    assert int(shown["PyTorch"]) > 0 and int(shown["isobit"]) == 0


def test_examples_that_run_elsewhere_are_there() -> None:
    assert all(blocks(page) for page in RUN_ELSEWHERE)
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text() or page == "docs/dev/laws.md", (page, test)
    quoted, _ = blocks("docs/dev/laws.md")[0]
    assert quoted in (ROOT / "tests" / "test_checker.py").read_text()


def test_the_check_by_hand_holds() -> None:
    ((by_hand, _),) = blocks("docs/numerics/checked.md")
    in_interpreter(by_hand)


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the op of the guide in it, put there as the guide says."""
    page = (ROOT / "docs" / "dev" / "adding_an_op.md").read_text()
    guide = page.partition("\n## ")[0]
    files = re.findall(r"\*\*\d\. [^`]*`(\w+\.py)`.*?```python\n(.*?)```", guide, re.S)
    expected = {"op.py", "proof.py", "reference.py", "kernels_triton.py", "rivals.py", "__init__.py"}
    assert {name for name, _ in files} == expected
    place = tmp_path_factory.mktemp("guide")
    shutil.copytree(PACKAGE, place / "isobit", ignore=shutil.ignore_patterns("__pycache__"))
    folder = place / "isobit" / "ops" / "weighted_sum"
    folder.mkdir()
    for name, text in files:
        (folder / name).write_text(text)
    with (place / "isobit" / "__init__.py").open("a") as init:  # the one place of code outside its folder
        init.write("from isobit.ops.weighted_sum import weighted_sum\n")
    return place


def in_the_guide(place: Path, *commands: str, interpreted: bool = True) -> str:
    """What commands say, one after another in one process. In the interpreter a check starts no others."""
    program = """
import shlex, sys
from isobit.cli.main import main
for line in sys.argv[1:]:
    sys.argv = ["isobit", *shlex.split(line), "--op", "weighted_sum", "--device", "cpu"]
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code)
"""
    env = {**os.environ, "PYTHONPATH": str(place), "TRITON_INTERPRET": str(int(interpreted))}
    command = [sys.executable, "-c", program, *commands]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_op_of_the_guide_can_be_added_and_proven(guided: Path) -> None:
    laws = [law for law in LAWS if law != "compile"]
    check = " ".join(["check", *(f"--law {law}" for law in laws)])
    told = in_the_guide(guided, check)
    assert "all laws hold" in told and "exit 0" in told, told
    lines = told.splitlines()
    backend, *held = lines[lines.index("weighted_sum") + 1].split()
    assert (
        backend == "triton" and held.count("-") == 2
    )  # `agree` has nothing to compare with, and no ranks share it
    assert sum(count.isdecimal() for count in held) == 8
    bench = "bench --skip-check --direction fwd"
    told = in_the_guide(guided, "check --law compile", bench, interpreted=False)
    assert "all laws hold" in told and "native" in told and told.count("exit 0") == 2, told


def test_the_op_of_the_guide_passes_mypy(guided: Path, tmp_path: Path) -> None:
    """It begins with a copy of what `make lint` has stored, if there is one: torch takes most of the time."""
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / "stored")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(tmp_path / "stored")]
    folder = guided / "isobit" / "ops" / "weighted_sum"
    files = [str(path) for path in sorted(folder.glob("*.py"))]
    done = subprocess.run([*command, *files], cwd=guided, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_op_of_the_guide_fails_where_its_kernel_is_broken(guided: Path) -> None:
    kernels = guided / "isobit" / "ops" / "weighted_sum" / "kernels_triton.py"
    whole = kernels.read_text()
    broken = whole.replace(
        "for first in range(0, K, 1 << LOG_LANES)", "for first in range(0, K - 1, 1 << LOG_LANES)"
    )
    assert broken != whole
    kernels.write_text(broken)
    try:
        told = in_the_guide(guided, "check --backend triton --law accuracy")
    finally:
        kernels.write_text(whole)
    assert "FAIL weighted_sum triton accuracy [N=7 K=257 fp32]" in told, told  # 257 columns: the last is lost


# Documents


def references(text: str) -> list[str]:
    """Backticked paths into this repository, and relative links; without `#anchors` and `:lines`."""
    quoted = re.findall(r"`([\w./-]+(?:\.(?:py|md|json|toml|txt|npz|svg|css|c)|/))(?::\d+)?`", text)
    rooted = re.findall(r"`(?:python )?((?:src|docs|tests|results|tools|examples)/[\w./-]+)(?::\d+)?`", text)
    linked = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)
    return sorted({*quoted, *rooted, *linked})


def exists(path: str, page: Path) -> bool:
    """As seen from the root, the page, or the package (`kernels/host/rows.py`, `kernels_triton.py`). What git
    ignores is written by a make target, and is not there in a fresh clone."""
    if path in (ROOT / ".gitignore").read_text().split():
        return True
    if any((base / path).exists() for base in (ROOT, page.parent, PACKAGE, PACKAGE.parent)):
        return True
    return "/" not in path and any(PACKAGE.rglob(path))


def test_documents_point_at_files_that_exist() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in documents()
        for path in references(page.read_text())
        if not exists(path, page)
    ]
    assert not missing


def test_every_picture_is_taken_and_shown() -> None:
    there = {path.name for path in (ROOT / "docs" / "img").iterdir()}
    pages = "\n".join(page.read_text() for page in documents())
    assert there == set(SHOTS) == set(re.findall(r"\]\((?:docs/|\.\./)?img/([\w.]+)\)", pages))


def test_references_are_found_and_looked_up() -> None:
    text = (
        "See `src/isobit/frame/op.py`, `op.py:12`, `docs/`, `tests/data` and [a page](docs/numerics.md#laws),"
        " not `x`, `a.b`, `--json` or [the web](https://example.org/x.md), [here](#there)."
    )
    assert references(text) == ["docs/", "docs/numerics.md", "op.py", "src/isobit/frame/op.py", "tests/data"]
    assert exists("src/isobit/frame/op.py", ROOT / "README.md") and exists("contract.py", ROOT / "README.md")
    assert exists("check.json", ROOT / "README.md")
    assert not exists("src/isobit/no_such_file.py", ROOT / "README.md")
    assert not exists("no_such_file.py", ROOT / "README.md")


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    # In pieces, or this file would break its own rule.
    places = ["/" + "work", "/" + "root", ".." + "/shared"]
    pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(place)}\b" for place in places))
    assert pattern.search("see " + places[0] + "/x") and pattern.search(places[2] + "/DESIGN.md")
    assert not pattern.search("a network/workload, ../" + "work")
    files = tracked_files()
    assert PACKAGE / "nn.py" in files or not PACKAGE.is_relative_to(ROOT)
    found = []
    for path in files:
        text = path.read_text(errors="replace")
        lines = text.splitlines() if any(place in text for place in places) else []
        for n, line in enumerate(lines, 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{n}: {line.strip()[:100]}")
    assert not found
