"""The `isobit` command: check, memcheck, bench, report, drift, demo, info."""

import errno
import faulthandler
import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"the isobit command needs {missing.name}: in a checkout of isobit, pip install '.[cli]'"
    ) from None

import isobit
from isobit.bench.suites import suite_names
from isobit.check.candidate_by_name import load_candidate
from isobit.check.effects import check_effects
from isobit.check.files import check_file, check_writable, in_lines, write
from isobit.check.laws import LAWS
from isobit.check.memcheck import memcheck as under_sanitizer
from isobit.check.request import Request
from isobit.check.stamp import results_folder
from isobit.cli.any_function import Flags, check_rows_and_report, row_request
from isobit.cli.arguments import DATA_HELP, data_of, device_of, dims_of, dtypes_of, known, laws_of
from isobit.cli.bench import Bench
from isobit.cli.check import Files, by_folder, check_and_report
from isobit.cli.drift import Drift
from isobit.cli.html import page
from isobit.cli.html.show import show_saved
from isobit.cli.info import info_lines
from isobit.demo.run import run_demo
from isobit.drift.axes import AXES, DEFAULT
from isobit.frame.contract import ContractError
from isobit.frame.device import default_device
from isobit.frame.op import OPS, public_ops
from isobit.spec.options import parse_options
from isobit.spec.proof import DTYPES
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
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What Python still holds for it would fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"isobit: the output could not be written: {error.strerror}")


Names = list[str] | None
PUBLIC = sorted(public_ops())
TARGETS = sorted({t for name in PUBLIC for k in proofs()[name].kernels.values() for t in k.by_name()})
# A folder is timed together, by the name that its files have if an op has it.
TIMED = sorted({OPS[name].folder: name for name in sorted(PUBLIC, key=lambda n: n == OPS[n].folder)}.values())

# Panels of --help.
INPUTS, CANDIDATE, FILES, RUN = "Inputs", "Your own function", "Files", "How to run"

# Options of several commands.
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or any torch device", rich_help_panel=RUN)]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="write the report here, - for standard output", rich_help_panel=FILES),
]
HtmlFile = Annotated[
    Path | None, typer.Option(help="write the report as an HTML page", rich_help_panel=FILES)
]
Adapter = Annotated[
    str | None,
    typer.Option(help="my_mod:adapt, adapt(fn) -> fn, maps its names and outputs", rich_help_panel=CANDIDATE),
]
Varied = Annotated[
    Names,
    typer.Option(
        help="option of every case, NAME=VALUE, e.g. temperature=0.7; repeatable", rich_help_panel=INPUTS
    ),
]


@app.command()
def check(
    op: Annotated[Names, typer.Option(help="op to check; repeatable; default: all")] = None,
    backend: Annotated[
        Names, typer.Option(help="backend; repeatable; default: all that can run on this machine")
    ] = None,
    law: Annotated[
        Names,
        typer.Option(
            help=f"law; repeatable: {', '.join(LAWS)}; or compile=TARGET, with {', '.join(TARGETS)}"
        ),
    ] = None,
    brief: Annotated[
        bool,
        typer.Option("--brief", help="of a law or dtype that is named, what a check of all laws takes"),
    ] = False,
    device: Device = "auto",
    tolerances: Annotated[
        Path | None, typer.Option(help="file with your own tolerances (docs/check_my_kernel.md)")
    ] = None,
    dtype: Annotated[
        Names, typer.Option(help=f"repeatable: {', '.join(DTYPES)}", rich_help_panel=INPUTS)
    ] = None,
    case: Annotated[
        str | None, typer.Option(help="only the declared case with this name", rich_help_panel=INPUTS)
    ] = None,
    dim: Annotated[
        Names,
        typer.Option(
            help="size of a case of your own, NAME=SIZE; the others are declared ones; repeatable",
            rich_help_panel=INPUTS,
        ),
    ] = None,
    option: Varied = None,
    data: Annotated[Names, typer.Option(help=DATA_HELP, rich_help_panel=INPUTS)] = None,
    candidate: Annotated[
        str | None,
        typer.Option(help="check it in place of one --op: my_pkg.my_mod:my_fn", rich_help_panel=CANDIDATE),
    ] = None,
    adapter: Adapter = None,
    output_dtype: Annotated[
        str | None,
        typer.Option(help="dtype of its outputs, if it is not the op's", rich_help_panel=CANDIDATE),
    ] = None,
    fn: Annotated[
        str | None,
        typer.Option(
            help="any function of rows, with --inputs and --rows: my_mod:my_fn", rich_help_panel=CANDIDATE
        ),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="my_mod:make, make() -> its arguments by name", rich_help_panel=CANDIDATE),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="arguments whose first dimension is that of rows: x,y", rich_help_panel=CANDIDATE),
    ] = None,
    reduction: Annotated[
        str | None,
        typer.Option(help="my_mod:other, the same with another order of its sums", rich_help_panel=CANDIDATE),
    ] = None,
    json_path: JsonFile = None,
    html: HtmlFile = None,
    results: Annotated[
        Path | None, typer.Option(help="write <results>/<gpu>/check_<op>.json", rich_help_panel=FILES)
    ] = None,
) -> None:
    """Prove every op on this machine: accuracy, gradients, bits, bad input, memory, compilation."""
    laws, targets = laws_of(law or [], list(LAWS), TARGETS)
    filled = data_of(data or [])
    files = Files(json_path, results, html)
    unread = {"--op": op, "--backend": backend, "--tolerances": tolerances, "--dtype": dtype, "--dim": dim,
              "--option": option, "--candidate": candidate, "--adapter": adapter,
              "--output-dtype": output_dtype, "--results": results, "--law compile": targets,
              "--brief": brief}  # fmt: skip
    with files.stdout_for_json():
        moved = None if device == "auto" else device_of(device)
        flags, others = Flags(fn, inputs, rows, reduction), [flag for flag, given in unread.items() if given]
        of_rows = row_request(flags, laws, case, filled, moved, others)
        if of_rows is not None:
            raise typer.Exit(check_rows_and_report(of_rows, files))
    request = Request(
        ops=known("op", op or [], PUBLIC),
        backends=tuple(backend or ()),
        laws=laws,
        dtypes=dtypes_of(dtype or []),
        device=device_of(device),
        dims=dims_of(dim or []),
        case=case,
        data=filled.kind,
        vary=parse_options(option or []),
        inputs=filled.inputs,
        cotangents=filled.cotangents,
        targets=targets,
        brief=brief,
        tolerances=Tolerances() if tolerances is None else read_tolerances(tolerances),
    )
    if request.case is not None and request.dims is not None:
        raise ContractError("--case selects a declared case and --dim makes one: use only one of them")
    if request.device.type == "meta":
        raise ContractError("device 'meta' holds no values to check")
    if brief and not (laws or dtype):
        raise ContractError("--brief has no effect on a check of all laws, which is brief: leave it out")
    if tolerances is not None and results is not None:
        raise ContractError("--results need isobit's own tolerances: with --tolerances, use --json")
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
        named = {"--dim": dim, "--option": option, "--tolerances": tolerances}
        check_effects(request, [*filled.flags, *(flag for flag, value in named.items() if value)])
        raise typer.Exit(check_and_report(request, files))


@app.command()
def memcheck(
    op: Annotated[Names, typer.Option(help="op; repeatable; default: all")] = None,
    backend: Annotated[Names, typer.Option(help="backend; repeatable; default: all with kernels")] = None,
    results: Annotated[Path | None, typer.Option(help="write <results>/<gpu>/memcheck_<op>.json")] = None,
    timeout: Annotated[float, typer.Option(help="limit in seconds for one op and backend")] = 900.0,
) -> None:
    """Run the cases of ops, and calls with any integers, under NVIDIA's compute-sanitizer."""
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
        report = under_sanitizer([pair for name in names for pair in pairs[name]], timeout, print)
        passed = passed and report["passed"]
        if folder in files:
            write(files[folder], in_lines(report) + "\n")
            print(f"wrote {files[folder]}")
    raise typer.Exit(int(not passed))


@app.command()
def bench(
    op: Annotated[Names, typer.Option(help=f"op to time; repeatable: {', '.join(TIMED)}")] = None,
    suite: Annotated[
        Names,
        typer.Option(
            help="a Python file that declares SERIES, or a suite of a checkout by name; repeatable: "
            f"{', '.join(suite_names()) or 'none here'}"
        ),
    ] = None,
    direction: Annotated[
        Names, typer.Option(help="repeatable: fwd, bwd, fwd_bwd; for products fwd, dx, dw")
    ] = None,
    impl: Annotated[
        Names, typer.Option(help="time only this one (isobit, a rival, copy); repeatable")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="time this backend too, as isobit:<backend>")] = None,
    case: Annotated[
        Names,
        typer.Option(
            help="sizes of your own, e.g. N=4096,V=50257,dtype=bf16; the others are declared ones; "
            "repeatable",
            rich_help_panel=INPUTS,
        ),
    ] = None,
    option: Varied = None,
    series: Annotated[
        Names, typer.Option(help="only this series of one op or suite; repeatable", rich_help_panel=INPUTS)
    ] = None,
    core: Annotated[
        bool,
        typer.Option(
            "--core", help="only representative cases: minutes, not an hour", rich_help_panel=INPUTS
        ),
    ] = False,
    device: Device = "auto",
    skip_check: Annotated[
        bool,
        typer.Option("--skip-check", help="time without checking; the stamp says so", rich_help_panel=RUN),
    ] = False,
    check_report: Annotated[
        list[Path] | None,
        typer.Option(
            help="a report of `isobit check` of the same kernels on this device, instead of a check; "
            "repeatable",
            rich_help_panel=RUN,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="keep what the file in --results has for these kernels, and time the rest",
            rich_help_panel=RUN,
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="stop between two cases after this many minutes, and say what is left", rich_help_panel=RUN
        ),
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(help="my_pkg.my_mod:my_fn, next to the rivals of one --op", rich_help_panel=CANDIDATE),
    ] = None,
    adapter: Adapter = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="write the results of one op or suite here", rich_help_panel=FILES),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="write the results as an HTML page", rich_help_panel=FILES)
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="write <results>/<gpu>/<op>.json", rich_help_panel=FILES)
    ] = None,
) -> None:
    """Time every op, or a suite, next to rivals and the floor. An op that fails its check is not timed."""
    asked = Bench(
        ops=known("op", op or [], PUBLIC) or (() if suite else tuple(TIMED)),
        suites=tuple(suite or ()),
        sizes=tuple(case or ()),
        directions=tuple(direction or ()),
        backend=backend,
        impls=tuple(impl or ()),
        options=parse_options(option or []),
        core=core,
        series=tuple(series or ()),
        device=device_of(device),
        skip_check=skip_check,
        check_reports=tuple(check_report or ()),
        resume=resume,
        minutes=minutes,
        candidate=candidate,
        adapter=adapter,
        json=json_path,
        html=html,
        results=results,
    )
    if candidate is not None and (len(op or ()) != 1 or suite):
        raise ContractError("--candidate is for one --op: name it")
    asked.run()


@app.command("report")
def report_on(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="JSON files of check, memcheck, bench and drift"),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="write these files as an HTML page")] = None,
    against: Annotated[
        Path | None, typer.Option(help="an older file: report what has become worse since")
    ] = None,
    slower: Annotated[
        float | None, typer.Option(help="multiple of the older time that is worse; default: 1.05")
    ] = None,
) -> None:
    """Show saved reports together, or compare one with an older one (exit code 1 if something is worse)."""
    if not files:
        raise typer.BadParameter(
            "which ones? `isobit check --json FILE` and `isobit bench --op OP --json FILE` write such files",
            param_hint="FILES",
        )  # fmt: skip
    raise typer.Exit(int(show_saved(files, html, against, slower)))


@app.command()
def drift(
    model: Annotated[
        str, typer.Argument(help="folder of a Hugging Face checkpoint, or with --random a config")
    ],
    random: Annotated[bool, typer.Option("--random", help="random weights; only the config is read")] = False,
    vs: Annotated[str, typer.Option(help=f"what is compared, of {', '.join(AXES)}")] = ",".join(DEFAULT),
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="a JSON list of ids or a JSON string a line; default: made up", rich_help_panel=INPUTS
        ),
    ] = None,
    rollout: Annotated[
        Path | None,
        typer.Option(help="JSONL of an engine's log-probabilities (docs/drift.md)", rich_help_panel=INPUTS),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="use at most this many; 0 for all", rich_help_panel=INPUTS)
    ] = 1024,
    length: Annotated[
        int, typer.Option(help="tokens of the longest made-up sequence", rich_help_panel=INPUTS)
    ] = 128,
    dtype: Annotated[
        str | None, typer.Option(help=f"of the weights: {', '.join(DTYPES)}; default: the checkpoint's")
    ] = None,
    no_where: Annotated[
        bool, typer.Option("--no-where", help="only log-probabilities, not where a difference begins")
    ] = False,
    try_it: Annotated[
        bool, typer.Option("--try", help="also try what removes the differences: slow on a CPU")
    ] = False,
    device: Device = "auto",
    json_path: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Compute the same tokens in several ways: what differs, and in which module it begins. Exit code 1 if
    bits differ."""
    files = Files(json_path, None, html)
    asked = Drift(
        model=model,
        random=random,
        dtype=dtypes_of([dtype])[0] if dtype else None,
        device=device_of(device),
        axes=known("axis", [name.strip() for name in vs.split(",")], list(AXES)),
        prompts=prompts,
        rollout=rollout,
        tokens=tokens,
        length=length,
        locate=not no_where,
        try_it=try_it,
        files=files,
    )
    with files.stdout_for_json():
        code = asked.run()
    raise typer.Exit(code)


@app.command()
def demo(
    zero_drift: Annotated[
        bool, typer.Option("--zero-drift", help="train with isobit's functions, too: slow on a CPU")
    ] = False,
    device: Device = "auto",
    steps: Annotated[int | None, typer.Option(help="number of training steps")] = None,
    seed: Annotated[int, typer.Option(help="random seed of weights, prompts and samples")] = 0,
    html: Annotated[Path, typer.Option(help="write the page here")] = Path("demo.html"),
) -> None:
    """GRPO from scratch with nothing downloaded: exit code 1 if the task was not learned."""
    check_file(html, "--html")
    report = run_demo(device_of(device), steps, seed, zero_drift)
    write(html, page([report], "isobit demo"))
    print(f"wrote {html}")
    raise typer.Exit(int(not report["passed"]))


@app.command()
def info(
    op: Annotated[
        Names, typer.Option(help="of this op, why the other backends would not serve; repeatable")
    ] = None,
    device: Device = "auto",
    try_them: Annotated[
        bool, typer.Option("--try", help="enable and disable isobit in TRL, verl, FLA and vLLM: seconds")
    ] = False,
) -> None:
    """Versions, device, where isobit is on, and for every op what would serve. With --op, why others would
    not."""
    for line in info_lines(device_of(device), try_them, known("op", op or [], PUBLIC)):
        print(line)
