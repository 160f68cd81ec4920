"""A benchmark from the command line: what is requested, checked as a whole before the first case is timed."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isobit.bench.candidate import NAME as CANDIDATE
from isobit.bench.candidate import check_candidate, with_candidate
from isobit.bench.cases import Subject, parse_case, subject_of, suite_of
from isobit.bench.check_gate import CheckFailed, require_relevant_report
from isobit.bench.report import Report, show
from isobit.bench.runner import Job, NothingTimed, not_timed, planned, to_json
from isobit.bench.runner import run as timed
from isobit.check.candidate import Candidate
from isobit.check.candidate_by_name import load_candidate
from isobit.check.files import check_file, write
from isobit.check.torch_state import in_words
from isobit.cli.check import by_folder
from isobit.cli.html import page
from isobit.frame.contract import ContractError
from isobit.frame.op import OPS
from isobit.spec.proof import Case


@dataclass(frozen=True)
class Bench:
    """The flags of `isobit bench`. Empty means everything."""

    ops: tuple[str, ...]
    suites: tuple[str, ...]
    sizes: tuple[str, ...]  # N=4096,V=50257,dtype=bf16
    directions: tuple[str, ...]
    backend: str | None
    impls: tuple[str, ...]
    options: Mapping[str, Any]
    core: bool
    series: tuple[str, ...]
    device: torch.device
    skip_check: bool
    check_reports: tuple[Path, ...]
    resume: bool
    minutes: float | None
    candidate: str | None
    adapter: str | None
    json: Path | None
    html: Path | None
    results: Path | None

    def run(self) -> None:
        """Time every op and suite, and show and write the results."""
        self._check_flags()
        subjects = [*(subject_of(OPS[name]) for name in self.ops), *map(suite_of, self.suites)]
        theirs = self._load_candidate()
        if theirs is not None:
            subjects = [with_candidate(subjects[0], theirs)]
        self._check_files(subjects)
        jobs = [self.planned(subject) for subject in subjects]  # all of them before the first is timed
        if self.core and jobs == [replace(self, core=False).planned(subject) for subject in subjects]:
            raise ContractError(f"--core has no effect on {self.device}: the cases are the same without it")
        for path in self.check_reports:
            require_relevant_report(path, [name for subject in subjects for name in subject.ops])
        reports, failed = self._time(subjects, theirs)
        if self.json is not None and failed is not None:  # otherwise it was written while cases were timed
            write(self.json, to_json(reports[0]))
        if self.html is not None:
            write(self.html, page(reports, "isobit bench"))
        if failed is not None:
            sys.exit(f"isobit: {failed}")

    def cases(self, subject: Subject) -> list[Case] | None:
        return [parse_case(text, subject) for text in self.sizes] or None

    def planned(self, subject: Subject) -> list[Job]:
        """What would be timed for a subject; an error for requested things that would not be."""
        return planned(
            subject, self.cases(subject), self.directions or None, self.device, self.backend,
            self.impls or None, self.options, self.core, self.series or None,
        )  # fmt: skip

    def _check_flags(self) -> None:
        """Flags that exclude each other, or would have no effect."""
        if self.skip_check and self.check_reports:
            raise ContractError("--skip-check and --check-report exclude each other: use only one of them")
        if self.resume and self.results is None:
            raise ContractError("--resume continues a file: say with --results where it is")
        if self.core and self.sizes:
            raise ContractError("--core selects declared cases and --case makes one: use only one of them")
        if self.minutes is not None and self.minutes <= 0:
            raise ContractError(f"--minutes {self.minutes:g}: must be more than 0")
        if self.device.type == "meta":
            raise ContractError("device 'meta' computes nothing, so nothing can be timed: choose cpu or cuda")
        for names in by_folder([OPS[name] for name in self.ops]).values():
            if len(names) > 1:
                raise ContractError(f"--op {names[1]}: is timed together with {names[0]}: name one of them")
        if self.series and len(self.ops) + len(self.suites) > 1:
            raise ContractError("--series is for one --op or --suite: name one")
        for i, name in enumerate(self.suites):
            if name in self.suites[:i]:
                raise ContractError(f"suite {name!r} is given twice")

    def _load_candidate(self) -> Candidate | None:
        if self.candidate is None:
            if self.adapter is not None:
                raise ContractError("--adapter is for a --candidate: give one with it")
            return None
        if self.impls and CANDIDATE not in self.impls:
            raise ContractError(f"--candidate is not timed without --impl {CANDIDATE}: add it, or no --impl")
        theirs = load_candidate(self.ops[0], self.candidate, self.device, self.adapter, None)
        if theirs.imported:
            print(f"importing {self.candidate} {in_words(theirs.imported)}, set back here")
        return theirs

    def _check_files(self, subjects: list[Subject]) -> None:
        """A file that cannot be written is an error before anything runs."""
        if self.json is not None and len(subjects) > 1:
            raise ContractError("--json is for one --op or --suite: --results writes a file for each")
        for path, flag in ((self.json, "--json"), (self.html, "--html")):
            if path is not None:
                check_file(path, flag)
        if self.json is not None and self.html is not None and self.json.resolve() == self.html.resolve():
            raise ContractError(f"--json and --html are both {self.html}: the page would replace the report")

    def _time(self, subjects: list[Subject], theirs: Candidate | None) -> tuple[list[Report], str | None]:
        """A report for each subject. Stops at the first that fails, with the reason."""
        end = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        reports: list[Report] = []
        for subject in subjects:
            try:
                if theirs is not None and not self.skip_check:
                    check_candidate(theirs, self.device, print)
                report = timed(
                    subject, self.cases(subject), self.directions or None, self.device, self.backend,
                    self.results, self.skip_check, self.impls or None, check_reports=self.check_reports,
                    options=self.options, core=self.core, series=self.series or None,
                    resume=self.resume,
                    minutes=None if end is None else (end - time.monotonic()) / 60, file=self.json,
                )  # fmt: skip
            except NothingTimed as error:
                return [*reports, error.report], str(error)
            except CheckFailed as error:
                return [*reports, not_timed(subject, self.device, str(error))], str(error)
            reports.append(report)
            if report["rows"]:
                print()
                show(report)
        return reports, None
