"""The site of the docs (make docs): the Markdown files of this repository, with navigation, search and an API
reference.

The source folder is the root of the repository, so links between files are the same on the site as in the
files. A link or anchor that leads nowhere fails the build. Pages are found by folder: see `navigation`.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "src")]

import api  # noqa: E402

project = "isobit"
copyright = "the isobit authors, Apache-2.0"
html_title = "isobit"

#: Groups of the sidebar in their order, with pages that have a short title or a place of their own there.
#: Other pages follow, under their own titles.
GROUPS: dict[str, dict[str, str]] = {
    "Start": {"README": "Overview", "docs/glossary": "Glossary", "CHANGELOG": "Changes"},
    "Use it with": {
        "docs/trl": "TRL",
        "docs/verl": "verl",
        "docs/own_loop": "Your own loop",
        "docs/fla": "FLA",
        "docs/zero_drift": "Hugging Face, zero drift",
        "docs/drift": "Measure drift",
        "docs/rollouts": "vLLM",
        "docs/lora": "LoRA",
        "docs/check_my_kernel": "A kernel of your own",
        "docs/check_any_function": "Any function of rows",
    },
    "Ops": {
        "docs/logp": "logp",
        "docs/linear_logp": "linear_logp",
        "docs/linear_policy_loss": "linear_policy_loss",
        "docs/ratio_kl": "ratio_kl",
        "docs/grpo_loss": "grpo_loss",
        "docs/det_gemm": "Matrix products",
        "docs/attention": "Attention",
        "docs/rms_norm": "RMSNorm",
        "docs/rope": "Rotary embedding",
        "docs/swiglu": "SwiGLU",
        "docs/gated_delta_rule": "Gated delta rule",
        "docs/gated_delta_step": "Gated delta rule, decoding",
        "docs/delta_rule": "Delta rule",
        "docs/losses": "Losses",
    },
    "API reference": {"docs/api/ops": "isobit"},
    "Promises and numerics": {
        "docs/numerics": "What decides the bits",
        "docs/numerics/promises": "Promises",
        "docs/numerics/checked": "How each is checked",
        "docs/numerics/matching_an_engine": "Matching an engine",
    },
    "Prove and measure": {
        "docs/check": "Check every op",
        "docs/proven": "Proven where",
        "docs/benchmarks": "Benchmarks",
    },
    "Contributing": {
        "CONTRIBUTING": "How to contribute",
        "docs/dev/adding_an_op": "Adding an op",
        "SECURITY": "Security",
    },
}
FOLDERS = {
    "docs/api": "API reference",
    "docs/numerics": "Promises and numerics",
    "docs/dev": "Contributing",
}


def group_of(page: str) -> str:
    """The group of a page that `GROUPS` does not name: by folder. One with an op's declaration is an op's."""
    text = (ROOT / f"{page}.md").read_text()
    if re.search(r"^<!-- op:\w+ -->$", text, re.M):
        return "Ops"
    return FOLDERS.get(str(Path(page).parent), "Use it with" if text.startswith("# Use it with") else "Start")


def navigation() -> dict[str, list[str]]:
    """Every page once, by group."""
    paths = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    pages = sorted(str(path.relative_to(ROOT).with_suffix("")) for path in paths)
    placed = {page: caption for caption, group in GROUPS.items() for page in group}
    rest = {page: group_of(page) for page in pages if page not in placed}
    return {
        caption: [*group, *(page for page, where in rest.items() if where == caption)]
        for caption, group in GROUPS.items()
    }


extensions = ["myst_parser"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "site", "src", "tests", "results", "tools", "examples"]
myst_heading_anchors = 4  # as on GitHub
maximum_signature_line_length = 70  # longer ones have a line for each parameter
add_module_names = False
toc_object_entries = False  # headings are there already

html_theme = "furo"
html_static_path = ["site.css", "copy.js"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-light"  # every colour has a contrast of 4.6 or more; furo brings it
pygments_dark_style = "monokai"
highlight_language = "none"


def _toctree(caption: str, pages: list[str]) -> str:
    titles = GROUPS[caption]
    entries = (
        f"{titles[page]} <{'self' if page == root_doc else page}>" if page in titles else page
        for page in pages
    )
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(entries) + "\n```\n"


def _add_generated(app: Any, docname: str, source: list[str]) -> None:
    if docname == root_doc:
        source[0] += "\n" + "\n".join(_toctree(*group) for group in navigation().items())
    source[0] = api.filled(source[0])


def _add_index(app: Any, exception: Exception | None) -> None:
    """The front page under the name that servers look for."""
    if exception is None:
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", _add_generated)
    app.connect("build-finished", _add_index)
