"""Strides that kernels get in words of several elements: a stride in elements may exceed 2^31 where one in
words does not, so it is widened before it is multiplied."""

import re
from pathlib import Path

import isobit

#: `x_sb * WORD`; in `x_sb.to(tl.int64) * WORD` the name is not next to the product.
NARROW = re.compile(r"\b\w+_s[a-z] \* WORD\b")


def test_strides_are_widened_before_they_are_in_elements() -> None:
    kernels = [*Path(isobit.__file__).parent.rglob("kernels_*.py")]
    text = {str(path): path.read_text() for path in kernels}
    assert sum(".to(tl.int64) * WORD" in each for each in text.values()) >= 2
    assert {name: NARROW.findall(each) for name, each in text.items() if NARROW.search(each)} == {}
