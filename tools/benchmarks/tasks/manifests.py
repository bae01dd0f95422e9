"""A manifest of a million extents: made, encoded, and used by one rank."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Measured, Meter
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here

_COLUMNS, _ITEM = 256, 4
_CELL = 1 << 20
_OVERHEAD = 4096  # bytes before the data of a blob


def make(here: Here, tensors: int, shards: int) -> int:
    """Make the tables of ``tensors`` tensors that ``shards`` ranks wrote, each its rows into blobs of its own.

    No two cells of a tensor follow each other in a blob: each is an extent. How many there are.
    """
    from casckpt.format.names import BlobHash, TxId
    from casckpt.format.sections.blobs import BlobRef

    draw = random.Random(1)  # noqa: S311 - names for a benchmark
    uploader = TxId(f"20261122T000000000000Z-{'0' * 16}-{'0' * 16}-0")
    refs = [
        BlobRef(BlobHash(draw.randbytes(32).hex()), _OVERHEAD + tensors * _bytes(), uploader) for _ in range(shards)
    ]
    here.kept["blobs"] = packed_blobs(refs)
    here.kept["tables"] = [_table(draw, number, shards) for number in range(tensors)]
    return tensors * shards


def _bytes() -> int:
    return _COLUMNS * _ITEM


def _table(draw: random.Random, number: int, shards: int) -> Any:
    """A row for each rank."""
    from casckpt.format.extents import StoredCell, build
    from casckpt.format.names import CellDigest
    from casckpt.format.regions import full_box

    shape = (shards, _COLUMNS)
    cells = [
        StoredCell(
            row,
            _OVERHEAD + number * _bytes(),
            _bytes(),
            full_box(shape),
            row * _COLUMNS,
            (row + 1) * _COLUMNS,
            CellDigest(draw.randbytes(32)),
        )
        for row in range(shards)
    ]
    return build(shape, _ITEM, _CELL // _ITEM, cells)


def encode(here: Here) -> Measured:
    """The bytes of the manifest, from the tables."""
    from casckpt._version import __version__
    from casckpt.format import manifest
    from casckpt.format.sections.index import TENSOR, ManifestBody
    from casckpt.format.sections.metadata import encode_metadata

    blobs, places = here.kept["blobs"]
    metadata = encode_metadata({})[0]
    meter = Meter()
    entries = [
        packed_entry(TENSOR, f"model.{number:05}", "float32", table) for number, table in enumerate(here.kept["tables"])
    ]
    body = ManifestBody(
        format=1, casckpt=__version__, torch="", run="run", step=0, created_at=0, parent=None, world_size=1,
        cell_bytes=_CELL, metadata=metadata, blobs=blobs, entries=entries, objects=[], attachments=[], tree=b"",
    )  # fmt: skip
    here.kept["id"], here.kept["data"] = manifest.encode(body, places)
    measured = meter.stop()
    measured.written = len(here.kept["data"])
    return measured


def decode(here: Here) -> Measured:
    """The manifest again, and the table of every tensor, of each of which a rank needs a part."""
    from casckpt.format import manifest

    meter = Meter()
    found = manifest.decode(here.kept["data"], here.kept["id"])
    tables = [found.extents(entry) for entry in found.body.entries]
    measured = meter.stop()
    here.kept["found"] = tables
    return measured


def plan(here: Here, ranks: int) -> Measured:
    """What one of ``ranks`` ranks reads of every tensor, verified."""
    from casckpt.plan.reads import plan_units

    wants = [(table, _part(table.shape, table.shape[0] // ranks)) for table in here.kept["found"]]
    meter = Meter()
    units = [unit for table, wanted in wants for unit in plan_units(table, wanted, verify=True)]
    measured = meter.stop()
    if sum(unit.nbytes for unit in units) != sum(wanted.numel * _ITEM for _, wanted in wants):
        raise WrongBytes("the plan reads other bytes than are wanted")
    return measured


def _part(shape: tuple[int, ...], rows: int) -> Any:
    """The second of as many parts as there are."""
    from casckpt.format.regions import Box, Region, normalise

    box = Box((rows, 0), (rows, shape[1]))
    return normalise(Region(box, 0, box.numel), shape)
