"""A checkpoint of a store into a folder that torch.distributed.checkpoint loads: window by window, in few files."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from casckpt.base.groups import grouped, lots
from casckpt.base.parallel import usable_threads
from casckpt.base.progress import Progress, Shown
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Region, Shape
from casckpt.format.sections.index import Entry
from casckpt.frontends.dcp.contents import DcpContents
from casckpt.frontends.dcp.folder import MEGATRON, METADATA, is_megatron
from casckpt.frontends.interchange.new_files import (
    check_file_names,
    new_folder,
    place_for,
    synced_file,
    torch_saves,
    write_attached,
    write_durably,
)
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.frontends.views.view import check_whole
from casckpt.loading.entry_reader import EntryReader, RegionRequest
from casckpt.loading.options import LoadOptions
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import Destination

WINDOW_BYTES: Final = 128 << 20
FILE_BYTES: Final = 4 << 30


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor that becomes a chunk of DCP's."""

    key: str
    entry: Entry
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * torch_dtype(self.entry.dtype).itemsize

    def memory(self) -> torch.Tensor:
        return torch.empty(self.box.shape, dtype=torch_dtype(self.entry.dtype), device="cpu")


def casckpt_to_dcp(
    store: AnyStore,
    ref: str | Checkpoint,
    path: str | os.PathLike[str],
    *,
    attachments: bool = True,
    force: bool = False,
    allow_pickle: bool = False,
    progress: Shown | None = None,
) -> Checkpoint:
    """Write a checkpoint, whoever saved it, as a folder for `torch.distributed.checkpoint.load` with its own reader.

    Attachments become files beside (``attachments``: unless False). Every byte that is read is verified. Memory holds
    128 MiB of tensors at a time. ``path``: of a folder, or a URL, to which a temporary folder is copied. ``force``:
    write into a folder that is not empty. ``allow_pickle``: export values that only a pickle could hold.

    Raises NotFound, Conflict if ``path`` is there, InvalidInput also for an attachment that can be no file, Damaged,
    StorageError. After an error nothing stands under the final name.
    """
    opened_store = as_store(store)
    checkpoint = opened_store.get(ref)
    opened = DcpContents(opened_store, checkpoint, LoadOptions(allow_pickle=allow_pickle))
    if opened.note.chunks:
        raise InvalidInput(f"{checkpoint.run} holds what one rank saved for itself; there is no whole state to export")
    counted = Progress(progress).of(checkpoint.stats.bytes_total)
    download = EntryReader(opened_store.repository, opened.manifest, True, usable_threads(None), counted)
    attached = opened_store.attachments(checkpoint)
    if attachments:
        check_file_names(attached, _is_ours)
    with (
        place_for(path, force=force, last=(METADATA,)) as place,
        new_folder(place, force=force, stale=_is_ours, last=(METADATA,)) as folder,
    ):
        write_attached(opened_store, checkpoint, attached if attachments else (), folder)
        config = opened_store.read_attachment(checkpoint, MEGATRON) if MEGATRON in attached else b""
        metadata = _Writer(folder, opened, download, boxed=is_megatron(config)).write()
        write_durably(folder / METADATA, pickle.dumps(metadata))
    return checkpoint


class _Writer:
    """The data files of one folder. ``boxed``: values that are no tensors stand in lists, as Megatron has them."""

    def __init__(self, folder: Path, opened: DcpContents, download: EntryReader, *, boxed: bool) -> None:
        self._folder, self._opened, self._download, self._boxed = folder, opened, download, boxed
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._number = 0

    def write(self) -> dcp.Metadata:
        """All of them; the metadata that say where everything lies."""
        metadata, tensors = self._opened.metadata(), self._opened.schema.tensors
        check_whole(self._opened.manifest, [self._opened.tensor(dcp.MetadataIndex(key))[0] for key in tensors])
        chunks = [chunk for key in tensors for chunk in self._chunks(key)]
        values = self._opened.archives(list(self._opened.schema.values), boxed=self._boxed)
        windows = list(lots(chunks, lambda chunk: chunk.nbytes, WINDOW_BYTES))
        files = list(lots(windows, lambda window: sum(chunk.nbytes for chunk in window), FILE_BYTES)) or [[]]
        for number, content in enumerate(files):
            name = f"__0_{number}.distcp"
            with synced_file(self._folder / name) as file:
                for window in content:
                    self._write_window(file, name, window)
                for key, data in values.items() if number == len(files) - 1 else ():
                    self._note(dcp.MetadataIndex(key), file, name, file.write(data))
        self._describe(metadata, chunks)
        return metadata

    def _chunks(self, key: str) -> Iterator[_Chunk]:
        entry, _ = self._opened.tensor(dcp.MetadataIndex(key))
        for box in split(entry.shape, torch_dtype(entry.dtype).itemsize, WINDOW_BYTES):
            yield _Chunk(key, entry, box)

    def _write_window(self, file: BinaryIO, name: str, window: Sequence[_Chunk]) -> None:
        made = [(chunk, chunk.memory()) for chunk in window]
        self._download.run(
            [
                RegionRequest(chunk.entry.number, Destination(Region(chunk.box, 0, chunk.box.numel), data, data.dtype))
                for chunk, data in made
                if chunk.box.numel
            ]
        )
        for chunk, data in made:
            start = file.tell()
            with torch_saves():
                torch.save(data, file)
            self._note(dcp.MetadataIndex(chunk.key, chunk.box.offset), file, name, file.tell() - start)

    def _note(self, index: dcp.MetadataIndex, file: BinaryIO, name: str, nbytes: int) -> None:
        self._places[index] = _StorageInfo(name, file.tell() - nbytes, nbytes)

    def _describe(self, metadata: dcp.Metadata, chunks: Sequence[_Chunk]) -> None:
        for key, of_key in grouped(chunks, lambda chunk: chunk.key).items():
            boxes = [chunk.box for chunk in of_key]
            parts = [dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
            told = metadata.state_dict_metadata[key]
            if isinstance(told, dcp.TensorStorageMetadata):
                properties = dcp.TensorProperties(dtype=told.properties.dtype)
                metadata.state_dict_metadata[key] = dcp.TensorStorageMetadata(properties, told.size, parts)
        metadata.storage_data = self._places


def split(shape: Shape, itemsize: int, most: int) -> Iterator[Box]:
    """Boxes of whole rows that make up a tensor, of at most ``most`` bytes each where a row has not more."""
    row = prod(shape[1:]) * itemsize
    if not shape or not prod(shape) or row * shape[0] <= most:
        yield Box((0,) * len(shape), shape)
        return
    step = max(1, most // row)
    for start in range(0, shape[0], step):
        rest = (0,) * (len(shape) - 1)
        yield Box((start, *rest), (min(step, shape[0] - start), *shape[1:]))


def _is_ours(name: str) -> bool:
    """Tell whether it is a file of a DCP folder that was there before."""
    return name == METADATA or name.endswith(".distcp")
