"""Tensor maps are cached by address: a limited number of them, and no longer than their form is in use."""

import gc
import weakref
from typing import Any

import pytest
import torch

from isobit.frame import entry
from isobit.frame.entry import Maps

LAYOUT = object()


class Descriptor:
    """With the list that all of its form share, as `descriptors.descriptor` makes them."""

    def __init__(self, rows: int) -> None:
        self.base, self.shape, self.strides = torch.empty(0), [rows, 64], [64, 1]
        self.block_shape, self.layout = [64, 64], LAYOUT
        self.maps: list[Maps] = []
        self.maps.append(Maps.of(self, None))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What was encoded: (rows, address)."""
    found: list[tuple[int, int]] = []

    def encode(descriptor: Any, meta: Any) -> object:
        found.append((descriptor.shape[0], descriptor.base.data_ptr()))
        return object()

    monkeypatch.setattr(entry, "_encode", lambda: encode)
    monkeypatch.setattr(entry, "_filling", lambda descriptor, meta: None)
    monkeypatch.setattr(entry, "_kept", entry._Kept())
    return found


def test_a_map_is_made_once_for_an_address(encoded: list[tuple[int, int]]) -> None:
    maps = Descriptor(3).maps[0]
    assert maps[16] is maps[16] and maps[32] is not maps[16]
    assert encoded == [(3, 16), (3, 32)]


def test_maps_of_all_forms_together_are_bounded(
    encoded: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches have ever new numbers of rows, and each of them its own forms."""
    monkeypatch.setattr(entry, "MAPS", 100)
    forms = [Descriptor(rows) for rows in range(60)]
    for each in forms:
        for address in range(0, 160, 16):
            each.maps[0][address]
        assert sum(len(other.maps[0]) for other in forms) <= 100
    assert len(encoded) == 600


def test_an_unused_form_is_freed_without_the_garbage_collector(encoded: list[tuple[int, int]]) -> None:
    """Trainings turn it off."""
    gc.disable()
    try:
        made = Descriptor(3)
        made.maps[0][16]
        gone = weakref.ref(made.maps[0])
        del made
        assert gone() is None
    finally:
        gc.enable()


def test_a_matrix_of_another_size_has_the_maps_of_its_own_form(encoded: list[tuple[int, int]]) -> None:
    """Whether a plan was recorded for that size or made from another, a tensor that both read has one map."""
    three, five = Maps.of(Descriptor(3), None), Maps.of(Descriptor(5), None)
    assert Maps.of(Descriptor(3), None) is three and three.resized([5, 64], [64, 1]) is five
    four = three.resized([4, 64], [64, 1])
    assert Maps.of(Descriptor(4), None) is four
    assert four[16] is four[16] and four.resized([3, 64], [64, 1]) is three
    three[16]
    assert encoded == [(4, 16), (3, 16)]


def test_forms_that_are_gone_are_dropped(encoded: list[tuple[int, int]]) -> None:
    first = Maps.of(Descriptor(1), None)
    for rows in range(2, 5000):
        first.resized([rows, 64], [64, 1])
    assert len(entry._kept.forms) < 4000
    assert Maps.of(Descriptor(1), None) is first
