"""Verification of single cells: reads a cell, decodes its frames, and compares it with the digest in the manifest.

A blob's proof shows that a frame's bytes are unchanged. It does not show that the frame decodes to the correct cell.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from casckpt.base.parallel import in_parallel
from casckpt.base.progress import Progress
from casckpt.contents import manifests
from casckpt.errors import Damaged, Gone, NotFound, Refused
from casckpt.format.encodings.frames import decode_chain, decoded
from casckpt.format.extents import StoredCell
from casckpt.format.keys import blob_key
from casckpt.format.manifest import Manifest
from casckpt.format.names import CellDigest
from casckpt.format.sections.blobs import BlobRef
from casckpt.history.commits import Commit
from casckpt.repository.fetching import Range
from casckpt.repository.repository import Repository
from casckpt.storage.base import ShortObject
from casckpt.upkeep.repair.blob_check import Checked, threads_for

_AT_ONCE = 1 << 16  # cells in memory; each base is decoded once for all of them


@dataclass(frozen=True, slots=True)
class Located:
    """A cell of a manifest. ``keys``: the keys of the blobs that contain the cell and its bases, by blob number."""

    repo: Repository = field(repr=False)
    keys: Mapping[int, str]
    cell: StoredCell

    def read(self) -> bytearray:
        """Read the cell, and decode it if it is encoded. Raises Refused for a bad frame, and the errors of reading."""
        return decode_chain(self.cell, self.stored)

    def stored(self, cell: StoredCell) -> bytearray:
        """Read the stored bytes of ``cell``, which is this cell or one of its bases. Raises the errors of reading."""
        data = bytearray(cell.stored)
        with self.repo.storage.open(self.keys[cell.blob]) as reader:
            reader.read_into(cell.offset, [memoryview(data)])
        return data


def locate(repo: Repository, manifest: Manifest, cell: StoredCell) -> Located:
    """Return the location of a cell of a manifest of ``repo``."""
    refs = {link.blob: manifest.blob(link.blob) for link in cell.chain}
    return Located(repo, {number: blob_key(ref.uploader, ref.hash) for number, ref in refs.items()}, cell)


@dataclass(eq=False, slots=True)
class _Node:
    """A cell, and the cells that have it as their base."""

    place: Located
    deltas: dict[_Name, _Node] = field(default_factory=dict)

    def every(self) -> Iterator[_Node]:
        """Yield this node and all nodes below it."""
        yield self
        for node in self.deltas.values():
            yield from node.every()


_Name = tuple[str, int, CellDigest]
_Wrong = tuple[StoredCell, str, str]
"""A cell, the key of the blob of its frame, and why the frame is wrong."""


@dataclass
class Frames:
    """The encoded cells in ``blobs``, whose bytes were verified.

    ``decoded_bytes``: size of the decoded cells and bases.
    """

    repo: Repository
    blobs: Sequence[Checked]
    progress: Progress
    decoded_bytes: int = 0

    def wrong(self, commits: Iterable[Commit]) -> list[Checked]:
        """Return the ``blobs`` with frames that do not decode to cells of ``commits``. Raises `StorageError`."""
        by_key = {blob_key(blob.ref.uploader, blob.ref.hash): blob.ref for blob in self.blobs}
        wrong = dict[BlobRef, dict[Range, str]]()
        for cell, key, why in self._wrong_cells(commits if by_key else (), by_key):
            if key in by_key:
                wrong.setdefault(by_key[key], {})[cell.offset, cell.offset + cell.stored] = why
        return [Checked(ref, _explained(ranges)) for ref, ranges in wrong.items()]

    def _wrong_cells(self, commits: Iterable[Commit], wanted: Container[str]) -> Iterator[_Wrong]:
        roots, count = dict[_Name, _Node](), 0
        for commit in commits:
            for place in _coded(self.repo, commit, wanted):
                count += _plant(roots, place)
                if count >= _AT_ONCE:
                    yield from self._decode(roots)
                    roots, count = {}, 0
        yield from self._decode(roots)

    def _decode(self, roots: dict[_Name, _Node]) -> Iterator[_Wrong]:
        every = [node for root in roots.values() for node in root.every()]
        self.progress.expect(sum(node.place.cell.stored for node in every))
        self.decoded_bytes += sum(node.place.cell.nbytes for node in every)
        walk = partial(_walk, progress=self.progress)
        for wrong in in_parallel(threads_for(self.repo), walk, roots.values(), name="decode"):
            yield from wrong


def _coded(repo: Repository, commit: Commit, wanted: Container[str]) -> Iterator[Located]:
    """Yield the location of each encoded cell of a checkpoint that is in a blob in ``wanted``, or whose bases are."""
    try:
        manifest = manifests.get_with_extents(repo, commit)
        is_wanted = [blob_key(ref.uploader, ref.hash) in wanted for ref in manifest.blobs]
        for entry in manifest.held:
            table = manifest.extents(entry)
            every = (each for each in table.extents if each.coding and any(is_wanted[link.blob] for link in each.chain))
            for cell in table.stored_cells(every):
                yield locate(repo, manifest, cell)
    except (Damaged, Gone, Refused):
        return  # verify reports this manifest


def _plant(roots: dict[_Name, _Node], place: Located) -> int:
    """Add a cell with its bases. Return the number of new nodes."""
    level, new = roots, 0
    for cell in reversed([*place.cell.chain]):
        name = place.keys[cell.blob], cell.offset, cell.digest
        new += name not in level
        node = level.setdefault(name, _Node(Located(place.repo, place.keys, cell)))
        level = node.deltas
    return new


def _walk(node: _Node, base: bytearray | None = None, *, progress: Progress) -> list[_Wrong]:
    """Decode a cell and all cells below it. Return the first wrong cell of each path, with the reason."""
    cell = node.place.cell
    try:
        plain = decoded(cell, node.place.stored(cell), base)
    except (NotFound, ShortObject):
        return []  # it was purged just now
    except Refused as error:
        return [(cell, node.place.keys[cell.blob], str(error))]
    finally:
        progress(cell.stored)
    return [wrong for delta in node.deltas.values() for wrong in _walk(delta, bytearray(plain), progress=progress)]


def _explained(wrong: Mapping[Range, str]) -> str:
    (start, stop), why = min(wrong.items())
    more = f", and {len(wrong) - 1} more such ranges" if len(wrong) > 1 else ""
    return f"its bytes {start} to {stop} are unchanged, but are not a frame of the saved cell: {why}{more}"
