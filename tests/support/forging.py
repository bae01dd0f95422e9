"""Manifests taken apart, changed, and put together again with all of their hashes right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from casckpt.format.columns import pack, unpack
from casckpt.format.draft import Encoded
from casckpt.format.extents import ExtentTable
from casckpt.format.manifest import Manifest
from casckpt.format.sections.head import KNOWN, assemble
from casckpt.format.sections.pieces import cut
from casckpt.format.sections.tables import CellColumns, RowColumns


def columns_of(table: ExtentTable) -> tuple[CellColumns, RowColumns]:
    """What the long forms hold, each extent as a span of its own."""
    box, lo, hi, blob, offset, digests, unhashed = table.columns
    numbers = [number for one in table.boxes[1:] for number in (*one.offset, *one.shape)]
    bits = np.packbits(unhashed).tobytes()
    cells = CellColumns(pack(numbers), pack(box), pack(lo), pack(hi), digests.tobytes(), bits)
    return cells, RowColumns(pack(table.cells), pack(blob), pack(offset))


def long_form(cells: CellColumns, rows: RowColumns) -> tuple[bytes, bytes]:
    """As they are stored."""
    return b"\2" + msgspec.msgpack.encode(cells), b"\1" + msgspec.msgpack.encode(rows)


@dataclass
class Parts:
    """A manifest, taken apart: what is msgpack as dicts, the other sections as pieces."""

    index: dict[str, Any]
    places: dict[str, Any]
    blobs: dict[str, Any]
    pieces: dict[str, list[bytes]]

    def put_together(self) -> Encoded:
        """The manifest again."""
        tables = {"objects": (self.index, "data"), "cells": (self.index, "cells"), "rows": (self.places, "rows")}
        sections: dict[str, bytes] = {}
        for name, (where, field) in tables.items():
            table, sections[name] = cut(self.pieces[name])
            where[field] = [table.lengths, table.groups, table.hashes]
        maps = {"index": self.index, "places": self.places, "blobs": self.blobs}
        sections |= {name: msgspec.msgpack.encode(fields) for name, fields in maps.items()}
        return Encoded(*assemble((name, sections[name]) for name in KNOWN))


def taken_apart(manifest: Manifest) -> Parts:
    """Each part of a manifest."""
    maps = {name: msgspec.msgpack.decode(manifest.section(name)) for name in ("index", "places", "blobs")}
    tables = {"objects": maps["index"]["data"], "cells": maps["index"]["cells"], "rows": maps["places"]["rows"]}
    pieces = {name: _pieces(bytes(manifest.section(name)), table[0]) for name, table in tables.items()}
    return Parts(**maps, pieces=pieces)


def _pieces(data: bytes, lengths: bytes) -> list[bytes]:
    ends = np.cumsum(unpack(lengths)).tolist()
    return [data[lo:hi] for lo, hi in zip([0, *ends], ends, strict=False)]


Change = Callable[[Parts, Manifest], object]


def setting(where: str, *path: str | int, to: Any) -> Change:
    """Another value of a field of a section that is msgpack."""

    def change(parts: Parts, _: Manifest) -> None:
        fields = getattr(parts, where)
        for name in path[:-1]:
            fields = fields[name]
        fields[path[-1]] = to

    return change


def with_piece(section: str, data: bytes, number: int = 0) -> Change:
    """Other bytes for an entry."""

    def change(parts: Parts, _: Manifest) -> None:
        parts.pieces[section][number] = data

    return change


def with_row(blob: int = 0, offset: int = 4096) -> Change:
    """The first entry lies elsewhere, in the short form."""
    return with_piece("rows", b"\0" + blob.to_bytes(4, "little") + offset.to_bytes(4, "little"))


def with_column(name: str, change_column: Callable[[list[int]], Sequence[int]]) -> Change:
    """A column of the first entry's extents, in the long form."""

    def change(parts: Parts, manifest: Manifest) -> None:
        cells, rows = columns_of(manifest.extents(manifest.entries[0]))
        if name in cells.__struct_fields__:
            cells = msgspec.structs.replace(cells, **{name: other(getattr(cells, name))})
        else:
            rows = msgspec.structs.replace(rows, **{name: other(getattr(rows, name))})
        parts.pieces["cells"][0], parts.pieces["rows"][0] = long_form(cells, rows)

    def other(column: bytes) -> bytes:
        return pack(change_column(unpack(column).tolist()))

    return change
