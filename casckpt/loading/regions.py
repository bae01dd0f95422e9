"""Reads slices of a checkpoint's entries, window by window, in bounded memory, and verifies them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedRandom
from typing import Final, NamedTuple, TypeAlias

import torch

from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput, StorageError
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.regions import Box, Region, full_box
from casckpt.format.sections.index import Entry
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.loading.update import plan_update
from casckpt.repository.repository import Repository
from casckpt.storage.buffers import AlignedBuffer
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import BITS, Destination

WINDOW_BYTES: Final = 64 << 20
_ALIGN: Final = 16  # bytes; enough for torch to copy the largest elements
_BLOCK = 1 << 20  # the number of file bytes that are rewritten together if one of them differs
SliceBytes: TypeAlias = "tuple[EntrySlice, memoryview]"


class EntrySlice(NamedTuple):
    """Elements [lo, hi) of an entry, in row-major order.

    If ``box`` is set, the range counts only the elements of the box.
    """

    entry: Entry
    lo: int
    hi: int
    box: Box | None = None

    @property
    def region(self) -> Region:
        """The region of these elements."""
        return Region(full_box(self.entry.shape) if self.box is None else self.box, self.lo, self.hi)

    @property
    def nbytes(self) -> int:
        """The size of these elements in bytes."""
        return (self.hi - self.lo) * self.entry.itemsize


def plan_windows(
    slices: Iterable[EntrySlice], most: int, cell_bytes: int, first: int | None = None
) -> Iterator[list[EntrySlice]]:
    """Divide ``slices``, in order, into windows of at most ``most`` bytes.

    Slices are split between cells, so that no cell is read twice, unless ``most`` is smaller than a cell. ``first``:
    the maximum size of the first window, if it differs from ``most``.
    """
    window: list[EntrySlice] = []
    room = most if first is None else first
    for whole in slices:
        lo, size = whole.lo, whole.entry.itemsize
        cell = max(cell_bytes // size, 1)
        while lo < whole.hi:
            fits = room // size if window else max(room // size, 1)
            hi = min(lo + fits, whole.hi)
            if hi < whole.hi:
                hi = max(hi // cell * cell, lo) if window or fits >= cell else hi
            if hi > lo:
                window.append(whole._replace(lo=lo, hi=hi))
                room -= (hi - lo) * size
                lo = hi
            if lo < whole.hi:
                yield window
                window, room = [], most
    if window:
        yield window


def views(window: Iterable[EntrySlice], buffer: memoryview, align: int = 1) -> Iterator[SliceBytes]:
    """Yield each slice of a window with its bytes. They are in ``buffer``, in order, at multiples of ``align``."""
    start = 0
    for part in window:
        yield part, buffer[start : start + part.nbytes]
        start += -(-part.nbytes // align) * align


def requests(parts: Iterable[SliceBytes], tables: Mapping[int, ExtentTable]) -> list[RegionRequest]:
    """Return the requests that read slices. ``tables``: the extents of entries, by number, if they are known."""
    return [_request(part, view, tables) for part, view in parts if view.nbytes]


def _request(part: EntrySlice, view: memoryview, tables: Mapping[int, ExtentTable]) -> RegionRequest:
    entry, region = part.entry, part.region
    kind = BITS.get(entry.itemsize) or torch_dtype(entry.dtype)
    data = torch.frombuffer(view, dtype=kind)
    shaped = data.view(region.box.shape) if region.is_whole else data
    return RegionRequest(entry.number, Destination(region, shaped, kind), tables.get(entry.number))


def too_large(key: str, dtype: str) -> InvalidInput:
    """Return the error for finite numbers that would become infinite in a dtype."""
    message = f"{key!r} has values that are too large for {dtype}: choose another dtype, or fewer tensors"
    return InvalidInput(message, key=key)


def converted(part: EntrySlice, data: memoryview, dtype: str) -> memoryview:
    """Return the elements of a slice in another dtype, if they are floating-point numbers of at least 16 bits.

    Raises InvalidInput, naming the key, for finite numbers that would become infinite.
    """
    if not is_castable(part.entry) or part.entry.dtype == dtype or not data.nbytes:
        return data
    given = torch.frombuffer(data, dtype=torch_dtype(part.entry.dtype))
    made = given.to(torch_dtype(dtype))
    if (made.isinf() & ~given.isinf()).any():
        raise too_large(part.entry.key, dtype)
    return made.view(torch.uint8).numpy().data


def is_castable(entry: Entry) -> bool:
    """Return whether an entry has floating-point numbers of at least 16 bits, other than the steps of an optimizer."""
    kind, is_step = torch_dtype(entry.dtype), not entry.shape and entry.key.rpartition(".")[2] == "step"
    return kind.is_floating_point and kind.itemsize > 1 and not is_step


class RegionReader:
    """Reads slices of entries of one checkpoint into one buffer, window by window, and verifies them.

    ``nbytes``: the total size of all slices, for ``progress``. ``dtype``: that of the elements which `read_joined`
    yields, where `is_castable`. Raises Damaged, MissingKey, Gone, and StorageError.
    """

    def __init__(
        self, repo: Repository, manifest: Manifest, nbytes: int, progress: Progress, *, dtype: str | None = None
    ) -> None:
        self._dtype = dtype
        self._cell_bytes = manifest.body.cell_bytes
        self._reader = EntryReader(repo, manifest, True, usable_threads(None), progress.of(nbytes))
        self._buffer = AlignedBuffer(1)

    def windows(self, slices: Iterable[EntrySlice]) -> Iterator[list[EntrySlice]]:
        """Divide ``slices`` into windows of at most `WINDOW_BYTES`."""
        return plan_windows(slices, WINDOW_BYTES, self._cell_bytes)

    def read(self, windows: Iterable[Sequence[EntrySlice]]) -> Iterator[SliceBytes]:
        """Yield the slices of all windows, in order. A window's bytes are valid until the next window is read."""
        for wants, data, window in self._planned(windows, _ALIGN):
            self._reader.fill(wants)
            yield from views(window, data, _ALIGN)

    def read_joined(self, slices: Iterable[EntrySlice]) -> Iterator[memoryview]:
        """Yield the bytes of slices in file order, window by window. Raises the errors of `converted`.

        The bytes are valid until the next window is read.
        """
        if self._dtype is not None:
            yield from (converted(part, data, self._dtype) for part, data in self.read(self.windows(slices)))
            return
        for wants, data, _ in self._planned(self.windows(slices)):
            self._reader.fill(wants)
            yield data

    def revise(self, slices: Iterable[EntrySlice], file: BufferedRandom, held: Checkpoint) -> None:
        """Update the bytes of ``slices`` in a file, beginning at the file position.

        The file holds the version ``held``.

        All bytes of the file are hashed, so it may actually hold anything. Only bytes that differ are read from the
        store and rewritten.
        """
        for wants, window, _ in self._planned(self.windows(slices)):
            start = file.tell()
            if file.readinto(window) != len(window):
                raise StorageError(
                    f"{file.name} was truncated while it was being read; make sure that nothing else writes to it"
                )
            before = bytes(window)
            plan_update(self._reader, wants, held, 0, check=True).run()
            for at in range(0, len(window), _BLOCK):
                if bytes(window[at : at + _BLOCK]) != before[at : at + _BLOCK]:  # views compare slowly
                    file.seek(start + at)
                    file.write(window[at : at + _BLOCK])
            file.seek(start + len(window))

    def _planned(
        self, windows: Iterable[Sequence[EntrySlice]], align: int = 1
    ) -> Iterator[tuple[list[RegionRequest], memoryview, Sequence[EntrySlice]]]:
        """For each window, yield its requests, and the part of the buffer that they fill."""
        for window in windows:
            total = sum(-(-part.nbytes // align) * align for part in window)
            if self._buffer.nbytes < total:
                self._buffer = AlignedBuffer(total)
            data = self._buffer.view[:total]
            yield requests(views(window, data, align), {}), data, window
