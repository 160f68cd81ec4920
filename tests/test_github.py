"""What is for GitHub: workflows that call what exists and may do only what they must; forms for issues."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from test_prose import bad_flags, bad_symbols, bad_targets

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path.read_text() for path in sorted((GITHUB / "workflows").iterdir())}
FORMS = {path.stem: path.read_text() for path in sorted((GITHUB / "ISSUE_TEMPLATE").iterdir())}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def jobs(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)["jobs"]
    return found


def steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(job.get("steps", []))


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in steps(job) if "run" in step]


# Workflows


def faults(text: str) -> Iterator[str]:
    """What is wrong with a workflow."""
    whole = yaml.safe_load(text)
    if whole.get("permissions") != {"contents": "read"}:
        yield "a workflow may read, and a job says what else it may do"
    if True not in whole:  # `on`, as YAML reads it
        yield "nothing starts it"
    for name, job in whole["jobs"].items():
        if "uses" in job:
            if not (ROOT / job["uses"]).is_file():
                yield f"{name}: {job['uses']} is not there"
            continue
        if "timeout-minutes" not in job:
            yield f"{name}: it may run for hours"
        for step in steps(job):
            if "uses" in step and not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]):
                yield f"{name}: {step['uses']} can become other code: name a commit"
        for command in commands(job):
            if "${{" in command:
                yield f"{name}: {command}: what GitHub fills in becomes shell code; use env"
            for target in re.findall(r"\bmake ([a-z-]+)", command):
                if target not in TARGETS:
                    yield f"{name}: there is no make {target}"
            for file in re.findall(r"\b(?:tests|tools|src)/[\w./]+", command):
                if not (ROOT / file).is_file():
                    yield f"{name}: {file} is not there"
        if "id-token" in job.get("permissions", {}) and (commands(job) or not job.get("environment")):
            yield f"{name}: what may publish runs no code of ours, in an environment that somebody guards"
    for line in re.findall(r"uses: \S+@.*", text):
        if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line):
            yield f"{line}: say which version that is"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_no_faults(name: str) -> None:
    assert not list(faults(WORKFLOWS[name]))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("contents: read", "contents: write", "a workflow may read"),
        ("make release-check", "make release", "there is no make release"),
        ("make release-check", "make hub TAG=${{ github.ref_name }}", "becomes shell code"),
        ("make release-check", "python tools/no_such_tool.py", "is not there"),
        ("actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1", "actions/checkout@v7", "name a commit"),
        (" # v1.13.0", "", "say which version"),
        ("    environment: pypi\n", "", "that somebody guards"),
        ("    timeout-minutes: 30\n", "", "for hours"),
        ("workflows/test.yml", "workflows/tests.yml", "is not there"),
        ("on:\n", "when:\n", "nothing starts it"),
    ],
)
def test_a_fault_is_found(old: str, new: str, reason: str) -> None:
    release = WORKFLOWS["release"]
    assert old in release
    assert any(reason in fault for fault in faults(release.replace(old, new)))


def test_pull_requests_run_what_ci_runs() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    ours = [line.partition("#")[0].strip() for line in lines if line.startswith("make ")]
    assert ours == [*commands(jobs(WORKFLOWS["test"])["whole"])][: len(ours)] and len(ours) >= 5
    assert "pull_request" in yaml.safe_load(WORKFLOWS["test"])[True]


def test_a_release_comes_from_a_tag_that_is_checked() -> None:
    release = jobs(WORKFLOWS["release"])
    assert yaml.safe_load(WORKFLOWS["release"])[True] == {"push": {"tags": ["v*"]}}
    (check,) = (step for step in steps(release["build"]) if step.get("run") == "make release-check")
    assert check["env"] == {"TAG": "${{ github.ref_name }}"}
    assert release["publish"]["needs"] == ["test", "build"]
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert [name for name, job in release.items() if "permissions" in job] == ["publish"]


def test_oldest_python_is_that_of_the_package() -> None:
    tried = jobs(WORKFLOWS["test"])["part"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={tried[0]}"' in (ROOT / "pyproject.toml").read_text()


# Forms


def bad_form(text: str) -> Iterator[str]:
    """What GitHub would not show, and what the commands in a form name that does not exist."""
    form = yaml.safe_load(text)
    yield from (f"no {key}" for key in ("name", "description", "body") if not form.get(key))
    fields = [field for field in form.get("body", []) if field["type"] != "markdown"]
    names = [field.get("id") for field in fields]
    if None in names or len(set(names)) < len(names):
        yield "fields need names of their own"
    for field in form.get("body", []):
        if field["type"] not in ("markdown", "textarea", "input", "dropdown", "checkboxes"):
            yield f"no field is a {field['type']}"
        yield from () if field["type"] == "markdown" or field["attributes"].get("label") else ("no label",)
    if not any("`isobit info`" in field["attributes"].get("description", "") for field in fields):
        yield "it does not ask for isobit info"
    for check in (bad_flags, bad_symbols, bad_targets):
        yield from check(text)


@pytest.mark.parametrize("name", ["bug", "slow_shape", "wrong_bits"])
def test_a_form_can_be_shown(name: str) -> None:
    assert not list(bad_form(FORMS[name]))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("name: Slow shape\n", "", "no name"),
        ("id: times", "id: call", "names of their own"),
        ("type: input", "type: text", "no field is a text"),
        ("      label: isobit bench\n", "", "no label"),
        ("`isobit info`", "the version", "isobit info"),
        ("bench --op logp --case", "bench --op logp --shape", "isobit bench --shape"),
    ],
)
def test_a_form_that_cannot_be_shown_is_found(old: str, new: str, reason: str) -> None:
    assert old in FORMS["slow_shape"]
    assert any(reason in fault for fault in bad_form(FORMS["slow_shape"].replace(old, new)))


def test_forms_are_for_what_goes_wrong() -> None:
    assert set(FORMS) == {"bug", "config", "slow_shape", "wrong_bits"}
    (private,) = yaml.safe_load(FORMS["config"])["contact_links"]
    assert private["url"] in (ROOT / "SECURITY.md").read_text()


def test_the_template_of_pull_requests_names_what_exists() -> None:
    text = (GITHUB / "pull_request_template.md").read_text()
    assert "`.ci/run`" in text and not [*bad_targets(text), *bad_flags(text)]
