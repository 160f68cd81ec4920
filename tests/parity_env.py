"""Programs in the environment `.parity`, which `make parity` makes. They are forked from one process, which
has imported what TRL, verl and PEFT stand on: that takes ten seconds. TRL and verl themselves, and isobit,
are imported by the program, in the order that it is about.

This file runs in both environments: `in_parity` in that of the tests, the rest in the other one.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".parity" / "bin" / "python"


def in_parity(
    program: Path | str, *arguments: Path | str, path: Sequence[Path] = (ROOT / "src",), cwd: Path = ROOT
) -> str:
    """What a program prints: a file, or its text. `path` is where it finds modules beside installed ones."""
    assert PYTHON.exists(), "run `make parity` first"
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {
            "program": str(program), "is_file": isinstance(program, Path),
            "arguments": [*map(str, arguments)], "path": [*map(str, path)],
            "cwd": str(cwd), "out": str(out), "err": str(err),
        }  # fmt: skip
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(asked), file=server.stdin, flush=True)
        code = server.stdout.readline().strip()
        assert code == "0", f"exit code {code}: `make parity` makes the environment anew\n" + (
            err.read_text()[-4000:] if err.exists() else "the process that programs are forked from has ended"
        )
        return out.read_text()


@cache
def _server() -> "subprocess.Popen[str]":
    """It ends with this process, which closes its input."""
    # Paths are given to each program. No network, no telemetry: libraries read that when they are imported.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VERL_USE_EXTERNAL_PLUGINS")}
    # Models are small, and threads do not survive a fork.
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CI": "1"}
    return subprocess.Popen(
        [str(PYTHON), __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


# In the other environment


def _serve() -> None:
    import datasets  # noqa: F401
    import peft  # noqa: F401
    from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Trainer  # noqa: F401

    assert not {"trl", "verl", "isobit"} & set(sys.modules)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(asked: dict[str, Any]) -> None:
    """In the process of the program, which ends here."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT), number)
        os.chdir(asked["cwd"])
        file = asked["program"] if asked["is_file"] else None
        sys.path[:1] = [str(Path(file).parent) if file else "", *asked["path"]]
        sys.argv = [file or "-c", *asked["arguments"]]
        if file:
            runpy.run_path(file, run_name="__main__")
        else:
            exec(compile(asked["program"], "<text>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
