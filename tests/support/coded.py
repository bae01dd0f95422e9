"""Checkpoints whose cells are stored as frames, created from checkpoints with raw cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from casckpt.base.groups import in_batches
from casckpt.contents import blobs, manifests
from casckpt.format.blob_writer import BlobWriter, buffer_bytes, padded
from casckpt.format.digest import cell_digest
from casckpt.format.encodings.frames import decode, encode_delta, encode_planes
from casckpt.format.extents import ExtentTable, Frame, StoredCell, build
from casckpt.format.keys import blob_key
from casckpt.format.manifest import placed
from casckpt.format.names import CellDigest, TxId
from casckpt.format.records import Rewritten
from casckpt.format.regions import Region
from casckpt.format.sections.blobs import BlobRef, encode_blobs
from casckpt.format.sections.index import Entry, Name
from casckpt.history.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.store.store import Store
from casckpt.upkeep.rewrite import rewrite, rewritten

Encode = Callable[[memoryview, int, memoryview | None], bytes | None]
Place = tuple[BlobRef, int]
_WIDTHS = (8, 4, 2, 1)


def encode(plain: memoryview, width: int, base: memoryview | None) -> bytes | None:
    """Encode a cell against a base, or without one if that is too large."""
    return (None if base is None else encode_delta(plain, width, base)) or encode_planes(plain, width)


def code(
    store: Store,
    ref: str,
    base: str | None = None,
    *,
    keys: Callable[[str], bool] = lambda _: True,
    encode: Encode = encode,
) -> Commit:
    """Rewrite a checkpoint: encode the cells of ``keys`` as frames against ``base``.

    A cell that ``base`` does not have gets a frame without a base. An identical cell is reused. A cell that encoding
    would not shrink remains raw. The next gc without a minimum age trims the old places.
    """
    work = _Coding(store.repository, Stored(store, ref), None if base is None else Stored(store, base), encode)
    return rewrite(store.repository, work.mine.commit, lambda txid: work.save(txid, keys))


def chain(store: Store, refs: Sequence[str], *, encode: Encode = encode) -> None:
    """Encode each checkpoint against the previous one. The first one remains raw."""
    for base, ref in pairwise(refs):
        code(store, ref, base, encode=encode)


class Stored:
    """A checkpoint and the bytes of its cells, read and decoded in the simplest way."""

    def __init__(self, store: Store, ref: str) -> None:
        self.commit = store.get(ref).commit
        self._repo = store.repository
        self.manifest = manifests.get(self._repo, self.commit)
        self.refs = list(self.manifest.blobs)
        self._blobs: dict[int, bytes] = {}

    def table(self, entry: Entry) -> ExtentTable:
        return self.manifest.extents(entry)

    def cells(self) -> dict[tuple[Name, Region], StoredCell]:
        every = self.manifest.entries
        return {(entry.name, cell.region): cell for entry in every for cell in self.table(entry).stored_cells()}

    def stored(self, cell: StoredCell) -> bytes:
        """Return the stored bytes of a cell."""
        if cell.blob not in self._blobs:
            key = blob_key(self.refs[cell.blob].uploader, self.refs[cell.blob].hash)
            self._blobs[cell.blob] = self._repo.storage.get(key, limit=1 << 30)
        return self._blobs[cell.blob][cell.offset : cell.offset + cell.stored]

    def plain(self, cell: StoredCell) -> memoryview:
        """Return the decoded bytes of a cell."""
        if cell.frame is None:
            return memoryview(self.stored(cell))
        data = memoryview(bytearray(cell.nbytes))
        decode(memoryview(self.stored(cell)), data, None if cell.base is None else self.plain(cell.base))
        assert cell_digest(data) == cell.digest
        return data


@dataclass
class _Coding:
    repo: Repository
    mine: Stored
    theirs: Stored | None
    encode: Encode
    _frames: dict[tuple[CellDigest, CellDigest | None], bytes] = field(default_factory=dict)

    def save(self, txid: TxId, keys: Callable[[str], bool]) -> Rewritten:
        """Write blobs and the manifest."""
        mine, numbers = self.mine, dict[BlobRef, int]()
        known = {} if self.theirs is None else self.theirs.cells()
        bases = dict[tuple[Name, Region], StoredCell | None]()
        for (name, region), cell in mine.cells().items():
            found = known.get((name, region))
            base = found if found is not None and found.nbytes == cell.nbytes else None
            if keys(name[1]) and (_are_equal(cell, base) or self._has_frame(cell, base)):
                bases[name, region] = base
        places = self._put(txid)
        moved = {}
        for entry in mine.manifest.entries:
            table, new = mine.table(entry), list[StoredCell]()
            for cell in table.stored_cells():
                where, made = (entry.name, cell.region), _numbered(cell, mine.refs, numbers)
                new.append(self._coded(made, bases[where], places, numbers) if where in bases else made)
            moved[entry.number] = build(table.shape, table.itemsize, table.cell, new)
        return rewritten(self.repo, txid, mine.commit, placed(mine.manifest, encode_blobs(numbers), moved))

    def _has_frame(self, cell: StoredCell, base: StoredCell | None) -> bool:
        name = (cell.digest, base and base.digest)
        if name not in self._frames:
            width = next(width for width in _WIDTHS if not (cell.nbytes // (cell.hi - cell.lo)) % width)
            other = None if base is None or self.theirs is None else self.theirs.plain(base)
            frame = self.encode(self.mine.plain(cell), width, other)
            if frame is None:
                return False
            self._frames[name] = frame
        return True

    def _coded(
        self,
        cell: StoredCell,
        base: StoredCell | None,
        places: Mapping[tuple[CellDigest, CellDigest | None], Place],
        numbers: dict[BlobRef, int],
    ) -> StoredCell:
        name = (cell.digest, base and base.digest)
        below = None if base is None or self.theirs is None else _numbered(base, self.theirs.refs, numbers)
        if below is not None and _are_equal(cell, base):
            return below
        ref, offset = places[name]
        number = numbers.setdefault(ref, len(numbers))
        return cell._replace(blob=number, offset=offset, frame=Frame(len(self._frames[name]), below))

    def _put(self, txid: TxId) -> dict[tuple[CellDigest, CellDigest | None], Place]:
        """Write all frames. Return the location of each."""
        places = dict[tuple[CellDigest, CellDigest | None], Place]()
        for lot in in_batches(self._frames.items(), lambda item: len(item[1]), self.repo.marker.blob_bytes):
            buffer = memoryview(bytearray(buffer_bytes(padded(sum(len(frame) for _, frame in lot)))))
            writer, offsets = BlobWriter(buffer), list[int]()
            for _, frame in lot:
                offsets.append(writer.end)
                buffer[writer.end : writer.end + len(frame)] = frame
                writer.add_frame(len(frame))
            name, size = writer.finish()
            blobs.put(self.repo, txid, name, buffer[:size])
            places |= {one[0]: (BlobRef(name, size, txid), at) for one, at in zip(lot, offsets, strict=True)}
        self.repo.storage.settle(f"objects/{txid}")
        return places


def _are_equal(one: StoredCell, other: StoredCell | None) -> bool:
    return other is not None and one.digest == other.digest


def _numbered(cell: StoredCell, refs: Sequence[BlobRef], numbers: dict[BlobRef, int]) -> StoredCell:
    """Return the cell with different numbers for its blob and for the blobs of its bases."""

    def place(one: StoredCell) -> tuple[int, int]:
        return numbers.setdefault(replace(refs[one.blob], worn=False), len(numbers)), one.offset

    return cell.moved(place)
