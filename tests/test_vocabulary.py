"""One vocabulary in code, comments, messages and pages."""

import re
from collections.abc import Iterator

import pytest

from test_prose import PAGES, ROOT, wrong

#: What has a better word, and that word. In comments and docstrings, in names, and on pages.
WORDS_TO_AVOID = {
    r"rows? (that|which) (do(es)? not )?counts?": "live row, masked row",
    r"(rows?|tokens?|id) (do|does) not count": "masked rows",
    r"tokens? that (do(es)? not )?counts?": "live token, masked token",
    r"inside of": "inside",
    r"outside of": "outside",
    r"beside": "next to, besides, in addition to",
    r"multipliers": "consumer warpgroups",
    r"rooms": "chunk buffers",
    r"told(?=\()": "read_item",
    r"why_rather_not": "slower_because",
    r"or_other": "unused",
    r"apart(?=\()": "fits_separate_buffers",
    r"nothing = gl": "zeros",
    r"(check_)?vouch(ing|es|ed)?": "check gate",
    r"Vouch": "CheckGate",
    r"lineup": "implementations",
    r"class Way": "CallPlan",
}
#: Variables that say nothing. There may only be fewer of them.
AT_MOST = {r"\bfound(: [^=\n]+)? = ": 24}
NAMES_TO_AVOID = {
    "utils",
    "util",
    "helpers",
    "misc",
    "ways",
    "rooms",
    "ahead",
    "vouch",
    "lineup",
    "apart",
    "shares",
}

#: "beside" is in names of goals, which result files have.
GOALS = re.compile(r"(rivals|goals)(/|\.py)|/goals/")
GENERATED = re.compile(r"^<!-- (results|op):[^\n]* -->$.*?^<!-- /\1 -->$", re.M | re.S)


def bad_words(text: str) -> Iterator[str]:
    text = GENERATED.sub("", text)
    for word, better in WORDS_TO_AVOID.items():  # no word has a line's end in it
        for hit in re.finditer(rf"(?<![\w-]){word}(?![\w-])", text, re.I if word.islower() else 0):
            line = text[text.rfind("\n", 0, hit.start()) + 1 :].partition("\n")[0]
            yield f"{line.strip()[:90]}  ({hit[0]}: {better})"


SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_pages_and_sources_have_one_vocabulary() -> None:
    found = wrong(bad_words, [*PAGES, *SOURCES, *(ROOT / "examples").glob("*.py")])
    assert not [one for one in found if not (GOALS.search(one) and "(beside: " in one)]


def test_files_have_names_that_say_what_is_in_them() -> None:
    assert not [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in NAMES_TO_AVOID]


def test_there_are_fewer_names_that_say_nothing() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    for name, most in AT_MOST.items():
        assert len(re.findall(name, text)) <= most, name


@pytest.mark.parametrize(
    ("good", "bad", "reasons"),
    [
        ("rows next to the mask count; inside a row", "of rows that do not count",
         ["of rows that do not count  (rows that do not count: live row, masked row)"]),
        ("untold(x), foretell", "x = told(y)", ["x = told(y)  (told: read_item)"]),
        ("<!-- op:a -->\nbeside\n<!-- /op -->", "Inside of",
         ["Inside of  (Inside of: inside)"]),
    ],
)  # fmt: skip
def test_a_word_that_has_a_better_one_is_found(good: str, bad: str, reasons: list[str]) -> None:
    assert list(bad_words(good)) == [] and list(bad_words(bad)) == reasons
