"""Rebuilds a damaged blob: leaves from its copies, cells from equal cells, and then the header and the proof.

Rebuilding uses only bytes whose digest is in the proof or in a live checkpoint. The blob is complete only if its hash
equals its name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from casckpt.base.digest import Buffer
from casckpt.base.groups import runs
from casckpt.errors import InvalidInput, NotFound, Refused, StorageError
from casckpt.format.blob import DATA_OFFSET, decode_header, encode_header, order
from casckpt.format.blob_writer import BlobWriter, buffer_bytes, padded
from casckpt.format.digest import cell_digest, proof_name
from casckpt.format.dtypes import coded_width, stored_name
from casckpt.format.encodings.frames import decode, encode_delta, encode_planes
from casckpt.format.keys import blob_key
from casckpt.format.names import CellDigest
from casckpt.format.proof import Leaf, LeafCheck, as_leaves, decode_proof, encode_proof, read_proof
from casckpt.format.sections.blobs import BlobRef
from casckpt.repository.repository import Repository
from casckpt.storage.base import Reader, ShortObject
from casckpt.upkeep.repair.cell_sources import UNREADABLE, BlobCopies, Cells, EncodedSource, LiveCell, take_cell

_PAGE = DATA_OFFSET


@dataclass
class RebuiltBlob:
    """A partly or fully rebuilt blob ``ref``. ``data``: its bytes.

    ``leaves``: its leaves, which its name proves; empty without a proof. ``wrong``: the leaves that ``data`` lacks.
    ``cells``: the cells of live checkpoints, in order. ``missing``: the cells that ``data`` lacks.
    """

    ref: BlobRef
    data: bytearray
    leaves: list[Leaf] = field(default_factory=list)
    wrong: list[Leaf] = field(default_factory=list)
    cells: Sequence[LiveCell] = ()
    missing: frozenset[LiveCell] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Whether ``data`` is the whole blob."""
        return bool(self.leaves) and not self.wrong

    @property
    def is_untouched(self) -> bool:
        """Whether the blob is whole and no live cell is missing."""
        return not self.missing and all(map(self.is_right, self.leaves))

    def part(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable view of a range of the bytes."""
        return memoryview(self.data)[offset : offset + nbytes]

    def is_right(self, leaf: Leaf) -> bool:
        """Return whether ``data`` holds the bytes of a leaf."""
        return cell_digest(self.part(leaf.offset, leaf.nbytes)) == leaf.digest

    def take_proof(self, proof: bytes) -> None:
        """Store a proof that matches the blob's name, and check the leaves. Raises Refused for an invalid proof."""
        self.leaves = decode_proof(proof)
        self.data[self.leaves[-1].end :] = proof
        check = LeafCheck(self.leaves)
        check.update(memoryview(self.data))
        self.wrong = check.wrong


def rebuild_from_copies(repo: Repository, ref: BlobRef, copies: BlobCopies) -> RebuiltBlob:
    """Rebuild a damaged blob leaf by leaf, from its remains and from copies of it."""
    rebuilt = RebuiltBlob(ref, _remains(repo, ref))
    try:
        rebuilt.take_proof(_proof(rebuilt.data, ref, copies))
    except Refused:
        return rebuilt
    for reader in copies.readers(ref) if rebuilt.wrong else ():
        _take_leaves(reader, rebuilt)
        if not rebuilt.wrong:
            break
    return rebuilt


@dataclass(frozen=True)
class CellSupply:
    """The sources for rebuilding blobs. ``misframed``: blobs with correct leaves but possibly wrong frames."""

    cells: Cells
    copies: BlobCopies
    misframed: Container[BlobRef] = ()

    def rebuild(self, repo: Repository, ref: BlobRef, live: Iterable[LiveCell]) -> RebuiltBlob:
        """Rebuild a damaged blob: its ``live`` cells from equal ones, then its header, padding and proof."""
        rebuilt = rebuild_from_copies(repo, ref, self.copies)
        rebuilt.cells = sorted(live, key=lambda cell: (cell.offset, cell.nbytes, order(cell.dtype)))
        wrong = [cell for cell in rebuilt.cells if not self._is_right(rebuilt, cell)]
        rebuilt.missing = frozenset(cell for cell in wrong if not self._take_cell(rebuilt, cell))
        rebuilt.wrong = [leaf for leaf in rebuilt.wrong if not rebuilt.is_right(leaf)]
        if not rebuilt.is_whole and not rebuilt.missing:
            _write_anew(rebuilt)
        if not rebuilt.is_whole and rebuilt.leaves:
            rebuilt.wrong = [leaf for leaf in rebuilt.wrong if not self._take_leaf(rebuilt, leaf)]
        if not rebuilt.leaves:
            _prove_anew(rebuilt)
        return rebuilt

    def plain(self, cell: LiveCell) -> bytearray | None:
        """Return the decoded bytes of an encoded cell, or None if no source has them."""
        return None if cell.coded is None else self.fetch(cell.digest, cell.coded.nbytes)

    def fetch(self, digest: CellDigest, nbytes: int) -> bytearray | None:
        """Return the bytes of a cell, or None if no source has them."""
        plain = bytearray(nbytes)
        return plain if self.cells.fetch(digest, memoryview(plain)) else None

    def _is_right(self, rebuilt: RebuiltBlob, cell: LiveCell) -> bool:
        """Return whether the blob holds a cell's correct bytes."""
        part = rebuilt.part(cell.offset, cell.nbytes)
        if cell.coded is None:
            return cell_digest(part) == cell.digest
        is_trusted = rebuilt.leaves and rebuilt.ref not in self.misframed
        if is_trusted and not any(cell.offset < leaf.end and leaf.offset < cell.end for leaf in rebuilt.wrong):
            return True
        return self._makes(part, cell, cell.coded)

    def _makes(self, frame: memoryview, cell: LiveCell, coded: EncodedSource) -> bool:
        """Return whether a frame decodes to a cell. Return False if the frame's base cannot be fetched."""
        base = None if coded.base is None else self.fetch(coded.base, coded.nbytes)
        plain = bytearray(coded.nbytes)
        try:
            decode(frame, memoryview(plain), None if base is None else memoryview(base))
        except InvalidInput:
            return False
        return cell_digest(plain) == cell.digest

    def _take_cell(self, rebuilt: RebuiltBlob, cell: LiveCell) -> bool:
        """Restore a cell from an equal cell or from a copy of the blob. If it was encoded, reencode it."""
        part = rebuilt.part(cell.offset, cell.nbytes)
        if cell.coded is not None:
            return self._take_frame(part, cell, cell.coded)
        if self.cells.fetch(cell.digest, part):
            return True
        return any(take_cell(reader, cell.offset, part, cell.digest) for reader in self.copies.readers(rebuilt.ref))

    def _take_frame(self, part: memoryview, cell: LiveCell, coded: EncodedSource) -> bool:
        base = None if coded.base is None else self.fetch(coded.base, coded.nbytes)
        plain = self.plain(cell)
        if plain is None or (base is None and coded.base is not None):
            return False
        view, width = memoryview(plain), coded_width(coded.dtype)
        frame = encode_planes(view, width) if base is None else encode_delta(view, width, memoryview(base))
        if frame is None or len(frame) != cell.nbytes:
            return False
        part[:] = frame
        return True

    def _take_leaf(self, rebuilt: RebuiltBlob, leaf: Leaf) -> bool:
        """Restore a leaf that is not one of the blob's live cells: header, padding, or a cell of another blob."""
        part = rebuilt.part(leaf.offset, leaf.nbytes)
        guess = _without_padding(rebuilt, leaf) if leaf.offset else _header(rebuilt)
        if cell_digest(guess) != leaf.digest:
            return self.cells.fetch(leaf.digest, part)
        part[:] = guess
        return True


def _remains(repo: Repository, ref: BlobRef) -> bytearray:
    """Read the remaining bytes of a damaged blob. Missing bytes are zeros."""
    data = bytearray(ref.size)
    try:
        with repo.storage.open(blob_key(ref.uploader, ref.hash)) as reader:
            have = min(reader.size, ref.size)
            reader.read_into(0, [memoryview(data)[:have]])
    except (NotFound, Refused, StorageError, ShortObject):
        pass  # all bytes must come from other sources
    return data


def _proof(data: bytearray, ref: BlobRef, copies: BlobCopies) -> bytes:
    """Find the proof in the remains of the blob or in a copy. Raises Refused."""
    try:
        return _proof_in(data, ref)
    except Refused:
        for reader in copies.readers(ref):
            try:
                return read_proof(_reading(reader), ref.size, ref.hash)
            except UNREADABLE:
                continue
        raise


def _proof_in(data: bytearray, ref: BlobRef) -> bytes:
    return read_proof(lambda offset, nbytes: data[offset : offset + nbytes], ref.size, ref.hash)


def _reading(reader: Reader) -> Callable[[int, int], bytearray]:
    def read(offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        reader.read_into(offset, [memoryview(data)])
        return data

    return read


def _take_leaves(reader: Reader, rebuilt: RebuiltBlob) -> None:
    """Read the wrong leaves from a copy, and keep those that are correct in it."""
    for run in list(runs(rebuilt.wrong, lambda run, leaf: run[-1].end == leaf.offset)):
        first = run[0].offset
        part = memoryview(bytearray(run[-1].end - first))
        try:
            have = reader.size - first
            reader.read_into(first, [part[:have]] if have > 0 else [])
        except UNREADABLE:
            continue
        for leaf in run:
            piece = part[leaf.offset - first : leaf.end - first]
            if cell_digest(piece) == leaf.digest:
                rebuilt.part(leaf.offset, leaf.nbytes)[:] = piece
                rebuilt.wrong.remove(leaf)


def _header(rebuilt: RebuiltBlob) -> bytes:
    """Return the header that fits the live cells. Bytes between two cells belong to the first cell's run."""
    starts: list[tuple[str, int]] = []
    for cell in rebuilt.cells:
        if not starts or stored_name(cell.dtype) != stored_name(starts[-1][0]):
            starts.append((cell.dtype, cell.offset if starts else DATA_OFFSET))
    ends = [start for _, start in starts[1:]] + [rebuilt.leaves[-1].end]
    runs = [(dtype, end - start) for (dtype, start), end in zip(starts, ends, strict=False)]
    try:
        return encode_header(runs, len(rebuilt.leaves))
    except InvalidInput:
        return b""


def _without_padding(rebuilt: RebuiltBlob, leaf: Leaf) -> bytes:
    """Return a leaf with zeros in the gaps before cells that begin at a page."""
    data, end = bytearray(rebuilt.part(leaf.offset, leaf.nbytes)), leaf.offset
    for cell in (*rebuilt.cells, LiveCell(leaf.end, 0, leaf.digest, "")):
        if end < cell.offset <= leaf.end and cell.offset % _PAGE == 0 and cell.offset - end < _PAGE:
            data[end - leaf.offset : cell.offset - leaf.offset] = bytes(cell.offset - end)
        end = max(end, cell.offset + cell.nbytes)
    return bytes(data)


def _write_anew(rebuilt: RebuiltBlob) -> None:
    """Write the blob as a save with only the live cells would write it. Restores the header, padding and proof."""
    buffer = memoryview(bytearray(buffer_bytes(padded(rebuilt.ref.size))))
    writer = BlobWriter(buffer)
    for cell in rebuilt.cells:
        if cell.offset != place_of(writer, cell):
            if cell.offset < writer.end:
                continue  # entries of several dtypes share the cell
            return  # the blob also held dead cells
        put(writer, buffer, cell, rebuilt.part(cell.offset, cell.nbytes))
    try:
        name, size = writer.finish()
    except InvalidInput:
        return
    if (name, size) == (rebuilt.ref.hash, rebuilt.ref.size):
        rebuilt.data[:] = buffer[:size]
        rebuilt.take_proof(_proof_in(rebuilt.data, rebuilt.ref))


def place_of(writer: BlobWriter, cell: LiveCell) -> int:
    """Return the offset that a cell gets if it is written next."""
    return writer.end if cell.coded else writer.place(cell.nbytes)


def put(writer: BlobWriter, buffer: memoryview, cell: LiveCell, data: Buffer) -> int:
    """Write the stored bytes of a cell, and return their offset."""
    at = place_of(writer, cell)
    buffer[at : at + cell.nbytes] = data
    if cell.coded:
        writer.add_frame(cell.nbytes)
    else:
        writer.add(cell.dtype, cell.nbytes, cell.digest)
    return at


def _prove_anew(rebuilt: RebuiltBlob) -> None:
    """Recreate the proof from the data and the remaining leaf lengths. One of these lengths may be wrong."""
    data, size = rebuilt.data, rebuilt.ref.size
    try:
        place = DATA_OFFSET + sum(nbytes for _, nbytes in decode_header(bytes(data[:DATA_OFFSET]), size))
    except Refused:
        return
    leaves = as_leaves(data[place:])
    lengths = [leaf.nbytes for leaf in leaves]
    excess = sum(lengths) - place
    if excess:
        wrong = (number for number, leaf in enumerate(leaves) if leaf.end > place or not rebuilt.is_right(leaf))
        lengths[next(wrong, 0)] -= excess
    if min(lengths) < 1:
        return
    made, start = [], 0
    for nbytes in lengths:
        made.append((nbytes, cell_digest(rebuilt.part(start, nbytes))))
        start += nbytes
    proof = encode_proof(made)
    if proof_name(proof) == rebuilt.ref.hash:
        rebuilt.take_proof(proof)
