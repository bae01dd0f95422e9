"""Copies from one buffer to GPU tensors: ranges that are adjacent in both are copied together."""

from __future__ import annotations

from typing import Any, NamedTuple

from casckpt.format.regions import Box, Region, full_box
from casckpt.loading.planned_reads import Consumer, Runs


class Part(NamedTuple):
    box: Box
    lo: int
    hi: int
    nbytes: int


class Sink:
    def __init__(self) -> None:
        self.taken: list[tuple[Region, bytes]] = []

    def copy_in(self, region: Region, buffer: memoryview) -> None:
        self.taken.append((region, bytes(buffer)))


BOX, DATA = full_box((10, 10)), bytes(range(100))


def delivered(*parts: tuple[Sink, int, int, int, Box]) -> None:
    """Return (sink, first element, end, first byte, box). Each element has one byte."""
    runs = Runs(memoryview(DATA))
    for sink, lo, hi, start, box in parts:
        taker: Any = Consumer
        runs.add(taker(sink, Part(box, lo, hi, hi - lo), None), start)
    assert not any(sink.taken for sink, *_ in parts)
    runs.deliver()


def test_units_adjacent_in_the_buffer_and_the_tensor_are_copied_together() -> None:
    one, other = Sink(), Sink()
    delivered((one, 0, 20, 0, BOX), (one, 20, 30, 20, BOX), (other, 5, 9, 30, BOX), (one, 30, 31, 30, BOX))
    assert one.taken == [(Region(BOX, 0, 31), DATA[:31])]
    assert other.taken == [(Region(BOX, 5, 9), DATA[30:34])]


def test_units_that_are_not_adjacent_in_both_are_copied_individually() -> None:
    one, part = Sink(), Box((2, 0), (8, 10))
    delivered((one, 0, 10, 0, BOX), (one, 10, 20, 50, BOX), (one, 30, 40, 60, BOX), (one, 40, 50, 70, part))
    assert one.taken == [
        (Region(BOX, 0, 10), DATA[:10]),
        (Region(BOX, 10, 20), DATA[50:60]),
        (Region(BOX, 30, 40), DATA[60:70]),
        (Region(part, 40, 50), DATA[70:80]),
    ]
