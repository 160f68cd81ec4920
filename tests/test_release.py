"""What `make release-check` refuses, and what pyproject.toml says about the package.

The build itself is in `.ci/run`, once. Here are its rules: each holds for this tree, and fails for what it is
meant to find.
"""

import re
import sys
from email.message import Message
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import isobit
import release
from release import ReleaseError

ROOT = Path(__file__).parent.parent
TOML = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # which pytest brings
PROJECT: dict[str, Any] = TOML.loads((ROOT / "pyproject.toml").read_text())
VERSION = isobit.__version__
FILES = release.package_files()
PRINTED = "PyTorch: 17 of 64 ratios are not 1\nisobit:  0 of 64 ratios are not 1\n"
CHANGELOG = f"# Changelog\n\n## [{VERSION}] - 2026-11-17\n"


def page(text: str = "[a](https://x.org/a)", version: str = VERSION) -> Message:
    """Metadata of a wheel, with the README in it."""
    made = Message()
    made["Version"] = version
    made.set_payload(text)
    return made


def wheel(*more: str, without: str = "") -> set[str]:
    """Names of files in a wheel."""
    return {*FILES, f"isobit-{VERSION}.dist-info/METADATA", *more} - {without}


def sdist(*more: str, without: str = "") -> set[str]:
    inside = {*(f"src/{name}" for name in FILES), "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"}
    inside |= {"PKG-INFO", ".gitignore"}
    return {f"isobit-{VERSION}/{name}" for name in {*inside, *more} - {without}}


def test_what_is_right_passes() -> None:
    assert release.version_of() == VERSION
    release.check_tag(None, VERSION)
    release.check_tag(f"v{VERSION}", VERSION)
    release.check_changelog(None, VERSION, (ROOT / "CHANGELOG.md").read_text())
    release.check_changelog(f"v{VERSION}", VERSION, CHANGELOG)
    release.check_pages(None, release.pages())
    release.check_pages(f"v{VERSION}", {"README.md": "It is on PyPI."})
    release.check_wheel(wheel(), page(), FILES, VERSION)
    release.check_sdist(sdist(), FILES, VERSION)
    release.check_output(PRINTED)


@pytest.mark.parametrize(
    ("check", "given", "reason"),
    [
        (release.check_tag, ("v9.9.9", VERSION), "the tag is v9.9.9"),
        (release.check_tag, (VERSION, VERSION), f"its tag is v{VERSION}"),
        (release.check_changelog, (None, VERSION, "# Changelog\n"), "has no heading"),
        (release.check_changelog, ("v", VERSION, CHANGELOG.replace("2026-11-17", "unreleased")), "date"),
        (
            release.check_pages,
            ("v", {"README.md": "isobit is not on\nPyPI yet."}),
            "not on PyPI yet: README.md",
        ),
        (release.check_wheel, (wheel("tests/a.py"), page(), FILES, VERSION), "should not hold tests/a.py"),
        (release.check_wheel, (wheel("isobit/results/a.json"), page(), FILES, VERSION), "should not hold"),
        (release.check_wheel, (wheel(without="isobit/py.typed"), page(), FILES, VERSION), "lacks isobit/py"),
        (release.check_wheel, (wheel(), page(version="9.9.9"), FILES, VERSION), "of version 9.9.9"),
        (release.check_wheel, (wheel(), page("[a](docs/a.md)"), FILES, VERSION), r"\]\(docs/a.md\)"),
        (release.check_sdist, (sdist("results/h200/logp.json"), FILES, VERSION), "should not hold results"),
        (release.check_sdist, (sdist(without="LICENSE"), FILES, VERSION), "lacks LICENSE"),
        (release.check_output, ("PyTorch: 1 of 64 ratios are not 1\n",), "prints something else"),
        (release.check_output, (PRINTED.replace("0 of", "1 of"),), "prints something else"),
    ],
)
def test_what_is_wrong_is_refused(check: Any, given: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ReleaseError, match=reason):
        check(*given)


def test_the_package_has_what_a_wheel_needs() -> None:
    assert {"isobit/py.typed", "isobit/spec/tolerances.json", "isobit/cli/html/page.html"} <= FILES
    assert not [name for name in FILES if "__pycache__" in name]


def test_the_first_example_is_that_of_the_readme() -> None:
    """It is the one that prints ratios, which `check_output` reads."""
    code = release.first_example((ROOT / "README.md").read_text())
    assert "of 64 ratios are not 1" in code and code.startswith("import torch\nimport isobit\n")


# pyproject.toml


def test_links_lead_to_one_home() -> None:
    links = PROJECT["project"]["urls"]
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} == set(links)
    assert all(link.startswith(links["Homepage"]) for link in links.values())
    rules = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    assert all(f"({links['Homepage']}/" in rule["replacement"] for rule in rules)
    for link in links.values():  # to a file of the main branch, if to one
        file = link.partition("/blob/main/")[2]
        assert not file or (ROOT / file).is_file()


def test_a_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = PROJECT["project"]
    assert cited["version"] == VERSION and cited["license"] == project["license"]
    assert cited["authors"] == project["authors"] and cited["repository-code"] == project["urls"]["Source"]


def test_no_link_of_the_readme_stays_relative() -> None:
    rules = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = (ROOT / "README.md").read_text()
    for rule in rules:
        text = re.sub(rule["pattern"], rule["replacement"].replace("$HFPR_VERSION", VERSION), text)
    release.check_wheel(wheel(), page(text), FILES, VERSION)
    home = PROJECT["project"]["urls"]["Homepage"]
    assert f"]({home}/blob/v{VERSION}/docs/logp.md)" in text and "](#speed)" in text
    assert f"]({home}/raw/v{VERSION}/docs/img/broken.png)" in text


def test_extras_are_the_versions_that_tests_run_with() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    parity, makefile = (ROOT / "tests" / "parity.txt").read_text(), (ROOT / "Makefile").read_text()
    trl = re.findall(r"^trl==(\d+\.\d+)\.\d+$", parity, re.M)
    assert extras["trl"] == [f"trl=={trl[0]}.*"]
    assert extras["verl"][0] in makefile
    newest, oldest = re.findall(r"^FLA := (\S+) (\S+)$", makefile, re.M)[0]
    assert extras["fla"] == [f"fla-core>={oldest},<={newest}"]


def test_what_builds_a_release_is_what_builds_the_package() -> None:
    needed = PROJECT["build-system"]["requires"]
    assert set(needed) <= set(PROJECT["project"]["optional-dependencies"]["release"])
    pinned = (ROOT / "constraints.txt").read_text()
    for name in ("build", "twine", "hatchling", "hatch-fancy-pypi-readme"):
        assert re.search(rf"^{name}==", pinned, re.M), name
