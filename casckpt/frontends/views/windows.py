"""The data of a view's tensors, read window by window, or changed in a file that holds those of another checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BufferedRandom

from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import StorageError
from casckpt.frontends.views.recut import ViewTensor
from casckpt.loading.regions import EntrySlice, RegionReader
from casckpt.loading.update import change

_BLOCK = 1 << 20  # bytes of a file that are written together if one of them differs


class WindowReader(RegionReader):
    """Reads the data of tensors one after the other. Every byte is verified."""

    align = 1  # as files have it

    def read_tensors(self, tensors: Iterable[ViewTensor]) -> Iterator[memoryview]:
        """Yield the data, window by window. A window is valid until the next is asked for."""
        for wants, data, _ in self.planned(self._windows_of(tensors)):
            self._reader.run(wants)
            yield data

    def revise(self, tensors: Iterable[ViewTensor], file: BufferedRandom, held: Checkpoint) -> None:
        """Change the data of ``tensors`` in a file, from its position on, from that of ``held`` to what it is now.

        Everything is hashed, so the file may hold anything. Only what differs is read from the store, and written.
        """
        for wants, window, _ in self.planned(self._windows_of(tensors)):
            start = file.tell()
            if file.readinto(window) != len(window):
                raise StorageError(f"{file.name} was cut while it was read; let nothing else write to it")
            before = bytes(window)
            change(self._reader, wants, held, 0, check=True)
            for at in range(0, len(window), _BLOCK):
                if window[at : at + _BLOCK] != before[at : at + _BLOCK]:
                    file.seek(start + at)
                    file.write(window[at : at + _BLOCK])
            file.seek(start + len(window))

    def _windows_of(self, tensors: Iterable[ViewTensor]) -> Iterator[list[EntrySlice]]:
        return self.windows(source for tensor in tensors for source in tensor.sources)
