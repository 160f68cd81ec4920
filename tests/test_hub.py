"""The repository for the Hugging Face Hub that `make hub` writes: what is in it, and that it works next to
the installed package. `hub_on_a_cpu.py` loads it with the `kernels` package, in a process of its own."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hub
import isobit
from hub import HubError

ROOT = Path(__file__).parent.parent
MODULES = {hub.module_name(path) for path in hub.sources() if path.suffix == ".py"}
OP = Path("ops/logp/op.py")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    hub.write_hub(out)
    return out


@pytest.fixture(scope="module")
def loaded(repository: Path) -> dict[str, Any]:
    """What the program says that loads it."""
    loader = ROOT / ".parity" / "hub"
    assert loader.is_dir(), "run `make parity` first"
    path = os.pathsep.join([str(loader), str(hub.PACKAGE.parent)])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # tests look at the files of the repository
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "hub_on_a_cpu.py"), str(repository)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


# Next to the package


def test_it_loads_without_the_package(loaded: dict[str, Any]) -> None:
    """Also every module that a first call would import."""
    assert loaded["alone"] and loaded["still_alone"] and loaded["variant"] in hub.VARIANTS


def test_it_has_the_names_of_the_package_but_no_integrations(loaded: dict[str, Any]) -> None:
    assert loaded["lacks"] == ["drift", "integrations", "warmup"] and loaded["nn_lacks"] == ["zero_drift"]
    assert not loaded["more"] and not loaded["missing"]


def test_every_op_of_it_gives_the_bits_of_the_package(loaded: dict[str, Any]) -> None:
    ops = {name for name, op in isobit.OPS.items() if op.function is not None}
    assert set(loaded["compared"]) == ops and loaded["compared"].count("linear_logp") == 2
    assert not loaded["differ"]


def test_its_ops_have_a_namespace_of_their_own(loaded: dict[str, Any]) -> None:
    assert loaded["namespaces"] == [loaded["id"]] and loaded["id"] != "isobit"
    assert loaded["traced"] == [[3], [3]]


def test_older_loaders_find_it_too(loaded: dict[str, Any]) -> None:
    assert loaded["older"]


# What is in it


def names_of_the_package(tree: ast.Module) -> list[str]:
    """Imports of `isobit`, and strings that are paths of its modules or names of its ops."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"isobit::|(?:isobit\.[\w.]+:\w+)", node.value)
            names += [node.value] if node.value in MODULES else []
    return [name for name in names if name.split(".")[0].rstrip(":") == "isobit"]


def test_no_module_names_the_package(repository: Path) -> None:
    files = sorted((repository / "build" / "torch-cpu").rglob("*.py"))
    assert len(files) > 100
    found = {path: names_of_the_package(ast.parse(path.read_text())) for path in files}
    # In prose: what a path looks like.
    prose = {path.name: names for path, names in found.items() if names}
    assert prose == {"backend.py": ["isobit.ops.logp.kernels_triton:logp"]}


@pytest.mark.parametrize(
    "code",
    [
        "import isobit.frame",
        "from isobit.frame import op",
        'x = "isobit.numerics.mma"',
        'f("isobit.a:b")',
        'f"isobit::{x}"',
    ],
)
def test_names_of_the_package_are_found(code: str) -> None:
    assert names_of_the_package(ast.parse(code))
    assert not names_of_the_package(ast.parse("from .frame import op; x = 'isobit.logp has no gradient'"))


def test_proofs_and_rivals_stay_in_the_package(repository: Path) -> None:
    for variant in hub.VARIANTS:
        place = repository / "build" / variant
        assert {path.name for path in place.iterdir()} == {
            *hub.FOLDERS,
            *hub.FILES,
            "isobit",
            "metadata.json",
        }
        assert not [path for path in place.rglob("*") if hub.LEFT_OUT & set(path.parts)]
        kernels = {p.relative_to(place) for p in place.rglob("kernels_*.py")}
        assert kernels == {p.relative_to(hub.PACKAGE) for p in hub.PACKAGE.rglob("kernels_*.py")}
    assert (repository / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert f" {isobit.__version__};" in (repository / "README.md").read_text()


def test_metadata_names_the_id_and_the_files(repository: Path) -> None:
    ids, modules = set(), []
    for variant, backend in hub.VARIANTS.items():
        place = repository / "build" / variant
        said = json.loads((place / "metadata.json").read_text())
        assert said["backend"] == backend and said["id"].isidentifier() and said["license"] == "Apache-2.0"
        files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        assert set(said["digest"]["files"]) == files - {"metadata.json"}
        ids.add(said["id"])
        modules.append({**said["digest"]["files"], "isobit/__init__.py": None})  # which has the id in it
    assert len(ids) == len(hub.VARIANTS)
    assert all(files == modules[0] for files in modules)  # so one that is tested on a CPU is the other, too


def test_another_version_has_another_id() -> None:
    files = {"a.py": b"x", "b.py": b"y"}
    assert hub.identity(files, "cpu") == hub.identity(dict(reversed(files.items())), "cpu")
    assert hub.identity(files, "cpu") != hub.identity(files | {"b.py": b"z"}, "cpu")
    assert hub.identity(files, "cpu") != hub.identity({"a.py": b"", "xb.py": b"y"}, "cpu")


# One module


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from isobit.frame.op import op\n", "from ...frame.op import op\n"),
        ("from isobit import nn\n", "from ... import nn\n"),
        ("def f():\n    from isobit.ops.logp import (\n        logp\n    )\n",
         "def f():\n    from ...ops.logp import (\n        logp\n    )\n"),
        ('é = g("isobit.numerics.mma")\n', 'é = g((__name__.partition(".")[0] + ".numerics.mma"))\n'),
        ('"""`isobit.numerics.mma`"""\nx = "isobit.logp has no gradient"\n', None),
        ('__all__ = ["a", "f"]\ndef f():\n    from isobit.integrations import hf\n', '__all__ = ["a"]\n'),
    ],
)  # fmt: skip
def test_a_module_is_moved(before: str, after: str | None) -> None:
    assert hub.moved(OP, before, MODULES) == (before if after is None else after)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import isobit\n", "write `from isobit import"),
        ("import isobit.frame.op as op\n", "write `from isobit import"),
        ("from isobit.check.runner import x\n", "is not in the repository"),
        ("from isobit import testing\n", "is not in the repository"),
        ("from isobit.ops.logp.proof import x\n", "is not in the repository"),
        ("y = torch.ops.isobit.logp\n", "NAMESPACE"),
        ('y = f"isobit::{name}"\n', "NAMESPACE"),
        ('Library("isobit", "FRAGMENT")\n', "NAMESPACE"),
        ('y = f"isobit.ops.{name}"\n', "not a plain string"),
        ('y = "isobit.ops.no_such_op:logp"\n', "not a plain string"),
    ],
)
def test_what_cannot_be_moved_is_an_error(code: str, reason: str) -> None:
    with pytest.raises(HubError, match=reason):
        hub.moved(OP, code, MODULES)
