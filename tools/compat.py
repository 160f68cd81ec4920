"""Whether every kernel compiles, and computes what it should, under each Triton that is supported.

For the oldest Triton, the tested one and the newest, each in an environment of its own: compile every kernel
ahead of time (`isobit check --law compile`), then run the tests marked `compat`. Prints a table and exits
with 1 if something failed, with 2 if an environment could not be made.

An environment, `.compat/<version>`, holds nothing but its Triton. Everything else, torch above all, is that
of the Python that runs this script: another Triton with the same torch is what is to be tried, and three
copies of torch would be gigabytes.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".compat"

OLDEST, TESTED, NEWEST = "3.6.0", "3.7.1", "newest"
SHOWN = 5  # failures of one Triton that are printed; its logs have them all


class SetupError(Exception):
    """An environment could not be made. The message is for people."""


@dataclass
class Failure:
    """What failed, why in a line, and the command that repeats it."""

    what: str
    why: str
    command: str


@dataclass
class Part:
    """One column of a row: kernels compiled, or tests run."""

    ok: int
    failed: int
    failures: list[Failure] = field(default_factory=list)


@dataclass
class Environment:
    """A Python that has one Triton. `name` is its version, or "newest"."""

    name: str
    version: str

    @property
    def folder(self) -> Path:
        return HOME / self.name

    @property
    def python(self) -> str:
        """As it is typed in the root of the repository."""
        return os.path.relpath(self.folder / "bin" / "python", ROOT)

    @property
    def label(self) -> str:
        return f"{self.version} (newest)" if self.name == NEWEST else self.version


@dataclass
class Row:
    """What became of one Triton; no tests where only the cheap part was asked for."""

    environment: Environment
    compile: Part
    tests: Part | None
    seconds: float

    @property
    def failures(self) -> list[Failure]:
        return [*self.compile.failures, *(self.tests.failures if self.tests else ())]


# Environments


def environment(name: str) -> Environment:
    """The environment of a Triton, made if it is not there. The newest is asked for every time."""
    folder = HOME / name
    new = not any(folder.glob("lib/python*/site-packages/shared.pth"))
    if new:
        print(f"{name}: making {os.path.relpath(folder, ROOT)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
        venv.create(folder, with_pip=True, symlinks=True)
    if new or name == NEWEST:
        wanted = ["--upgrade", "triton"] if name == NEWEST else [f"triton=={name}"]
        why = _install(folder / "bin" / "python", wanted)
        if why is not None and new:
            shutil.rmtree(folder, ignore_errors=True)
            raise SetupError(f"Triton {name} could not be installed: {why}")
        if why is not None:
            print(f"{name}: taking the one that is here already, because {why}", flush=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Last, since it says that the environment is complete, and each time, since the checkout may have moved.
    # A line that begins with "import" is executed: so editable packages of the other environment work too.
    shared = sysconfig.get_path("purelib")
    (site / "shared.pth").write_text(f"{ROOT / 'src'}\nimport site; site.addsitedir({shared!r})\n")
    (found,) = site.glob("triton-*.dist-info")
    return Environment(name, found.name.removesuffix(".dist-info").removeprefix("triton-"))


def _install(python: Path, wanted: list[str]) -> str | None:
    """Install a Triton alone; the reason if that was not possible."""
    # Without a wheel for this machine pip would try to build it, which takes an hour and fails.
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--retries", "1"]
    command = [str(python), "-m", "pip", "install", *options, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_variables())
    return None if done.returncode == 0 else why_not_installed(done.stdout + done.stderr)


def why_not_installed(said: str) -> str:
    """The reason behind what pip said, in one sentence."""
    versions = re.search(r"\(from versions: ([^)]*)\)", said)
    if versions is not None and versions[1] == "none":
        return "no package index was reached (pip found no version of it at all). Is there a network?"
    if versions is not None:
        return f"the package index has other versions only: {versions[1]}."
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    return f"pip said {(errors or said.splitlines() or ['nothing'])[-1]!r}."


def _variables() -> dict[str, str]:
    """Variables of every child. A PYTHONPATH could put another Triton, or another isobit, in front."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


# What is run in each


def compile_kernels(env: Environment, cheap: bool) -> Part:
    """Every kernel for its targets; in the cheap part for one dtype, which has every kernel too, and Hopper,
    the only target that all of them have. There the oldest Triton compiles every call, the others one call of
    each kernel: what a newer one has changed or taken away, a kernel has in each."""
    report = env.folder / "compile.json"
    report.unlink(missing_ok=True)
    command = [env.python, "-m", "isobit", "check", "--law", "compile=cuda:90" if cheap else "compile"]
    command += ["--device", "cpu", *(["--dtype", "bf16"] if cheap else [])]
    command += ["--brief"] if cheap and env.version != OLDEST else []
    code, lines = _run(env, "compile", [*command, "--json", str(report)])
    if not report.is_file():
        return _broken("compile", code, lines, command)
    return kernels_of(json.loads(report.read_text()), env.python)


def kernels_of(report: dict[str, Any], python: str) -> Part:
    """Kernels that compiled and that did not, from the report of a check."""
    cells = [cell for candidate in report["candidates"] for cell in candidate["cases"]]
    part = Part(sum(o["passed"] for cell in cells for o in cell["outputs"]), 0)
    for cell in cells:
        if cell["status"] == "FAIL":
            # A cell may fail before it comes to a kernel.
            part.failed += sum(not o["passed"] for o in cell["outputs"]) or 1
            what = f"{cell['op']} {cell['backend']} {cell['law']} [{cell['case']}]"
            again = cell["command"].replace("isobit", f"{python} -m isobit", 1)
            part.failures.append(Failure(what, _in_a_line(cell["reason"]), again))
    return part


def run_tests(env: Environment) -> Part:
    """The tests that depend on what Triton is."""
    command = [env.python, "-m", "pytest", "-m", "compat", "-rfE", "--disable-warnings"]
    code, lines = _run(env, "tests", [*command, "-p", "no:cacheprovider"])
    part = tests_of(lines, env.python)
    # It crashed, collected nothing, or was told elsewhere (PYTEST_ADDOPTS) not to print how many passed.
    silent = not part.failures and (code != 0 or part.ok == 0)
    return _broken("tests", code, lines, command) if silent else part


def tests_of(lines: Sequence[str], python: str) -> Part:
    """Tests that passed and that did not, from what pytest printed."""
    failures = []
    for line in lines:
        match = re.match(r"(?:FAILED|ERROR) (\S+\.py\b.*?)(?: - (.*))?$", line)
        if match is not None:
            again = f"{python} -m pytest {shlex.quote(match[1])}"
            failures.append(Failure(match[1], match[2] or "see the log", again))
    ended = next((line for line in reversed(lines) if re.search(r"\d \w+.* in [\d.]+s", line)), "")
    count = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error)", ended)}
    return Part(count.get("passed", 0), count.get("failed", 0) + count.get("error", 0), failures)


def _run(env: Environment, part: str, command: list[str]) -> tuple[int, list[str]]:
    """Exit code and lines of a command, which also go to a log. Lines that tell of progress are printed."""
    lines: list[str] = []
    with (
        (env.folder / f"{part}.log").open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=_variables()
        ) as child,
    ):
        for line in child.stdout or ():
            log.write(line)
            lines.append(line.rstrip("\n"))
            if re.match(r"  (ok|FAIL) ", line) or line.rstrip().endswith("%]"):
                print(f"{env.version} {part}: {line.strip()}", flush=True)
    return child.returncode, lines


def _broken(part: str, code: int, lines: Sequence[str], command: list[str]) -> Part:
    """A part that gave no answer."""
    said = [line for line in lines if line.strip()]
    why = f"ended with code {code} and without a result; its last line is: {said[-1] if said else 'none'}"
    return Part(0, 1, [Failure(part, why, shlex.join(command))])


def _in_a_line(reason: str) -> str:
    """A compiler's error quotes the source between its first line and its last, which says what is wrong."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or ["no reason was given"]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


# The report


def table(rows: Sequence[Row]) -> str:
    """One line a Triton."""

    def said(part: Part | None, good: str) -> str:
        if part is None:
            return "-"
        return f"{part.ok} {good}" + (f", {part.failed} FAILED" if part.failed else "")

    lines = [["Triton", "compile", "tests", "seconds"]]
    for row in rows:
        parts = (said(row.compile, "kernels ok"), said(row.tests, "passed"))
        lines.append([row.environment.label, *parts, f"{row.seconds:.0f}"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """The first failures of every Triton, each with its command, and where the rest is."""
    lines = []
    for row in rows:
        for failure in row.failures[:SHOWN]:
            lines += [f"FAIL {row.environment.label} {failure.what}", f"     {failure.why}"]
            lines += [f"     {failure.command}"]
        if row.failures:
            left = len(row.failures) - SHOWN
            more = f"{left} more failures, and all" if left > 0 else "All"
            logs = os.path.relpath(row.environment.folder, ROOT)
            lines.append(f"     {more} that was printed: {logs}/*.log")
    return lines


def main(
    words: Sequence[str] | None = None,
    prepare: Callable[[str], Environment] = environment,
    compile_in: Callable[[Environment, bool], Part] = compile_kernels,
    test_in: Callable[[Environment], Part] = run_tests,
) -> int:
    parser = argparse.ArgumentParser(prog="compat", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--triton", action="append", type=_version, metavar="VERSION",
        help=f"a version, or {NEWEST}; repeatable; {OLDEST}, {TESTED} and {NEWEST} by default",
    )  # fmt: skip
    parser.add_argument(
        "--cheap", action="store_true",
        help=f"only compile, only bf16 for Hopper, and by default under {OLDEST} and {NEWEST}: what CI runs",
    )  # fmt: skip
    given = parser.parse_args(words)
    wanted = given.triton or ([OLDEST, NEWEST] if given.cheap else [OLDEST, TESTED, NEWEST])
    try:
        made = [prepare(name) for name in dict.fromkeys(wanted)]
    except SetupError as error:
        print(f"compat: {error}", file=sys.stderr)
        return 2
    environments = list({env.version: env for env in made}.values())  # the newest may be one of the others
    print(f"Triton {', '.join(env.label for env in environments)}", flush=True)

    def row(env: Environment) -> Row:
        start = time.perf_counter()
        compiled = compile_in(env, given.cheap)
        tested = None if given.cheap else test_in(env)
        return Row(env, compiled, tested, time.perf_counter() - start)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # a Triton takes one core most of the time
        rows = list(pool.map(row, environments))
    print("\n" + table(rows) + "\n")
    for line in notes(rows):
        print(line)
    bad = [row.environment.label for row in rows if row.failures]
    print(f"FAILED under Triton {', '.join(bad)}" if bad else "everything holds under every one of them")
    return int(bool(bad))


def _version(text: str) -> str:
    if text != NEWEST and re.fullmatch(r"\d+(\.\d+)+\w*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a version such as {OLDEST} nor {NEWEST!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
