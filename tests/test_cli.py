"""Guards the `isobit` command: what each bad option answers, exit codes, and the report for machines."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from commands import Done, Isobit, report
from isobit import __version__, explain
from isobit.check import runner
from isobit.check.runner import FAIL, LAWS, OK, UNSUPPORTED
from isobit.check.source_hash import kernel_sha
from isobit.cli import info
from isobit.cli import main as cli
from isobit.frame.op import OPS, public_ops

ROOT = Path(__file__).parent.parent
LOGP = ("--op", "logp", "--device", "cpu", "--backend", "reference")
SMALL = (*LOGP, "--dim", "B=2", "--dim", "T=3", "--dim", "V=17")
PUBLIC = ", ".join(sorted(public_ops()))
BACKENDS = ", ".join(backend.name for backend in OPS["logp"].backends)


# Help and info


def test_python_dash_m_is_the_command() -> None:
    command = [sys.executable, "-m", "isobit", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and all(name in done.stdout for name in ("check", "bench", "info"))
    assert 'isobit = "isobit.cli.main:main"' in (ROOT / "pyproject.toml").read_text()


def test_a_full_disk_is_one_line_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as nowhere:
        command = [sys.executable, "-m", "isobit", "info", "--op", "logp"]
        done = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "isobit: the output could not be written: No space left on device\n"


def test_a_folder_is_timed_by_the_name_of_its_files() -> None:
    folders = [OPS[name].folder for name in cli.TIMED]
    assert sorted(folders) == sorted({op.folder for op in public_ops().values()})
    assert "grpo_loss" in cli.TIMED and sorted(cli.TIMED) == cli.TIMED
    assert all(name == folder or folder not in OPS for name, folder in zip(cli.TIMED, folders, strict=True))


def test_an_error_is_one_line_without_a_traceback() -> None:
    command = [sys.executable, "-m", "isobit", "check", "--op", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        1, "", f"isobit: unknown op 'nope'; known: {PUBLIC}\n",
    )  # fmt: skip


def test_a_crash_leaves_what_was_done_and_the_line_that_crashed(tmp_path: Path) -> None:
    """In a pipe, too."""
    (tmp_path / "mine.py").write_text(
        "import os, signal, torch\n"
        "def crashes(logits, token_ids):\n"
        "    if logits.dtype == torch.float16: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return logits.float().log_softmax(-1).gather(-1, token_ids.long()[..., None])[..., 0]\n"
    )
    dtypes = ("--dtype", "fp32", "--dtype", "fp16")
    arguments = ("check", "--op", "logp", "--candidate", "mine:crashes", "--device", "cpu", "--dim", "N=3")
    command = [sys.executable, "-m", "isobit", *arguments, "--law", "accuracy", *dtypes]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == -signal.SIGSEGV and 'mine.py", line 3 in crashes' in done.stderr
    assert done.stdout.splitlines()[-1].lstrip().startswith("1/2 ok   logp mine:crashes accuracy [N=3 ")


def test_messages_that_a_terminal_cannot_show_do_not_end_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unspeakable.py").write_text(
        "def raises(logits, token_ids): raise ValueError('gr\\u00f6\\u00dfer \\ud800')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shown, page = io.BytesIO(), tmp_path / "page.html"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    arguments = ("--op", "logp", "--candidate", "unspeakable:raises", "--device", "cpu", "--dim", "N=3")
    monkeypatch.setattr(
        sys, "argv", ["isobit", "check", *arguments, "--law", "accuracy", "--html", str(page)]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1 and b"ValueError: gr\\xf6\\xdfer \\ud800" in shown.getvalue()
    assert "gr\u00f6\u00dfer" in page.read_text(encoding="utf-8")


def test_info_names_versions_and_the_backend_of_every_op(isobit: Isobit) -> None:
    done = isobit("info", "--device", "cpu")
    assert done.code == 0
    lines = dict(line.split(maxsplit=1) for line in done.out.splitlines() if line and line[0] != " ")
    assert lines["isobit"] == __version__ and lines["torch"] == torch.__version__ and lines["arch"] == "cpu"
    assert {"gpu", "driver", "triton", "python", "commit", "source_sha", "date"} <= set(lines)
    assert lines["hf"].startswith("transformers ") and {"trl", "verl", "fla"} <= set(lines)
    for name, op in public_ops().items():
        backend = runner.default_backend(op, torch.device("cpu"))
        assert (
            lines[f"{name}:"].split(" (")[0] == backend
            and f"kernels {kernel_sha(op.folder)}" in lines[f"{name}:"]
        )
    assert done.out.splitlines()[-1] == "why not another backend: isobit info --op NAME"


def test_info_of_an_op_says_why_each_backend_would_not_serve(isobit: Isobit) -> None:
    done = isobit("info", "--device", "cpu", "--op", "det_linear", "--op", "logp")
    ops = done.out.split("\n\n")[1]
    assert done.code == 0 and [x.split(":")[0] for x in ops.splitlines() if x[0] != " "] == [
        "det_linear",
        "logp",
    ]
    for name in ("det_linear", "logp"):
        for backend in public_ops()[name].backends:
            assert f"\n    {backend.name} " in ops
    assert "serves this call" in ops and "select it by name" in ops and "  fp64 logp: reference" in ops
    assert isobit("info", "--op", "nope").err.startswith("isobit: unknown op 'nope'; known: attention")


def test_info_says_whether_torch_and_triton_were_tested_together(isobit: Isobit) -> None:
    """The pairs are those of constraints.txt and of the published results."""
    suite, on_a_gpu = info.TESTED.values()
    pinned = dict(re.findall(r"^(torch|triton)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert suite == (pinned["torch"], pinned["triton"])
    for path in (ROOT / "results" / "h200").glob("*.json"):
        stamp = json.loads(path.read_text())["stamp"]
        assert info.tested(stamp["torch"], stamp["triton"]).endswith("(GPUs)"), path
    assert on_a_gpu != suite and info.tested("2.13.0+cpu", "3.7.1").startswith("this pair: torch 2.13.0 with")
    for other in (("2.15.0", "3.9.0"), ("2.13.0", "3.6.0"), ("2.11.0", "3.7.1")):
        said = info.tested(*other)
        assert said.startswith("not this pair, but torch 2.13.0 with Triton 3.7.1") and len(said) < 118
    (line,) = (x for x in isobit("info", "--device", "cpu").out.splitlines() if x.startswith("tested  "))
    assert line.split(maxsplit=1)[1] == info.tested(torch.__version__, triton.__version__)


@pytest.mark.parametrize("command", ["info", "check", "bench"])
def test_a_device_without_values_is_one_clear_sentence(isobit: Isobit, command: str) -> None:
    done = isobit(command, "--device", "meta")
    assert (
        done.code == 1 and done.err.startswith("isobit: device 'meta' ") and len(done.err.splitlines()) == 1
    )


def test_a_device_that_is_not_here_is_one_sentence_that_says_what_is(isobit: Isobit) -> None:
    done = isobit("info", "--device", "mps")
    assert done.code == 1 and "this machine has cpu" in done.err and len(done.err) < 250


def test_info_and_explanations_stay_readable(isobit: Isobit) -> None:
    done = isobit("info", "--device", "cpu")
    assert "{" not in done.out and max(map(len, done.out.splitlines())) <= 118
    assert len(done.out.splitlines()) < 25 + len(public_ops())  # a screen
    text = str(explain("logp", torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
    assert text.splitlines()[0] == "logp: reference (numerics none)" and "{" not in text


# Errors that say so


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "nope"], f"unknown op 'nope'; known: {PUBLIC}"),
        (["--op", "logp_bwd"], f"unknown op 'logp_bwd'; known: {PUBLIC}"),
        (["--backend", "nope"], f"logp: unknown backend 'nope'; known: {BACKENDS}"),
        (["--law", "nope"], f"unknown law 'nope'; known: {', '.join(LAWS)}"),
        (["--dtype", "nope"], "unknown dtype 'nope'; known: bf16, fp16, fp32, fp64"),
        (["--dtype", "int8"], "unknown dtype 'int8'; known: bf16, fp16, fp32, fp64"),
        (["--device", "nope"], "device 'nope' is not usable here"),
        (["--data", "nope"], "--data nope: unknown; known: edge, random, constant"),
        (["--data", "cotangents=nope"], "--data cotangents=nope: unknown; known: edge, random, constant"),
        (["--data", "seed=x"], "--data seed=x: unknown; known: edge, random, constant"),
        (["--data", "edge=1"], "--data edge=1: unknown; known: edge, random, constant"),
        (["--dim", "V"], "--dim V: write it as NAME=SIZE"),
        (["--dim", "V="], "--dim V=: write it as NAME=SIZE"),
        (["--dim", "V=many"], "--dim V=many: write it as NAME=SIZE"),
        (["--dim", "V=1.5"], "--dim V=1.5: write it as NAME=SIZE"),
        (["--dim", "V=--3"], "--dim V=--3: write it as NAME=SIZE"),
        (["--dim", "V=²"], "--dim V=²: write it as NAME=SIZE"),
        (["--dim", "=3"], "--dim =3: write it as NAME=SIZE"),
        (["--option", "heat=3"], "logp: unknown option 'heat'; known: mask, temperature, ids, each, layout"),
        (["--option", "heat"], "--option heat: write it as NAME=VALUE"),
        (["--dim", "K=3"], "logp: dimensions B, T, V, K; known sets: B, S, T, V; B, T, V; N, V"),
        (["--data", "constant=1e30", "--dtype", "fp16"], "constant=1e+30: fp16 holds 65504 at most"),
    ],
    ids=lambda value: "=".join(value).replace("²", "square") if isinstance(value, list) else "",
)
def test_bad_options_are_errors_that_say_so(isobit: Isobit, arguments: list[str], message: str) -> None:
    done = isobit("check", *SMALL, "--law", "accuracy", *arguments)
    assert done.code == 1 and "Traceback" not in done.err
    assert done.err.startswith("isobit: ") and message in done.err and len(done.err.splitlines()) == 1


@pytest.mark.parametrize("size", ["V=0", "V=-17", "B=-1"])
def test_sizes_must_be_positive(isobit: Isobit, size: str) -> None:
    done = isobit("check", *LOGP, "--law", "accuracy", "--dim", size)
    assert done.code == 1 and done.err.startswith(f"isobit: logp: {size} must be positive")


@pytest.mark.parametrize(
    ("given", "found"), [(["--dim", "V=64"], "N=20 V=64 fp32"), (["--dim", "T=7"], "B=2 T=7 V=1000 fp32")]
)
def test_sizes_that_are_not_given_are_those_of_a_declared_case(
    isobit: Isobit, given: list[str], found: str
) -> None:
    done = isobit("check", *LOGP, "--law", "accuracy", *given)
    assert done.code == 0 and f"[{found}]" in done.out


def test_an_unknown_case_lists_the_known_ones(isobit: Isobit) -> None:
    done = isobit("check", *LOGP, "--law", "accuracy", "--case", "nope")
    assert done.code == 1 and "unknown case 'nope'" in done.err and "N=0 V=7 fp32" in done.err


@pytest.mark.parametrize("arguments", [["--nope"], ["--dim"], ["nope"]])
def test_unknown_and_malformed_options_are_usage_errors(isobit: Isobit, arguments: list[str]) -> None:
    assert isobit("check", *SMALL, *arguments).code == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--law", "compile"], "nothing to compile"),
        (["--law", "gradient", "--data", "cotangents=none"], "gradients are switched off"),
        (["--law", "invariant"], "promises accuracy, not bits"),
    ],
)
def test_a_run_that_executes_nothing_is_an_error(isobit: Isobit, arguments: list[str], why: str) -> None:
    done = isobit("check", *LOGP, *arguments)
    assert done.code == 1 and "isobit: nothing was checked: logp reference: " in done.err and why in done.err


# Selection


def cells(done: Done) -> list[dict]:
    return [cell for candidate in report(done)["candidates"] for cell in candidate["cases"]]


def test_every_law_holds_for_a_small_custom_case(isobit: Isobit) -> None:
    """Sizes that no law chose: none may take its own trouble with them for a failure of the op."""
    found = cells(isobit("check", *SMALL, "--json", "-"))
    assert {c["law"]: c["status"] for c in found} == dict.fromkeys(LAWS, OK) | {
        "invariant": UNSUPPORTED, "agree": UNSUPPORTED, "parallel": UNSUPPORTED, "compile": UNSUPPORTED,
    }  # fmt: skip
    assert not [c for c in found if c["status"] == FAIL]


@pytest.mark.parametrize("law", ["contract", "traceable"])
def test_one_row_is_enough(isobit: Isobit, law: str) -> None:
    (cell,) = cells(isobit("check", *LOGP, "--dim", "N=1", "--dim", "V=5", "--law", law, "--json", "-"))
    assert (cell["status"], cell["reason"]) == (OK, "")


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("det_gemm", ("M=5", "K=20", "N=7")),
        ("det_linear", ("B=2", "T=3", "K=20", "N=7")),
        ("det_gemm_dw", ("T=30", "K=6", "N=7")),
    ],
)
def test_every_law_holds_for_small_custom_products(isobit: Isobit, op: str, sizes: tuple[str, ...]) -> None:
    dims = [text for size in sizes for text in ("--dim", size)]
    done = isobit("check", "--op", op, "--device", "cpu", "--backend", "model", *dims, "--json", "-")
    found = cells(done)
    assert {c["law"] for c in found} == set(LAWS) and not [c for c in found if c["status"] == FAIL]


def test_sizes_choose_the_ops_that_have_them(isobit: Isobit) -> None:
    sizes = ("--dim", "B=2", "--dim", "T=3", "--dim", "K=4", "--dim", "N=5")
    found = cells(
        isobit("check", "--device", "cpu", "--law", "accuracy", "--backend", "model", *sizes, "--json", "-")
    )
    assert {c["op"] for c in found} == {"det_linear", "det_gemm_dw"}


def test_dimensions_in_any_order(isobit: Isobit) -> None:
    arguments = ("--law", "accuracy", "--dim", "V=17", "--dim", "N=3", "--json", "-")
    (cell,) = cells(isobit("check", *LOGP, *arguments))
    assert (cell["case"], cell["status"], cell["outputs"][0]["shape"]) == ("N=3 V=17 fp32", OK, [3])


def test_options_reach_the_inputs(isobit: Isobit) -> None:
    arguments = ("check", *SMALL, "--law", "accuracy", "--json", "-")

    def messages(*more: str) -> list[str]:
        (cell,) = cells(isobit(*arguments, *more))
        assert cell["status"] == OK
        return [output["message"] for output in cell["outputs"]]

    # Every logit 3: logp is -log 17 wherever the token is, and the log-sum-exp is 3 + log 17.
    found, _, lse = messages("--data", "constant=3.0")
    assert "truth -2.83321334" in found and "truth 5.83321334" in lse
    assert messages("--data", "random") != messages("--data", "random", "--data", "seed=7")
    assert messages("--data", "token=1") != messages("--data", "token=2")
    assert messages("--data", "token=1") == messages("--data", "token=18")


def test_a_named_target_is_the_only_one_compiled_for(isobit: Isobit) -> None:
    arguments = ("check", "--op", "det_gemm", "--dtype", "bf16", "--json", "-")
    found = {c["backend"]: c for c in cells(isobit(*arguments, "--law", "compile=cuda:80"))}
    outputs = {output["output"] for output in found["triton"]["outputs"]}
    assert found["triton"]["status"] == OK and outputs == {"product_tile cuda:80"}
    assert "--law compile=cuda:80" in found["triton"]["command"]
    assert (found["hopper"]["status"], found["hopper"]["reason"]) == (
        UNSUPPORTED, "its kernels are for cuda:90",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
@pytest.mark.parametrize("own", [True, False])
def test_the_command_of_a_cell_repeats_that_cell(isobit: Isobit, dtype: str, own: bool) -> None:
    sizes = SMALL[len(LOGP) :] if own else ("--case", f"N=20 V=1 {dtype}")
    options = ("--law", "gradient", "--dtype", dtype, "--data", "seed=5", "--data", "cotangents=ones")
    (cell,) = cells(isobit("check", *LOGP, *sizes, *options, "--json", "-"))
    program, *arguments = shlex.split(cell["command"])
    assert program == "isobit"
    (again,) = cells(isobit(*arguments, "--json", "-"))
    for either in (cell, again):
        del either["seconds"]
    assert again == cell


@pytest.mark.parametrize(
    "sizes", [("--dim", "N=5", "--dim", "V=7"), ("--case", "N=20 V=1 bf16 padded mask=bool")]
)
def test_options_of_a_case_are_named_and_repeated(isobit: Isobit, sizes: tuple[str, ...]) -> None:
    options = ("--option", "mask=bool", "--option", "layout=padded", "--law", "accuracy")
    (cell,) = cells(isobit("check", *LOGP, *sizes, *options, "--json", "-"))
    assert cell["status"] == OK and cell["case"].endswith(" padded mask=bool")
    (again,) = cells(isobit(*shlex.split(cell["command"])[1:], "--json", "-"))
    assert (again["case"], again["outputs"]) == (cell["case"], cell["outputs"])


def test_a_case_without_rows_has_no_bad_calls(isobit: Isobit) -> None:
    done = isobit(
        "check", "--op", "logp", "--backend", "reference", "--law", "contract", "--dim", "N=0", "--dim", "V=5"
    )
    assert done.code != 0 and "nothing was checked: logp reference: no rows" in done.err
