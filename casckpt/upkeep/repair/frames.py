"""Cells that are coded, decoded: does each frame make the cell that a manifest says, from the base that it says?

The proof of a blob tells that a frame is what was written. That it is right, only who decodes it knows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from casckpt.errors import Conflict, Damaged, NotFound, Refused
from casckpt.format.encodings.chains import decoded
from casckpt.format.names import BlobHash, CellDigest, TxId
from casckpt.parallel import in_parallel
from casckpt.plan.progress import Progress
from casckpt.repository import manifests
from casckpt.repository.commits import Commit
from casckpt.repository.repository import Repository
from casckpt.storage.base import ShortObject
from casckpt.upkeep.repair.checking import Checked, threads_for
from casckpt.upkeep.repair.salvage import Located, locate

_AT_ONCE = 1 << 16  # cells that are told of in memory; a base is decoded once for as many


@dataclass(eq=False, slots=True)
class _Node:
    """A cell, and those that are ``told`` from it. ``users``: commits and keys that have it for a cell of their own."""

    place: Located
    told: dict[_Name, _Node] = field(default_factory=dict)
    users: list[tuple[Commit, str]] = field(default_factory=list)

    def every(self) -> Iterator[_Node]:
        """Itself, and all that hang on it."""
        yield self
        for one in self.told.values():
            yield from one.every()


_Name = tuple[str, int, CellDigest]
_Wrong = tuple[_Node, str]


@dataclass
class Frames:
    """Decodes the cells that ``commits`` have coded, as far as they lie in blobs that are ``right``.

    ``decoded_bytes``: of the cells and bases that were looked at, decoded.
    """

    repo: Repository
    right: Sequence[Checked]
    progress: Progress
    decoded_bytes: int = 0

    def wrong(self, commits: Iterable[Commit]) -> Iterator[tuple[Commit, Refused]]:
        """Yield those that have a frame of another cell than they say. Raises `StorageError`."""
        right = {(one.ref.uploader, one.ref.hash) for one in self.right}
        roots, count = dict[_Name, _Node](), 0
        for commit in commits:
            for key, place in _coded(self.repo, commit, right):
                count += _plant(roots, place, (commit, key))
                if count >= _AT_ONCE:
                    yield from self._decode(roots)
                    roots, count = {}, 0
        yield from self._decode(roots)

    def _decode(self, roots: dict[_Name, _Node]) -> Iterator[tuple[Commit, Refused]]:
        every = [node for root in roots.values() for node in root.every()]
        self.progress.expect(sum(node.place.cell.stored for node in every))
        self.decoded_bytes += sum(node.place.cell.nbytes for node in every)
        hit = dict[str, tuple[Commit, Refused]]()
        walk = partial(_walk, progress=self.progress)
        for wrong in in_parallel(threads_for(self.repo), walk, roots.values(), name="decode"):
            for node, why in wrong:
                for commit, key in (user for one in node.every() for user in one.users):
                    hit.setdefault(commit.txid, (commit, _error(key, node.place, why)))
        yield from hit.values()


def _coded(repo: Repository, commit: Commit, right: Container[tuple[TxId, BlobHash]]) -> Iterator[tuple[str, Located]]:
    """Yield key and place of each coded cell of a checkpoint of which all bytes are right."""
    try:
        manifest = manifests.get(repo, commit)
        manifest.ready(objects=())
        known = [(ref.uploader, ref.hash) in right for ref in manifest.blobs]
        for entry in manifest.held:
            table = manifest.extents(entry)
            every = (one for one in table.extents if one.coding and all(known[link.blob] for link in one.chain))
            for cell in table.stored_cells(every):
                yield entry.key, locate(repo, manifest, cell)
    except (Conflict, Damaged, Refused):
        return  # others tell of it


def _plant(roots: dict[_Name, _Node], place: Located, user: tuple[Commit, str]) -> int:
    """Take up a cell with its bases; how much more is there to remember?"""
    level, node, new = roots, None, 1
    for cell in reversed([*place.cell.chain]):
        name = place.keys[cell.blob], cell.offset, cell.digest
        new += name not in level
        node = level.setdefault(name, _Node(Located(place.repo, place.keys, cell)))
        level = node.told
    if node is not None:
        node.users.append(user)
    return new


def _walk(node: _Node, base: bytearray | None = None, *, progress: Progress) -> list[_Wrong]:
    """Decode a cell, and all that are told from it; return the first one on each way that is wrong, and why."""
    cell = node.place.cell
    try:
        plain = decoded(cell, node.place.stored(cell), base)
    except (NotFound, ShortObject):
        return []  # it was purged just now
    except Refused as error:
        return [(node, str(error))]
    finally:
        progress(cell.stored)
    return [wrong for one in node.told.values() for wrong in _walk(one, bytearray(plain), progress=progress)]


def _error(key: str, place: Located, why: str) -> Refused:
    cell = place.cell
    where = f"bytes {cell.offset} to {cell.offset + cell.stored} of {place.keys[cell.blob]}"
    return Refused(f"key {key!r}: {where} are right, but no frame of the cell that it says lies there: {why}")
