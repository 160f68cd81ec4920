"""Guards the site of the docs as people see it: no page is wider than its window, and code can be read. It is
built here and opened in a real Chromium. Where there is no Chromium or no Sphinx the tests are skipped and
say so; `make test` installs both where it may."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Chromium, Tab

ROOT = Path(__file__).parent.parent

#: A phone; between the points where the sidebars go away; with one of them; with both, and little room.
WIDTHS = (390, 1100, 1280, 1366)

#: A phone shows a page that is too wide smaller, and calls that its window.
SIZES = "[document.documentElement.scrollWidth, Math.min(innerWidth, screen.width)]"
COLOURS = f"({Path(__file__).with_name('look.js').read_text()})(true)"

#: On a desktop tables need not scroll. On a phone each does so in its own box.
SCROLLING = (
    "[...document.querySelectorAll('.table-wrapper')].filter(t => t.scrollWidth > t.clientWidth + 1).length"
)
DESKTOP = 1280


@pytest.fixture(scope="module")
def site(browser: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")):
        pytest.skip("UNSUPPORTED: there is no Sphinx here (in a checkout of isobit: pip install '.[docs]')")
    place = tmp_path_factory.mktemp("site")
    build = ["-W", "--keep-going", "-q", "-c", "tools/site", "-d", str(place / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *build, ".", str(place / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return place / "html"


def wrong(browser: Chromium, *pages: Path, dark: bool = False) -> list[str]:
    """What is wrong with these pages, which one tab shows one after another."""
    tab = browser.open(pages[0], WIDTHS[0], dark)
    # Wider and wider, and back with the next one: to lay out a page takes longer than to look at it.
    found = [said for at, page in enumerate(pages) for said in wrong_there(tab, page, back=at % 2 > 0)]
    tab.close()
    return found


def wrong_there(tab: Tab, page: Path, back: bool) -> Iterator[str]:
    """At which widths a page does not fit, and what is too faint on it."""
    tab.show(page)
    assert tab.run("location.href") == page.resolve().as_uri()
    for width in reversed(WIDTHS) if back else WIDTHS:
        tab.resize(width)
        wide, room = tab.run(SIZES)
        assert room == width
        if wide > room:
            yield f"{page.stem}: {wide} wide in a window of {room}"
        if width == DESKTOP and (tables := tab.run(SCROLLING)):
            yield f"{page.stem}: {tables} tables are too wide"
        if width == max(WIDTHS):  # where sidebars are shown too
            # Tables and blocks of code scroll, so their text may be beyond the edge.
            yield from (f"{page.stem}: {said}" for said in tab.run(COLOURS) if said.startswith("contrast "))


def test_every_page_of_the_site_fits(browser: Chromium, site: Path) -> None:
    pages = [*sorted(site.glob("*.html")), *sorted((site / "docs").rglob("*.html"))]
    assert {"README", "CONTRIBUTING", "linear_logp", "adding_an_op"} <= {page.stem for page in pages}
    assert not wrong(browser, *pages)


def test_code_can_be_read_in_the_dark(browser: Chromium, site: Path) -> None:
    assert not wrong(browser, site / "docs" / "linear_logp.html", dark=True)


def test_code_can_be_copied(browser: Chromium, site: Path) -> None:
    tab = browser.open(site / "docs" / "api" / "ops.html", DESKTOP, False)
    blocks, buttons = tab.run(
        "['div.highlight', 'button.copy'].map(s => document.querySelectorAll(s).length)"
    )
    assert blocks == buttons > 10
    assert tab.run("typed('>>> import torch\\n>>> 1 + 1\\n2\\n')") == "import torch\n1 + 1\n"
    assert tab.run("typed('make docs\\n')") == "make docs\n"
    tab.close()


def test_a_page_that_does_not_fit_is_detected(browser: Chromium, site: Path) -> None:
    page = site / "docs" / "linear_logp.html"
    broken = page.with_name("broken.html")
    page_too_wide = ".main, .content { min-width: auto; } .highlight .mi { color: #40a070; }"
    styles = (page_too_wide, "table.docutils td { white-space: nowrap; }")
    found: list[str] = []
    for style in styles:
        broken.write_text(page.read_text().replace("</head>", f"<style>{style}</style></head>"))
        there_and_back = wrong(browser, broken, broken)
        half = len(there_and_back) // 2
        assert sorted(there_and_back[:half]) == sorted(there_and_back[half:])
        found += there_and_back
    broken.unlink()
    assert all(any(f"wide in a window of {width}" in said for said in found) for width in (1100, 1366)), found
    assert any("of span.mi" in said for said in found), found
    assert any("tables are too wide" in said for said in found), found
