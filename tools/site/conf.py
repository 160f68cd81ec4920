"""The site of the docs (make docs): the Markdown files of this repository, with navigation and search.

The source folder is the root of the repository, so links between files are the same on the site as in the
files. A page that is not in `NAVIGATION`, or a link or anchor that leads nowhere, fails the build.
"""

import shutil
from pathlib import Path
from typing import Any

project = "isobit"
copyright = "the isobit authors, Apache-2.0"
html_title = "isobit"

#: Groups of the sidebar: pages, each with its title there.
NAVIGATION = {
    "Start": {"Overview": "self", "Changes": "CHANGELOG"},
    "Use it with": {
        "TRL": "docs/trl",
        "verl": "docs/verl",
        "Your own loop": "docs/own_loop",
        "FLA": "docs/fla",
        "Hugging Face, zero drift": "docs/zero_drift",
        "A kernel of your own": "docs/check_my_kernel",
    },
    "Ops": {
        "logp": "docs/logp",
        "linear_logp": "docs/linear_logp",
        "linear_policy_loss": "docs/linear_policy_loss",
        "ratio_kl": "docs/ratio_kl",
        "grpo_loss": "docs/grpo_loss",
        "Matrix products": "docs/det_gemm",
        "Attention": "docs/attention",
        "rms_norm": "docs/rms_norm",
        "Delta rule": "docs/delta_rule",
        "Losses": "docs/losses",
    },
    "Promises and numerics": {"What decides the bits": "docs/numerics"},
    "Prove and measure": {
        "Check every op": "docs/check",
        "Benchmarks": "docs/benchmarks",
        "Result files": "docs/results",
    },
    "Contributing": {"How to contribute": "CONTRIBUTING"},
}

extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "site", "src", "tests", "results", "tools", "examples"]
myst_heading_anchors = 4  # as on GitHub

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-light"  # every colour has a contrast of 4.6 or more; furo brings it
pygments_dark_style = "monokai"
highlight_language = "none"


def _toctree(caption: str, pages: dict[str, str]) -> str:
    entries = "\n".join(f"{title} <{page}>" for title, page in pages.items())
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def _add_navigation(app: Any, docname: str, source: list[str]) -> None:
    if docname == root_doc:
        source[0] += "\n" + "\n".join(_toctree(*group) for group in NAVIGATION.items())


def _add_index(app: Any, exception: Exception | None) -> None:
    """The front page under the name that servers look for."""
    if exception is None:
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _add_index)
