"""Imports and exports torch.distributed.checkpoint folders, window by window."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Unpack

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from casckpt.base.groups import grouped, in_batches
from casckpt.base.names import check_keywords, is_attachment_name
from casckpt.base.progress import Progress, Shown
from casckpt.contents.checkpoint import Checkpoint
from casckpt.errors import InvalidInput
from casckpt.format.regions import Box, Shape
from casckpt.frontends.dcp.contents import DcpContents, described
from casckpt.frontends.dcp.folder import MEGATRON, METADATA, Folder, is_megatron
from casckpt.frontends.dcp.session import WriterSession
from casckpt.frontends.interchange.new_files import (
    check_file_names,
    file_attachments,
    new_folder,
    place_for,
    synced_file,
    torch_saves,
    write_attached,
    write_durably,
)
from casckpt.frontends.stores import AnyStore, as_store
from casckpt.loading.options import LoadOptions
from casckpt.loading.regions import EntrySlice, RegionReader
from casckpt.saving.options import SaveOptions, UnpicklingArguments
from casckpt.storage import open_files
from casckpt.storage.files import Files
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.memory import tensor_over

MAX_ATTACHMENT_BYTES: Final = 64 << 20
WINDOW_BYTES: Final = 128 << 20
FILE_BYTES: Final = 4 << 30
log = logging.getLogger(__name__)


def dcp_to_casckpt(
    path: str | os.PathLike[str], store: AnyStore, *, step: int, **options: Unpack[UnpicklingArguments]
) -> Checkpoint:
    """Save the contents of a DCP folder (a path or URL) as if one process had saved them through `StorageWriter`.

    Small files next to the tensors, such as ``common.pt`` in Megatron's `torch_dist` folders, become attachments. The
    import holds 256 MiB of tensors, or the largest chunk, in memory at a time. ``allow_pickle``: accept values that
    torch's restricted unpickler cannot read, and unpickle Megatron's objects, which may run code. Without it, such
    values raise InvalidInput. ``step``, ``options``: see `Store.save`.

    Raises NotFound, InvalidInput, Refused or Damaged for a folder that cannot be imported, and the errors of
    `Store.save`.
    """
    check_keywords("dcp_to_casckpt", options, UnpicklingArguments)
    return import_folder(open_files(path), store, SaveOptions(step=step, **options))


def import_folder(
    files: Files, store: AnyStore, options: SaveOptions, more: Mapping[Any, Any] | None = None
) -> Checkpoint:
    """Import any `Files` as `dcp_to_casckpt` does. ``more``: a state to save in addition.

    By default, small files become attachments.
    """
    folder, opened = Folder(files, allow_pickle=options.allow_pickle), as_store(store)
    if options.attachments is None:
        options = replace(options, attachments=small_files(files))
    plan = folder.plan()
    folder.read_values(plan)
    session = WriterSession(opened.repository, options.checked(), rank=0, alone=False, more=more or {})
    (plan,) = session.begin([session.local_plan(plan)])
    session.finish(folder.metadata, [session.write(plan, folder)])
    return opened.get(session.checkpoint)


def small_files(files: Files) -> dict[str, bytes]:
    """Return the files of at most 64 MiB that are next to the tensors. The log names larger files."""
    contents: dict[str, bytes] = {}
    for name in files.names():
        if name == METADATA or name.endswith(".distcp"):
            continue
        if not is_attachment_name(name):
            log.warning("skipped %r, because an attachment cannot have this name", name)
        elif files.size(name) > MAX_ATTACHMENT_BYTES:
            log.warning("skipped %s, because it is larger than 64 MiB", name)
        else:
            contents[name] = files.read(name)
    return contents


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
    """Write any checkpoint as a folder that `torch.distributed.checkpoint.load` can read with its own reader.

    Attachments become files in the folder unless ``attachments=False``. Every byte that is read is verified. The
    export holds 128 MiB of tensors in memory at a time. ``path``: a folder, or a URL to which a temporary folder is
    copied. ``force``: write into a folder that is not empty. ``allow_pickle``: also export values that must be
    pickled.

    Raises NotFound, Conflict if ``path`` exists, InvalidInput (also for an attachment whose name is not a valid file
    name), Damaged or StorageError. After an error, no file exists under the final name.
    """
    opened_store = as_store(store)
    checkpoint = opened_store.get(ref)
    opened = DcpContents(opened_store, checkpoint, LoadOptions(allow_pickle=allow_pickle))
    if opened.note.chunks:
        raise InvalidInput(
            f"{checkpoint.run} holds the state of a single rank, so casckpt cannot export the complete state"
        )
    total = checkpoint.stats.bytes_total
    reader = RegionReader(opened_store.repository, opened.contents.manifest, total, Progress(progress))
    attached = file_attachments(opened_store, checkpoint) if attachments else []
    check_file_names(attached, _is_ours)
    with (
        place_for(path, force=force, is_last=METADATA.__eq__) as place,
        new_folder(place, force=force, stale=_is_ours, last=(METADATA,)) as folder,
    ):
        write_attached(opened_store, checkpoint, attached, folder)
        boxed = MEGATRON in attached and is_megatron(opened_store.read_attachment(checkpoint, MEGATRON))
        metadata = _Writer(folder, opened, reader, boxed=boxed).write()
        write_durably(folder / METADATA, pickle.dumps(metadata))
    return checkpoint


class _Writer:
    """Writes the data files of a folder. ``boxed``: wrap each non-tensor value in a list."""

    def __init__(self, folder: Path, opened: DcpContents, reader: RegionReader, *, boxed: bool) -> None:
        self._folder, self._opened, self._reader, self._boxed = folder, opened, reader, boxed
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}

    def write(self) -> dcp.Metadata:
        """Write all files, and return the metadata with the locations of all parts."""
        metadata, tensors = self._opened.metadata(), self._opened.schema.tensors
        self._opened.contents.check_whole([self._opened.tensor(dcp.MetadataIndex(key))[0] for key in tensors])
        chunks = [chunk for key in tensors for chunk in self._chunks(key)]
        values = self._opened.archives(list(self._opened.schema.values), boxed=self._boxed)
        windows = list(in_batches(chunks, lambda chunk: chunk.nbytes, WINDOW_BYTES))
        files = list(in_batches(windows, lambda window: sum(chunk.nbytes for chunk in window), FILE_BYTES)) or [[]]
        for number, content in enumerate(files):
            name = f"__0_{number}.distcp"
            with synced_file(self._folder / name) as file:
                for chunk, data in self._reader.read(content):
                    self._write_chunk(file, name, chunk, data)
                for key, value in values.items() if number == len(files) - 1 else ():
                    self._note(dcp.MetadataIndex(key), file, name, file.write(value))
        self._describe(metadata, chunks)
        return metadata

    def _chunks(self, key: str) -> Iterator[EntrySlice]:
        entry, _ = self._opened.tensor(dcp.MetadataIndex(key))
        for box in split(entry.shape, entry.itemsize, WINDOW_BYTES):
            yield EntrySlice(entry, 0, box.numel, box)

    def _write_chunk(self, file: BinaryIO, name: str, chunk: EntrySlice, data: memoryview) -> None:
        box, start = chunk.region.box, file.tell()
        with torch_saves():
            torch.save(tensor_over(data, torch_dtype(chunk.entry.dtype), box.shape), file)
        self._note(dcp.MetadataIndex(chunk.entry.key, box.offset), file, name, file.tell() - start)

    def _note(self, index: dcp.MetadataIndex, file: BinaryIO, name: str, nbytes: int) -> None:
        self._places[index] = _StorageInfo(name, file.tell() - nbytes, nbytes)

    def _describe(self, metadata: dcp.Metadata, chunks: Sequence[EntrySlice]) -> None:
        for key, of_key in grouped(chunks, lambda chunk: chunk.entry.key).items():
            entry, boxes = of_key[0].entry, [chunk.region.box for chunk in of_key]
            parts = [(box.offset, box.shape) for box in boxes]
            metadata.state_dict_metadata[key] = described(entry.dtype, entry.shape, parts)
        metadata.storage_data = self._places


def split(shape: Shape, itemsize: int, most: int) -> Iterator[Box]:
    """Split a tensor into boxes of whole rows. A box has at most ``most`` bytes, unless a single row is larger."""
    row = prod(shape[1:]) * itemsize
    if not shape or not prod(shape) or row * shape[0] <= most:
        yield Box((0,) * len(shape), shape)
        return
    step = max(1, most // row)
    for start in range(0, shape[0], step):
        rest = (0,) * (len(shape) - 1)
        yield Box((start, *rest), (min(step, shape[0] - start), *shape[1:]))


def _is_ours(name: str) -> bool:
    """Return whether a file with this name comes from an earlier export."""
    return name == METADATA or name.endswith(".distcp")
