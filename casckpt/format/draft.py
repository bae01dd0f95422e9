"""Encoding of manifests: from what a save stored, or from another manifest whose cells have moved."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

import msgspec

from casckpt.base.digest import Buffer
from casckpt.format.columns import pack
from casckpt.format.extents import ExtentTable, renumbered
from casckpt.format.manifest import Manifest, Places, of_bytes
from casckpt.format.names import ManifestId
from casckpt.format.records import changed
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.format.sections.head import (
    BLOBS,
    CELLS,
    COPIED,
    INDEX,
    KNOWN,
    OBJECTS,
    PLACES,
    ROWS,
    Head,
    Section,
    assemble,
)
from casckpt.format.sections.health import HEALTH, Rows, encode_health
from casckpt.format.sections.index import Description, ManifestBody, Name, ObjectColumns, entry_columns, pack_ranks
from casckpt.format.sections.pieces import cut
from casckpt.format.sections.tables import encode_cells, encode_rows


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True):
    """One leaf that is not a tensor. ``data``: plain data (`casckpt.format.plain`); ``pickled``: it is a pickle."""

    key: str
    rank: int | None
    data: bytes
    parts: int = 0
    pickled: bool = False


class Attachment(msgspec.Struct, frozen=True, array_like=True):
    """A short attachment, inline. Long ones are entries of kind "attachment"."""

    name: str
    data: bytes


class Draft(Description, frozen=True, kw_only=True):
    """The content of a manifest. ``streams``: dtype and extents of each, with positions in ``blobs`` as blob numbers.

    ``unhashed``: streams that were not hashed completely, because they were declared frozen. ``health``: of the cells
    of streams, by number of the stream; None if it was not requested.
    """

    blobs: Sequence[BlobRef]
    streams: Mapping[Name, tuple[str, ExtentTable]]
    unhashed: Collection[Name] = ()
    objects: Sequence[ObjectEntry] = ()
    attachments: Sequence[Attachment] = ()
    health: Mapping[int, Rows] | None = None


class Encoded(NamedTuple):
    """An encoded manifest."""

    decoded_head: Head
    data: bytes

    @property
    def id(self) -> ManifestId:
        """The id of the checkpoint."""
        return ManifestId(self.decoded_head[INDEX].digest.hex())

    @property
    def head(self) -> str:
        """The hash that the commit record names."""
        return self.decoded_head.digest

    def manifest(self) -> Manifest:
        """Return the manifest, as if it had been read."""
        return of_bytes(self.decoded_head, self.data)


def encode(draft: Draft) -> Encoded:
    """Encode a manifest. Raises InvalidInput or Refused for content that no reader accepts."""
    tables = [table for _, table in draft.streams.values()]
    cells, cell_bytes = cut([encode_cells(table) for table in tables])
    rows, row_bytes = cut([encode_rows(table) for table in tables])
    data, data_bytes = cut([*(stored.data for stored in draft.objects), *(item.data for item in draft.attachments)])
    body = ManifestBody(
        **{name: getattr(draft, name) for name in Description.__struct_fields__},
        entry_columns=entry_columns(draft.streams, draft.unhashed),
        object_columns=ObjectColumns(
            keys=[stored.key for stored in draft.objects],
            rank=pack_ranks(stored.rank for stored in draft.objects),
            parts=pack([stored.parts for stored in draft.objects]),
            pickled=pack([stored.pickled for stored in draft.objects]),
        ),
        attachment_names=[attachment.name for attachment in draft.attachments],
        cells=cells,
        data=data,
    )
    body.check()
    places = msgspec.msgpack.encode(Places(rows=rows))
    index, blobs = msgspec.msgpack.encode(body), encode_blobs(draft.blobs)
    health = [] if draft.health is None else [(Section(HEALTH, COPIED, 0, 0, b""), encode_health(draft.health))]
    return _assembled(
        {INDEX: index, PLACES: places, BLOBS: blobs, OBJECTS: data_bytes, CELLS: cell_bytes, ROWS: row_bytes}, health
    )


def placed(manifest: Manifest, blobs: Buffer, moved: Mapping[int, ExtentTable] | None = None) -> Encoded:
    """Encode the same checkpoint with a new section ``blobs``, whose blobs have the same order.

    ``moved``: new extents of entries, by number, if their cells moved inside the blobs. All sections that describe what
    was saved keep their bytes. Raises Damaged, and the errors of a read.
    """
    parts = {name: manifest.section(name) for name in (INDEX, PLACES, OBJECTS, CELLS, ROWS)} | {BLOBS: blobs}
    if moved:
        raw = manifest.raw_rows()
        rows, parts[ROWS] = cut([encode_rows(moved[n]) if n in moved else row for n, row in enumerate(raw)])
        parts[PLACES] = msgspec.msgpack.encode(Places(rows=rows))
    taken = [section for section in manifest.head.foreign if section.flags & COPIED]
    return _assembled(parts, [(section, manifest.section(section.name)) for section in taken])


def thinned(manifest: Manifest, drop: Container[int]) -> Encoded:
    """Encode the same checkpoint without the bytes of the entries ``drop`` (numbers) and the blobs that only they use.

    Raises Damaged, Refused, and the errors of a read.
    """
    tables = {entry.number: manifest.extents(entry) for entry in manifest.held}
    kept = [table for number, table in tables.items() if number not in drop]
    used = sorted({link.blob for table in kept for extent in table.extents for link in extent.chain})
    numbers = {old: new for new, old in enumerate(used)}
    moved = {n: changed(table, extents=()) if n in drop else renumbered(table, numbers) for n, table in tables.items()}
    return placed(manifest, encode_blobs(manifest.blob(number) for number in used), moved)


def _assembled(parts: Mapping[str, Buffer], foreign: Sequence[tuple[Section, Buffer]] = ()) -> Encoded:
    return Encoded(*assemble(((name, parts[name]) for name in KNOWN), foreign))
