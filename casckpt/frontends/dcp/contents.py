"""A checkpoint as DCP sees it: its metadata, its values as pickles or plain data, and the locations of its tensors."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from casckpt.base.lazy import cached_property
from casckpt.contents.checkpoint import Checkpoint
from casckpt.contents.contents import Contents
from casckpt.errors import InvalidInput, MissingKey
from casckpt.format.records import changed
from casckpt.format.regions import Shape
from casckpt.format.sections.index import Entry
from casckpt.frontends.dcp.ids import stamp
from casckpt.frontends.dcp.schema import Note, Opaque, Schema, Value, read_note, schema_of
from casckpt.loading.load import values_at
from casckpt.loading.options import LoadOptions
from casckpt.store.store import Store
from casckpt.tensors.dtypes import torch_dtype
from casckpt.tensors.objects import TORCH_EXTENSIONS, is_archive, read_archive, write_archive
from casckpt.tensors.untrusted import MISREAD


class DcpContents:
    """A checkpoint that one rank has opened."""

    def __init__(self, store: Store, checkpoint: Checkpoint, options: LoadOptions) -> None:
        self.checkpoint, self._options = checkpoint, options
        self._repo = store.repository
        self.contents = Contents.open(self._repo, checkpoint.commit, options.rank, TORCH_EXTENSIONS)
        self.contents.check_no_wrappers("torch.distributed.checkpoint")

    @cached_property
    def note(self) -> Note:
        """The note that the save wrote for DCP."""
        return read_note(self.contents.manifest, allow_pickle=self._options.allow_pickle)

    @cached_property
    def schema(self) -> Schema:
        """The keys and paths from the note, or those of DCP's default planner if the note has none."""
        if self.note.keys is None:
            return schema_of(self.contents.whole_tree(), self._plain_values.get)
        schema = Schema()
        for key in self.note.keys:
            if key in self.contents.tensors or key in self.note.chunks:
                schema.tensors.append(key)
            else:
                schema.values[key] = Value(key)
        return schema

    @cached_property
    def _plain_values(self) -> Mapping[str, Any]:
        """All objects that can be read without unpickling. `Opaque` stands in for the others."""
        objects = self.contents.objects
        hidden = {key for key, stored in objects.items() if stored.pickled or key in self.note.opaque}
        read = self._values_at([key for key in objects if key not in hidden])
        return read | dict.fromkeys(hidden, Opaque)

    def metadata(self) -> dcp.Metadata:
        """Return the metadata for DCP. Each tensor is one chunk, because casckpt can read any part of it."""
        schema = self.schema
        entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
        for key in schema.paths if self.note.keys is None else self.note.keys:
            entries[key] = dcp.BytesStorageMetadata() if key in schema.values else self._tensor_metadata(key)
        planner_data = self.note.planner_data if self.note.keys is not None else schema.paths
        metadata = dcp.Metadata(entries, planner_data=planner_data, storage_data={"checkpoint": self.checkpoint.id})
        commit = self.checkpoint.commit
        stamp(metadata, commit.run, commit.step, commit.txid)
        return metadata

    def _tensor_metadata(self, key: str) -> dcp.TensorStorageMetadata:
        chunked = self.note.chunks.get(key)
        if chunked is None:
            entry = self._entry(key)
            return described(entry.dtype, entry.shape, [((0,) * len(entry.shape), entry.shape)])
        shape, parts = chunked
        dtype = self._entry(parts[0].key).dtype if parts else "float32"
        return described(dtype, shape, [(part.offset, part.shape) for part in parts])

    def _entry(self, key: str) -> Entry:
        entry = self.contents.tensors.get(key)
        if entry is None:
            raise MissingKey(f"{self.contents.where} lacks the tensor {key!r}", keys=(key,))
        return entry

    def tensor(self, index: dcp.MetadataIndex) -> tuple[Entry, Shape]:
        """Return the entry that holds a DCP chunk, and the chunk's offset within that entry."""
        offset = tuple(index.offset or ())
        chunked = self.note.chunks.get(index.fqn)
        if chunked is None:
            entry = self._entry(index.fqn)
            return entry, offset or (0,) * len(entry.shape)
        for part in chunked[1]:
            if part.offset == offset:
                return self._entry(part.key), (0,) * len(part.shape)
        raise MissingKey(f"this rank did not save a part of {index.fqn!r} at offset {list(offset)}", keys=(index.fqn,))

    def check_complete(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Raise InvalidInput if this rank saved without the others and now loads a part that it did not save."""
        if not self.note.chunks or not isinstance(planner, DefaultLoadPlanner):
            return
        planned: dict[str, int] = {}
        for item in plan.items:
            planned[item.dest_index.fqn] = planned.get(item.dest_index.fqn, 0) + item.lengths.numel()
        for key, value in planner.state_dict.items():
            if key not in self.note.chunks:
                continue
            wanted = sum(prod(chunk.sizes) for chunk in _create_chunk_list(value))
            if planned.get(key, 0) != wanted:
                raise InvalidInput(
                    f"{key!r}: this rank saved alone and now loads more than it saved. Load on the same number of "
                    "ranks, with the same sharding, or save with collectives enabled",
                    key=key,
                )

    # values

    def values(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return values by DCP key. Raises InvalidInput for a pickle unless the options allow unpickling."""
        values = {key: self.schema.values.get(key) or Value(key) for key in keys}
        known = {key: value.value for key, value in values.items() if value.value is not Opaque}
        read = self._values_at([value.key for key, value in values.items() if key not in known])
        return known | {key: read[value.key] for key, value in values.items() if key not in known}

    def archives(self, keys: Sequence[str], *, boxed: bool = False, unpickled: bool = False) -> dict[str, bytes]:
        """Return each value as the bytes that torch.save would write. Bytes from a planner are returned unchanged.

        ``boxed``: whether to wrap each value in a list. ``unpickled``: whether the caller passes the results to
        torch.load. Raises InvalidInput for bytes that would then run code, unless the options allow unpickling.
        """
        archives = self._bytes_at([key for key in keys if key in self.note.opaque])
        for key, data in archives.items():
            if (unpickled or is_archive(data)) and not self._options.allow_pickle:
                _check_restricted(key, data)
        written: dict[Any, bytes] = {}
        for key, value in self.values([key for key in keys if key not in archives]).items():
            same = _bits(value) if isinstance(value, bool | int | float | str | None) else key
            if same not in written:
                written[same] = write_archive([value] if boxed else value)
            archives[key] = written[same]
        return archives

    def _values_at(self, keys: Sequence[str]) -> dict[str, Any]:
        return values_at(self._repo, self.contents, keys, self._options) if keys else {}

    def _bytes_at(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return bytes that came from a planner, even if they are a pickle."""
        if not keys:
            return {}
        bare = Contents(self.contents.manifest, self._options.rank, TORCH_EXTENSIONS)
        for key in keys:
            bare.objects[key] = changed(bare.objects[key], pickled=False)
        return values_at(self._repo, bare, keys, self._options)


def _check_restricted(key: str, data: bytes) -> None:
    try:
        read_archive(data)
    except MISREAD as error:
        raise InvalidInput(
            f"{key!r} is stored as a pickle. Loading a pickle runs code from the store; pass allow_pickle=True to "
            "StorageReader if you trust its source",
            key=key,
        ) from error


def described(dtype: str, shape: Shape, chunks: Sequence[tuple[Shape, Shape]]) -> dcp.TensorStorageMetadata:
    """Describe a tensor for DCP. ``chunks``: the offset and shape of each."""
    parts = [dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=torch_dtype(dtype)), torch.Size(shape), parts)


def _bits(value: Any) -> tuple[type, Any]:
    """Return a key that is equal for values with equal archives. 0.0 and -0.0 have different keys."""
    return type(value), struct.pack("d", value) if isinstance(value, float) else value
