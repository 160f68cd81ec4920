"""Build what a release uploads, and try it: the part of a release that needs no rights (make release-check).

    python tools/release.py            writes the sdist and the wheel to dist/
    TAG=v0.1.0 python tools/release.py the tag of a release must be that of the version

The wheel is built from the sdist, so a file that the sdist lacks is missed here. Both are checked for what
they hold and by twine. Then the wheel is installed in an environment that has nothing else, except that it
sees the torch, Triton and numpy of the Python that runs this script. The first example of the README runs
there.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "isobit"
DIST = ROOT / "dist"


class ReleaseError(Exception):
    """Why this is no release. The message is for people."""


def version_of(package: Path = PACKAGE) -> str:
    return re.findall(r'^__version__ = "(.+)"$', (package / "__init__.py").read_text(), re.M)[0]


def first_example(readme: str) -> str:
    return re.findall(r"^```python\n(.*?)^```$", readme, re.M | re.S)[0]


def package_files(package: Path = PACKAGE) -> set[str]:
    """Files of the package, as they are named in a wheel."""
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(package.parent)) for path in files}


def pages() -> dict[str, str]:
    """The README and the documents, by name."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


# What must hold


def check_tag(tag: str | None, version: str) -> None:
    if tag and tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, but __version__ is {version}: its tag is v{version}")


def check_changelog(tag: str | None, version: str, changelog: str) -> None:
    """A release has a heading with its date; before that, one without."""
    heading = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", changelog, re.M)
    if heading is None:
        raise ReleaseError(f"CHANGELOG.md has no heading `## [{version}] - date`")
    if tag and not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        raise ReleaseError(f"CHANGELOG.md says that {version} is {heading[1]}: write the date of the release")


def check_pages(tag: str | None, pages: dict[str, str]) -> None:
    """What pages say until there is a release is not true in it."""
    until = [name for name, text in pages.items() if re.search(r"not\s+on\s+PyPI\s+yet", text)]
    if tag and until:
        raise ReleaseError(f"pages that say that isobit is not on PyPI yet: {', '.join(until)}")


def check_wheel(names: set[str], metadata: Message, files: set[str], version: str) -> None:
    """The wheel holds every file of the package, and nothing else but its metadata."""
    ours = {name for name in names if not name.startswith(f"isobit-{version}.dist-info/")}
    for reason, wrong in (("lacks", files - ours), ("should not hold", ours - files)):
        if wrong:
            raise ReleaseError(f"the wheel {reason} {', '.join(sorted(wrong))}")
    if metadata["Version"] != version:
        raise ReleaseError(f"the wheel is of version {metadata['Version']}, not {version}")
    if relative := re.findall(r"\]\((?!\w+:|#)[^)]*\)", str(metadata.get_payload())):
        raise ReleaseError(f"links on the page of the release that lead nowhere there: {' '.join(relative)}")


def check_sdist(names: set[str], files: set[str], version: str) -> None:
    """The sdist holds the package and what builds it: no tests, no results."""
    inside = {name.removeprefix(f"isobit-{version}/") for name in names} - {"PKG-INFO", ".gitignore"}
    needed = {f"src/{name}" for name in files} | {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"}
    for reason, wrong in (("lacks", needed - inside), ("should not hold", inside - needed)):
        if wrong:
            raise ReleaseError(f"the sdist {reason} {', '.join(sorted(wrong))}")


def check_output(printed: str) -> None:
    """What the first example of the README must print, on any machine."""
    shown = dict(re.findall(r"^(\w+): +(\d+) of 64 ratios are not 1$", printed, re.M))
    if set(shown) != {"PyTorch", "isobit"} or shown["isobit"] != "0":
        raise ReleaseError(f"the first example of the README prints something else:\n{printed}")


# Building and trying


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(out: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel made from it."""
    shutil.rmtree(out, ignore_errors=True)  # or an older version would be uploaded too
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def check_files(sdist: Path, wheel: Path, version: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"isobit-{version}.dist-info/METADATA").decode()
        check_wheel(set(archive.namelist()), Parser().parsestr(text), package_files(), version)
    with tarfile.open(sdist) as archive:
        check_sdist({member.name for member in archive if member.isfile()}, package_files(), version)


def folders_of(*modules: str) -> list[str]:
    """Where these modules are installed."""
    specs = [spec for module in modules if (spec := find_spec(module)) and spec.origin]
    return sorted({str(Path(spec.origin or "").parent.parent) for spec in specs})


def try_wheel(wheel: Path, version: str) -> None:
    """Install it in a fresh environment, and run the first example of the README there."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=False)
        python = place / "env" / "bin" / "python"
        installed = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        run(*pip, "--disable-pip-version-check", "--no-deps", "--no-index", wheel)
        # Folders in a .pth file come after the environment's own, and .pth files in them are not read: so an
        # isobit that is installed there from a checkout is not seen.
        (installed / "shared.pth").write_text("\n".join(folders_of("torch", "triton", "numpy")))
        where = "import isobit; print(isobit.__version__, isobit.__file__)"
        got, file = run(python, "-I", "-c", where, cwd=place).split()
        if got != version or not Path(file).is_relative_to(installed):
            raise ReleaseError(
                f"the fresh environment has isobit {got} from {file}, not {version} from the wheel"
            )
        example = place / "first_example.py"
        example.write_text(first_example((ROOT / "README.md").read_text()))
        check_output(run(python, "-I", example, cwd=place))


def main() -> int:
    tag, version = os.environ.get("TAG"), version_of()
    try:
        check_tag(tag, version)
        check_changelog(tag, version, (ROOT / "CHANGELOG.md").read_text())
        check_pages(tag, pages())
        sdist, wheel = build(DIST)
        check_files(sdist, wheel, version)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        try_wheel(wheel, version)
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    print(f"{sdist.name} and {wheel.name} are ready, and the first example of the README runs from the wheel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
