"""The bytes of ranges of files are read as one piece of memory."""

from __future__ import annotations

import random

import pytest

from casckpt.errors import Conflict
from casckpt.tensors.file_memory import FileMemory, FileRange


class Bytes:
    """A file in memory, which counts what is read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.read = data, 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset + len(buffer) > len(self.data):
            raise Conflict("it is shorter now")
        self.read += len(buffer)
        buffer[:] = self.data[offset : offset + len(buffer)]


@pytest.mark.parametrize("itemsize", [1, 2, 8])
def test_any_elements_of_any_ranges_are_read_and_nothing_else(seed: int, itemsize: int) -> None:
    dice = random.Random(seed)
    for _ in range(50):
        files = [Bytes(dice.randbytes(200)) for _ in range(3)]
        ranges = []
        for _ in range(dice.randrange(1, 9)):
            offset = dice.randrange(100)
            ranges.append(FileRange(dice.choice(files), offset, dice.choice([0, 1, 3, 8, 90])))
        total = sum(one.length for one in ranges)
        ranges.append(FileRange(files[0], 7, -total % itemsize))  # a range may end inside an element
        data = b"".join(one.file.data[one.offset : one.offset + one.length] for one in ranges)  # type: ignore[attr-defined]
        memory, count = FileMemory(ranges, itemsize), len(data) // itemsize
        assert memory.view(0, count) is None  # type: ignore[func-returns-value] # that is what it tells
        for _ in range(20):
            lo = dice.randrange(count + 1)
            hi = dice.randrange(lo, count + 1)
            buffer, before = bytearray((hi - lo) * itemsize), sum(one.read for one in files)
            memory.copy_out(lo, hi, memoryview(buffer))
            assert buffer == data[lo * itemsize : hi * itemsize]
            assert sum(one.read for one in files) - before == len(buffer)


def test_an_error_of_a_file_is_passed_on() -> None:
    memory = FileMemory([FileRange(Bytes(bytes(9)), 0, 9), FileRange(Bytes(bytes(9)), 1, 9)])
    memory.copy_out(0, 17 - 8, memoryview(bytearray(9)))
    with pytest.raises(Conflict, match="shorter"):
        memory.copy_out(8, 18, memoryview(bytearray(10)))
