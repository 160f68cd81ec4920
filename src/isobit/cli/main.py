"""The `isobit` command: check, memcheck, bench, report, demo, info."""

import faulthandler
import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"the isobit command needs {missing.name}: in a checkout of isobit, pip install '.[cli]'"
    ) from None

import isobit
from isobit.bench.candidate import NAME as CANDIDATE
from isobit.bench.candidate import check_candidate, with_candidate
from isobit.bench.cases import subject_of, suite_of
from isobit.bench.report import show
from isobit.bench.runner import NothingTimed, not_timed
from isobit.bench.runner import run as timed
from isobit.bench.stale import lines, results_in
from isobit.bench.suites import suite_names
from isobit.bench.vouch import CheckFailed, check_vouching
from isobit.bench.wanted import Wanted
from isobit.check.candidate_by_name import load_candidate
from isobit.check.effects import check_effects
from isobit.check.files import check_file, check_writable, write
from isobit.check.laws import LAWS
from isobit.check.memcheck import memcheck as under_sanitizer
from isobit.check.request import Request
from isobit.check.stamp import results_folder
from isobit.check.torch_state import in_words
from isobit.cli.arguments import check_commit, device_of, dims_of, dtypes_of, given, known
from isobit.cli.check import Files, by_folder, check_and_report
from isobit.cli.html import page
from isobit.cli.html.show import show_saved
from isobit.cli.info import info_lines
from isobit.demo.run import run_demo
from isobit.frame.contract import ContractError
from isobit.frame.device import arch_key as arch_name
from isobit.frame.device import arch_named, default_device
from isobit.frame.op import OPS, public_ops
from isobit.spec.options import parse_options
from isobit.spec.proof import DTYPES, InputOptions
from isobit.spec.proofs import proofs
from isobit.spec.tolerances import Tolerances, read_tolerances

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Prove and time kernels whose bits do not depend on the batch.",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(isobit.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version and exit", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Prove and time kernels whose bits do not depend on the batch."""


def main() -> None:
    """Run the command; contract errors are messages, not tracebacks."""
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a kernel that crashes the process leaves the line where it was called
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A pipe shows each line at once, as a terminal does; and a message of somebody's kernel may hold what
        # this terminal cannot show.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        app()
    except ContractError as error:
        sys.exit(f"isobit: {error}")


Names = list[str] | None
ARCHS = ("cpu", "gfx942", "sm_80", "sm_90")  # keys that tolerance overrides may have
SHORT = {"--batch": "--dim", "--seq": "--dim", "--vocab": "--dim", "--gradient": "--no-gradient"}
PUBLIC = sorted(public_ops())
SUITES = suite_names()
TARGETS = sorted({t for name in PUBLIC for k in proofs()[name].kernels.values() for t in k.by_name()})
# A folder is timed together, by the name that its files have if an op has it.
TIMED = sorted({OPS[name].folder: name for name in sorted(PUBLIC, key=lambda n: n == OPS[n].folder)}.values())


@app.command()
def check(
    ctx: typer.Context,
    op: Annotated[Names, typer.Option(help="op to check; repeatable; default: all")] = None,
    backend: Annotated[
        Names, typer.Option(help="backend; repeatable; default: all that can run on this machine")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(help="your own function for one op, my_pkg.my_mod:my_fn")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="my_mod:adapt, adapt(fn) -> fn, maps a candidate's names and outputs")
    ] = None,
    output_dtype: Annotated[
        str | None, typer.Option(help="dtype of a candidate's outputs, if it is not the op's")
    ] = None,
    law: Annotated[Names, typer.Option(help=f"law; repeatable: {', '.join(LAWS)}")] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="only the law of ahead-of-time compilation")
    ] = False,
    target: Annotated[
        Names, typer.Option(help=f"target of the compilation law; repeatable: {', '.join(TARGETS)}")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or any torch device")] = "auto",
    dtype: Annotated[Names, typer.Option(help=f"repeatable: {', '.join(DTYPES)}")] = None,
    arch_key: Annotated[str | None, typer.Option(help="tolerance override to use, e.g. sm_90")] = None,
    tolerances: Annotated[
        Path | None, typer.Option(help="file with your own tolerances (docs/check_my_kernel.md)")
    ] = None,
    case: Annotated[str | None, typer.Option(help="only the declared case with this name")] = None,
    batch: Annotated[int | None, typer.Option(help="B of a case of your own")] = None,
    seq: Annotated[int | None, typer.Option(help="T of a case of your own")] = None,
    vocab: Annotated[int | None, typer.Option(help="V of a case of your own")] = None,
    dim: Annotated[
        Names, typer.Option(help="any dimension of a case of your own, NAME=SIZE; repeatable")
    ] = None,
    option: Annotated[
        Names, typer.Option(help="option of every case, NAME=VALUE, e.g. temperature=0.7; repeatable")
    ] = None,
    input_mode: Annotated[str, typer.Option(help="edge, random or constant")] = "edge",
    constant_value: Annotated[float, typer.Option(help="value of constant inputs")] = 0.25,
    token_value: Annotated[int | None, typer.Option(help="token id of every row, modulo V")] = None,
    seed: Annotated[int, typer.Option(help="seed of the inputs")] = 123,
    gradient: Annotated[bool, typer.Option("--gradient/--no-gradient", help="check gradients")] = True,
    grad_mode: Annotated[str, typer.Option(help="cotangents: random or ones")] = "random",
    grad_seed: Annotated[int, typer.Option(help="seed of the cotangents")] = 123,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="write the report here, - for standard output")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="write <results>/<gpu>/check_<op>.json")] = None,
    html: Annotated[Path | None, typer.Option(help="write the report as an HTML page")] = None,
    commit: Annotated[str | None, typer.Option(help="commit for the stamp if there is no git")] = None,
) -> None:
    """Prove every op on this machine: accuracy, gradients, bits, bad input, memory, compilation."""
    known("input mode", [input_mode], ["edge", "random", "constant"])
    known("gradient mode", [grad_mode], ["random", "ones"])
    request = Request(
        ops=known("op", op or [], PUBLIC),
        backends=tuple(backend or ()),
        laws=("compile",) if compile else known("law", law or [], list(LAWS)),
        dtypes=dtypes_of(dtype or []),
        device=device_of(device),
        arch=arch_key and arch_named(arch_key),
        dims=dims_of(dim or [], batch, seq, vocab),
        case=case,
        data=input_mode,
        vary=parse_options(option or []),
        inputs=InputOptions(seed, constant_value, token_value),
        gradient=gradient,
        grad_mode=grad_mode,
        grad_seed=grad_seed,
        targets=known("target", target or [], TARGETS),
        tolerances=Tolerances() if tolerances is None else read_tolerances(tolerances),
    )
    _consistent(request, compile and bool(law))
    check_commit(commit, json_path, results, html)
    if tolerances is not None and results is not None:
        raise ContractError("--results need isobit's own tolerances: with --tolerances, use --json")
    files = Files(json_path, results, html, commit)
    with files.stdout_for_json():  # also from what a candidate prints
        if candidate is not None:
            if len(request.ops) != 1 or request.backends or results is not None:
                raise ContractError(
                    "--candidate is for one --op, without --backend and --results; --json keeps its report"
                )
            (dtype_out,) = dtypes_of([output_dtype]) if output_dtype else (None,)
            theirs = load_candidate(request.ops[0], candidate, request.device, adapter, dtype_out)
            request = replace(request, candidate=theirs)
        elif adapter is not None or output_dtype is not None:
            raise ContractError("--adapter and --output-dtype are for a --candidate: give one with them")
        check_effects(request, given(ctx, SHORT))
        raise typer.Exit(check_and_report(request, files))


def _consistent(request: Request, law_and_compile: bool) -> None:
    """Options that would be ignored, or fail only after minutes, fail now."""
    if law_and_compile:
        raise ContractError("--compile is short for --law compile: use only one of --law and --compile")
    if request.case is not None and request.dims is not None:
        raise ContractError("--case selects a declared case and --dim makes one: use only one of them")
    if request.targets and request.laws != ("compile",):
        raise ContractError("--target is only for the compilation law: add --law compile")
    if request.device.type == "meta":
        raise ContractError("device 'meta' holds no values to check")
    known = {*ARCHS, arch_name(request.device)}
    if request.arch is not None and request.arch not in known:
        raise ContractError(f"unknown arch key {request.arch!r}; known: {', '.join(sorted(known))}")
    for seed in (request.inputs.seed, request.grad_seed):
        if not 0 <= seed < 2**63:
            raise ContractError(f"seed {seed} is outside [0, 2^63)")


@app.command()
def memcheck(
    op: Annotated[Names, typer.Option(help="op; repeatable; default: all")] = None,
    backend: Annotated[Names, typer.Option(help="backend; repeatable; default: all with kernels")] = None,
    results: Annotated[Path | None, typer.Option(help="write <results>/<gpu>/memcheck_<op>.json")] = None,
    commit: Annotated[str | None, typer.Option(help="commit for the stamp if there is no git")] = None,
    timeout: Annotated[float, typer.Option(help="limit in seconds for one op and backend")] = 900.0,
) -> None:
    """Run the cases of ops, and calls with any integers, under NVIDIA's compute-sanitizer."""
    check_commit(commit, results)
    ops = known("op", op or [], PUBLIC) or tuple(PUBLIC)
    there = list(dict.fromkeys(b for name in ops for b in proofs()[name].kernels))
    wanted = known("backend", backend or [], there) or tuple(there)
    pairs = {name: [(name, b) for b in wanted if b in proofs()[name].kernels] for name in ops}
    for name in (name for name in ops if op and not pairs[name]):
        has = ", ".join(proofs()[name].kernels) or "none"
        raise ContractError(f"--op {name}: no kernels of {', '.join(wanted) or 'its own'}; it has {has}")
    print(f"isobit {isobit.__version__} memcheck; a minute or more each")
    passed, folders = True, by_folder([OPS[name] for name in ops if pairs[name]])
    files = {} if results is None else {
        folder: results / results_folder(default_device()) / f"memcheck_{folder}.json" for folder in folders
    }  # fmt: skip
    for path in files.values():
        check_writable(path, "--results")
    for folder, names in folders.items():
        found = under_sanitizer([pair for name in names for pair in pairs[name]], commit, timeout, print)
        passed = passed and found["passed"]
        if folder in files:
            write(files[folder], json.dumps(found, indent=1) + "\n")
            print(f"wrote {files[folder]}")
    raise typer.Exit(int(not passed))


@app.command()
def bench(
    op: Annotated[Names, typer.Option(help=f"op to time; repeatable: {', '.join(TIMED)}")] = None,
    suite: Annotated[Names, typer.Option(help=f"suite to time; repeatable: {', '.join(SUITES)}")] = None,
    case: Annotated[
        Names,
        typer.Option(
            help="sizes of your own, e.g. N=4096,V=50257,dtype=bf16; the others are declared ones; repeatable"
        ),
    ] = None,
    option: Annotated[
        Names, typer.Option(help="option of every case, NAME=VALUE, e.g. temperature=0.7; repeatable")
    ] = None,
    direction: Annotated[
        Names, typer.Option(help="repeatable: fwd, bwd, fwd_bwd; for products fwd, dx, dw")
    ] = None,
    impl: Annotated[
        Names, typer.Option(help="time only this one (isobit, a rival, copy); repeatable")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or any torch device")] = "auto",
    backend: Annotated[str | None, typer.Option(help="time this backend too, as isobit:<backend>")] = None,
    skip_check: Annotated[
        bool, typer.Option("--skip-check", help="time without checking; the stamp says so")
    ] = False,
    check_report: Annotated[
        list[Path] | None,
        typer.Option(
            help="a report of `isobit check` of the same kernels on this device, instead of a check; "
            "repeatable"
        ),
    ] = None,
    core: Annotated[
        bool, typer.Option("--core", help="only representative cases: minutes, not an hour")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="write <results>/<gpu>/<op>.json")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="keep what the file has for these kernels, and time the rest")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="stop between two cases after this many minutes, and say what is left"),
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(help="my_pkg.my_mod:my_fn: your own function, next to the rivals of one --op"),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="my_mod:adapt, adapt(fn) -> fn, maps a candidate's names and outputs")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write the results as an HTML page")] = None,
    commit: Annotated[str | None, typer.Option(help="commit for the stamp if there is no git")] = None,
) -> None:
    """Time every op, or a suite, beside rivals and the floor. An op that fails its check is not timed."""
    if skip_check and check_report:
        raise ContractError("--skip-check and --check-report exclude each other: use only one of them")
    if resume and results is None:
        raise ContractError("--resume continues a file: say with --results where it is")
    if core and case:
        raise ContractError("--core selects declared cases and --case makes one: use only one of them")
    if minutes is not None and minutes <= 0:
        raise ContractError(f"--minutes {minutes:g}: must be more than 0")
    check_commit(commit, results, html)
    where = device_of(device)
    if where.type == "meta":
        raise ContractError("device 'meta' computes nothing, so nothing can be timed: choose cpu or cuda")
    ops = known("op", op or [], PUBLIC) or (() if suite else TIMED)
    for names in by_folder([OPS[name] for name in ops]).values():
        if len(names) > 1:
            raise ContractError(f"--op {names[1]}: is timed together with {names[0]}: name one of them")
    subjects = [*(subject_of(OPS[name]) for name in ops), *map(suite_of, known("suite", suite or [], SUITES))]
    theirs = None
    if candidate is not None:
        if len(op or ()) != 1 or suite:
            raise ContractError("--candidate is for one --op: name it")
        if impl and CANDIDATE not in impl:
            raise ContractError(f"--candidate is not timed without --impl {CANDIDATE}: add it, or no --impl")
        theirs = load_candidate(ops[0], candidate, where, adapter, None)
        subjects = [with_candidate(subjects[0], theirs)]
        if theirs.imported:
            print(f"importing {candidate} {in_words(theirs.imported)}, set back here")
    elif adapter is not None:
        raise ContractError("--adapter is for a --candidate: give one with it")
    if html is not None:
        check_file(html, "--html")
    wanted = Wanted(
        tuple(case or ()),
        tuple(direction or ()),
        backend,
        tuple(impl or ()),
        parse_options(option or []),
        core,
    )
    jobs = [wanted.planned(subject, where) for subject in subjects]  # all of them before the first is timed
    if core and jobs == [replace(wanted, core=False).planned(subject, where) for subject in subjects]:
        raise ContractError(f"--core has no effect on {where}: the cases are the same without it")
    for path in check_report or ():
        check_vouching(path, [name for subject in subjects for name in subject.ops])
    end = None if minutes is None else time.monotonic() + 60 * minutes
    reports: list[dict[str, Any]] = []
    failed = None
    for subject in subjects:
        try:
            if theirs is not None and not skip_check:
                check_candidate(theirs, where, print)
            found = timed(
                subject,
                wanted.cases(subject),
                direction,
                where,
                backend,
                results,
                skip_check,
                impl or None,
                commit=commit,
                check_reports=check_report or (),
                options=wanted.options,
                core=core,
                resume=resume,
                minutes=None if end is None else (end - time.monotonic()) / 60,
            )
        except NothingTimed as error:
            reports, failed = [*reports, error.report], str(error)
            break
        except CheckFailed as error:
            reports, failed = [*reports, not_timed(subject, where, commit, str(error))], str(error)
            break
        reports.append(found)
        if found["rows"]:
            print()
            show(found)
    if html is not None:
        write(html, page(reports, "isobit bench"))
    if failed is not None:
        sys.exit(f"isobit: {failed}")


@app.command("report")
def report_on(
    files: Annotated[
        list[Path] | None, typer.Argument(help="JSON files of check, memcheck and bench, shown together")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write these files as an HTML page")] = None,
    against: Annotated[
        Path | None, typer.Option(help="an older file: report what has become worse since")
    ] = None,
    slower: Annotated[
        float | None, typer.Option(help="multiple of the older time that is worse; default: 1.05")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="folder of result files; default: results")] = None,
    stale: Annotated[bool, typer.Option("--stale", help="list files of changed kernels")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with 1 if one is stale or unfinished")
    ] = False,
) -> None:
    """Show saved reports together, or compare one with an older one (exit code 1 if something is worse).
    Without files: which result files are of today's kernels, and the command that renews each that is not."""
    if files:
        if stale or strict or results is not None:
            raise ContractError(
                "--stale, --strict and --results are about a folder of results: leave the files out"
            )
        raise typer.Exit(int(show_saved(files, html, against, slower)))
    if html is not None or against is not None or slower is not None:
        raise ContractError("--html, --against and --slower are for files: name them")
    found = results_in(results or Path("results"))
    for line in lines(found, stale):
        print(line)
    raise typer.Exit(int(strict and any(result.stale or result.lacks for result in found)))


@app.command()
def demo(
    zero_drift: Annotated[
        bool, typer.Option("--zero-drift", help="train with isobit's functions, too: slow on a CPU")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or any torch device")] = "auto",
    steps: Annotated[int | None, typer.Option(help="number of training steps")] = None,
    seed: Annotated[int, typer.Option(help="random seed of weights, prompts and samples")] = 0,
    html: Annotated[Path, typer.Option(help="write the page here")] = Path("demo.html"),
) -> None:
    """GRPO from scratch with nothing downloaded: exit code 1 if the task was not learned."""
    raise typer.Exit(int(not run_demo(device_of(device), steps, seed, zero_drift, html)))


@app.command()
def info(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or any torch device")] = "auto",
    try_them: Annotated[
        bool, typer.Option("--try", help="enable and disable isobit in TRL, verl and FLA: seconds")
    ] = False,
) -> None:
    """Versions, device, where isobit is on, and for every op what would serve and why others would not."""
    for line in info_lines(device_of(device), try_them):
        print(line)
