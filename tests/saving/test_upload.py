"""Several cells in GPU memory are copied in one go, and each cell receives its own bytes."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch

from casckpt.format.names import TxId
from casckpt.plan.reuse import ReusableCells
from casckpt.saving.local_entries import plan_work
from casckpt.saving.prepare import prepare
from casckpt.saving.upload import Copier, Upload
from tests.support.saves import CELL, small


@dataclass
class Far:
    """``count`` elements of 4 bytes that cannot be viewed directly. ``copied``: the ranges that were requested."""

    count: int
    seed: int
    on_gpu: bool = True
    itemsize: int = 4
    copied: list[tuple[int, int]] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        return Random(self.seed).randbytes(self.count * self.itemsize)

    def copy_out(self, lo: int, hi: int, buffer: memoryview) -> None:
        self.copied.append((lo, hi))
        buffer[:] = self.data[lo * 4 : hi * 4]


@dataclass
class Part:
    memory: Any
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * 4


def copied(copier: Copier, cells: Any, order: list[int] | None = None) -> None:
    for number in range(len(cells)) if order is None else order:
        cell, target = cells[number], bytearray(cells[number].nbytes)
        copier.copy(cells, cell, number, memoryview(target))
        assert bytes(target) == cell.memory.data[cell.start * 4 : cell.stop * 4]


def test_consecutive_cells_are_copied_together() -> None:
    one, other = Far(100, 1), Far(50, 2)
    cells = [*(Part(one, at, at + 10) for at in range(0, 100, 10)), Part(other, 0, 50)]
    copied(Copier(memoryview(bytearray(400))), cells)
    assert (one.copied, other.copied) == ([(0, 100)], [(0, 50)])


def test_copies_do_not_exceed_the_available_space() -> None:
    one = Far(100, 1)
    cells = [Part(one, at, at + 10) for at in range(0, 100, 10)]
    copied(Copier(memoryview(bytearray(130))), cells)
    assert one.copied == [(0, 30), (30, 60), (60, 90), (90, 100)]


def test_nonconsecutive_cells_are_copied_separately() -> None:
    one = Far(100, 1)
    cells = [Part(one, 0, 10), Part(one, 20, 30), Part(one, 30, 40), Part(one, 10, 20)]
    copied(Copier(memoryview(bytearray(400))), cells)
    assert one.copied == [(0, 10), (20, 40), (10, 20)]


def test_the_next_cells_can_come_from_a_different_list() -> None:
    one = Far(100, 1)
    copier = Copier(memoryview(bytearray(400)))
    copied(copier, [Part(one, 0, 10), Part(one, 10, 20)])
    copied(copier, [Part(one, 20, 30)])
    copied(copier, [Part(one, 0, 10), Part(one, 10, 20)], [1, 0])
    assert one.copied == [(0, 20), (20, 30), (10, 20), (0, 20)]


@pytest.mark.parametrize("room", [None, memoryview(bytearray(39))])
def test_cells_that_exceed_the_available_space_are_copied_directly(room: memoryview | None) -> None:
    one = Far(100, 1)
    copied(Copier(room), [Part(one, 0, 10), Part(one, 10, 20)])
    assert one.copied == [(0, 10), (10, 20)]


def test_tensors_in_host_memory_are_copied_directly() -> None:
    one = Far(100, 1, on_gpu=False)
    copied(Copier(memoryview(bytearray(400))), [Part(one, 0, 10), Part(one, 10, 20)])
    assert one.copied == [(0, 10), (10, 20)]


def test_a_long_key_does_not_cost_memory_for_each_small_tensor() -> None:
    values = {f"w{n}": torch.full((4,), float(n)) for n in range(1000)}
    prepared = prepare({**values, "k" * 4000: torch.ones(4)}, None, rank=0, allow_pickle=False)
    known = ReusableCells(None, [], lambda ref: False)
    work = plan_work(prepared.sources, CELL, known, prepared.streams, CELL)
    upload = Upload(small().repository, TxId(""), prepared.sources, known, 1)
    tracemalloc.start()
    try:
        upload._queues([cell for cells in work for cell in cells])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
