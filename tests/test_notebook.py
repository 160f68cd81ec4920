"""The notebook for a start runs from top to bottom, and shows what it prints."""

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_steps.ipynb"


def machine_free(lines: list[str]) -> list[str]:
    """Without what plain PyTorch does, which depends on the machine."""
    return [line for line in lines if not line.startswith("PyTorch: ")]


def test_the_notebook_prints_what_it_shows() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    scope: dict[str, Any] = {}
    shown, printed = list[str](), list[str]()
    for cell in cells:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="isobit: det_gemm"
            )  # the notebook says it, in another cell
            exec("".join(cell["source"]), scope)
        printed += said.getvalue().splitlines(keepends=True)
        shown += [line for output in cell["outputs"] for line in output["text"]]
    assert machine_free(printed) == machine_free(shown) and len(printed) == len(shown)
    assert "isobit: 0 of 32 rows have other bits alone\n" in printed
