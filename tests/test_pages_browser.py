"""Guards pages as people see them: in a real Chromium, wide and on a phone, light and dark. Where there is no
Chromium the tests are skipped and say so; `make test` installs one where it may."""

from pathlib import Path
from typing import Any

import pytest

from chromium import Chromium, Tab, executable
from isobit.cli.html import page
from isobit.cli.html.saved import read_report
from isobit.drift import measure
from isobit.drift.report import Tried
from row_by_row import made, planted, sequences
from test_pages import report_of_a_check

LOOK = f"({Path(__file__).with_name('look.js').read_text()})()"
RESULTS = Path(__file__).parent.parent / "results" / "h200"

FILES = ("check_linear_logp.json", "memcheck_linear_logp.json", "det_gemm.json", "logp.json")

DESKTOP, PHONE = 1280, 390

#: Whether the button says so within three seconds.
COPIED = """(async () => {
  for (let i = 0; i < 30; i++) {
    if (document.querySelector(".failure button").textContent === "copied") return true;
    await new Promise((done) => setTimeout(done, 100));
  }
  return false;
})()"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of all there is: a check that fails, a run of nothing, a check that passes, a memcheck, two
    benchmarks, one of them with goals and charts, the curves of a demo, and drift."""
    reason = "0:logp: 3 of 4 beyond the bound; worst at [1, 0]: ours 2.25, torch 2.2500002, truth 2.25000019"
    broken = report_of_a_check(status="FAIL", reason=reason)
    broken["tolerances"] = {"file": "own.json", "looser": ["logprob forward bf16: 3 units, isobit allows 1"]}
    broken["candidates"][0]["serves"] = {"takes": ["logits", "token_ids"], "outputs": ["logp"]}
    nothing = report_of_a_check() | {"passed": False, "nothing_ran": "nothing was checked: no kernels here"}
    saved = [read_report(RESULTS / name) for name in FILES]
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page([broken, nothing, *saved, demo(), drift()], "isobit report"))
    return path


def demo() -> dict[str, Any]:
    """The report of a run of 40 steps."""
    figures = ("reward", "solved", "kl", "clipped", "entropy")
    steps = [
        {"step": i, **{name: (i + k) / 50 for k, name in enumerate(figures)},
         "drift": {"torch": {"max": 1e-3 * (1 + i), "mean": 1e-5}, "isobit": {"max": 0.0, "mean": 0.0}}}
        for i in range(40)
    ]  # fmt: skip
    head = {"suite": "isobit demo", "stamp": report_of_a_check()["stamp"], "command": "isobit demo"}
    said = {"passed": True, "verdict": "solved: mean reward 0.99", "drift": "decoding against training: 0"}
    return head | said | {"steps": steps, "trained_with": "torch"}


def drift() -> dict[str, Any]:
    """A report on two faults in four layers, with ten rows, and on two remedies: one that left something, and
    one that was not possible."""
    model = made(layers=4)
    layers = model.model.layers
    with (
        planted(layers[1].mlp.down_proj, lambda x: x.shape[1] == 1),
        planted(layers[2].post_attention_layernorm, lambda x: x.shape[1] < 8),
    ):
        found = measure(model, sequences((12,)), random_weights=True)
    name = "model.layers.1.mlp.down_proj"
    reason = "isobit.integrations.hf.zero_drift(model: LlamaForCausalLM): model.layers.0.self_attn.q_proj, "
    tried = [
        Tried(found.rows[:3], 3.25, 2.5, 9, "linear", [name], [name]),
        Tried([], 3.25, None, 9, refused=f"{reason}model.layers.0.self_attn.k_proj and 12 more: in fp32"),
    ]
    found.tried.extend(tried)
    head = {"stamp": report_of_a_check()["stamp"], "command": "isobit drift tiny --random"}
    return found.to_json() | head | {"model_name": "a/rather-long-name-of-a-checkpoint-7b-instruct"}


def looked_at(browser: Chromium, path: Path, width: int, dark: bool) -> tuple[Tab, list[str]]:
    """A tab and what is wrong in it."""
    tab = browser.open(path, width, dark)
    return tab, [*tab.run(LOOK), *tab.said, *(url for url in tab.asked if url != path.as_uri())]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_page_looks_well(browser: Chromium, shown: Path, width: int, dark: bool) -> None:
    tab, wrong = looked_at(browser, shown, width, dark)
    assert wrong == []
    closed = tab.run("document.querySelectorAll('details:not([open])').length")
    saved = [(name, row) for name in FILES for row in read_report(RESULTS / name).get("rows", ())]
    cases = {(name, row["op"], row["case"], row["direction"]) for name, row in saved}
    assert tab.run("document.querySelectorAll('details.case').length") == len(cases) > 20
    assert closed > len(cases) and tab.run("document.querySelectorAll('section').length") == 8
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert tab.run(LOOK) == []
    papers = tab.run("getComputedStyle(document.body).backgroundColor")
    assert papers == ("rgb(21, 25, 31)" if dark else "rgb(255, 255, 255)")
    tab.close()


def test_commands_are_copied_and_details_open(browser: Chromium, shown: Path) -> None:
    tab = browser.open(shown, PHONE)
    browser.ask("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.ask("Page.bringToFront")
    tab.click(".failure button")
    assert tab.run(COPIED)
    assert tab.run("navigator.clipboard.readText()") == "isobit check --op logp <&>"
    case = "#s5 details.case:nth-of-type(2)"
    height = f"document.querySelector('{case}').getBoundingClientRect().height"
    before = tab.run(height)
    tab.click(f"{case} summary")
    assert tab.run(f"document.querySelector('{case}').open") and tab.run(height) > before + 50
    tab.click("nav a:nth-of-type(3)")
    assert tab.run("location.hash") == "#s3" and tab.said == []
    tab.close()


FAULTS = {
    "wide": ("<style>h2 { min-width: 900px; }</style>", "the page is 9"),
    "faint": ("<style>.soft { color: #999; }</style>", "contrast 2.8 of p.soft"),
    "overlapping": ("<style>h2 { margin-bottom: -3rem; }</style>", "lies over"),
    "fetching": ("<img src='no_such.png'>", "no_such.png"),
    "wrong": ("<script>console.error('the moon');</script>", "the moon"),
    "thrown": ("<script>undefined.moon;</script>", "Cannot read properties of undefined"),
}


def test_a_drawing_that_is_cut_off_on_a_phone_is_detected(
    browser: Chromium, shown: Path, tmp_path: Path
) -> None:
    """A box that scrolls shows no sign of it: the points of the largest sizes were beyond its edge."""
    path = tmp_path / "page.html"
    cut = "<style>.roofline { overflow-x: auto; } .roofline svg { min-width: 34rem; }</style>"
    path.write_text(shown.read_text().replace("<header>", f"{cut}<header>"))
    tab, wrong = looked_at(browser, path, PHONE, False)
    assert any("beyond the edge: svg" in each for each in wrong), wrong
    assert any("beyond the edge: circle" in each for each in wrong), wrong
    tab.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_page_is_detected(browser: Chromium, tmp_path: Path, fault: str) -> None:
    text, said = FAULTS[fault]
    path = tmp_path / "page.html"
    path.write_text(page([report_of_a_check()]).replace("<header>", f"{text}<header>"))
    tab, wrong = looked_at(browser, path, PHONE, False)
    assert any(said in each for each in wrong), wrong
    tab.close()


def test_a_picture_of_a_page_is_taken(browser: Chromium, shown: Path) -> None:
    """As `make shots` does. Without frames, which is quicker, a browser would never answer."""
    path = executable()
    assert path is not None
    with Chromium(path, pictures=True) as drawing:
        data = drawing.open(shown, PHONE).png(200)
    assert data.startswith(b"\x89PNG") and data[16:24] == b"".join(n.to_bytes(4, "big") for n in (PHONE, 200))
