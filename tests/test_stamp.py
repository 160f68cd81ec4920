"""Stamps: which files decide an op's numbers, and which results are stale."""

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import isobit
from isobit import ContractError
from isobit.bench.cases import parse_case
from isobit.bench.runner import run
from isobit.check.source_hash import _Writer, compiled_backends, decisive_code, kernel_sha, ranks_sha
from isobit.check.stamp import source_sha, stamp, why_stale
from isobit.frame.op import known_op
from publish import stale

PACKAGE = Path(isobit.__file__).parent
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("package") / "isobit"
    return Path(shutil.copytree(PACKAGE, place, ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture
def package(copied: Path) -> Iterator[Path]:
    """A copy of the package to change. All tests have the same one: what is known of it unchanged holds for
    the next test, too."""
    yield copied
    for path in sorted(copied.rglob("*"), reverse=True):  # what is in a folder comes before it
        if not (PACKAGE / path.relative_to(copied)).exists():
            path.rmdir() if path.is_dir() else path.unlink()
    for path in PACKAGE.rglob("*.py"):
        there, before = copied / path.relative_to(PACKAGE), path.read_bytes()
        if not there.exists() or there.read_bytes() != before:
            there.write_bytes(before)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def replaced(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


OTHERS = [
    "cli/main.py", "frame/op.py", "frame/launch.py", "check/runner.py", "bench/timing.py",
    "ops/logp/proof/__init__.py", "ops/logp/rivals.py",
    "ops/det_gemm/kernels_triton.py", "kernels/hopper/product.py",
]  # fmt: skip
OWN = ["op.py", "reference.py", "kernels_triton.py", "kernels_hopper.py"]
SHARED = [
    "kernels/triton/rows.py",
    "kernels/triton/logits.py",
    "kernels/hopper/pipeline.py",
    "kernels/host/rows.py",
]


@pytest.mark.parametrize("name", [*OTHERS, *SHARED])
def test_unused_code_does_not_change_the_hash(package: Path, name: str) -> None:
    before = kernel_sha("logp", package)
    assert before == kernel_sha("logp")
    append(package / name, "\n\ndef nobody_uses_this():\n    return 1\n")
    assert kernel_sha("logp", package) == before


@pytest.mark.parametrize("name", OWN)
def test_an_op_is_made_of_all_code_of_its_own_files(package: Path, name: str) -> None:
    append(package / "ops" / "logp" / name, "\n\ndef nobody_uses_this():\n    return 1\n")
    assert kernel_sha("logp", package) != kernel_sha("logp")


@pytest.mark.parametrize("name", [*(f"ops/logp/{name}" for name in OWN), *SHARED])
def test_comments_and_layout_do_not_change_the_hash(package: Path, name: str) -> None:
    path = package / name
    append(path, "\n# one more sentence\n")
    replaced(path, '"""', '"""Another beginning. ')
    replaced(path, '    """', '    """Another beginning. ')
    assert kernel_sha("logp", package) == kernel_sha("logp")


def test_a_shared_definition_counts_for_the_ops_that_use_it(package: Path) -> None:
    """Here and through others, named or in a whole file; another constant is another number."""
    replaced(package / "kernels" / "triton" / "rows.py", "tl.maximum(u, -1000.0)", "tl.maximum(u, -900.0)")
    changed = {
        name: kernel_sha(name, package) != kernel_sha(name)
        for name in ("logp", "ratio_kl", "grpo_loss", "linear_logp", "det_gemm")
    }
    used = dict.fromkeys(("logp", "ratio_kl", "grpo_loss"), True)
    assert changed == {**used, "linear_logp": False, "det_gemm": False}


@pytest.mark.parametrize(
    ("name", "old", "new", "ops"),
    [
        ("ranks/ordered.py", "<= SMALL_BYTES", "< SMALL_BYTES", {"det_gemm", "linear_logp"}),
        ("ranks/fold.py", "sums[::2], sums[1::2]", "sums[1::2], sums[::2]", {"det_gemm", "linear_logp"}),
        ("ranks/agreement.py", "_SHOWN = 1024", "_SHOWN = 256", set()),
        ("ops/det_gemm/dtensors.py", "Shard(y.ndim - 1)", "Shard(0)", {"det_gemm"}),
        ("ranks/vocabulary.py", "// self.group.size", "- self.group.size", {"linear_logp", "logp"}),
        ("ops/linear_logp/sharded.py", "all_gather(own)", "all_gather(2 * own)", {"linear_logp"}),
        ("ops/linear_logp/model_shards.py", "def ", "MORE = 1\n\n\ndef ", {"linear_logp"}),
    ],
)
def test_sums_over_ranks_count_for_the_ops_that_have_them(
    package: Path, name: str, old: str, new: str, ops: set[str]
) -> None:
    """An op imports these files when it is called with ranks, by a path in a string. No other call of it
    depends on them."""
    replaced(package / name, old, new)
    folders = ("det_gemm", "linear_logp", "logp")
    alone = {folder for folder in folders if kernel_sha(folder, package) != kernel_sha(folder)}
    assert alone == (ops if "model" in name else set())
    assert {folder for folder in folders if ranks_sha(folder, package) != ranks_sha(folder)} == ops


def test_only_a_check_is_stale_when_ranks_compute_otherwise(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert ranks_sha("rope") is None and "ranks" not in stamp(cpu, ops=["det_gemm"])
    assert "ranks" not in stamp(cpu, ops=["rope"], with_ranks=True)
    known = {"kernels": {"det_gemm": kernel_sha("det_gemm")}}
    found = stamp(cpu, ops=["det_gemm"], with_ranks=True)
    assert found["ranks"] == {"det_gemm": ranks_sha("det_gemm")}
    assert why_stale(found) is None and why_stale(known | {"commit": "abc"}) is None
    old = why_stale(known | {"commit": "abc", "ranks": {"det_gemm": "0"}})
    assert old == "how ranks compute det_gemm has changed since abc"


def test_every_file_of_an_op_counts_but_proof_and_rivals() -> None:
    for op in (PACKAGE / "ops").glob("*/op.py"):
        folder = op.parent
        others = {folder / "__init__.py", folder / "proof.py", folder / "rivals.py"}
        assert set(folder.glob("*.py")) - others == {
            path for path in decisive_code(folder.name, ranks=True) if path.parent == folder
        }


def test_a_file_of_one_backend_does_not_count_for_others(package: Path) -> None:
    path = package / "ops" / "det_gemm" / "plans_hopper_tree.py"
    append(path, "\nMORE = 1\n")
    assert kernel_sha("det_gemm", package, "triton") == kernel_sha("det_gemm", backend="triton")
    assert kernel_sha("det_gemm", package, "hopper") != kernel_sha("det_gemm", backend="hopper")


def test_the_hash_does_not_depend_on_how_python_writes_what_is_empty() -> None:
    """Python 3.12 has type parameters on every function, 3.11 has none."""
    (function,) = ast.parse("def f(): return None").body

    def written() -> list[Any]:
        writer = _Writer()
        writer.write(function)
        return writer.tokens

    before = written()
    function.type_params = []  # type: ignore[attr-defined]
    function._fields = (*function._fields, "type_params")  # type: ignore[misc]
    assert written() == before and ("name", "f") in before


BLOCK = """
class Box(Base):
    breadth: int

    def doubled(self, factor):
        inner = self.breadth * factor
        return fma(inner, factor, self.breadth)

def measure(box, LIMIT=4):
    def nested(x):
        return x + LIMIT
    return nested(gl.load(Box(box).doubled(factor=2)))
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("inner", "product", True),
        ("breadth", "extent", True),
        ("doubled", "twice", True),
        ("Box", "Room", True),
        ("measure", "measured", True),
        ("nested", "within", True),
        ("(x)", "(y)", False),  # its use is another name then
        ("gl.load", "gl.store", False),
        ("(inner, factor, ", "(factor, inner, ", False),
        ("* factor", "* inner", False),
        ("fma", "fms", False),
        ("+ LIMIT", "- LIMIT", False),
        ("LIMIT=4", "LIMIT=5", False),
    ],
)
def test_renaming_own_names_does_not_change_the_hash(package: Path, old: str, new: str, same: bool) -> None:
    path = package / "ops" / "logp" / "kernels_triton.py"
    append(path, BLOCK)
    before = kernel_sha("logp", package)
    path.write_text(path.read_text().replace(BLOCK, BLOCK.replace(old, new)))
    assert (kernel_sha("logp", package) == before) is same


def test_a_function_of_the_package_may_be_renamed(package: Path) -> None:
    """Where it is defined and wherever it is used."""
    paths = [path for path in package.rglob("*.py") if "row_offset" in path.read_text()]
    assert len(paths) > 2
    for path in paths:
        path.write_text(path.read_text().replace("row_offset", "place_of_row"))
    assert kernel_sha("logp", package) == kernel_sha("logp")


def test_a_function_may_move_to_another_file(package: Path) -> None:
    """Whether it is imported from its new place, or from the old one, which only passes it on."""
    rows, place = package / "kernels" / "triton" / "rows.py", package / "kernels" / "place.py"
    source = rows.read_text()
    (function,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "row_offset")
    lines = source.splitlines(keepends=True)
    first, last = function.decorator_list[0].lineno - 1, function.end_lineno  # type: ignore[attr-defined]
    place.write_text("import triton\nimport triton.language as tl\n" + "".join(lines[first:last]))
    lines[first:last] = ["from isobit.kernels.place import row_offset\n"]
    rows.write_text("".join(lines))
    for path in (package / "ops" / "rms_norm").glob("kernels_*.py"):
        replaced(path, "from isobit.kernels.triton.rows import row_offset", lines[first].strip())
    assert kernel_sha("logp", package) == kernel_sha("logp")
    assert kernel_sha("rms_norm", package) == kernel_sha("rms_norm")
    append(place, "\nrow_offset.of = 1\n")
    assert kernel_sha("logp", package) != kernel_sha("logp")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("box.right - box.left", "box.left - box.right"),
        ("two(right=1, left=2)", "two(right=2, left=1)"),
        ("return more(two", "return less(two"),
    ],
)
def test_to_swap_names_in_one_place_changes_the_hash(package: Path, old: str, new: str) -> None:
    """Fields, keywords, and functions of one shape."""
    path = package / "ops" / "logp" / "kernels_triton.py"
    append(path, SWAPPED)
    before = kernel_sha("logp", package)
    replaced(path, old, new)
    assert kernel_sha("logp", package) != before


SWAPPED = """
class Two(Base):
    left: int
    right: int

def two(left, right):
    return Two(left, right)

def more(box):
    return box.right + 1

def less(box):
    return box.right - 1

def width(box):
    return box.right - box.left

def used():
    return more(two(right=1, left=2))
"""


def test_imports_are_followed_wherever_they_stand(package: Path) -> None:
    """In a function, through other files, of a module or of its package; cycles end."""
    (package / "kernels" / "first.py").write_text("def f():\n    from isobit.kernels import second\n")
    (package / "kernels" / "second.py").write_text("import isobit.ops.other.kernels_x\nimport os, torch\n")
    other = package / "ops" / "other"
    other.mkdir()
    (other / "kernels_x.py").write_text("from isobit.kernels.first import f\n")
    (other / "proof.py").write_text("from isobit.kernels.first import f\n")
    append(package / "ops" / "logp" / "op.py", "\n\ndef g():\n    import isobit.kernels.first as f\n")
    found = {path.relative_to(package).as_posix() for path in decisive_code("logp", package)}
    assert {"kernels/first.py", "kernels/second.py", "ops/other/kernels_x.py"} <= found
    assert "ops/other/proof.py" not in found and "op.py" not in found
    assert kernel_sha("no_such_op", package) is None


# Stale results


def a_file(folder: Path, name: str, stamp: dict[str, Any], **keys: Any) -> Path:
    path = folder / "h200" / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"stamp": {"commit": "abc", "source_sha": "old"} | stamp, **keys}))
    return path


def test_a_result_is_stale_when_its_kernels_have_changed(tmp_path: Path) -> None:
    mine = {"kernels": {"logp": kernel_sha("logp")}}
    fresh = a_file(tmp_path, "logp.json", mine, rows=[])
    assert stale.examine(fresh, tmp_path).stale is None  # though every other file has changed since
    changed = a_file(tmp_path, "logp.json", {"kernels": {"logp": "0123"}}, rows=[])
    assert stale.examine(changed, tmp_path).stale == "the kernels of logp have changed since abc"
    gone = a_file(tmp_path, "gone.json", {"kernels": {"gone": "0123"}}, rows=[])
    assert stale.examine(gone, tmp_path).stale is not None
    assert (
        stale.examine(a_file(tmp_path, "logp.json", {"source_sha": source_sha()}, rows=[]), tmp_path).stale
        is None
    )
    old = stale.examine(a_file(tmp_path, "logp.json", {}, rows=[]), tmp_path).stale
    assert old == "it was measured at commit abc, before results had kernel hashes"


def test_an_unfinished_benchmark_is_not_up_to_date(tmp_path: Path) -> None:
    mine = {"kernels": {"logp": kernel_sha("logp")}}
    left = {
        "rows": [],
        "notes": ["unfinished: 2 of 3 cases are not timed"],
        "command": "isobit bench --op logp",
    }
    found = stale.examine(a_file(tmp_path, "logp.json", mine, **left), tmp_path)
    assert (found.stale, found.lacks) == (None, "2 of 3 cases are not timed")
    resume = f"       isobit bench --op logp --results {tmp_path} --resume"
    assert stale.lines([found], only_stale=True) == [
        f"unfinished  {found.path}: 2 of 3 cases are not timed", resume,
        "0 of 1 result files are stale, 1 unfinished",
    ]  # fmt: skip
    old = stale.examine(a_file(tmp_path, "logp.json", {"kernels": {"logp": "0"}}, **left), tmp_path)
    assert old.stale is not None and "--resume" not in old.command  # it would refuse


def test_the_path_to_the_driver_decides_no_number(package: Path) -> None:
    for name in ("launch", "entry", "context", "replay"):
        path = package / "frame" / f"{name}.py"
        path.write_text(path.read_text().replace("return", "return None and"))
    assert kernel_sha("det_gemm", package) == kernel_sha("det_gemm")


def test_a_benchmark_is_not_stale_when_other_backends_have_changed(tmp_path: Path, package: Path) -> None:
    append(package / "ops/logp/kernels_triton.py", "\nMORE = 1\n")
    assert kernel_sha("logp", package, "hopper") == kernel_sha("logp", backend="hopper")
    assert kernel_sha("logp", package, "triton") != kernel_sha("logp", backend="triton")
    append(package / "ops/logp/op.py", "\nMORE = 1\n")  # of all backends
    assert kernel_sha("logp", package, "hopper") != kernel_sha("logp", backend="hopper")
    assert compiled_backends("logp") == ["hopper", "triton"]

    def why(hashes: dict[str, str | None], *backends: str | None) -> str | None:
        rows = [{"impl": "isobit", "backend": backend} for backend in backends]
        rival = {"impl": "native", "backend": None}
        path = a_file(tmp_path, "logp.json", {"kernels": {"logp": "0"}, "backends": {"logp": hashes}},
                      rows=[*rows, rival])  # fmt: skip
        return stale.examine(path, tmp_path).stale

    hopper = kernel_sha("logp", backend="hopper")
    assert why({"hopper": hopper, "triton": "0"}, "hopper") is None
    assert why({"hopper": hopper, "triton": "0"}, "hopper", "triton") is not None
    assert why({"hopper": hopper}, "hopper", "reference") is not None  # nothing is known of it
    assert why({"hopper": "0"}, "hopper") is not None
    assert why({"hopper": hopper}) is not None and why({}, "hopper") is not None
    assert why({"hopper": hopper}, None) is not None  # rows of earlier versions


def test_the_command_that_renews_a_result(tmp_path: Path) -> None:
    def command(name: str, **keys: Any) -> str:
        return stale.examine(a_file(tmp_path, name, {}, **keys), tmp_path).command

    def candidates(*pairs: tuple[str, str]) -> list[dict[str, str]]:
        return [{"op": op, "candidate": backend} for op, backend in pairs]

    assert command("logp.json", rows=[]) == f"isobit bench --op logp --results {tmp_path}"
    told = command("launch.json", rows=[], command="isobit bench --suite launch")
    assert told == f"isobit bench --suite launch --results {tmp_path}"
    every = candidates(*(("logp", backend.name) for backend in known_op("logp").backends))
    check = {"suite": "isobit check"}
    assert command("check_logp.json", **check, candidates=every) == (
        f"isobit check --op logp --results {tmp_path}"
    )
    assert command("check_logp_dtypes.json", **check, candidates=every[:1]).startswith(
        f"isobit check --op logp --backend {every[0]['candidate']} --json {tmp_path}"
    )
    runs = [{"op": "--control", "backend": ""}, {"op": "logp", "backend": "triton"}]
    assert command("memcheck_logp.json", suite="isobit memcheck", runs=runs) == (
        f"isobit memcheck --op logp --results {tmp_path}"
    )


def test_a_file_that_is_not_a_result_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ContractError, match=r"x\.json: not a result file of isobit"):
        stale.results_in(tmp_path)
    with pytest.raises(ContractError, match="no such folder"):
        stale.results_in(tmp_path / "nope")


def test_every_committed_result_can_be_told_fresh_or_stale() -> None:
    found = stale.results_in(ROOT / "results")
    assert len(found) >= 9 and all(result.command.startswith("isobit ") for result in found)


def test_a_benchmark_is_stamped_with_the_kernels_of_its_ops(tmp_path: Path) -> None:
    cases = [parse_case("N=5,V=7", known_op("logp"))]
    run("logp", cases, device="cpu", repetitions=2, skip_check=True, impls=["isobit"], out_dir=tmp_path,
        say=lambda text: None)  # fmt: skip
    path = tmp_path / "cpu" / "logp.json"
    assert json.loads(path.read_text())["stamp"]["kernels"] == {"logp": kernel_sha("logp")}
    assert stale.examine(path, tmp_path).stale is None
