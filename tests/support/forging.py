"""Manifests that are changed and re-encoded with correct hashes, and records that name wrong manifests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import msgspec
import numpy as np

from casckpt.format import records
from casckpt.format.extents import DIGEST_BYTES, ExtentTable
from casckpt.format.keys import commit_key, manifest_key
from casckpt.format.manifest import Encoded, Manifest
from casckpt.format.names import ManifestId
from casckpt.format.regions import Shape
from casckpt.format.sections.columns import unpack
from casckpt.format.sections.head import KNOWN, assemble
from casckpt.format.sections.pieces import cut
from casckpt.format.sections.tables import ROW, ROWS, SPANS, CellSpans
from casckpt.store.store import Store

COLUMNS = {
    "box": ("spans", 0), "lo": ("spans", 1), "hi": ("spans", 2),
    "cells": ("rows", 0), "blob": ("rows", 1), "offset": ("rows", 2),
}  # fmt: skip


@dataclass
class Table:
    """The stored extents of a tensor, with one span for each extent. ``rows``: cells, blob, offset."""

    boxes: list[tuple[Shape, Shape]]
    spans: list[tuple[int, int, int]]
    rows: list[tuple[int, int, int]]
    digests: bytes

    @classmethod
    def of(cls, table: ExtentTable) -> Table:
        rows = [(len(one.digests) // DIGEST_BYTES, one.blob, one.offset) for one in table.extents]
        spans = [(one.box, one.lo, one.hi) for one in table.extents]
        boxes = [(box.offset, box.shape) for box in table.boxes[1:]]
        return cls(boxes, spans, rows, b"".join(one.digests for one in table.extents))

    def change(self, name: str, change: Callable[[list[int]], Sequence[int]]) -> None:
        """Replace one of `COLUMNS`. A longer or shorter column changes the number of rows."""
        part, at = COLUMNS[name]
        held = getattr(self, part)
        numbers = zip(cycle(held), change([row[at] for row in held]), strict=False)
        setattr(self, part, [(*row[:at], number, *row[at + 1 :]) for row, number in numbers])

    def stored(self) -> tuple[bytes, bytes]:
        """Return the cells and rows in the long form."""
        cells = SPANS + msgspec.msgpack.encode(CellSpans(self.boxes, self.spans, self.digests))
        return cells, ROWS + b"".join(ROW.pack(*(min(number, 2**32 - 1) for number in row)) for row in self.rows)


@dataclass
class Parts:
    """The parts of a manifest. Sections in msgpack are dicts; all other sections are pieces."""

    index: dict[str, Any]
    places: dict[str, Any]
    blobs: dict[str, Any]
    pieces: dict[str, list[bytes]]

    def put_together(self) -> Encoded:
        """Re-encode the manifest."""
        tables = {"objects": (self.index, "data"), "cells": (self.index, "cells"), "rows": (self.places, "rows")}
        sections: dict[str, bytes] = {}
        for name, (where, field) in tables.items():
            table, sections[name] = cut(self.pieces[name])
            where[field] = [table.lengths, table.each, table.hashes]
        maps = {"index": self.index, "places": self.places, "blobs": self.blobs}
        sections |= {name: msgspec.msgpack.encode(fields) for name, fields in maps.items()}
        return Encoded(*assemble((name, sections[name]) for name in KNOWN))


def taken_apart(manifest: Manifest) -> Parts:
    """Decode each part of a manifest."""
    maps = {name: msgspec.msgpack.decode(manifest.section(name)) for name in ("index", "places", "blobs")}
    tables = {"objects": maps["index"]["data"], "cells": maps["index"]["cells"], "rows": maps["places"]["rows"]}
    pieces = {name: _pieces(bytes(manifest.section(name)), table[0]) for name, table in tables.items()}
    return Parts(**maps, pieces=pieces)


def _pieces(data: bytes, lengths: bytes) -> list[bytes]:
    ends = np.cumsum(unpack(lengths)).tolist()
    return [data[lo:hi] for lo, hi in zip([0, *ends], ends, strict=False)]


Change = Callable[[Parts, Manifest], object]


def setting(where: str, *path: str | int, to: Any) -> Change:
    """Set a field of a msgpack section."""

    def change(parts: Parts, _: Manifest) -> None:
        fields = getattr(parts, where)
        for name in path[:-1]:
            fields = fields[name]
        fields[path[-1]] = to

    return change


def with_piece(section: str, data: bytes, number: int = 0) -> Change:
    """Set the bytes of an entry."""

    def change(parts: Parts, _: Manifest) -> None:
        parts.pieces[section][number] = data

    return change


def with_row(blob: int = 0, offset: int = 4096) -> Change:
    """Move the first entry, which has three cells."""
    return with_piece("rows", ROWS + ROW.pack(3, blob, offset))


def with_table(change_table: Callable[[Table], object]) -> Change:
    """Replace the extents of the first entry, in the long form."""

    def change(parts: Parts, manifest: Manifest) -> None:
        table = Table.of(manifest.extents(manifest.entries[0]))
        change_table(table)
        parts.pieces["cells"][0], parts.pieces["rows"][0] = table.stored()

    return change


def with_column(name: str, change: Callable[[list[int]], Sequence[int]]) -> Change:
    """Replace one column of the extents."""
    return with_table(lambda table: table.change(name, change))


def passed_off(store: Store, to: str, of: str) -> None:
    """Give ``to`` the record and manifest of ``of``, under its own transaction ID."""
    mine, theirs = (store.get(ref).commit.committed for ref in (to, of))
    manifest = store.repository.storage.get(manifest_key(theirs.txid, theirs.manifest), limit=1 << 30)
    store.repository.storage.replace(manifest_key(mine.txid, theirs.manifest), manifest)
    record = records.changed(theirs, txid=mine.txid)
    store.repository.storage.replace(commit_key(mine.txid), records.encode(record))


def gone_to(store: Store, to: str, of: str, **fields: object) -> None:
    """Make the record of ``to`` name the checkpoint ``of`` and its manifest."""
    mine, theirs = (store.get(ref).commit.committed for ref in (to, of))
    manifest = store.repository.storage.get(manifest_key(theirs.txid, theirs.manifest), limit=1 << 30)
    named = fields.get("manifest", theirs.manifest)
    where = manifest_key(mine.txid, ManifestId(str(named)))
    store.repository.storage.replace(where, manifest)
    new = {"manifest": theirs.manifest, "head": theirs.head, "manifest_bytes": theirs.manifest_bytes, **fields}
    record = records.changed(mine, **new)
    store.repository.storage.replace(commit_key(mine.txid), records.encode(record))
