"""A manifest with a million extents that is created, encoded, and used by one rank for a partial load."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Measured, Meter
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here
    from casckpt.format.extents import ExtentTable
    from casckpt.format.sections.index import Name

_COLUMNS, _ITEM = 256, 4
_CELL = 1 << 20
_OVERHEAD = 4096  # bytes before a blob's data
_OBJECT = 5000  # bytes of random state per rank


def make(here: Here, tensors: int, shards: int, ranks: int) -> int:
    """Create the tables of ``tensors`` tensors. Each has rows from ``shards`` ranks, in separate blobs.

    No two cells of a tensor are adjacent in a blob, so each cell is an extent. ``ranks``: the number of ranks that
    have an object. Returns the number of extents.
    """
    from casckpt.format.manifest import ObjectEntry
    from casckpt.format.names import BlobHash, TxId
    from casckpt.format.sections.blobs import BlobRef

    draw = random.Random(1)  # noqa: S311 - names for a benchmark
    uploader = TxId(f"20261122T000000000000Z-{'0' * 16}-{'0' * 16}-0")
    here.kept["blobs"] = [
        BlobRef(BlobHash(draw.randbytes(32).hex()), _OVERHEAD + tensors * _bytes(), uploader) for _ in range(shards)
    ]
    here.kept["tables"] = [_table(draw, number, shards) for number in range(tensors)]
    here.kept["objects"] = [ObjectEntry("train.rng", rank, draw.randbytes(_OBJECT)) for rank in range(ranks)]
    return tensors * shards


def _bytes() -> int:
    return _COLUMNS * _ITEM


def _table(draw: random.Random, number: int, shards: int) -> Any:
    """Create a row for each rank."""
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
    """Encode the manifest from the tables."""
    from casckpt._version import __version__
    from casckpt.format import manifest
    from casckpt.format.metrics import encode_metadata
    from casckpt.format.sections.index import TENSOR
    from casckpt.format.sections.tables import Extents

    metadata = encode_metadata({})[0]
    every: list[ExtentTable] = here.kept["tables"]
    tables: dict[Name, tuple[str, ExtentTable]] = {
        (TENSOR, _key(n), 0, None): ("float32", table) for n, table in enumerate(every)
    }
    meter = Meter()
    made = manifest.encode(
        manifest.Draft(
            casckpt=__version__, torch="", run="run", step=0, created_at=0, parent=None, world_size=1,
            cell_bytes=_CELL, metadata=metadata, tree=b"", blobs=here.kept["blobs"], objects=here.kept["objects"],
            streams=Extents.of(tables),
        )
    )  # fmt: skip
    here.kept["id"], here.kept["data"] = made.id, made.data
    measured = meter.stop()
    measured.written = len(made.data)
    return measured


def _key(number: int) -> str:
    return f"model.{number:05}"


def decode(here: Here) -> Measured:
    """Decode the manifest and the table of every tensor, for a rank that needs part of each."""
    from casckpt.format import manifest

    meter = Meter()
    found = manifest.decode(here.kept["data"], here.kept["id"])
    tables = [found.extents(entry) for entry in found.entries]
    measured = meter.stop()
    here.kept["found"] = tables
    return measured


def reach(here: Here, ranks: int) -> Measured:
    """Create the message to one of ``ranks`` ranks, and that rank's plan.

    The rank loads only its part of the tensors and its own object. ``read``: the bytes of rank 0's message and of the
    ranges that the rank reads itself.
    """
    from casckpt.contents.contents import Contents
    from casckpt.format.manifest import FRONT, Manifest
    from casckpt.format.regions import whole
    from casckpt.format.sections.head import decode_head
    from casckpt.plan.reads import plan_units

    data, moved = here.kept["data"], [0]

    def read(ranges: Any) -> list[bytes]:
        moved[0] += sum(length for _, length in ranges)
        return [data[offset : offset + length] for offset, length in ranges]

    head = decode_head(data)
    told = pickle.dumps(Manifest(head, {name: data[head[name].offset : head[name].end] for name in FRONT}))
    meter = Meter()
    manifest = pickle.loads(told)  # noqa: S301 - ours
    manifest.attach(read)
    contents = Contents(manifest, ranks // 2)
    count = len(manifest.entries) // ranks
    keys = [_key(number) for number in range(ranks // 2 * count, (ranks // 2 + 1) * count)]
    contents.ready([*keys, "train.rng"])
    tables = [(manifest.extents(entry), entry) for key in keys if (entry := contents.tensors.get(key))]
    units = [unit for table, entry in tables for unit in plan_units(table, whole(entry.shape), verify=True)]
    mine = manifest.data(contents.objects["train.rng"])
    measured = meter.stop()
    measured.read = len(told) + moved[0]
    if mine != here.kept["objects"][ranks // 2].data or sum(unit.nbytes for unit in units) != sum(
        entry.nbytes for _, entry in tables
    ):
        raise WrongBytes("the plan reads other bytes than are wanted")
    return measured


def plan(here: Here, ranks: int) -> Measured:
    """Plan the verified reads by which one of ``ranks`` ranks reads part of every tensor."""
    from casckpt.plan.reads import plan_units

    wants = [(table, _part(table.shape, table.shape[0] // ranks)) for table in here.kept["found"]]
    meter = Meter()
    units = [unit for table, wanted in wants for unit in plan_units(table, wanted, verify=True)]
    measured = meter.stop()
    if sum(unit.nbytes for unit in units) != sum(wanted.numel * _ITEM for _, wanted in wants):
        raise WrongBytes("the plan reads other bytes than are wanted")
    return measured


def _part(shape: tuple[int, ...], rows: int) -> Any:
    """Return the second of the parts that have ``rows`` rows."""
    from casckpt.format.regions import Box, Region, normalise

    box = Box((rows, 0), (rows, shape[1]))
    return normalise(Region(box, 0, box.numel), shape)
